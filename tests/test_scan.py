"""Running sums, products and extremes: on the CPU against the reference, fused with what surrounds them, and compiled
for GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, compile_for, executables, share, undecided_share

import fusegraph as fg
from codegen import schedules
from codegen.scan import ScanSchedule
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import AttributeValueError, DTypeError
from fusegraph.lowering.base import Options
from fusegraph.ops.base import TABLE, Kind
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs, run


def cumsum_of(shape: tuple[int, ...], axis: int, dtype: str = "float32", reverse: bool = False, **how: Any) -> fg.Graph:
    g = fg.Graph(f"cumsum {shape} {axis} {dtype}")
    g.output(g.cumsum(g.tensor("x", shape, dtype, **how), axis, reverse), name="y")
    return g


SCANS = tuple(op.name for op in TABLE.values() if op.kind is Kind.SCAN)


def scan_of(op: str, shape: tuple[int, ...], axis: int, kind: str = "float32", **how: Any) -> fg.Graph:
    g = fg.Graph(f"{op} {shape} {axis} {kind}")
    g.output(getattr(g, op)(g.tensor("x", shape, kind), axis, **how), name="y")
    return g


def small_inputs(graph: fg.Graph, special: float = 0.0) -> dict[str, Any]:
    """Returns numbers whose long products neither overflow nor vanish, with a few special values."""
    given = random_inputs(graph, 2, special=special)
    for tensor in graph.inputs:
        x = given[tensor.name]
        if tensor.dtype.is_float:
            x[...] = np.where(np.abs(x) < 1e3, np.exp2(np.clip(np.nan_to_num(x.astype(np.float64)), -2, 2) / 8), x)
    return given


@pytest.mark.parametrize("op", SCANS)
def test_every_way_to_combine(op: str) -> None:
    """Rows of a thread, of a warp, of a block; whole and ragged, from either end; short ones of all dtypes."""
    shapes = [((3, 5), 1), ((40, 33), 0), ((5, 200), 1), ((2, 5000), 1)]
    graphs = [scan_of(op, s, a, "float32", reverse=r) for s, a in shapes for r in (False, True)]
    graphs += [scan_of(op, (6, 40), 1, d) for d in ("float64", "bfloat16", "float8_e4m3")]
    if op != "logcumsumexp":
        graphs += [scan_of(op, (6, 300), 1, d) for d in ("int8", "uint8", "int32", "int64")]
    graphs += [scan_of(op, (0, 4), 1), scan_of(op, (4, 0), 1), scan_of(op, (1,), 0)]
    results = check_all(graphs, inputs=small_inputs)
    assert undecided_share(results, graphs) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("op", SCANS)
def test_against_torch(op: str) -> None:
    """NaN, infinities of either sign and equal elements, in rows that several warps share."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=(12, 600)) * 2) / 2 + (op == "cumprod") * 1.0
    x[np.arange(1, 9), rng.integers(100, 400, 8)] = [np.nan, np.inf, -np.inf, np.nan, np.inf, 0.0, -0.0, -np.inf]
    x[3:5, 450:452] = [[np.inf, -np.inf], [np.nan, 1.0]]
    x[9:] = 1.0 if op == "cumprod" else [[-np.inf], [np.inf], [np.nan]]
    given = torch.from_numpy(x)
    if op in ("cummax", "cummin"):
        wanted, places = getattr(torch, op)(given, 1)
        for dtype in ("float32", "float64", "float16"):
            g = scan_of(f"{op}_index", (12, 600), 1, dtype)
            np.testing.assert_array_equal(g.compile("cpu")(x.astype(dtype)), places.numpy())
    else:
        wanted = getattr(torch, op)(given, 1)
    (made,) = executables([scan_of(op, x.shape, 1)])
    with np.errstate(all="ignore"):
        expected = wanted.numpy().astype(np.float32)
    np.testing.assert_allclose(run(made, {"x": x.astype(np.float32)})["y"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["cummax_index", "cummin_index"])
def test_where_extremes_are(op: str) -> None:
    dtypes = ("float32", "float64", "bfloat16", "int8", "uint8", "int32", "int64")
    graphs = [scan_of(op, shape, axis, d) for d in dtypes for shape, axis in (((5, 90), 1), ((33, 4), 0))]
    graphs += [scan_of(op, (3, 0), 1), scan_of(op, (1,), 0, "int64", dtype="int32")]
    check_all(graphs, inputs=lambda g: random_inputs(g, 1, special=0.05))


def around(dtype: str, axis: int, reverse: bool = False) -> fg.Graph:
    """Scans with pointwise nodes before and after, the operand read again, one operand per row, and indices."""
    g = fg.Graph("around", io_dtype=dtype)
    x, weight, row = g.tensor("x", (6, 72)), g.tensor("weight", (72,)), g.tensor("row", (6, 1))
    h = g.relu(x * weight + row)
    total = g.cumsum(h, axis, reverse)
    g.output(total / (g.cast(g.gen_index(x, axis=axis), "float32") + 1.0) - h * row, name="y")
    g.output(total, name="total")
    return g


def test_one_kernel_with_what_surrounds_it() -> None:
    graphs = [around("float32", 0), around("bfloat16", 1), around("float32", 1, True)]
    for g in graphs:
        (kernel,) = plan(g).kernels
        assert kernel.group.family == "scan"
    check_all(graphs)


@pytest.mark.slow
def test_strict_and_single_kernels() -> None:
    graphs = [around(d, a, r) for d in ("float32", "bfloat16") for a in (0, 1) for r in (False, True)]
    check_all(graphs, strict=True)
    check_all(graphs, fusion=False)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 31, 33, 1000, 4097, 65537])
def test_rows_of(length: int) -> None:
    graphs = [cumsum_of((3, length), 1, "float32", r) for r in (False, True)]
    graphs += [cumsum_of((length, 37), 0, "bfloat16"), cumsum_of((length,), 0, "int32")]
    check_all(graphs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float16", "float8_e4m3", "int8", "uint8", "int32", "int64"])
def test_dtypes_axes_and_layouts(dtype: str) -> None:
    shape = (3, 4, 5, 16)
    kinds = [(a, r, lay) for a in range(4) for r in (False, True) for lay in ("NCHW", "NHWC")]
    graphs = [cumsum_of(shape, a, dtype, r, layout=lay) for a, r, lay in kinds]
    graphs += [cumsum_of(shape, a, dtype, strides=(640, 80, 0, 2)) for a in (2, 3)]
    graphs += [cumsum_of((0, 4), 1, dtype), cumsum_of((4, 0), 1, dtype), cumsum_of((1,), 0, dtype)]
    check_all(graphs)


def test_special_values_stay_behind() -> None:
    """What comes before a NaN or infinity is not touched by it, whichever thread it is in."""
    (made,) = executables([cumsum_of((4, 3000), 1)])
    x = np.ones((4, 3000), np.float32)
    x[0, 1500], x[1, 100], x[1, 2999], x[2, 0], x[3, 7:9] = np.nan, np.inf, -np.inf, -np.inf, (np.inf, -np.inf)
    with np.errstate(all="ignore"):
        expected = np.cumsum(x.astype(np.float64), axis=1)
    np.testing.assert_array_equal(run(made, {"x": x})["y"], expected)


@pytest.mark.slow
def test_every_schedule_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for graph in (around("float32", 1), cumsum_of((5, 600), 1), cumsum_of((70, 40), 0), cumsum_of((3, 17), 1)):
        (kernel,) = plan(graph).kernels
        spec = kernel.group.lowered.spec
        others = [ScanSchedule(1, lanes, "uint32") for lanes in (1, 2, 32, 64, 256)]
        for schedule in (*schedules(spec), *others):
            monkeypatch.setattr("fusegraph.plan.best_schedule", lambda *_, s=schedule: s)
            made.append(CpuExecutable(graph, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph))
        assert result.ok, f"{executable.plan.kernels[0].choice.schedule}: {result}"


def test_two_of_them_are_two_kernels() -> None:
    g = fg.Graph("two")
    x = g.tensor("x", (4, 40))
    y = g.cumsum(g.cumsum(x, 1) * 0.5, 0)
    g.output(g.reduction(y, "max", 1), name="y")
    assert [k.group.family for k in plan(g).kernels] == ["scan", "scan", "rows"]
    check_all([g])


def test_only_the_shape_of_the_sum() -> None:
    g = fg.Graph("shape")
    g.output(g.gen_index(g.cumsum(g.tensor("x", (4, 40)), 0), axis=1), name="y")
    assert [k.group.family for k in plan(g).kernels] == ["pointwise"]
    check_all([g])


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"axis": 2}, AttributeValueError, "axis 2 is not one of the 2 axes"),
        ({"axis": (0,)}, AttributeValueError, "axis is an integer"),
        ({"reverse": 1}, AttributeValueError, "reverse is True or False"),
        ({"dtype": "int32"}, DTypeError, "cannot be stored as int32"),
    ],
)
def test_refused(how: dict[str, Any], error: type[Exception], text: str) -> None:
    g = fg.Graph("refused")
    x = g.tensor("x", (3, 4))
    for op in ("cumsum", "cumprod"):
        with pytest.raises(error, match=text):
            getattr(g, op)(x, **how)


def test_dtypes_that_are_refused() -> None:
    g = fg.Graph("refused")
    with pytest.raises(DTypeError, match="logcumsumexp takes floats, got int32"):
        g.logcumsumexp(g.tensor("n", (3,), "int32"))
    with pytest.raises(DTypeError, match="max does not take bool"):
        g.cummax(g.tensor("b", (3,), "bool"))
    with pytest.raises(DTypeError, match="cummax_index is an int32 or int64"):
        g.cummax_index(g.tensor("x", (3,)), dtype="int8")


def test_golden_source() -> None:
    (kernel,) = plan(cumsum_of((64, 10000), 1, "bfloat16")).kernels
    check_golden("cumsum", kernel.source.code)


def gpu_graphs() -> list[fg.Graph]:
    graphs = [cumsum_of((64, n), 1, d, r) for n in (100, 10000) for d in ("float32", "int8") for r in (False, True)]
    graphs += [scan_of(op, shape, 1) for op in SCANS[1:] for shape in ((64, 100), (64, 10000))]
    graphs += [scan_of("cumprod", (9, 900), 1, "float64"), scan_of("cummin_index", (9, 900), 1, "int32")]
    return [*graphs, cumsum_of((1000, 640), 0), *(around("bfloat16", a) for a in (0, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(arch: str) -> None:
    assert [k.name for k in compile_for(arch, share(arch, gpu_graphs())) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs())

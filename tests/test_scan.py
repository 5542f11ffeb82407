"""Running sums: on the CPU against the reference, fused with what surrounds them, and compiled for GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, compile_for, executables, share

import fusegraph as fg
from codegen import schedules
from codegen.scan import ScanSchedule
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import AttributeValueError, DTypeError
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs, run


def cumsum_of(shape: tuple[int, ...], axis: int, dtype: str = "float32", reverse: bool = False, **how: Any) -> fg.Graph:
    g = fg.Graph(f"cumsum {shape} {axis} {dtype}")
    g.output(g.cumsum(g.tensor("x", shape, dtype, **how), axis, reverse), name="y")
    return g


def around(dtype: str, axis: int, reverse: bool = False) -> fg.Graph:
    """Pointwise before and after, the operand again after, something once a row, positions."""
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
    with pytest.raises(error, match=text):
        g.cumsum(g.tensor("x", (3, 4)), **how)


def test_golden_source() -> None:
    (kernel,) = plan(cumsum_of((64, 10000), 1, "bfloat16")).kernels
    check_golden("cumsum", kernel.source.code)


def gpu_graphs() -> list[fg.Graph]:
    graphs = [cumsum_of((64, n), 1, d, r) for n in (100, 10000) for d in ("float32", "int8") for r in (False, True)]
    return [*graphs, cumsum_of((1000, 640), 0), *(around("bfloat16", a) for a in (0, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(arch: str) -> None:
    assert [k.name for k in compile_for(arch, share(arch, gpu_graphs())) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs())

"""Reductions and what is fused with them: on the CPU against the reference, and compiled for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu, executables, quick, undecided_share

import fusegraph as fg
from codegen import best_schedule, render, schedules
from codegen.rows.schedule import RowsSchedule
from codegen.spec import RowsSpec
from codegen.target import target
from fusegraph import dtypes as dt
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.lowering.base import Options
from fusegraph.ops.modes import COMBINED, COMPOSED, MODES
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs, run
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

LENGTHS = (33, 1, 2, 31, 1000, 4097, 65537)


def reductions_of(
    shape: tuple[int, ...], axes: Any, dtype: str = "float32", modes: Any = COMBINED, keepdims: bool = True, **how: Any
) -> fg.Graph:
    """Builds all reductions that a dtype supports, of one tensor."""
    g = fg.Graph(f"reductions {shape} {axes} {dtype}")
    x = g.tensor("x", shape, dtype, **how)
    for mode in modes:
        if x.dtype.is_float or not MODES[mode].floats:
            g.output(g.reduction(x, mode, axes, keepdims), name=f"y {mode}")
    return g


def composed_of(
    shape: tuple[int, ...], axes: Any, dtype: str = "float32", keepdims: bool = True, **how: Any
) -> fg.Graph:
    """Builds all reductions that are composed of others, of one tensor."""
    g = fg.Graph(f"composed {shape} {axes} {dtype}")
    x = g.tensor("x", shape, dtype, **how)
    for mode in COMPOSED:
        if x.dtype.is_float or mode in ("any", "all") or (mode != "var" and not x.dtype.is_bool):
            extra = {"correction": 1} if mode == "var" else {}
            if 0 not in shape or mode not in ("argmin", "argmax"):
                g.output(g.reduction(x, mode, axes, keepdims, **extra), name=f"y {mode}")
    return g


def softmax_of(shape: tuple[int, ...], axis: int, dtype: str = "float32", **how: Any) -> fg.Graph:
    g = fg.Graph(f"softmax {shape} {axis} {dtype}")
    x = g.tensor("x", shape, dtype, **how)
    e = g.exp(x - g.reduction(x, "max", axis))
    g.output(e / g.reduction(e, "add", axis), name="y")
    return g


def one_kernel(graph: fg.Graph) -> Any:
    (kernel,) = plan(graph).kernels
    assert kernel.group.family == "rows"
    return kernel


@pytest.mark.slow
def test_a_row_of_a_million() -> None:
    check_all(millions())


def millions() -> list[fg.Graph]:
    """Builds reductions of rows whose length is prime and larger than any kernel keeps on chip."""
    length = 1_000_003
    return [
        reductions_of((1, length), -1, modes=("add", "max", "avg")),
        composed_of((1, length), -1, "bfloat16"),
        softmax_of((1, length), 1),
    ]


@pytest.mark.parametrize("length", quick(*LENGTHS))
def test_rows_of(length: int) -> None:
    graphs = [
        reductions_of((3, length), -1, modes=("add", "max", "norm2", "avg")),
        reductions_of((length, 5), 0, modes=("add", "min")),
        softmax_of((2, length), 1),
        softmax_of((2, length), 1, "bfloat16"),
    ]
    for graph in graphs[:1] + graphs[2:] if length > 1 else ():  # long columns are split; one element is pointwise
        one_kernel(graph)
    results = check_all(graphs)
    assert undecided_share(results, graphs) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [d for d in dt.ALL if not d.is_bool], ids=str)
def test_every_dtype_and_axis(dtype: dt.DType) -> None:
    shape = (3, 4, 5, 16)
    every = [None, -1, 0, 1, (1, 2), (0, 2), (0, 1), (2, 3), (0, 3), ()]
    graphs = [reductions_of(shape, axes, dtype.name) for axes in every]
    graphs += [reductions_of(shape, axes, dtype.name, keepdims=False) for axes in every]
    # Products of 16 numbers overflow float16: then nothing is known of them.
    results = check_all(graphs)
    assert undecided_share(results, graphs) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_short_rows_across(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Blocks have many of them, also where rows beside each other are few: those of several groups."""
    monkeypatch.setattr("codegen.rows.across_schedule.ENOUGH_BLOCKS", 1 / 132)
    shapes = (((2, 40, 33), 0), ((301, 3, 24), 1), ((77, 8, 16), 1), ((40, 2, 9), 1), ((1, 513), 0), ((5, 1000), 0))
    graphs = [reductions_of(shape, axis, dtype) for shape, axis in shapes]
    if dtype != "int8":
        graphs += [softmax_of(shape, axis, dtype) for shape, axis in shapes]
    assert any(one_kernel(g).choice.schedule.threads >= 256 for g in graphs)
    check_all(graphs)


def test_few_elements_are_read_at_once() -> None:
    """Every block has enough threads: there are many."""
    for shape, axis in (((2, 1408, 4224), 0), ((64000, 8, 16), 1), ((6400, 8, 512), 1)):
        kernel = one_kernel(reductions_of(shape, axis, "bfloat16", ("avg",)))
        best = best_schedule(kernel.group.lowered.spec, target("h200"))
        assert isinstance(best, RowsSchedule)
        assert best.across
        assert best.threads >= 128


def test_one_kernel_normalizes_short_rows() -> None:
    assert len(plan(softmax_of((4, 1024, 4096), 0, "bfloat16")).kernels) == 1


@pytest.mark.slow
def test_layouts() -> None:
    shape = (2, 8, 4, 16)
    strides = [(1024, 128, 32, 2), (512, 1, 128, 8), (1, 2, 16, 64), (512, 64, 0, 1), (640, 80, 20, 1)]
    axes = (-1, 1, (2, 3), (0, 2, 3), (1, 3))
    check_all([reductions_of(shape, a, strides=s, modes=("add", "max")) for s in strides for a in axes])
    kinds = [(s, a, d) for s in strides[:3] for a in (-1, 1) for d in ("float32", "float16")]
    check_all([softmax_of(shape, a, d, strides=s) for s, a, d in kinds])


@pytest.mark.slow
@pytest.mark.parametrize("length", [33, 4097, 65537])
def test_composed_of(length: int) -> None:
    graphs = [composed_of((3, length), -1), composed_of((length, 5), 0), composed_of((3, length), -1, "int8")]
    one_kernel(graphs[0])
    check_all(graphs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [dt.float64, dt.bfloat16, dt.float8_e4m3, dt.uint8, dt.int64, dt.bool_], ids=str)
def test_composed_of_every_dtype(dtype: dt.DType) -> None:
    graphs = [composed_of((3, 4, 5, 16), axes, dtype.name) for axes in (None, 0, (1, 2), (0, 3))]
    graphs += [composed_of((3, 4, 5, 16), axes, dtype.name, keepdims=False, layout="NHWC") for axes in (1, (2, 3))]
    check_all([*graphs, composed_of((3, 0), 1, dtype.name)])


def test_positions_and_truths() -> None:
    """The first of equals, NaN before all; NaN is true; ties of zeros of both signs."""
    g = fg.Graph("positions")
    x = g.tensor("x", (5, 40))
    for mode in ("argmin", "argmax", "any", "all", "mul_no_zeros"):
        g.output(g.reduction(x, mode, 1, keepdims=False), name=mode)
    g.output(g.reduction(x, "argmax", None, False, dtype="int32"), name="of all")
    g.output(g.reduction(x, "var", 1, correction=1), name="var")
    g.output(g.reduction(x, "var", 1, correction=40), name="over zero")
    (executable,) = executables([g])
    values = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    values[0, [7, 30]], values[1, [3, 9]], values[2], values[3], values[4, 20:] = 5, np.nan, 0, -0.0, 0
    values[2, 5] = -0.0
    y = run(executable, {"x": values})
    with np.errstate(all="ignore"):
        assert np.array_equal(y["argmin"], values.argmin(1))
        assert np.array_equal(y["argmax"], values.argmax(1))
        assert np.array_equal(y["any"], values.any(1))
        assert np.array_equal(y["all"], values.all(1))
        assert (y["argmin"].dtype, y["of all"].dtype, y["any"].dtype) == (np.int64, np.int32, np.bool_)
        assert y["of all"] == values.argmax() == 43
        np.testing.assert_allclose(y["mul_no_zeros"][[2, 3]], 1)
        np.testing.assert_allclose(y["mul_no_zeros"][4], values[4, :20].prod(), rtol=1e-5)
        np.testing.assert_allclose(y["var"][:, 0], values.astype(np.float64).var(1, ddof=1), rtol=1e-5)
        assert np.array_equal(y["over zero"][[0, 2], 0], [np.inf, np.nan], equal_nan=True)


def test_special_values() -> None:
    graphs = [
        composed_of((40, 33), -1),
        reductions_of((40, 33), -1),
        softmax_of((40, 33), -1),
    ]
    check_all(graphs, inputs=lambda g: random_inputs(g, 3, special=0.03))


def test_infinite_rows() -> None:
    """As NumPy has it: the maximum of NaN is NaN, a row of minus infinity has no softmax."""
    (executable,) = executables([softmax_of((4, 64), 1)])
    x = np.zeros((4, 64), np.float32)
    x[0], x[1, 3], x[2, :63], x[3] = -np.inf, np.nan, -np.inf, 3e38
    (y,) = run(executable, {"x": x}).values()
    assert np.isnan(y[:2]).all()
    assert y[2, 63] == 1
    assert not y[2, :63].any()
    assert np.array_equal(y[3], np.full(64, 1 / 64, np.float32))


def test_no_elements() -> None:
    graphs = [
        reductions_of((3, 0), 1, modes=("add", "mul", "avg", "norm1", "norm2")),
        reductions_of((0, 3), 1),
        reductions_of((0, 3), 0, modes=("add", "mul")),
        softmax_of((0, 8), 1),
    ]
    check_all(graphs)
    for mode in ("min", "max", "amax"):
        with pytest.raises(ShapeError, match=f"{mode} of no elements: axis 1 has size 0"):
            reductions_of((3, 0), 1, modes=(mode,))


def test_large_offsets() -> None:
    """The variance of numbers of mean 1e4 and spread 1, about the mean: as exact as float32 can be."""
    g = fg.Graph("variance")
    x = g.tensor("x", (4, 5000))
    centred = x - g.reduction(x, "avg", 1)
    g.output(g.reduction(centred * centred, "avg", 1), name="variance")
    one_kernel(g)
    (executable,) = executables([g])
    values = (np.random.default_rng(0).standard_normal((4, 5000)) + 1e4).astype(np.float32)
    (found,) = run(executable, {"x": values}).values()
    expected = values.astype(np.float64).var(axis=1, keepdims=True)
    assert np.abs(found / expected - 1).max() < 1e-5


def around(g: fg.Graph) -> None:
    """Reductions with pointwise nodes before, between and after, and results of every kind."""
    x, bias, gate = g.tensor("x", (6, 40)), g.tensor("bias", (40,)), g.tensor("gate", (6, 40))
    scale = g.tensor("scale", (6, 1))
    h = g.output(x * scale + bias, name="h")
    mean = g.output(g.reduction(h, "avg", -1), name="mean")
    centred = h - mean
    spread = g.sqrt(g.reduction(centred * centred, "avg", -1) + 1e-5)
    g.output(g.gelu(centred / spread) * gate, name="y")


def dropped(g: fg.Graph) -> None:
    """Reductions without keepdims, and pointwise nodes on them."""
    x, weight = g.tensor("x", (6, 7, 40)), g.tensor("weight", (6, 40))
    total = g.reduction(g.relu(x), "add", 1, keepdims=False)
    g.output(g.sigmoid(total * weight), name="y")
    g.output(g.reduction(g.relu(x), "max", 1, keepdims=False) - total, name="z")


def leading(g: fg.Graph) -> None:
    """Reductions without keepdims of leading axes, put back by broadcasting."""
    x = g.tensor("x", (50, 6, 8))
    g.output(x - g.reduction(x, "avg", 0, keepdims=False), name="y")


def positions(g: fg.Graph) -> None:
    """Reductions of indices along and across the rows."""
    x = g.tensor("x", (5, 64))
    causal = g.cmp_ge(g.gen_index(x, axis=0) * 12, g.gen_index(x, axis=1))
    masked = g.binary_select(x, -1e30, causal)
    g.output(g.reduction(g.exp(masked - g.reduction(masked, "max", 1)), "add", 1), name="y")


def spaces(g: fg.Graph) -> None:
    """Reductions along other axes, or of another shape, are other kernels."""
    x = g.tensor("x", (6, 40))
    g.output(g.reduction(x, "add", 0) * 2.0, name="columns")
    g.output(g.reduction(x, "add", 1) * 2.0, name="rows")


FUSED = {around: 1, dropped: 1, leading: 1, positions: 1, spaces: 2}


def built(make: Any, io: str = "float32") -> fg.Graph:
    g = fg.Graph(make.__name__, io_dtype=io)
    make(g)
    return g


@pytest.mark.slow
def test_what_is_fused() -> None:
    graphs = [built(make) for make in FUSED]
    assert [len(plan(g).kernels) for g in graphs] == list(FUSED.values())
    check_all(graphs + [built(make, "bfloat16") for make in FUSED])
    check_all(graphs, strict=True)
    check_all(graphs, fusion=False)


@pytest.mark.parametrize("length", [4099, 7051, 12289])
def test_threads_read_few_weights_one_by_one(length: int) -> None:
    """Rows that begin anywhere are read an element at a time: with weights, by more threads than without."""

    def lanes(graph: fg.Graph) -> int:
        (kernel,) = plan(graph, Options(target=target("h200"))).kernels
        found = best_schedule(kernel.group.lowered.spec, target("h200"))
        assert isinstance(found, RowsSchedule)
        assert found.vector == 1
        return found.lanes * found.cluster

    g = fg.Graph("layer norm")
    x, scale, bias = g.tensor("x", (832, length)), g.tensor("scale", (1, length)), g.tensor("bias", (1, length))
    g.output(g.layernorm(x, scale, bias, axes=(1,)), name="y")
    assert lanes(g) > lanes(softmax_of((832, length), 1))


@pytest.mark.slow
def test_every_schedule_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forms for rows of every kind, the ones that are best for others included."""
    graphs = [softmax_of((5, 600), 1), softmax_of((5, 96), 1, "bfloat16"), softmax_of((70, 40), 0), built(around)]
    graphs += [softmax_of((3, 9000), 1, "bfloat16"), softmax_of((3, 75, 24), 1, "float16")]
    tried, made = set(), []
    for graph in graphs:
        (kernel,) = plan(graph).kernels
        spec = kernel.group.lowered.spec
        assert isinstance(spec, RowsSpec)
        for schedule in dict.fromkeys((*schedules(spec, target("sm_90a")), *_others(spec))):
            tried.add((schedule.form, schedule.across, schedule.cluster > 1))
            monkeypatch.setattr("fusegraph.plan.best_schedule", lambda *_, s=schedule: s)
            made.append(CpuExecutable(graph, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph))
        assert result.ok, f"{executable.plan.kernels[0].choice.schedule}: {result}"
    forms = {(form, False, cluster) for form in ("registers", "shared", "memory") for cluster in (False, True)}
    assert tried == forms | {(form, True, cluster) for form in ("registers", "memory") for cluster in (False, True)}


def _others(spec: RowsSpec) -> list[RowsSchedule]:
    best = best_schedule(spec)
    assert isinstance(best, RowsSchedule)
    if best.across:
        one, few = replace(best, vector=1, rows=32, lanes=1, form="memory"), replace(best, rows=best.vector, lanes=32)
        some = [replace(few, form=form, cluster=c) for form in ("registers", "memory") for c in (2, 8)]
        some += [replace(best, form="memory", cluster=2), replace(one, cluster=4)]
        return [one, few, replace(few, form="memory"), replace(one, across=False, lanes=32, rows=4), *some]
    forms = [replace(best, form=form, lanes=64, rows=1, cluster=c) for form in ("shared", "memory") for c in (1, 2, 8)]
    return [*forms, replace(best, form="registers", lanes=64, rows=1, cluster=4), replace(best, vector=1, lanes=1)]


def test_reads_and_writes_each_element_once() -> None:
    """The bytes of a fused kernel, and the ones saved against a kernel a node."""
    kernel = one_kernel(built(around))
    assert sum(t.nbytes for t in kernel.arguments) == 4 * (4 * 6 * 40 + 40 + 6 + 6)


# ---- what is refused


@pytest.mark.parametrize(
    ("dtype", "how", "error", "text"),
    [
        ("float32", {"mode": "median"}, AttributeValueError, "mode is 'add', 'mul', 'min'"),
        ("float32", {"axes": 2}, AttributeValueError, "axis 2 is not one of the 2 axes"),
        ("float32", {"axes": (0, -2)}, AttributeValueError, "name an axis twice"),
        ("float32", {"axes": "x"}, AttributeValueError, "axes is an integer, or a sequence of these, or None, got"),
        ("float32", {"axes": (True,)}, AttributeValueError, "axes is an integer"),
        ("float32", {"keepdims": 1}, AttributeValueError, "keepdims is True or False"),
        ("bool", {}, DTypeError, "cast to int32 to count"),
        ("float32", {"mode": "argmax", "axes": ()}, AttributeValueError, "argmax needs an axis"),
        ("float32", {"mode": "argmax", "dtype": "int8"}, DTypeError, "argmax is an int32 or int64"),
        ("float32", {"mode": "any", "dtype": "int8"}, DTypeError, "any is True or False"),
        ("float32", {"mode": "avg", "correction": 1}, AttributeValueError, "correction is for mode var"),
        ("float32", {"mode": "var", "correction": "1"}, AttributeValueError, "correction is a number"),
        ("int32", {"mode": "var"}, DTypeError, "cast to a float"),
        ("int32", {"mode": "avg"}, DTypeError, "cast to a float"),
        ("int32", {"dtype": "float32"}, DTypeError, "cannot be stored as float32"),
        ("int8", {"dtype": "int8"}, DTypeError, "is summed in 32 or 64 bits"),
        ("int8", {"mode": "max", "dtype": "int32"}, DTypeError, "cast the result to int32"),
    ],
)
def test_refused(dtype: str, how: Mapping[str, Any], error: type[Exception], text: str) -> None:
    g = fg.Graph("refused")
    with pytest.raises(error, match=text):
        g.reduction(g.tensor("x", (3, 4), dtype), **how)


def test_result_dtypes() -> None:
    g = fg.Graph("dtypes")
    found = {}
    for dtype in ("float8_e4m3", "bfloat16", "float64", "int8", "uint8", "int64"):
        x = g.tensor(dtype, (3, 4), dtype)
        found[dtype] = [g.reduction(x, mode).dtype.name for mode in ("add", "max")]
    assert found == {
        "float8_e4m3": ["float32", "float8_e4m3"],
        "bfloat16": ["bfloat16", "bfloat16"],
        "float64": ["float64", "float64"],
        "int8": ["int32", "int8"],
        "uint8": ["int32", "uint8"],
        "int64": ["int64", "int64"],
    }


def test_integers_are_exact() -> None:
    g = fg.Graph("exact")
    x = g.tensor("x", (2, 70), "int32")
    for mode, dtype in (("add", None), ("add", "int64"), ("mul", None), ("norm1", "int64"), ("amax", None)):
        g.output(g.reduction(x, mode, -1, dtype=dtype), name=f"{mode} {dtype}")
    (executable,) = executables([g])
    values = np.random.default_rng(1).integers(-(2**31), 2**31, (2, 70)).astype(np.int32)
    found = run(executable, {"x": values})
    wide = values.astype(np.int64)
    assert np.array_equal(found["add None"], wide.sum(-1, keepdims=True).astype(np.int32))
    assert np.array_equal(found["add int64"], wide.sum(-1, keepdims=True))
    assert np.array_equal(found["mul None"], wide.prod(-1, keepdims=True).astype(np.int32))
    assert np.array_equal(found["norm1 int64"], np.abs(wide).sum(-1, keepdims=True))
    assert np.array_equal(found["amax None"], np.abs(values).max(-1, keepdims=True))


# ---- compiled for GPUs


def gpu_graphs() -> list[fg.Graph]:
    """Builds graphs whose rows take kernels of every form."""
    graphs = [softmax_of((4, n), 1, d) for n in (7, 1000, 65536) for d in ("float32", "bfloat16")]
    graphs += [
        reductions_of((8, 512, 96), axes, d, ("add", "avg", "amax"))
        for axes in (-1, 1, (0, 1))
        for d in ("float32", "int8")
    ]
    return graphs + [built(make, "bfloat16") for make in FUSED]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(name: str) -> None:
    """The schedules that are thought to be the best for each architecture."""
    sources = []
    for graph in gpu_graphs():
        for kernel in plan(graph).kernels:
            spec = kernel.group.lowered.spec
            sources += [render(spec, schedule) for schedule in schedules(spec, target(name))[:1]]
    compiled = nvrtc.compile_kernels(sources, name, cache=default_cache())
    assert [k.name for k in compiled if k.spill_bytes] == []


def test_renders_for_every_architecture() -> None:
    """Long rows are shared by a cluster where there are clusters, and read again where there are none."""
    spec = one_kernel(softmax_of((64, 40000), 1, "float64")).group.lowered.spec
    forms = {}
    for name in ("sm_80", "sm_90a", "sm_120"):
        for schedule in schedules(spec, target(name)):
            source = render(spec, schedule)
            assert source.dynamic_shared_bytes <= target(name).arch.shared_bytes_per_block
            assert source.grid[0] % source.cluster[0] == 0
        best = best_schedule(spec, target(name))
        assert isinstance(best, RowsSchedule)
        forms[name] = best.form, best.cluster > 1
    assert forms == {"sm_80": ("memory", False), "sm_90a": ("registers", True), "sm_120": ("registers", True)}


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs() + millions())

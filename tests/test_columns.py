"""Columns that the kernel of their rows reduces as well: norms' gradients with those of their weights, and the like."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import QUICK_ARCHS, check_all, check_on_gpu, executables

import fusegraph as fg
from codegen import best_schedule, render, schedules
from codegen.arch import DEFAULT_SHARED_BYTES_PER_BLOCK
from codegen.dtypes import SIZE_OF
from codegen.rows.schedule import RowsSchedule
from codegen.rows.space import normalize
from codegen.spec import RowsSpec
from codegen.target import PORTABLE, target
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering import rows
from fusegraph.lowering.base import Options
from fusegraph.ops.base import Role
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import check_executable, random_inputs, run
from fusegraph.report.explain import describe, explain_text
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for 3 SMs and partial results of single rows, so that shapes stay small."""
    few = replace(PORTABLE, planned_as=replace(PORTABLE.planned, sms=3))
    defaults = tuple(few if value is PORTABLE else value for value in Options.__init__.__defaults__ or ())
    assert few in defaults
    monkeypatch.setattr(Options.__init__, "__defaults__", defaults)
    monkeypatch.setattr(rows, "LEAST_ROWS", 1)


def layernorm_backward(shape: tuple[int, ...], dtype: str = "float32", scale: Any = None, **how: Any) -> fg.Graph:
    g = fg.Graph(f"layernorm_backward {shape} {dtype}", io_dtype=dtype)
    loss, x = g.tensor("loss", shape, **how), g.tensor("x", shape, **how)
    kept = "float64" if dtype == "float64" else "float32"
    mean, inverse = (g.tensor(name, (*shape[:-1], 1), kept) for name in ("mean", "inverse"))
    own = g.tensor("scale", shape[-1:] if scale is None else scale)
    for name, t in zip(("dx", "dscale", "dbias"), g.layernorm_backward(loss, x, own, mean, inverse)):
        g.output(t, name=name)
    return g


def rmsnorm_backward(shape: tuple[int, ...], dtype: str = "float32") -> fg.Graph:
    """RMS norm's gradients, with the gradient of a dropout before and of a bias after."""
    g = fg.Graph(f"rmsnorm_backward {shape} {dtype}", io_dtype=dtype)
    loss, x, scale = g.tensor("loss", shape), g.tensor("x", shape), g.tensor("scale", shape[-1:])
    inverse = g.tensor("inverse", (*shape[:-1], 1), "float32")
    dx, dscale = g.rmsnorm_backward(g.dropout(loss, 3, 0, probability=0.25), x, scale, inverse)
    g.output(dx, name="dx")
    g.output(dscale, name="dscale")
    g.output(g.reduction(dx, "add", tuple(range(len(shape) - 1)), keepdims=False), name="dbias")
    return g


def softmax_backward(shape: tuple[int, ...], dtype: str = "float32") -> fg.Graph:
    """Softmax's gradient, a column sum of its result, and row sums."""
    g = fg.Graph(f"softmax_backward {shape} {dtype}", io_dtype=dtype)
    dx = g.output(g.softmax_backward(g.tensor("loss", shape), g.tensor("y", shape)), name="dx")
    g.output(g.reduction(dx, "add", 0), name="dbias")
    g.output(g.reduction(dx, "amax", 1), name="largest")
    return g


def joined_bias(shape: tuple[int, ...], dtype: str = "float32", *, keepdims: bool = True) -> fg.Graph:
    """A norm's gradient that is a gradient of a linear layer's results, which are a matrix there."""
    g = fg.Graph(f"joined_bias {shape} {dtype} {keepdims}", io_dtype=dtype)
    dx = g.output(g.softmax_backward(g.tensor("loss", shape), g.tensor("y", shape)), name="dx")
    rows = g.reshape(dx, (prod(shape[:-1]), shape[-1]))
    g.output(g.reduction(rows, "add", [0], keepdims=keepdims), name="dbias")
    g.output(g.reduction(rows, "avg", [0], keepdims=keepdims), name="average")
    return g


def statistics(shape: tuple[int, ...], dtype: str = "float32") -> fg.Graph:
    """Column reductions of all modes beside row reductions, and ops on their results."""
    g = fg.Graph(f"statistics {shape} {dtype}", io_dtype=dtype)
    x = g.tensor("x", shape)
    for mode in ("add", "max", "min", "norm2", "avg", "amax", "mul"):
        g.output(g.sigmoid(g.reduction(x, mode, 0)), name=mode)
    g.output(x - g.reduction(x, "max", 1), name="y")
    return g


def integers(shape: tuple[int, ...], dtype: str) -> fg.Graph:
    g = fg.Graph(f"integers {shape} {dtype}")
    x = g.tensor("x", shape, dtype)
    for mode in ("add", "max", "mul"):
        for axis in (0, 1):
            g.output(g.reduction(x, mode, axis), name=f"{mode} {axis}")
    return g


def random_graph(seed: int) -> fg.Graph:
    """Returns a graph of row and column reductions of values computed from operands of every shape and from the rows'
    results, in any order.
    """
    rng = random.Random(seed)
    rank = rng.randint(2, 4)
    shape = [rng.choice((1, 2, 3, 5, 8, 24)) for _ in range(rank)]
    axes = sorted(rng.sample(range(rank), rng.randint(1, rank - 1)))
    others = [d for d in range(rank) if d not in axes]
    columns = sorted(rng.sample(others, rng.randint(1, len(others))))
    shape[rng.choice(axes)] = rng.choice((8, 33, 64, 100, 260))
    shape[rng.choice(columns)] = rng.choice((7, 16, 40))
    order = [*others, *axes] if rng.random() < 0.7 else range(rank)
    steps, strides = 1, [0] * rank
    for d in reversed(order):
        strides[d], steps = steps, steps * (shape[d] + (rng.random() < 0.1))
    g = fg.Graph(f"random {seed}", io_dtype=rng.choice(("float32", "bfloat16", "float16", "float64")))
    values = [g.tensor("x", shape, strides=strides), g.tensor("z", shape, strides=strides)]
    small = [
        g.tensor(f"s{k}", [n if d in kept else 1 for d, n in enumerate(shape)]) for k, kept in enumerate((axes, others))
    ]
    for number in range(rng.randint(4, 9)):
        value = rng.choice(values)
        kind = rng.randint(0, 4)
        if kind == 0:
            values.append(g.tanh(value) * rng.choice([*values, *small]))
        elif kind == 1:
            values.append(value - g.reduction(g.sigmoid(value), rng.choice(("avg", "max", "norm2")), axes))
        elif kind == 2:
            g.output(g.reduction(value, rng.choice(("add", "amax")), axes), name=f"row {number}")
        else:
            mode = rng.choice(("add", "add", "max", "min", "norm1", "norm2", "avg"))
            g.output(g.reduction(value, mode, columns, keepdims=rng.random() < 0.7), name=f"column {number}")
    g.output(values[-1] + 1.0, name="y")
    return g


def walk(graph: fg.Graph) -> RowsSpec:
    """Returns the spec of the kernel that reduces rows and columns; the other kernel combines the partial results."""
    kernels = plan(graph).kernels
    assert len(kernels) == 2, [[n.name for n in k.group.nodes] for k in kernels]
    spec = kernels[0].group.lowered.spec
    assert isinstance(spec, RowsSpec)
    assert spec.walk is not None
    return spec


@pytest.mark.usefixtures("small")
def test_gradients() -> None:
    """What is large is read once, and the second kernel reads what is small."""
    g = layernorm_backward((61, 40), "bfloat16")
    walk(g)
    first, second = plan(g).kernels
    assert [t.name for t in (*first.arguments, *second.arguments) if t.size == 61 * 40] == ["loss", "x", "dx"]
    (made,) = executables([g])
    inputs = random_inputs(g, 5)
    result = check_executable(made, inputs)
    assert result.ok, result
    # Sums are made in one order, whichever thread is first.
    again, found = run(made, inputs), run(made, inputs)
    assert all(np.array_equal(again[name], found[name]) for name in found)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_shapes_and_dtypes(dtype: str) -> None:
    shapes = [(11, 24), (7, 33), (2, 1000), (64, 2), (5, 3, 600)]
    graphs = [layernorm_backward(s, dtype) for s in shapes]
    graphs += [rmsnorm_backward((17, 130), dtype), softmax_backward((23, 72), dtype), statistics((19, 37), dtype)]
    for g in graphs:
        walk(g)
    check_all(graphs)
    check_all(graphs[-3:], strict=True)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_layouts() -> None:
    """Columns along one of several dimensions; rows that lie apart, turned, or repeated; integers."""
    graphs = [
        layernorm_backward((3, 8, 4, 24), "bfloat16", (3, 1, 1, 24)),
        layernorm_backward((4, 6, 40), scale=(6, 40)),
        layernorm_backward((6, 5, 16), strides=(200, 24, 1)),
        layernorm_backward((6, 5, 16), strides=(16, 96, 1)),
        layernorm_backward((30, 16), strides=(0, 1)),
        layernorm_backward((30, 8), strides=(16, 2)),
        integers((40, 70), "int8"),
        integers((40, 70), "int64"),
    ]
    for g in graphs:
        walk(g)
    check_all(graphs)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_random_graphs() -> None:
    graphs = [random_graph(seed) for seed in range(24)]
    walked = [g for g in graphs if any(getattr(k.group.lowered.spec, "walk", None) for k in plan(g).kernels)]
    assert len(walked) >= 12
    check_all(walked)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_special_values() -> None:
    graphs = [layernorm_backward((13, 40)), statistics((13, 40))]
    for g in graphs:
        walk(g)
    check_all(graphs, inputs=lambda g: random_inputs(g, 2, special=0.02))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_every_schedule_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forms, rows of a warp's lanes and of several warps, alone and side by side."""
    graphs = [layernorm_backward((70, 1000), "bfloat16"), rmsnorm_backward((70, 96)), softmax_backward((70, 203))]
    made, tried = [], set()
    for g in graphs:
        spec = walk(g)
        (best, *more) = schedules(spec, target("sm_90a"))
        assert isinstance(best, RowsSchedule)
        alone = replace(best, rows=1, lanes=max(best.lanes, 64))
        others = [replace(alone, form=form, stages=n) for form, n in (("shared", 5), ("memory", 1), ("registers", 1))]
        if g is graphs[0]:
            others.append(replace(alone, itype="uint64"))
        for schedule in dict.fromkeys((best, *more[:5], *(others if best.stages > 1 else ()))):
            assert isinstance(schedule, RowsSchedule)
            tried.add((schedule.form, schedule.stages > 1, schedule.lanes > 32, schedule.rows > 1))
            monkeypatch.setattr(
                "fusegraph.plan.best_schedule", lambda s, a, x=schedule: x if s.walk else best_schedule(s, a)
            )
            made.append(CpuExecutable(g, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph))
        assert result.ok, f"{executable.plan.kernels[0].choice.schedule}: {result}"
    assert {(form, ahead) for form, ahead, *_ in tried} >= {("registers", True), ("registers", False), ("shared", True)}
    assert {(several, beside) for *_, several, beside in tried} >= {(False, True), (True, True), (True, False)}


def groupnorm_backward(shape: tuple[int, ...], groups: int, dtype: str = "float32", layout: str = "NCHW") -> fg.Graph:
    g = fg.Graph(f"groupnorm_backward {shape} {dtype}", io_dtype=dtype)
    loss, x = (g.tensor(name, shape, layout=layout) for name in ("loss", "x"))
    scale = g.tensor("scale", (1, shape[1], *(1 for _ in shape[2:])))
    kept = [g.tensor(name, (shape[0], groups, *(1 for _ in shape[2:])), "float32") for name in ("mean", "inverse")]
    for name, t in zip(("dx", "dscale", "dbias"), g.groupnorm_backward(loss, x, scale, *kept, groups=groups)):
        g.output(t, name=name)
    return g


def channels(shape: tuple[int, ...], dtype: str, keepdims: bool) -> fg.Graph:
    """Returns reductions of segments that are stored as they are, beside a row's, and of segments whose results are
    used further.
    """
    g = fg.Graph(f"channels {shape} {dtype} {keepdims}", io_dtype=dtype)
    x = g.tensor("x", shape)
    centred = x - g.reduction(x, "avg", (1, 2, 3))
    for mode in ("add", "max", "norm1"):
        g.output(g.reduction(centred, mode, (2, 3), keepdims), name=mode)
    g.output(g.reduction(g.sigmoid(centred), "avg", (0, 2, 3), keepdims), name="avg")
    g.output(centred * 2.0, name="y")
    return g


def segmented(graph: fg.Graph) -> bool:
    return any(getattr(k.group.lowered.spec, "segments", None) is not None for k in plan(graph).kernels)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of rows that are reduced by themselves: each is read once, by a warp, whatever their number and size."""
    graphs = [groupnorm_backward((3, 20, 13, 11), 4, d) for d in ("float32", "bfloat16", "float64")]
    graphs += [groupnorm_backward((2, 80, 8, 24), 2, "float16"), groupnorm_backward((2, 24, 70, 1), 6)]
    graphs += [channels((5, 7, 9, 8), d, keepdims) for d in ("float32", "bfloat16") for keepdims in (True, False)]
    assert all(segmented(g) for g in graphs)
    assert [len(plan(g).kernels) for g in graphs] == [2] * len(graphs)
    check_all(graphs)
    check_all(graphs[:2], inputs=lambda g: random_inputs(g, 4, special=0.001))
    made = []
    for g in graphs[1:4:2]:
        spec = plan(g).kernels[0].group.lowered.spec
        for schedule in schedules(spec, target("sm_90a")):
            monkeypatch.setattr(
                "fusegraph.plan.best_schedule", lambda s, a, x=schedule: x if s.segments else best_schedule(s, a)
            )
            made.append(CpuExecutable(g, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph))
        assert result.ok, f"{executable.plan.kernels[0].choice.schedule}: {result}"


def test_what_is_segmented() -> None:
    assert segmented(groupnorm_backward((64, 256, 56, 56), 32, "bfloat16"))
    assert not segmented(groupnorm_backward((64, 256, 56, 56), 32, "bfloat16", "NHWC"))  # neighbours are channels
    assert not segmented(groupnorm_backward((2, 256, 56, 56), 32))  # 64 rows are too few for an H200's blocks
    assert not segmented(groupnorm_backward((64, 256, 4, 4), 32))  # 16 elements are too few for a warp
    assert not segmented(groupnorm_backward((64, 64, 56, 56), 32))  # two segments are too few for a block


def kernels_of(*reduced: tuple[tuple[int, ...], Sequence[tuple[str, Any]]], **how: Any) -> int:
    g = fg.Graph("kernels")
    for number, (shape, ways) in enumerate(reduced):
        x = g.tensor(f"x{number}", shape, **how)
        for mode, axes in ways:
            g.output(g.reduction(x, mode, axes), name=f"{number} {mode} {axes}")
    return len([k for k in plan(g).kernels if getattr(k.group.lowered.spec, "walk", None) is not None])


@pytest.mark.parametrize(
    ("shape", "ways", "walked"),
    [
        ((4096, 64), [("add", 1), ("add", 0)], 1),
        ((924, 64), [("add", 1), ("add", 0)], 0),  # too few rows for parts of 8, one for each multiprocessor
        ((4096, 64), [("add", 1), ("add", (0, 1))], 0),
        ((4096, 8, 64), [("add", 2), ("add", (0, 1))], 1),
        ((4096, 8, 64), [("add", 2), ("add", 0)], 1),
        ((4096, 7, 64), [("add", 2), ("add", 1)], 0),
        ((64, 4096), [("add", 1), ("add", 0)], 0),
        ((4096, 20000), [("add", 1), ("add", 0)], 1),
        ((4096, 20000), [("add", 1), ("add", 0), ("max", 0)], 0),  # sums of so many columns do not fit registers
        ((4096, 1), [("add", 1), ("add", 0)], 0),
        ((4096, 64), [("add", 1), ("var", 0)], 0),
    ],
)
def test_what_is_shared(shape: tuple[int, ...], ways: Any, walked: int) -> None:
    assert kernels_of((shape, ways)) == walked


def test_rows_across_memory_are_not_walked() -> None:
    """Whose elements are neighbours in memory are rows, along whichever axis."""
    ways = [("add", 0), ("add", 1)]
    assert kernels_of(((4096, 64), ways), strides=(1, 4096)) == 0
    assert kernels_of(((64, 4096), ways), strides=(1, 64)) == 1


def test_what_the_user_sees() -> None:
    found = plan(layernorm_backward((4096, 1024), "bfloat16"))
    assert "A block walks 32 rows" in found.kernels[0].source.code
    apart = {(d.producer, d.reason) for d in found.partition.decisions if not d.fused}
    parts = [t.name for t in found.kernels[1].group.reads]
    assert [name for name, _ in sorted(apart)] == sorted(parts)
    assert all("needs all parts of" in reason for _, reason in apart)
    assert all(name in explain_text(describe(found)) for name in parts)


def test_parts_do_not_depend_on_the_machine() -> None:
    spec = walk(layernorm_backward((8192, 4096), "bfloat16"))
    assert spec.walk is not None
    assert spec.walk.chunk == 63
    assert len({render(spec, best_schedule(spec, target(name))).grid for name in ("sm_80", "sm_90a", "sm_120")}) == 1
    assert normalize(spec).outer == (8192,)


# ---- compiled for GPUs


@pytest.mark.parametrize("name", QUICK_ARCHS)
def test_every_schedule_fits(name: str) -> None:
    """What is tried asks for no more shared memory than there is, all kinds of it together."""
    for graph in gpu_graphs():
        for kernel in plan(graph).kernels:
            spec = kernel.group.lowered.spec
            for source in (render(spec, schedule) for schedule in schedules(spec, target(name))):
                sizes = re.findall(r"__shared__ (\w+) \w+((?:\[\d+\])+);", source.code)
                static = sum(SIZE_OF[kind] * prod(map(int, re.findall(r"\d+", dims))) for kind, dims in sizes)
                assert static <= DEFAULT_SHARED_BYTES_PER_BLOCK
                assert static + source.dynamic_shared_bytes <= target(name).arch.shared_bytes_per_block
                assert prod(source.block) <= 1024


def golden_graph() -> fg.Graph:
    return layernorm_backward((16384, 4096), "bfloat16")


def test_golden_source() -> None:
    kernel = plan(golden_graph(), choose=by_cost_model(target("sm_90a"))).kernels[0]
    check_golden("layernorm_backward", kernel.source.code)


def gpu_graphs() -> list[fg.Graph]:
    """Returns row kernels of every form: one or several rows per block, or one per warp, with and without columns."""
    graphs = [layernorm_backward(s, d) for s in ((1000, 8192), (2000, 1024)) for d in ("bfloat16", "float32")]
    graphs += [layernorm_backward((16384, 128), "float16"), rmsnorm_backward((2000, 4096), "bfloat16")]
    graphs += [layernorm_backward((3001, 777), "bfloat16"), softmax_backward((2000, 2048), "float64")]
    graphs += [groupnorm_backward((16, 64, 56, 56), 32, d) for d in ("bfloat16", "float32")]
    return [*graphs, statistics((5000, 96), "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(name: str) -> None:
    sources = []
    for graph in gpu_graphs():
        spec = plan(graph).kernels[0].group.lowered.spec
        sources.append(render(spec, best_schedule(spec, target(name))))
    assert all(s.dynamic_shared_bytes <= target(name).arch.shared_bytes_per_block for s in sources)
    compiled = nvrtc.compile_kernels(sources, name, cache=default_cache())
    assert [k.name for k in compiled if k.spill_bytes] == []


@pytest.mark.gpu
@pytest.mark.parametrize("graph", gpu_graphs(), ids=lambda g: g.name)
def test_on_the_gpu(graph: fg.Graph) -> None:
    check_on_gpu([graph])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("keepdims", [True, False])
def test_columns_of_joined_dimensions(keepdims: bool) -> None:
    graphs = [joined_bias((3, n, 70), keepdims=keepdims) for n in (5, 17)]
    for graph in graphs:
        first, *_ = plan(graph).kernels
        assert Role.PARTIAL in [n.op.role for n in first.group.nodes], graph.name
    check_all(graphs)


@pytest.mark.usefixtures("small")
def test_columns_of_which_some_are_joined() -> None:
    g = fg.Graph("joined channels")
    dx = g.output(g.softmax_backward(g.tensor("loss", (6, 4, 32)), g.tensor("y", (6, 4, 32))), name="dx")
    g.output(g.reduction(g.reshape(dx, (6, 128)), "add", [0]))
    check_all([g])

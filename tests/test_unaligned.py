"""Pointwise kernels whose rows begin anywhere in memory: every alignment, pitch and width of elements."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen import best_schedule, render, schedule_data, schedule_from_data, schedules
from codegen.pointwise import PointwiseSchedule, TilesSchedule
from codegen.pointwise import schedule as pointwise_schedule
from codegen.pointwise import tiling as pointwise_tiling
from codegen.pointwise import unaligned as pointwise_unaligned
from codegen.spec import KernelSource, PointwiseSpec
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.runtime import host_compiler, nvrtc
from fusegraph.runtime.cache import default_cache

SIZES = {"int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small tensors take the kernels of large ones."""
    for module in (pointwise_schedule, pointwise_unaligned):
        monkeypatch.setattr(module, "ENOUGH_BLOCKS", 1 / 132)
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_TILES", 1 / 132)
    for module in (pointwise_schedule, pointwise_unaligned):
        monkeypatch.setattr(module, "THREADS", 32)
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_ELEMENTS", 1)


def only_spec(graph: fg.Graph, **options: Any) -> PointwiseSpec:
    (group,) = plan(graph, Options(**options)).partition.groups
    assert isinstance(group.lowered.spec, PointwiseSpec)
    return group.lowered.spec


def rows(dtype: str, shape: tuple[int, int], pitches: Sequence[int], other: str | None = None) -> fg.Graph:
    """Builds y = a - b with the given row strides of a, b and y."""
    g = fg.Graph("rows", io_dtype=dtype)
    a, b = (g.tensor(n, shape, t, strides=(p, 1)) for n, t, p in zip("ab", (dtype, other or dtype), pitches))
    g.output(a - b, name="y", dtype=dtype, strides=(pitches[2], 1))
    return g


def form(graph: fg.Graph, **options: Any) -> str:
    schedule = best_schedule(only_spec(graph, **options))
    return schedule.form if isinstance(schedule, PointwiseSchedule) else "tiles"


# ---- numbers


def pitch_cases() -> list[fg.Graph]:
    cols = 139
    pitches = [(139, 139, 139), (139, 140, 141), (144, 139, 139), (139, 144, 160), (141, 141, 141), (141, 157, 173),
               (143, 145, 144), (160, 161, 139)]  # fmt: skip
    return [rows(d, (9, cols), p) for d in SIZES for p in pitches]


def mixed_cases() -> list[fg.Graph]:
    """Builds graphs with dtypes of several widths, several outputs, broadcasts and indices."""
    pairs = [("int8", "float64"), ("bfloat16", "int8"), ("float32", "int8"), ("float64", "bfloat16")]
    graphs = [rows(first, (5, 150), p, second) for first, second in pairs for p in ((151, 151, 151), (150, 157, 153))]
    for dtype, pitch in itertools.product(("int8", "bfloat16"), (301, 304)):
        g = fg.Graph("many", io_dtype=dtype)
        shape = (3, 4, 300)
        a = g.tensor("a", shape, strides=(4 * pitch + 1, pitch, 1))
        row, column, one = g.tensor("row", (300,)), g.tensor("column", (4, 1)), g.tensor("one", ())
        index = g.cast(g.gen_index(a, axis=1) * 3 + g.gen_index(a, axis=2), dtype)
        strides = (4 * pitch + 1, pitch, 1)
        g.output(a * column + row - one + index, name="y", strides=strides)
        g.output(a > row, name="mask", strides=(4 * pitch + 81, pitch + 16, 1))
        graphs.append(g)
    return graphs


@pytest.mark.slow
def test_pitches(small: None) -> None:
    graphs = [g for g in pitch_cases() if form(g) == "unaligned"]
    assert len(graphs) > 12
    check_cases(graphs[::2], guard=True)
    assert "unaligned" in {form(g) for g in mixed_cases()}
    check_all([*graphs[1::2], *mixed_cases()])


def run_at(
    graph: fg.Graph, sources: Sequence[KernelSource], offsets: Callable[[], Sequence[int]], times: int = 1
) -> None:
    """Runs kernels of y = a - b with arrays that begin so many elements past a multiple of 64 bytes.

    Whatever lies around and between the elements is neither used nor written.
    """
    module = host_compiler.build(sources, cache=default_cache())
    (y,), random_state = graph.outputs, np.random.default_rng(1)
    for number, _ in itertools.product(range(len(sources)), range(times)):
        views, memories, whole = {}, {}, {}
        for tensor, offset in zip((*graph.inputs, y), offsets()):
            size = tensor.dtype.itemsize
            span = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides)) + 1) * size
            raw = np.full(span + 256, 0xA5, np.uint8)
            begin = -raw.ctypes.data % 64 + 64 + offset * size
            strides = tuple(s * size for s in tensor.strides)
            view = np.ndarray(tensor.shape, tensor.dtype.numpy, raw[begin : begin + span], strides=strides)
            if tensor is not y:
                view[...] = random_state.integers(-9, 9, tensor.shape).astype(tensor.dtype.numpy)
            views[tensor.name], memories[tensor.name], whole[tensor.name] = view, raw, begin
        (kernel,) = plan(graph).kernels
        module.launch(number, [views[t.name].ctypes.data for t in kernel.arguments])
        expected = memories["y"].copy()
        again = np.ndarray(y.shape, y.dtype.numpy, expected[whole["y"] :], strides=views["y"].strides)
        again[...] = views["a"] - views["b"]
        assert (views["y"] == again).all(), (sources[number].code, whole)
        untouched = np.full_like(expected, 0xA5)
        np.ndarray(y.shape, y.dtype.numpy, untouched[whole["y"] :], strides=views["y"].strides)[...] = again
        np.testing.assert_array_equal(memories["y"], untouched)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
def test_every_offset(small: None, dtype: str) -> None:
    """Arrays begin at any element: all 16 offsets of the output, those of the inputs at random."""
    graph = rows(dtype, (4, 150), (151, 153, 155))
    spec = only_spec(graph, alignment=1)
    found = list(pointwise_unaligned.unaligned_schedules(spec))
    wide = [replace(s, itype="uint64") for s in found[:1]]
    random_state, turn = random.Random(2), itertools.count()
    run_at(
        graph,
        [render(spec, s) for s in (*found, *wide)],
        lambda: [random_state.randrange(16), random_state.randrange(16), next(turn) % 16],
        16,
    )


@pytest.mark.slow
@pytest.mark.parametrize("alignment", [16, 1])
def test_no_access_outside_of_arrays(small: None, alignment: int) -> None:
    graphs = [rows(d, (3, cols), (cols, cols + 1, cols)) for d in ("int8", "bfloat16") for cols in range(129, 161, 5)]
    assert {form(g, alignment=alignment) for g in graphs} == {"unaligned"}
    check_cases([Case(g, options=Options(alignment=alignment)) for g in graphs], guard=True)


# ---- tiles


def turned(
    dtype: str,
    shape: tuple[int, ...],
    pads: Sequence[int],
    other: str | None = None,
    order: Sequence[int] | None = None,
) -> fg.Graph:
    """Builds y = a - b with b in another dimension order (by default the last two swapped), and rows padded by so many
    elements.
    """
    rank = len(shape)
    across = tuple(order or (*range(rank - 2), rank - 1, rank - 2))

    def strides(order: Sequence[int], pad: int) -> tuple[int, ...]:
        result, step = [0] * rank, 1
        for dim in reversed(order):
            result[dim] = step
            step = step * shape[dim] + (pad if dim == order[-1] else 0)
        return tuple(result)

    g = fg.Graph("turned", io_dtype=dtype)
    a = g.tensor("a", shape, strides=strides(range(rank), pads[0]))
    b = g.tensor("b", shape, other or dtype, strides=strides(across, pads[1]))
    g.output(a - b, name="y", dtype=dtype, strides=strides(range(rank), pads[2]))
    return g


def tiles_of(graph: fg.Graph, **options: Any) -> TilesSchedule:
    """Returns the first tiled schedule for unaligned rows, whether it is the best or not."""
    spec = only_spec(graph, **options)
    return next(s for s in schedules(spec) if isinstance(s, TilesSchedule) and s.unaligned)


def tiles_cases() -> list[fg.Graph]:
    shapes = [(75, 539), (64, 530), (130, 407), (33, 1030)]
    graphs = [turned(d, s, (0, 0, 0)) for d in ("int8", "bfloat16") for s in shapes]
    pads = [(1, 1, 1), (1, 0, 5), (0, 7, 0), (0, 3, 16)]
    graphs += [turned(d, (64, 528), p) for d in ("int8", "float16") for p in pads]
    graphs += [turned(d, (3, 50, 521), (1, 3, 1)) for d in ("int8", "bfloat16")]
    graphs += [turned("bfloat16", (4, 10, 7, 601), (0, 0, 0), order=(0, 3, 1, 2))]
    pairs = [("int8", "bfloat16"), ("bfloat16", "int8"), ("float32", "int8"), ("int8", "float64")]
    graphs += [turned(first, (50, 531), (0, 1, 0), second) for first, second in pairs]
    for dtype in ("int8", "bfloat16"):
        g = fg.Graph("combined", io_dtype=dtype)
        shape = (40, 545)
        a, b = g.tensor("a", shape), g.tensor("b", shape, strides=(1, 41))
        c, d = g.tensor("c", shape, "int8", strides=(1, 40)), g.tensor("d", shape, strides=(549, 1))
        row, column, index = g.tensor("row", (545,)), g.tensor("column", (40, 1)), g.gen_index(a, axis=1)
        g.output((a - b * column) + (c - d) * row + g.cast(index, dtype), name="y", strides=(545, 1))
        g.output(a > b, name="mask", strides=(561, 1))
        graphs.append(g)
    return graphs


@pytest.mark.slow
def test_tiles(small: None) -> None:
    graphs = tiles_cases()
    assert all(form(g) == "tiles" for g in graphs)
    chosen = [best_schedule(only_spec(g)) for g in graphs]
    assert sum(isinstance(s, TilesSchedule) and s.unaligned for s in chosen) > len(graphs) - 6
    check_cases(graphs, guard=True)


@pytest.mark.slow
def test_tiles_of_arrays_that_begin_anywhere(small: None) -> None:
    check_all(tiles_cases(), alignment=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
def test_every_offset_of_tiles(small: None, dtype: str) -> None:
    graph = turned(dtype, (40, 531), (0, 1, 2))
    spec = only_spec(graph, alignment=1)
    first = tiles_of(graph, alignment=1)
    sources = [render(spec, s) for s in (first, replace(first, itype="uint64"))]
    random_state, turn = random.Random(3), itertools.count()
    run_at(graph, sources, lambda: [random_state.randrange(16), random_state.randrange(16), next(turn) % 16], 16)


# ---- schedules


def test_where_tiles_are_unaligned() -> None:
    def best(dtype: str, shape: tuple[int, int], pads: Sequence[int], other: str | None = None) -> Any:
        schedule = best_schedule(only_spec(turned(dtype, shape, pads, other)))
        assert isinstance(schedule, TilesSchedule)
        return schedule

    odd, even = (8191, 8193), (8192, 8192)
    assert best("int8", odd, (0, 0, 0)).unaligned
    assert best("bfloat16", odd, (0, 0, 0)).unaligned
    assert best("int8", even, (1, 1, 1)).unaligned
    assert best("int8", even, (0, 1, 0)).unaligned
    assert not best("int8", even, (0, 0, 0)).unaligned
    assert not best("float32", odd, (0, 0, 0)).unaligned
    every = list(schedules(only_spec(turned("float32", odd, (0, 0, 0)))))
    assert {s.unaligned for s in every if isinstance(s, TilesSchedule)} == {False, True}


def test_where_rows_are_unaligned() -> None:
    def best(dtype: str, cols: int, pitches: Sequence[int], other: str | None = None, **options: Any) -> Any:
        return best_schedule(only_spec(rows(dtype, (8192, cols), pitches, other), **options))

    odd, even = (8193, 8193, 8193), (8192, 8192, 8192)
    assert best("int8", 8191, odd) == PointwiseSchedule(16, 1, "unaligned", "uint32")
    assert best("bfloat16", 8191, odd) == PointwiseSchedule(8, 1, "unaligned", "uint32")
    assert best("int8", 8192, even) == PointwiseSchedule(16, 1, "flat", "uint32")
    assert best("int8", 8192, even, alignment=1).form == "unaligned"
    assert best("float32", 8191, odd).form == "flat"  # four bytes at a time are fast enough
    assert best("float32", 8191, odd, "int8").form == "flat"
    assert best("int8", 8191, (8191, 8193, 8191)).form == "unaligned"
    assert best("int8", 8192, (8192, 8193, 8192)).form == "unaligned"
    assert best("int8", 40, (41, 41, 41)).vector == 4  # rows are several vectors
    g = fg.Graph("far apart", io_dtype="int8")
    g.output(g.tensor("a", (4096, 4095), strides=(8191, 2)) - 1, name="y", strides=(8191, 2))
    assert form(g) == "flat"


@pytest.mark.slow
def test_schedules_to_try(small: None) -> None:
    for graph in (rows("int8", (5, 301), (301, 303, 302)), rows("float32", (5, 301), (303, 303, 303))):
        every = list(schedules(only_spec(graph)))
        assert every[0] == best_schedule(only_spec(graph))
        assert len(set(every)) >= 4
        assert {"flat", "unaligned"} <= {s.form for s in every if isinstance(s, PointwiseSchedule)}
        assert all(schedule_from_data(json.loads(json.dumps(schedule_data(s)))) == s for s in every)
        sources = [render(only_spec(graph), s) for s in dict.fromkeys(every)]
        run_at(graph, sources, lambda: (0, 0, 0))


# ---- source


def golden_graphs() -> dict[str, fg.Graph]:
    g = fg.Graph("odd_rows", io_dtype="int8")
    a, b = g.tensor("a", (4096, 4095), strides=(4097, 1)), g.tensor("b", (4096, 4095), strides=(4099, 1))
    g.output(a + b, name="y", strides=(4097, 1))
    t = fg.Graph("add_transposed_odd", io_dtype="bf16")
    a, b = t.tensor("a", (8191, 8193)), t.tensor("b", (8191, 8193), strides=(1, 8191))
    t.output(a + b, name="y", strides=(8193, 1))
    return {g.name: g, t.name: t}


@pytest.mark.parametrize("name", list(golden_graphs()))
def test_golden_source(name: str) -> None:
    (kernel,) = plan(golden_graphs()[name]).kernels
    check_golden(name, kernel.source.code)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_sources_compile_for_gpus(small: None, arch: str) -> None:
    graphs = [*golden_graphs().values(), *pitch_cases()[1:12:5], *mixed_cases()[1::4], *tiles_cases()[5::9]]
    sources = [k.source for g in graphs for k in plan(g).kernels]
    sources += [k.source for g in pitch_cases()[:1] for k in plan(g, Options(alignment=1)).kernels]
    for kernel in nvrtc.compile_kernels(sources, arch, cache=default_cache()):
        assert kernel.spill_bytes == 0, kernel.name
        assert kernel.registers <= 128, kernel.name


@pytest.mark.gpu
def test_unaligned_on_the_gpu(small: None) -> None:
    check_on_gpu([*pitch_cases(), *mixed_cases(), *tiles_cases(), *golden_graphs().values()])
    check_on_gpu([*pitch_cases(), *tiles_cases()], alignment=1)

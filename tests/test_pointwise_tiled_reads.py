"""Pointwise kernels in tiles whose reads of tables (concatenations, shifts, padding) lie across the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs import check_all, check_on_gpu

import fusegraph as fg
from codegen import best_schedule
from codegen.pointwise import schedule as pointwise_schedule
from codegen.pointwise import tiling as pointwise_tiling
from codegen.pointwise.tiling import TilesSchedule, Tiling
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.plan import plan

Make = Callable[[fg.Graph, fg.Tensor], fg.Tensor]
H200 = target("h200")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small tensors take the tiles of large ones."""
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_ELEMENTS", 1)
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_READS", 1)
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_TILES", 1 / 132)
    monkeypatch.setattr(pointwise_schedule, "ENOUGH_BLOCKS", 1 / 132)


def rolled(g: fg.Graph, x: fg.Tensor, shift: int, axis: int) -> fg.Tensor:
    """Returns a tensor whose elements are shifted along an axis, in a circle."""
    first = tuple(shift if d == axis else 0 for d in range(x.rank))
    stops = tuple(shift if d == axis else n for d, n in enumerate(x.shape))
    return g.concatenate(g.slice(x, starts=first), g.slice(x, stops=stops), axis=axis)


def shifts(shape: tuple[int, ...], dtype: str, first: str, last: str, make: Make) -> fg.Graph:
    """Builds y = max(0, what is made of x) in one kernel, from one layout to another."""
    g = fg.Graph(f"shifts {dtype} {shape}")
    x = g.tensor("x", shape, dtype, layout=first)
    y = make(g, x)
    y = g.logical_not(y) if dtype == "bool" else g.relu(y) if dtype != "uint8" else y + y
    g.output(y, name="y", layout=last)
    return g


def padded(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return g.pad(x, ((0, 0), (0, 0), (2, 1), (1, 3)), value=0.0 if x.dtype.is_float else 0)


def joined(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Returns three tensors joined, one of them with other strides."""
    _, c, h, w = x.shape
    other = g.tensor("other", (x.shape[0], c, h, 3), x.dtype, strides=(c * h * 4 * 2, 1, c * 4, c))
    bias = g.tensor("bias", (x.shape[0], c, h, w + 5), x.dtype)
    scale = g.tensor("scale", (1, c, 1, 1), x.dtype)
    return g.concatenate(x, other, g.slice(x, stops=(x.shape[0], c, h, 2)), axis=3) * scale + bias


def windows(shape: tuple[int, ...], dtype: str, side: int) -> fg.Graph:
    """Builds windows of a shifted image with channels last, made of one with channels first."""
    g = fg.Graph(f"windows {dtype} {shape}")
    n, c, h, w = shape
    x = g.transpose(g.tensor("x", shape, dtype), (0, 2, 3, 1))
    x = rolled(g, rolled(g, x, side // 2, 1), side // 2, 2)
    x = g.transpose(g.reshape(x, (n, h // side, side, w // side, side, c)), (0, 1, 3, 2, 4, 5))
    g.output(g.relu(x), name="y")
    return g


def tiled(graph: fg.Graph) -> Tiling:
    (kernel,) = plan(graph, Options(target=H200)).kernels
    spec: Any = kernel.group.lowered.spec
    best = best_schedule(spec, H200)
    assert isinstance(best, TilesSchedule), best
    return Tiling(spec, best)


def graphs_of(dtypes: tuple[str, ...]) -> list[fg.Graph]:
    made: list[tuple[tuple[int, ...], Make]] = [
        ((2, 24, 5, 9), lambda g, x: rolled(g, x, 4, 3)),
        ((2, 13, 6, 7), lambda g, x: rolled(g, x, 2, 2)),
        ((1, 40, 9, 16), lambda g, x: rolled(g, x, 16, 1)),
        ((3, 17, 8, 8), lambda g, x: rolled(g, x, 3, 1)),
        ((2, 16, 5, 7), padded),
        ((1, 9, 33, 2), padded),
    ]
    layouts = (("NHWC", "NCHW"), ("NCHW", "NHWC"))
    return [shifts(shape, dtype, *ways, make) for dtype in dtypes for shape, make in made for ways in layouts]


def test_reads_across_are_turned(small: None) -> None:
    graphs = [shifts((2, 24, 5, 9), "bfloat16", "NHWC", "NCHW", make) for make in (padded, joined)]
    graphs.append(shifts((2, 13, 6, 7), "float32", "NHWC", "NCHW", lambda g, x: rolled(g, x, 2, 3)))
    graphs.append(windows((2, 12, 15, 10), "float32", 5))
    for graph in graphs:
        tiling = tiled(graph)
        assert set(tiling.reads) & set(tiling.stages)
    check_all(graphs)


@pytest.mark.slow
def test_reads_of_every_dtype_are_turned(small: None) -> None:
    graphs = graphs_of(("float32", "bfloat16", "float16", "float64", "int8", "int64", "uint8", "bool"))
    graphs += [shifts((2, 16, 6, 5), dtype, "NHWC", "NCHW", joined) for dtype in ("float32", "bfloat16", "float64")]
    graphs += [windows((2, 9, 8, 12), dtype, 4) for dtype in ("bfloat16", "float64", "int8")]
    graphs.append(windows((0, 9, 8, 12), "float32", 4))
    check_all(graphs)


@pytest.mark.gpu
def test_turned_reads_on_the_gpu() -> None:
    made: list[Make] = [padded, joined, lambda g, x: rolled(g, x, 9, 3), lambda g, x: rolled(g, x, 5, 1)]
    graphs = [
        shifts(shape, dtype, "NHWC", "NCHW", make)
        for shape in ((8, 216, 28, 28), (15, 33, 28, 27))
        for dtype in ("float32", "bfloat16", "int8")
        for make in made
        if dtype != "int8" or make is not joined
    ]
    check_on_gpu([*graphs, windows((64, 32, 56, 56), "float32", 7), windows((3, 96, 28, 28), "bfloat16", 7)])


def test_neighbours_are_read_in_vectors() -> None:
    def accesses(channels: int, dtype: str = "bfloat16") -> list[int]:
        graph = shifts((16, channels, 28, 28), dtype, "NHWC", "NCHW", lambda g, x: rolled(g, x, 9, 3))
        return [stage.vector for stage in tiled(graph).stages.values()]

    assert accesses(216) == [8]
    assert accesses(36) == [4]
    assert accesses(33) == [1]
    assert accesses(216, "float32") == [4]


def test_few_elements_are_read_in_place() -> None:
    graph = shifts((8, 32, 14, 14), "bfloat16", "NHWC", "NCHW", lambda g, x: rolled(g, x, 5, 3))
    (kernel,) = plan(graph, Options(target=H200)).kernels
    assert not isinstance(best_schedule(kernel.group.lowered.spec, H200), TilesSchedule)

"""Graphs that the GPU tests share; each also runs on the cpu engine, in the tests of its family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fusegraph as fg
from fusegraph.report.check import check
from fusegraph.runtime.arrays import to_numpy

LAYOUTS = ("contiguous", "channels_last")


def passes(graph: fg.Graph, **how: Any) -> None:
    result = check(graph, engine="cuda", **how)
    assert result.ok, str(result)


def pointwise(shape: tuple[int, ...] = (33, 1025), dtype: str = "float32") -> fg.Graph:
    graph = fg.Graph("pointwise", io_dtype=dtype)
    a, b, c = graph.tensor("a", shape), graph.tensor("b", shape[-1:]), graph.tensor("c", (*shape[:-1], 1))
    if a.dtype.is_bool:
        graph.output(graph.logical_and(graph.logical_or(a, b), c), name="y")
        return graph
    if a.dtype.is_float:
        graph.output(graph.sigmoid((a + b) * c), name="y")
        graph.output(graph.gelu(a) - c, name="z")
    else:
        graph.output((a + b) * c, name="y")
    graph.output(a > b, name="mask")
    return graph


def activated(graph: fg.Graph, y: fg.Tensor) -> fg.Graph:
    """Adds a bias along the last dimension (matmul) or the channels (convolution) and a residual; two outputs."""
    bias = graph.tensor("bias", (y.shape[-1],) if y.rank < 3 else (y.shape[1], *(1,) * (y.rank - 2)), y.dtype)
    residual = graph.tensor("residual", y.shape, y.dtype, strides=y.strides)
    inner = y + bias + residual
    graph.output(graph.relu(inner), name="y")
    graph.output(y > residual, name="mask")
    return graph


def product(
    a: tuple[int, ...],
    b: tuple[int, ...],
    dtype: str = "float32",
    *,
    result: str | None = None,
    transposed: bool = False,
) -> fg.Graph:
    graph = fg.Graph("product")
    strides = (1, a[-2]) if transposed else None
    y = graph.matmul(graph.tensor("a", a, dtype, strides=strides), graph.tensor("b", b, dtype), dtype=result)
    return activated(graph, y) if y.rank == 2 else plain(graph, y)


def plain(graph: fg.Graph, y: fg.Tensor) -> fg.Graph:
    graph.output(y, name="y")
    return graph


def convolution(
    x: tuple[int, ...], w: tuple[int, ...], dtype: str = "float32", layout: str = "contiguous", **attributes: Any
) -> fg.Graph:
    graph = fg.Graph("convolution")
    image = graph.tensor("x", x, dtype, layout=layout)
    return activated(graph, graph.conv_fprop(image, graph.tensor("w", w, dtype), **attributes))


def network() -> fg.Graph:
    """Returns a graph of three kernels with intermediates in the workspace."""
    graph = fg.Graph("network")
    y = graph.tensor("x", (2, 16, 20, 20))
    for k in range(3):
        y = graph.relu(graph.conv_fprop(y, graph.tensor(f"w{k}", (16, 16, 3, 3)), padding=1))
    graph.output(y, name="y")
    return graph


def of_every_dtype(dtype: str) -> Iterator[fg.Graph]:
    yield pointwise(dtype=dtype)
    yield product((65, 130), (130, 67), dtype)
    yield product((64, 64), (64, 128), dtype, transposed=True)
    yield product((3, 33, 20), (3, 20, 40), dtype)
    for layout in LAYOUTS:
        yield convolution((2, 24, 9, 10), (40, 24, 3, 3), dtype, layout, padding=1)
        yield convolution((2, 16, 14, 15), (16, 1, 3, 3), dtype, layout, padding=1, groups=16)
        yield convolution((2, 3, 33, 40), (8, 3, 3, 3), dtype, layout, padding=1)


def as_numpy(results: Any) -> list[np.ndarray[Any, Any]]:
    return [to_numpy(r) for r in (results if isinstance(results, tuple) else (results,))]

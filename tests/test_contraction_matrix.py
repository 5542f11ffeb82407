"""Matmul, convolution and both of its gradients over types, dimensions, strides, paddings, dilations and groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from graphs import check_all

import fusegraph as fg

pytestmark = pytest.mark.slow

PAIRS = [
    ("bfloat16", "bfloat16"),
    ("float16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float8_e4m3", "float8_e5m2"),
    ("float8_e4m3", "bfloat16"),
    ("float8_e4m3", "int8"),
    ("int8", "int8"),
    ("uint8", "int8"),
    ("float16", "int8"),
    ("bool", "int8"),
    ("int8", "int32"),
    ("int64", "int8"),
    ("float64", "bfloat16"),
    ("float32", "int8"),
    ("bool", "bool"),
]
#: Attributes of images of two dimensions, of three and of one.
PLANAR: list[dict[str, Any]] = [
    {},
    {"padding": ((0, 2), (1, 0))},
    {"dilation": 2, "padding": 2},
    {"stride": 2, "padding": 1},
    {"mode": "convolution", "padding": 1},
    {"stride": (2, 1), "dilation": (1, 2), "padding": ((1, 0), (0, 3)), "mode": "convolution"},
]
SPATIAL: list[dict[str, Any]] = [
    {"stride": 2, "padding": 1},
    {"padding": ((0, 1), (2, 0), (1, 1)), "dilation": (1, 2, 1)},
    {"mode": "convolution", "padding": 1, "stride": (1, 2, 2)},
]
LINEAR: list[dict[str, Any]] = [{"stride": 3, "padding": 2}, {"dilation": 2, "padding": ((3, 0),)}]


def matmul(a: tuple[int, ...], b: tuple[int, ...], dtype: Any, second: Any = None, **more: Any) -> fg.Graph:
    graph = fg.Graph("product", compute_dtype=more.pop("compute", "float32"))
    y = graph.tensor("a", a, dtype, strides=more.pop("a_strides", None)) @ graph.tensor("b", b, second or dtype, **more)
    graph.output(graph.relu(y) if y.dtype.is_float else y, name="y")
    return graph


def convolution(op: str, x: tuple[int, ...], w: tuple[int, ...], types: tuple[str, str], **more: Any) -> fg.Graph:
    """Returns ``op`` of an image and a filter of these shapes (or of what comes back of the result), of two types."""
    layout, graph, forward = more.pop("layout", "channels_last"), fg.Graph(op), fg.Graph("forward")
    y = forward.conv_fprop(forward.tensor("x", x), forward.tensor("w", w), **more).shape
    shapes = {"conv_fprop": (x, w), "conv_dgrad": (y, w), "conv_wgrad": (x, y)}[op]
    last = {"conv_fprop": (), "conv_dgrad": (x[2:],), "conv_wgrad": (w[2:],)}[op]
    operands = [graph.tensor(n, s, d, layout=layout) for n, s, d in zip("ab", shapes, types)]
    graph.output(getattr(graph, op)(*operands, *last, **more), name="y")
    return graph


def matmuls() -> Iterator[fg.Graph]:
    for a, b in PAIRS:
        yield matmul((70, 48), (48, 40), a, b)
        yield matmul((33, 48), (48, 24), a, b, strides=(1, 48), compute="tf32")
        yield matmul((7, 35), (35, 9), a, b)
    for dtype in ("bfloat16", "int8"):
        yield matmul((3, 1, 20, 32), (1, 4, 32, 24), dtype)
        yield matmul((20, 32), (5, 32, 24), dtype)
        yield matmul((4, 20, 32), (4, 32, 24), dtype, a_strides=(32, 128, 1))
        yield matmul((4, 20, 32), (4, 32, 24), dtype, a_strides=(0, 32, 1))


def convolutions(op: str) -> Iterator[fg.Graph]:
    same = ("bfloat16", "bfloat16")
    for more in PLANAR:
        yield convolution(op, (2, 16, 9, 8), (24, 16, 3, 3), same, **more)
        yield convolution(op, (2, 32, 9, 8), (48, 16, 3, 3), same, groups=2, **more)
        yield convolution(op, (2, 12, 9, 8), (20, 12, 3, 3), same, layout="contiguous", **more)
        yield convolution(op, (1, 5, 9, 8), (7, 5, 3, 3), ("float16", "float16"), **more)
    for more in SPATIAL:
        yield convolution(op, (1, 16, 5, 6, 7), (16, 16, 3, 3, 3), same, **more)
        yield convolution(op, (1, 16, 5, 6, 7), (16, 8, 3, 3, 3), same, groups=2, **more)
        yield convolution(op, (1, 6, 5, 6, 7), (4, 6, 2, 3, 2), ("float16", "float16"), **more)
    for more in LINEAR:
        yield convolution(op, (2, 16, 40), (24, 16, 5), same, **more)
    for types in PAIRS[1:9]:
        yield convolution(op, (1, 16, 8, 7), (16, 16, 3, 3), types, padding=1)


@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad", "conv_wgrad"])
def test_convolutions(op: str) -> None:
    check_all(list(convolutions(op)), arch="sm_90a")


def test_matmuls() -> None:
    check_all(list(matmuls()), arch="sm_90a")

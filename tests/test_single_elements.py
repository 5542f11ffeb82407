"""What combines one element, or sums up one product, for each result is pointwise; all else stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu

import fusegraph as fg
from fusegraph.ops.modes import MODES
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs

Body = Callable[[fg.Graph, Any], fg.Tensor]


def _made(body: Body, *shapes: tuple[int, ...], dtype: str = "float32", layout: str | None = None) -> fg.Graph:
    graph = fg.Graph("single", io_dtype=dtype)
    made = body(graph, *(graph.tensor(f"x{n}", shape, layout=layout) for n, shape in enumerate(shapes)))
    graph.output(made)  # of the node itself
    graph.output(graph.logical_not(made) if made.dtype.is_bool else graph.neg(made))
    return graph


def _mode(mode: str, dtype: str, keepdims: bool) -> fg.Graph:
    how = {"mode": mode, "axes": (0, 2), "keepdims": keepdims}
    return _made(lambda g, x: g.reduction(x, **how), (1, 6, 1, 35), dtype=dtype)


SINGLE = [
    *(_mode(mode, "float16", mode < "c") for mode in MODES),
    *(_mode(m, "int8", True) for m in ("add", "mul", "min", "amax", "norm1", "any", "argmax")),
    _made(lambda g, x: g.reduction(x, axes=(1,), dtype="float32"), (5, 1, 3), dtype="bfloat16"),
    _made(lambda g, x: g.reduction(x, mode="norm1", axes=(1,), dtype="float16"), (5, 1, 3)),
    _made(lambda g, x: g.softmax(x, axis=1), (4, 1, 9)),
    _made(lambda g, x: g.log_softmax(x, axis=-1), (4, 9, 1), dtype="bfloat16"),
    *(
        _made(lambda g, x, op=op: getattr(g, op)(x, axis=1), (4, 1, 9), dtype=d)
        for op, d in (("cumsum", "int8"), ("cumprod", "float32"), ("cummax", "float16"), ("logcumsumexp", "float32"))
    ),
    _made(lambda g, x: g.max_pool(x, window=1), (2, 3, 8, 8)),
    _made(lambda g, x: g.max_pool(x, window=1, stride=2), (2, 3, 9, 8), layout="NHWC"),
    _made(lambda g, x: g.max_pool(x, window=1, stride=(1, 3), ceil_mode=True), (2, 3, 9, 8), dtype="int8"),
    _made(lambda g, x: g.avg_pool(x, window=1, stride=3), (2, 3, 9, 8), dtype="float16"),
    _made(lambda g, x: g.adaptive_avg_pool(x, size=(7, 5)), (2, 3, 7, 5)),
    _made(lambda g, a, b: a @ b, (3, 17, 1), (1, 1, 29), dtype="bfloat16"),
    _made(lambda g, a, b: g.matmul(a, b, dtype="float32"), (17, 1), (1, 29), dtype="float16"),
    _made(lambda g, a, b: a @ b, (17, 1), (1, 29), dtype="int8"),
    _made(lambda g, x, w: g.conv_fprop(x, w), (2, 6, 5, 7), (6, 1, 1, 1), layout="NHWC", dtype="float16"),
    _made(lambda g, x, w: g.conv_fprop(x, w, stride=2), (2, 6, 5, 8), (6, 1, 1, 1)),
    _made(lambda g, x, w: g.conv_fprop(x, w), (2, 1, 5), (6, 1, 1), dtype="int8"),
    _made(lambda g, x, w: g.conv_dgrad(x, w, groups=6), (2, 6, 5, 7), (6, 1, 1, 1)),
    _made(lambda g, x, w: g.conv_dgrad(x, w), (2, 1, 5, 7), (1, 6, 1, 1), dtype="bfloat16"),
]
OTHERS = [
    _made(lambda g, x: g.reduction(x, axes=(1, 2)), (5, 1, 3)),
    _made(lambda g, x: g.max_pool(x, window=1, padding=1), (2, 3, 8, 8)),
    _made(lambda g, x: g.avg_pool(x, window=1, stride=3, padding=((0, 2), (0, 2))), (2, 3, 8, 8)),
    _made(lambda g, x: g.adaptive_avg_pool(x, size=14), (2, 3, 7, 7)),
    _made(lambda g, x, w: g.conv_fprop(x, w, padding=1), (2, 6, 5, 7), (6, 1, 1, 1)),
    _made(lambda g, x, w: g.conv_fprop(x, w, groups=3), (2, 3, 5, 7), (6, 1, 1, 1)),
    _made(lambda g, x, w: g.conv_dgrad(x, w, stride=2, groups=6), (2, 6, 5, 7), (6, 1, 1, 1)),
]


def _families(graph: fg.Graph) -> set[str]:
    return {k.group.family for k in plan(graph).kernels}


def test_which_are_pointwise() -> None:
    for graph in SINGLE:
        assert _families(graph) == {"pointwise"}, graph
    for graph in OTHERS:
        assert _families(graph) != {"pointwise"}, graph


def test_attention_to_one_key_stays_one_kernel() -> None:
    def attention(g: fg.Graph, q: Any, k: Any, v: Any) -> fg.Tensor:
        return g.softmax(q @ k.transpose(0, 1, 3, 2), axis=-1) @ v

    graph = _made(attention, (2, 3, 5, 64), (2, 3, 1, 64), (2, 3, 1, 64), dtype="bfloat16")
    assert "attention" in _families(graph)
    check_all([graph])


def test_no_elements_are_none_to_combine() -> None:
    check_all([_made(lambda g, x: g.reduction(x, axes=(1,)), (0, 1, 3)), _made(lambda g, a, b: a @ b, (0, 1), (1, 4))])


@pytest.mark.slow
def test_values() -> None:
    check_all(SINGLE + OTHERS)


def test_hostile_values() -> None:
    """NaN and infinity are what they are; the least int8 has no absolute value."""

    def inputs(graph: fg.Graph) -> dict[str, Any]:
        arrays = dict(random_inputs(graph))
        for array in arrays.values():
            whole = array.dtype.kind == "i"
            array[...] = np.resize(
                [-128, 127, 0, 1] if whole else [np.nan, np.inf, -np.inf, 0, -0.0, -3.5], array.shape
            )
        return arrays

    check_all(SINGLE, inputs=inputs)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(SINGLE)

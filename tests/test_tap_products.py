"""Convolutions, and gradients by their inputs, as products of all taps: which, and that results stay the same."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
from graphs import check_on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen.target import target
from fusegraph.dtypes import float32
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import Options
from fusegraph.ops.base import TensorType
from fusegraph.ops.columns import COL2IM
from fusegraph.passes import tap_products
from fusegraph.plan import plan


def gradient(
    loss: tuple[int, ...],
    channels: int,
    taps: tuple[int, ...],
    layout: str = "NHWC",
    epilogue: bool = False,
    dtype: str = "float32",
    forward: bool = False,
    **how: Any,
) -> fg.Graph:
    """Builds the gradient of an image, or a convolution of one."""
    graph, rank = fg.Graph("gradient", io_dtype=dtype), len(taps)
    w_shape = (channels, loss[1], *taps) if forward else (loss[1], channels, *taps)
    order = (0, *range(2, rank + 2), 1) if layout == "NHWC" else tuple(range(rank + 2))
    dy, w = (graph.tensor(n, s, strides=packed_strides(s, order)) for n, s in (("loss", loss), ("w", w_shape)))
    dx = graph.conv_fprop(dy, w, name="dx", **how) if forward else graph.conv_dgrad(dy, w, name="dx", **how)
    if epilogue:
        bias = graph.tensor("bias", (1, channels, *(1 for _ in taps)))
        dx = graph.relu(dx + bias) * 0.5
    graph.output(dx, name="result")
    return graph


def ops(graph: fg.Graph, **options: Any) -> list[str]:
    made = plan(graph, Options(target=target("h200"), **options))
    return [n.op.name for k in made.kernels for n in k.group.nodes]


def test_which_are_products() -> None:
    few = ((32, 512, 32, 32), 4, (3, 3))
    assert ops(gradient(*few, stride=2, padding=1)) == ["matmul", "col2im"]
    assert ops(gradient(*few, stride=2, padding=1, epilogue=True)) == ["matmul", "col2im", "add", "relu", "mul"]
    assert ops(gradient((8, 512, 128, 128), 64, (3, 3), stride=2, padding=1)) == ["matmul", "col2im"]
    for graph, options in (
        (gradient(*few, stride=2, padding=1), {"workspace": 1 << 20}),
        (gradient(*few, stride=2, padding=1, algorithm="direct"), {}),
        (gradient((1, 16, 8, 8), 16, (3, 3)), {}),
    ):
        assert "conv_dgrad" in ops(graph, **options)


def test_the_op_adds_what_lies_over_each_position() -> None:
    """The oracle adds one element after another."""
    rng = np.random.default_rng(0)
    for taps, positions, stride, before, size in (
        ((3, 2), (4, 5), (2, 3), (1, 0), (8, 14)),
        ((1, 4), (3, 3), (3, 1), (0, 2), (9, 3)),
        ((2,), (5,), (4,), (1,), (21,)),
        ((2, 3, 2), (2, 3, 2), (1, 2, 2), (0, 1, 1), (3, 5, 3)),
    ):
        columns = rng.standard_normal((2, 3, *taps, *positions))
        how = {"size": size, "stride": stride, "padding": tuple((b, 0) for b in before), "dtype": float32}
        expected = np.zeros((2, 3, *size))
        for tap, at in product(product(*map(range, taps)), product(*map(range, positions))):
            place = tuple(p * s + t - b for p, s, t, b in zip(at, stride, tap, before))
            if all(0 <= x < n for x, n in zip(place, size)):
                expected[(..., *place)] += columns[(slice(None), slice(None), *tap, *at)]
        assert COL2IM.infer((TensorType(columns.shape, float32),), how).shape == expected.shape
        np.testing.assert_allclose(COL2IM.reference(columns, **how), expected)


def test_which_convolutions_are_products() -> None:
    narrow = ((8, 768, 64, 64), 3, (5, 5))
    assert ops(gradient(*narrow, padding=2, dtype="bfloat16", forward=True))[-2:] == ["matmul", "col2im"]
    for graph in (
        gradient(*narrow, padding=2, stride=2, dtype="bfloat16", forward=True),
        gradient(*narrow, padding=5, dtype="bfloat16", forward=True),
        gradient((8, 64, 64, 64), 64, (5, 5), padding=2, dtype="bfloat16", forward=True),
    ):
        assert "col2im" not in ops(graph)


PROBLEMS: tuple[Any, ...] = (
    ((2, 64, 5, 6), 4, (3, 3), {"stride": 2, "padding": 1}),
    ((1, 70, 4, 3), 5, (4, 4), {"stride": 4}),
    ((3, 66, 3, 4), 8, (5, 2), {"stride": (3, 1), "padding": ((2, 1), (0, 1)), "size": (9, 4)}),
    ((2, 33, 11), 3, (7,), {"stride": 2, "padding": 3}),
    ((1, 65, 2, 3, 2), 2, (2, 3, 2), {"stride": (1, 2, 2), "padding": (0, 1, 0)}),
    ((1, 64, 1, 1), 1, (3, 3), {"stride": 5}),
    ((2, 64, 4, 4), 3, (1, 2), {"stride": 3, "size": (12, 12)}),
    ((2, 40, 4, 4), 3, (1, 1), {"stride": 2}),
    ((1, 24, 5, 4), 6, (3, 2), {"stride": 2, "mode": "convolution"}),
    ((2, 32, 7, 6), 4, (3, 3), {"padding": 1, "forward": True}),
    ((2, 33, 9), 5, (4,), {"padding": ((1, 3),), "forward": True, "mode": "convolution"}),
    ((1, 16, 3, 4, 5), 2, (3, 1, 2), {"forward": True}),
)


def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all gradients that may be products become some."""
    monkeypatch.setattr(tap_products, "MARGIN", dict.fromkeys(tap_products.MARGIN, 0.0))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_equal_to_the_reference(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    made(monkeypatch)
    graphs = [gradient(*p, layout, epilogue=n % 2 == 1, **how) for n, (*p, how) in enumerate(PROBLEMS)]
    halves = zip(PROBLEMS, cycle(("bfloat16", "float16")))
    graphs += [gradient(*p, layout, epilogue=True, dtype=dtype, **how) for (*p, how), dtype in halves]
    graphs.append(gradient((2, 64, 5, 6), 4, (3, 3), layout, compute_dtype="tf32", stride=2, padding=1))
    assert all("col2im" in ops(graph) for graph in graphs)
    check_cases([Case(g, arch=arch, special=0.005) for g in graphs for arch in ("sm_80", "sm_90a")], guard=True)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_gradients(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(low, high)) for _ in range(rank))

    taps, stride, positions = each(1, 4), each(1, 4), each(1, 4)
    before, after = each(0, 2), each(0, 2)
    sizes = [(p - 1) * s + k - b - a for p, s, k, b, a in zip(positions, stride, taps, before, after)]
    more = [data.draw(st.integers(0, s - 1)) for s in stride]
    size = tuple(n + m for n, m in zip(sizes, more))
    if min(size) < 1:
        return
    dtype = data.draw(st.sampled_from(("float32", "bfloat16")))
    loss = (data.draw(st.integers(1, 2)), data.draw(st.sampled_from((3, 32, 65))), *positions)
    how = {"stride": stride, "padding": tuple(zip(before, after)), "size": size}
    layout, epilogue = data.draw(st.sampled_from(("NHWC", "NCHW"))), data.draw(st.booleans())
    graph = gradient(loss, data.draw(st.integers(1, 5)), taps, layout, epilogue, dtype, **how)
    with pytest.MonkeyPatch.context() as patch:
        made(patch)
        check_cases([Case(graph, arch="sm_90a")], guard=True)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for layout in ("NHWC", "NCHW"):
        check_on_gpu([gradient((8, 96, 33, 30), 24, (3, 3), layout, epilogue=True, stride=2, padding=1)])

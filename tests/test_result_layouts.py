"""Gradients whose results are turned by a kernel behind: which, and that they stay the same."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen.target import target
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.graph import Graph
from fusegraph.lowering import convolution
from fusegraph.lowering.base import Options
from fusegraph.passes import filter_gradients
from fusegraph.plan import plan

HOPPER = Options(target=target("h200"))


def gradient(
    loss: tuple[int, ...], channels: int, layout: str = "contiguous", epilogue: bool = False, **how: Any
) -> Graph:
    """Builds the gradient of an image of a convolution with filters of 3 taps a dimension."""
    graph = fg.Graph("gradient", io_dtype="bfloat16")
    w = graph.tensor("w", (loss[1], channels, *(3 for _ in loss[2:])))
    y = graph.conv_dgrad(graph.tensor("loss", loss, layout=layout), w, **{"stride": 2, "padding": 1, **how})
    graph.output(graph.relu(y) + graph.tensor("bias", (channels, 1, 1)) if epilogue else y, name="y", layout=layout)
    return graph


def filter_gradient(image: tuple[int, ...], filters: int, taps: int = 3, layout: str = "contiguous") -> Graph:
    """Builds the gradient of the filter of a convolution with so many taps a dimension, all of whose rows are kept."""
    graph = fg.Graph("filter_gradient", io_dtype="bfloat16")
    x = graph.tensor("x", image, layout="channels_last")
    loss = graph.tensor("loss", (image[0], filters, *image[2:]), layout="channels_last")
    graph.output(graph.conv_wgrad(x, loss, taps=taps, padding=taps // 2), name="dw", layout=layout)
    return graph


def families(graph: Graph) -> list[str]:
    return [k.group.family for k in plan(graph, HOPPER).kernels]


def test_which_are_turned() -> None:
    assert families(gradient((32, 64, 56, 56), 64, "channels_last"))[-1] == "contraction"
    large = gradient((32, 64, 56, 56), 64)
    assert families(large)[-2:] == ["contraction", "pointwise"]
    made = plan(large, HOPPER).kernels[-2]
    (write,) = made.group.writes
    assert write.strides[1] == 1
    assert families(gradient((1, 16, 8, 8), 16)) == ["contraction"]  # so few that another kernel takes longer
    assert families(gradient((32, 64, 112, 56), 64, stride=(1, 2)))[-1] == "pointwise"
    assert families(gradient((32, 64, 56, 112), 64, stride=(2, 1)))[-1] == "contraction"  # rows are written whole


def test_which_gradients_of_filters_are_turned() -> None:
    assert families(filter_gradient((1, 320, 32, 32), 696, taps=7)) == ["contraction", "pointwise"]
    assert families(filter_gradient((1, 320, 32, 32), 696, taps=7, layout="channels_last")) == ["contraction"]
    assert families(filter_gradient((1, 320, 32, 32), 696, taps=1)) == ["contraction"]
    in_parts = plan(filter_gradient((64, 256, 56, 56), 256), HOPPER).kernels
    assert [k.group.family for k in in_parts] == ["contraction", "pointwise"]  # what adds them up turns them


def test_equal_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "PHASES_APART", 1e9)
    monkeypatch.setattr(convolution, "TAPS_APART", 1e9)
    monkeypatch.setattr(filter_gradients, "MARGIN", 1e9)

    def turned(made: CpuExecutable) -> None:
        assert made.plan is not None
        assert [k.group.family for k in made.plan.kernels] == ["contraction", "pointwise"]

    check_cases(
        [
            Case(gradient((2, 6, 5, 7), 5), check=turned),
            Case(gradient((1, 8, 6, 4), 12, epilogue=True), check=turned),
            Case(gradient((2, 8, 3, 4, 5), 4, stride=(1, 2, 2)), check=turned),
            Case(gradient((2, 8, 9), 6, stride=3, dilation=3, padding=3), check=turned),
            Case(filter_gradient((1, 40, 5, 4), 33), check=turned),
            Case(filter_gradient((1, 36, 9), 40), check=turned),
        ],
        guard=True,
    )

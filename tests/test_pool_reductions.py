"""Pools of large windows that lie side by side are reductions; others stay pools."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import Case, check_cases

import fusegraph as fg
from fusegraph.plan import plan


def _graph(
    op: str, shape: tuple[int, ...], dtype: str = "float32", layout: str | None = None, **attributes: Any
) -> fg.Graph:
    graph = fg.Graph("pools", io_dtype=dtype)
    x = graph.tanh(graph.tensor("x", shape, layout=layout))
    graph.output(graph.relu(getattr(graph, op)(x, **attributes) + 1.0))
    return graph


def _families(graph: fg.Graph) -> list[str]:
    return [k.group.family for k in plan(graph).kernels]


REDUCED = [
    _graph("adaptive_avg_pool", (2, 6, 56, 56), "float16", size=2),
    _graph("adaptive_avg_pool", (2, 8, 36, 28), "bfloat16", "NHWC", size=(2, 1)),
    _graph("adaptive_max_pool", (1, 3, 24, 40), size=(2, 4)),
    _graph("avg_pool", (2, 5, 32, 32), window=16),
    _graph("avg_pool", (2, 5, 32, 32), window=8, stride=8, count_include_pad=False),
    _graph("max_pool", (2, 5, 30, 27), window=(10, 9)),
    _graph("max_pool", (2, 5, 300), layout=None, window=100),
    _graph("avg_pool", (1, 4, 8, 8, 8), "float64", window=4),
]
POOLED = [
    _graph("avg_pool", (2, 5, 32, 32), window=2),
    _graph("avg_pool", (2, 5, 33, 33), window=16),
    _graph("max_pool", (2, 5, 32, 32), window=16, stride=8),
    _graph("max_pool", (2, 5, 30, 30), window=16, stride=16, padding=1),
    _graph("max_pool", (2, 5, 32, 32), window=8, stride=8, padding=4),
    _graph("adaptive_avg_pool", (2, 6, 50, 50), size=4),
]


def test_which_are_reductions() -> None:
    for graph in REDUCED:
        assert _families(graph) == ["rows"], graph.outputs
    for graph in POOLED:
        assert "pool" in _families(graph), graph.outputs


@pytest.mark.parametrize("special", [0.0, 0.05])
def test_results(special: float) -> None:
    check_cases([Case(graph, special=special) for graph in (*REDUCED, *POOLED)], guard=True)

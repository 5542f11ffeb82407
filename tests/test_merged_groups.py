"""Filters' gradients of several groups together: which, and that the gradient stays the same."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import quick
from kernel_cases import Case, check_cases
from test_filter_gradient import gradient

from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.passes import filter_gradients, merged_groups
from fusegraph.passes.merged_groups import Merged
from fusegraph.plan import plan


def ops(graph: Any, name: str = "h200") -> list[str]:
    made = plan(graph, Options(target=target(name)))
    return [n.op.name for k in made.kernels for n in k.group.nodes]


def test_which_are_merged() -> None:
    assert "binary_select" in ops(gradient((64, 256, 28, 28), 256, 3, 16, "bfloat16", padding=1))
    for graph in (
        gradient((64, 256, 28, 28), 256, 3, 2, "bfloat16", padding=1),  # groups as wide as a tile
        gradient((64, 256, 28, 28), 256, 3, 256, "bfloat16", padding=1),  # depthwise
        gradient((1, 64, 6, 6), 64, 3, 4, "bfloat16", padding=1),  # so small that another kernel takes longer
    ):
        assert "binary_select" not in ops(graph)


@pytest.mark.parametrize("parts", quick(2, 1))
def test_equal_to_the_reference(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Nothing of one group gets to another one, not even what is NaN or infinite."""
    monkeypatch.setattr(filter_gradients, "weighed", lambda *_: None)
    monkeypatch.setattr(
        merged_groups,
        "merged",
        lambda node, *_: Merged(2 if node.op.name == "conv_wgrad" else 1, parts, 0.0),
    )
    problems = (
        gradient((2, 32, 9, 8), 32, 3, 4, "bfloat16", padding=1, epilogue=True),
        gradient((2, 12, 10, 8), 20, (3, 2), 4, "float16", "NCHW", stride=2, mode="convolution"),
        gradient((2, 12, 40), 6, 5, 2, "float32"),
        gradient((2, 16, 5, 6, 4), 16, 3, 2, "bfloat16", padding=1),
    )
    check_cases([Case(p, arch=arch, special=0.005) for p in problems for arch in ("sm_80", "sm_90a")], guard=True)

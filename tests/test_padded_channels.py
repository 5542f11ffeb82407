"""Images whose channels are padded for a filter's gradient: which, and that the gradient stays the same."""

from __future__ import annotations

from typing import Any

import pytest
from choosing import always
from kernel_cases import Case, check_cases
from test_filter_gradient import gradient

from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.ops import TABLE
from fusegraph.passes import padded_channels
from fusegraph.plan import plan


def ops(graph: Any, name: str = "h200") -> list[str]:
    made = plan(graph, Options(target=target(name)))
    return [n.op.name for k in made.kernels for n in k.group.nodes]


def test_which_are_padded() -> None:
    odd = gradient((32, 29, 56, 56), 80, 7, 1, "bfloat16", padding=3)
    assert {"pad", "slice"} <= set(ops(odd))
    for graph in (
        gradient((32, 32, 56, 56), 80, 7, 1, "bfloat16", padding=3),  # as tensor cores take them
        gradient((32, 29, 56, 56), 80, 7, 1, "float32", padding=3),  # exact products of float32
        gradient((32, 29, 56, 56), 80, 1, 1, "bfloat16"),  # a plain product
        gradient((2, 29, 6, 6), 80, 3, 1, "bfloat16"),  # so small that a copy takes longer
        gradient((32, 58, 56, 56), 80, 7, 2, "bfloat16", padding=3),  # groups
    ):
        assert "pad" not in ops(graph)


def test_equal_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    wgrad = TABLE["conv_wgrad"]
    monkeypatch.setattr(padded_channels, "weighed", always(lambda node: 16 if node.op is wgrad else 0))
    problems = (
        gradient((2, 5, 9, 8), 24, 3, 1, "bfloat16", padding=1, epilogue=True),
        gradient((2, 13, 10, 8), 7, (3, 2), 1, "float16", "NCHW", stride=2, mode="convolution"),
        gradient((2, 3, 40), 16, 5, 1, "bfloat16"),
    )
    check_cases([Case(p, arch=arch, special=0.01) for p in problems for arch in ("sm_80", "sm_90a")], guard=True)

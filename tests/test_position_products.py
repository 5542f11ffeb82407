"""Gradients of filters with one tap as matrix products: which, and that they stay the same."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import Case, check_cases
from test_filter_gradient import gradient

import fusegraph as fg
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.passes import filter_gradients, position_products
from fusegraph.plan import plan


def ops(graph: fg.Graph) -> list[str]:
    made = plan(graph, Options(target=target("h200")))
    return [n.op.name for k in made.kernels for n in k.group.nodes]


def of(image: tuple[int, ...], filters: int, layout: str, dtype: str = "bfloat16", **how: Any) -> fg.Graph:
    return gradient(image, filters, 1, how.pop("groups", 1), dtype, layout, **how)


def test_which_are_products() -> None:
    assert ops(of((2, 64, 256, 256), 96, "NHWC")) == ["matmul_parts", "reduction"]
    for graph in (
        of((2, 64, 256, 256), 96, "NCHW"),  # positions of two images do not meet
        of((2, 64, 256, 256), 96, "NHWC", stride=2),
        of((2, 64, 256, 256), 96, "NHWC", padding=1),
        of((2, 64, 256, 256), 96, "NHWC", groups=2),
        of((64, 64, 8, 8), 96, "NHWC"),  # images enough
    ):
        assert not any("matmul" in op for op in ops(graph))


def test_equal_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_products, "MARGIN", 0.0)
    monkeypatch.setattr(filter_gradients, "weighed", lambda *_: None)
    problems = [
        of((2, 20, 9, 7), 33, layout, dtype, epilogue=dtype == "float32")
        for layout in ("NHWC", "NCHW")
        for dtype in ("bfloat16", "float16", "float32")
    ]
    problems += [of((1, 5, 130), 3, "NCHW"), of((1, 24, 4, 5, 6), 40, "NHWC"), of((3, 1, 4, 4), 1, "NHWC", "float32")]
    assert sum("matmul" in " ".join(ops(p)) for p in problems) >= 5
    check_cases([Case(p, arch=arch, special=0.005) for p in problems for arch in ("sm_80", "sm_90a")], guard=True)

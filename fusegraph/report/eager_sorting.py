"""Sorting as a torch user would run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusegraph.graph import Node
from fusegraph.ops.sort import order_of


def sorting(torch: Any, node: Node) -> Callable[..., Any]:
    """The sorted elements of a node, or where they come from.  (Of those that are equal torch's topk takes any.)"""
    axis, descending, keep = order_of(node.inputs[0].type, node.attributes)
    part, result = int(node.attributes.get("dtype") is not None), getattr(torch, node.output.dtype.name)

    def run(x: Any) -> Any:
        found = torch.sort(x, dim=axis, descending=descending, stable=True)[part]
        return found.narrow(axis, 0, keep).to(result)

    return run

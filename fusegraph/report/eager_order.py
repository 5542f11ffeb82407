"""torch's functions for what depends on the order of elements along an axis: running sums and sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusegraph.dtypes import float32
from fusegraph.graph import Node
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.sort import order_of


def scanned(torch: Any, node: Node) -> Callable[..., Any]:
    """The running sums of a node."""
    axis, reverse, result = node.attributes["axis"], node.attributes["reverse"], node.output.dtype
    wide, stored = (getattr(torch, dtype.name) for dtype in (compute_dtype(result, float32), result))

    def run(x: Any) -> Any:
        total = torch.cumsum(x.flip(axis) if reverse else x, axis, dtype=wide)
        return (total.flip(axis) if reverse else total).to(stored)

    return run


def sorted_(torch: Any, node: Node) -> Callable[..., Any]:
    """The sorted elements of a node, or where they come from.  (Of those that are equal torch's topk takes any.)"""
    axis, descending, keep = order_of(node.inputs[0].type, node.attributes)
    part, result = int(node.attributes.get("dtype") is not None), getattr(torch, node.output.dtype.name)
    return lambda x: torch.sort(x, dim=axis, descending=descending, stable=True)[part].narrow(axis, 0, keep).to(result)

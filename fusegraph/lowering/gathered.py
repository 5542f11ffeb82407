"""Gathers in front of reductions: every row of the space is part of one that a gather takes from memory."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.declined import Declined
from fusegraph.graph import Node, Tensor
from fusegraph.lowering.base import GroupView
from fusegraph.lowering.views import Strides, source, strides_over
from fusegraph.ops.base import Kind, Role

#: Tensors with elements further apart than this are read at positions of 64 bits.
FAR = 2**30


def takes_rows(view: GroupView) -> bool:
    """Returns true for reductions and pointwise nodes behind gathers, perhaps of views, and nothing else."""
    moved = view.of(Kind.MOVEMENT)
    known = len(moved) + len(view.of(Kind.REDUCTION)) + len(view.of(Kind.POINTWISE))
    if not view.of(Kind.REDUCTION) or known < len(view.nodes):
        return False
    views = [m.output for m in moved if m.op.role is not Role.GATHER]
    readers = (n for t in views for n in view.graph.consumers(t))
    inside = all(n.kind is Kind.MOVEMENT and n in view.members for n in readers)
    return inside and not any(t in view.writes for t in views)


def operands(view: GroupView, node: Node) -> tuple[Tensor, Tensor]:
    """Returns what a gather takes, and its index, where they lie in memory.

    Raises Declined if the same kernel would make them.
    """
    x, index = (source(view.graph, view.members, t) for t in node.inputs)
    if x is None or index is None:
        raise Declined(f"{node.name!r} takes what the same kernel would make")
    return x, index


def strides(view: GroupView, node: Node, shape: Sequence[int]) -> tuple[Strides, Strides]:
    """Returns the strides over a shape of what a gather takes, and of its index."""
    (x, index), axis = operands(view, node), node.attributes["axis"]
    taken = (*x.strides[:axis], *(0 for _ in index.shape), *x.strides[axis + 1 :])
    along = (*(0 for _ in x.shape[:axis]), *index.strides, *(0 for _ in x.shape[axis + 1 :]))
    own = node.output.shape
    return strides_over(own, taken, shape), strides_over(own, along, shape)


def check(view: GroupView, node: Node, shape: Sequence[int], axes: Sequence[int]) -> None:
    """Raises Declined unless the rows of a shape along some axes are all, or parts, of those that a gather takes."""
    x, index = operands(view, node)
    taken, _ = strides(view, node, shape)
    first = len(shape) - node.output.rank + node.attributes["axis"]
    over = set(range(first, first + index.rank)).intersection(axes)
    if over or not any(taken[d] for d in axes if shape[d] > 1):
        raise Declined(
            f"{node.name!r} {list(node.output.shape)} does not take rows of {x.name!r} that are reduced, "
            f"{list(shape)} along {list(axes)}"
        )

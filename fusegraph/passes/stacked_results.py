"""Results of reductions that are added up one by one are reduced together, as one tensor.

A norm of all gradients is a sum of the sums of each.  Their kernels then write parts of one tensor, and none of them
waits for another one: they can be launched together (`passes.launched_together`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from math import prod
from typing import Any

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE, Op
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced

#: Fewer results of reductions stay as they are.
LEAST = 4
#: The mode of a reduction that combines elements as an op combines two.
_MODES: dict[Role | None, str] = {Role.SUM: "add", Role.PRODUCT: "mul", Role.MAX: "max", Role.MIN: "min"}


def stack_results(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Makes one reduction of what combines the single results of several reductions."""
    return replaced(graph, lambda node: _combined(graph, node), _write)


#: The results of reductions that a node combines together with those in front of it, and what else these combine.
_Found = tuple[list[Tensor], list[Tensor]]


def _combined(graph: Graph, last: Node) -> _Found | None:
    """Returns what a node combines; None for nodes whose result is combined in turn, or with few reductions."""
    if last.op.role not in _MODES or last.output.size != 1 or last.output.dtype.itemsize < 4:
        return None
    if any(_is_inner(graph, last.output, node) for node in graph.consumers(last.output)):
        return None
    found, left = [], [*reversed(last.inputs)]
    while left:
        tensor = left.pop()
        node = graph.producer(tensor)
        if node is not None and _is_inner(graph, tensor, last):
            left += reversed(node.inputs)
        else:
            found.append(tensor)
    reduced = [_is_reduced(graph, t) for t in found]
    if sum(reduced) < LEAST or any(t.dtype != last.output.dtype for t in found):
        return None
    stacked = [*compress(found, reduced)]
    if _follow(graph, stacked):
        return None
    return stacked, [t for t, so in zip(found, reduced) if not so]


def _follow(graph: Graph, tensors: list[Tensor]) -> bool:
    """Returns true if one of some tensors is computed from another of them."""
    wanted, seen = set(tensors), set[Tensor]()
    left = [t for tensor in tensors if (node := graph.producer(tensor)) is not None for t in node.inputs]
    while left:
        tensor = left.pop()
        if tensor in wanted:
            return True
        node = graph.producer(tensor)
        if tensor not in seen and node is not None:
            seen.add(tensor)
            left += node.inputs
    return False


def _is_inner(graph: Graph, tensor: Tensor, consumer: Node) -> bool:
    """Returns true if a result is for a node alone that combines it as it was made."""
    node = graph.producer(tensor)
    alike = node is not None and node.op.role is consumer.op.role and tensor.dtype == consumer.output.dtype
    return alike and tensor.size == 1 and len(graph.consumers(tensor)) == 1 and tensor not in graph.outputs


def _is_reduced(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if a number follows from the result of a reduction, and from nothing larger otherwise."""
    node = graph.producer(tensor)
    while node is not None and node.output.size == 1 and node.kind in (Kind.POINTWISE, Kind.MOVEMENT):
        node = next((n for n in map(graph.producer, node.inputs) if n is not None), None)
    return node is not None and node.op.role is Role.REDUCE and prod(node.output.shape) == 1 < node.inputs[0].size


def _write(rewrite: Rewrite, node: Node, found: _Found) -> None:
    graph, result, (reduced, others) = rewrite.graph, node.output, found
    each = [graph.apply(TABLE["reshape"], (rewrite.new[t],), {"shape": (1,)}) for t in reduced]
    stack = graph.apply(TABLE["concatenate"], tuple(named(t, node.name, "one") for t in each), {"axis": 0})
    how = {**TABLE["reduction"].attributes, "mode": _MODES[node.op.role], "axes": (0,), "keepdims": False}
    steps: list[tuple[Op, tuple[Tensor, ...], Mapping[str, Any]]]
    steps = [(TABLE["reduction"], (named(stack, node.name, "results"),), how)]
    steps += [(node.op, (rewrite.new[t],), node.attributes) for t in others]
    if result.rank:
        steps.append((TABLE["reshape"], (), {"shape": result.shape}))
    total: tuple[Tensor, ...] = ()
    for op, operands, attributes in steps[:-1]:
        total = (named(graph.apply(op, (*total, *operands), attributes), node.name, "total"),)
    op, operands, attributes = steps[-1]
    rewrite.take_over(Node(op, (*total, *operands), attributes, result), (*total, *operands))

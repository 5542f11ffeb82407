"""Concatenations that are never made: their parts are written in their places by what makes them.

Several that grow, each the one before with another part behind, share the memory of the largest: the others are its
first parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import TypeAlias

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import stride_order
from fusegraph.lowering.views import joins_in_place
from fusegraph.ops.base import Kind, Role

#: Bytes at whose multiples tensor cores and vectors begin.
ALIGNED = 16


#: Where a part is: in what, along which axis, and where it begins there.
_Place: TypeAlias = tuple[Tensor, int, int]


def planned_joins(graph: Graph) -> frozenset[Node]:
    """Returns the concatenations that are kept apart from other kernels, so that they need none.

    Each has parts that are in memory anyway, all of them results of kernels, or is the beginning of such another.
    """
    places: dict[Tensor, _Place] = {}
    planned: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op.role is not Role.CONCATENATE or not node.output.size:
            continue
        inputs, axis = node.inputs, node.attributes["axis"]
        base, along, start = places.get(node.output, (node.output, axis, 0))
        if joins_in_place(node) and places.keys().isdisjoint(inputs) and _worthwhile(graph, node):
            planned.add(node)
            if along != axis:
                base, start = node.output, 0
            for tensor in inputs:
                places[tensor] = base, axis, start
                start += tensor.shape[axis]
        elif node.output not in places and node.output not in graph.outputs and _is_beginning(node, places):
            planned.add(node)
    return frozenset(planned)


def _is_beginning(node: Node, places: Mapping[Tensor, _Place]) -> bool:
    """Returns true if the parts of a concatenation follow each other where they are in another."""
    axis, expected = node.attributes["axis"], places.get(node.inputs[0])
    if expected is None or expected[1] != axis:
        return False
    base, _, start = expected
    for tensor in node.inputs:
        if places.get(tensor) != (base, axis, start):
            return False
        start += tensor.shape[axis]
    return True


def _worthwhile(graph: Graph, node: Node) -> bool:
    """Returns true if all parts are in memory anyway, and lie no worse in their places."""
    result, axis, start = node.output, node.attributes["axis"], 0
    for tensor in node.inputs:
        dims = [d for d, n in enumerate(tensor.shape) if n > 1]
        order, own = ([d for d in stride_order(t.shape, t.strides) if d in dims] for t in (result, tensor))
        there = _alignment(result, dims, start * result.strides[axis])
        if order != own or there < _alignment(tensor, dims, 0) or not _in_memory(graph, tensor):
            return False
        start += tensor.shape[axis]
    return True


def _alignment(tensor: Tensor, dims: Sequence[int], start: int) -> int:
    """Returns the bytes that lines of a tensor begin at multiples of, ``start`` elements from its first one on."""
    steps = (s for d, s in enumerate(tensor.strides) if d in dims and s != 1)
    return gcd(ALIGNED, *(step * tensor.dtype.itemsize for step in (start, *steps)))


def _in_memory(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if a tensor is written by a kernel that does more than that: no pointwise op could be spared it."""
    node = graph.producer(tensor)
    while node is not None and node.kind is Kind.POINTWISE:
        behind = [t for t in node.inputs if t.shape == tensor.shape and graph.producer(t) is not None]
        own = [t for t in behind if graph.consumers(t) == [node]]
        node = graph.producer(own[0]) if own else None
    if node is not None and node.op.role is Role.CONCATENATE:
        return all(_in_memory(graph, t) for t in node.inputs)
    return node is not None and node.kind is not Kind.MOVEMENT

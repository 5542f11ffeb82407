"""Concatenations that are never made: their parts are written in their places by what makes them.

Several that grow, each the one before with another part behind, share the memory of the largest: the others are its
first parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from codegen.sizes import aligned
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.views import joins_in_place
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, copied, replaced

#: Bytes at whose multiples tensor cores and vectors begin.
ALIGNED = 16


#: Where a part is: in what, along which axis, and where it begins there.
_Place: TypeAlias = tuple[Tensor, int, int]


def planned_joins(graph: Graph) -> frozenset[Node]:
    """Returns the concatenations that are kept apart from other kernels, so that they need none.

    Each has parts that are in memory anyway, all of them results of kernels, or is the beginning of such another.
    """
    return frozenset(_plan(graph)[0])


def copy_parts(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Copies parts of concatenations that cannot be written in their places, where all others can."""
    planned, places = _plan(graph)
    taken = set(places)
    apart: dict[Node, list[bool]] = {}
    for node in reversed(graph.nodes):
        if node.op.role is Role.CONCATENATE and node not in planned and _is_needed(graph, node):
            free = [_is_free(graph, t) and t not in taken and node.inputs.count(t) == 1 for t in node.inputs]
            own = [t for t, is_free in zip(node.inputs, free) if is_free and _in_memory(graph, t)]
            # Whoever makes a part writes the copy as well; that of an input is a kernel more.
            more = sum(graph.producer(t) is None for t in node.inputs) - 1
            launches = max(more, 0) * options.target.planned.launch_us * options.target.planned.memory_rate
            if not all(free) and _fits(node) and 2 * sum(t.nbytes for t in own) > launches:
                apart[node] = [not is_free for is_free in free]
                taken.update(t for t, is_free in zip(node.inputs, free) if is_free)
    return replaced(graph, apart.get, _copy)


def _copy(rewrite: Rewrite, node: Node, apart: Sequence[bool]) -> None:
    """Writes a concatenation some of whose parts are copied."""
    order = stride_order(node.output.shape, node.output.strides)
    rewrite.take_over(node, [
        copied(rewrite.graph, t, "in its place", packed_strides(t.shape, order)) if is_copied else t
        for t, is_copied in zip(rewrite.inputs(node), apart)
    ])  # fmt: skip


def _plan(graph: Graph) -> tuple[set[Node], dict[Tensor, _Place]]:
    """Returns the concatenations that are to need no kernel, and where their parts are."""
    places: dict[Tensor, _Place] = {}
    planned: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op.role is not Role.CONCATENATE or not node.output.size:
            continue
        inputs, axis = node.inputs, node.attributes["axis"]
        base, along, start = places.get(node.output, (node.output, axis, 0))
        in_memory = _fits(node) and all(_in_memory(graph, t) for t in inputs)
        if in_memory and joins_in_place(node) and places.keys().isdisjoint(inputs):
            planned.add(node)
            if along != axis:
                base, start = node.output, 0
            for tensor in inputs:
                places[tensor] = base, axis, start
                start += tensor.shape[axis]
        elif node.output not in places and node.output not in graph.outputs and _is_beginning(node, places):
            planned.add(node)
    return planned, places


def _is_needed(graph: Graph, node: Node) -> bool:
    """Returns true if a result is read by kernels that take it from memory alone, or leaves the graph."""
    kinds = {n.kind for n in graph.consumers(node.output)}
    return node.output in graph.output_numbers or bool(kinds - {Kind.POINTWISE, Kind.MOVEMENT})


def _is_free(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if nobody else says where a tensor is written."""
    return graph.producer(tensor) is not None and tensor not in graph.output_numbers


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


def _fits(node: Node) -> bool:
    """Returns true if the parts of a concatenation lie no worse in their places than by themselves."""
    result, axis, start = node.output, node.attributes["axis"], 0
    for tensor in node.inputs:
        dims = [d for d, n in enumerate(tensor.shape) if n > 1]
        order, own = ([d for d in stride_order(t.shape, t.strides) if d in dims] for t in (result, tensor))
        there = _alignment(result, dims, start * result.strides[axis])
        if order != own or there < _alignment(tensor, dims, 0):
            return False
        start += tensor.shape[axis]
    return True


def _alignment(tensor: Tensor, dims: Sequence[int], start: int) -> int:
    """Returns the bytes that lines of a tensor begin at multiples of, ``start`` elements from its first one on."""
    steps = (s for d, s in enumerate(tensor.strides) if d in dims and s != 1)
    return aligned(ALIGNED, *(step * tensor.dtype.itemsize for step in (start, *steps)))


def _in_memory(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if a tensor is written by a kernel that does more than that: no pointwise op could be spared it."""
    node = graph.producer(tensor)
    if node is not None and node.op.role is Role.CAST and node.inputs[0].dtype == tensor.dtype:
        return True  # a copy
    while node is not None and node.kind is Kind.POINTWISE:
        behind = [t for t in node.inputs if t.shape == tensor.shape and graph.producer(t) is not None]
        own = [t for t in behind if graph.consumers(t) == [node]]
        node = graph.producer(own[0]) if own else None
    if node is not None and node.op.role is Role.CONCATENATE:
        return all(_in_memory(graph, t) for t in node.inputs)
    return node is not None and node.kind is not Kind.MOVEMENT

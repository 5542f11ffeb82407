"""Tensors that alike nodes make of other tensors, joined: the same nodes, of these tensors joined.

Weights of few bits are decoded from codes and scales.  The concatenation of several is decoded from their codes, one
behind another, and their scales, and takes no more bytes than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import intermediate


@dataclass(frozen=True)
class Joined:
    """The concatenation of tensors.

    tensors     what is joined.
    axis        along which; None if all are one value, which stays as it is.
    node        the node that makes the first of them; None if they are joined in memory.
    inputs      what nodes like it take then.
    attributes  of such a node.
    """

    tensors: tuple[Tensor, ...]
    axis: int | None
    node: Node | None = None
    inputs: tuple[Joined, ...] = ()
    attributes: Mapping[str, Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensors[0].shape
        if self.axis is None:
            return shape
        return (*shape[: self.axis], sum(t.shape[self.axis] for t in self.tensors), *shape[self.axis + 1 :])

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the whole, which lies in memory as the first of them does."""
        first = self.tensors[0]
        return packed_strides(self.shape, stride_order(first.shape, first.strides))


def joined(graph: Graph, tensors: Sequence[Tensor], axis: int, nodes: Container[Node]) -> Joined | None:
    """Returns how tensors are joined along an axis, and what ``nodes`` make of others by joining these.

    None if they are not made alike, or the axis is not one of what they are made of.
    """
    return _Joining(graph, nodes).of(tuple(tensors), axis)


class _Joining:
    """Finds how tensors are joined; what several nodes take is looked at once."""

    def __init__(self, graph: Graph, nodes: Container[Node]) -> None:
        self._graph, self._nodes = graph, nodes
        self._found: dict[tuple[tuple[Tensor, ...], int], Joined | None] = {}
        self._equal: dict[tuple[Tensor, Tensor], bool] = {}

    def of(self, tensors: tuple[Tensor, ...], axis: int) -> Joined | None:
        key = tensors, axis
        if key not in self._found:
            self._found[key] = self._joined(tensors, axis)
        return self._found[key]

    def _joined(self, tensors: tuple[Tensor, ...], axis: int) -> Joined | None:
        first = tensors[0]
        beside = [(*t.shape[:axis], 0, *t.shape[axis + 1 :]) for t in tensors]
        if any(t.dtype != first.dtype for t in tensors) or len(set(beside)) > 1:
            return None
        made = [n for t in tensors if (n := self._graph.producer(t)) is not None and n in self._nodes]
        if len(made) < len(tensors):
            return None if made else Joined(tensors, axis)
        node = made[0]
        along, size = _along(node, axis), sum(t.shape[axis] for t in tensors)
        attributes = _widened(node, axis, size)
        alike = [n.op is node.op and _along(n, axis) == along for n in made]
        if along is None or not all(alike) or any(repr(_widened(n, axis, size)) != repr(attributes) for n in made):
            return None
        inputs = []
        for place, own in enumerate(along):
            operands = tuple([n.inputs[place] for n in made])
            found = self._same(operands) if own is None else self.of(operands, own)
            if found is None:
                return None
            inputs.append(found)
        return Joined(tensors, axis, node, tuple(inputs), attributes)

    def _same(self, tensors: Sequence[Tensor]) -> Joined | None:
        """Returns the one value that all tensors are; None if they may differ."""
        first = tensors[0]
        return Joined((first,), None) if all(self._alike(first, t) for t in tensors) else None

    def _alike(self, a: Tensor, b: Tensor) -> bool:
        """Tells whether two tensors are one, equal constants, or made of such by alike nodes."""
        if (a, b) not in self._equal:
            self._equal[a, b] = a is b or (a.type == b.type and self._made_alike(a, b))
        return self._equal[a, b]

    def _made_alike(self, a: Tensor, b: Tensor) -> bool:
        if a.value is not None or b.value is not None:
            return a.value is not None and b.value is not None and np.array_equal(a.value, b.value)
        one, two = self._graph.producer(a), self._graph.producer(b)
        if one is None or two is None or one.op is not two.op or repr(one.attributes) != repr(two.attributes):
            return False
        return all(self._alike(x, y) for x, y in zip(one.inputs, two.inputs, strict=True))


def _along(node: Node, axis: int) -> tuple[int | None, ...] | None:
    """Returns for each operand of a node which of its axes becomes this one of the result; None if it has none.

    None altogether if the axis does not come from operands as it is.
    """
    shape, attributes = node.output.shape, node.attributes
    if node.kind is Kind.POINTWISE:
        if node.op.role is Role.INDEX and attributes["axis"] == axis:
            return None
        return tuple([_broadcast(t, node.output, axis) for t in node.inputs])
    source = node.inputs[0].shape
    if node.op.role is Role.TRANSPOSE:
        return (attributes["perm"][axis],)
    if node.op.role is Role.BROADCAST:
        own = _broadcast(node.inputs[0], node.output, axis)
        return None if own is None else (own,)
    if node.op.role is Role.RESHAPE:
        # What is behind the axis may be divided otherwise: joined are runs of elements in row-major order.
        places = [d for d in range(len(source)) if prod(source[:d]) == prod(shape[:axis])]
        return (places[-1],) if places else None
    if node.op.role is Role.SLICE:
        return (axis,) if source[axis] == shape[axis] and attributes["steps"][axis] == 1 else None
    return None


def _broadcast(tensor: Tensor, result: Tensor, axis: int) -> int | None:
    own = axis - result.rank + tensor.rank
    return own if own >= 0 and tensor.shape[own] == result.shape[axis] else None


def _widened(node: Node, axis: int, size: int) -> dict[str, Any]:
    """Returns the attributes of a node whose result has another size along an axis."""
    attributes = dict(node.attributes)
    for name, role in (("shape", (Role.RESHAPE, Role.BROADCAST)), ("stops", (Role.SLICE,))):
        if node.op.role in role:
            sizes = list(attributes[name])
            sizes[axis] = size
            attributes[name] = tuple(sizes)
    return attributes


def write(
    graph: Graph, whole: Joined, leaf: Callable[[Joined], Tensor], names: dict[str, tuple[str, ...]] | None = None
) -> Tensor:
    """Adds the nodes that make a concatenation to a graph; ``leaf`` returns what they are made of.

    Adds to ``names`` the name of each result that has several in it, with theirs.
    """
    made: dict[tuple[tuple[Tensor, ...], int | None], Tensor] = {}

    def written(each: Joined) -> Tensor:
        key = each.tensors, each.axis
        if key in made:
            return made[key]
        if each.node is None:
            made[key] = leaf(each)
        else:
            assert each.attributes is not None
            inputs = tuple([written(x) for x in each.inputs])
            first = each.node.output
            result = intermediate(graph, first.name, "joined", each.shape, each.strides, first.dtype)
            made[key] = graph.add_node(Node(each.node.op, inputs, each.attributes, result)).output
            if names is not None:
                names[result.name] = tuple([t.name for t in each.tensors])
        return made[key]

    return written(whole)

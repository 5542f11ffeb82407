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
    first = tensors[0]
    whole = [(*t.shape[:axis], 0, *t.shape[axis + 1 :]) for t in tensors]
    if any(t.dtype != first.dtype for t in tensors) or len(set(whole)) > 1:
        return None
    makers = [n if (n := graph.producer(t)) in nodes else None for t in tensors]
    if None in makers:
        return Joined(tuple(tensors), axis) if not any(makers) else None
    made = [n for n in makers if n is not None]
    node = made[0]
    along = _along(node, axis)
    if along is None or any(n.op is not node.op or _along(n, axis) != along for n in made):
        return None
    attributes = [_widened(n, axis, sum(t.shape[axis] for t in tensors)) for n in made]
    if len({repr(each) for each in attributes}) > 1:
        return None
    inputs = []
    for place, own in enumerate(along):
        operands = [n.inputs[place] for n in made]
        found = _same(graph, operands) if own is None else joined(graph, operands, own, nodes)
        if found is None:
            return None
        inputs.append(found)
    return Joined(tuple(tensors), axis, node, tuple(inputs), attributes[0])


def _same(graph: Graph, tensors: Sequence[Tensor]) -> Joined | None:
    """Returns the one value that all tensors are; None if they may differ."""
    first = tensors[0]
    return Joined((first,), None) if all(_equal(graph, first, t) for t in tensors) else None


def _equal(graph: Graph, a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.type != b.type:
        return False
    if a.is_constant or b.is_constant:
        return a.value is not None and b.value is not None and np.array_equal(a.value, b.value)
    one, two = graph.producer(a), graph.producer(b)
    if one is None or two is None or one.op is not two.op or repr(one.attributes) != repr(two.attributes):
        return False
    return all(_equal(graph, x, y) for x, y in zip(one.inputs, two.inputs, strict=True))


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
        before = prod(shape[:axis])
        places = [d for d, size in enumerate(source) if prod(source[:d]) == before and size == shape[axis]]
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

"""Attention whose heads share keys and values, which programs repeat for each head before they multiply them.

A repeated cache is a copy of it, several times as large.  Products whose batch counts those that share, and each of
them, take keys and values where they lie; everything between the two products gets their shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, same

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Repeats:
    """How a tensor repeats another one along a dimension: ``count`` parts, each of them ``times`` times."""

    axis: int
    count: int
    times: int

    def divided(self, shape: Shape, rank: int) -> Shape:
        """Returns a shape that broadcasts to one of ``rank`` dimensions, with the dimension in two."""
        if len(shape) < rank - self.axis:
            return shape
        shape = (1,) * (rank - len(shape)) + shape
        size = shape[self.axis]
        parts = (1, 1) if size == 1 else (self.count, self.times)
        return (*shape[: self.axis], *parts, *shape[self.axis + 1 :])


def share_heads(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Multiplies by keys and values that several heads share without repeating them for each."""
    groups: dict[Node, _Repeats] = {}
    for node in graph.nodes:
        groups |= _region(graph, node)
    return _Sharing(graph, groups).run() if groups else same(graph)


def _repeated(graph: Graph, tensor: Tensor) -> tuple[_Repeats, Tensor, list[Node]] | None:
    """Returns how an operand repeats a tensor, that tensor with a dimension of 1, and the transposes behind it."""
    turns: list[Node] = []
    while (maker := graph.producer(tensor)) is not None and maker.op.role is Role.TRANSPOSE:
        perm = maker.attributes["perm"]
        if perm[:-2] != tuple(range(len(perm) - 2)):
            return None
        turns.append(maker)
        tensor = maker.inputs[0]
    while maker is not None and maker.op.role is Role.RESHAPE:
        maker = graph.producer(maker.inputs[0])
    if maker is None or maker.op.role is not Role.BROADCAST or tensor.size == 0:
        return None
    (x,), wide = maker.inputs, maker.output
    for axis in range(tensor.rank - 2):
        count, times = wide.shape[axis : axis + 2]
        joined = (*wide.shape[:axis], count * times, *wide.shape[axis + 2 :])
        if times > 1 and joined == tensor.shape and x.shape == (*wide.shape[: axis + 1], 1, *wide.shape[axis + 2 :]):
            return _Repeats(axis, count, times), x, turns
    return None


def _region(graph: Graph, last: Node) -> dict[Node, _Repeats]:
    """Returns the nodes from a product with repeated keys to one with values repeated alike, which is ``last``."""
    found = _repeated(graph, last.inputs[1]) if last.op.role is Role.MATMUL else None
    if found is None:
        return {}
    how, rank = found[0], last.output.rank
    first: set[Node] = set()
    between: set[Node] = set()
    stack = [last.inputs[0]]
    while stack:
        node = graph.producer(stack.pop())
        if node is None or node in between or node in first:
            continue
        if node.op.role is Role.MATMUL and (keys := _repeated(graph, node.inputs[1])) is not None and keys[0] == how:
            first.add(node)
        elif node.output.rank == rank and _moves(node, how.axis):
            between.add(node)
            stack += node.inputs
    after = set(first)
    for node in graph.nodes:
        if node in between and any(graph.producer(t) in after for t in node.inputs):
            after.add(node)
    # Masks and the positions that they compare: a reshape of these would be read from memory.
    after |= {node for node in between if not node.output.dtype.is_float}
    return dict.fromkeys((*after, last), how) if graph.producer(last.inputs[0]) in after else {}


def _moves(node: Node, axis: int) -> bool:
    """Tells whether a node does the same when a dimension is divided."""
    if node.kind is Kind.REDUCTION:
        return bool(node.attributes["keepdims"]) and min(node.attributes["axes"], default=0) > axis
    if node.op.role is Role.INDEX:
        return bool(node.attributes["axis"] != axis)
    return len(node.outputs) == 1 and (node.kind is Kind.POINTWISE or node.op.role is Role.BROADCAST)


class _Sharing:
    """A graph in the making in which some nodes have a dimension in two."""

    def __init__(self, graph: Graph, groups: dict[Node, _Repeats]) -> None:
        self._graph, self._groups, self._rewrite = graph, groups, Rewrite(graph)
        self._divided: dict[tuple[Tensor, Shape], Tensor] = {}

    def run(self) -> Rewritten:
        for node in self._graph.nodes:
            if node in self._groups:
                self._divide(node, self._groups[node])
            else:
                self._rewrite.take_over(node)
        return self._rewrite.done()

    def _divide(self, node: Node, how: _Repeats) -> None:
        made, old = self._rewrite.graph, node.output
        inputs = [self._operand(t, how, old.rank) for t in node.inputs]
        if node.op.role is Role.MATMUL:
            inputs[1] = self._shared(node.inputs[1])
        shape = how.divided(old.shape, old.rank)
        attributes = dict(node.attributes)
        if node.kind is Kind.REDUCTION:
            attributes["axes"] = tuple(d + 1 for d in attributes["axes"])
        elif node.op.role is Role.INDEX:
            attributes["axis"] += attributes["axis"] > how.axis
        elif node.op.role is Role.BROADCAST:
            attributes["shape"] = shape
        result = intermediate(made, old.name, "by groups", shape, packed_strides(shape), old.dtype)
        made.add_node(Node(node.op, tuple(inputs), attributes, result))
        self._divided[old, shape] = result
        if old in self._graph.output_numbers or any(n not in self._groups for n in self._graph.consumers(old)):
            made.add_node(Node(TABLE["reshape"], (result,), {"shape": old.shape}, self._rewrite.result(old)))

    def _operand(self, tensor: Tensor, how: _Repeats, rank: int) -> Tensor:
        """Returns an operand with the dimension in two."""
        shape = how.divided(tensor.shape, rank)
        if shape == tensor.shape:
            return self._rewrite.new[tensor]
        if (tensor, shape) not in self._divided:
            made = self._rewrite.graph.apply(TABLE["reshape"], (self._rewrite.new[tensor],), {"shape": shape})
            self._divided[tensor, shape] = made
        return self._divided[tensor, shape]

    def _shared(self, tensor: Tensor) -> Tensor:
        """Returns what a tensor repeats, turned as it is."""
        found = _repeated(self._graph, tensor)
        assert found is not None
        _, x, turns = found
        result = self._rewrite.new[x]
        for node in reversed(turns):
            *_, a, b = node.attributes["perm"]
            perm = (*range(x.rank - 2), a + 1, b + 1)
            result = self._rewrite.graph.apply(TABLE["transpose"], (result,), {"perm": perm})
        return result

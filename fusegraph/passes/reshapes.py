"""Reshapes around reductions give way: pointwise nodes next to one that only divides dimensions, or joins them again,
are computed in the shape with more dimensions.

A norm over groups of channels reduces [N, G, C / G, H, W], what surrounds it is [N, C, H, W]; one kernel has one space.
Dividing a dimension commutes with every op that goes element by element, so the reshapes move outwards, to where
tensors are in memory: there they are views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.views import reshaped
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.passes.rewrite import Simplified, same
from fusegraph.passes.simplify import remove_dead

Shape = tuple[int, ...]
#: What is fused with other kernels, whose results are better left as they are.
_ANCHORS = frozenset({Kind.CONTRACTION, Kind.WINDOW, Kind.TRANSFORM})


def divided(coarse: Sequence[int], fine: Sequence[int]) -> tuple[Shape, ...] | None:
    """For each dimension of a shape those of a finer one that it is divided into, None if it is not finer."""
    if len(fine) <= len(coarse) or 0 in coarse:
        return None
    left, result = list(fine), []
    for size in coarse:
        part: list[int] = []
        while left and (not part or prod(part) < size):
            part.append(left.pop(0))
        if prod(part) != size:
            return None
        result.append(tuple(part))
    if any(n != 1 for n in left) or not result:
        return None
    return (*result[:-1], (*result[-1], *left))


def move_reshapes(graph: Graph) -> Simplified:
    """The graph with such reshapes moved outwards, or itself if there are none."""
    seeds = dict(_seeds(graph))
    return _Moving(graph, seeds).run() if seeds else same(graph)


def _seeds(graph: Graph) -> Iterator[tuple[Node, tuple[Tensor, Shape]]]:
    """The reshapes to move: node -> (its tensor of fewer dimensions, the shape with more)."""
    for node in graph.nodes:
        if node.op.name != "reshape":
            continue
        x, y = node.inputs[0], node.output
        if divided(x.shape, y.shape) and y not in graph.outputs and _meets_reduction(graph, y):
            yield node, (x, y.shape)
        elif divided(y.shape, x.shape) and _meets_reduction(graph, x):
            yield node, (y, x.shape)


def _meets_reduction(graph: Graph, tensor: Tensor) -> bool:
    """Whether a tensor is next to a reduction, or pointwise nodes lead from it to one, forth or back."""
    stack, seen = [tensor], {tensor}
    while stack:
        current = stack.pop()
        for node in _neighbours(graph, current):
            if node.kind is Kind.REDUCTION:
                return True
            if node.kind is Kind.POINTWISE:
                fresh = {*node.outputs, *node.inputs} - seen
                seen |= fresh
                stack += fresh
    return False


def _neighbours(graph: Graph, tensor: Tensor) -> list[Node]:
    """The nodes that take a tensor, and the one that makes it."""
    producer = graph.producer(tensor)
    return [*graph.consumers(tensor), *([producer] if producer is not None else [])]


class _Moving:
    """Builds the new graph."""

    def __init__(self, graph: Graph, seeds: dict[Node, tuple[Tensor, Shape]]) -> None:
        self._old, self._seeds = graph, seeds
        self.graph = Graph(graph.name, graph.io_dtype, graph.compute_dtype)
        self._moved: dict[Node, Shape] = {}
        for tensor, shape in seeds.values():
            self._mark(tensor, shape)
        self._new: dict[Tensor, Tensor] = {}
        self._fine: dict[tuple[Tensor, Shape], Tensor] = {}

    def _mark(self, tensor: Tensor, shape: Shape) -> None:
        """Which nodes are computed in the finer shape, from a tensor on, both ways."""
        stack, seen = [tensor], {tensor}
        while stack:
            for node in _neighbours(self._old, stack.pop()):
                if node not in self._moved and self._movable(node, tensor.shape):
                    self._moved[node] = shape
                    fresh = {t for t in (node.output, *node.inputs) if t.shape == tensor.shape} - seen
                    seen |= fresh
                    stack += fresh

    def _movable(self, node: Node, shape: Shape) -> bool:
        """Whether a node goes element by element over a shape, by itself and not as a part of another kernel."""
        if node.kind is not Kind.POINTWISE or node.op.shapes or node.output.shape != shape:
            return False
        producers = map(self._old.producer, node.inputs)
        return not any(p is not None and p.kind in _ANCHORS for p in producers)

    def run(self) -> Simplified:
        for tensor in self._old.tensors.values():
            if self._old.producer(tensor) is None:
                self._new[tensor] = self._add(tensor.name, tensor)
        self.graph.inputs = [self._new[t] for t in self._old.inputs]
        for node in self._old.nodes:
            self._node(node)
        self.graph.outputs = [self._coarse(t) for t in self._old.outputs]
        remove_dead(self.graph)
        alive = set(self.graph.tensors.values())
        counterpart = {old: new for old, new in self._new.items() if new in alive}
        # What is computed in a finer shape stands for a tensor, not the view of it that has its own shape.
        made = {t for node in (*self._moved, *self._seeds) for t in node.outputs}
        counterpart |= {old: new for (old, _), new in self._fine.items() if old in made and new in alive}
        return Simplified(self.graph, counterpart)

    def _node(self, node: Node) -> None:
        if node in self._seeds:
            tensor, finer = self._seeds[node]
            if tensor is node.output:
                self._fine[tensor, finer] = self._coarse(node.inputs[0])
            else:
                self._new[node.output] = self._divided(tensor, tensor.shape, finer)
            return
        shape = self._moved.get(node)
        if shape is None:
            inputs = tuple(map(self._coarse, node.inputs))
            made = [self._add(t.name, t) for t in node.outputs]
            self._new |= dict(zip(node.outputs, made))
            self.graph.add_node(Node(node.op, inputs, node.attributes, *made))
            return
        tensor = node.output
        inputs = tuple(self._divided(t, tensor.shape, shape) for t in node.inputs)
        strides = reshaped(tensor.shape, tensor.strides, shape) or packed_strides(shape)
        result = self.graph._add_tensor(
            self.graph._unique(f"{tensor.name[:180]} divided"), shape, strides, tensor.dtype, None
        )
        self.graph._automatic.add(result)
        self._fine[tensor, shape] = self.graph.add_node(Node(node.op, inputs, node.attributes, result)).output

    def _add(self, name: str, like: Tensor) -> Tensor:
        tensor = self.graph._add_tensor(name, like.shape, like.strides, like.dtype, like.value)
        if like in self._old._automatic:
            self.graph._automatic.add(tensor)
        return tensor

    def _divided(self, tensor: Tensor, space: Shape, shape: Shape) -> Tensor:
        """A tensor that broadcasts to a space, in the finer shape of that space."""
        key = tensor, shape
        if tensor.is_constant and tensor.size == 1:
            return self._coarse(tensor)
        if key not in self._fine:
            parts = divided(space, shape)
            assert parts is not None
            padded = (1,) * (len(space) - tensor.rank) + tensor.shape
            own = tuple(n for size, part in zip(padded, parts) for n in (part if size != 1 else (1,) * len(part)))
            made = self.graph.apply(TABLE["reshape"], (self._coarse(tensor),), {"shape": own})
            self.graph._rename(made, self.graph._unique(f"{tensor.name[:180]} divided"))
            self.graph._automatic.add(made)
            self._fine[key] = made
        return self._fine[key]

    def _coarse(self, tensor: Tensor) -> Tensor:
        """A tensor in its own shape: joined again if it was computed in a finer one."""
        if tensor not in self._new:
            source = next(new for (old, _), new in self._fine.items() if old is tensor)
            result = self._add(tensor.name, tensor)
            node = Node(TABLE["reshape"], (source,), {"shape": tensor.shape}, result)
            self._new[tensor] = self.graph.add_node(node).output
        return self._new[tensor]

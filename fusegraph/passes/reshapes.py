"""Reshapes around reductions give way: pointwise nodes next to one that only divides dimensions, or joins them again,
are computed in the shape with more dimensions.

A norm over groups of channels reduces [N, G, C / G, H, W], what surrounds it is [N, C, H, W]; one kernel has one space.
Dividing a dimension commutes with every op that goes element by element, so the reshapes move outwards, to where
tensors are in memory: there they are views.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.views import divided, reshaped
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, named, same
from fusegraph.pattern import op

Shape = tuple[int, ...]
#: What is fused with other kernels, whose results are better left as they are.
_ANCHORS = frozenset({Kind.CONTRACTION, Kind.POOLING, Kind.TRANSFORM})


def move_reshapes(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Moves reshapes around reductions outwards, to where tensors are in memory."""
    seeds = dict(_seeds(graph))
    return _Moving(graph, seeds).run() if seeds else same(graph)


def _seeds(graph: Graph) -> Iterator[tuple[Node, tuple[Tensor, Shape]]]:
    """Yields the reshapes to move: node -> (its tensor of fewer dimensions, the shape with more)."""
    for node in graph.nodes:
        if not op.reshape().fits(graph, node):
            continue
        x, y = node.inputs[0], node.output
        if divided(x.shape, y.shape) and y not in graph.outputs and _meets_reduction(graph, y):
            yield node, (x, y.shape)
        elif divided(y.shape, x.shape) and _meets_reduction(graph, x):
            yield node, (y, x.shape)


def _meets_reduction(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if a tensor is next to a reduction, or pointwise nodes lead from it to one, forth or back."""
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
    """Returns the nodes that take a tensor, and the one that makes it."""
    producer = graph.producer(tensor)
    return [*graph.consumers(tensor), *([producer] if producer is not None else [])]


def _reduces_rows(node: Node) -> bool:
    """Returns true if a node reduces the last dimensions, and not all."""
    if node.kind is not Kind.REDUCTION:
        return False
    shape = node.inputs[0].shape
    axes = [d for d in node.attributes["axes"] if shape[d] != 1]
    real = [d for d in range(len(shape)) if shape[d] != 1]
    return 0 < len(axes) < len(real) and axes == real[-len(axes) :]


class _Moving:
    """Builds the new graph."""

    def __init__(self, graph: Graph, seeds: dict[Node, tuple[Tensor, Shape]]) -> None:
        self._old, self._seeds = graph, seeds
        self._rewrite = Rewrite(graph)
        self._moved: dict[Node, Shape] = {}
        for tensor, shape in seeds.values():
            self._mark(tensor, shape)
        self._fine: dict[tuple[Tensor, Shape], Tensor] = {}

    def _mark(self, tensor: Tensor, shape: Shape) -> None:
        """Which nodes are computed in the finer shape, from a tensor on, both ways: none of those that lead to a row's
        reduction in the coarser one, as a norm behind another has, for they belong with that.
        """
        found: dict[Node, Shape] = {}
        stack, seen = [tensor], {tensor}
        while stack:
            current = stack.pop()
            for node in _neighbours(self._old, current):
                if current in node.inputs and _reduces_rows(node):
                    return
                if node not in self._moved and node not in found and self._movable(node, tensor.shape):
                    found[node] = shape
                    fresh = {t for t in (node.output, *node.inputs) if t.shape == tensor.shape} - seen
                    seen |= fresh
                    stack += fresh
        self._moved |= found

    def _movable(self, node: Node, shape: Shape) -> bool:
        """Returns true if a node goes element by element over a shape, by itself and not as a part of another
        kernel.
        """
        if node.kind is not Kind.POINTWISE or node.op.shapes or node.output.shape != shape:
            return False
        producers = map(self._old.producer, node.inputs)
        return not any(p is not None and p.kind in _ANCHORS for p in producers)

    def run(self) -> Rewritten:
        for node in self._old.nodes:
            self._node(node)
        for tensor in self._old.outputs:
            self._coarse(tensor)
        done = self._rewrite.done()
        alive = set(done.graph.tensors.values())
        # What is computed in a finer shape stands for a tensor, not the view of it that has its own shape.
        made = {t for node in (*self._moved, *self._seeds) for t in node.outputs}
        finer = {old: new for (old, _), new in self._fine.items() if old in made and new in alive}
        return Rewritten(done.graph, {**done.counterparts, **finer})

    def _node(self, node: Node) -> None:
        if node in self._seeds:
            tensor, finer = self._seeds[node]
            if tensor is node.output:
                self._fine[tensor, finer] = self._coarse(node.inputs[0])
            else:
                self._rewrite.new[node.output] = self._divided(tensor, tensor.shape, finer)
            return
        shape = self._moved.get(node)
        if shape is None:
            self._rewrite.take_over(node, [self._coarse(t) for t in node.inputs])
            return
        tensor = node.output
        inputs = tuple(self._divided(t, tensor.shape, shape) for t in node.inputs)
        strides = reshaped(tensor.shape, tensor.strides, shape) or packed_strides(shape)
        graph = self._rewrite.graph
        result = intermediate(graph, tensor.name, "divided", shape, strides, tensor.dtype)
        self._fine[tensor, shape] = graph.add_node(Node(node.op, inputs, node.attributes, result)).output

    def _divided(self, tensor: Tensor, space: Shape, shape: Shape) -> Tensor:
        """Returns a tensor that broadcasts to a space, in the finer shape of that space."""
        key = tensor, shape
        if tensor.is_constant and tensor.size == 1:
            return self._coarse(tensor)
        if key not in self._fine:
            parts = divided(space, shape)
            assert parts is not None
            padded = (1,) * (len(space) - tensor.rank) + tensor.shape
            own = tuple(n for size, part in zip(padded, parts) for n in (part if size != 1 else (1,) * len(part)))
            made = self._rewrite.graph.apply(TABLE["reshape"], (self._coarse(tensor),), {"shape": own})
            self._fine[key] = named(made, tensor.name, "divided")
        return self._fine[key]

    def _coarse(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in its own shape: joined again if it was computed in a finer one."""
        if tensor not in self._rewrite.new:
            source = next(new for (old, _), new in self._fine.items() if old is tensor)
            self._rewrite.take_over(Node(TABLE["reshape"], (source,), {"shape": tensor.shape}, tensor), (source,))
        return self._rewrite.new[tensor]

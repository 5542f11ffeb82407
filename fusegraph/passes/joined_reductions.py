"""Reductions behind a reshape that joins dimensions are computed in the shape before it.

An instance norm is often written as a batch norm of [1, N * C, H, W], with its weights repeated N times.  In
[N, C, H, W] it is one kernel with what makes its operand, whose weights are read where they lie, and a tensor whose
channels come last is not turned first.  The reshapes move behind the results: there they are views, or what writes them
turns them.
"""

from __future__ import annotations

from codegen.sizes import least
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.views import regrouped, view
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, named, same

Shape = tuple[int, ...]


def divide_reductions(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Moves reshapes that join dimensions from in front of reductions to behind them, where that saves a kernel."""
    finer: dict[Node, _Join] = {}
    for node in graph.nodes:
        if node.op.role is Role.RESHAPE and node.output not in graph.outputs:
            join = _Join.of(node)
            region = join.region(graph) if join is not None else set()
            if join is not None and not region & finer.keys() and join.saves(graph, region):
                finer |= dict.fromkeys(region, join)
    if not finer:
        return same(graph)
    rewrite, joins = Rewrite(graph), dict.fromkeys(finer.values())
    for node in graph.nodes:
        if node in finer:
            finer[node].write(rewrite, node)
        elif not any(join.divides(rewrite, node) for join in joins):
            rewrite.take_over(node)
    return rewrite.done()


class _Join:
    """A reshape that joins dimensions.

    coarse  the shape behind it.
    parts   for each of its dimensions, those of the shape before it that it is made of.
    """

    def __init__(self, node: Node, parts: tuple[range, ...]) -> None:
        self.node, self.coarse, self.fine, self.parts = node, node.output.shape, node.inputs[0].shape, parts
        self._order = stride_order(self.fine, node.inputs[0].strides)
        #: the tensors of the new graph that are computed in the finer shape, by those of the old one
        self._made: dict[Tensor, Tensor] = {}

    @staticmethod
    def of(node: Node) -> _Join | None:
        """Returns a reshape as a join of dimensions; None if it is none."""
        fine, coarse = node.inputs[0].shape, node.output.shape
        if any(least(size) < 1 for size in fine):
            return None
        parts = [range(0)] * len(coarse)
        for own, others in regrouped(coarse, fine):
            long = [d for d in own if coarse[d] != 1]
            if len(long) > 1 or (not own and any(fine[d] != 1 for d in others)):
                return None
            for d in long or own[:1]:
                parts[d] = others
        joins = any(sum(fine[d] != 1 for d in dims) > 1 for dims in parts)
        return _Join(node, tuple(parts)) if joins and sum(map(len, parts)) == len(fine) else None

    def saves(self, graph: Graph, region: set[Node]) -> bool:
        """Returns true if moving the reshape saves a kernel.

        It does if its operand is made element by element, or an operand of the region has no place in memory that could
        be read in the shape behind.
        """
        producer = graph.producer(self.node.inputs[0])
        if producer is not None and producer.kind is Kind.POINTWISE:
            return bool(region)
        made = {node.output for node in region}
        return any(self._copied(graph, t) for node in region for t in node.inputs if t not in made)

    @staticmethod
    def _copied(graph: Graph, tensor: Tensor) -> bool:
        """Returns true if a tensor is reshaped, or broadcast, in a way that takes a copy."""
        nodes = []
        while (node := graph.producer(tensor)) is not None and node.op.role in (Role.RESHAPE, Role.BROADCAST):
            nodes.append(node)
            tensor = node.inputs[0]
        strides = tensor.strides
        for node in reversed(nodes):
            seen = view(node, strides)
            if seen is None:
                return True
            strides = seen[0]
        return False

    def region(self, graph: Graph) -> set[Node]:
        """Returns the nodes to compute in the finer shape; none if no reduction is among them, or more is next to them
        than pointwise nodes and movement.
        """
        found: set[Node] = set()
        stack, seen = [self.node.output], {self.node.output}
        while stack:
            tensor = stack.pop()
            producer = graph.producer(tensor)
            for node in (*graph.consumers(tensor), *((producer,) if producer is not None else ())):
                if node in found or node.kind is Kind.MOVEMENT:
                    continue
                if not self._movable(node):
                    return set()
                found.add(node)
                fresh = {t for t in (*node.inputs, node.output) if self._alike(t) and not t.is_constant} - seen
                seen |= fresh
                stack += fresh
        return found if any(node.kind is Kind.REDUCTION for node in found) else set()

    def _alike(self, tensor: Tensor) -> bool:
        """Returns true if a tensor broadcasts to the shape behind the reshape, with all of its dimensions."""
        return tensor.rank == len(self.coarse) and all(n in (1, all_) for n, all_ in zip(tensor.shape, self.coarse))

    def _movable(self, node: Node) -> bool:
        """Returns true if a node can be computed in the finer shape."""
        if node.kind is Kind.REDUCTION:
            return node.op.role is Role.REDUCE and node.attributes["keepdims"] and self._alike(node.inputs[0])
        return node.kind is Kind.POINTWISE and not node.op.shapes and self._alike(node.output)

    def _divided(self, shape: Shape) -> Shape:
        """Returns a shape that broadcasts to the one behind the reshape in the finer one."""
        padded = (1,) * (len(self.coarse) - len(shape)) + shape
        each = zip(padded, self.coarse, self.parts)
        return tuple(self.fine[d] if own == whole else 1 for own, whole, dims in each for d in dims)

    def write(self, rewrite: Rewrite, node: Node) -> None:
        """Writes a node in the finer shape, and the reshape of its result, for whom it has the shape behind."""
        graph, old = rewrite.graph, node.output
        inputs = tuple(self._read(rewrite, t) for t in node.inputs)
        attributes = node.attributes
        if node.kind is Kind.REDUCTION:
            attributes = {**attributes, "axes": tuple(d for axis in attributes["axes"] for d in self.parts[axis])}
        shape = self._divided(old.shape)
        strides = packed_strides(shape, self._order)
        made = intermediate(graph, old.name, "divided", shape, strides, old.dtype)
        self._made[old] = graph.add_node(Node(node.op, inputs, attributes, made)).output
        rewrite.take_over(Node(TABLE["reshape"], (made,), {"shape": old.shape}, old), (made,))

    def divides(self, rewrite: Rewrite, node: Node) -> bool:
        """Returns true if a node undoes the join of what is computed in the finer shape, which then stands for it."""
        made = self._made.get(node.inputs[0]) if node.op.role is Role.RESHAPE else None
        if made is None or made.shape != node.output.shape or node.output in node.output.graph.outputs:
            return False
        rewrite.new[node.output] = made
        return True

    def _read(self, rewrite: Rewrite, tensor: Tensor) -> Tensor:
        """Returns an operand in the finer shape; behind several reshapes, of what is before all of them."""
        if tensor in self._made:
            return self._made[tensor]
        if tensor.is_constant and tensor.size == 1:
            return rewrite.new[tensor]
        graph, root = rewrite.graph, rewrite.new[tensor]
        while (producer := graph.producer(root)) is not None and producer.op.role is Role.RESHAPE:
            root = producer.inputs[0]
        shape = self._divided(tensor.shape)
        if root.shape != shape:
            root = named(graph.apply(TABLE["reshape"], (root,), {"shape": shape}), tensor.name, "divided")
        self._made[tensor] = root
        return root

"""Positions that the operands of several products are computed with, each of which counts by itself.

Numbers of few bits are shifted by where they are in a byte.  Weights of one shape have the same shifts, which common
subexpressions make one tensor: it would be written and read, with as many elements as the weights have.  Counted in the
kernel of each product they cost nothing.
"""

from __future__ import annotations

from collections.abc import Container

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.divided import made_of_less
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, same


def count_apart(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Computes positions again for each product whose operand is made of fewer bytes with them."""
    positions = _positions(graph)
    takers: dict[Node, Node] = {}  # what takes positions on the way to a product's operand, and the product
    for product in graph.nodes if positions else ():
        for operand in product.inputs if product.op.role is Role.MATMUL else ():
            made = made_of_less(graph, operand, product, beside=positions)
            members = {*made, product}
            shared = {t for n in made if (t := n.output) in positions and not members.issuperset(graph.consumers(t))}
            if shared:
                takers |= {n: product for n in made if n.output not in positions}
    if not takers:
        return same(graph)
    rewrite = _Counting(graph, positions)
    for node in graph.nodes:
        if (owner := takers.get(node)) is None:
            rewrite.take_over(node)
        else:
            rewrite.take_over(node, [rewrite.counted(t, node, owner) for t in node.inputs])
    return rewrite.done()


def _positions(graph: Graph) -> set[Tensor]:
    """Returns the tensors that follow from positions and constants alone."""
    found: set[Tensor] = set()
    for node in graph.nodes:
        if node.kind in (Kind.POINTWISE, Kind.MOVEMENT) and len(node.outputs) == 1:
            known = found.intersection(node.inputs)
            if not node.op.reads_values or (known and all(t in known or t.is_constant for t in node.inputs)):
                found.add(node.output)
    return found


class _Counting(Rewrite):
    """A rewrite in which products have positions of their own."""

    def __init__(self, old: Graph, positions: Container[Tensor]) -> None:
        super().__init__(old)
        self._positions = positions
        self._counted: dict[tuple[Node, Tensor], Tensor] = {}

    def counted(self, tensor: Tensor, taker: Node, owner: Node) -> Tensor:
        """Returns what a node takes for a tensor: positions of the product that it belongs to."""
        if tensor not in self._positions:
            return self.new[tensor]
        if (owner, tensor) not in self._counted:
            node = self._old.producer(tensor)
            assert node is not None
            inputs = [self.counted(t, taker, owner) for t in node.inputs]
            if not node.op.reads_values:  # of what it counts the shape matters alone: the product's own has it, too
                alike = (t for t in taker.inputs if t not in self._positions and t.shape == tensor.shape)
                inputs = [self.new[t] for t in alike][:1] or inputs
            made = intermediate(self.graph, tensor.name, "again", tensor.shape, tensor.strides, tensor.dtype)
            self._counted[owner, tensor] = self.graph.add_node(
                Node(node.op, tuple(inputs), node.attributes, made)
            ).output
        return self._counted[owner, tensor]

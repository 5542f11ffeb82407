"""Parts of a graph that attention's kernels evaluate, as graphs of their own: what makes a score of a product, and what
becomes of probabilities before they are multiplied with the values.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from codegen.declined import Declined
from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops import TABLE
from fusegraph.ops.attention_nodes import Weight
from fusegraph.ops.base import Kind
from fusegraph.passes.decompose import NARROW
from fusegraph.pattern import Either, Found, Is, Made, Operand, Pattern, made_by, made_of, op, repeated


def cast(x: Operand = ...) -> Made:
    """Returns a pattern of floats cast to any dtype."""
    return made_by((TABLE["identity"], NARROW), x).when(lambda _, node: node.inputs[0].dtype.is_float)


def casts(x: Operand) -> Pattern:
    """Returns a pattern of something, or of casts of it."""
    return repeated(x, cast)


def linear_step(x: Operand) -> Pattern:
    """Returns a pattern of one node that is linear in something: a product, a quotient, a choice of it or zero."""
    return Either(op.mul(x, ...), op.div(x, ...), op.binary_select(x, 0.0, ...), op.binary_select(0.0, x, ...))


def linear(x: Operand) -> Pattern:
    """Returns a pattern of something, or of what is linear in it, with casts in between."""
    return repeated(x, cast, linear_step)


def chain_of(found: Found, begin: str, before: int = 0) -> tuple[Node, ...]:
    """Returns the node that makes a tensor and those that `linear` found to be linear in it, without casts.

    The first ``before`` nodes of the match are left out.
    """
    start = [node.output for node in found.nodes].index(found[begin])
    return tuple(node for node in found.nodes[before : start + 1][::-1] if not cast().fits(found.graph, node))


def turned(x: Operand) -> Made:
    """Returns a pattern of something with its last two dimensions exchanged."""

    def exchanged(_: Found, node: Node) -> bool:
        *batch, row, column = range(node.output.rank)
        return bool(node.attributes["perm"] == (*batch, column, row))

    return op.transpose(x).when(exchanged)


class Subgraph:
    """A graph of its own made of some of a graph's nodes.

    made      tensors of the graph -> those of its own that stand for them.
    operands  the tensors of the graph that are its inputs, in order.
    """

    def __init__(self, graph: Graph, name: str, compute: DType) -> None:
        self.graph, self.own = graph, Graph(name, compute_dtype=compute)
        self.made: dict[Tensor, Tensor] = {}
        self.operands: list[Tensor] = []

    def entered(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the graph as an input of its own; constants of one element stay constants."""
        if tensor not in self.made:
            number = tensor.value is not None and tensor.size == 1
            self.made[tensor] = self.own._add_tensor(
                tensor.name, tensor.shape, tensor.strides, tensor.dtype, tensor.value if number else None
            )
            if not number:
                self.own.inputs.append(self.made[tensor])
                self.operands.append(tensor)
        return self.made[tensor]

    def copied(self, node: Node, inputs: tuple[Tensor, ...]) -> Node:
        t = node.output
        self.made[t] = self.own._add_tensor(t.name, t.shape, t.strides, t.dtype)
        copy = Node(node.op, inputs, node.attributes, self.made[t])
        self.own.add_node(copy)
        return copy

    def begun(self, product: Node) -> None:
        """Adds the product of queries and keys.  Raises Declined if one of these is a constant."""
        for tensor in product.inputs:
            if tensor.value is not None and tensor.size == 1:
                raise Declined(f"{tensor.name!r} is a constant")
            self.entered(tensor)
        self.copied(product, tuple(self.made[t] for t in product.inputs))

    def stand_in(self, t: Tensor) -> Tensor:
        """Returns a new tensor in place of one of which only the shape matters."""
        return self.own._add_tensor(self.own._unique("shape"), t.shape, t.strides, t.dtype)

    def add(self, nodes: Collection[Node]) -> None:
        """Adds nodes of the graph with what they need."""
        for node in self.graph.nodes:
            if node in nodes:
                keys = node.op.names(len(node.inputs))
                inputs = (
                    self.stand_in(t) if key in node.op.shapes and t not in self.made else self.entered(t)
                    for key, t in zip(keys, node.inputs)
                )
                self.copied(node, tuple(inputs))


def weight_of(
    graph: Graph, members: Collection[Node], chain: tuple[Node, ...], last: Tensor, compute: DType
) -> tuple[tuple[Weight, tuple[Tensor, ...]] | None, set[Node]]:
    """Returns what a chain makes of its first node's result, up to ``last``, as a graph, and the nodes of that.

    The graph comes with the tensors that it reads; it is None for a chain of one node.  Raises Declined unless the
    chain is linear in that result.
    """
    begin, *rest = chain
    if not rest:
        return None, set()
    nodes = set(evaluated(graph, members, last, begin))
    casts = {n for n in nodes if n in members and n not in rest}
    part = Subgraph(graph, "weight", compute)
    anchor = part.copied(begin, tuple(part.stand_in(t) for t in begin.inputs))
    for node in graph.nodes:
        if node in casts:  # in registers nothing is rounded
            part.made[node.output] = part.made[node.inputs[0]]
        elif node in nodes:
            part.add((node,))
    known = {anchor.output}
    one = linear_step(Is(holds=lambda tensor: tensor in known))
    for node in part.own.nodes:
        dependent = [t for t in node.values if t in known]
        if dependent:
            if len(dependent) > 1 or not one.fits(part.own, node):
                raise Declined(f"{node.name!r} is not linear in the probabilities")
            known.add(node.output)
    if any(t in part.operands for n in members for t in n.outputs):
        raise Declined(f"{last.name!r} depends on the probabilities in another way as well")
    part.own.outputs = [part.made[last]]
    made = Weight(part.own, anchor, tuple(part.made[t] for t in part.operands))
    return (made, tuple(part.operands)), nodes


def evaluated(graph: Graph, members: Collection[Node], last: Tensor, first: Node) -> Collection[Node]:
    """Returns the pointwise nodes from one node to a tensor that are evaluated for every score."""

    def followed(node: Node) -> tuple[Tensor, ...] | None:
        shape = node.output.shape
        whole = len(shape) > 1 and np.prod(shape[-2:]) == np.prod(first.output.shape[-2:])
        own = node is not first and node.kind is Kind.POINTWISE
        return node.values if own and (node in members or whole or node.op.cheap) else None

    return made_of(graph, [last], followed).keys()

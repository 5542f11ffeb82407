"""Parts of a graph that attention's kernels evaluate, as graphs of their own: what makes a score of a product, and what
becomes of probabilities before they are multiplied with the values.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from codegen.declined import Declined
from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.attention_nodes import Weight
from fusegraph.ops.base import Kind

#: Ops that are done again for every score rather than read; others only where they would be as many as the scores.
_CHEAP = frozenset(
    """
    identity narrow gen_index binary_select add sub mul max min neg abs cmp_eq cmp_neq cmp_gt cmp_ge cmp_lt cmp_le
    logical_and logical_or logical_not
    """.split()  # noqa: SIM905 - a list of quoted words is no easier to read
)


class Part:
    """A graph of its own made of some of a graph's nodes.

    made      tensors of the graph -> those of its own that stand for them.
    operands  the tensors of the graph that are its inputs, in order.
    """

    def __init__(self, graph: Graph, name: str, compute: DType) -> None:
        self.graph, self.own = graph, Graph(name, compute_dtype=compute)
        self.made: dict[Tensor, Tensor] = {}
        self.operands: list[Tensor] = []

    def entered(self, tensor: Tensor) -> Tensor:
        """A tensor of the graph as an input; numbers stay numbers."""
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

    def stand_in(self, t: Tensor) -> Tensor:
        """A tensor of which only the shape matters."""
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
    """What a chain makes of the result of its first node, in the end ``last``, and the tensors that it needs, if it is
    anything; and the nodes that do it.
    """
    begin, *rest = chain
    if not rest:
        return None, set()
    nodes = repeated(graph, members, last, begin)
    casts = {n for n in nodes if n in members and n not in rest}
    part = Part(graph, "weight", compute)
    anchor = part.copied(begin, tuple(part.stand_in(t) for t in begin.inputs))
    for node in graph.nodes:
        if node in casts:  # what is in registers only is not rounded
            part.made[node.output] = part.made[node.inputs[0]]
        elif node in nodes:
            part.add((node,))
    linear = {anchor.output}
    for node in part.own.nodes:
        keys = node.op.names(len(node.inputs))
        dependent = [t for key, t in zip(keys, node.inputs) if t in linear and key not in node.op.shapes]
        if dependent:
            if len(dependent) > 1 or (node.op.name != "mul" and node.inputs[-1] in linear):
                raise Declined(f"{node.name!r} is not linear in the probabilities")
            linear.add(node.output)
    if any(t in part.operands for n in members for t in n.outputs):
        raise Declined(f"{last.name!r} depends on the probabilities in another way as well")
    part.own.outputs = [part.made[last]]
    made = Weight(part.own, anchor, tuple(part.made[t] for t in part.operands))
    return (made, tuple(part.operands)), nodes


def repeated(graph: Graph, members: Collection[Node], last: Tensor, first: Node) -> set[Node]:
    """The pointwise nodes from one node to a tensor that are evaluated for every score."""
    rows, keys = first.output.shape[-2:]
    found: set[Node] = set()
    stack = [last]
    while stack:
        node = graph.producer(stack.pop())
        if node is None or node in found or node is first or node.kind is not Kind.POINTWISE:
            continue
        shape = node.output.shape
        whole = len(shape) > 1 and np.prod(shape[-2:]) == rows * keys
        if node in members or whole or node.op.name in _CHEAP:
            found.add(node)
            stack += [t for key, t in zip(node.op.names(len(node.inputs)), node.inputs) if key not in node.op.shapes]
    return found

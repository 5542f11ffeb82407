"""Rewriting a graph: what every pass does that replaces some nodes and takes over the others as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusegraph.graph import Graph, Node, Tensor


@dataclass(frozen=True)
class Simplified:
    """An equivalent graph with the same inputs and outputs.

    counterpart gives for each tensor of the old graph the one of the new graph that has its value.
    """

    graph: Graph
    counterpart: Mapping[Tensor, Tensor]


def same(graph: Graph) -> Simplified:
    """The graph itself."""
    return Simplified(graph, {t: t for t in graph.tensors.values()})


class Rewrite:
    """A new graph in the making: its inputs and constants are there, nodes are added in the order of the old one's.

    graph  the new graph.
    new    the new graph's tensor for each of the old one that has one by now.
    """

    def __init__(self, old: Graph, tensors: Mapping[Tensor, tuple[int, ...]] | None = None) -> None:
        """With ``tensors``, which has new strides for some of them, the results of nodes are there as well."""
        self._old = old
        self.graph = Graph(old.name, old.io_dtype, old.compute_dtype)
        self.new: dict[Tensor, Tensor] = {}
        for tensor in old.tensors.values():
            if tensors is None and old.producer(tensor) is not None:
                continue
            strides = (tensors or {}).get(tensor, tensor.strides)
            made = self.graph._add_tensor(tensor.name, tensor.shape, strides, tensor.dtype, tensor.value)
            if tensors is not None and tensor in old._automatic:
                self.graph._automatic.add(made)
            self.new[tensor] = made
        self.graph.inputs = [self.new[t] for t in old.inputs]

    def inputs(self, node: Node) -> tuple[Tensor, ...]:
        """The new graph's operands of a node."""
        return tuple(self.new[t] for t in node.inputs)

    def take_over(self, node: Node, inputs: Sequence[Tensor] | None = None) -> None:
        """Adds a node as it is, or with other operands."""
        made = []
        for t in node.outputs:
            if t not in self.new:
                self.new[t] = self.graph._add_tensor(t.name, t.shape, t.strides, t.dtype)
            made.append(self.new[t])
        operands = self.inputs(node) if inputs is None else tuple(inputs)
        self.graph.add_node(Node(node.op, operands, node.attributes, *made))

    def done(self) -> Simplified:
        """The new graph, all nodes being there."""
        self.graph.outputs = [self.new[t] for t in self._old.outputs]
        return Simplified(self.graph, self.new)

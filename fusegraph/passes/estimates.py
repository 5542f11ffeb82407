"""Estimates of contractions, by the cost model of the kernel that each would be: passes choose by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from codegen.contraction import FAMILY
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import contraction as lowering
from fusegraph.lowering.base import GroupView, Options

Sizes: TypeAlias = tuple[int, ...]


def alone(graph: Graph, node: Node, lying: Mapping[Tensor, tuple[Sizes, Sizes]]) -> Graph:
    """Returns a graph of a node alone, some of whose tensors have another shape and other strides."""
    made = Graph("alone", graph.io_dtype, graph.compute_dtype)

    def added(name: str, tensor: Tensor) -> Tensor:
        return made._add_tensor(name, *lying.get(tensor, (tensor.shape, tensor.strides)), tensor.dtype)

    made.inputs = [added(f"operand {n}", t) for n, t in enumerate(node.inputs)]
    made.outputs = [added("result", node.output)]
    made.add_node(Node(node.op, tuple(made.inputs), node.attributes, *made.outputs))
    return made


def cycles(graph: Graph, options: Options) -> float:
    """Returns the cycles that the one contraction of a graph is estimated to take."""
    view = GroupView(graph, graph.nodes, {n: k for k, n in enumerate(graph.nodes)})
    return FAMILY.cycles(lowering.lower(view, options, "alone").spec, options.target.planned)

"""Estimates of contractions, by the cost model of the kernel that each would be: passes choose by them."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.contraction import FAMILY
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import contraction as lowering
from fusegraph.lowering.base import GroupView, Options


def alone(graph: Graph, node: Node, strides: Mapping[Tensor, tuple[int, ...]]) -> Graph:
    """Returns a graph of a node alone, some of whose operands have other strides."""
    made = Graph("alone", graph.io_dtype, graph.compute_dtype)
    inputs = tuple(
        made._add_tensor(f"operand {n}", t.shape, strides.get(t, t.strides), t.dtype) for n, t in enumerate(node.inputs)
    )
    result = made._add_tensor("result", node.output.shape, node.output.strides, node.output.dtype)
    made.add_node(Node(node.op, inputs, node.attributes, result))
    made.inputs, made.outputs = list(inputs), [result]
    return made


def cycles(graph: Graph, options: Options) -> float:
    """Returns the cycles that the one contraction of a graph is estimated to take."""
    view = GroupView(graph, graph.nodes, {n: k for k, n in enumerate(graph.nodes)})
    return FAMILY.cycles(lowering.lower(view, options, "alone").spec, options.target.planned)

"""Estimates of contractions, by the cost model of the kernel that each would be: passes choose by them.

`cycles` is for products and for convolutions that are tiled as such, `direct_cycles` for those of few channels a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from codegen import contraction, direct_convolution
from codegen.family import EstimatedFamily
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import contraction as contraction_lowering
from fusegraph.lowering import direct_convolution as direct_lowering
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


#: What was estimated, by all that it follows from: layers of a network are often alike.
_KNOWN: dict[object, float] = {}
_MOST_KNOWN = 4096


def cycles(graph: Graph, options: Options) -> float:
    """Returns the cycles that the one contraction of a graph is estimated to take."""
    return _estimated(graph, options, contraction_lowering, contraction.FAMILY)


def direct_cycles(graph: Graph, options: Options) -> float | None:
    """Returns the same of a graph whose one contraction is a direct convolution; None if it is none."""
    if direct_lowering.suits(graph.nodes[0], graph) is not None:
        return None
    return _estimated(graph, options, direct_lowering, direct_convolution.FAMILY)


def _estimated(graph: Graph, options: Options, lowering: Any, family: EstimatedFamily[Any]) -> float:
    key = family.name, _key(graph, options)
    found = _KNOWN.get(key)
    if found is None:
        view = GroupView(graph, graph.nodes, {n: k for k, n in enumerate(graph.nodes)})
        found = family.cycles(lowering.lower(view, options, "alone").spec, options.target.planned)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = found
    return found


def _key(graph: Graph, options: Options) -> object:
    """Returns what an estimate follows from: a graph without its names, and options."""
    numbers = {t: n for n, t in enumerate(graph.tensors.values())}
    # Sizes that vary are equal whatever their values are here.
    tensors = tuple([(t.shape, t.strides, (*map(int, t.shape), *map(int, t.strides)), t.dtype) for t in numbers])
    nodes = tuple(
        [
            (n.op, tuple(numbers[t] for t in n.inputs), repr(n.attributes), tuple(numbers[t] for t in n.outputs))
            for n in graph.nodes
        ]
    )
    ends = tuple(numbers[t] for t in graph.inputs), tuple(numbers[t] for t in graph.outputs)
    return tensors, nodes, ends, graph.compute_dtype, replace(options, left_out={})

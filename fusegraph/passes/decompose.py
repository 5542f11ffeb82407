"""Decomposition: writes out every composite (softmax, a norm) as the nodes that it is made of."""

from __future__ import annotations

from typing import Any

from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.passes.simplify import Simplified


def decompose(graph: Graph) -> Simplified:
    """The graph without composites, or itself if it has none.

    The last of a composite's nodes has its name, layout and dtype; the others are named after it, the same ones each
    time.
    """
    if all(node.kind is not Kind.COMPOSITE for node in graph.nodes):
        return Simplified(graph, {t: t for t in graph.tensors.values()})
    result = Graph(graph.name, graph.io_dtype, graph.compute_dtype)
    new: dict[Tensor, Tensor] = {}
    for tensor in graph.tensors.values():
        if graph.producer(tensor) is None:
            new[tensor] = result._add_tensor(tensor.name, tensor.shape, tensor.strides, tensor.dtype, tensor.value)
    result.inputs = [new[t] for t in graph.inputs]
    for node in graph.nodes:
        inputs = tuple(new[t] for t in node.inputs)
        if node.kind is Kind.COMPOSITE:
            new[node.output] = _Expansion(result, node).expand(inputs)
        else:
            old = node.output
            output = result._add_tensor(old.name, old.shape, old.strides, old.dtype)
            new[old] = result.add_node(Node(node.op, inputs, node.attributes, output)).output
    result.outputs = [new[t] for t in graph.outputs]
    return Simplified(result, new)


class _Expansion:
    """Adds one composite's nodes to a graph; called by the op's ``expand`` once a node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph, self._node = graph, node

    def expand(self, inputs: tuple[Tensor, ...]) -> Tensor:
        node, result = self._node, self._node.output
        assert node.op.expand is not None
        real = self._graph.compute_dtype
        wide = [self._cast(t, compute_dtype(t.dtype, real), "in") for t in inputs]
        tensor: Tensor = node.op.expand(self, *wide, **node.attributes)
        tensor = self._cast(tensor, result.dtype, "result")
        self._graph._rename(tensor, node.name)
        tensor.strides = result.strides
        return tensor

    def __call__(self, op: str, part: str, *operands: Any, **attributes: Any) -> Tensor:
        tensor = self._graph.apply(TABLE[op], operands, attributes)
        stem = f"{self._node.name[:180]} {part or 'value'}"
        self._graph._rename(tensor, self._graph._unique(stem))
        self._graph._automatic.add(tensor)  # gives way to a tensor of the user's
        return tensor

    def _cast(self, tensor: Tensor, dtype: DType, part: str) -> Tensor:
        return tensor if tensor.dtype == dtype else self("identity", part, tensor, dtype=dtype)

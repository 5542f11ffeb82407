"""Values of tensors that are known before the graph runs, as they depend on constants alone.

Models compute shapes with nodes (Shape, Gather, Concat, Reshape).  A graph's shapes are fixed when it is built, so
these nodes are evaluated then, by the reference of the op table.
"""

from __future__ import annotations

import numpy as np

from fusegraph.engines.reference import apply_all
from fusegraph.frontends.onnx.tensors import Array
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Kind
from fusegraph.ops.convert import from_reference, to_reference

#: The most elements of a tensor that is evaluated, as larger ones are not shapes, and of all such tensors together.
MAX_KNOWN = 1 << 20
MAX_KNOWN_IN_ALL = 1 << 25
#: Kinds of nodes that are evaluated: their cost is about that of reading operands and writing results.
_CHEAP = (Kind.POINTWISE, Kind.MOVEMENT, Kind.REDUCTION, Kind.SCAN, Kind.SCATTER, Kind.SORT)


class Values:
    """The values known of one graph's tensors; each is evaluated once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._found: dict[Tensor, Array] = {}
        self._evaluated = 0

    def known(self, tensor: Tensor) -> Array | None:
        """Returns a tensor's value; None if it depends on an input, or on nodes that are too costly to evaluate."""
        stack = [tensor]
        while stack:
            top = stack[-1]
            if top in self._found:
                stack.pop()
                continue
            if top.value is not None:
                self._found[top] = top.value
                continue
            node = self._graph.producer(top)
            if node is None or node.kind not in _CHEAP or any(t.size > MAX_KNOWN for t in node.outputs):
                return None
            if self._evaluated > MAX_KNOWN_IN_ALL:
                return None
            missing = [t for t in node.values if t not in self._found]
            if missing:
                stack += missing
            else:
                self._evaluate(node)
        return self._found[tensor]

    def _evaluate(self, node: Node) -> None:
        operands = [
            to_reference(self._found[t], t.dtype)
            if t in self._found
            else np.broadcast_to(t.dtype.numpy.type(0), t.shape)
            for t in node.inputs
        ]
        for tensor, value in zip(node.outputs, apply_all(node, operands)):
            self._found[tensor] = from_reference(np.broadcast_to(value, tensor.shape), tensor.dtype)
            self._evaluated += tensor.size

    def roots(self, tensor: Tensor) -> tuple[str, ...]:
        """Returns the names of the inputs of the graph that a tensor's value depends on."""
        seen, stack, found = {tensor}, [tensor], []
        while stack:
            top = stack.pop()
            node = self._graph.producer(top)
            if node is None and not top.is_constant:
                found.append(top.name)
            for operand in node.values if node is not None else ():
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        return tuple(found)

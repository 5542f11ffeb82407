"""Decomposition: writes out every composite (softmax, a norm) as the nodes that it is made of."""

from __future__ import annotations

from typing import Any

from fusegraph.dtypes import DType, float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Op
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced


def decompose_for_kernels(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Writes out composites, and scatters that no kernel takes whole."""
    return decompose(graph, scatters=True)


def decompose(graph: Graph, *, scatters: bool = False) -> Rewritten:
    """Returns the graph without composites, and without ``scatters`` if asked for; or itself if it has none.

    The last of a composite's nodes has its name, layout and dtype; the others are named after it, with the same names
    each time.
    """
    return replaced(graph, lambda node: _is_made_of_others(node, scatters), _expand)


def _expand(rewrite: Rewrite, node: Node, _: bool) -> None:
    made = _Expansion(rewrite.graph, node).expand(rewrite.inputs(node))
    rewrite.new |= dict(zip(node.outputs, made))


def _is_made_of_others(node: Node, scatters: bool) -> bool:
    if node.kind is Kind.SCATTER:
        return scatters and node.op.expand is not None
    return node.op.is_composite(node.attributes)


#: The value of a composite as a tensor of its dtype, rounded like the result of any other op.
NARROW = TABLE["narrow"]


class _Expansion:
    """Adds one composite's nodes to a graph; the op's ``expand`` calls it for each node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph, self._node = graph, node

    def expand(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Adds the nodes; returns the tensors that stand for the composite's results."""
        node, graph = self._node, self._graph
        assert node.op.expand is not None
        operands = inputs
        if not node.op.as_stored:
            real = float64 if node.outputs[0].dtype == float64 else graph.compute_dtype
            operands = tuple(self._cast(t, compute_dtype(t.dtype, real), "in") for t in inputs)
        found: Any = node.op.expand(self, *operands, **node.attributes)
        results: list[Tensor] = []
        for tensor, wanted in zip(found if isinstance(found, tuple) else (found,), node.outputs, strict=True):
            if wanted.dtype != tensor.dtype and wanted.dtype.is_packed:  # of integers there is nothing to round
                tensor = self._cast(tensor, wanted.dtype, "packed")
            elif wanted.dtype != tensor.dtype:
                tensor = graph.apply(NARROW, (tensor,), {"dtype": wanted.dtype})
            if tensor in (*inputs, *results):
                tensor = self("identity", "result", tensor)
            graph._rename(tensor, wanted.name)
            tensor.strides = wanted.strides
            results.append(tensor)
        return results

    def __call__(self, op: str | Op, part: str, *operands: Any, **attributes: Any) -> Tensor:
        found = op if isinstance(op, Op) else TABLE[op]
        tensor = self._graph.apply(found, operands, attributes)
        return named(tensor, self._node.name, part or "value")

    def _cast(self, tensor: Tensor, dtype: DType, part: str) -> Tensor:
        return tensor if tensor.dtype == dtype else self("identity", part, tensor, dtype=dtype)

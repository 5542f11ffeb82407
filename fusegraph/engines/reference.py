"""The reference engine: the op table's NumPy meaning, in float64, one node after another.  It is what the others must
equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusegraph.engines.base import Executable
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.convert import convert, from_reference, round_to, to_reference
from fusegraph.runtime.arrays import CPU, ArrayView, Device, to_numpy

Array = np.ndarray[Any, Any]


def apply(node: Node, operands: Sequence[Array]) -> Array:
    """A node's result as a reference array (floats unrounded in float64), from reference arrays of its operands."""
    types = tuple(t.type for t in node.inputs)
    dtypes = node.op.operand_dtypes(types)
    converted = [
        to_reference(x, d) if t.dtype.is_float and d.is_float else convert(x, t.dtype, d) if t.dtype != d else x
        for x, t, d in zip(operands, node.inputs, dtypes)
    ]
    value = np.asarray(node.op.reference(*converted, **node.attributes))
    produced, wanted = node.op.promoted(types), node.output.dtype
    if node.op.name == "identity":
        return convert(value, produced, wanted) if produced != wanted and not _widens(produced, wanted) else value
    if wanted.is_float:
        return value.astype(np.float64)
    if value.dtype == np.float64:
        return convert(value, produced, wanted)
    return value.astype(wanted.numpy)


def _widens(source: Any, target: Any) -> bool:
    return bool(
        source.is_float
        and target.is_float
        and target.unit_roundoff <= source.unit_roundoff
        and target.max >= source.max
    )


def evaluate(graph: Graph, inputs: Mapping[str, Array], *, strict: bool = False) -> dict[Tensor, Array]:
    """The value of every tensor as a reference array, given the inputs as stored, by name.

    strict rounds every intermediate to its tensor's dtype; otherwise only explicit casts round.
    """
    values: dict[Tensor, Array] = {}
    for tensor in graph.tensors.values():
        if tensor.value is not None:
            values[tensor] = to_reference(tensor.value, tensor.dtype)
    for tensor in graph.inputs:
        values[tensor] = to_reference(inputs[tensor.name], tensor.dtype)
    for node in graph.nodes:
        value = np.broadcast_to(apply(node, [values[t] for t in node.inputs]), node.output.shape)
        values[node.output] = round_to(value, node.output.dtype) if strict and node.output.dtype.is_float else value
    return values


class ReferenceExecutable(Executable):
    engine = "reference"

    def __init__(self, graph: Graph, *, strict: bool = False) -> None:
        super().__init__(graph, None)
        self._strict = strict

    @property
    def device(self) -> Device:
        return CPU

    def _run(self, inputs: Sequence[ArrayView], outputs: Sequence[ArrayView], stream: int) -> None:
        arrays = {t.name: to_numpy(v) for t, v in zip(self.graph.inputs, inputs)}
        values = evaluate(self.graph, arrays, strict=self._strict)
        for tensor, target in zip(self.graph.outputs, outputs):
            to_numpy(target)[...] = from_reference(values[tensor], tensor.dtype)

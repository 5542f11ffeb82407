"""The reference engine: evaluates the op table's NumPy definitions in float64, node by node.

Other engines are checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusegraph.engines.base import Executable
from fusegraph.engines.in_place import Pairs
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import extent
from fusegraph.ops import evaluate as ops
from fusegraph.ops.base import Array
from fusegraph.ops.convert import from_reference, round_to, to_reference
from fusegraph.runtime.arrays import CPU
from fusegraph.runtime.memory import check_room
from fusegraph.runtime.packed import pack, unpack
from fusegraph.runtime.strides import numpy_over


def apply(node: Node, operands: Sequence[Array]) -> Array:
    """Returns the first result of a node, as `apply_all` gives it."""
    return apply_all(node, operands)[0]


def apply_all(node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
    """Returns a node's results from its operands, both as reference arrays (floats in float64, not rounded)."""
    types = tuple(t.type for t in node.inputs)
    real = node.output.graph.compute_dtype
    return ops.evaluate(node.op, types, node.attributes, [t.dtype for t in node.outputs], operands, real)


def evaluate(graph: Graph, inputs: Mapping[str, Array], *, strict: bool = False) -> dict[Tensor, Array]:
    """Returns the value of every tensor as a reference array; ``inputs`` are arrays in the tensors' dtypes, by name.

    ``strict`` rounds every intermediate to its tensor's dtype; otherwise only explicit casts round.  Raises
    OutOfMemoryError if a tensor in float64 is larger than the host's memory.
    """
    values: dict[Tensor, Array] = {}
    for tensor in graph.tensors.values():
        check_room(8 * tensor.size, f"tensor {tensor.name!r} of graph {graph.name!r}, float64 {list(tensor.shape)},")
        if tensor.value is not None:
            values[tensor] = to_reference(tensor.value, tensor.dtype)
    for tensor in graph.inputs:
        values[tensor] = to_reference(inputs[tensor.name], tensor.dtype)
    for node in graph.nodes:
        call = graph.calls.get(node.output)
        every = apply_all(node, [values[t] for t in node.inputs]) if call is None else call.results(node, values)
        for tensor, found in zip(node.outputs, every):
            value = np.broadcast_to(found, tensor.shape)
            values[tensor] = round_to(value, tensor.dtype) if strict and tensor.dtype.is_float else value
    return values


class ReferenceExecutable(Executable):
    """Evaluates a graph with the NumPy references of its ops, in float64, on the CPU.

    Results are rounded to their dtypes; with ``strict``, intermediates are too.
    """

    engine = "reference"

    def __init__(self, graph: Graph, *, strict: bool = False) -> None:
        super().__init__(graph, None, CPU)
        self._strict = strict

    def _refused(self, bits: int, pairs: Pairs) -> str | None:
        return None  # everything is computed before anything is written

    def _run(self, inputs: Sequence[int], outputs: Sequence[int], stream: int, pairs: Pairs) -> None:
        arrays = {t.name: _read(t, address) for t, address in zip(self.graph.inputs, inputs)}
        values = evaluate(self.graph, arrays, strict=self._strict)
        numbers, given = self.graph.input_numbers, dict(zip(self.graph.made, outputs))
        given |= {new: inputs[numbers[x]] for new, x in self.graph.updates.items()}
        for tensor, address in given.items():
            found = from_reference(values[tensor], tensor.dtype)
            if tensor.dtype.is_packed:
                _bytes(tensor, address)[...] = pack(found, tensor.dtype, tensor.strides)
            else:
                _array(tensor, address)[...] = found


def _bytes(tensor: Tensor, address: int) -> Array:
    """Returns the memory of a tensor of packed elements as a uint8 array."""
    size = tensor.dtype.nbytes(extent(tensor.shape, tensor.strides))
    array: Array = numpy_over(address, (size,), (1,), np.dtype(np.uint8), None)
    return array


def _read(tensor: Tensor, address: int) -> Array:
    """Returns the values of a tensor, one element each."""
    if not tensor.dtype.is_packed:
        return _array(tensor, address)
    return unpack(_bytes(tensor, address), tensor.dtype, tensor.shape, tensor.strides)


def _array(tensor: Tensor, address: int) -> Array:
    """Returns the memory of a tensor as a NumPy array."""
    array: Array = numpy_over(address, tensor.shape, tensor.strides, tensor.dtype.numpy, None)
    return array

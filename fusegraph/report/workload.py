"""What `fusegraph bench` times: workloads of a table, or any graph with floors counted from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fusegraph.graph import Graph, Node
from fusegraph.layout import extent
from fusegraph.lowering.cudnn_attention import given
from fusegraph.ops.attention_packed import OFFSETS
from fusegraph.ops.base import TensorType
from fusegraph.ops.contraction import TF32


class Operand(Protocol):
    """An input of a workload of a table: see `benchmarks.workload.Input`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def layout(self) -> str: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def values(self) -> Sequence[int]: ...


class Workload(Protocol):
    """What is timed: see `benchmarks.workloads.Workload`, and `GraphWorkload` for any graph."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def inputs(self) -> Sequence[Operand]: ...
    @property
    def torch(self) -> str: ...
    @property
    def missing(self) -> str: ...
    @property
    def flops(self) -> int: ...
    @property
    def unit(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    def graph(self) -> Graph | None: ...


class GraphWorkload:
    """A graph as a workload: no torch code, floors counted from its inputs, outputs and products."""

    torch = missing = ""
    inputs: Sequence[Operand] = ()

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.name = graph.name
        self.dtype = graph.io_dtype.name
        self.unit, self.flops = _products(graph)

    @property
    def bytes(self) -> int:
        """Each element of the inputs and arrays of constants read once, each of the outputs written once."""
        constants = [t for t in self._graph.tensors.values() if t.is_constant and t.shape]
        read = [min(t.size, extent(t.shape, t.strides)) * t.dtype.itemsize for t in (*self._graph.inputs, *constants)]
        return sum(read) + sum(t.nbytes for t in self._graph.outputs)

    def graph(self) -> Graph:
        return self._graph


def _products(graph: Graph) -> tuple[str, int]:
    """The rate that bounds a graph's matrix products and convolutions, and their operations.

    No operations if the operands are of a dtype, or of several, for which no rate is measured, and none where data say
    how many there are: of packed batches.
    """
    flops, units = 0, set()
    for node in graph.nodes:
        types = tuple(t.type for t in node.inputs)
        if OFFSETS[0] in node.op.operands and OFFSETS[0] in given(node, node.op.operands):
            units.add("")  # data say which queries and keys meet
        elif (count := _multiplications(node, types)) is not None:
            flops += 2 * count
            unit = _UNITS.get(node.op.promoted(types).name, "")
            units.add(TF32 if node.attributes.get("compute_dtype") == TF32 else unit)
    unit = units.pop() if len(units) == 1 else ""
    return unit, flops if unit else 0


def _multiplications(node: Node, types: tuple[TensorType, ...]) -> int | None:
    if node.op.multiplications is not None:
        return node.op.multiplications(types, node.attributes)
    return node.output.size * node.op.products(types, node.attributes) if node.op.products is not None else None


_UNITS = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}

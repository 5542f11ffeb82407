"""What `fusegraph bench` times: workloads of a table, or any graph with floors counted from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from fusegraph.graph import Graph, Node
from fusegraph.layout import extent
from fusegraph.lowering.cudnn_attention import given
from fusegraph.ops.attention_packed import OFFSETS
from fusegraph.ops.base import Kind


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
        if node.op.name.startswith("sdpa") and OFFSETS[0] in given(node, node.op.operands):
            units.add("")  # data say which queries and keys meet
        elif node.kind is Kind.CONTRACTION:
            flops += 2 * _multiplications(node)
            unit = _UNITS.get(node.op.promoted(tuple(t.type for t in node.inputs)).name, "")
            units.add("tf32" if node.attributes["compute_dtype"] == "tf32" else unit)
        elif node.op.name == "sdpa":
            q, k, v = node.inputs[:3]
            met = q.shape[0] * q.shape[1] * positions_met(q.shape[2], k.shape[2], node.attributes)
            flops += 2 * met * (q.shape[3] + v.shape[3])
            units.add(_UNITS.get(node.op.promoted(tuple(t.type for t in node.inputs)).name, ""))
        elif node.op.name == "sdpa_backward":
            q, k, v = node.inputs[:3]
            met = q.shape[0] * q.shape[1] * positions_met(q.shape[2], k.shape[2], node.attributes)
            flops += 2 * met * (3 * q.shape[3] + 2 * v.shape[3])
            units.add(_UNITS.get(node.op.promoted(tuple(t.type for t in node.inputs)).name, ""))
    unit = units.pop() if len(units) == 1 else ""
    return unit, flops if unit else 0


def _multiplications(node: Node) -> int:
    """Multiplications of a contraction; of a gradient those of the convolution."""
    first, second = node.inputs
    if node.op.name == "matmul":
        return node.output.size * first.shape[-1]
    result, taps = {
        "conv_fprop": (node.output, second),
        "conv_dgrad": (first, second),
        "conv_wgrad": (second, node.output),
    }[node.op.name]
    return result.size * prod(taps.shape[1:])


_UNITS = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}


def positions_met(rows: int, keys: int, attributes: Mapping[str, Any]) -> int:
    """How many pairs of query and key the band of an sdpa with these attributes holds."""
    left, right = attributes["diagonal_band_left_bound"], attributes["diagonal_band_right_bound"]
    diagonal = np.arange(rows) + (keys - rows if attributes["diagonal_alignment"] == "BOTTOM_RIGHT" else 0)
    last = np.full(rows, keys) if right is None else np.clip(diagonal + right + 1, 0, keys)
    first = np.zeros(rows, np.int64) if left is None else np.clip(diagonal - left + 1, 0, keys)
    return int(np.maximum(last - first, 0).sum())

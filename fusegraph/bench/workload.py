"""What `fusegraph bench` times: workloads of a table, or any graph with floors counted from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from codegen.naming import identifier
from fusegraph.dtypes import as_dtype
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import extent
from fusegraph.lowering.cudnn_attention import given
from fusegraph.ops.attention_packed import OFFSETS
from fusegraph.ops.base import Kind

Build = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Input:
    """An input: its name, logical shape, layout (or strides in elements), and dtype where it is not the workload's.

    Its values are random, or those given, in C order.
    """

    name: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    dtype: str | None = None
    strides: tuple[int, ...] | None = None
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class Workload:
    """One row of a suite: a graph of ours and torch code of the same, over the same inputs.

    build        (graph, *tensors) -> the result, or a tuple of several; None if a graph cannot express it yet.
    missing      why there is no build: "no OP in the op table yet", or what else.
    torch        name of the function in `fusegraph.bench.peers` that computes the same with torch.
    output       shape of the (first) result; also: those of the others.
    flops        multiply-adds counted twice, for workloads bound by arithmetic, and unit ("bf16", "tf32" or "fp32") the
                 rate that bounds them.
    extra_bytes  traffic that no implementation can avoid beyond reading each input and writing each output once.
    output_strides  in elements, where the result does not lie as the graph would have it.
    output_dtype  of the (first) result, where it is not the workload's.
    """

    name: str
    dtype: str
    inputs: tuple[Input, ...]
    output: tuple[int, ...]
    torch: str
    build: Build | None = None
    flops: int = 0
    unit: str = ""
    extra_bytes: int = 0
    missing: str = ""
    output_strides: tuple[int, ...] | None = None
    also: tuple[tuple[int, ...], ...] = ()
    output_dtype: str | None = None

    @property
    def bytes(self) -> int:
        """Device-memory traffic that no implementation can avoid."""
        each = [prod(i.shape) * as_dtype(i.dtype or self.dtype).itemsize for i in self.inputs]
        written = prod(self.output) * as_dtype(self.output_dtype or self.dtype).itemsize
        written += sum(map(prod, self.also)) * as_dtype(self.dtype).itemsize
        return sum(each) + written + self.extra_bytes

    def graph(self) -> Graph | None:
        """The workload as a graph, None if it cannot be expressed yet."""
        if self.build is None:
            return None
        compute = "tf32" if self.unit == "tf32" else "float32"
        graph = Graph(identifier(self.name), io_dtype=self.dtype, compute_dtype=compute)
        tensors = [
            graph.tensor(i.name, i.shape, i.dtype, i.layout if i.strides is None else None, i.strides)
            for i in self.inputs
        ]
        result = self.build(graph, *tensors)
        first, *others = result if isinstance(result, tuple) else (result,)
        graph.output(first, name="out", strides=self.output_strides)
        for number, other in enumerate(others):
            graph.output(other, name=f"out {number + 2}")
        return graph


def transposed(name: str, k: int, n: int) -> Input:
    """The weight (N, K) of a linear layer as a factor (K, N)."""
    return Input(name, (k, n), strides=(1, k))


def short(dtype: str) -> str:
    """What rows call a dtype."""
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)


class GraphWorkload:
    """A graph as a workload: no torch code, floors counted from its inputs, outputs and products."""

    torch = missing = ""
    inputs: tuple[Input, ...] = ()

    def __init__(self, graph: Graph, name: str = "") -> None:
        self._graph = graph
        self.name = name or graph.name
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


#: What can be timed.
AnyWorkload: TypeAlias = Workload | GraphWorkload


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
        elif node.op.name in ("sdpa", "sdpa_backward"):
            q, k, v = node.inputs[:3]
            met = q.shape[0] * q.shape[1] * positions_met(q.shape[2], k.shape[2], node.attributes)
            of_q, of_v = (1, 1) if node.op.name == "sdpa" else (3, 2)
            flops += 2 * met * (of_q * q.shape[3] + of_v * v.shape[3])
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

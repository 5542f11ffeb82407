"""What `fusegraph bench` times: workloads from a table, or any graph."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from codegen.naming import identifier
from fusegraph.bench.graphs import GRAPHS, Build
from fusegraph.dtypes import as_dtype
from fusegraph.graph import Graph, Node
from fusegraph.layout import extent
from fusegraph.lowering.cudnn_attention import given
from fusegraph.ops.attention_packed import OFFSETS
from fusegraph.ops.base import TensorType
from fusegraph.ops.contraction import TF32


@dataclass(frozen=True)
class Input:
    """An input: its name, logical shape, layout (or strides in elements), and dtype (None: the workload's).

    Its values are random if none are given; given ones are in C order.  A parameter is the same in every call.
    """

    name: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    dtype: str | None = None
    strides: tuple[int, ...] | None = None
    values: tuple[int, ...] = ()
    parameter: bool = False


@dataclass(frozen=True)
class Workload:
    """One row of a suite: a graph, and torch code that computes the same from the same inputs.

    output          shape of the (first) result; also: those of the others.
    torch           name of the function in `fusegraph.bench.peers` that computes the same with torch.
    build           (graph, *tensors) -> the result, or a tuple of several; default: the function of the name ``torch``
                    in `fusegraph.bench.graphs`.
    flops           operations (a multiply-add counts as two) of workloads bound by arithmetic; unit: the kind of
                    arithmetic ("bf16", "tf32", "fp32" or "fp8") whose rate bounds them.
    extra_bytes     traffic that no implementation can avoid beyond reading each input and writing each output once.
    output_strides  strides of the (first) result in elements; default: the graph's choice.
    output_dtype    dtype of the (first) result; default: the workload's.
    """

    name: str
    dtype: str
    inputs: tuple[Input, ...]
    output: tuple[int, ...]
    torch: str
    flops: int = 0
    unit: str = ""
    build: Build | None = None
    extra_bytes: int = 0
    output_strides: tuple[int, ...] | None = None
    also: tuple[tuple[int, ...], ...] = ()
    output_dtype: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes of device-memory traffic that no implementation can avoid."""
        each = [prod(i.shape) * as_dtype(i.dtype or self.dtype).itemsize for i in self.inputs]
        written = prod(self.output) * as_dtype(self.output_dtype or self.dtype).itemsize
        written += sum(map(prod, self.also)) * as_dtype(self.dtype).itemsize
        return sum(each) + written + self.extra_bytes

    def graph(self) -> Graph:
        """Returns the workload as a graph."""
        build = self.build or GRAPHS[self.torch]
        compute = "tf32" if self.unit == "tf32" else "float32"
        graph = Graph(identifier(self.name), io_dtype=self.dtype, compute_dtype=compute)
        tensors = [
            graph.tensor(i.name, i.shape, i.dtype, i.layout if i.strides is None else None, i.strides, i.parameter)
            for i in self.inputs
        ]
        result = build(graph, *tensors)
        first, *others = result if isinstance(result, tuple) else (result,)
        graph.output(first, name="out", strides=self.output_strides)
        for number, other in enumerate(others):
            graph.output(other, name=f"out {number + 2}")
        return graph


def transposed(name: str, k: int, n: int) -> Input:
    """Returns the weight (N, K) of a linear layer as an operand (K, N)."""
    return Input(name, (k, n), strides=(1, k))


def short(dtype: str) -> str:
    """Returns the short name of a dtype in the names of rows."""
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)


class GraphWorkload:
    """A graph as a workload, without torch code; its floor is counted from its inputs, outputs and products."""

    torch = ""
    inputs: tuple[Input, ...] = ()

    def __init__(self, graph: Graph, name: str = "") -> None:
        self._graph = graph
        self.name = name or graph.name
        self.dtype = graph.io_dtype.name
        self.unit, self.flops = _products(graph)

    @property
    def bytes(self) -> int:
        """Bytes if each element of inputs and constant arrays is read once, and each of outputs is written once."""
        constants = [t for t in self._graph.tensors.values() if t.is_constant and t.shape]
        read = [min(t.size, extent(t.shape, t.strides)) * t.dtype.itemsize for t in (*self._graph.inputs, *constants)]
        return sum(read) + sum(t.nbytes for t in self._graph.outputs)

    def graph(self) -> Graph:
        return self._graph


#: What can be timed.
AnyWorkload: TypeAlias = Workload | GraphWorkload


def _products(graph: Graph) -> tuple[str, int]:
    """Returns the unit whose rate bounds a graph's matrix products and convolutions, and the number of operations.

    The number is 0 if operands have several dtypes or one for which no rate is measured, and for packed batches, where
    it depends on the data.
    """
    flops, units = 0, set()
    for node in graph.nodes:
        types = tuple(t.type for t in node.inputs)
        if OFFSETS[0] in node.op.operands and OFFSETS[0] in given(node, node.op.operands):
            units.add("")  # which queries and keys meet depends on the data
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

"""Splitting long sums of products: a contraction with so few results that its tiles leave most of a GPU idle becomes
two nodes, one that sums up parts (`ops.parts`) and one that adds up the parts, and takes over what follows.

The parts, and the order in which they are added up, follow from shapes and dtypes alone: the same inputs give the same
bits, on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen import contraction_simt_schedule
from fusegraph.dtypes import DType, float32, int32, int64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.lowering import window
from fusegraph.ops import TABLE
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.parts import PARTS
from fusegraph.passes.algorithms import BYTES_PER_CYCLE, LAUNCH_CYCLES
from fusegraph.passes.simplify import Simplified, same

#: How much faster it must look in parts, and the cycles that it must save at least.
MARGIN, LEAST_SAVED = 1.3, 2 * LAUNCH_CYCLES
MOST_PARTS = 128
#: Estimates for tensor cores: multiprocessors, blocks of a cluster that share a tile, sides of a tile, multiply-adds a
#: cycle by bytes of an element, cycles until a tile's first stage is there, and that a cluster takes to add up.
SMS, CLUSTER, SIDE, RATE, LATENCY, EXCHANGE = 132, 8, 128, {1: 3300, 2: 1650, 4: 820}, 1500, 6000
#: Products of a stage of the tensor-core kernels: parts are whole stages.
STAGE = 64


@dataclass(frozen=True)
class _Problem:
    """batch products of rows x inner by inner x cols; the dimension to cut has ``size`` of ``each`` products."""

    batch: int
    rows: int
    cols: int
    size: int
    each: int
    tensor_cores: int  # bytes of an element, 0 for those that are multiplied without

    def cycles(self, parts: int) -> float:
        inner = self.size * self.each // parts
        moved = 0.0
        if parts > 1:
            moved = 2 * 4 * parts * self.batch * self.rows * self.cols / BYTES_PER_CYCLE + LAUNCH_CYCLES
        if not self.tensor_cores:
            return contraction_simt_schedule.cycles(self.batch * parts, self.rows, self.cols, inner) + moved
        tiles = parts * self.batch * -(-self.rows // SIDE) * -(-self.cols // SIDE)
        cluster = max(1, min(CLUSTER, SMS // tiles))
        depth = SIDE * min(SIDE, self.cols) * inner / cluster / RATE[self.tensor_cores]
        return -(-tiles // SMS) * depth + LATENCY + (EXCHANGE if cluster > 1 else 0) + moved

    def parts(self) -> int:
        """The number of parts with the least estimated time."""
        whole = not self.tensor_cores
        fitting = [
            n
            for n in range(2, min(self.size, MOST_PARTS) + 1)
            if self.size % n == 0 and (whole or self.size // n * self.each % STAGE == 0)
        ]
        best = min(fitting, key=self.cycles, default=1)
        before, after = self.cycles(1), self.cycles(best)
        return best if before >= MARGIN * after and before - after >= LEAST_SAVED else 1


def split_contractions(graph: Graph) -> Simplified:
    """The graph with its contractions split where that is worthwhile, or itself if there is none."""
    split = {node: n for node in graph.nodes if (n := parts_of(node, graph)) > 1}
    if not split:
        return same(graph)
    result = Graph(graph.name, graph.io_dtype, graph.compute_dtype)
    new: dict[Tensor, Tensor] = {}
    for tensor in graph.tensors.values():
        new[tensor] = result._add_tensor(tensor.name, tensor.shape, tensor.strides, tensor.dtype, tensor.value)
        if tensor in graph._automatic:
            result._automatic.add(new[tensor])
    result.inputs = [new[t] for t in graph.inputs]
    for node in graph.nodes:
        inputs = tuple(new[t] for t in node.inputs)
        if node in split:
            _split(result, node, inputs, new[node.output], split[node])
        else:
            result.add_node(Node(node.op, inputs, node.attributes, *(new[t] for t in node.outputs)))
    result.outputs = [new[t] for t in graph.outputs]
    return Simplified(result, new)


def parts_of(node: Node, graph: Graph) -> int:
    """The parts that a node is to be summed up in; 1 for those that stay whole."""
    if node.op.name not in PARTS or not node.output.size or node.attributes.get("groups", 1) > 1:
        return 1
    common = node.op.operand_dtypes(tuple(t.type for t in node.inputs))[0]
    if common.is_float and common.itemsize == 1:  # tensor cores round sums of fp8: parts would hide that from `check`
        return 1
    if node.op.name != "matmul" and window.suits(node, graph) is None:
        return 1
    if common.is_float != node.output.dtype.is_float or (common.is_int and node.output.dtype.itemsize < 4):
        return 1
    problem = _problem(node, _tensor_cores(node, common, graph))
    return problem.parts() if problem is not None else 1


def _problem(node: Node, cores: int) -> _Problem | None:
    """The product that a node is, and the dimension that can be cut; None if there is none."""
    first, second = node.inputs
    shape = node.output.shape
    if node.op.name == "matmul":
        rows = prod(shape[:-1]) if second.rank == 2 else shape[-2]
        return _Problem(prod(shape[:-1]) // rows, rows, shape[-1], first.shape[-1], 1, cores)
    if node.op.name == "conv_wgrad":
        return _Problem(1, prod(shape[1:]), shape[0], first.shape[0], prod(second.shape[2:]), cores)
    panel = STAGE if cores else 1  # parts have whole panels of channels
    if first.shape[1] % panel:
        return None
    rows, taps = shape[0] * prod(shape[2:]), prod(second.shape[2:])
    return _Problem(1, rows, shape[1], first.shape[1] // panel, taps * panel, cores)


def _tensor_cores(node: Node, common: DType, graph: Graph) -> int:
    """Bytes of an element if tensor cores multiply them, else 0."""
    if graph.compute_dtype != float32 or common.is_bool:
        return 0
    if common == float32:
        return 4 if node.attributes["compute_dtype"] == "tf32" else 0
    return common.itemsize if common.itemsize <= 2 else 0


def _split(graph: Graph, node: Node, inputs: tuple[Tensor, ...], output: Tensor, parts: int) -> None:
    """Adds the node that sums up the parts and the one that adds them up."""
    common = node.op.operand_dtypes(tuple(t.type for t in node.inputs))[0]
    dtype = compute_dtype(common, graph.compute_dtype) if common.is_float else int32
    if int64 in (common, output.dtype):
        dtype = int64
    shape = (parts, *output.shape)
    order = stride_order(output.shape, output.strides)
    if node.op.name == "conv_wgrad":  # filters are the columns of the product: neighbours are written together
        order = (*(d for d in order if d), 0)
    stem = graph._unique(f"{node.name[:180]} parts")
    partial = graph._add_tensor(stem, shape, packed_strides(shape, (0, *(d + 1 for d in order))), dtype)
    graph._automatic.add(partial)
    attributes = {**node.attributes, "parts": parts, "dtype": dtype}
    graph.add_node(Node(PARTS[node.op.name], inputs, attributes, partial))
    op = TABLE["reduction"]
    total = {**op.attributes, "mode": "add", "axes": (0,), "keepdims": False, "dtype": output.dtype}
    graph.add_node(Node(op, (partial,), total, output))

"""Splitting reductions: one with few results, each of many elements, becomes two, so that all of a GPU works on it.

Parts of it are reduced by themselves (`ops.partial`), then the parts; always the same ones in the same order, so that
the same inputs give the same bits.
"""

from __future__ import annotations

from math import prod

import networkx as nx
import numpy as np

from fusegraph.dtypes import DType, int32, int64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.rows import Parallelism, keeps_whole, parallelism
from fusegraph.ops import TABLE
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.partial import PARTIAL
from fusegraph.ops.reduction import EXTREMES
from fusegraph.passes.simplify import Simplified, same

#: A reduction stays whole if a kernel for it has as many blocks as this, or if none of them reads more bytes.
ENOUGH_BLOCKS = 128
SHORT_BYTES = 512 << 10
#: Bytes that a block reads of one part: enough to be worth its beginning and its end, few enough for its cache.
LEAST_PART_BYTES, PART_BYTES = 16 << 10, 64 << 10
#: Blocks that are a few waves of a large GPU, and the most parts that one block can be left to reduce.
BLOCKS = 1056
MOST_PARTS = 4096

#: mode of a reduction -> (mode of its parts, how they are combined, what is done to the result).
_HALVES = {
    "add": ("add", "add", ""),
    "mul": ("mul", "mul", ""),
    "min": ("min", "min", ""),
    "max": ("max", "max", ""),
    "amax": ("amax", "max", ""),
    "avg": ("add", "add", "mean"),
    "norm1": ("norm1", "add", ""),
    "norm2": ("squares", "add", "sqrt"),
}


def split_reductions(graph: Graph) -> Simplified:
    """The graph with its reductions split where that is worthwhile, or itself if there is none."""
    chunks = {node: found for node in graph.nodes if (found := chunk(graph, node)) is not None}
    if not chunks:
        return same(graph)
    result = Graph(graph.name, graph.io_dtype, graph.compute_dtype)
    new: dict[Tensor, Tensor] = {}
    for tensor in graph.tensors.values():
        copy = result._add_tensor(tensor.name, tensor.shape, tensor.strides, tensor.dtype, tensor.value)
        if tensor in graph._automatic:
            result._automatic.add(copy)
        new[tensor] = copy
    result.inputs = [new[t] for t in graph.inputs]
    for node in graph.nodes:
        inputs = tuple(new[t] for t in node.inputs)
        if node in chunks:
            _split(result, node, inputs[0], new[node.output], chunks[node])
        else:
            result.add_node(Node(node.op, inputs, node.attributes, new[node.output]))
    result.outputs = [new[t] for t in graph.outputs]
    return Simplified(result, new)


def chunk(graph: Graph, node: Node) -> int | None:
    """The elements of a part of a reduction that is to be split, None for other nodes."""
    if node.op is not TABLE["reduction"] or node.attributes["mode"] not in _HALVES:
        return None
    x, axes = node.inputs[0], node.attributes["axes"]
    if x.size == 0:
        return None
    whole = parallelism(x, axes)
    if whole.blocks >= ENOUGH_BLOCKS or whole.bytes_each <= SHORT_BYTES:
        return None
    if keeps_whole(whole) and _returns(graph, node, x):
        return None
    return chunk_of(x, axes, whole)


def chunk_of(x: Tensor, axes: tuple[int, ...], whole: Parallelism) -> int:
    """The elements of a part: a power of two, so that parts begin where memory is aligned."""
    length = prod(x.shape[d] for d in axes)
    total = whole.blocks * whole.bytes_each
    wanted = min(max(total // BLOCKS, LEAST_PART_BYTES), PART_BYTES)
    step = whole.bytes_each // length
    least = max(wanted // step, -(-length // MOST_PARTS))
    return 1 << (least - 1).bit_length()


def _returns(graph: Graph, node: Node, x: Tensor) -> bool:
    """Whether something as large as what is reduced follows from the result: one kernel may read it once for both."""
    return any(n.output.size >= x.size for n in nx.descendants(graph.network, node))


def _split(graph: Graph, node: Node, x: Tensor, result: Tensor, size: int) -> None:
    """Adds the nodes that make the result of a reduction from its parts."""
    mode, axes, keepdims = (node.attributes[key] for key in ("mode", "axes", "keepdims"))
    first, second, after = _HALVES[mode]
    dtype = _accumulator(graph, mode, x.dtype, result.dtype)

    def add(op_name: str, name: str, inputs: tuple[Tensor, ...], **attributes: object) -> Tensor:
        op = PARTIAL if op_name == PARTIAL.name else TABLE[op_name]
        tensor = graph.apply(op, inputs, attributes)
        graph._rename(tensor, graph._unique(f"{node.name[:180]} {name}"))
        graph._automatic.add(tensor)
        return tensor

    parts = add(PARTIAL.name, "parts", (x,), mode=first, axes=axes, chunk=size, keepdims=keepdims, dtype=dtype)
    combine = {"mode": second, "axes": (0,), "keepdims": False}
    if not after:
        graph.add_node(Node(TABLE["reduction"], (parts,), {**combine, "dtype": result.dtype}, result))
        return
    total = add("reduction", "total", (parts,), **combine, dtype=dtype)
    if after == "sqrt":
        graph.add_node(Node(TABLE["sqrt"], (total,), {}, result))
        return
    count = graph.constant(np.array(float(prod(x.shape[d] for d in axes))), dtype=dtype)
    graph.add_node(Node(TABLE["div"], (total, count), {}, result))


def _accumulator(graph: Graph, mode: str, source: DType, result: DType) -> DType:
    """The dtype of the parts: that in which they are combined."""
    if source.is_float:
        return compute_dtype(source, graph.compute_dtype)
    if mode in EXTREMES:
        return source
    return int64 if int64 in (source, result) else int32

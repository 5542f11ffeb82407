"""Attention of few queries to many keys: keys are cut into parts that work side by side, and their results combined.

A part's result is its own attention, and the logarithm of its own sum of exponentials says what it weighs.  They are
combined in a fixed order: the same inputs give the same bits.  (Flash-decoding: Dao, Haziza, Massa and Sizov, 2023.)
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

from codegen.attention import simt, thin
from codegen.buffers import SIZES
from codegen.target import Target
from fusegraph.dtypes import bfloat16, float16, float32, float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.attention import shares_keys
from fusegraph.lowering.attention_prologue import multiplied
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.ops import TABLE
from fusegraph.ops.attention_nodes import ATTENTION, Score, Weight
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.decompose import NARROW
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, replaced_where_chosen

#: What is chosen.
NAME, WHOLE = "parts of an attention", "whole"
#: Queries and keys of a tile; the most parts.
ROWS, KEYS, MOST_PARTS = 64, 128, 64
#: The types that single threads multiply, and their names in C.
REALS = {float32: "float", float64: "double"}
#: Times, in units of a block's time for a tile: to begin, to combine results, and to combine each part of them.
BEGINNING, COMBINING, PART = 4.0, 2.5, 0.05
#: Cycles to combine the results of parts of a few queries, a kernel of its own.
COMBINING_FEW = 4000.0
#: Tiles that memory delivers in one unit of time, for each byte in the time of a multiply-add, if blocks are at least
#: that share of the multiprocessors, and how much slower it is with fewer; the factor by which parts must be faster.
AT_ONCE, ENOUGH, SLOWER, MARGIN = 38.025, 0.9, 0.1, 1.2


def split_attention(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Cuts the keys of attention into parts where that keeps more of a GPU busy."""
    return replaced_where_chosen(graph, lambda node: _weighed(node, options), _cut)


def _weighed(node: Node, options: Options) -> tuple[Choice, int] | None:
    """Returns the choice of an attention's parts, and their number, 0 if it stays whole; None if there can be none."""
    if node.kind is not Kind.ATTENTION:
        return None
    target = options.target.planned
    times = _times(node, target)
    if len(times) < 2:
        return None
    several = min(times.keys() - {1}, key=times.__getitem__)
    q, _, v = multiplied(node)
    unit = ROWS * KEYS * (q.shape[-1] + v.shape[-1]) / target.mma
    cycles = {WHOLE: unit * times[1], f"in {several} parts": unit * times[several]}
    preferred = WHOLE if MARGIN * times[several] > times[1] else f"in {several} parts"
    choice = weigh(NAME, node.name, cycles, preferred, options.settled, str([t.type for t in node.inputs]))
    return choice, 0 if choice.taken == WHOLE else several


def best_parts(node: Node, target: Target) -> int:
    """Returns the parts in which the keys of an attention are worked on; 1 if it stays whole."""
    times = _times(node, target)
    best = min(times, key=times.__getitem__)
    return best if MARGIN * times[best] <= times[1] else 1


def _times(node: Node, target: Target) -> dict[int, float]:
    """Returns what an attention takes in so many parts, in units of a block's time for a tile."""
    score: Score = node.attributes["score"]
    space: tuple[int, ...] = score.anchor.output.shape
    *batch, rows, keys = space
    if node.attributes["sink"] or not prod((*batch, rows, keys)) or _selects_nan(node):
        return {1: 0.0}
    if rows == 1 and batch and shares_keys(node):
        rows = batch.pop()
    work, tiles = prod(batch) * -(-rows // ROWS), -(-keys // KEYS)

    if _is_thin(node, rows):
        return _thin_times(node, target, prod(batch), keys)
    if multiplied(node)[0].dtype in REALS:
        return _threads_times(node, target, prod(batch), rows, keys)
    at_once = AT_ONCE * target.bytes_per_cycle / target.mma
    q, _, v = multiplied(node)
    # The results of a part, in 32 bits, are written and read, in units of a block's time for a tile.
    unit = ROWS * KEYS * (q.shape[-1] + v.shape[-1]) / target.mma
    moved = 2 * 4 * prod(batch) * rows * v.shape[-1] / target.bytes_per_cycle / unit

    def time(parts: int) -> float:
        of_blocks = -(-work * parts // target.sms) * -(-tiles // parts)
        of_memory = prod(batch) * tiles / at_once * (1 + SLOWER * max(0.0, ENOUGH - work * parts / target.sms))
        return BEGINNING + max(of_blocks, of_memory) + (COMBINING + parts * (PART + moved) if parts > 1 else 0)

    return {parts: time(parts) for parts in range(1, min(MOST_PARTS, tiles) + 1)}


def _is_thin(node: Node, rows: int) -> bool:
    """Tells whether few enough queries meet keys that their blocks share: clusters already have parts of them."""
    q, k, v = multiplied(node)
    return (
        node.attributes["rounded"]
        and all(t.dtype in (bfloat16, float16) for t in (q, k, v))
        and thin.takes(rows, q.shape[-1], v.shape[-1])
    )


def _thin_times(node: Node, target: Target, batch: int, keys: int) -> dict[int, float]:
    """Returns `_times` of few queries, each part being a cluster's where there are clusters."""
    q, _, v = multiplied(node)
    elements = q.shape[-1] + v.shape[-1]
    row = elements * q.dtype.itemsize
    cluster = max(thin.CLUSTERS) if target.arch.has_clusters else 1
    unit = ROWS * KEYS * elements / target.mma

    def time(parts: int) -> float:
        of_blocks = keys * row / min(parts * cluster, target.sms / batch) / thin.RATE
        memory = max(of_blocks, batch * keys * row / target.bytes_per_cycle)
        return (thin.BEGIN + memory + (COMBINING_FEW if parts > 1 else 0.0)) / unit

    return {parts: time(parts) for parts in range(1, min(MOST_PARTS, -(-keys // KEYS)) + 1)}


def _threads_times(node: Node, target: Target, batch: int, rows: int, keys: int) -> dict[int, float]:
    """Returns `_times` of attention by single threads."""
    q, _, v = multiplied(node)
    depth, width, real = q.shape[-1], v.shape[-1], REALS[q.dtype]
    unit = ROWS * KEYS * (depth + width) / target.mma

    def time(parts: int) -> float:
        moved = 2 * parts * batch * rows * width * SIZES[real] / target.bytes_per_cycle if parts > 1 else 0.0
        combining = COMBINING_FEW + moved if parts > 1 else 0.0
        sizes = simt.Sizes(depth, width, real, batch * parts, rows, keys, parts)
        return (simt.least_cycles(sizes, target) + combining) / unit

    return {parts: time(parts) for parts in range(1, min(MOST_PARTS, -(-keys // KEYS)) + 1)}


def _selects_nan(node: Node) -> bool:
    """Returns true if zeros are chosen instead of NaN, as the probabilities of rows without keys are.

    Combined from parts, the results of such rows would be NaN.
    """
    weight: Weight | None = node.attributes["weight"]
    return (
        weight is not None and not node.attributes["zero"] and any(n.op.role is Role.SELECT for n in weight.graph.nodes)
    )


def _cut(rewrite: Rewrite, node: Node, parts: int) -> None:
    """Adds the attention of each part, and what combines them."""
    graph, inputs, outputs = rewrite.graph, rewrite.inputs(node), [rewrite.result(t) for t in node.outputs]
    out = outputs[0]
    wide = float64 if float64 in (out.dtype, *(t.dtype for t in multiplied(node))) else float32

    def tensor(part: str, shape: tuple[int, ...]) -> Tensor:
        return intermediate(graph, node.name, part, shape, packed_strides(shape), wide)

    def write(op: str, *operands: Any, **attributes: Any) -> Tensor:
        return graph.apply(TABLE[op], operands, attributes)

    space = node.attributes["score"].anchor.output.shape[:-1]  # heads may have two dimensions, and one in the result
    shape = (*space, out.shape[-1])
    results, stats = tensor("of parts", (parts, *shape)), tensor("stats of parts", (parts, *space, 1))
    attributes = {**node.attributes, "parts": parts, "zero": True}
    graph.add_node(Node(ATTENTION, inputs, attributes, results, stats))
    if len(outputs) == 1:
        # A row of results has its sum of exponentials beside each element: one kernel combines them.
        stats = write("broadcast", stats, shape=(parts, *shape))
    most = write("reduction", stats, mode="max", axes=0)
    shift = write("binary_select", 0.0, most, write("cmp_eq", most, -inf))
    weights = write("exp", stats - shift)
    total = write("reduction", weights, mode="add", axes=0, keepdims=False)
    value = write("reduction", results * weights, mode="add", axes=0, keepdims=False)
    divisor = total
    if node.attributes["zero"]:
        divisor = write("binary_select", 1.0, total, write("cmp_eq", total, 0.0))
    combined = out
    if shape != out.shape:
        combined = intermediate(graph, node.name, "combined", shape, packed_strides(shape), out.dtype)
    graph.add_node(Node(NARROW, (value / divisor,), {"dtype": out.dtype}, combined))
    if combined is not out:
        graph.add_node(Node(TABLE["reshape"], (combined,), {"shape": out.shape}, out))
    if len(outputs) > 1:
        log = write("log", total) + write("reduction", shift, mode="add", axes=0, keepdims=False)
        graph.add_node(Node(NARROW, (log,), {"dtype": outputs[1].dtype}, outputs[1]))

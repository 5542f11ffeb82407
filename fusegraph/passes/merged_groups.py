"""Merged groups: a filter's gradient in groups of few channels is one in fewer groups, of which a part is kept.

Tensor cores multiply tiles of 64 rows, and copies bring 128 bytes as fast as 16.  A group of several is multiplied by
the filters of all of them; the products of one group's channels with its own filters are blocks on a diagonal, which
the kernel that adds up the parts picks out.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.target import Target
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Role
from fusegraph.ops.parts import PARTS
from fusegraph.passes.rewrite import Rewrite, Rewritten, replaced
from fusegraph.passes.split_contractions import STREAMED, best_cut, part_sums

#: Most channels and filters of a group that is merged, and of one that is made of several: of each as many as fit.
WIDEST, MERGED = 24, (32, 64, 96)
#: How much faster the gradient must be estimated to be, with the kernel behind it.
MARGIN = 1.2


@dataclass(frozen=True)
class Merged:
    """How a gradient is computed: ``count`` groups together, in so many parts, in so many cycles."""

    count: int
    parts: int
    cycles: float


def merge_groups(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Computes the gradients of filters of few channels a group for several groups together, where that is faster."""
    target = options.target.planned
    return replaced(graph, lambda node: how if (how := merged(node, graph, target)).count > 1 else None, _write)


def merged(node: Node, graph: Graph, target: Target) -> Merged:
    """Returns how a filter's gradient had better be computed as a tiled product; its groups by themselves: of 1."""
    if node.op.role is not Role.WGRAD or "parts" in node.attributes:
        return Merged(1, 1, 0.0)
    best = Merged(1, *best_cut(node, graph, target))
    groups, limit = node.attributes["groups"], best.cycles / MARGIN
    image, loss = node.inputs
    widest = max(image.shape[1], loss.shape[1]) // groups
    common = node.op.operand_dtypes((image.type, loss.type))[0]
    if groups == 1 or widest > WIDEST or not common.is_float or common.itemsize != 2 or not node.output.size:
        return best
    for count in sorted({max(n for n in range(1, most // widest + 1) if groups % n == 0) for most in MERGED} - {1}):
        whole = _together(node, count)
        parts, cycles = best_cut(whole, graph, target)
        if parts == 1:
            cycles += target.launch_cycles + 4 * whole.output.size / (STREAMED * target.bytes_per_cycle)
        if cycles < limit:
            best, limit = Merged(count, parts, cycles), cycles
    return best


def _together(node: Node, count: int) -> Node:
    """Returns a gradient of ``count`` groups together, which is in no graph."""
    old = node.output
    shape = (old.shape[0], count * old.shape[1], *old.shape[2:])
    strides = packed_strides(shape, stride_order(old.shape, old.strides))
    made = Tensor(node.output.graph, old.name, shape, strides, old.dtype)
    attributes = {**node.attributes, "groups": node.attributes["groups"] // count}
    return Node(node.op, node.inputs, attributes, made)


def _write(rewrite: Rewrite, node: Node, how: Merged) -> None:
    graph, apply = rewrite.graph, rewrite.graph.apply
    inputs, output = rewrite.inputs(node), rewrite.result(node.output)
    whole = _together(Node(node.op, inputs, node.attributes, output), how.count)
    sums = part_sums(graph, whole, PARTS[node.op], inputs, whole.output, {"parts": how.parts})
    each = output.shape[0] // node.attributes["groups"]
    shape = (how.parts, output.shape[0], how.count, *output.shape[1:])
    blocks = apply(TABLE["reshape"], (sums,), {"shape": shape})
    of_filter, of_channel = (apply(TABLE["gen_index"], (blocks,), {"axis": axis}) for axis in (1, 2))
    group = apply(TABLE["mod"], (apply(TABLE["quotient"], (of_filter, each), {}), how.count), {})
    own = apply(TABLE["cmp_eq"], (group, of_channel), {})
    kept = apply(TABLE["binary_select"], (blocks, 0.0, own), {})
    total = TABLE["reduction"]
    added = {**total.attributes, "mode": "add", "axes": (0, 2), "keepdims": False, "dtype": output.dtype}
    graph.add_node(Node(total, (kept,), added, output))

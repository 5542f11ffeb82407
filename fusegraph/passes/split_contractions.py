"""Splitting long sums of products: a contraction with so few results that its tiles leave most of a GPU idle becomes
two nodes, one that sums up parts (`ops.parts`) and one that adds up the parts, and takes over what follows.

The parts, and the order in which they are added up, follow from shapes, dtypes and the target: the same inputs give the
same bits, on every machine that runs what was planned for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import log2, prod
from typing import Any

from codegen.sizes import Size, aligned, varies
from codegen.target import Target
from fusegraph.dtypes import DType, float32, int32, int64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.lowering import direct_convolution
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.ops import TABLE
from fusegraph.ops.base import Op, Role
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.parts import PARTS, STAGE, part_length
from fusegraph.passes.estimates import alone, cycles
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, remove_dead, replaced_where_chosen
from fusegraph.passes.split_products import meet

#: What is chosen.
NAME, WHOLE = "parts of a sum of products", "whole"
#: The share of device memory's rate that kernels get, and the launches that the first one takes beside its work.
STREAMED, START = 0.804375, 2
#: How much faster it must be estimated to be in parts, and the launches that it must save at least.
MARGIN, LEAST_SAVED = 1.1, 2
MOST_PARTS = 256
#: Most parts that are turned while they are added up.
MOST_TURNED = 16
#: Up to so many products are added up in about the time that adding up parts takes.
SHORT = 256
#: The side of a tile; so many rounds of tiles keep multiprocessors busy.
SIDE, ROUNDS = 128, 4


@dataclass(frozen=True)
class _Cut:
    """The dimension that can be cut: ``size`` steps of ``each`` products; parts have multiples of ``unit`` products.

    Parts are whole stages of the tensor-core kernels if the sum is, else they begin where as many bytes are aligned.
    With ``ragged``, the last part may have less than the others.
    """

    size: int
    each: int
    unit: int
    ragged: bool = False

    @property
    def counts(self) -> list[int]:
        """The numbers of parts that there can be; of equal parts, as far as there are such of about as many terms."""
        most = min(self.size, MOST_PARTS)
        fitting = [n for n in range(2, most + 1) if self.size % n == 0]
        found = [n for n in fitting if self.size // n * self.each % self.unit == 0]
        for exponent in range(2, MOST_PARTS.bit_length() if self.ragged else 0):
            length = part_length(self.size, 1 << exponent)
            count = -(-self.size // length)
            alike = any(3 * count <= 4 * n <= 6 * count for n in found)
            if 1 < count <= most and part_length(self.size, count) == length and not alike:
                found.append(count)
        return sorted(found)


def split_contractions(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Sums up contractions of few results and many products in parts, where that is worthwhile."""
    return replaced_where_chosen(graph, lambda node: weighed(node, graph, options), _split)


def _split(rewrite: Rewrite, node: Node, parts: int) -> None:
    add_in_parts(rewrite, node, PARTS[node.op], {"parts": parts})


def weighed(node: Node, graph: Graph, options: Options) -> tuple[Choice, int] | None:
    """Returns the choice of a node's parts, and how many it has, 0 for none; None for nodes that can have none."""
    target = options.target.planned
    if not _may_be_cut(node, graph, target):
        return None
    estimates = _estimates(node, graph, target)
    best, least = _best(estimates, target), min(estimates.keys() - {1}, key=estimates.__getitem__, default=1)
    near = {min(estimates, key=lambda n: abs(log2(n / wanted))) for wanted in (least / 2, 2 * least)}
    settled = _settled(node, graph, options)
    if settled not in estimates:
        estimates[settled] = _cycles(node, graph, settled, target)
    counts = {_in(n): n for n in sorted({1, least, settled, *near})}
    if len(counts) == 1:
        return None
    preferred = next((name for name, n in counts.items() if n == best), WHOLE)
    alike = f"{node.op.name} {[t.type for t in node.inputs]} {dict(node.attributes)}"
    choice = weigh(
        NAME, node.name, {name: estimates[n] for name, n in counts.items()}, preferred, options.settled, alike
    )
    return choice, 0 if choice.taken == WHOLE else counts[choice.taken]


def _settled(node: Node, graph: Graph, options: Options) -> int:
    """Returns the number of parts that options settle, 1 if there are none: estimates may not think of it here."""
    found = options.settled.get((NAME, node.name))
    cut = _cut(node, _common(node), graph, options.target.planned)
    return next((n for n in cut.counts if found.taken == _in(n)), 1) if found and cut else 1


def _in(parts: int) -> str:
    return WHOLE if parts == 1 else f"in {parts} parts"


def best_cut(node: Node, graph: Graph, target: Target) -> tuple[int, float]:
    """Returns the parts that a contraction is to be summed up in, 1 if it stays whole, and its estimated cycles."""
    estimates = _estimates(node, graph, target)
    best = _best(estimates, target)
    return best, estimates[best]


def _estimates(node: Node, graph: Graph, target: Target) -> dict[int, float]:
    """Returns the estimated cycles of a contraction in so many parts; in 1 alone if parts cannot be worthwhile."""
    whole = _cycles(node, graph, 1, target)
    if whole <= (START + 2 * LEAST_SAVED) * target.launch_cycles or not _may_be_cut(node, graph, target):
        return {1: whole}
    cut = _cut(node, _common(node), graph, target)
    assert cut is not None
    estimates = {1: whole}
    for parts in cut.counts:
        # What it moves alone may take too long: most need no estimate of their products.
        if _least_cycles(node, graph, parts, target) < min(estimates.values()):
            estimates[parts] = _cycles(node, graph, parts, target)
    return estimates


def _best(estimates: Mapping[int, float], target: Target) -> int:
    """Returns the number of parts that is estimated to be worthwhile."""
    best, whole = min(estimates, key=estimates.__getitem__), estimates[1]
    after = estimates[best]
    return best if whole >= MARGIN * after and whole - after >= LEAST_SAVED * target.launch_cycles else 1


def _may_be_cut(node: Node, graph: Graph, target: Target) -> bool:
    """Returns true if the sums of a node can be cut into parts, and are so long and few that it could be worthwhile."""
    if PARTS.get(node.op) is None or not node.output.size:
        return False
    if node.op.role is not Role.WGRAD and node.attributes.get("groups", 1) > 1:
        return False
    common = _common(node)
    if common.is_float and common.itemsize == 1:  # tensor cores round sums of fp8: parts would hide that from `check`
        return False
    if node.op.role is not Role.MATMUL and direct_convolution.suits(node, graph) is None:
        return False
    if common.is_float != node.output.dtype.is_float or (common.is_int and node.output.dtype.itemsize < 4):
        return False
    return _cut(node, common, graph, target) is not None and not _is_of_many(node, graph)


def _cycles(node: Node, graph: Graph, parts: int, target: Target) -> float:
    """Estimates the cycles of a contraction in parts, with the kernel that adds up the parts.

    The cost model of its kernel decides, but it takes no less than what it reads and writes does.
    """
    own = alone(graph, node, {})
    if parts > 1:
        own.outputs = [part_sums(own, node, PARTS[node.op], tuple(own.inputs), node.output, {"parts": parts})]
        remove_dead(own)
    return _total(node, own.outputs[0].nbytes, parts, cycles(own, Options(target=target)), target)


def _least_cycles(node: Node, graph: Graph, parts: int, target: Target) -> float:
    """Returns the cycles that a contraction in parts takes at least."""
    return _total(node, parts * node.output.size * _sum_dtype(node, graph).itemsize, parts, 0, target)


def _total(node: Node, made: int, parts: int, products: float, target: Target) -> float:
    """Returns the cycles of a contraction that makes so many bytes in parts, if its products take so many cycles."""
    moved = sum(t.nbytes for t in dict.fromkeys(node.inputs)) + made
    rate = STREAMED * target.bytes_per_cycle
    total = START * target.launch_cycles + max(products, moved / rate)
    return total if parts == 1 else total + target.launch_cycles + (made + node.output.nbytes) / rate


def _cut(node: Node, common: DType, graph: Graph, target: Target) -> _Cut | None:
    """Returns the dimension that can be cut; None if there is none, or it cannot be worthwhile."""
    first, second = node.inputs
    shape = node.output.shape
    stage = STAGE if _tensor_cores(node, common, graph) else 1
    if node.op.role is Role.MATMUL:
        rows = prod(shape[:-1]) if second.rank == 2 else shape[-2]
        cols, cut = shape[-1], _Cut(first.shape[-1], 1, aligned(stage, first.shape[-1]), not varies(first.shape[-1]))
    elif node.op.role is Role.WGRAD:
        cut = _Cut(first.shape[0], prod(second.shape[2:]), 1)  # the forms say which parts they take
        rows, cols = prod(shape[1:]), shape[0] // node.attributes["groups"]
    else:  # parts have whole panels of channels, or of filters backward to the image
        unit = aligned(stage, first.shape[1])
        rows, cols = shape[0] * prod(shape[2:]), shape[1]
        cut = _Cut(first.shape[1] // unit, prod(second.shape[2:]) * unit, unit)
    tiles = prod(shape) // (rows * cols) * -(-rows // SIDE) * -(-cols // SIDE)
    return cut if cut.size * cut.each > SHORT and tiles <= ROUNDS * target.sms else None


def _tensor_cores(node: Node, common: DType, graph: Graph) -> int:
    """Returns the bytes of an element if tensor cores multiply them, else 0."""
    if graph.compute_dtype != float32 or common.is_bool:
        return 0
    if common == float32:
        return 4 if node.attributes["compute_dtype"] == "tf32" else 0
    return common.itemsize if common.itemsize <= 2 else 0


def _is_of_many(node: Node, graph: Graph) -> bool:
    """Returns true if products that share operand A meet, and so are one kernel without room for the results."""
    others = [n for n in graph.consumers(node.inputs[0]) if n.op is node.op and n.inputs[0] is node.inputs[0]]
    alike = [n for n in others if n.output.shape == node.output.shape]
    return len(alike) > 1 and meet(graph, alike)


def _common(node: Node) -> DType:
    """Returns the dtype of the operands."""
    return node.op.operand_dtypes(tuple(t.type for t in node.inputs))[0]


def add_in_parts(rewrite: Rewrite, node: Node, op: Op, how: Mapping[str, Any]) -> None:
    """Adds the node that sums up parts, those of an op with further attributes, and the one that adds them up."""
    output = rewrite.result(node.output)
    graph, parts = rewrite.graph, how["parts"]
    partial = part_sums(graph, node, op, rewrite.inputs(node), output, how)
    if not isinstance(parts, Size) and parts <= MOST_TURNED and _turned(partial, output):
        _add_turned(graph, partial, output)
        return
    total = TABLE["reduction"]
    attributes = {**total.attributes, "mode": "add", "axes": (0,), "keepdims": False, "dtype": output.dtype}
    graph.add_node(Node(total, (partial,), attributes, output))


def _turned(partial: Tensor, output: Tensor) -> bool:
    """Tells whether what lies side by side in the parts does not in their sum."""
    shape = output.shape
    return stride_order(shape, partial.strides[1:])[-1] != stride_order(shape, output.strides)[-1]


def _add_turned(graph: Graph, partial: Tensor, output: Tensor) -> None:
    """Adds up parts one by one: a pointwise kernel turns what it writes in shared memory, a reduction does not."""
    rest, every = (0,) * output.rank, []
    for part in range(partial.shape[0]):
        bounds = {"starts": (part, *rest), "stops": (part + 1, *output.shape), "steps": (1,) * partial.rank}
        each = graph.apply(TABLE["slice"], (partial,), bounds)
        every.append(graph.apply(TABLE["reshape"], (each,), {"shape": output.shape}))
    made = reduce(lambda x, y: graph.apply(TABLE["add"], (x, y), {}), every)
    graph.add_node(Node(TABLE["identity"], (made,), {"dtype": output.dtype}, output))


def _sum_dtype(node: Node, graph: Graph) -> DType:
    """Returns the dtype of the sums of parts."""
    common = _common(node)
    if common.is_float:
        return compute_dtype(common, graph.compute_dtype)
    return int64 if 64 in (common.bits, node.output.dtype.bits) else int32


def part_sums(
    graph: Graph, node: Node, op: Op, inputs: tuple[Tensor, ...], output: Tensor, how: Mapping[str, Any]
) -> Tensor:
    """Adds the node that sums up the parts of what a node makes; returns its result."""
    dtype = _sum_dtype(node, graph)
    shape = (how["parts"], *output.shape)
    order = stride_order(output.shape, output.strides)
    if node.op.role is Role.WGRAD:  # filters are the columns of the product: neighbours are written together
        order = (*(d for d in order if d), 0)
    strides = packed_strides(shape, (0, *(d + 1 for d in order)))
    partial = intermediate(graph, node.name, "parts", shape, strides, dtype)
    return graph.add_node(Node(op, inputs, {**node.attributes, **how, "dtype": dtype}, partial)).output

"""Layouts that tensor cores read well: operands of contractions are laid out, or copied, for them where that pays.

Tensor cores are fed in pieces of 16 bytes: an operand should be contiguous along a dimension that they can read along,
and its rows should begin at multiples of 16 bytes, better still of 128.  An intermediate is simply given such a layout.
An operand that comes from outside is copied into one (a transpose or rows further apart: a pointwise kernel, at the
speed of memory) if the cost model of its kernel says that the contraction gains more than the copy costs.  That of a
parameter or a constant costs nothing: it is made once (`passes.packing`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import NamedTuple

from codegen.target import Target
from fusegraph.dtypes import DType, bfloat16, float8_e4m3, float8_e5m2, float16, float32, int8, uint8
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering import direct_convolution
from fusegraph.lowering.attention_prologue import multiplied, prologues_of
from fusegraph.lowering.base import Options, alignment
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.lowering.divided import made_of_less
from fusegraph.lowering.precision import in_parts
from fusegraph.lowering.views import turned_back, view
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.estimates import alone, cycles
from fusegraph.passes.parameters import fixed
from fusegraph.passes.rewrite import Rewrite, Rewritten, copied, replaced
from fusegraph.passes.split_contractions import best_cut
from fusegraph.pattern import only_consumer

#: Bytes at whose multiples rows must begin, and those at which it is best: a row of a tile is one line of memory then.
ROW_BYTES, LINE_BYTES = 16, 128
#: The share of memory's rate that a copy has, and the launches that it takes beside.
COPIED, LAUNCH = 35 / 48, 1.053
#: The shares of the tensor cores' rates that attention of 8-bit floats has: by warps, as float16, and by warpgroups.
WARPS, WARPGROUPS = 0.581, 0.4215
#: What is chosen.
NAME, AS_THEY_LIE, LAID_OUT = "layouts of operands", "as they lie", "laid out"
#: How much a contraction must gain by copies of parameters, which take memory, and how much more than others cost.
GAIN, MARGIN = 1.02, 1.15
#: A copy may be so much larger than the operand, and so much for rows that begin with lines.
MOST_GROWTH, MOST_LINE_GROWTH = 1.5, 1.3


@dataclass(frozen=True)
class _Wish:
    """An operand's strides as tensor cores want them."""

    tensor: Tensor
    strides: tuple[int, ...]

    def us(self, target: Target) -> float:
        """Returns the microseconds that a copy takes."""
        size, itemsize = self.tensor.size, self.tensor.dtype.itemsize
        written = max((n * s for n, s in zip(self.tensor.shape, self.strides)), default=size)
        return LAUNCH * target.launch_us + (size + written) * itemsize / (COPIED * target.memory_rate)


def lay_out(graph: Graph, options: Options) -> Rewritten:
    """Lays the operands of contractions out for tensor cores, where that pays."""
    known, choices = fixed(graph, options), list[Choice]()
    contractions = [node for node in graph.nodes if node.kind is Kind.CONTRACTION]
    wanted = {node: _wishes(node, graph, options, known, choices) for node in contractions}
    attention = [node for node in graph.nodes if node.kind is Kind.ATTENTION]
    wanted |= {node: _keys(node, graph) + _values(node, options.target.planned) for node in attention}
    placed = {t: s for node in attention for t, s in _along_keys(node, graph)}
    placed |= {w.tensor: w.strides for wishes in wanted.values() for w in wishes if _is_ours(w.tensor, graph)}
    copies: dict[_Wish, Tensor] = {}

    def write(rewrite: Rewrite, node: Node, wishes: Sequence[_Wish]) -> None:
        inputs, new = list(rewrite.inputs(node)), rewrite.new
        for wish in wishes:
            if wish.tensor not in placed:
                if wish not in copies:
                    copies[wish] = copied(rewrite.graph, new[wish.tensor], "aligned", wish.strides)
                inputs = [copies[wish] if t is new[wish.tensor] else t for t in inputs]
        rewrite.take_over(node, inputs)

    return replace(replaced(graph, wanted.get, write, placed), choices=tuple(choices))


def _is_ours(tensor: Tensor, graph: Graph) -> bool:
    """Returns true if nobody but kernels of this graph sees how a tensor lies in memory."""
    producer = graph.producer(tensor)
    if producer is None or tensor in graph.outputs:
        return False
    plain = (Kind.POINTWISE, Kind.CONTRACTION, Kind.REDUCTION)
    takers = [n for t in producer.outputs for n in graph.consumers(t)]
    return producer.kind in plain and all(n.kind in (*plain, Kind.ATTENTION) for n in takers)


class _Weighed(NamedTuple):
    """Operands of a contraction that could lie otherwise, and its estimated cycles, those of the copies apart."""

    wishes: list[_Wish]
    as_it_is: float
    laid_out: float
    copies: float


def estimated(node: Node, graph: Graph, options: Options) -> float:
    """Returns the cycles that a contraction is estimated to take, in parts or whole, with copies of operands where
    these pay.
    """
    found = _weighed(node, graph, options, ())
    if found is None:
        return best_cut(node, graph, options.target.planned)[1]
    return min(found.as_it_is, found.laid_out + MARGIN * found.copies)


def _wishes(node: Node, graph: Graph, options: Options, known: Container[Tensor], choices: list[Choice]) -> list[_Wish]:
    """Returns the operands of a contraction that should lie otherwise; none if that is impossible, or does not pay.

    Copies of ``known`` tensors cost nothing.  Adds to ``choices`` what was weighed.
    """
    found = _weighed(node, graph, options, known)
    if found is None:
        return []
    wishes, as_it_is, laid_out, copies = found
    gain = GAIN if any(w.tensor in known for w in wishes) else 1.0
    preferred = LAID_OUT if as_it_is > gain * laid_out + MARGIN * copies else AS_THEY_LIE
    alike = f"{node.op.name} {[(t.type, t.strides, t in known) for t in node.inputs]}"
    choice = weigh(
        NAME, node.name, {AS_THEY_LIE: as_it_is, LAID_OUT: laid_out + copies}, preferred, options.settled, alike
    )
    choices.append(choice)
    return wishes if choice.taken == LAID_OUT else []


def _weighed(node: Node, graph: Graph, options: Options, known: Container[Tensor]) -> _Weighed | None:
    """Returns what could lie otherwise, and the estimates; None if that is nothing, or impossible."""
    if "parts" in node.attributes or node.op.role is Role.SPARSE_MATMUL:
        return None
    dtypes = node.op.operand_dtypes(tuple(t.type for t in node.inputs))
    if any(t.dtype != d for t, d in zip(node.inputs, dtypes)) or not _on_tensor_cores(node, dtypes[0], graph, options):
        return None
    wishes, least = [], ROW_BYTES
    for number, tensor in enumerate(node.inputs):
        if node.op.role is Role.MATMUL and made_of_less(graph, tensor, node):
            continue  # it is computed, and lies nowhere
        allowed, begins = _contiguous_dims(node, number), alignment(graph, tensor, options)
        if begins % ROW_BYTES == 0 and _is_aligned(tensor, allowed):
            continue
        least = min(least, gcd(begins, ROW_BYTES))
        strides = _aligned_strides(tensor, allowed)
        if strides is None:
            return None
        wishes.append(_Wish(tensor, strides))
    if not wishes:
        return None
    target = options.target.planned
    outside = {w.tensor: w.us(target) for w in wishes if not _is_ours(w.tensor, graph) and w.tensor not in known}
    as_it_is = _fastest(node, graph, replace(options, alignment=least))
    laid = alone(graph, node, {w.tensor: (w.tensor.shape, w.strides) for w in wishes})
    laid_out = _fastest(laid.nodes[0], laid, Options(target=target))
    return _Weighed(wishes, as_it_is, laid_out, target.clock * sum(outside.values()))


def _fastest(node: Node, graph: Graph, options: Options) -> float:
    """Returns the cycles that a contraction is estimated to take, whole or in parts."""
    whole = cycles(alone(graph, node, {}), options)
    return min(whole, best_cut(node, graph, options.target.planned)[1]) if options.alignment >= ROW_BYTES else whole


def _keys(node: Node, graph: Graph) -> list[_Wish]:
    """Returns the keys of an attention if they are computed here, and their elements should be neighbours in memory."""
    k = multiplied(node)[1]
    if node.attributes["paged"] or prologues_of(node)[1] is not None or not _is_ours(k, graph):
        return []
    strides = None if _is_aligned(k, (k.rank - 2,)) else _aligned_strides(k, (k.rank - 2,))
    return [] if strides is None else [_Wish(k, strides)]


def _along_keys(node: Node, graph: Graph) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yields what an attention reads for its scores by views that are not along the keys, and strides that are.

    That is only for what pointwise nodes, or gathers, make for attention alone.
    """
    for tensor in node.inputs[3:]:
        source, moves = tensor, list[Node]()
        while (maker := graph.producer(source)) is not None and maker.kind is Kind.MOVEMENT and len(maker.inputs) == 1:
            moves.append(maker)
            source = maker.inputs[0]
            if only_consumer(graph, source) is None:
                break
        made = graph.producer(source)
        if made is None or not (made.kind is Kind.POINTWISE or made.op.role is Role.GATHER):
            continue
        seen: tuple[int, ...] | None = source.strides
        for move in reversed(moves):
            found = None if seen is None else view(move, seen)
            seen = None if found is None else found[0]
        if not seen or tensor.shape[-1] == 1 or seen[-1] in (0, 1) or only_consumer(graph, source) is None:
            continue
        strides: tuple[int, ...] | None = packed_strides(tensor.shape)
        for move in moves:
            if strides is not None and move.op.role is Role.BROADCAST:
                strides = packed_strides(move.inputs[0].shape) if strides == packed_strides(move.output.shape) else None
            elif strides is not None:
                strides = turned_back(move, strides)
        if strides is not None:
            yield source, strides


def _values(node: Node, target: Target) -> list[_Wish]:
    """Returns the values of an attention if they should be contiguous along the keys.

    That is for 8-bit values, which warpgroups read no other way.
    """
    if not target.wgmma:
        return []
    q, k, v = multiplied(node)
    q_prologue, *others = prologues_of(node)
    if any(others):
        return []  # warpgroups do not compute them
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_float and q.dtype.itemsize == 1) or node.attributes["paged"]:
        return []
    if q_prologue is None and not _is_aligned(q, (q.rank - 1,)):
        return []
    if not _is_aligned(k, (k.rank - 2,)) or _is_aligned(v, (v.rank - 2,)):
        return []
    strides = _aligned_strides(v, (v.rank - 2,))
    if strides is None:
        return []
    wish = _Wish(v, strides)
    products = 2 * prod(node.attributes["score"].anchor.output.shape) * (q.shape[-1] + v.shape[-1])
    each = 2 * target.sms * target.clock  # operations of a multiply-add a cycle, in a microsecond
    gained = products / (each * WARPS * target.mma) - products / (each * 2 * WARPGROUPS * target.wgmma)
    return [wish] if gained > MARGIN * wish.us(target) else []


def _on_tensor_cores(node: Node, dtype: DType, graph: Graph, options: Options) -> bool:
    """Returns true if tensor cores take a contraction of operands of a dtype, and nothing better does."""
    taken = node.attributes["compute_dtype"] == "tf32" or (options.target.planned.wgmma and in_parts(node, options))
    exact = dtype == float32 and not taken
    if exact or dtype not in (float32, float16, bfloat16, float8_e4m3, float8_e5m2, int8, uint8):
        return False
    if not node.output.size:
        return False
    return node.op.role is Role.MATMUL or direct_convolution.suits(node, graph) is not None


def _contiguous_dims(node: Node, number: int) -> tuple[int, ...]:
    """Returns the dimensions of an operand of which one should be contiguous, the best one first.

    Along the reduction for every dtype; elements that are multiplied as 16 bits may also lie across it.
    """
    rank, dtype = node.inputs[number].rank, node.inputs[0].dtype
    across = dtype.itemsize == 2 or (dtype == float32 and node.attributes["compute_dtype"] is None)
    if node.op.role is Role.MATMUL:
        along, other = (rank - 1, rank - 2) if number == 0 else (rank - 2, rank - 1)
        return (along, other) if across else (along,)
    # Windows want the channels of images and filters contiguous.  Tiles that lie across the reduction have a line of it
    # for each tap: fewer filters leave a part of it empty.
    if node.op.role is Role.DGRAD and number == 1:
        filters = node.inputs[1].shape[0] // node.attributes["groups"]
        return (1,) if across and filters * dtype.itemsize % LINE_BYTES == 0 else (0,)
    return (1,)


def _is_aligned(tensor: Tensor, allowed: tuple[int, ...]) -> bool:
    sizes = [(d, n, s) for d, (n, s) in enumerate(zip(tensor.shape, tensor.strides)) if n > 1]
    unit = [d for d, _, s in sizes if s == 1]
    inside = all(s and s * tensor.dtype.itemsize % ROW_BYTES == 0 for d, _, s in sizes if d not in unit)
    return inside and (not unit or unit[0] in allowed)


def _aligned_strides(tensor: Tensor, allowed: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns aligned strides that keep the order of dimensions as far as possible; None if they are not worth it."""
    shape, strides, itemsize = tensor.shape, tensor.strides, tensor.dtype.itemsize
    if any(s == 0 for n, s in zip(shape, strides) if n > 1):
        return None  # repeated: a copy would be larger than what is read
    last = next((d for d in allowed if strides[d] == 1 and shape[d] > 1), allowed[0])
    unit, line = ROW_BYTES // itemsize, LINE_BYTES // itemsize
    width, lines = -(-shape[last] // unit) * unit, -(-shape[last] // line) * line
    if width > MOST_GROWTH * shape[last]:
        return None
    if lines <= MOST_LINE_GROWTH * shape[last]:
        width = lines
    order = sorted((d for d in range(len(shape)) if d != last), key=lambda d: -strides[d])
    found, step = [1] * len(shape), width
    for d in reversed(order):
        found[d] = step
        step *= max(shape[d], 1)
    return tuple(found)

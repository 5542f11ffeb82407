"""Masks that are data, in front of few queries: the first and the last key that any query meets are looked for ahead.

A decoder reads a row of a table of masks, say.  Looking at all of the mask once, for all layers that share it, takes
far less time than reading keys and values that it rules out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusegraph.dtypes import DType, bool_, int32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import broadcast, packed_strides
from fusegraph.lowering.attention_prologue import multiplied
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.scores import CAST, masked_by, rebuilt
from fusegraph.ops import TABLE
from fusegraph.ops.attention_nodes import ATTENTION, Score
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, replaced

#: Queries that meet few keys anyway; of more, each has a mask of its own as a rule.
MOST_QUERIES = 16
#: Fewer keys are read as fast as a kernel is launched.
LEAST_KEYS = 512
#: A mask has at most this share of the bytes of keys and values.
SHARE = 1 / 8


@dataclass(frozen=True)
class _Mask:
    """A selection among the scores, its mask, and the value that this has where scores are kept."""

    choice: Node
    mask: Tensor
    kept: bool


def bound_keys(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Bounds the keys of attention with few queries by the first and the last that a mask of data leaves."""
    found: dict[tuple[Tensor, bool], tuple[Tensor, Tensor]] = {}

    def write(rewrite: Rewrite, node: Node, mask: _Mask) -> None:
        score: Score = node.attributes["score"]
        inputs, rest = rewrite.inputs(node), len(score.operands) - 2
        end = 3 + 2 * node.attributes["paged"] + node.attributes["sink"] + rest
        tensor = inputs[end - rest + score.operands.index(mask.mask) - 2]
        if (tensor, mask.kept) not in found:
            found[tensor, mask.kept] = _extent(rewrite.graph, tensor, mask.kept)
        extent = found[tensor, mask.kept]
        attributes = {**node.attributes, "score": _bounded(score, mask, extent[0])}
        results = map(rewrite.result, node.outputs)
        rewrite.graph.add_node(Node(ATTENTION, (*inputs[:end], *extent, *inputs[end:]), attributes, *results))

    return replaced(graph, _mask_of_data, write)


def _mask_of_data(node: Node) -> _Mask | None:
    """Returns the mask of an attention's scores that is worth looking at; None without one."""
    if node.kind is not Kind.ATTENTION:
        return None
    score: Score = node.attributes["score"]
    graph, (*_, rows, keys) = score.graph, score.anchor.output.shape
    if rows > MOST_QUERIES or keys < LEAST_KEYS:
        return None
    tensor = graph.outputs[0]
    while (maker := graph.producer(tensor)) is not None:
        if (masked := masked_by(graph, maker)) is not None:
            tensor, mask, kept = masked
            if mask in score.operands[2:] and mask.dtype.is_bool and (1, 1, *mask.shape)[-2:] == (1, keys):
                read = sum(t.nbytes for t in multiplied(node)[1:])
                return _Mask(maker, mask, kept) if mask.nbytes <= SHARE * read else None
        elif CAST.fits(graph, maker):
            tensor = maker.inputs[0]
        else:
            return None
    return None


def _extent(graph: Graph, mask: Tensor, kept: bool) -> tuple[Tensor, Tensor]:
    """Returns the first key that a mask leaves, and the one behind the last, along its last axis."""

    def write(op: str, *operands: Any, **attributes: Any) -> Tensor:
        return graph.apply(TABLE[op], operands, attributes)

    met = mask if kept else write("logical_not", mask)
    key, keys = write("gen_index", mask, axis=mask.rank - 1), mask.shape[-1]
    before, behind = (write("binary_select", x, 0, met) for x in (write("sub", keys, key), write("add", key, 1)))
    most, last = (write("reduction", x, mode="max", axes=-1) for x in (before, behind))
    return write("sub", keys, most), last


def _bounded(score: Score, mask: _Mask, like: Tensor) -> Score:
    """Returns scores in which a mask rules out also the keys in front of the first and behind the last."""
    graph, shape = score.graph, score.anchor.output.shape
    nodes: list[Node] = []

    def tensor(name: str, shape: tuple[int, ...], dtype: DType) -> Tensor:
        new: Tensor = graph._add_tensor(graph._unique(name), shape, packed_strides(shape), dtype)
        return new

    def made(name: str, *operands: Tensor, **attributes: Any) -> Tensor:
        entry = TABLE[name]
        dtype = int32 if entry.role is Role.INDEX else bool_
        result = tensor(name, broadcast([t.shape for t in operands]), dtype)
        nodes.append(Node(entry, operands, {**entry.attributes, **attributes}, result))
        return result

    first, last = (tensor(name, like.shape, int32) for name in ("first key", "last key"))
    key = made("gen_index", score.anchor.output, axis=len(shape) - 1)
    within = made("logical_and", made("cmp_ge", key, first), made("cmp_lt", key, last))
    both = made("logical_and", mask.mask, within)
    if not mask.kept:
        both = made("logical_or", mask.mask, made("logical_not", within))
    choice = mask.choice
    out = tensor(choice.output.name, choice.output.shape, choice.output.dtype)
    nodes.append(Node(choice.op, (*choice.inputs[:2], both), choice.attributes, out))
    new = rebuilt(graph, {choice.output: out}, {choice: tuple(nodes)})
    new.inputs = [*graph.inputs, first, last]
    return Score(new, (*score.operands, first, last), score.notes)

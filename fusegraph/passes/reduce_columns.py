"""Reductions of columns beside those of rows: split so that the kernel of the rows reduces parts of the columns, too.

What a norm's gradient and those of its weights are made of is then read once.  The parts, a row of numbers for each
block of the kernel, are reduced by another kernel.  Reductions along some of the rows' axes and some others are split
likewise: what is within a row (the channels of a group) is reduced with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from codegen.spec import RowsSpec
from codegen.target import Target
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import MADE, Choice, whether
from fusegraph.lowering.rows import has_segments, walk_chunk
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewritten
from fusegraph.passes.split_reductions import Split, candidates, chunk, of_whole, split_for, unjoined
from fusegraph.pattern import followers, made_of

#: Shape of what is reduced, axes of the rows, axes of the columns.
_Kind = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
#: Axes of the rows, what they are made of.
_Alike = tuple[tuple[int, ...], frozenset[Tensor]]
#: The tensors that a tensor is made of.
_Leaves = Callable[[Tensor], frozenset[Tensor]]
#: The name of the pass.
NAME = "reductions of columns"


def reduce_columns(graph: Graph, options: Options) -> Rewritten:
    """Splits reductions of columns where rows of the same elements are reduced as well.

    Splits of one kind are declined together unless the kernels of rows make the parts of all of them.
    """
    kinds: dict[_Kind, dict[Node, Split]] = {}
    choices: list[Choice] = []
    rows: dict[tuple[int, ...], dict[_Alike, list[Node]]] = {}
    leaves = cache(partial(_leaves, graph))
    whole = [n for n in graph.nodes if n.op.role is Role.REDUCE and n.attributes["axes"]]
    for node in (n for n in candidates(graph, NAME, options) if n.attributes["axes"]):
        x, axes = unjoined(graph, node)
        if x.shape not in rows:
            alike = [n for n in whole if n.inputs[0].shape == x.shape]
            rows[x.shape] = _rows(graph, alike, leaves, options.target.planned)
        for (along, read), others in rows[x.shape].items():
            found = _split(node, x, axes, along, read, leaves, options.target.planned)
            if found is not None and not {*others} <= {node, *followers(graph, node)}:
                choices.append(whether(NAME, node.name, options.settled, f"{x.shape} {along} {axes}"))
                if choices[-1].taken == MADE:
                    kinds.setdefault((x.shape, along, axes), {})[node] = found
                break

    def takes(spec: Any) -> bool:
        return isinstance(spec, RowsSpec) and (spec.walk is not None or spec.segments is not None)

    reason = "not all of those like it are reduced by the kernel of the rows"
    return replace(split_for(graph, [*kinds.values()], takes, reason), choices=tuple(choices))


def _rows(graph: Graph, nodes: Sequence[Node], leaves: _Leaves, target: Target) -> dict[_Alike, list[Node]]:
    """Returns the reductions that have a block for each result, by their axes and the tensors that they are made of."""
    found: dict[_Alike, list[Node]] = {}
    for node in nodes:
        if chunk(graph, node, target) is None:
            found.setdefault((node.attributes["axes"], leaves(node.inputs[0])), []).append(node)
    return found


def _split(
    node: Node,
    x: Tensor,
    axes: tuple[int, ...],
    along: tuple[int, ...],
    read: frozenset[Tensor],
    leaves: _Leaves,
    target: Target,
) -> Split | None:
    """Returns how to split a reduction, if a kernel of rows ``along`` axes had better make the parts; None if not.

    ``x`` and ``axes`` are those of `unjoined`; ``read`` are the tensors that the rows are made of.
    """
    if set(axes) >= set(along) or not leaves(x) & read:
        return None
    inner = tuple(d for d in axes if d in along)
    joined = None if x is node.inputs[0] else x
    if not inner:
        rows = walk_chunk(read, x.shape, along, axes, target)
        return None if rows is None else Split(axes, rows, joined)
    if (
        joined is not None
        or inner == axes
        or not of_whole(node)
        or not has_segments(read, x.shape, along, inner, target)
    ):
        return None
    return Split(inner, None)


def _leaves(graph: Graph, x: Tensor) -> frozenset[Tensor]:
    """Returns the tensors in memory, as large as what is reduced, from which it follows element by element."""

    def as_large(node: Node) -> list[Tensor] | None:
        return [t for t in node.inputs if t.size == x.size] if node.kind is Kind.POINTWISE else None

    nodes = made_of(graph, [x], as_large)
    return frozenset({x}.union(*nodes.values()).difference(*(node.outputs for node in nodes)))

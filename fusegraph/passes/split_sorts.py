"""Splitting sorts: rows that are too long for one block of threads are sorted in runs, which are merged two at a time.

If only a few largest or smallest elements are wanted, those of each run are taken, and again of what is left, until
that is one run.  These steps hand on positions in the row (`ops.sort_runs`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fusegraph.dtypes import int32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.sort import longest_row
from fusegraph.ops.base import Kind, Op, TensorType
from fusegraph.ops.sort import Order, order_of
from fusegraph.ops.sort_runs import MERGED_RUNS, SORTED_RUNS
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced

#: One step: the op, its operands and attributes.
_Step = tuple[Op, tuple[Tensor, ...], dict[str, Any]]

#: The first k of a row are selected from runs if these are at least so many times as long.
SELECTION = 4


def split_sorts(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Writes sorts of rows that are too long for a block out as sorts of runs, which are merged."""
    return replaced(graph, partial(_is_long, graph), _Writer().write)


def _is_long(graph: Graph, node: Node) -> bool:
    if node.kind is not Kind.SORT or not node.output.size:
        return False
    x = node.inputs[0]
    length: int = x.shape[node.attributes["axis"]]
    return length > longest_row(x.dtype, graph)


class _Writer:
    """Adds the steps of sorts; those of one tensor in the same order share them."""

    def __init__(self) -> None:
        self._steps: dict[tuple[Tensor, Order], _Step] = {}

    def write(self, rewrite: Rewrite, node: Node, _: bool) -> None:
        """Adds the result of a sort: what its last step makes, positions or the elements there."""
        (x,), result = rewrite.inputs(node), rewrite.result(node.output)
        how = order_of(x.type, node.attributes)
        if (x, how) not in self._steps:
            self._steps[x, how] = _before_the_last(rewrite.graph, node.name, x, how)
        op, inputs, attributes = self._steps[x, how]
        dtype = node.attributes.get("dtype")
        rewrite.graph.add_node(Node(op, inputs, {**attributes, "dtype": dtype}, result))


def _before_the_last(graph: Graph, name: str, x: Tensor, how: Order) -> _Step:
    """Adds all steps but the last, and returns that."""
    run = longest_row(x.dtype, graph)
    held = min(run, how.keep)  # elements of a run that are in order
    few = held * SELECTION <= run
    step = _step(SORTED_RUNS, (x,), how, run, held)
    while _length(step) > held:  # of several runs
        order = named(graph.apply(*step), name, "order")
        if not few:
            run, held = 2 * held, min(2 * held, how.keep)
        step = _step(SORTED_RUNS if few else MERGED_RUNS, (x, order), how, run, held)
    return step


def _step(op: Op, inputs: tuple[Tensor, ...], how: Order, run: int, keep: int) -> _Step:
    attributes = {"axis": how.axis, "descending": how.descending, "run": run, "keep": keep, "dtype": int32}
    return op, inputs, attributes


def _length(step: _Step) -> int:
    """Returns the elements of a row that a step leaves."""
    op, inputs, attributes = step
    found = op.infer(tuple(t.type for t in inputs), attributes)
    assert isinstance(found, TensorType)
    return found.shape[attributes["axis"]]

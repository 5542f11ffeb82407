"""The prologues of an attention's queries, keys or values: a graph of pointwise and movement nodes -> a program.

A tile's rows are then computed from what these nodes read, on the way to shared memory (`codegen.attention.computed`).
"""

from __future__ import annotations

from dataclasses import replace

from codegen.attention.spec import ComputedRows
from codegen.declined import Declined
from codegen.iteration import restrided
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.affine import Split
from fusegraph.lowering.base import GroupView, Options
from fusegraph.lowering.base import alignment as aligned
from fusegraph.lowering.moved import CoordinateBuilder

#: The most tensors that rows are computed of, and the most values that are computed for every element.
MOST_OPERANDS, MOST_INSTRUCTIONS = 8, 64


class PrologueGraph:
    """Queries, keys (turned) or values as a graph of their own computes them.

    operands  the graph's inputs that stand for the last inputs of the attention node, in order.
    name      of the tensor that is not in memory.
    notes     the nodes, as lines of text.
    """

    def __init__(self, graph: Graph, operands: tuple[Tensor, ...], name: str, notes: tuple[str, ...]) -> None:
        self.graph, self.operands, self.name, self.notes = graph, operands, name, notes

    @property
    def result(self) -> Tensor:
        """The operand of the attention."""
        return self.graph.outputs[0]

    def __repr__(self) -> str:
        return f"{len(self.graph.nodes)} nodes"


PrologueGraphs = tuple[PrologueGraph | None, PrologueGraph | None, PrologueGraph | None]


def prologues_of(node: Node) -> PrologueGraphs:
    """Returns the prologues of the queries, keys and values of an attention node."""
    found: PrologueGraphs = node.attributes.get("prologues", (None, None, None))
    return found


def multiplied(node: Node) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys (turned, or the container) and values of an attention node, whether in memory or not."""
    q, k, v = (t if f is None else f.result for t, f in zip(node.inputs, prologues_of(node)))
    return q, k, v


def behind(node: Node, number: int) -> tuple[Tensor, ...]:
    """Returns the inputs of an attention node that its queries (0), keys (1) or values (2) are computed of."""
    counts = [0 if f is None else len(f.operands) for f in prologues_of(node)]
    start = len(node.inputs) - sum(counts[number:])
    return node.inputs[start : start + counts[number]]


def computed_rows(
    prologue: PrologueGraph, reads: tuple[Tensor, ...], turned: bool, rank: int, graph: Graph, options: Options
) -> tuple[ComputedRows, tuple[Tensor, ...]]:
    """Returns the program of rows, and the tensors that it reads.

    reads   the tensors of the graph that the prologue's operands stand for.
    turned  whether rows are the last dimension, as those of keys are.
    rank    the number of the attention's batch dimensions.

    Raises Declined if the operand cannot be computed row by row.
    """
    result = prologue.result
    element = result.rank - (2 if turned else 1)
    parts = [[size] for size in result.shape]
    while True:
        builder = _Builder(prologue, dict(zip(prologue.operands, reads)), graph, options, parts)
        try:
            program, found, _ = builder.build()
            break
        except Split as split:
            if split.place(parts)[0] != element:
                raise Declined(f"rows of {prologue.name!r} are counted otherwise where they come from") from None
            split.split(parts)
    if len(found) > MOST_OPERANDS or len(program.instructions) > MOST_INSTRUCTIONS:
        raise Declined(
            f"{prologue.name!r} would be computed of {len(found)} tensors in {len(program.instructions)} steps: the "
            f"limits are {MOST_OPERANDS} and {MOST_INSTRUCTIONS}"
        )
    batch, count = result.rank - 2, len(parts[element])

    def moved(strides: tuple[int, ...]) -> tuple[int, ...]:
        own = (0,) * (rank - batch) + strides[:batch]
        rows, elements = strides[batch], strides[batch + 1 :]
        if turned:
            elements, rows = strides[batch : batch + count], strides[-1]
        return (*own, rows, *elements)

    program = replace(restrided(program, [moved(s) for s in program.strides]), notes=())
    return ComputedRows(program, tuple(parts[element])), found


class _Builder(CoordinateBuilder):
    """Reads the tensors of the graph that a prologue's operands stand for."""

    def __init__(
        self, prologue: PrologueGraph, own: dict[Tensor, Tensor], graph: Graph, options: Options, parts: list[list[int]]
    ) -> None:
        super().__init__(_Whole(prologue, graph), options, parts)
        self._given = own


class _Whole(GroupView):
    """All nodes of a prologue, which read tensors of another graph."""

    def __init__(self, prologue: PrologueGraph, around: Graph) -> None:
        nodes = prologue.graph.nodes
        super().__init__(prologue.graph, nodes, {n: k for k, n in enumerate(nodes)})
        self._around = around

    def alignment(self, tensor: Tensor, options: Options) -> int:
        return aligned(self._around, tensor, options)

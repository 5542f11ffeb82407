"""Integers and bools that are known before a graph runs (`passes.ranges`), written as what they are.

Comparisons that always hold become constants, masks of positions comparisons of positions, however a program came by
them, and gathering at positions in order becomes a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from codegen.sizes import Size
from fusegraph.dtypes import DType, int32, int64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import broadcast
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.known import Known, Linear, limits
from fusegraph.passes.ranges import ranges, within
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, replaced


def place(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Writes integers and masks that follow from positions alone as constants or comparisons of positions."""
    known = ranges(graph)
    inline = _inline(graph, known)
    return replaced(
        graph,
        lambda node: len(node.outputs) == 1 and _wanting(node, known, inline),
        lambda rewrite, node, _: _Writer(rewrite, node, known).write(),
    )


def _inline(graph: Graph, known: Mapping[Tensor, Known]) -> set[Tensor]:
    """Returns the tensors that pointwise nodes make of positions and numbers alone, which any kernel can compute."""
    found = {t for t in graph.tensors.values() if t.size == 1 and (t.value is not None or _varies(known.get(t)))}
    for node in graph.nodes:
        if node.kind is Kind.POINTWISE and (node.op.role is Role.INDEX or found.issuperset(node.inputs)):
            found.update(node.outputs)
    return found


def _wanting(node: Node, known: Mapping[Tensor, Known], inline: set[Tensor]) -> bool:
    """Tells whether a node can be written more simply."""
    found = known.get(node.output)
    if _varies(found):
        return False  # it is one of the numbers that `_Writer` writes, or follows from those
    if found is not None and found.value is not None:
        return not _is_number(node)
    if _chosen(node, known) is not None or _neutral(node, known) is not None:
        return True
    if _follows(found):
        return node.output not in inline
    if node.op.role is Role.GATHER and _taken(node, known) is not None:
        return True
    return bool(_numbers(node, known))


def _varies(found: Known | None) -> bool:
    """Tells whether all elements are one number that varies with sizes."""
    return found is not None and isinstance(found.value, Size)


def _follows(found: Known | None) -> bool:
    """Tells whether an integer or bool can be written as a sum, or a comparison of sums, of positions."""
    if found is None or found.linear is not None:
        return found is not None
    return found.conditions is not None and all(abs(step) <= 1 for c in found.conditions for step in c.steps)


def _is_number(node: Node) -> bool:
    """Tells whether a node repeats one number."""
    x = node.inputs[0]
    return node.op.role is Role.BROADCAST and x.value is not None and x.size == 1


def _chosen(node: Node, known: Mapping[Tensor, Known]) -> Tensor | None:
    """Returns what a selection selects everywhere; None if that is not known."""
    choice = known.get(node.inputs[2]) if node.op.role is Role.SELECT else None
    return None if choice is None or choice.truth is None else node.inputs[0 if choice.truth else 1]


def _neutral(node: Node, known: Mapping[Tensor, Known]) -> Tensor | None:
    """Returns the operand of a logical node that alone decides; None if both do."""
    neutral = {Role.AND: True, Role.OR: False}.get(node.op.role) if node.op.role is not None else None
    if neutral is None:
        return None
    first, second = node.inputs
    pairs = ((first, second), (second, first))
    return next((t for other, t in pairs if other in known and known[other].truth is neutral and t.dtype.is_bool), None)


def _numbers(node: Node, known: Mapping[Tensor, Known]) -> dict[Tensor, Any]:
    """Returns the operands of a pointwise node that are one number, if it has its shape without them."""
    if node.kind is not Kind.POINTWISE or node.op.shapes:
        return {}
    found = {t: known[t].value for t in node.inputs if t in known and t.shape}
    numbers = {t: value for t, value in found.items() if value is not None and not isinstance(value, Size)}
    shapes = [() if t in numbers else t.shape for t in node.inputs]
    return numbers if numbers and broadcast(shapes) == node.output.shape else {}


def _taken(node: Node, known: Mapping[Tensor, Known]) -> tuple[int, int, int, int] | None:
    """Returns what a gather at positions in order takes: first, count, step, and the index's dimension that counts."""
    x, index = node.inputs
    found, size = known.get(index), x.shape[node.attributes["axis"]]
    if found is None or found.linear is None or not within(found, index.shape, size) or not node.output.size:
        return None
    along = [d for d, step in enumerate(found.linear.steps) if step]
    if len(along) > 1 or any(found.linear.steps[d] < 0 for d in along):
        return None
    dim = along[0] if along else -1
    return found.linear.start, index.shape[dim] if along else 1, found.linear.steps[dim] if along else 1, dim


class _Writer:
    """Writes what replaces a node."""

    def __init__(self, rewrite: Rewrite, node: Node, known: Mapping[Tensor, Known]) -> None:
        self.rewrite, self.node, self.known = rewrite, node, known

    def write(self) -> None:
        node, shape = self.node, self.node.output.shape
        found = self.known.get(node.output)
        if found is not None and found.value is not None:
            return self._last("broadcast", self._number(found.value, node.output.dtype), shape=shape)
        if found is not None and _follows(found):
            return self._line(found.linear) if found.linear is not None else self._mask(found.conditions or ())
        chosen = _chosen(node, self.known)
        only = _neutral(node, self.known) if chosen is None else chosen
        if only is not None:
            return self._copied(self.rewrite.new[only])
        taken = _taken(node, self.known) if node.op.role is Role.GATHER else None
        if taken is not None:
            return self._slice(*taken)
        less = {t: self._number(n, t.dtype) for t, n in _numbers(node, self.known).items()}
        self.rewrite.take_over(node, [less.get(t, self.rewrite.new[t]) for t in node.inputs])
        return None

    def _number(self, value: Any, dtype: DType) -> Tensor:
        if isinstance(value, Size):
            return self.rewrite.graph.constant(value, dtype=dtype)
        array = np.array(value, dtype.numpy)
        return intermediate(self.rewrite.graph, self.node.name, "number", (), (), dtype, array)

    def _make(self, op: str, *operands: Tensor, **attributes: Any) -> Tensor:
        return self.rewrite.graph.apply(TABLE[op], operands, attributes)

    def _last(self, op: str, *operands: Tensor, **attributes: Any) -> None:
        """Adds the node that makes the result itself."""
        entry = TABLE[op]
        values = {**entry.attributes, **attributes}
        self.rewrite.graph.add_node(Node(entry, operands, values, self.rewrite.result(self.node.output)))

    def _copied(self, x: Tensor) -> None:
        out = self.node.output
        if x.dtype != out.dtype:
            x = self._make("identity", x, dtype=out.dtype)
        self._last("broadcast", x, shape=out.shape)

    def _sum(self, linear: Linear, dtype: DType) -> Tensor:
        """Returns the sum of positions; a number if there are none."""
        shape = self.node.output.shape
        total: Tensor | None = None
        for axis, step in enumerate(linear.steps):
            if not step:
                continue
            every = self._make("broadcast", self._number(0, int32), shape=shape)
            position = self._make("gen_index", every, axis=axis)
            position = position if dtype == int32 else self._make("identity", position, dtype=dtype)
            position = position if step == 1 else self._make("mul", position, self._number(step, dtype))
            total = position if total is None else self._make("add", total, position)
        if total is None:
            return self._number(linear.start, dtype)
        return self._make("add", total, self._number(linear.start, dtype)) if linear.start else total

    def _wide_enough(self, *lines: Linear) -> DType:
        """Returns a dtype in which no part of these sums wraps around."""
        shape = self.node.output.shape
        most = max(abs(x.start) + sum(abs(s) * n for s, n in zip(x.steps, shape)) for x in lines)
        return int32 if most <= limits(int32)[1] else int64

    def _line(self, linear: Linear) -> None:
        dtype = self.node.output.dtype
        wide = dtype if dtype in (int32, int64) else self._wide_enough(linear)
        self._last("identity", self._sum(linear, wide), dtype=dtype)

    def _mask(self, conditions: Sequence[Linear]) -> None:
        """Writes each condition as a comparison of two sums whose terms are positive."""
        made: list[Tensor] = []
        dtype = self._wide_enough(*conditions)
        for line in conditions:
            sides = [
                Linear(max(0, sign * line.start), tuple(max(0, sign * step) for step in line.steps)) for sign in (1, -1)
            ]
            made.append(self._make("cmp_ge", *(self._sum(side, dtype) for side in sides)))
        while len(made) > 1:
            made = [self._make("logical_and", *made[:2]), *made[2:]]
        self._copied(made[0])

    def _slice(self, first: int, count: int, step: int, dim: int) -> None:
        """Writes the elements that a gather takes in order as a slice, repeated along the index's other dimensions."""
        x, axis, index = self.rewrite.new[self.node.inputs[0]], self.node.attributes["axis"], self.node.inputs[1]
        starts, stops, steps = [0] * x.rank, list(x.shape), [1] * x.rank
        starts[axis], stops[axis], steps[axis] = first, first + (count - 1) * step + 1, step
        part = self._make("slice", x, starts=tuple(starts), stops=tuple(stops), steps=tuple(steps))
        own = tuple(count if d == dim else 1 for d in range(index.rank))
        part = self._make("reshape", part, shape=(*x.shape[:axis], *own, *x.shape[axis + 1 :]))
        self._last("broadcast", part, shape=self.node.output.shape)

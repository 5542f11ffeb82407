"""``assign``: a tensor with some of its elements replaced, in the memory of that tensor.

The op is a function like any other: its result is a tensor of its own, which whoever needs the new elements takes.
That its result lies in the memory of its first operand is known to what lays tensors into memory, to the order of
kernels, and to nothing else.  It is not in the op table: users write `Graph.assign`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import int32
from fusegraph.errors import DTypeError, ShapeError
from fusegraph.ops.base import REQUIRED, Array, Attributes, Kind, Op, TensorType, Types
from fusegraph.ops.movement import spread_out
from fusegraph.ops.reverse import Reverse


def _infer(types: Types, attributes: Attributes) -> TensorType:
    x, values, *index = types
    if values.dtype != x.dtype:
        raise DTypeError(f"values have the dtype of x, {x.dtype}, got {values.dtype}; cast them")
    if index and not index[0].dtype.is_int:
        raise DTypeError(f"index holds integers, got {index[0].dtype}")
    starts, steps = attributes["starts"], attributes["steps"]
    axes: tuple[int, ...] = attributes["axes"] or ()
    if not len(x.shape) == len(values.shape) == len(starts) == len(steps):
        raise ShapeError(f"values {list(values.shape)} are no region of x {list(x.shape)}: other dimensions")
    for d, (size, count, start, step) in enumerate(zip(x.shape, values.shape, starts, steps)):
        if d in axes:
            fits = index[0].shape == (count,) if d == axes[0] else count == 1
        else:
            fits = not count or (start >= 0 and step > 0 and start + (count - 1) * step < size)
        if not fits:
            raise ShapeError(f"values {list(values.shape)} are no region of x {list(x.shape)}: dimension {d}")
    return x


def _reference(x: Array, values: Array, *index: Array, starts: Any, steps: Any, axes: Any, **_: Any) -> Array:
    y = np.array(x)
    parts = zip(starts, steps, values.shape)
    where: list[Any] = [slice(start, start + count * step, step) for start, step, count in parts]
    if not index:
        y[tuple(where)] = values
        return y
    given: list[Any] = [slice(None)] * x.ndim
    sizes = [x.shape[d] for d in axes]
    for number, position in enumerate(index[0]):  # the last of several for a position stays
        if 0 <= position < prod(sizes):
            for d, place in zip(axes, np.unravel_index(int(position), sizes)):
                where[d], given[d] = place, number if d == axes[0] else 0
            y[tuple(where)] = values[tuple(given)]
    return y


def _gradient(
    at: Reverse, x: Any, values: Any, *index: Any, starts: Sequence[int], steps: Sequence[int], **_: Any
) -> Any:
    """That by the values is the loss where they are; that by x the loss everywhere else."""
    if index:
        return NotImplemented
    g = at.graph

    def by_x() -> Any:
        ones = g.broadcast(g.constant(1, dtype=int32), values.shape)
        return g.binary_select(0.0, at.loss, spread_out(at, ones, x.shape, starts, steps))

    def by_values() -> Any:
        stops = [start + n * step for start, n, step in zip(starts, values.shape, steps)]
        return g.slice(at.loss, starts, stops, steps)

    return by_x, by_values


ASSIGN = Op(
    name="assign",
    kind=Kind.ASSIGN,
    operands=("x", "values", "index"),
    optional=1,
    integers=("index",),
    attributes={"starts": REQUIRED, "steps": REQUIRED, "axes": None, "placed": False},
    infer=_infer,
    reference=_reference,
    gradient=_gradient,
    ulps=0,
    doc="""x, in its memory, with the elements of a region replaced: those from ``starts`` on, every ``steps``-th, as
    many as there are values; along axes those at the positions of an index, if there is one: these are numbered in
    row-major order along all the axes, along the first of which values lie.  Other positions are left out, and the last
    of several values for a position stays.  ``placed`` is for passes: whoever makes the values writes them into x.""",
)

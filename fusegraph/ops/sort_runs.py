"""``sorted_runs`` and ``merged_runs``: the steps that sort rows too long for one block of threads.

A run is a piece of a row whose elements are in order.  Both ops give positions in the row, or the elements themselves:
of every run the first ``keep``, one run behind the other.  The first op sorts pieces of ``run`` elements, of the row or
of the positions that an ``order`` names (each once); the second merges every two neighbouring runs of an ``order``.
They are not in the op table: users write sorts, `passes.split_sorts` writes these.
"""

from __future__ import annotations

import numpy as np

from fusegraph.dtypes import DType, int32
from fusegraph.ops.base import REQUIRED, Array, Attributes, Kind, Op, Role, TensorType, Types
from fusegraph.ops.sort import positions


def left(length: int, run: int, keep: int) -> int:
    """Returns how many elements of a row are left if ``keep`` of each run of ``run`` (the last may be shorter) are."""
    whole, rest = divmod(length, run)
    return whole * min(run, keep) + min(rest, keep)


def entries(types: Types, axis: int) -> int:
    """Counts the elements of a row that are sorted: those of x, or those that an order names."""
    return types[-1].shape[axis]


def _infer(types: Types, attributes: Attributes) -> TensorType:
    x, axis = types[0], attributes["axis"]
    size = left(entries(types, axis), attributes["run"], attributes["keep"])
    return TensorType((*x.shape[:axis], size, *x.shape[axis + 1 :]), attributes["dtype"] or x.dtype)


def _reference(
    x: Array, order: Array | None = None, *, axis: int, descending: bool, run: int, keep: int, dtype: DType | None
) -> Array:
    if order is None:
        order = np.broadcast_to(np.arange(x.shape[axis]).reshape([-1] + [1] * (x.ndim - 1 - axis)), x.shape)
    parts = []
    for first in range(0, order.shape[axis], run):
        piece = np.sort(np.take(order, np.arange(first, min(first + run, order.shape[axis])), axis), axis)
        values = np.take_along_axis(x, piece, axis)
        found = np.take_along_axis(piece, positions(values, axis, descending), axis)
        parts.append(np.take(found, np.arange(min(keep, found.shape[axis])), axis))
    found = np.concatenate(parts, axis)
    return found if dtype is not None else np.take_along_axis(x, found, axis)


def _op(name: str, role: Role, optional: int) -> Op:
    return Op(
        name=name,
        kind=Kind.SORT,
        role=role,
        operands=("x", "order"),
        optional=optional,
        integers=("order",),
        attributes={"axis": REQUIRED, "descending": REQUIRED, "run": REQUIRED, "keep": REQUIRED, "dtype": int32},
        infer=_infer,
        reference=_reference,
        keeps_layout=True,
        ulps=0,
    )


#: ``run`` elements are sorted by one block.  dtype: that of positions; None: the elements are the result.
SORTED_RUNS = _op("sorted_runs", Role.RUNS, 1)
#: ``run`` elements are those of a result: twice as many as a run of the operand has.
MERGED_RUNS = _op("merged_runs", Role.MERGE, 0)

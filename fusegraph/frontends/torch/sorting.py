"""ATen's sorting, selections by rank and binary searches."""

from __future__ import annotations

from typing import Any

from fusegraph.dtypes import int32, int64
from fusegraph.frontends.torch.table import HANDLERS, Call, aten
from fusegraph.graph import Tensor

#: The elements, and their positions before.
Both = tuple[Tensor, Tensor]


def _row(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """Returns a tensor and its axis counted from 0; a tensor of rank 0 becomes one element of rank 1."""
    return (x, dim % x.rank) if x.rank else (x.reshape(1), 0)


def _shaped(c: Call, values: Tensor, index: Tensor) -> Both:
    """Reshapes results to torch's shape, which may lack the axis."""
    shape = c.form.shape
    return values.reshape(shape), index.reshape(shape)


def _one(x: Tensor, axis: int, place: int) -> tuple[slice, ...]:
    """Returns the index of one place along an axis, which keeps the axis."""
    return tuple(slice(place, place + 1) if d == axis else slice(None) for d in range(x.rank))


@aten("sort.default")
def _sort(c: Call, x: Tensor, dim: int = -1, descending: bool = False) -> Both:
    rows, axis = _row(x, dim)
    return _shaped(c, c.graph.sort(rows, axis, descending), c.graph.sort_index(rows, axis, descending, int64))


@aten("sort.stable")
def _stable(c: Call, x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Both:
    return _sort(c, x, dim, descending)


@aten("topk.default")
def _topk(c: Call, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Both:
    """Returns the elements in order, whether ``sorted`` or not."""
    rows, axis = _row(x, dim)
    return _shaped(c, c.graph.topk(rows, k, axis, largest), c.graph.topk_index(rows, k, axis, largest, int64))


@aten("kthvalue.default")
def _kth(c: Call, x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Both:
    rows, axis = _row(x, dim)
    first = c.graph.topk(rows, k, axis, False), c.graph.topk_index(rows, k, axis, False, int64)
    return _shaped(c, *(t[_one(rows, axis, k - 1)] for t in first))


def _median(c: Call, x: Tensor, dim: int, ignore: bool) -> Both:
    """Returns the lower median of each row; of a row with NaNs the first of these, or without them if ``ignore``."""
    graph, (rows, axis) = c.graph, _row(x, dim)
    values, index = graph.sort(rows, axis), graph.sort_index(rows, axis, dtype=int64)
    count = rows.shape[axis]
    if not x.dtype.is_float:
        at = _one(rows, axis, (count - 1) // 2)
        return _shaped(c, values[at], index[at])
    known = graph.cast(graph.logical_not(graph.isnan(rows)), int32)
    known = graph.reduction(known, "add", axis)
    middle = graph.shift_right(graph.sub(known, 1), 1)
    place = graph.max(middle, 0) if ignore else graph.binary_select(middle, known, graph.cmp_eq(known, count))
    return _shaped(c, *(graph.take_along_axis(t, place, axis) for t in (values, index)))


for _name, _ignore in (("median", False), ("nanmedian", True)):
    HANDLERS[f"aten.{_name}.dim"] = lambda c, x, dim, keepdim=False, ignore=_ignore: _median(c, x, dim, ignore)
    HANDLERS[f"aten.{_name}.default"] = lambda c, x, ignore=_ignore: _median(c, x.reshape(-1), 0, ignore)[0]


# ---- binary search


@aten("searchsorted.Tensor", "searchsorted.Scalar")
def _searchsorted(
    c: Call,
    sequence: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    if sorter is not None:
        sequence = c.graph.take_along_axis(sequence, sorter, -1)
    x = values if isinstance(values, Tensor) else c.number(values, sequence.dtype)
    return c.graph.searchsorted(sequence, x, right or side == "right", c.dtype)


@aten("bucketize.Tensor", "bucketize.Scalar")
def _bucketize(c: Call, values: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return _searchsorted(c, boundaries, values, right=right)

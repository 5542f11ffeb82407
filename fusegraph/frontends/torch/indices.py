"""ATen's operators that read, write or combine elements at positions given by tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from fusegraph.composed import position_inside
from fusegraph.dtypes import int32, int64
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.table import Call, aten, turned
from fusegraph.graph import Tensor

Indices = Sequence[Tensor | None]


def _wrapped(c: Call, index: Tensor, size: int) -> Tensor:
    """Returns an index in which negative positions, which count from the end, are made positive."""
    if not index.dtype.is_int:
        raise NotSupportedError(f"an index of {index.dtype}")
    return c.graph.binary_select(index + size, index, index < 0)


def _along(index: Tensor, rank: int, dim: int) -> Tensor:
    """Reshapes an index to vary along dimension ``dim`` of ``rank``."""
    return index.reshape([-1 if d == dim else 1 for d in range(rank)])


# ---- reading


@aten("embedding.default")
def _embedding(c: Call, weight: Tensor, index: Tensor, *_: Any) -> Tensor:
    return c.graph.gather(weight, index, axis=0)


@aten("gather.default")
def _gather(c: Call, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Gathers along a dimension.

    One element per row of a computed tensor, as in a cross-entropy, is selected by a masked sum, which can be fused.
    """
    dim = dim % x.rank
    if not index.size:
        return c.zeros(c.form.shape)
    if c.graph.producer(x) is None or index.shape != tuple(1 if d == dim else n for d, n in enumerate(x.shape)):
        return c.graph.take_along_axis(x, index, axis=dim)
    hits = c.graph.cmp_eq(c.cast(c.graph.gen_index(x, axis=dim), index.dtype), index)
    picked = c.graph.binary_select(x, c.graph.constant(0, dtype=x.dtype), hits)
    return c.cast(c.graph.reduction(picked, mode="add", axes=dim))


@aten("index_select.default")
def _index_select(c: Call, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return c.graph.gather(x, _wrapped(c, index, x.shape[dim]), axis=dim)


@aten("take.default")
def _take(c: Call, x: Tensor, index: Tensor) -> Tensor:
    return c.graph.gather(x.reshape(-1), _wrapped(c, index, x.size))


@aten("index.Tensor", "_unsafe_index.Tensor")
def _index(c: Call, x: Tensor, indices: Indices) -> Tensor:
    """Indexes by tensors.

    Indices that vary along separate axes, as in an interpolation, become one gather each.  Otherwise the indexed
    dimensions are merged, and there is one gather.
    """
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if not _vary_apart(indices, given):
        found = c.graph.gather(_joined(c, x, given), _rows(c, x, indices, given), axis=0)
        rank = found.rank - (x.rank - len(given))
        first = given[0] if _side_by_side(given) else 0
        order = [*range(rank, rank + first), *range(rank), *range(rank + first, found.rank)]
        return turned(found, order)
    result = x
    for dim in reversed(given):  # earlier axes keep their places
        index = indices[dim]
        assert index is not None
        flat = index.reshape(-1) if len(given) > 1 or index.rank != 1 else index
        result = c.graph.gather(result, _wrapped(c, flat, x.shape[dim]), axis=dim)
    return result.reshape(c.form.shape)


def _side_by_side(given: Sequence[int]) -> bool:
    return list(given) == list(range(given[0], given[-1] + 1))


def _vary_apart(indices: Indices, given: Sequence[int]) -> bool:
    """Tells whether indices of adjacent dimensions vary along separate dimensions, in the same order."""
    every = [index for index in indices if index is not None]
    rank = max(index.rank for index in every)
    varying = [d + rank - index.rank for index in every for d in range(index.rank) if index.shape[d] != 1]
    return _side_by_side(given) and (len(given) == 1 or varying == sorted(set(varying)))


def _joined(c: Call, x: Tensor, given: Sequence[int]) -> Tensor:
    """Returns x with the indexed dimensions first, merged into one."""
    rest = [d for d in range(x.rank) if d not in given]
    return turned(x, [*given, *rest]).reshape([prod(x.shape[d] for d in given), *(x.shape[d] for d in rest)])


def _rows(c: Call, x: Tensor, indices: Indices, given: Sequence[int]) -> Tensor:
    """Returns positions along the merged indexed dimensions."""
    every = [_wrapped(c, index, x.shape[d]) for d in given if (index := indices[d]) is not None]
    return position_inside(c.graph, every, [x.shape[d] for d in given])


# ---- writing


def _put(
    c: Call, x: Tensor, dim: int, index: Tensor, source: Tensor, reduction: Any = "none", include_self: bool = True
) -> Tensor:
    """Puts or combines elements at the positions of an index, by the op `scatter`."""
    if reduction == "mean" and not x.dtype.is_float:
        raise NotSupportedError(f"a mean of {x.dtype}")
    if not index.size:
        return c.graph.identity(x)
    return c.graph.scatter(x, index, c.cast(source, x.dtype), dim % x.rank, reduction, include_self)


def _source(c: Call, index: Tensor, source: Any, like: Tensor) -> Tensor:
    """Returns what a scatter puts: the part of a tensor that the index covers, or a number broadcast to it."""
    if not isinstance(source, Tensor):
        value = float(source) if like.dtype.is_float else source
        source = c.graph.constant(value, dtype=like.dtype)
        return c.graph.broadcast(source, index.shape)
    return source if source.shape == index.shape else source[tuple(slice(0, n) for n in index.shape)]


@aten("scatter.value", "scatter.src")
def _scatter(c: Call, x: Tensor, dim: int, index: Tensor, source: Any) -> Tensor:
    return _put(c, x, dim, index, _source(c, index, source, x))


@aten("scatter.reduce", "scatter.value_reduce")
def _scatter_by(c: Call, x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str) -> Tensor:
    return _put(c, x, dim, index, _source(c, index, source, x), {"add": "add", "multiply": "mul"}[reduce])


@aten("scatter_add.default")
def _scatter_add(c: Call, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _put(c, x, dim, index, _source(c, index, source, x), "add")


#: ATen's name of a reduction -> that of the op.
_REDUCTIONS = {"sum": "add", "prod": "mul", "mean": "mean", "amax": "max", "amin": "min"}


@aten("scatter_reduce.two")
def _scatter_reduce(
    c: Call, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return _put(c, x, dim, index, _source(c, index, source, x), _REDUCTIONS[reduce], include_self)


@aten("index_reduce.default")
def _index_reduce(
    c: Call, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return _put(c, x, dim, _along(index, x.rank, dim % x.rank), source, _REDUCTIONS[reduce], include_self)


@aten("index_add.default")
def _index_add(c: Call, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    scaled = source if alpha == 1 else c.graph.mul(source, c.number(alpha, source.dtype))
    return _put(c, x, dim, _along(index, x.rank, dim % x.rank), scaled, "add")


@aten("index_copy.default")
def _index_copy(c: Call, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _put(c, x, dim, _along(index, x.rank, dim % x.rank), source)


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(c: Call, x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    dim = dim % x.rank
    shape = [index.size if d == dim else n for d, n in enumerate(x.shape)]
    if not isinstance(value, Tensor):
        value = c.graph.constant(float(value) if x.dtype.is_float else value, dtype=x.dtype)
    places = _along(_wrapped(c, index, x.shape[dim]), x.rank, dim)
    return _put(c, x, dim, places, c.graph.broadcast(c.cast(value, x.dtype).reshape(()), shape))


@aten("index_put.default", "_unsafe_index_put.default")
def _index_put(c: Call, x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Tensor:
    """Writes at indices: along one dimension in place; along several after moving them first and merging them."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    every = [index for index in indices if index is not None]
    if not given:
        raise NotSupportedError("no index")
    if every[0].dtype.is_bool:
        return _masked(c, x, given, every, values, accumulate)
    reduction = "add" if accumulate else "none"
    shape = _common([index.shape for index in every])
    first = given[0] if _side_by_side(given) else 0
    rest = [n for d, n in enumerate(x.shape) if d not in given]
    whole = [*rest[:first], *shape, *rest[first:]]
    values = c.spread(c.cast(values, x.dtype), whole)
    count = prod(shape)
    if len(given) == 1:
        places = _along(_wrapped(c, every[0], x.shape[first]), x.rank, first)
        source = values.reshape([*rest[:first], count, *rest[first:]])
        return _put(c, x, first, places, source, reduction)
    rank = len(shape)
    order = [*range(first, first + rank), *range(first), *range(first + rank, values.rank)]
    rows = turned(values, order)
    places, flat = c.spread(_rows(c, x, indices, given), shape), _joined(c, x, given)
    result = _put(c, flat, 0, _along(places, flat.rank, 0), rows.reshape([count, *rest]), reduction)
    moved = [*given, *(d for d in range(x.rank) if d not in given)]
    return turned(result.reshape([x.shape[d] for d in moved]), [moved.index(d) for d in range(x.rank)])


def _common(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape that shapes broadcast to."""
    rank = max(map(len, shapes))
    wide = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*wide))


def _masked(
    c: Call, x: Tensor, given: Sequence[int], masks: Sequence[Tensor], values: Tensor, accumulate: bool
) -> Tensor:
    """Puts the same value at every place where the mask is true.  Raises NotSupportedError for different values."""
    (mask, *others), before = masks, given[0]
    trailing = x.rank - before - mask.rank
    if others or any(n != 1 for n in values.shape[: max(values.rank - trailing, 0)]) or before:
        raise NotSupportedError("a mask, and values of their own for what it chooses")
    hit = mask.reshape([*mask.shape, *(1 for _ in range(trailing))])
    value = c.cast(values, x.dtype).reshape(values.shape[max(values.rank - trailing, 0) :])
    return c.cast(c.graph.binary_select(c.graph.add(x, value) if accumulate else value, x, hit))


@aten("put.default")
def _put_flat(c: Call, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    places = _wrapped(c, index.reshape(-1), x.size)
    result = _put(c, x.reshape(-1), 0, places, source.reshape(-1), "add" if accumulate else "none")
    return result.reshape(x.shape)


@aten("masked_scatter.default")
def _masked_scatter(c: Call, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Puts the source's elements, one after the other, where the mask is true."""
    if not source.size or 0 in c.form.shape:
        raise NotSupportedError("no elements")
    x, mask = (c.spread(t, c.form.shape) for t in (x, mask))
    found = c.graph.gather(source.reshape(-1), _numbers(c, mask)).reshape(x.shape)
    return c.graph.binary_select(c.cast(found), x, mask)


@aten("masked_scatter_backward.default")
def _masked_scatter_backward(c: Call, loss: Tensor, mask: Tensor, _: Sequence[int]) -> Tensor:
    mask, zeros = c.spread(mask, loss.shape), c.zeros([prod(c.form.shape)])
    if not zeros.size or not loss.size:
        return zeros.reshape(c.form.shape)
    places = c.graph.binary_select(_numbers(c, mask), -1, mask.reshape(-1))
    return c.graph.scatter(zeros, places, c.cast(loss.reshape(-1))).reshape(c.form.shape)


def _numbers(c: Call, mask: Tensor) -> Tensor:
    """Returns for each element that a mask selects how many it selects before, in row-major order."""
    wide = int64 if mask.size > int32.max else int32
    return c.graph.cumsum(c.graph.cast(mask.reshape(-1), wide), 0) - 1


@aten("embedding_dense_backward.default")
def _embedding_backward(
    c: Call, loss: Tensor, index: Tensor, count: int, padding: int = -1, by_frequency: bool = False
) -> Tensor:
    """Returns the sum of the losses for each row of the table, without those of the row ``padding``."""
    graph = c.graph
    rows = index.reshape([-1, 1])
    values = c.cast(loss.reshape([rows.size, loss.shape[-1]]))
    if by_frequency:
        ones = graph.broadcast(graph.constant(1, dtype=int32), (rows.size, 1))
        met = graph.scatter(graph.broadcast(graph.constant(0, dtype=int32), (count, 1)), rows, ones, 0, "add")
        values = c.cast(
            graph.div(values, graph.cast(graph.gather(met.reshape(-1), rows.reshape(-1)), "float32").reshape([-1, 1]))
        )
    if padding >= 0:
        rows = graph.binary_select(-1, rows, graph.cmp_eq(rows, padding))
    return graph.scatter(c.zeros(c.form.shape), rows, values, 0, "add")

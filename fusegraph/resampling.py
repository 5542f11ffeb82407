"""Interpolation of images: every element of the result is a weighted sum of a few elements of the image.

Along axes, elements and weights are known while the graph is built; for a grid, kernels compute them from coordinates.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from fusegraph import composed
from fusegraph.dtypes import float32, float64, int32, int64
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.operations import Operations
from fusegraph.ops.base import Array
from fusegraph.ops.reduction import normal_axes
from fusegraph.tensor import Tensor

#: Elements of the largest table of positions and weights.
MAX_TABLE = 1 << 22
#: With more taps than this, resampling is a matrix product.
MAX_TAPS = 8
Mode: TypeAlias = Literal["nearest", "linear", "cubic"]
_MODES = get_args(Mode)


def resample(
    self: Operations, x: Tensor, axis: int, index: Any, weights: Any = None, *, name: str | None = None
) -> Tensor:
    """Returns sums over k of ``weights[i, k] * x[index[i, k]]`` along an axis; without weights, ``x[index[i]]``.

    index (n,) or (n, taps) holds positions on the axis; weights are finite numbers, as many as index has, and need an x
    of floats.  The result has x's dtype.  Raises AttributeValueError, ShapeError, DTypeError.
    """
    (axis,) = normal_axes(axis, x.rank)
    table: Array = index
    if table.dtype.kind not in "iu" or table.ndim not in (1, 2):
        raise AttributeValueError(
            f"index has integers and one or two dimensions, got {table.dtype} {list(table.shape)}"
        )
    size = x.shape[axis]
    if table.size and (table.min() < 0 or table.max() >= size):
        raise ShapeError(f"index goes from {table.min()} to {table.max()}, axis {axis} has {size} elements")
    table = table.reshape(len(table), table.shape[1] if table.ndim == 2 else 1)
    if weights is None:
        if table.shape[1] != 1:
            raise AttributeValueError(f"{table.shape[1]} taps need weights")
        return _taken(self, x, axis, table[:, 0], name)
    if not x.dtype.is_float:
        raise DTypeError(f"weights are for floats, {x.name!r} is {x.dtype}; cast it")
    wide = float64 if x.dtype == float64 else float32
    if weights.size != table.size:
        raise ShapeError(f"weights {list(weights.shape)} are not one for each index {list(np.shape(index))}")
    factors = weights.astype(np.float64).reshape(table.shape).astype(wide.numpy)
    if table.shape[1] > MAX_TAPS:
        return _multiplied(self, x, axis, table, factors, name)
    total = None
    for k in range(table.shape[1]):
        shape = [1] * x.rank
        shape[axis] = len(table)
        part = _taken(self, x, axis, table[:, k], None)
        if not (factors[:, k] == 1).all():
            part = self.mul(part, factors[:, k].reshape(shape))
        total = part if total is None else self.add(total, part)
    if total is None:
        raise AttributeValueError("index has no taps")
    return self.identity(total, dtype=x.dtype, name=name)


def _taken(graph: Operations, x: Tensor, axis: int, index: Array, name: str | None) -> Tensor:
    """Returns the elements at known positions: by a slice or a repetition where these will do, else by a gather."""
    size, count = x.shape[axis], len(index)
    step = int(index[1]) - int(index[0]) if count > 1 else 1
    if count and step and np.array_equal(index, index[0] + step * np.arange(count)):
        stop = int(index[0]) + step * count
        bounds: list[list[int | None]] = [[None] * x.rank for _ in range(3)]
        for bound, value in zip(bounds, (int(index[0]), stop if stop >= 0 else None, step)):
            bound[axis] = value
        return graph.slice(x, *bounds, name=name)
    if count and size and count % size == 0 and np.array_equal(index, np.arange(count) // (count // size)):
        apart = [*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]]
        spread = [*x.shape[: axis + 1], count // size, *x.shape[axis + 1 :]]
        repeated = graph.broadcast(graph.reshape(x, apart), spread)
        return graph.reshape(repeated, [*x.shape[:axis], count, *x.shape[axis + 1 :]], name=name)
    return graph.gather(x, index.astype(np.int32 if size < 2**31 else np.int64), axis, name=name)


def _multiplied(graph: Operations, x: Tensor, axis: int, index: Array, weights: Array, name: str | None) -> Tensor:
    """Resamples by a product with the matrix of all weights.  Raises ShapeError if that is too large."""
    size = x.shape[axis]
    if len(index) * size > MAX_TABLE:
        raise ShapeError(f"{index.shape[1]} taps of {len(index)} positions over {size} elements are too many")
    matrix = np.zeros((size, len(index)), weights.dtype)
    for k in range(index.shape[1]):
        np.add.at(matrix, (index[:, k], np.arange(len(index))), weights[:, k])
    perm = [d for d in range(x.rank) if d != axis] + [axis]
    rows = graph.reshape(graph.transpose(x, perm), [-1, size]) if x.size else graph.reshape(x, [0, size])
    shape = [x.shape[d] for d in perm[:-1]] + [len(index)]
    y = graph.reshape(graph.matmul(rows, graph.constant(matrix), dtype=x.dtype), shape)
    return graph.transpose(y, list(np.argsort(perm)), name=name)


def interpolation(
    positions: Array,
    size: int,
    mode: str = "linear",
    *,
    scale: float = 1.0,
    cubic: float = -0.75,
    exclude_outside: bool = False,
) -> tuple[Array, Array]:
    """Returns (index, weights) of the elements around positions on an axis of ``size`` elements, for `resample`.

    positions (new,), in elements of the axis -> both (new, taps).  mode is linear or cubic (Keys 1981, whose
    coefficient is ``cubic``).  scale, below 1, widens the filter as for an image that shrinks by it, against aliasing.
    Beyond the ends, the elements at the ends count again, unless exclude_outside.  Raises ShapeError if the table would
    have more than `MAX_TABLE` entries.
    """
    support = {"linear": 1, "cubic": 2}[mode]
    reach = support / min(scale, 1.0)
    taps = 2 * int(np.ceil(reach))
    if len(positions) * taps > MAX_TABLE:
        raise ShapeError(f"{taps} taps at {len(positions)} positions are too many")
    first = np.floor(positions).astype(np.int64) - taps // 2 + 1
    index = first[:, None] + np.arange(taps)
    distance = np.abs(index - positions[:, None]) * min(scale, 1.0)
    weights = np.maximum(1 - distance, 0) if mode == "linear" else _keys(distance, cubic)
    if exclude_outside:
        weights = np.where((index >= 0) & (index < size), weights, 0.0)
    if exclude_outside or scale < 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    index = np.clip(index, 0, size - 1)
    needed = (weights != 0).any(axis=0)
    needed[np.argmax(needed)] = True
    return index[:, needed], weights[:, needed]


def _keys(distance: Array, a: float) -> Array:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def interpolate(
    self: Operations,
    x: Tensor,
    size: Any,
    mode: Mode = "nearest",
    align_corners: bool = False,
    *,
    name: str | None = None,
) -> Tensor:
    """Returns an image (N, C, spatial...) scaled to other spatial sizes, as torch's interpolate.

    mode is nearest (element floor(i * old / new)), linear or cubic (coefficient -0.75), along each spatial dimension.
    Linear and cubic are for floats; they align the edges of both images or, with align_corners, the centres of their
    outermost elements.

    size is one integer for all spatial dimensions, or one each; the result (N, C, *size) has x's dtype.  Raises
    AttributeValueError (size or mode), ShapeError (an axis without elements, or longer than `MAX_TABLE`), DTypeError.
    """
    rank = x.rank - 2
    sizes: list[int] = [size] * rank if isinstance(size, int) else list(size)
    if rank < 1 or len(sizes) != rank or any(n < 1 for n in sizes):
        raise AttributeValueError(
            f"size has a positive number for each spatial dimension of {list(x.shape)}, got {size!r}"
        )
    if mode not in _MODES:
        raise AttributeValueError(f"mode is one of {', '.join(_MODES)}, got {mode!r}")
    for axis, new in enumerate(sizes, 2):
        old = x.shape[axis]
        if old == 0:
            raise ShapeError(f"axis {axis} of {x.name!r} {list(x.shape)} has no elements")
        if new > MAX_TABLE:
            raise ShapeError(f"{new} positions are too many")
        if mode == "nearest":
            x = resample(self, x, axis, np.arange(new) * old // new)
        elif new != old:
            steps = np.arange(new, dtype=np.float64)
            if align_corners:
                positions = steps * ((old - 1) / (new - 1) if new > 1 else 0.0)
            else:
                positions = (steps + 0.5) * (old / new) - 0.5
            if mode == "linear":
                positions = np.maximum(positions, 0.0)
            x = resample(self, x, axis, *interpolation(positions, old, mode))
    return x if name is None else self.identity(x, name=name)


# ---- anywhere in an image

Beyond: TypeAlias = Literal["zeros", "border", "reflection"]
_BEYOND = get_args(Beyond)


def grid_sample(
    self: Operations,
    x: Tensor,
    grid: Tensor,
    mode: Mode = "linear",
    padding: Beyond = "zeros",
    align_corners: bool = False,
    *,
    name: str | None = None,
) -> Tensor:
    """Returns an image sampled at the coordinates in a grid, as torch's grid_sample.

    x (N, C, spatial...), grid (N, positions..., dimensions), both floats -> (N, C, positions...) of x's dtype.  The
    last dimension of grid has a coordinate along each spatial dimension, the last one first, from -1 to 1: from edge to
    edge of the image or, with align_corners, from centre to centre of its outermost elements.  mode is nearest (halfway
    cases to even), linear or cubic (coefficient -0.75).  Beyond the image there are zeros, its border, or its
    reflection.  Raises AttributeValueError, ShapeError, DTypeError.
    """
    rank = x.rank - 2
    if rank < 1 or grid.rank != x.rank or grid.shape[0] != x.shape[0] or grid.shape[-1] != rank or 0 in x.shape[2:]:
        raise ShapeError(f"grid {list(grid.shape)} has no places for an image {list(x.shape)}")
    if mode not in _MODES or padding not in _BEYOND:
        raise AttributeValueError(f"mode is one of {_MODES}, padding one of {_BEYOND}, got {mode!r} and {padding!r}")
    if not (x.dtype.is_float and grid.dtype.is_float):
        raise DTypeError(f"image and grid are floats, got {x.dtype} and {grid.dtype}")
    images, channels, sizes = x.shape[0], x.shape[1], x.shape[2:]
    wide = float64 if float64 in (x.dtype, grid.dtype) else float32
    outer = [images, 1, *grid.shape[1:-1]]
    counted = int64 if x.size >= 2**31 else int32
    every = [
        self.reshape(composed.arange(self, n, dtype=counted), [n if d == k else 1 for d in range(grid.rank)])
        for k, n in enumerate((images, channels))
    ]
    plane = self.add(self.mul(every[0], channels), every[1])
    flat, total = self.reshape(x, [-1]), None
    taps = []
    for d, n in enumerate(sizes):
        place = self.reshape(self.cast(grid[..., rank - 1 - d], wide), outer)
        coordinate = self.add(self.mul(place, (n - 1) / 2 if align_corners else n / 2), (n - 1) / 2)
        taps.append(around(self, coordinate, n, mode, padding, align_corners))
    for chosen in product(*taps):
        place, weight = plane, None
        for (index, factor), n in zip(chosen, sizes):
            place = self.add(self.mul(place, n), self.cast(index, counted))
            weight = factor if weight is None else weight if factor is None else self.mul(weight, factor)
        part = self.gather(flat, place)
        part = part if weight is None else self.mul(part, weight)
        total = part if total is None else self.add(total, part)
    assert total is not None
    return self.identity(total, dtype=x.dtype, name=name)


def around(
    graph: Operations, coordinate: Tensor, size: int, mode: str, padding: str, align_corners: bool = False
) -> list[tuple[Tensor, Tensor | None]]:
    """Returns (index, weight) of the elements around coordinates of a dimension; a weight of None is 1 everywhere.

    mode and padding are those of `grid_sample`.
    """
    weights: list[Tensor | None] = [None]
    if mode == "nearest":
        whole, first = graph.round(coordinate), 0
    else:
        whole = graph.floor(coordinate)
        rest = graph.sub(coordinate, whole)
        first, reach = (0, 1) if mode == "linear" else (-1, 2)
        weights = [_filter(graph, graph.abs(graph.sub(rest, k)), mode) for k in range(first, reach + 1)]
    found = []
    for k, weight in enumerate(weights, first):
        index = graph.cast(graph.add(whole, k), int32)
        if padding == "zeros":
            inside = graph.logical_and(graph.cmp_ge(index, 0), graph.cmp_lt(index, size))
            zero = graph.constant(0, dtype=coordinate.dtype)
            weight = graph.binary_select(1.0 if weight is None else weight, zero, inside)
        elif padding == "reflection":
            index = _reflected(graph, index, size, align_corners)
        found.append((graph.clamp(index, 0, size - 1), weight))
    return found


def _filter(graph: Operations, distance: Tensor, mode: str, a: float = -0.75) -> Tensor:
    """Returns the weights of elements at distances, as `interpolation` has them."""
    if mode == "linear":
        return graph.sub(1.0, distance)
    square = graph.mul(distance, distance)
    near = graph.add(graph.mul(graph.sub(graph.mul(distance, a + 2), a + 3), square), 1.0)
    far = graph.sub(
        graph.mul(graph.add(graph.mul(graph.sub(distance, 5.0), distance), 8.0), graph.mul(distance, a)), 4 * a
    )
    return graph.binary_select(near, far, graph.cmp_le(distance, 1.0))


def _reflected(graph: Operations, index: Tensor, size: int, align_corners: bool) -> Tensor:
    """Reflects indices beyond the ends: at the outermost elements (align_corners), else at the edges behind them."""
    if size == 1:
        return index
    edge = 1 - int(align_corners)
    period = 2 * (size - 1) + 2 * edge
    rest = graph.mod(index, period)
    rest = graph.binary_select(graph.add(rest, period), rest, graph.cmp_lt(rest, 0))
    return graph.binary_select(rest, graph.sub(period - edge, rest), graph.cmp_lt(rest, size))

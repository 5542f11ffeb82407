"""What the functions that write several nodes mean, in NumPy: plain formulas that share nothing with those nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from fusegraph.ops.base import Array, TensorType
from fusegraph.ops.random import uniform


def where(result: TensorType, mask: Array, x: Any, y: Any) -> Array:
    return np.asarray(np.where(np.asarray(mask) != 0, x, y))


def arange(result: TensorType, count: int, start: float = 0, step: float = 1, dtype: Any = None) -> Array:
    if not result.dtype.is_float:
        whole = np.arange(count, dtype=np.uint64) * np.uint64(int(step) % 2**64)
        return whole + np.uint64(int(start) % 2**64)
    return np.arange(count, dtype=np.float64) * step + start


def tril(result: TensorType, x: Array, diagonal: int = 0) -> Array:
    return np.where(np.tri(x.shape[-2], x.shape[-1], diagonal, dtype=bool), x, np.zeros((), x.dtype))


def triu(result: TensorType, x: Array, diagonal: int = 0) -> Array:
    return np.where(np.tri(x.shape[-2], x.shape[-1], diagonal - 1, dtype=bool), np.zeros((), x.dtype), x)


def one_hot(
    result: TensorType, index: Array, depth: int, axis: int = -1, on: Any = 1, off: Any = 0, dtype: Any = None
) -> Array:
    hit = np.asarray(index)[..., None] == np.arange(depth)
    return np.where(np.moveaxis(hit, -1, axis), np.reshape(on, ()), np.reshape(off, ()))


def take_along_axis(result: TensorType, x: Array, index: Array, axis: int = -1) -> Array:
    if not index.size:
        return np.zeros(index.shape, x.dtype)
    axis %= x.ndim
    near = x[tuple(slice(None) if d == axis else slice(n) for d, n in enumerate(index.shape))]
    return np.take_along_axis(near, np.clip(index, 0, x.shape[axis] - 1).astype(np.int64), axis)


def searchsorted(result: TensorType, sequence: Array, values: Array, right: bool = False, dtype: Any = None) -> Array:
    side: Any = "right" if right else "left"
    if sequence.ndim == 1:
        return np.asarray(np.searchsorted(sequence, values, side))
    found = np.zeros(result.shape, np.int64)
    for row in np.ndindex(values.shape[:-1]):
        found[row] = np.searchsorted(sequence[row], values[row], side)
    return found


def block_scale_dequantize(
    result: TensorType, x: Array, scale: Array, block_size: int | Sequence[int], dtype: Any = None
) -> Array:
    for d, size in enumerate(reversed([block_size] if isinstance(block_size, int) else block_size), start=1):
        scale = np.take(np.repeat(scale, size, axis=-d), range(x.shape[-d]), axis=-d)
    return np.asarray(x.astype(np.float64) * scale)


def dequantize(result: TensorType, x: Array, scale: Array, zero_point: Array | None = None, dtype: Any = None) -> Array:
    def spread(numbers: Array) -> Array:
        wide = numbers.astype(np.float64).reshape((1,) * (x.ndim - numbers.ndim) + numbers.shape)
        for d, size in enumerate(x.shape):
            wide = np.repeat(wide, size // wide.shape[d] if wide.shape[d] else 1, axis=d)
        return wide

    zero = np.zeros(()) if zero_point is None else zero_point
    if zero_point is not None:
        zero = np.broadcast_to(zero_point, np.broadcast_shapes(zero_point.shape, scale.shape))
    return (x.astype(np.float64) - spread(zero)) * spread(scale)


def gather_nd(result: TensorType, x: Array, index: Array, batch: int = 0) -> Array:
    if not index.size or not x.size:
        return np.zeros(result.shape, x.dtype)
    sizes = np.array(x.shape[batch : batch + index.shape[-1]])
    positions = np.clip(index, 0, sizes - 1).astype(np.int64)
    own = [*np.indices(index.shape[:-1])][:batch]  # the batch that each slice is of
    return np.asarray(x[(*own, *np.moveaxis(positions, -1, 0))])


def scatter_nd(result: TensorType, x: Array, index: Array, updates: Array, reduction: str = "none") -> Array:
    found = x.copy()
    sizes = np.array(x.shape[: index.shape[-1]])
    inside = ((index >= 0) & (index < sizes)).all(axis=-1)
    place = tuple(np.moveaxis(index[inside].astype(np.int64), -1, 0))
    if reduction == "none":
        found[place] = updates[inside]
    else:
        combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
        combine.at(found, place, updates[inside])
    return found


def einsum(result: TensorType, equation: str, *operands: Array) -> Array:
    kind = np.float64 if result.dtype.is_float else result.dtype.numpy
    from_left = ["einsum_path", (0, 1), *((0, n) for n in range(len(operands) - 2, 0, -1))]
    path: Any = from_left if len(operands) > 2 else False
    return np.asarray(np.einsum(equation, *(np.asarray(x, kind) for x in operands), optimize=path))


# ---- indexing


def split(result: TensorType, x: Array, parts: int | Sequence[int], axis: int = 0) -> list[Array]:
    return np.split(x, parts if isinstance(parts, int) else np.cumsum(parts)[:-1], axis)


def flip(result: TensorType, x: Array, axes: Any = None) -> Array:
    return np.flip(x, axes if axes is None or isinstance(axes, int) else tuple(axes))


def reshaped(result: TensorType, x: Array, *_: Any, **__: Any) -> Array:
    return x.reshape(result.shape)


def space_to_depth(result: TensorType, x: Array, block: int) -> Array:
    found = np.zeros(result.shape, x.dtype)
    spatial = x.ndim - 2
    for p, offset in enumerate(product(range(block), repeat=spatial)):
        found[:, p :: block**spatial] = x[(slice(None), slice(None), *(slice(o, None, block) for o in offset))]
    return found


def depth_to_space(result: TensorType, x: Array, block: int) -> Array:
    found = np.zeros(result.shape, x.dtype)
    spatial = x.ndim - 2
    for p, offset in enumerate(product(range(block), repeat=spatial)):
        found[(slice(None), slice(None), *(slice(o, None, block) for o in offset))] = x[:, p :: block**spatial]
    return found


# ---- interpolation


def resample(result: TensorType, x: Array, axis: int, index: Any, weights: Any = None) -> Array:
    table = np.asarray(index)
    table = table.reshape(len(table), -1) if table.size else table.reshape(len(table), 1)
    if weights is None:
        return np.take(x, table[:, 0], axis)
    factors = np.asarray(weights, np.float64).reshape(table.shape)
    taken = np.moveaxis(x, axis, -1)[..., table]
    return np.moveaxis((taken * factors).sum(axis=-1), -1, axis)


def _cubic(distance: Array, a: float = -0.75) -> Array:
    """Returns the kernel of Keys (1981)."""
    t = np.abs(distance)
    near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def interpolate(result: TensorType, x: Array, size: Any, mode: str = "nearest", align_corners: bool = False) -> Array:
    for axis, new in enumerate(result.shape[2:], 2):
        old = x.shape[axis]
        i = np.arange(new)
        if mode == "nearest":
            x = np.take(x, i * old // new, axis)
            continue
        if new == old:
            continue
        corner = i * (old - 1) / max(new - 1, 1)
        at = corner if align_corners else (i + 0.5) * old / new - 0.5
        at = np.maximum(at, 0.0) if mode == "linear" else at
        total: Any = 0.0
        for k in (0, 1) if mode == "linear" else (-1, 0, 1, 2):
            whole = np.floor(at)
            w = 1 - np.abs(at - whole - k) if mode == "linear" else _cubic(at - whole - k)
            part = np.take(x, np.clip(whole + k, 0, old - 1).astype(int), axis)
            along = [-1 if d == axis else 1 for d in range(x.ndim)]
            total = total + np.where(w.reshape(along) == 0, 0.0, part * w.reshape(along))
        x = total
    return x


def grid_sample(
    result: TensorType, x: Array, grid: Array, mode: str = "linear", padding: str = "zeros", align_corners: bool = False
) -> Array:
    sizes = x.shape[2:]
    reach = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}[mode]
    taps = []
    for d, size in enumerate(sizes):
        position = grid[..., len(sizes) - 1 - d]
        at = (position + 1) / 2 * (size - 1) if align_corners else ((position + 1) * size - 1) / 2
        whole = np.rint(at) if mode == "nearest" else np.floor(at)
        own = []
        for k in reach:
            index, inside = _within(whole + k, size, padding, align_corners)
            distance = at - whole - k
            w = _cubic(distance) if mode == "cubic" else 1 - np.abs(distance) if mode == "linear" else np.ones(at.shape)
            own.append((index, np.where(inside, w, 0.0)))
        taps.append(own)
    images = np.arange(len(x)).reshape(-1, *(1,) * (grid.ndim - 2))
    total: Any = 0.0
    for chosen in product(*taps):
        weight = np.prod([w for _, w in chosen], axis=0)
        part = np.moveaxis(x, 1, -1)[(images, *(i for i, _ in chosen))]
        total = total + np.where(weight[..., None] == 0, 0.0, part * weight[..., None])
    return np.moveaxis(total, -1, 1)


def _within(index: Array, size: int, padding: str, align_corners: bool) -> tuple[Array, Array]:
    """Returns the index of the element to read for any index, and whether there is one: where not, the value is 0."""
    i = np.nan_to_num(index, nan=0.0, posinf=0.0, neginf=0.0).astype(np.int64)
    if padding == "reflection":
        line = [*range(size), *range(size - 2, 0, -1)] if align_corners else [*range(size), *range(size - 1, -1, -1)]
        return np.array(line)[i % len(line)], np.ones(i.shape, bool)
    inside = (i >= 0) & (i < size) if padding == "zeros" else np.ones(i.shape, bool)
    return np.clip(i, 0, size - 1), inside


def sample(
    result: TensorType,
    logits: Array,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    seed: Any = 0,
    offset: Any = 0,
    dtype: Any = None,
) -> Array:
    cold, warm = 2.0**-126, 2.0**100
    if np.ndim(temperature) == 0 and temperature < cold:
        return np.asarray(logits.argmax(-1))
    temperature = np.where(temperature >= cold, np.minimum(temperature, warm), 0.0)
    ordered, kept = np.sort(logits, -1)[..., ::-1], np.ones(logits.shape, bool)

    def least(count: Any) -> Array:
        """Returns the last of so many elements of each row, the largest first."""
        place = np.clip(count, 1, logits.shape[-1]) - 1
        return np.take_along_axis(ordered, np.broadcast_to(place, (*logits.shape[:-1], 1)).astype(np.int64), -1)

    weights = np.exp((ordered - ordered[..., :1]) / np.maximum(temperature, cold))
    if top_k is not None:
        kept = ~(logits < least(top_k))
        weights = np.where(ordered < least(top_k), 0, weights)
    if top_p is not None:
        mass = weights.cumsum(-1)
        few = ~(logits < least((mass < top_p * mass[..., -1:]).sum(-1, keepdims=True) + 1))
        kept &= few | np.isnan(mass[..., -1:])
    drawn = np.maximum(uniform(logits, np.asarray(seed), np.asarray(offset)), 2.0**-25)
    scores = np.where(kept, logits - temperature * np.log(-np.log(drawn)), -np.inf)
    return np.asarray(scores.argmax(-1))

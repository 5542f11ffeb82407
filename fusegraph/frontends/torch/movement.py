"""ATen's views and other movement, constants, ranges and resampling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from codegen.sizes import Size
from fusegraph.dtypes import float32, int64
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.table import Call, aten, free, turned
from fusegraph.graph import Tensor
from fusegraph.layout import extent, overlaps, stride_order
from fusegraph.ops.movement import part
from fusegraph.resampling import Beyond, Mode, interpolation, resample

# ---- views


@free("alias.default", "detach.default")
def _same(c: Call, x: Tensor) -> Tensor:
    return x


@free(
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "unsqueeze.default",
)
def _reshape(c: Call, x: Tensor, *_: Any) -> Tensor:
    while (node := c.graph.producer(x)) is not None and node.op.name == "reshape":
        x = node.inputs[0]  # of consecutive reshapes only the last counts
    return x if x.shape == c.form.shape else x.reshape(c.form.shape)


@free("expand.default")
def _expand(c: Call, x: Tensor, *_: Any, implicit: bool = False) -> Tensor:
    return c.spread(x, c.form.shape)


@free("permute.default")
def _permute(c: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.transpose(dims)


@free("transpose.int")
def _transpose(c: Call, x: Tensor, first: int, second: int) -> Tensor:
    perm = list(range(x.rank))
    perm[first], perm[second] = perm[second], perm[first]
    return x.transpose(perm) if perm else x


@free("t.default")
def _t(c: Call, x: Tensor) -> Tensor:
    return x.T if x.rank == 2 else x


@free("as_strided.default")
def _as_strided(c: Call, x: Tensor, size: Sequence[int], strides: Sequence[int], offset: int | None = None) -> Tensor:
    """Reinterprets all elements in memory with another shape and strides."""
    source = c.given[0]
    if offset or source is None:
        raise NotSupportedError("as_strided with an offset")
    return _relaid(x, source.strides, tuple(size), tuple(strides))


def _relaid(x: Tensor, given: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Reinterprets a tensor, whose strides in torch are ``given``, with another shape and strides.

    Raises NotSupportedError unless both cover the same memory without gaps or overlaps.
    """
    for sizes, steps in ((x.shape, given), (shape, strides)):
        if 0 in sizes or extent(sizes, steps) != prod(sizes) or overlaps(sizes, steps) or prod(sizes) != x.size:
            raise NotSupportedError("as_strided that leaves elements out, or repeats them")
    before, after = (stride_order(n, s) for n, s in ((x.shape, given), (shape, strides)))
    line, sizes = turned(x, before), tuple(shape[d] for d in after)
    divided = line if line.shape == sizes else line.reshape(sizes)
    return turned(divided, [after.index(d) for d in range(len(shape))])


def _part(x: Tensor, dim: int, start: int | None, stop: int | None, step: int = 1) -> Tensor:
    """Returns a slice along one axis."""
    keys = [slice(None)] * x.rank
    keys[dim] = slice(start, stop, step)
    return x[tuple(keys)]


def _place(index: int, size: int) -> int:
    """Returns an index among so many elements, from the start."""
    return index + size if index < 0 else index


@free("slice.Tensor")
def _slice(c: Call, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return _part(x, dim, start, end, step)


@free("select.int")
def _select(c: Call, x: Tensor, dim: int, index: int) -> Tensor:
    at = _place(index, x.shape[dim])
    return _part(x, dim, at, at + 1).reshape(c.form.shape)


@free("split_with_sizes.default", "split.Tensor")
def _split(c: Call, x: Tensor, _: Any, dim: int = 0) -> tuple[Tensor, ...]:
    sizes = [form.shape[dim] for form in c.forms if form is not None]
    return tuple(c.graph.split(x, sizes, axis=dim))


@free("unbind.int")
def _unbind(c: Call, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(_part(x, dim, at, at + 1).reshape(c.form.shape) for at in range(x.shape[dim]))


@free("unfold.default")
def _unfold(c: Call, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Returns windows along an axis, which may overlap, by a gather."""
    if not x.rank:
        return x.reshape(c.form.shape)
    dim %= x.rank
    count = c.form.shape[dim]
    places = (np.arange(count)[:, None] * step + np.arange(size)).astype(np.int32)
    windows = c.graph.gather(x, c.graph.constant(places.ravel()), axis=dim)
    apart = windows.reshape((*x.shape[:dim], count, size, *x.shape[dim + 1 :]))
    return apart.transpose([*(d for d in range(apart.rank) if d != dim + 1), dim + 1])


# ---- known without computing


def _full(c: Call, value: bool | int | float) -> Tensor:
    constant = c.graph.constant(value if isinstance(value, Size) else np.asarray(value), dtype=c.dtype)
    return c.graph.broadcast(constant, c.form.shape) if c.form.shape else constant


@free("full.default", "full_like.default", "new_full.default")
def _filled(c: Call, _: Any, *rest: Any, **__: Any) -> Tensor:
    return _full(c, rest[-1])


@free("scalar_tensor.default")
def _scalar(c: Call, value: float, **_: Any) -> Tensor:
    return _full(c, value)


@free(
    "zeros.default",
    "zeros_like.default",
    "new_zeros.default",
    *("empty.memory_format", "empty_like.default", "empty_permuted.default", "empty_strided.default"),
    *("new_empty.default", "new_empty_strided.default"),
)
def _zeros(c: Call, *_: Any, **__: Any) -> Tensor:
    return _full(c, 0)


@free("ones.default", "ones_like.default", "new_ones.default")
def _ones(c: Call, *_: Any, **__: Any) -> Tensor:
    return _full(c, 1)


@free("arange.start_step", "arange.start", "arange.default")
def _arange(c: Call, *bounds: float, **_: Any) -> Tensor:
    start, step = (0, 1) if len(bounds) == 1 else (bounds[0], bounds[2] if len(bounds) > 2 else 1)
    return _range(c, start, step)


@free("prims.iota.default")
def _iota(c: Call, _: int, *, start: int, step: int, **__: Any) -> Tensor:
    return _range(c, start, step)


def _range(c: Call, start: float, step: float) -> Tensor:
    if not c.form.shape[0]:
        return _full(c, 0)
    # Positions are int32; the products of float ranges are rounded once, in float32 or wider.
    position = c.graph.gen_index(_full(c, 0), axis=0)
    result = c.cast(position, c.dtype if c.dtype.is_float else int64)
    result = c.graph.mul(result, c.number(step, result.dtype)) if step != 1 else result
    result = c.graph.add(result, c.number(start, result.dtype)) if start != 0 else result
    return c.cast(result)


# ---- movement that is no view


@aten("copy.default")
def _copy(c: Call, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    converted = c.converted(source)
    same = converted.shape == c.form.shape
    return c.graph.identity(converted) if same else c.graph.broadcast(converted, c.form.shape)


@aten("cat.default")
def _cat(c: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # torch ignores an empty tensor of rank 1 beside tensors of any rank.
    joined = [c.cast(x) for x in tensors if x.shape != (0,) or len(c.form.shape) == 1]
    return c.graph.concatenate(joined, axis=dim)


@aten("flip.default")
def _flip(c: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
    return c.graph.flip(x, tuple(dims))


@aten("repeat.default")
def _repeat(c: Call, x: Tensor, repeats: Sequence[int]) -> Tensor:
    shape = (1,) * (len(repeats) - x.rank) + x.shape
    apart = [n for size in shape for n in (1, size)]
    wide = [n for count, size in zip(repeats, shape) for n in (count, size)]
    return c.graph.broadcast(x.reshape(apart), wide).reshape(c.form.shape)


@aten("constant_pad_nd.default")
def _constant_pad(c: Call, x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    pairs = _pairs(x, pad)
    for dim, (before, after) in enumerate(pairs):  # negative padding cuts off
        if min(before, after) < 0:
            x = _part(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
    kept = [(max(before, 0), max(after, 0)) for before, after in pairs]
    number = value if c.dtype.is_float else int(value)
    return c.graph.pad(x, kept, value=number)


def _pairs(x: Tensor, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the padding (before, after) of each axis; torch's list begins with the last axis."""
    return [(0, 0)] * (x.rank - len(pad) // 2) + list(zip(pad[::2], pad[1::2]))[::-1]


@aten(*(f"reflection_pad{count}d.default" for count in (1, 2, 3)))
def _reflected(c: Call, x: Tensor, pad: Sequence[int]) -> Tensor:
    return c.graph.pad(x, _pairs(x, pad), mode="reflect")


@aten(*(f"replication_pad{count}d.default" for count in (1, 2, 3)))
def _replicated(c: Call, x: Tensor, pad: Sequence[int]) -> Tensor:
    return c.graph.pad(x, _pairs(x, pad), mode="replicate")


@aten("slice_scatter.default")
def _slice_scatter(
    c: Call, x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    count, dim = x.shape[dim], dim % x.rank
    first, number, step = part(count, start, end, step)
    last = first + number * step
    if step != 1 and (first >= step or count % step or source.shape[dim] * step != count):
        return _strided_scatter(c, x, c.cast(source), dim, range(first, last, step))
    if step != 1:  # one of each ``step`` elements
        shape = x.shape
        x = x.reshape((*shape[:dim], count // step, step, *shape[dim + 1 :]))
        each = source.reshape((*shape[:dim], count // step, 1, *shape[dim + 1 :]))
        return _slice_scatter(c, x, each, dim + 1, first, first + 1).reshape(shape)
    parts = [_part(x, dim, 0, first), c.cast(source), _part(x, dim, max(first, last), None)]
    return c.graph.concatenate([p for p in parts if p.shape[dim]] or [x], axis=dim)


def _strided_scatter(c: Call, x: Tensor, source: Tensor, dim: int, places: range) -> Tensor:
    """Replaces the elements of x at ``places`` along an axis by those of the source, in order."""
    count = x.shape[dim]
    if not places:
        return c.graph.identity(x)
    number = np.clip((np.arange(count) - places.start) // places.step, 0, len(places) - 1).astype(np.int32)
    hit = np.isin(np.arange(count), places).reshape([count if d == dim else 1 for d in range(x.rank)])
    spread = c.graph.gather(source, c.graph.constant(number), axis=dim)
    return c.cast(c.graph.binary_select(spread, x, c.graph.constant(hit)))


@aten("as_strided_scatter.default")
def _as_strided_scatter(
    c: Call, x: Tensor, source: Tensor, size: Sequence[int], strides: Sequence[int], offset: int | None = None
) -> Tensor:
    """Replaces all elements of a tensor."""
    if offset:
        raise NotSupportedError("as_strided_scatter with an offset")
    whole = _relaid(source, tuple(strides), c.form.shape, c.form.strides)
    return c.graph.identity(c.cast(whole))


@aten("select_scatter.default")
def _select_scatter(c: Call, x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    dim = dim % x.rank
    index = _place(index, x.shape[dim])
    row = source.reshape((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return _slice_scatter(c, x, row, dim, index, index + 1)


# ---- resampling


@aten("upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default")
def _upsample_nearest(c: Call, x: Tensor, size: Sequence[int], *scales: float | None) -> Tensor:
    """Reads the elements at torch's positions: floor(position / scale) in float32."""
    result = x
    for axis, (out, scale) in enumerate(zip(c.form.shape[2:], scales or (None,) * len(size)), start=2):
        step = np.float32(1 / scale) if scale else np.float32(x.shape[axis] / out)
        position = np.floor(np.arange(out, dtype=np.float32) * step).astype(np.int32)
        position = np.minimum(position, x.shape[axis] - 1)
        result = c.graph.gather(result, c.graph.constant(position), axis=axis)
    return result


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _upsample_nearest_vec(
    c: Call, x: Tensor, size: Sequence[int] | None, scales: Sequence[float] | None = None
) -> Tensor:
    return _upsample_nearest(c, x, c.form.shape[2:], *(scales or ()))


@aten("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def _upsample_linear(
    c: Call,
    x: Tensor,
    size: Sequence[int] | None,
    align_corners: bool,
    scales: Sequence[float] | None = None,
) -> Tensor:
    """Interpolates at positions (i + 0.5) / scale - 0.5, or with align_corners at positions from first to last."""
    result = c.cast(x, float32) if x.dtype.itemsize < 4 else x  # 16-bit floats are rounded once
    for axis, (new, scale) in enumerate(zip(c.form.shape[2:], scales or (None,) * (x.rank - 2)), start=2):
        old = x.shape[axis]
        if align_corners:
            positions = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
        else:
            step = 1 / scale if scale and size is None else old / new
            positions = np.maximum((np.arange(new) + 0.5) * step - 0.5, 0.0)
        result = resample(c.graph, result, axis, *interpolation(positions, old))
    return c.cast(result)


@aten("grid_sampler_2d.default", "grid_sampler_3d.default")
def _grid_sampler(c: Call, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    modes: tuple[Mode, ...] = ("linear", "nearest", "cubic")
    beyond: tuple[Beyond, ...] = ("zeros", "border", "reflection")
    return c.cast(c.graph.grid_sample(x, grid, modes[mode], beyond[padding], align_corners))

"""Splitting and rearranging tensors, written as slices, reshapes and transposes of the op table."""

from __future__ import annotations

from collections.abc import Sequence

from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.operations import Operations
from fusegraph.ops.reduction import normal_axes
from fusegraph.tensor import Tensor
from fusegraph.values import MOST_ENTRIES


def split(self: Operations, x: Tensor, parts: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Returns slices of the tensor along an axis: ``parts`` equal ones, or ones of these sizes.

    Raises ShapeError if the axis does not split evenly, or if the sizes do not add up to it.
    """
    (axis,) = normal_axes(axis, x.rank)
    size = x.shape[axis]
    if isinstance(parts, int):
        if parts < 1 or size % parts or parts > MOST_ENTRIES:
            raise ShapeError(f"axis {axis} of {x.name!r} {list(x.shape)} does not split into {parts} equal parts")
        sizes = [size // parts] * parts
    else:
        sizes = list(parts)
        if min(sizes, default=0) < 0 or sum(sizes) != size:
            raise ShapeError(f"parts {sizes} do not add up to axis {axis} of {x.name!r} {list(x.shape)}")
    found, start = [], 0
    for part in sizes:
        starts, stops = ([at if d == axis else None for d in range(x.rank)] for at in (start, start + part))
        found.append(self.slice(x, starts, stops))
        start += part
    return found


def flip(self: Operations, x: Tensor, axes: int | Sequence[int] | None = None, *, name: str | None = None) -> Tensor:
    """Returns the elements in reverse order along axes (None: all)."""
    chosen = normal_axes(axes, x.rank)
    return self.slice(x, steps=[-1 if d in chosen else None for d in range(x.rank)], name=name)


def squeeze(self: Operations, x: Tensor, axes: int | Sequence[int] | None = None, *, name: str | None = None) -> Tensor:
    """Removes dimensions of size 1: all of them, or those of ``axes``.  Raises ShapeError for one of another size."""
    chosen = [d for d, size in enumerate(x.shape) if size == 1] if axes is None else normal_axes(axes, x.rank)
    for d in chosen:
        if x.shape[d] != 1:
            raise ShapeError(f"axis {d} of {x.name!r} {list(x.shape)} has size {x.shape[d]}, not 1")
    return self.reshape(x, [size for d, size in enumerate(x.shape) if d not in chosen], name=name)


def unsqueeze(self: Operations, x: Tensor, axes: int | Sequence[int], *, name: str | None = None) -> Tensor:
    """Inserts dimensions of size 1; ``axes`` are their positions in the result."""
    count = 1 if isinstance(axes, int) else len(axes)
    chosen, rest = normal_axes(axes, x.rank + count), iter(x.shape)
    return self.reshape(x, [1 if d in chosen else next(rest) for d in range(x.rank + count)], name=name)


def space_to_depth(self: Operations, x: Tensor, block: int, *, name: str | None = None) -> Tensor:
    """Moves blocks of an image to channels: (N, C, *S) -> (N, C * block^n, *S / block), n spatial dimensions.

    Channel c and position p in its block (row-major) become channel c * block^n + p, as in torch's pixel_unshuffle.
    Any dtype.  Raises ShapeError unless every spatial size is a multiple of ``block``.
    """
    images, channels, *sizes = _image(x, block)
    if any(size % block for size in sizes):
        raise ShapeError(f"{x.name!r} {list(x.shape)} has no whole number of blocks of {block}")
    n = len(sizes)
    parts = self.reshape(x, [images, channels, *(part for size in sizes for part in (size // block, block))])
    moved = self.transpose(parts, [0, 1, *range(3, 3 + 2 * n, 2), *range(2, 2 + 2 * n, 2)])
    return self.reshape(moved, [images, channels * block**n, *(size // block for size in sizes)], name=name)


def depth_to_space(self: Operations, x: Tensor, block: int, *, name: str | None = None) -> Tensor:
    """Moves channels to blocks of an image: (N, C * block^n, *S) -> (N, C, *S * block), n spatial dimensions.

    The inverse of `space_to_depth`, as torch's pixel_shuffle.  Any dtype.  Raises ShapeError unless the channels are a
    multiple of block^n.
    """
    images, channels, *sizes = _image(x, block)
    n = len(sizes)
    if channels % block**n:
        raise ShapeError(f"{channels} channels of {x.name!r} are no whole number of blocks of {block}^{n}")
    parts = self.reshape(x, [images, channels // block**n, *(block,) * n, *sizes])
    moved = self.transpose(parts, [0, 1, *(d for k in range(n) for d in (2 + n + k, 2 + k))])
    return self.reshape(moved, [images, channels // block**n, *(size * block for size in sizes)], name=name)


def _image(x: Tensor, block: int) -> tuple[int, ...]:
    if block < 1:
        raise AttributeValueError(f"block is a positive integer, got {block!r}")
    if x.rank < 3:
        raise ShapeError(f"{x.name!r} {list(x.shape)} is no image: it has fewer than 3 dimensions")
    return x.shape

"""Numbers of few bits, with a scale and perhaps a zero point for each block of them, written with ops of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegraph.dtypes import DType, as_dtype, float32, float64
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.operations import Operations
from fusegraph.tensor import Tensor


def block_scale_dequantize(
    self: Operations,
    x: Tensor,
    scale: Tensor,
    block_size: int | Sequence[int],
    dtype: Any = float32,
    *,
    name: str | None = None,
) -> Tensor:
    """Returns elements times the scale of their block, rounded once to ``dtype``, as cuDNN's op of this name.

    x has any dtype but bool, mostly of 8 or 4 bits; scale has floats: float8_e8m0 in MX formats, float8_e4m3 in NVFP4.
    block_size has the sizes of a block along the last dimensions of x, an integer that along the last one; scale has
    x's shape divided by them, rounded up: the last blocks have what is left.  Raises ShapeError where scale has not one
    for each; DTypeError; AttributeValueError for sizes below 1.
    """
    kind = as_dtype(dtype)
    if not scale.dtype.is_float or x.dtype.is_bool or not kind.is_float:
        raise DTypeError(
            f"block_scale_dequantize multiplies numbers by floats and gives floats, got {x.dtype} times {scale.dtype} "
            f"to {kind}"
        )
    sizes = [block_size] if isinstance(block_size, int) else list(block_size)
    if not sizes or min(sizes) < 1 or len(sizes) > x.rank:
        raise AttributeValueError(
            f"block_size has from 1 to {x.rank} positive sizes for {x.name!r} {list(x.shape)}, got {sizes}"
        )
    blocks = [1] * (x.rank - len(sizes)) + sizes
    count = [-(-n // b) for n, b in zip(x.shape, blocks)]
    if list(scale.shape) != count:
        raise ShapeError(
            f"{x.name!r} {list(x.shape)} has {count} blocks of {sizes}, scale {scale.name!r} is {list(scale.shape)}"
        )
    for d, (n, block) in enumerate(zip(x.shape, blocks)):
        if n % block:
            scale = _repeated(self, scale, d, block, n)
    return _scaled(self, x, scale, None, kind, name)


def _repeated(self: Operations, scale: Tensor, axis: int, block: int, size: int) -> Tensor:
    """Returns scales with one for each of ``size`` elements of a dimension, whose last block is not whole."""
    lead, count, rest = scale.shape[:axis], scale.shape[axis], scale.shape[axis + 1 :]
    every = self.broadcast(self.reshape(scale, (*lead, count, 1, *rest)), (*lead, count, block, *rest))
    whole = self.reshape(every, (*lead, count * block, *rest))
    start, stop = [0] * whole.rank, [*lead, size, *rest]
    return self.slice(whole, start, stop)


def dequantize(
    self: Operations,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    dtype: Any = None,
    *,
    name: str | None = None,
) -> Tensor:
    """Returns (x - zero_point) * scale, rounded once to ``dtype``, by default the scale's.

    scale has a number for each block of x; its shape, whose last dimensions are x's, says how large they are: [] is one
    for all elements, [N, 1] one for each row, [N, K / 64] one for 64 elements of a row.  zero_point has as many, or
    broadcasts to them.  x and zero_point have any dtype but bool, scale has floats.  Raises ShapeError for a scale that
    does not divide x into blocks; DTypeError.
    """
    kind = scale.dtype if dtype is None else as_dtype(dtype)
    zero_type = x.dtype if zero_point is None else zero_point.dtype
    if not scale.dtype.is_float or x.dtype.is_bool or zero_type.is_bool or not kind.is_float:
        beside = "" if zero_point is None else f" less {zero_type}"
        raise DTypeError(
            f"dequantize multiplies numbers by floats and gives floats, got {x.dtype}{beside} times {scale.dtype} to "
            f"{kind}"
        )
    grid = (1,) * (x.rank - scale.rank) + scale.shape
    if scale.rank > x.rank or any(count not in (1, n) and (count < 1 or n % count) for n, count in zip(x.shape, grid)):
        raise ShapeError(f"scale {scale.name!r} {list(scale.shape)} does not divide {x.name!r} {list(x.shape)}")
    if zero_point is not None:
        own = (1,) * (x.rank - zero_point.rank) + zero_point.shape
        if zero_point.rank > x.rank or any(n not in (1, count) for n, count in zip(own, grid)):
            raise ShapeError(
                f"zero_point {zero_point.name!r} {list(zero_point.shape)} is not one for each of the scales "
                f"{scale.name!r} {list(scale.shape)}"
            )
    return _scaled(self, x, scale, zero_point, kind, name)


def _scaled(
    self: Operations, x: Tensor, scale: Tensor, zero_point: Tensor | None, kind: DType, name: str | None
) -> Tensor:
    """Returns numbers less the zero points of their blocks, times the scales, in dimensions that tell blocks apart."""
    types = [t.dtype for t in (x, scale, zero_point) if t is not None]
    compute = float64 if float64 in (*types, kind) else float32
    grid = (1,) * (x.rank - scale.rank) + scale.shape
    cut = [count not in (1, n) for n, count in zip(x.shape, grid)]
    fine = [part for n, count, c in zip(x.shape, grid, cut) for part in ((count, n // count) if c else (n,))]

    def spread(t: Tensor) -> Tensor:
        own = (1,) * (x.rank - t.rank) + t.shape
        wide = t if t.dtype == compute else self.cast(t, compute)
        return self.reshape(wide, [part for n, c in zip(own, cut) for part in ((n, 1) if c else (n,))])

    values = self.reshape(x if x.dtype == compute else self.cast(x, compute), fine)
    if zero_point is not None:
        values = self.sub(values, spread(zero_point))
    return self.identity(self.reshape(self.mul(values, spread(scale)), x.shape), dtype=kind, name=name)

"""Block scaling, written with ops of the table: elements of few bits with a scale for each block of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegraph.dtypes import as_dtype, float32, float64
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
    x's shape divided by them.  Raises ShapeError where x has no whole blocks, or scale not one for each; DTypeError;
    AttributeValueError for sizes below 1.
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
    if any(n % b for n, b in zip(x.shape, blocks)):
        raise ShapeError(f"{x.name!r} {list(x.shape)} has no whole number of blocks of {sizes}; pad it")
    count = [n // b for n, b in zip(x.shape, blocks)]
    if list(scale.shape) != count:
        raise ShapeError(
            f"{x.name!r} {list(x.shape)} has {count} blocks of {sizes}, scale {scale.name!r} is {list(scale.shape)}"
        )
    compute = float64 if float64 in (x.dtype, scale.dtype, kind) else float32
    fine = [part for n, b in zip(count, blocks) for part in ((n, b) if b > 1 else (n,))]
    each = [part for n, b in zip(count, blocks) for part in ((n, 1) if b > 1 else (n,))]
    values = self.reshape(x if x.dtype == compute else self.cast(x, compute), fine)
    factors = self.reshape(scale if scale.dtype == compute else self.cast(scale, compute), each)
    return self.identity(self.reshape(self.mul(values, factors), x.shape), dtype=kind, name=name)

"""ATen's matrix products of few bits: weights of 8 and 4 bits with scales, 8-bit floats and integers on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fusegraph.dtypes import DType, bfloat16, float32, int8, int32
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.contraction import product
from fusegraph.frontends.torch.table import Call, aten
from fusegraph.graph import Tensor

#: How many columns the CPU's packed weights of 4 bits have in a block, by what torch says the CPU can.
_CPU_BLOCKS = {"AVX512": 64, "AVX2": 32}
#: Rows and columns of a tile of the packed weights of tensor cores, and the lanes that share one.
_TILE_N, _TILE_K, _LANES = 8, 16, 32
#: `torch.nn.functional.ScalingType` of one scale, of one for each row, and of one for 128 terms of each row, or of 128
#: rows: terms and rows of a block.
_TENSOR_WISE, _ROW_WISE, _BLOCK_OF_ROW, _BLOCK_OF_ROWS = 0, 1, 4, 5
_BLOCK = 128


@aten("_int_mm.default")
def _int_mm(c: Call, a: Tensor, b: Tensor) -> Tensor:
    return c.graph.matmul(a, b, dtype=int32)


@aten("_weight_int8pack_mm.default")
def _int8pack_mm(c: Call, x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """Multiplies by a weight (columns, terms) with a scale for each column."""
    if w.dtype != int8:
        raise NotSupportedError(f"a weight of {w.dtype}, not int8")
    sums = product(c, x, c.cast(w, x.dtype).transpose((1, 0)), float32)
    return c.cast(c.graph.mul(sums, c.cast(scales, float32)))


# ---- weights of 4 bits


def _grouped(c: Call, x: Tensor, q: Tensor, group: int, scales: Tensor, zeros: Tensor) -> Tensor:
    """Multiplies by numbers 0 to 15 (columns, terms), less 8, times a scale, plus a zero point: (groups, columns)."""
    columns, terms = q.shape
    fine = (columns, terms // group, group)
    each = [c.cast(t, float32).transpose((1, 0)).reshape((*fine[:2], 1)) for t in (scales, zeros)]
    numbers = c.graph.sub(c.cast(q, float32), 8.0).reshape(fine)
    w = c.graph.add(c.graph.mul(numbers, each[0]), each[1]).reshape((columns, terms))
    return c.cast(product(c, x, c.cast(w, x.dtype).transpose((1, 0)), c.dtype))


def _halves(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and the zero points of pairs of them."""
    scales, zeros = (pairs[:, :, k : k + 1].reshape(pairs.shape[:2]) for k in range(2))
    return scales, zeros


def _of_tiles(c: Call, packed: Tensor) -> Tensor:
    """Returns the numbers (columns, terms) of words as tensor cores take them.

    A word has a lane's numbers of two tiles: of the terms 8 a + 2 lane + b, from a = 0 to 3, first all with b = 0.
    """
    tiles, blocks, lanes, words = packed.shape
    if packed.dtype != int32 or lanes != _LANES:
        raise NotSupportedError(f"a packed weight of {packed.dtype} {list(packed.shape)}")
    if c.form.device.startswith("cuda") and torch.version.hip:
        raise NotSupportedError("a weight packed for AMD's matrix cores")
    shape = (tiles, blocks, _TILE_N, lanes // _TILE_N, words, 2, 4)
    wide = c.graph.broadcast(packed.reshape((*shape[:5], 1, 1)), shape)
    first, last = (c.graph.gen_index(wide, axis=axis) for axis in (6, 5))
    fields = c.graph.add(c.graph.mul(first, 4), c.graph.mul(last, 16))
    numbers = c.graph.bitwise_and(c.graph.shift_right(wide, fields), 15)
    turned = numbers.transpose((0, 2, 1, 4, 6, 3, 5))
    return turned.reshape((tiles * _TILE_N, prod(shape) // (tiles * _TILE_N)))


@aten("_weight_int4pack_mm.default")
def _int4pack_mm(c: Call, x: Tensor, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    return _grouped(c, x, _of_tiles(c, packed), group, *_halves(pairs))


@aten("_weight_int4pack_mm_with_scales_and_zeros.default")
def _int4pack_mm_apart(c: Call, x: Tensor, packed: Tensor, group: int, scales: Tensor, zeros: Tensor) -> Tensor:
    return _grouped(c, x, _of_tiles(c, packed), group, scales, zeros)


@aten("_weight_int4pack_mm_for_cpu.default")
def _int4pack_mm_for_cpu(c: Call, x: Tensor, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Multiplies by a weight in blocks of columns: a block's first half in the low bits, its second in the high ones.

    Fewer columns than a block has lie in pairs.
    """
    able = torch.backends.cpu.get_cpu_capability()
    if able not in _CPU_BLOCKS:
        raise NotSupportedError(f"a weight packed for a CPU of {able}")
    (columns, half), block = packed.shape, _CPU_BLOCKS[able]
    if columns > block and columns % block:
        raise NotSupportedError(f"{columns} columns in blocks of {block}, of which the last is packed otherwise")
    terms, size = 2 * half, min(block, columns)
    bytes_ = packed.reshape((columns // size, terms, size // 2))
    apart = (1, size // 2) if columns >= block else (size // 2, 1)
    fields = (c.graph.bitwise_and(bytes_, 15), c.graph.shift_right(bytes_, 4))
    each = [f.reshape((columns // size, terms, *apart)) for f in fields]
    q = c.graph.concatenate(*each, axis=2 if columns >= block else 3)
    q = q.reshape((columns // size, terms, size)).transpose((0, 2, 1))
    return _grouped(c, x, q.reshape((columns, terms)), group, *_halves(pairs))


# ---- products of 8-bit floats


def _scaled(c: Call, a: Tensor, b: Tensor, scales: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Multiplies 8-bit floats, and what comes out by scales: one each, or one for each row and column."""
    sums = product(c, a, b, float32)
    for scale, shapes in zip(scales, _scales_behind(a, b)):
        if scale.dtype != float32 or scale.shape not in shapes:
            raise NotSupportedError(
                f"scales of {scale.dtype} {list(scale.shape)} for {list(a.shape)} times {list(b.shape)}: not one, or "
                "one for each row or column"
            )
        sums = c.graph.mul(sums, scale.reshape(()) if scale.size == 1 else scale)
    return c.cast(sums if bias is None else c.graph.add(sums, c.cast(bias, float32)))


def _scales_behind(a: Tensor, b: Tensor) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the shapes of scales by which sums are multiplied."""
    return ((), (1,), (1, 1), (a.shape[0], 1)), ((), (1,), (1, 1), (1, b.shape[1]))


def _scaled_blocks(c: Call, a: Tensor, b: Tensor, scales: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Multiplies 8-bit floats (rows, terms) and (terms, columns) with scales for blocks: of each row or 128 rows, and
    of each column or 128 columns, for each 128 terms.
    """
    narrow = c.dtype.itemsize <= 2
    dtype = bfloat16 if narrow else float32
    x, y = (_of_blocks(c, *both, dtype) for both in zip((a, b.transpose((1, 0))), scales))
    sums = c.graph.matmul(x, y.transpose((1, 0)), dtype=float32, compute_dtype=None if narrow else "tf32")
    return c.cast(sums if bias is None else c.graph.add(sums, c.cast(bias, float32)))


def _of_blocks(c: Call, codes: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """Returns codes (rows, terms) times their scales: for each 128 terms of a row, or of 128 rows."""
    rows, terms = codes.shape
    for block in (1, _BLOCK):
        if scale.dtype == float32 and scale.shape == (-(-rows // block), -(-terms // _BLOCK)):
            return c.graph.block_scale_dequantize(codes, scale, (block, _BLOCK), dtype)
    raise NotSupportedError(
        f"scales of {scale.dtype} {list(scale.shape)} for {list(codes.shape)}: not one, one for each row or column, or "
        f"one for each {_BLOCK} terms of one or of {_BLOCK}"
    )


@aten("_scaled_mm.default")
def _scaled_mm(
    c: Call,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Tensor:
    if scale_result is not None:
        raise NotSupportedError("a scale of the result")
    if all(scale.shape in shapes for scale, shapes in zip((scale_a, scale_b), _scales_behind(a, b))):
        return _scaled(c, a, b, (scale_a, scale_b), bias)
    of_columns = scale_b.transpose((1, 0)) if scale_b.rank == 2 else scale_b
    return _scaled_blocks(c, a, b, (scale_a, of_columns), bias)


@aten("_scaled_mm_v2.default")
def _scaled_mm_by_recipes(
    c: Call,
    a: Tensor,
    b: Tensor,
    scales_a: Sequence[Tensor],
    recipes_a: Sequence[int],
    swizzles_a: Sequence[int],
    scales_b: Sequence[Tensor],
    recipes_b: Sequence[int],
    swizzles_b: Sequence[int],
    bias: Tensor | None,
    *_: Any,
) -> Tensor:
    recipes = (*recipes_a, *recipes_b)
    if len(recipes) != 2 or not {*recipes} <= {_TENSOR_WISE, _ROW_WISE, _BLOCK_OF_ROW, _BLOCK_OF_ROWS}:
        raise NotSupportedError(f"scaling by the recipes {list(recipes)}: not one scale, one for each row or for 128")
    scales = (*scales_a, *scales_b)
    if {*recipes} <= {_TENSOR_WISE, _ROW_WISE}:
        return _scaled(c, a, b, scales, bias)
    every = [_lines_first(c, *both, -(-a.shape[1] // _BLOCK)) for both in zip(scales, recipes)]
    return _scaled_blocks(c, a, b, every, bias)


def _lines_first(c: Call, scale: Tensor, recipe: int, blocks: int) -> Tensor:
    """Returns scales (rows or columns, blocks of terms): torch has those of 128 of them transposed, and blocks of terms
    up to a multiple of four.
    """
    if recipe != _BLOCK_OF_ROWS or scale.rank != 2:
        return scale
    return c.graph.slice(scale, [0, 0], [blocks, scale.shape[1]]).transpose((1, 0))

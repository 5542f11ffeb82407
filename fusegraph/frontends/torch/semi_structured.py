"""torch's products with semi-structured sparse matrices: two of every four neighbours, compressed as CUTLASS does it.

What cuSPARSELt compresses is of a layout of its own; torch multiplies that.
"""

from __future__ import annotations

from typing import Any

from fusegraph.dtypes import bfloat16, float16, int8, int16, int32
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.contraction import product
from fusegraph.frontends.torch.table import Call, aten
from fusegraph.graph import Tensor

#: Terms whose places a word of 16 bits has, and how many bits each; rows and words that are stored together.
_TERMS, _BITS, _ROWS, _WORDS = 16, 2, 32, 2


def _whole(c: Call, packed: Tensor, meta: Tensor) -> Tensor:
    """Returns the matrix (rows, terms) whose values and metadata these are.

    The words of 32 rows and two columns lie together: rows 8 apart are neighbours, of which the second of a pair
    changes places with the next column.
    """
    rows, terms = packed.shape[0], 2 * packed.shape[1]
    if packed.dtype not in (float16, bfloat16) or meta.dtype != int16:
        raise NotSupportedError(f"a sparse matrix of {packed.dtype} with metadata of {meta.dtype}")
    if rows % _ROWS or terms % (_TERMS * _WORDS) or meta.size * _TERMS != rows * terms:
        raise NotSupportedError(f"metadata {list(meta.shape)} of a sparse matrix {[rows, terms]}")
    shape = (terms // _TERMS // _WORDS, rows // _ROWS, 8, 2, _WORDS, 2)
    words = meta.reshape(shape).transpose((1, 3, 5, 2, 0, 4)).reshape((rows, terms // _TERMS, 1))
    wide = c.graph.broadcast(c.cast(words, int32), (rows, terms // _TERMS, _TERMS // 2))
    fields = c.graph.mul(c.graph.gen_index(wide, axis=2), _BITS)
    places = c.graph.cast(c.graph.bitwise_and(c.graph.shift_right(wide, c.graph.cast(fields, int32)), 3), int8)
    return c.graph.sparse_2_4(packed, places.reshape(packed.shape))


@aten("_sparse_semi_structured_mm.default")
def _mm(c: Call, packed: Tensor, meta: Tensor, x: Tensor, *, out_dtype: Any = None) -> Tensor:
    return c.cast(product(c, _whole(c, packed, meta), x))


@aten("_sparse_semi_structured_addmm.default")
def _addmm(
    c: Call,
    bias: Tensor,
    packed: Tensor,
    meta: Tensor,
    x: Tensor,
    *,
    alpha: float = 1,
    beta: float = 1,
    out_dtype: Any = None,
) -> Tensor:
    if alpha != 1 or beta != 1:
        raise NotSupportedError(f"a sparse product times {alpha} and a bias times {beta}")
    result = c.cast(product(c, _whole(c, packed, meta), x))
    return c.apply("add", result, bias.reshape((-1, 1)) if bias.rank == 1 else bias)


@aten("semi_structured.cutlass_mm.default")
def _cutlass_mm(
    c: Call,
    x: Tensor,
    packed: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    rows: int,
    least_rows: int,
    least_columns: int,
    turned: bool,
) -> Tensor:
    """Multiplies a matrix, of which some last rows and terms may only fill it up, by x or, if it is turned, by x^T."""
    whole, terms = _whole(c, packed, meta), x.shape[1 if turned else 0]
    if whole.shape != (rows, terms):
        whole = c.graph.slice(whole, (0, 0), (rows, terms))
    bias = bias if bias is None or bias.shape == (rows,) else c.graph.slice(bias, (0,), (rows,))
    if turned:
        result = c.cast(product(c, x, whole.transpose((1, 0))))
        return result if bias is None else c.apply("add", result, bias)
    result = c.cast(product(c, whole, x))
    return result if bias is None else c.apply("add", result, bias.reshape((rows, 1)))

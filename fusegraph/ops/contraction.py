"""Sums of products, the anchors of the contraction and direct convolutions: what all have in common, and matmul."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, as_dtype, float8_e4m3, float8_e5m2, float32, promote
from fusegraph.errors import DTypeError, ShapeError
from fusegraph.layout import broadcast
from fusegraph.ops.base import Array, Attributes, Kind, Op, Role, TensorType, Types, register
from fusegraph.ops.reduction import summed
from fusegraph.ops.reverse import Reverse, factor

#: Values of compute_dtype, of a graph or of a contraction, that are float32 with less precise products or sums: float32
#: operands rounded to tf32; sums of fp8 products as the tensor cores make them (cuDNN's name).
TF32, FAST_FP8 = "tf32", "fast_float_for_fp8"
COMPUTE_DTYPES = (TF32, FAST_FP8)
#: The words of the attribute compute_dtype.
PRECISIONS = (None, "float32", *COMPUTE_DTYPES)


def accumulator_result(types: Types, dtype: DType | None) -> DType:
    """Returns the result dtype of a contraction: ``dtype`` if given, else the promoted operand dtype.

    For operands of 8 bits and integers of 16 the default is the accumulator's: int32 for integers and bool, float32 for
    fp8, as a sum of products would rarely fit back.  Raises DTypeError.
    """
    common = promote(types[0].dtype, types[1].dtype)
    if dtype is not None:
        if common.is_float and not dtype.is_float:
            raise DTypeError(f"a sum of {common} products cannot be stored as {dtype}; cast the result")
        return dtype
    return summed(common)


def operand_precision(types: Types, compute_dtype: Any) -> str | None:
    """Returns the attribute compute_dtype of a contraction in canonical form.

    "tf32" where float32 operands may be rounded to it, "fast_float_for_fp8" where tensor cores may sum up fp8 products,
    else None.  Operands of other dtypes are multiplied as they are, whatever was asked for.
    """
    operands = {t.dtype for t in types[:2]}
    if compute_dtype == TF32 and promote(types[0].dtype, types[1].dtype) == float32:
        return TF32
    return FAST_FP8 if compute_dtype == FAST_FP8 and operands <= {float8_e4m3, float8_e5m2} else None


# ---- matmul


def _matmul_normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    return {**attributes, "compute_dtype": operand_precision(types, attributes["compute_dtype"])}


def _matmul_infer(types: Types, attributes: Attributes) -> TensorType:
    a, b = types[0].shape, types[1].shape
    if len(a) < 2 or len(b) < 2:
        raise ShapeError("matmul takes tensors of at least 2 dimensions (..., M, K) and (..., K, N)")
    if a[-1] != b[-2]:
        raise ShapeError(f"the inner sizes differ: {a[-1]} columns against {b[-2]} rows")
    try:
        batch = broadcast([a[:-2], b[:-2]])
    except ShapeError:
        raise ShapeError(f"the batch dimensions {list(a[:-2])} and {list(b[:-2])} do not broadcast") from None
    return TensorType((*batch, a[-2], b[-1]), accumulator_result(types, attributes["dtype"]))


def widen(x: Array) -> Array:
    """Returns integers as int64, whose sums only `wrapped` wraps around; floats are float64 already."""
    return x if x.dtype.kind == "f" else x.astype(np.int64)


def wrapped(total: Array, a: Array, b: Array, dtype: Any) -> Array:
    """Returns sums of integer products modulo 2^64 if an operand or the result has 64 bits, else modulo 2^32."""
    wide = 8 in (a.dtype.itemsize, b.dtype.itemsize) or (dtype is not None and as_dtype(dtype).bits == 64)
    return total if total.dtype.kind == "f" or wide else total.astype(np.int32)


def _matmul_reference(a: Array, b: Array, dtype: Any = None, compute_dtype: str | None = None) -> Array:
    with np.errstate(all="ignore"):
        return wrapped(np.asarray(np.matmul(widen(a), widen(b))), a, b, dtype)


def _by_matrices(at: Reverse, a: Any, b: Any, dtype: Any, compute_dtype: str | None) -> Any:
    g, loss = at.graph, factor(at, a, b)

    def product(x: Any, y: Any, like: Any) -> Any:
        return g.matmul(x, y, dtype=summed(like.dtype), compute_dtype=compute_dtype)

    def turned(x: Any) -> Any:
        return g.transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])

    def by_second() -> Any:
        left, right = a, loss
        if b.size == b.shape[-2] * b.shape[-1] and left.rank > 2:  # one matrix for the whole batch: its rows are joined
            left = (
                g.broadcast(left, (*right.shape[:-1], left.shape[-1])) if left.shape[:-2] != right.shape[:-2] else left
            )
            left, right = (g.reshape(x, [prod(x.shape[:-1]), x.shape[-1]]) for x in (left, right))
        return product(turned(left), right, b)

    return lambda: product(loss, turned(b), a), by_second


register(
    Op(
        name="matmul",
        kind=Kind.CONTRACTION,
        role=Role.MATMUL,
        operands=("a", "b"),
        attributes={"dtype": None, "compute_dtype": None},
        words={"compute_dtype": PRECISIONS},
        normalize=_matmul_normalize,
        infer=_matmul_infer,
        reference=_matmul_reference,
        gradient=_by_matrices,
        products=lambda types, _: types[0].shape[-1],
        cudnn="matmul",
        doc="""Matrix product of a (..., M, K) and b (..., K, N): (..., M, N).  Batch dimensions broadcast as in NumPy.

        Accumulates in float32, for float64 in float64; integers in 64 bits if an operand or dtype has as many, else
        in 32, wrapping around.  dtype is that of the result: by default the promoted operand dtype, int32 for integers
        of 8 and 16 bits, float32 for fp8.  compute_dtype "tf32" lets float32 operands be rounded to the 11 significant
        bits of tf32 before they are multiplied; "fast_float_for_fp8" leaves sums of fp8 products to the tensor cores,
        some of which keep 14 bits, instead of adding them up in float32 after 128 products at most (default: what the
        graph says).""",
    )
)

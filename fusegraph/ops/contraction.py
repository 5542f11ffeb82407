"""Matrix products and convolutions: sums of products, the anchors of the contraction and window kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, as_dtype, float32, int32, int64, promote
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops.base import Kind, Op, TensorType, register

Array = np.ndarray[Any, Any]
Pads = tuple[tuple[int, int], ...]


def accumulator_result(types: tuple[TensorType, ...], dtype: Any) -> DType:
    """Result dtype of a contraction: the promoted operand dtype, or the accumulator's for operands of 8 bits.

    int8, uint8 and bool accumulate in int32 and fp8 in float32: a sum of products would rarely fit back.
    """
    common = promote(types[0].dtype, types[1].dtype)
    if dtype is not None:
        wanted = as_dtype(dtype)
        if common.is_float and not wanted.is_float:
            raise DTypeError(f"a sum of {common} products cannot be stored as {wanted}; cast the result")
        return wanted
    if common.itemsize == 1:
        return float32 if common.is_float else int32
    return common


# ---- matmul


def _matmul_infer(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> TensorType:
    a, b = types[0].shape, types[1].shape
    if len(a) < 2 or len(b) < 2:
        raise ShapeError("matmul takes tensors of at least 2 dimensions (..., M, K) and (..., K, N)")
    if a[-1] != b[-2]:
        raise ShapeError(f"the inner sizes differ: {a[-1]} columns against {b[-2]} rows")
    try:
        batch = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ShapeError(f"the batch dimensions {list(a[:-2])} and {list(b[:-2])} do not broadcast") from None
    return TensorType((*batch, a[-2], b[-1]), accumulator_result(types, attributes["dtype"]))


def _widen(x: Array) -> Array:
    """Integers as int64, in which sums are wrapped by `_wrapped` alone; floats are float64 already."""
    return x if x.dtype.kind == "f" else x.astype(np.int64)


def _wrapped(total: Array, a: Array, b: Array, dtype: Any) -> Array:
    """Sums of integer products modulo the accumulator: 2^64 if an operand or the result is int64, else 2^32."""
    if total.dtype.kind == "f" or np.int64 in (a.dtype, b.dtype) or (dtype is not None and as_dtype(dtype) == int64):
        return total
    return total.astype(np.int32)


def _matmul_reference(a: Array, b: Array, dtype: Any = None) -> Array:
    with np.errstate(all="ignore"):
        return _wrapped(np.asarray(np.matmul(_widen(a), _widen(b))), a, b, dtype)


register(
    Op(
        name="matmul",
        kind=Kind.CONTRACTION,
        operands=("a", "b"),
        attributes={"dtype": None},
        infer=_matmul_infer,
        reference=_matmul_reference,
        cudnn="matmul",
        doc="""Matrix product of a (..., M, K) and b (..., K, N): (..., M, N).  Batch dimensions broadcast as in NumPy.

        Accumulates in float32, for float64 in float64; integers in int64 if an operand or dtype is, else in int32,
        wrapping around.  dtype is that of the result: by default the promoted operand dtype, int32 for 8-bit
        integers, float32 for fp8.""",
    )
)


# ---- conv_fprop


def spread(value: Any, rank: int, what: str, lowest: int) -> tuple[int, ...]:
    """One number for every spatial dimension, given one number or a sequence of ``rank``."""
    values = [value] * rank if hasattr(value, "__index__") else list(value) if isinstance(value, Sequence) else None
    if (
        values is None
        or len(values) != rank
        or any(isinstance(v, bool) or not hasattr(v, "__index__") or v.__index__() < lowest for v in values)
    ):
        raise AttributeValueError(f"{what} is an integer of at least {lowest}, or {rank} of them, got {value!r}")
    return tuple(v.__index__() for v in values)


def spread_padding(value: Any, rank: int) -> Pads:
    """((before, after), ...) for every spatial dimension, given a number, one number a dimension, or pairs."""
    if isinstance(value, Sequence) and len(value) == rank and all(isinstance(v, Sequence) for v in value):
        pairs = [spread(v, 2, "padding (before, after)", 0) for v in value]
        return tuple((before, after) for before, after in pairs)
    return tuple((p, p) for p in spread(value, rank, "padding", 0))


def _conv_normalize(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> dict[str, Any]:
    rank = len(types[0].shape) - 2
    if rank not in (1, 2, 3):
        raise ShapeError("conv_fprop takes x of 3, 4 or 5 dimensions (N, C, spatial...)")
    if attributes["mode"] not in ("cross_correlation", "convolution"):
        raise AttributeValueError(f"mode is 'cross_correlation' or 'convolution', got {attributes['mode']!r}")
    groups = attributes["groups"]
    if groups is not None and (isinstance(groups, bool) or not hasattr(groups, "__index__") or groups.__index__() < 1):
        raise AttributeValueError(f"groups is a positive integer, got {groups!r}")
    shape_w = types[1].shape
    if groups is None and len(shape_w) == rank + 2:
        groups = max(types[0].shape[1] // shape_w[1], 1) if shape_w[1] else 1
    return {
        **attributes,
        "stride": spread(attributes["stride"], rank, "stride", 1),
        "dilation": spread(attributes["dilation"], rank, "dilation", 1),
        "padding": spread_padding(attributes["padding"], rank),
        "groups": groups,
    }


def _conv_infer(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> TensorType:
    x, w = types[0].shape, types[1].shape
    if len(w) != len(x):
        raise ShapeError(f"x and w have the same number of dimensions, got {len(x)} and {len(w)}")
    groups = attributes["groups"]
    if w[1] * groups != x[1]:
        raise ShapeError(f"{x[1]} channels of x are not {groups} groups of the filter's {w[1]} channels")
    if w[0] % groups:
        raise ShapeError(f"{w[0]} filters do not split into {groups} groups")
    spatial = []
    for axis, (size, taps) in enumerate(zip(x[2:], w[2:])):
        before, after = attributes["padding"][axis]
        reach = (taps - 1) * attributes["dilation"][axis] + 1
        if taps < 1 or size + before + after < reach:
            raise ShapeError(
                f"spatial dimension {axis}: a filter reaching over {reach} does not fit "
                f"{size} + padding {before} + {after}"
            )
        spatial.append((size + before + after - reach) // attributes["stride"][axis] + 1)
    return TensorType((x[0], w[0], *spatial), accumulator_result(types, attributes["dtype"]))


def _conv_reference(
    x: Array,
    w: Array,
    *,
    stride: tuple[int, ...],
    padding: Pads,
    dilation: tuple[int, ...],
    groups: int,
    mode: str,
    dtype: Any = None,
) -> Array:
    rank = x.ndim - 2
    taps = _widen(w)
    if mode == "convolution":
        taps = np.flip(taps, axis=tuple(range(2, 2 + rank)))
    padded = np.pad(_widen(x), ((0, 0), (0, 0), *padding))
    out = tuple((padded.shape[2 + d] - (w.shape[2 + d] - 1) * dilation[d] - 1) // stride[d] + 1 for d in range(rank))
    n, k, channels = x.shape[0], w.shape[0], w.shape[1]
    total = np.zeros((n, groups, k // groups, prod(out)), dtype=padded.dtype)
    grouped_x = padded.reshape(n, groups, channels, *padded.shape[2:])
    grouped_w = taps.reshape(groups, k // groups, channels, *w.shape[2:])
    with np.errstate(all="ignore"):
        for tap in np.ndindex(*w.shape[2:]):
            window: tuple[Any, ...] = (
                ...,
                *(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in zip(tap, dilation, out, stride)),
            )
            total += np.matmul(grouped_w[(..., *tap)], grouped_x[window].reshape(n, groups, channels, prod(out)))
    return _wrapped(total.reshape(n, k, *out), x, w, dtype)


register(
    Op(
        name="conv_fprop",
        kind=Kind.CONTRACTION,
        operands=("x", "w"),
        attributes={
            "stride": 1,
            "padding": 0,
            "dilation": 1,
            "groups": None,
            "mode": "cross_correlation",
            "dtype": None,
        },
        normalize=_conv_normalize,
        infer=_conv_infer,
        reference=_conv_reference,
        cudnn="conv_fprop",
        keeps_layout=True,
        doc="""Convolution of x (N, C, spatial...) with w (K, C / groups, taps...): (N, K, spatial...), 1-D to 3-D.

        stride, dilation: an integer or one a spatial dimension.  padding: an integer, one a dimension, or (before,
        after) pairs; the padding is zero.  groups: by default C divided by the filter's channels.  mode "convolution"
        flips the filter, "cross_correlation" does not.  The result lies in memory as x does (NHWC in, NHWC out).
        dtype and the accumulator are as for matmul.""",
    )
)

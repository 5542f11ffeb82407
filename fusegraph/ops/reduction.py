"""Reductions along axes: sums, products, extremes and norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, as_dtype, float32, int32, int64
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops.base import Kind, Op, TensorType, register

Array = np.ndarray[Any, Any]

#: mode -> (what is done to each element, how they are combined, what is done to the result).
MODES: dict[str, tuple[str, str, str]] = {
    "add": ("", "add", ""),
    "mul": ("", "mul", ""),
    "min": ("", "min", ""),
    "max": ("", "max", ""),
    "amax": ("abs", "max", ""),
    "avg": ("", "add", "mean"),
    "norm1": ("abs", "add", ""),
    "norm2": ("square", "add", "sqrt"),
}
#: Modes whose result is one of the elements, or its absolute value.
EXTREMES = frozenset({"min", "max", "amax"})


def normal_axes(axes: Any, rank: int) -> tuple[int, ...]:
    """Axes as sorted non-negative numbers; None is all of them.  Raises AttributeValueError."""
    if axes is None:
        return tuple(range(rank))
    given = (axes,) if isinstance(axes, (int, np.integer)) else axes
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise AttributeValueError(f"axes are None, an integer or several, got {axes!r}")
    result = []
    for axis in given:
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            raise AttributeValueError(f"an axis is an integer, got {axis!r}")
        if not -rank <= axis < rank:
            raise AttributeValueError(f"axis {axis} is not one of the {rank} axes")
        result.append(int(axis) % rank)
    if len(set(result)) < len(result):
        raise AttributeValueError(f"axes {axes!r} name an axis twice")
    return tuple(sorted(result))


def _normalize(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> dict[str, Any]:
    x = types[0]
    mode = attributes["mode"]
    if mode not in MODES:
        raise AttributeValueError(f"mode is one of {', '.join(MODES)}, got {mode!r}")
    if not isinstance(attributes["keepdims"], (bool, np.bool_)):
        raise AttributeValueError(f"keepdims is True or False, got {attributes['keepdims']!r}")
    dtype = attributes["dtype"]
    return {
        "mode": mode,
        "axes": normal_axes(attributes["axes"], len(x.shape)),
        "keepdims": bool(attributes["keepdims"]),
        "dtype": None if dtype is None else as_dtype(dtype),
    }


def _result(x: TensorType, mode: str, dtype: DType | None) -> DType:
    """The dtype of a result: the operand's, or that of the sum for operands of 8 bits, which would rarely hold it."""
    if x.dtype.is_bool:
        raise DTypeError("a reduction does not take bool; cast to int32 to count")
    if x.dtype.is_int and mode in ("avg", "norm2"):
        raise DTypeError(f"{mode} of {x.dtype} is not exact; cast to a float")
    if dtype is not None:
        if x.dtype.is_float != dtype.is_float or dtype.is_bool:
            raise DTypeError(f"{mode} of {x.dtype} cannot be stored as {dtype}; cast the result")
        if x.dtype.is_int and mode in EXTREMES and dtype != x.dtype:
            raise DTypeError(f"{mode} of {x.dtype} is {x.dtype}; cast the result to {dtype}")
        if dtype.is_int and dtype.itemsize < 4 and mode not in EXTREMES:
            raise DTypeError(f"{mode} of integers is summed in int32 or int64; cast the result to {dtype}")
        return dtype
    if mode in EXTREMES or x.dtype.itemsize > 1:
        return x.dtype
    return float32 if x.dtype.is_float else int32


def _infer(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> TensorType:
    x, normal = types[0], _normalize(types, attributes)
    axes, mode = normal["axes"], normal["mode"]
    if mode in EXTREMES and any(x.shape[d] == 0 for d in axes):
        raise ShapeError(f"{mode} of no elements: axis {next(d for d in axes if x.shape[d] == 0)} has size 0")
    kept = (1 if d in axes else size for d, size in enumerate(x.shape))
    dropped = (size for d, size in enumerate(x.shape) if d not in axes)
    return TensorType(tuple(kept if normal["keepdims"] else dropped), _result(x, mode, normal["dtype"]))


_COMBINE: dict[str, Callable[..., Array]] = {"add": np.sum, "mul": np.prod, "min": np.min, "max": np.max}


def _reference(x: Array, mode: str, axes: tuple[int, ...], keepdims: bool, dtype: DType | None) -> Array:
    before, combine, after = MODES[mode]
    with np.errstate(all="ignore"):
        exact = x.astype(np.int64) if x.dtype.kind in "iu" and mode not in EXTREMES else x
        each = np.abs(exact) if before == "abs" else exact * exact if before == "square" else exact
        total = np.asarray(_COMBINE[combine](each, axis=axes, keepdims=keepdims))
        if after == "mean":
            total = total / np.float64(prod(x.shape[d] for d in axes))
        elif after == "sqrt":
            total = np.sqrt(total)
        if x.dtype.kind in "iu" and mode not in EXTREMES and int64 not in (dtype, _named(x)):
            total = np.asarray(total).astype(np.int32)
    return np.asarray(total)


def _named(x: Array) -> DType | None:
    return int64 if x.dtype == np.int64 else None


register(
    Op(
        name="reduction",
        kind=Kind.REDUCTION,
        operands=("x",),
        attributes={"mode": "add", "axes": None, "keepdims": True, "dtype": None},
        normalize=_normalize,
        infer=_infer,
        reference=_reference,
        cudnn="reduction",
        doc="""Combines all elements along axes (None: along all of them), which stay as dimensions of size 1 or, with
        keepdims=False, go.

        mode is add, mul, min, max, amax (the largest absolute value), avg, norm1 (sum of absolute values) or norm2
        (square root of the sum of squares).  Of no elements: add, norm1 and norm2 are 0, mul is 1, avg is NaN; min,
        max and amax raise ShapeError, as NumPy does.  NaN where an element is NaN.

        Floats are summed in float32, or float64 for float64 and graphs that compute in it.  Integers are exact: min,
        max and amax (where -128 of int8 stays -128) in their own dtype; sums and products in int32, or int64 if the
        operand or dtype is, wrapping around; avg and norm2 take floats only.  dtype is that of the result: by default
        the operand's, but int32 for sums of 8-bit integers and float32 for those of fp8.""",
    )
)

"""Reductions along axes: sums, products, extremes and norms."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, bool_, float32, int32, int64
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops.base import Array, Attributes, Kind, Op, Role, TensorType, Types, register
from fusegraph.ops.modes import COMPOSED, MODES, Mode, reduced_shape
from fusegraph.ops.reverse import Reverse, kept


def normal_axes(axes: Any, rank: int) -> tuple[int, ...]:
    """Returns axes as sorted non-negative numbers; None is all of them.  Raises AttributeValueError."""
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


def _normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    x, mode = types[0], MODES[attributes["mode"]]
    correction = attributes["correction"]
    if not isfinite(correction):
        raise AttributeValueError(f"correction is a finite number, got {correction!r}")
    if correction and not mode.corrects:
        raise AttributeValueError(f"correction is for mode var, this is {mode.name}")
    axes = normal_axes(attributes["axes"], len(x.shape))
    if mode.position and not axes:
        raise AttributeValueError(f"{mode.name} needs an axis")
    return {**attributes, "axes": axes, "correction": float(correction)}


def result_dtype(x: TensorType, mode: Mode, dtype: DType | None) -> DType:
    """Returns the dtype of a result: ``dtype`` if given, else the operand's, or `summed` of it for sums.

    Raises DTypeError for a dtype that a mode does not take or give.
    """
    if mode.truth:
        if dtype not in (None, bool_):
            raise DTypeError(f"{mode.name} is True or False; cast the result to {dtype}")
        return bool_
    if x.dtype.is_bool:
        raise DTypeError(f"{mode.name} does not take bool; cast to int32 to count")
    if mode.position:
        if dtype not in (None, int32, int64):
            raise DTypeError(f"{mode.name} is an int32 or int64; cast the result to {dtype}")
        return dtype or int64
    if x.dtype.is_int and mode.floats:
        raise DTypeError(f"{mode.name} of {x.dtype} is not exact; cast to a float")
    if dtype is not None:
        if x.dtype.is_float != dtype.is_float or dtype.is_bool:
            raise DTypeError(f"{mode.name} of {x.dtype} cannot be stored as {dtype}; cast the result")
        if x.dtype.is_int and mode.selects and dtype != x.dtype:
            raise DTypeError(f"{mode.name} of {x.dtype} is {x.dtype}; cast the result to {dtype}")
        if dtype.is_int and dtype.itemsize < 4 and not mode.selects:
            raise DTypeError(f"{mode.name} of integers is summed in 32 or 64 bits; cast the result to {dtype}")
        return dtype
    if mode.selects:
        return x.dtype
    return summed(x.dtype)


def summed(dtype: DType) -> DType:
    """Returns the default dtype of sums: float32 for 8-bit floats, int32 for integers of 8 and 16 bits."""
    if dtype.is_float:
        return dtype if dtype.bits > 8 else float32
    return dtype if dtype.bits >= 32 else int32


def _infer(types: Types, attributes: Attributes) -> TensorType:
    x, axes, mode = types[0], attributes["axes"], MODES[attributes["mode"]]
    if (mode.selects or mode.position) and any(x.shape[d] == 0 for d in axes):
        raise ShapeError(f"{mode.name} of no elements: axis {next(d for d in axes if x.shape[d] == 0)} has size 0")
    shape = reduced_shape(x.shape, axes, attributes["keepdims"])
    return TensorType(shape, result_dtype(x, mode, attributes["dtype"]))


def _reference(
    x: Array, mode: str, axes: tuple[int, ...], keepdims: bool, dtype: DType | None, correction: float = 0.0
) -> Array:
    with np.errstate(all="ignore"):
        return MODES[mode].reference(x, axes, keepdims, dtype, correction)


def _expand(
    write: Any, x: Any, mode: str, axes: tuple[int, ...], keepdims: bool, dtype: DType | None, correction: float
) -> Any:
    def reduce(part: str, operand: Any, how: str, keep: bool = True, **more: Any) -> Any:
        return write("reduction", part, operand, mode=how, axes=axes, keepdims=keep, **more)

    return COMPOSED[mode].expand(write, reduce, x, axes, keepdims, dtype, correction)


def _gradient(at: Reverse, x: Any, mode: str, axes: tuple[int, ...], **_: Any) -> Any:
    if (slope := MODES[mode].slope) is None:
        return NotImplemented
    return slope(at, x, kept(at, at.loss, x.shape, axes), kept(at, at.y, x.shape, axes), axes)


register(
    Op(
        name="reduction",
        kind=Kind.REDUCTION,
        role=Role.REDUCE,
        operands=("x",),
        attributes={"mode": "add", "axes": None, "keepdims": True, "dtype": None, "correction": 0},
        words={"mode": MODES.keys()},
        composite=lambda attributes: attributes["mode"] in COMPOSED,
        expand=_expand,
        normalize=_normalize,
        infer=_infer,
        reference=_reference,
        gradient=_gradient,
        cudnn="reduction",
        doc="""Combines all elements along axes (None: along all of them), which stay as dimensions of size 1 or, with
        keepdims=False, go.

        mode is add, mul, mul_no_zeros (of those that are not 0), min, max, amax (the largest absolute value), avg,
        norm1 (sum of absolute values), norm2 (square root of the sum of squares), logaddexp (logarithm of the sum of
        exponentials), var (mean of squared differences from the mean; their sum is divided by the number of elements
        less correction), argmin or argmax (where the first smallest or largest is, NaN being both: along several axes
        counted in row-major order), any or all (whether one is, or all are, not 0).  Of no elements: add, norm1 and
        norm2 are 0, mul and mul_no_zeros are 1, any is False, all is True, logaddexp is minus infinity, avg and var are
        NaN; the others raise ShapeError, as NumPy does.  NaN where an element is NaN.

        Floats are summed in float32, or float64 for float64 and graphs that compute in it.  Integers are exact: min,
        max and amax (where -128 of int8 stays -128) in their own dtype; sums and products in 32 bits, or 64 if the
        operand or dtype has as many, wrapping around; avg, norm2, logaddexp and var take floats only.  dtype is that of
        the result: by default the operand's, but int32 for sums of integers of 8 and 16 bits and float32 for those of
        fp8; int64 for argmin and argmax, which may be int32; bool for any and all, which alone take bool.""",
    )
)

"""Conversions between dtypes on reference arrays, with the meaning of ``convert`` in ``codegen/device/types.cuh``.

A reference array of a float dtype is float64 and holds only values of that dtype; those of integers and bool are in
their own NumPy dtype, those of integers of fewer than 8 bits in that of their carrier.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fusegraph.dtypes import BY_NUMPY, DType, float4_e2m1, float8_e8m0, float16, float32, float64
from fusegraph.errors import DTypeError, shown
from fusegraph.ops.base import Array


def to_reference(array: Array, dtype: DType) -> Array:
    """Returns an array of a dtype's values as a reference array, exactly; see `reference_type`."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.asarray(array).astype(reference_type(dtype), copy=False)


def reference_type(dtype: DType) -> np.dtype[Any]:
    """Returns the NumPy type of reference arrays of a dtype."""
    return np.dtype(np.float64) if dtype.is_float else (dtype.carrier or dtype).numpy


def from_reference(array: Array, dtype: DType) -> Array:
    """Returns a reference array in the dtype's own NumPy type, rounding floats that the dtype does not hold."""
    return (round_to(array, dtype) if dtype.is_float else array).astype(dtype.numpy, copy=False)


def round_to(array: Array, dtype: DType) -> Array:
    """Returns float64 values rounded to nearest even in a float dtype, as float64.

    Rounds once (a cast by way of float32, as ml_dtypes makes for its types, rounds twice).  What is too large becomes
    infinity or, in floats of 8 bits and fewer, the largest number.  Infinity, NaN and the sign of zero stay; where a
    dtype has no infinity, it becomes the largest number, and where zero has no sign, -0 becomes 0.  NaN becomes -0 in
    float4_e2m1, which has no NaN.  float8_e8m0 has nothing but powers of 2: see `_power`.
    """
    array = np.asarray(array, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype == float64:
            return array
        if dtype == float8_e8m0:
            return _power(array)
        if dtype in (float32, float16):
            return array.astype(dtype.numpy).astype(np.float64)
        info = ml_dtypes.finfo(dtype.numpy)
        rounded = _nearest(array, info)
        if dtype.saturates:
            clipped = np.asarray(np.clip(rounded, dtype.min, dtype.max))
            clipped = clipped if dtype.has_negative_zero else clipped + 0.0
            if dtype == float4_e2m1:
                clipped = np.where(np.isnan(clipped), -0.0, clipped)
            return np.where(np.isinf(array), array, clipped) if dtype.has_infinity else clipped
        return np.where(np.abs(rounded) > dtype.max, np.copysign(np.inf, rounded), rounded)


def _power(array: Array) -> Array:
    """Rounds to the nearest power of 2 in float8_e8m0, halfway up; NaN for what is not positive or too large."""
    mantissa, exponent = np.frexp(array)
    exponent = np.maximum(exponent - 1 + (mantissa >= 0.75), -127)
    valid = (array > 0) & (array < np.inf) & (exponent <= 127)
    return np.where(valid, np.ldexp(1.0, np.where(valid, exponent, 0)), np.nan)


def _nearest(array: Array, info: Any) -> Array:
    """Rounds as if exponents had no upper bound."""
    # |array| < 2**exponent; a number of that size has its last place at 2**(exponent - 1 - nmant).
    _, exponent = np.frexp(array)
    last_place = np.maximum(exponent - 1, info.minexp) - info.nmant
    return np.asarray(np.ldexp(np.rint(np.ldexp(array, -last_place)), last_place))


def limited(array: Array, dtype: DType, *, saturate: bool) -> Array:
    """Prepares float64 values for `round_to` in a cast to a float of 8 bits or fewer, as ``saturate`` says.

    If saturating (as casts to float4_e2m1 always are), infinity becomes the largest number.  Else whatever rounds to
    more than that becomes infinity, or NaN where the dtype has no infinity.
    """
    array = np.asarray(array, np.float64)
    if not dtype.saturates:
        return array
    if saturate or dtype == float4_e2m1:
        return np.asarray(np.clip(array, dtype.min, dtype.max))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        beyond = np.abs(_nearest(array, ml_dtypes.finfo(dtype.numpy))) > dtype.max
    return np.where(beyond, np.copysign(np.inf if dtype.has_infinity else np.nan, array), array)


def convert(array: Array, source: DType, target: DType, *, saturate: bool | None = None) -> Array:
    """Returns a reference array of one dtype as a reference array of another.

    To a float: rounds once to nearest even (see `round_to`; ``saturate`` is that of a cast, see `limited`).  Float to
    integer: truncates, saturates, NaN gives 0.  Integer to integer: wraps around.  To bool: x != 0, so NaN gives True.
    """
    array = to_reference(array, source)
    if target.is_bool:
        return np.asarray(array != 0)
    if target.is_float:
        wide = _integers_to_float64(array, target) if source.is_int else array
        return round_to(wide if saturate is None else limited(wide, target, saturate=saturate), target)
    if not source.is_float:
        return _wrapped(array, target)
    low, high = int(target.min), int(target.max)
    whole = np.trunc(np.where(np.isnan(array), 0.0, array))
    # The largest int64 is no float64, but the next number is.
    inside = (whole >= float(low)) & (whole < float(high + 1))
    kind = reference_type(target)
    limit = np.where(whole < 0, np.array(low, kind), np.array(high, kind))
    return np.where(inside, np.where(inside, whole, 0.0).astype(kind), limit)


def unfit(array: Array, source: DType, target: DType) -> Array:
    """Returns the numbers of an array of one dtype that another has no place for, in one dimension.

    A float has none for finite numbers beyond its range, an integer none for fractions, NaN and numbers beyond, a bool
    none for numbers but 0 and 1.
    """
    numbers = np.ravel(to_reference(array, source))
    if target.is_bool:
        return np.asarray(numbers[(numbers != 0) & (numbers != 1)])
    if source.is_bool:
        return np.asarray(numbers[:0])
    if target.is_float:
        return np.asarray(numbers[np.isfinite(numbers) & ((numbers < target.min) | (numbers > target.max))])
    low, high = int(target.min), int(target.max)
    inside = (numbers >= low) & (numbers <= high)
    if source.is_float:  # the largest int64 is no float64, but the next number is
        inside = (numbers >= float(low)) & (numbers < float(high + 1)) & (numbers == np.trunc(numbers))
    return np.asarray(numbers[~inside])


def check_fits(label: str, value: Any, dtype: DType) -> None:
    """Raises DTypeError for numbers that a dtype has no place for; other values are for others to refuse."""
    try:
        array = np.asarray(value)
    except Exception:  # NumPy asks an object for its array
        return
    if array.dtype not in BY_NUMPY or not (wrong := unfit(array, BY_NUMPY[array.dtype], dtype)).size:
        return
    if dtype.is_bool:
        kind = "0 and 1"
    else:
        kind = f"{'integers' if dtype.is_int else 'numbers'} from {dtype.min} to {dtype.max}"
    raise DTypeError(f"{label}: {shown(wrong[0].item())} does not fit in {dtype}, whose values are {kind}")


def _wrapped(array: Array, target: DType) -> Array:
    """Wraps integers around to the target's bits."""
    found = array.astype(reference_type(target))
    if target.is_packed:
        top = np.array(-int(target.min), found.dtype)
        found = ((found & ((1 << target.bits) - 1)) ^ top) - top
    return np.asarray(found)


def _integers_to_float64(array: Array, target: DType) -> Array:
    """Returns integers as float64 such that rounding the result to ``target`` rounds the integer once.

    Integers of more than 53 bits are rounded to odd (the last bit kept records whether any bit was dropped), except for
    float64 itself.
    """
    if array.dtype.itemsize < 8 or target == float64:
        return array.astype(np.float64)
    dropped = 11
    kept = (array >> dropped) | ((array & ((1 << dropped) - 1)) != 0)
    return np.where(np.abs(array.astype(np.float64)) < 2.0**53, array, kept << dropped).astype(np.float64)

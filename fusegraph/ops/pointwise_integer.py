"""Pointwise ops of integers: quotients, bits and shifts, and numbers as other numbers of the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fusegraph.dtypes import ALL, DType, as_dtype
from fusegraph.errors import DTypeError
from fusegraph.ops.base import Array, Attributes, Role
from fusegraph.ops.convert import from_reference
from fusegraph.ops.pointwise import FUNCTION, pointwise

_integers = partial(pointwise, ulps=0, cudnn=False)


def _quotient(a: Array, b: Array) -> Array:
    divisor = np.where(b == 0, np.ones_like(b), b)
    down = np.floor_divide(a, divisor)
    up = (np.remainder(a, divisor) != 0) & ((a < 0) != (b < 0))
    return np.where(b == 0, np.zeros_like(a), down + up.astype(a.dtype))


_integers(
    "quotient",
    _quotient,
    "a / b of integers, rounded towards zero as C does; 0 where b is 0.  The quotient that belongs to mod.",
    FUNCTION,
    kinds=("int",),
)
for _name, _ufunc, _sign in (
    ("bitwise_and", np.bitwise_and, "&"),
    ("bitwise_or", np.bitwise_or, "|"),
    ("bitwise_xor", np.bitwise_xor, "^"),
):
    _truth = {"&": "{a} && {b}", "|": "{a} || {b}", "^": "{a} != {b}"}[_sign]
    _doc, _text = f"a {_sign} b, bit by bit.", f"{{a}} {_sign} {{b}}"
    _integers(_name, _ufunc, _doc, FUNCTION, Role.BITS, int=_text, bool=_truth)
_doc = "~x, every bit the other way."
_integers("bitwise_not", np.invert, _doc, FUNCTION, operands=("x",), int="{compute}(~{x})", bool="!{x}")


def _bits(a: Array) -> int:
    return int(8 * a.dtype.itemsize)


def _shift_left(a: Array, b: Array) -> Array:
    inside = (b >= 0) & (b < _bits(a))
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0).astype(a.dtype)), np.zeros_like(a))


def _shift_right(a: Array, b: Array) -> Array:
    inside = (b >= 0) & (b < _bits(a))
    shifted = np.right_shift(a, np.where(inside, b, _bits(a) - 1).astype(a.dtype))
    return np.where(inside | (a < 0), shifted, np.zeros_like(a))


_integers(
    "shift_left",
    _shift_left,
    "a << b without the bits that leave the type; 0 where b is negative or at least the number of bits.",
    FUNCTION,
    Role.BITS,
    kinds=("int",),
)
_integers(
    "shift_right",
    _shift_right,
    "a >> b, which keeps the sign; where b is negative or at least the number of bits: 0, or -1 for negative a.",
    FUNCTION,
    kinds=("int",),
)


def _of_these_bits(_: str, value: Any, source: DType, __: tuple[int, ...]) -> DType:
    """Returns a dtype of the operand's size, by default the unsigned integer."""
    if value is None:
        return next(d for d in ALL if d.is_int and d.min == 0 and d.bits == source.bits)
    dtype = as_dtype(value)
    if dtype.bits != source.bits or (dtype.is_bool and not source.is_bool):
        raise DTypeError(f"the bits of {source} are none of {dtype}")
    return dtype


def _bitcast(x: Array, dtype: DType, source: DType) -> Array:
    return from_reference(x, source).view(dtype.numpy)


def _reinterpreted(values: Attributes) -> str:
    return f"widen(reinterpret<{values['dtype'].ctype}>(convert<{values['source'].ctype}>({{x}})))"


_integers(
    "bitcast",
    _bitcast,
    """The number of another dtype that has the same bits as x: by default an unsigned integer.

    A NaN may become any other NaN of x's dtype first.  source is always x's dtype, whatever is given.""",
    FUNCTION,
    Role.BITCAST,
    operands=("x",),
    attributes={"dtype": (None, _of_these_bits), "source": (None, lambda name, value, dtype, shape: dtype)},
    gradient="the number that some bits mean is no function with a slope",
    float=_reinterpreted,
    int=_reinterpreted,
    bool=_reinterpreted,
)

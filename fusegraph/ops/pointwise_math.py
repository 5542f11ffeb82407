"""Pointwise arithmetic, rounding, elementary functions, comparisons, logic and selection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, int32
from fusegraph.errors import AttributeValueError
from fusegraph.ops.base import REQUIRED
from fusegraph.ops.pointwise import (
    Array,
    axis,
    binary,
    flag,
    optional_dtype,
    optional_number,
    pointwise,
    predicate,
    unary,
)

# NumPy's integer arithmetic wraps around, as math::wrapping_* do.

# ---- arithmetic

#: Traits of what is one instruction, and of sums and products.
EASY: dict[str, Any] = {"cheap": True, "finite": True}
SUM: dict[str, Any] = {**EASY, "commutes": True}

binary("add", np.add, "a + b", float="{a} + {b}", int="math::wrapping_add({a}, {b})", cudnn="add", **SUM)
binary("sub", np.subtract, "a - b", float="{a} - {b}", int="math::wrapping_sub({a}, {b})", cudnn="sub", **EASY)
binary("mul", np.multiply, "a * b", float="{a} * {b}", int="math::wrapping_mul({a}, {b})", cudnn="mul", **SUM)
binary("div", np.divide, "a / b, for floats.", float="math::divide({a}, {b})", cudnn="div")
pointwise("bias", ("x", "b"), np.add, "x + b", float="{x} + {b}", int="math::wrapping_add({x}, {b})", cudnn="bias")
pointwise(
    "scale",
    ("x", "s"),
    np.multiply,
    "x * s",
    float="{x} * {s}",
    int="math::wrapping_mul({x}, {s})",
    cudnn="scale",
    commutes=True,
)


def _add_square(a: Array, b: Array) -> Array:
    """a + b * b; for floats with what the product's and the sum's rounding leave out (Dekker 1971, Knuth's TwoSum)."""
    square = b * b
    total = a + square
    if total.dtype.kind != "f":
        return np.asarray(total)
    upper = b * 134217729.0  # 2**27 + 1
    high = upper - (upper - b)
    low = b - high
    rest = low * low - ((square - high * high) - 2 * high * low)
    part = total - a
    rest = rest + ((a - (total - part)) + (square - part))
    return np.asarray(np.where(np.isfinite(rest), total + rest, total))


binary(
    "add_square",
    _add_square,
    "a + b * b, for floats rounded once.",
    float="math::fma({b}, {b}, {a})",
    int="math::wrapping_add({a}, math::wrapping_mul({b}, {b}))",
    cudnn="add_square",
)


def _remainder(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    return np.where(b == 0, np.zeros_like(a), np.fmod(a, np.where(b == 0, np.ones_like(b), b)))


binary(
    "mod",
    _remainder,
    "Remainder with the sign of a (C's fmod and %).  Where b is 0: NaN for floats, 0 for integers.",
    float="math::fmod({a}, {b})",
    int="math::remainder({a}, {b})",
    ulps=0,
    cudnn="mod",
)
binary(
    "pow",
    np.float_power,  # power takes square roots for a half, which of -inf are NaN
    "a to the power b, for floats; special cases as C's pow.",
    float="math::pow({a}, {b})",
    ulps=9,
    cudnn="pow",
)
binary(
    "max",
    np.maximum,
    "The larger, NaN where either is NaN.",
    float="math::maximum({a}, {b})",
    int="math::maximum({a}, {b})",
    bool="{a} || {b}",
    ulps=0,
    cudnn="max",
    **SUM,
)
binary(
    "min",
    np.minimum,
    "The smaller, NaN where either is NaN.",
    float="math::minimum({a}, {b})",
    int="math::minimum({a}, {b})",
    bool="{a} && {b}",
    ulps=0,
    cudnn="min",
    **SUM,
)

unary("neg", np.negative, "-x", float="-{x}", int="math::wrapping_neg({x})", ulps=0, cudnn="neg", **EASY)
unary(
    "abs",
    np.abs,
    "|x|.  The most negative integer is its own absolute value.",
    float="math::abs({x})",
    int="math::wrapping_abs({x})",
    ulps=0,
    cudnn="abs",
    cheap=True,
)
unary("sign", np.sign, "-1, 0 or 1; NaN stays NaN.", float="math::sign({x})", int="math::sign({x})", ulps=0)
unary("reciprocal", lambda x: 1 / x, "1 / x", float="math::reciprocal({x})", ulps=1, cudnn="reciprocal")
unary("sqrt", np.sqrt, "Square root.", float="math::sqrt({x})", ulps=1, cudnn="sqrt")
unary("rsqrt", lambda x: 1 / np.sqrt(x), "1 / sqrt(x)", float="math::rsqrt({x})", ulps=2, cudnn="rsqrt")


def _check_clamp(values: dict[str, Any], _: DType) -> None:
    low, high = values["min"], values["max"]
    if low is None and high is None:
        raise AttributeValueError("clamp needs min, max or both")
    if low is not None and high is not None and low > high:
        raise AttributeValueError(f"min is at most max, got min = {low} and max = {high}")


def _clamp(values: Mapping[str, Any]) -> str:
    if values["max"] is None:
        return "math::maximum({x}, {min})"
    return "math::minimum({x}, {max})" if values["min"] is None else "math::clamp({x}, {min}, {max})"


unary(
    "clamp",
    lambda x, min, max: np.clip(x, min, max),
    "x limited to [min, max]; either may be None, for no limit.  NaN stays NaN.",
    attributes={"min": (None, optional_number), "max": (None, optional_number)},
    validate=_check_clamp,
    float=_clamp,
    int=_clamp,
    ulps=0.5,  # that of rounding min and max
    finite=True,
)

# ---- rounding


def _floats_only(function: np.ufunc) -> Any:
    """Integers as they are: before NumPy 2.1, rint, floor and ceil turn them into float64."""
    return lambda x: function(x) if x.dtype.kind == "f" else x


unary(
    "ceil",
    _floats_only(np.ceil),
    "Smallest integer not below x.",
    float="math::ceil({x})",
    int="{x}",
    ulps=0,
    cudnn="ceil",
)
unary(
    "floor",
    _floats_only(np.floor),
    "Largest integer not above x.",
    float="math::floor({x})",
    int="{x}",
    ulps=0,
    cudnn="floor",
)
unary("trunc", _floats_only(np.trunc), "The integer towards zero.", float="math::trunc({x})", int="{x}", ulps=0)
unary(
    "round",
    _floats_only(np.rint),
    "Nearest integer, halfway cases to even.",
    float="math::round({x})",
    int="{x}",
    ulps=0,
)


def _only_where_it_matters(values: dict[str, Any], _: DType) -> None:
    """Casts to other types are alike whether they saturate or not: they are one cast."""
    if values["dtype"] is None or not values["dtype"].saturates:
        values["saturate"] = True


def _same(x: Array, dtype: DType | None = None, saturate: bool = True) -> Array:
    return x


unary(
    "identity",
    _same,
    """x, converted to dtype where one is given.

    Floats round to nearest even; floats to integers truncate and saturate, NaN gives 0; integers wrap around.  What an
    8-bit float does not hold, infinity included, becomes its largest number, as ONNX and cuDNN have it; with
    saturate=False infinity, or NaN where the dtype has no infinity, as torch has it.""",
    attributes={"dtype": (None, optional_dtype), "saturate": (True, flag)},
    validate=_only_where_it_matters,
    float="{x}",
    int="{x}",
    bool="{x}",
    ulps=0,
    cudnn="identity",
    **EASY,
)


def _index(x: Array, axis: int) -> Array:
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return np.broadcast_to(np.arange(x.shape[axis], dtype=np.int32).reshape(shape), x.shape)


unary(
    "gen_index",
    _index,
    """The position of each element along an axis, int32; x gives the shape only.

    It has no CUDA expression: the lowering supplies the index.""",
    attributes={"axis": (REQUIRED, axis)},
    shapes=("x",),
    kinds=("float", "int", "bool"),
    result=int32,
    ulps=0,
    cudnn="gen_index",
    **EASY,
)

# ---- elementary functions.  Bounds of the CUDA C library: CUDA C++ Programming Guide, "Mathematical Functions".

_erf = np.vectorize(math.erf, otypes=[np.float64])

unary("exp", np.exp, "e to the power x.", float="math::exp({x})", ulps=2, cudnn="exp")
unary("exp2", np.exp2, "2 to the power x.", float="math::exp2({x})", ulps=2)
unary("expm1", np.expm1, "exp(x) - 1, accurate for small x.", float="math::expm1({x})", ulps=2)
unary("log", np.log, "Natural logarithm.", float="math::log({x})", ulps=2, cudnn="log")
unary("log2", np.log2, "Logarithm to base 2.", float="math::log2({x})", ulps=2)
unary("log1p", np.log1p, "log(1 + x), accurate for small x.", float="math::log1p({x})", ulps=2)
unary("sin", np.sin, "Sine of x in radians.", float="math::sin({x})", ulps=2, cudnn="sin")
unary("cos", np.cos, "Cosine of x in radians.", float="math::cos({x})", ulps=2, cudnn="cos")
unary("tan", np.tan, "Tangent of x in radians.", float="math::tan({x})", ulps=4, cudnn="tan")
unary("asin", np.arcsin, "Arc sine in radians; NaN beyond [-1, 1].", float="math::asin({x})", ulps=3)
unary("acos", np.arccos, "Arc cosine in radians; NaN beyond [-1, 1].", float="math::acos({x})", ulps=3)
unary("atan", np.arctan, "Arc tangent in radians.", float="math::atan({x})", ulps=3)
unary("sinh", np.sinh, "Hyperbolic sine.", float="math::sinh({x})", ulps=4)
unary("cosh", np.cosh, "Hyperbolic cosine.", float="math::cosh({x})", ulps=3)
unary("asinh", np.arcsinh, "Inverse hyperbolic sine.", float="math::asinh({x})", ulps=4)
unary("acosh", np.arccosh, "Inverse hyperbolic cosine; NaN below 1.", float="math::acosh({x})", ulps=5)
unary("atanh", np.arctanh, "Inverse hyperbolic tangent; NaN beyond [-1, 1].", float="math::atanh({x})", ulps=4)
unary("erf", _erf, "Error function.", float="math::erf({x})", ulps=3, cudnn="erf")

# ---- comparisons and logic


def _truth(combine: np.ufunc) -> Any:
    return lambda *arrays: combine(*(x != 0 for x in arrays))


_ufunc: Any
for _name, _ufunc, _sign in (
    ("cmp_eq", np.equal, "=="),
    ("cmp_neq", np.not_equal, "!="),
    ("cmp_gt", np.greater, ">"),
    ("cmp_ge", np.greater_equal, ">="),
    ("cmp_lt", np.less, "<"),
    ("cmp_le", np.less_equal, "<="),
):
    _template = f"{{a}} {_sign} {{b}}"
    _doc = f"a {_sign} b, bool.  Comparisons with NaN are {'true' if _sign == '!=' else 'false'}."
    predicate(_name, ("a", "b"), _ufunc, _doc, float=_template, int=_template, bool=_template, cudnn=_name, cheap=True)

for _name, _ufunc, _sign in (("logical_and", np.logical_and, "&&"), ("logical_or", np.logical_or, "||")):
    _template = f"{{a}} != 0 {_sign} {{b}} != 0"
    _doc = f"a {_sign} b, bool.  Numbers count as true unless they are 0 (NaN is true)."
    predicate(
        _name, ("a", "b"), _truth(_ufunc), _doc, float=_template, int=_template, bool=f"{{a}} {_sign} {{b}}",
        cudnn=_name, cheap=True, commutes=True,
    )  # fmt: skip
predicate(
    "logical_not",
    ("x",),
    _truth(np.logical_not),
    "not x, bool.  Numbers count as true unless they are 0 (NaN is true).",
    float="{x} == 0",
    int="{x} == 0",
    bool="!{x}",
    cudnn="logical_not",
    cheap=True,
)
predicate("isnan", ("x",), np.isnan, "Whether x is NaN, bool.", float="{x} != {x}")

pointwise(
    "binary_select",
    ("input0", "input1", "mask"),
    lambda input0, input1, mask: np.asarray(np.where(mask, input0, input1)),
    "input0 where mask is true (not 0), input1 elsewhere.",
    masks=("mask",),
    float="{mask} ? {input0} : {input1}",
    int="{mask} ? {input0} : {input1}",
    bool="{mask} ? {input0} : {input1}",
    ulps=0,
    cudnn="binary_select",
    **EASY,
)

"""Pointwise arithmetic, rounding, elementary functions, comparisons, logic and selection."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, int32
from fusegraph.errors import AttributeValueError
from fusegraph.ops.base import REQUIRED, Array, Attributes, Role
from fusegraph.ops.pointwise import (
    FUNCTION,
    PAIR,
    ROUNDING,
    SIMPLE,
    axis,
    optional_number,
    pointwise,
    predicate,
    unary,
    unchecked,
)

# NumPy's integer arithmetic wraps around, as math::wrapping_* do.

_ufunc: Any

# ---- arithmetic


def _arithmetic(name: str, operands: tuple[str, str], ufunc: np.ufunc, sign: str, role: Role, wraps: str = "") -> None:
    a, b = operands
    integers = f"math::wrapping_{wraps or name}({{{a}}}, {{{b}}})"
    floats = f"{{{a}}} {sign} {{{b}}}"
    pointwise(name, ufunc, f"{a} {sign} {b}", PAIR, role, operands=operands, float=floats, int=integers, finite=True)


_arithmetic("add", ("a", "b"), np.add, "+", Role.SUM)
_arithmetic("sub", ("a", "b"), np.subtract, "-", Role.DIFFERENCE)
_arithmetic("mul", ("a", "b"), np.multiply, "*", Role.PRODUCT)
pointwise("div", np.divide, "a / b, for floats.", FUNCTION, Role.QUOTIENT, float="math::divide({a}, {b})")
_arithmetic("bias", ("x", "b"), np.add, "+", Role.SUM, "add")
_arithmetic("scale", ("x", "s"), np.multiply, "*", Role.PRODUCT, "mul")


def _add_square(a: Array, b: Array) -> Array:
    """Returns a + b * b; floats with the rounding errors of product and sum added (Dekker 1971, Knuth's TwoSum)."""
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


pointwise(
    "add_square",
    _add_square,
    "a + b * b, for floats rounded once.",
    SIMPLE,
    float="math::fma({b}, {b}, {a})",
    int="math::wrapping_add({a}, math::wrapping_mul({b}, {b}))",
)


def _remainder(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    return np.where(b == 0, np.zeros_like(a), np.fmod(a, np.where(b == 0, np.ones_like(b), b)))


pointwise(
    "mod",
    _remainder,
    "Remainder with the sign of a (C's fmod and %).  Where b is 0: NaN for floats, 0 for integers.",
    FUNCTION,
    turns=lambda a, b: np.trunc(np.asarray(a, np.float64) / np.asarray(b, np.float64)),
    float="math::fmod({a}, {b})",
    int="math::remainder({a}, {b})",
    ulps=0,
)
# np.power takes a square root for an exponent of 0.5, which gives NaN for -inf
pointwise("pow", np.float_power, "a to the power b, for floats; special cases as C's pow.", FUNCTION, ulps=9)
for _name, _what, _function, _sign in (("max", "larger", "maximum", "||"), ("min", "smaller", "minimum", "&&")):
    _role = Role[_name.upper()]
    _text, _doc = f"math::{_function}({{a}}, {{b}})", f"The {_what}, NaN where either is NaN."
    _either = f"{{a}} {_sign} {{b}}"
    pointwise(
        _name, getattr(np, _function), _doc, PAIR, _role, float=_text, int=_text, bool=_either, ulps=0, finite=True
    )

unary("neg", np.negative, "-x", PAIR, float="-{x}", int="math::wrapping_neg({x})", ulps=0, finite=True)
unary(
    "abs",
    np.abs,
    "|x|.  The most negative integer is its own absolute value.",
    PAIR,
    float="math::abs({x})",
    int="math::wrapping_abs({x})",
    ulps=0,
)
unary(
    "sign",
    np.sign,
    "-1, 0 or 1; NaN stays NaN.",
    SIMPLE,
    kinds=("float", "int"),
    ulps=0,
    cudnn=False,
)
unary("reciprocal", lambda x: 1 / x, "1 / x", FUNCTION, ulps=1)
unary("sqrt", np.sqrt, "Square root.", FUNCTION, ulps=1)
unary("rsqrt", lambda x: 1 / np.sqrt(x), "1 / sqrt(x)", FUNCTION, ulps=2)


def _check_clamp(values: dict[str, Any], _: DType) -> None:
    low, high = values["min"], values["max"]
    if low is None and high is None:
        raise AttributeValueError("clamp needs min, max or both")
    if low is not None and high is not None and low > high:
        raise AttributeValueError(f"min is at most max, got min = {low} and max = {high}")


def _clamp(values: Attributes) -> str:
    if values["max"] is None:
        return "math::maximum({x}, {min})"
    return "math::minimum({x}, {max})" if values["min"] is None else "math::clamp({x}, {min}, {max})"


unary(
    "clamp",
    lambda x, min, max: np.clip(x, min, max),
    "x limited to [min, max]; either may be None, for no limit.  NaN stays NaN.",
    SIMPLE,
    attributes={"min": (None, optional_number), "max": (None, optional_number)},
    validate=_check_clamp,
    float=_clamp,
    int=_clamp,
    ulps=0.5,  # that of rounding min and max
    cudnn=False,
    finite=True,
)

# ---- rounding


def _floats_only(function: np.ufunc) -> Any:
    """Makes a function leave integers as they are: before NumPy 2.1, rint, floor and ceil turn them into float64."""
    return lambda x: function(x) if x.dtype.kind == "f" else x


for _name, _ufunc, _doc, _cudnn in (
    ("ceil", np.ceil, "Smallest integer not below x.", True),
    ("floor", np.floor, "Largest integer not above x.", True),
    ("trunc", np.trunc, "The integer towards zero.", False),
    ("round", np.rint, "Nearest integer, halfway cases to even.", False),
):
    unary(_name, _floats_only(_ufunc), _doc, FUNCTION, float=f"math::{_name}({{x}})", int="{x}", ulps=0, cudnn=_cudnn)


def _only_where_it_matters(values: dict[str, Any], _: DType) -> None:
    """Sets saturate for casts to types that do not saturate, so that equal casts have equal attributes."""
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
    ROUNDING,
    Role.CAST,
    attributes={"dtype": (None, unchecked), "saturate": (True, unchecked)},
    validate=_only_where_it_matters,
    float="{x}",
    int="{x}",
    bool="{x}",
    ulps=0,
    finite=True,
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
    SIMPLE,
    Role.INDEX,
    attributes={"axis": (REQUIRED, axis)},
    shapes=("x",),
    kinds=("float", "int", "bool"),
    result=int32,
    ulps=0,
    finite=True,
)

# ---- elementary functions.  Bounds of the CUDA C library: CUDA C++ Programming Guide, "Mathematical Functions".

_erf = np.vectorize(math.erf, otypes=[np.float64])

unary("exp", np.exp, "e to the power x.", FUNCTION, ulps=2)
unary("exp2", np.exp2, "2 to the power x.", FUNCTION, ulps=2, cudnn=False)
unary("expm1", np.expm1, "exp(x) - 1, accurate for small x.", FUNCTION, ulps=2, cudnn=False)
unary("log", np.log, "Natural logarithm.", FUNCTION, ulps=2)
unary("log2", np.log2, "Logarithm to base 2.", FUNCTION, ulps=2, cudnn=False)
unary("log1p", np.log1p, "log(1 + x), accurate for small x.", FUNCTION, ulps=2, cudnn=False)
unary("sin", np.sin, "Sine of x in radians.", FUNCTION, turns=lambda x: x / np.pi, ulps=2)
unary("cos", np.cos, "Cosine of x in radians.", FUNCTION, turns=lambda x: x / np.pi, ulps=2)
unary("tan", np.tan, "Tangent of x in radians.", FUNCTION, turns=lambda x: np.floor(x / np.pi + 0.5), ulps=4)
unary("asin", np.arcsin, "Arc sine in radians; NaN beyond [-1, 1].", FUNCTION, ulps=3, cudnn=False)
unary("acos", np.arccos, "Arc cosine in radians; NaN beyond [-1, 1].", FUNCTION, ulps=3, cudnn=False)
unary("atan", np.arctan, "Arc tangent in radians.", FUNCTION, ulps=3, cudnn=False)
unary("sinh", np.sinh, "Hyperbolic sine.", FUNCTION, ulps=4, cudnn=False)
unary("cosh", np.cosh, "Hyperbolic cosine.", FUNCTION, ulps=3, cudnn=False)
unary("asinh", np.arcsinh, "Inverse hyperbolic sine.", FUNCTION, ulps=4, cudnn=False)
unary("acosh", np.arccosh, "Inverse hyperbolic cosine; NaN below 1.", FUNCTION, ulps=5, cudnn=False)
unary("atanh", np.arctanh, "Inverse hyperbolic tangent; NaN beyond [-1, 1].", FUNCTION, ulps=4, cudnn=False)
unary("erf", _erf, "Error function.", FUNCTION, ulps=3)

# ---- comparisons and logic


def _truth(combine: np.ufunc) -> Any:
    return lambda *arrays: combine(*(x != 0 for x in arrays))


for _name, _ufunc, _sign in (
    ("cmp_eq", np.equal, "=="),
    ("cmp_neq", np.not_equal, "!="),
    ("cmp_gt", np.greater, ">"),
    ("cmp_ge", np.greater_equal, ">="),
    ("cmp_lt", np.less, "<"),
    ("cmp_le", np.less_equal, "<="),
):
    _text, _role = f"{{a}} {_sign} {{b}}", Role(f"a {_sign} b")
    _doc = f"a {_sign} b, bool.  Comparisons with NaN are {'true' if _sign == '!=' else 'false'}."
    predicate(_name, _ufunc, _doc, SIMPLE, _role, float=_text, int=_text, bool=_text)

for _name, _ufunc, _sign in (("and", np.logical_and, "&&"), ("or", np.logical_or, "||")):
    _text, _both, _role = f"{{a}} != 0 {_sign} {{b}} != 0", f"{{a}} {_sign} {{b}}", Role(f"a {_name} b")
    _doc = f"a {_sign} b, bool.  Numbers count as true unless they are 0 (NaN is true)."
    predicate(f"logical_{_name}", _truth(_ufunc), _doc, SIMPLE, _role, float=_text, int=_text, bool=_both)
predicate(
    "logical_not",
    _truth(np.logical_not),
    "not x, bool.  Numbers count as true unless they are 0 (NaN is true).",
    SIMPLE,
    Role.NOT,
    operands=("x",),
    float="{x} == 0",
    int="{x} == 0",
    bool="!{x}",
)
predicate("isnan", np.isnan, "Whether x is NaN, bool.", SIMPLE, operands=("x",), float="{x} != {x}", cudnn=False)

pointwise(
    "binary_select",
    lambda input0, input1, mask: np.asarray(np.where(mask, input0, input1)),
    "input0 where mask is true (not 0), input1 elsewhere.",
    SIMPLE,
    Role.SELECT,
    operands=("input0", "input1", "mask"),
    masks=("mask",),
    float="{mask} ? {input0} : {input1}",
    int="{mask} ? {input0} : {input1}",
    bool="{mask} ? {input0} : {input1}",
    ulps=0,
    finite=True,
)

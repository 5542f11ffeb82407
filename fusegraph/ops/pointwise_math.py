"""Pointwise arithmetic, rounding, elementary functions, comparisons, logic and selection."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, as_dtype, int32
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
from fusegraph.ops.reverse import Reverse, Rule, flat

# NumPy's integer arithmetic wraps around, as math::wrapping_* do.

_ufunc: Any

# ---- arithmetic


def _arithmetic(
    name: str, operands: tuple[str, str], ufunc: np.ufunc, sign: str, role: Role, gradient: Rule, wraps: str = ""
) -> None:
    a, b = operands
    integers = f"math::wrapping_{wraps or name}({{{a}}}, {{{b}}})"
    floats = f"{{{a}}} {sign} {{{b}}}"
    pointwise(
        name, ufunc, f"{a} {sign} {b}", PAIR, role,
        operands=operands, float=floats, int=integers, finite=True, gradient=gradient,
    )  # fmt: skip


def _by_terms(at: Reverse, a: Any, b: Any) -> Any:
    return at.loss, at.loss


def _by_factors(at: Reverse, a: Any, b: Any) -> Any:
    return lambda: at.loss * b, lambda: at.loss * a


_arithmetic("add", ("a", "b"), np.add, "+", Role.SUM, _by_terms)
_arithmetic(
    "sub", ("a", "b"), np.subtract, "-", Role.DIFFERENCE, lambda at, a, b: (at.loss, lambda: at.graph.neg(at.loss))
)
_arithmetic("mul", ("a", "b"), np.multiply, "*", Role.PRODUCT, _by_factors)
pointwise(
    "div",
    np.divide,
    "a / b, for floats.",
    FUNCTION,
    Role.QUOTIENT,
    float="math::divide({a}, {b})",
    gradient=lambda at, a, b: (lambda: at.loss / b, lambda: at.graph.neg(at.loss * (at.y / b))),
)
_arithmetic("bias", ("x", "b"), np.add, "+", Role.SUM, _by_terms, "add")
_arithmetic("scale", ("x", "s"), np.multiply, "*", Role.PRODUCT, _by_factors, "mul")


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
    gradient=lambda at, a, b: (at.loss, lambda: at.loss * (b * 2.0)),
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
    gradient=lambda at, a, b: (at.loss, lambda: at.graph.neg(at.loss * at.graph.trunc(at.graph.div(a, b)))),
)


def _by_power(at: Reverse, a: Any, b: Any) -> Any:
    """Where an exponent is 0, and where 0 has an exponent that is not negative, the slope is 0 in that direction."""
    g = at.graph

    def by_base() -> Any:
        return g.binary_select(0.0, at.loss * (b * g.pow(a, g.sub(b, 1))), g.cmp_eq(b, 0))

    def by_exponent() -> Any:
        still = g.logical_and(g.cmp_eq(a, 0), g.cmp_ge(b, 0))
        return g.binary_select(0.0, at.loss * (at.y * g.log(g.cast(a, at.y.dtype))), still)

    return by_base, by_exponent


# np.power takes a square root for an exponent of 0.5, which gives NaN for -inf
pointwise(
    "pow",
    np.float_power,
    "a to the power b, for floats; special cases as C's pow.",
    FUNCTION,
    ulps=9,
    gradient=_by_power,
)


def _by_extremes(at: Reverse, a: Any, b: Any) -> Any:
    """Of equal operands each gets half."""
    g = at.graph
    shared = g.binary_select(at.loss * 0.5, at.loss, g.cmp_eq(a, b))
    loses = g.cmp_lt if at.name == "max" else g.cmp_gt
    return lambda: g.binary_select(0.0, shared, loses(a, b)), lambda: g.binary_select(0.0, shared, loses(b, a))


for _name, _what, _function, _sign in (("max", "larger", "maximum", "||"), ("min", "smaller", "minimum", "&&")):
    _role = Role[_name.upper()]
    _text, _doc = f"math::{_function}({{a}}, {{b}})", f"The {_what}, NaN where either is NaN."
    _either = f"{{a}} {_sign} {{b}}"
    pointwise(
        _name, getattr(np, _function), _doc, PAIR, _role,
        float=_text, int=_text, bool=_either, ulps=0, finite=True, gradient=_by_extremes,
    )  # fmt: skip

unary(
    "neg",
    np.negative,
    "-x",
    PAIR,
    float="-{x}",
    int="math::wrapping_neg({x})",
    ulps=0,
    finite=True,
    gradient=lambda at, x: at.graph.neg(at.loss),
)
unary(
    "abs",
    np.abs,
    "|x|.  The most negative integer is its own absolute value.",
    PAIR,
    float="math::abs({x})",
    int="math::wrapping_abs({x})",
    ulps=0,
    gradient=lambda at, x: at.loss * at.graph.sign(x),
)
unary(
    "sign",
    np.sign,
    "-1, 0 or 1; NaN stays NaN.",
    SIMPLE,
    kinds=("float", "int"),
    ulps=0,
    cudnn=False,
    gradient=flat,
)
unary(
    "reciprocal",
    lambda x: 1 / x,
    "1 / x",
    FUNCTION,
    ulps=1,
    gradient=lambda at, x: at.graph.neg(at.loss * (at.y * at.y)),
)
unary("sqrt", np.sqrt, "Square root.", FUNCTION, ulps=1, gradient=lambda at, x: at.loss / (at.y * 2.0))
unary(
    "rsqrt",
    lambda x: 1 / np.sqrt(x),
    "1 / sqrt(x)",
    FUNCTION,
    ulps=2,
    gradient=lambda at, x: at.loss * -0.5 * (at.y / x),
)


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


def _by_clamped(at: Reverse, x: Any, min: Any, max: Any) -> Any:
    g = at.graph
    limits = ((g.cmp_ge, min), (g.cmp_le, max))
    inside = [compare(x, limit) for compare, limit in limits if limit is not None]
    return g.binary_select(at.loss, 0.0, inside[0] if len(inside) == 1 else g.logical_and(*inside))


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
    gradient=_by_clamped,
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
    unary(
        _name, _floats_only(_ufunc), _doc, FUNCTION,
        float=f"math::{_name}({{x}})", int="{x}", ulps=0, cudnn=_cudnn, gradient=flat,
    )  # fmt: skip


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
    gradient=lambda at, x, dtype, saturate: at.loss,
)


def _float_dtype(values: dict[str, Any], _: DType) -> None:
    """Checks the dtype of a result that is rounded where it is stored."""
    values["dtype"] = as_dtype(values["dtype"])
    if not values["dtype"].is_float:
        raise AttributeValueError(f"narrow: dtype is {values['dtype']}, but only floats are rounded")


unary(
    "narrow",
    _same,
    """x as a tensor of another float dtype, rounded only where it is stored.

    So are the results of all other ops: within a kernel they keep the precision that they are computed in.  A cast
    (`identity` with a dtype) rounds wherever it is.""",
    ROUNDING,
    Role.NARROW,
    attributes={"dtype": (REQUIRED, unchecked)},
    validate=_float_dtype,
    float="{x}",
    ulps=0,
    finite=True,
    cudnn=False,
    gradient=lambda at, x, dtype: at.loss,
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

_LN_2 = math.log(2)

for _name, _ufunc, _doc, _ulps, _cudnn, _slope in (
    ("exp", np.exp, "e to the power x.", 2, True, lambda at, x: at.loss * at.y),
    ("exp2", np.exp2, "2 to the power x.", 2, False, lambda at, x: at.loss * (at.y * _LN_2)),
    ("expm1", np.expm1, "exp(x) - 1, accurate for small x.", 2, False, lambda at, x: at.loss * (at.y + 1.0)),
    ("log", np.log, "Natural logarithm.", 2, True, lambda at, x: at.loss / x),
    ("log2", np.log2, "Logarithm to base 2.", 2, False, lambda at, x: at.loss / (x * _LN_2)),
    ("log1p", np.log1p, "log(1 + x), accurate for small x.", 2, False, lambda at, x: at.loss / (x + 1.0)),
    ("asin", np.arcsin, "Arc sine in radians; NaN beyond [-1, 1].", 3, False,
     lambda at, x: at.loss * at.graph.rsqrt(1.0 - x * x)),
    ("acos", np.arccos, "Arc cosine in radians; NaN beyond [-1, 1].", 3, False,
     lambda at, x: at.graph.neg(at.loss * at.graph.rsqrt(1.0 - x * x))),
    ("atan", np.arctan, "Arc tangent in radians.", 3, False, lambda at, x: at.loss / (x * x + 1.0)),
    ("sinh", np.sinh, "Hyperbolic sine.", 4, False, lambda at, x: at.loss * at.graph.cosh(x)),
    ("cosh", np.cosh, "Hyperbolic cosine.", 3, False, lambda at, x: at.loss * at.graph.sinh(x)),
    ("asinh", np.arcsinh, "Inverse hyperbolic sine.", 4, False, lambda at, x: at.loss * at.graph.rsqrt(x * x + 1.0)),
    ("acosh", np.arccosh, "Inverse hyperbolic cosine; NaN below 1.", 5, False,
     lambda at, x: at.loss * at.graph.rsqrt(x * x - 1.0)),
    ("atanh", np.arctanh, "Inverse hyperbolic tangent; NaN beyond [-1, 1].", 4, False,
     lambda at, x: at.loss / (1.0 - x * x)),
    ("erf", _erf, "Error function.", 3, True,
     lambda at, x: at.loss * (at.graph.exp(at.graph.neg(x * x)) * (2 / math.sqrt(math.pi)))),
):  # fmt: skip
    unary(_name, _ufunc, _doc, FUNCTION, ulps=_ulps, cudnn=_cudnn, gradient=_slope)

for _name, _ufunc, _doc, _turns, _ulps, _slope in (
    ("sin", np.sin, "Sine of x in radians.", lambda x: x / np.pi, 2, lambda at, x: at.loss * at.graph.cos(x)),
    ("cos", np.cos, "Cosine of x in radians.", lambda x: x / np.pi, 2,
     lambda at, x: at.graph.neg(at.loss * at.graph.sin(x))),
    ("tan", np.tan, "Tangent of x in radians.", lambda x: np.floor(x / np.pi + 0.5), 4,
     lambda at, x: at.loss * (at.y * at.y + 1.0)),
):  # fmt: skip
    unary(_name, _ufunc, _doc, FUNCTION, turns=_turns, ulps=_ulps, gradient=_slope)

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
    gradient=lambda at, input0, input1, mask: (
        lambda: at.graph.binary_select(at.loss, 0.0, mask),
        lambda: at.graph.binary_select(0.0, at.loss, mask),
    ),
)

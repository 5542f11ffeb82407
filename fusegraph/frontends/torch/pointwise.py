"""ATen's pointwise operators."""

from __future__ import annotations

from math import inf, log
from typing import Any

from codegen.sizes import Size
from fusegraph.dtypes import bool_, float32, int64
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.table import HANDLERS, Call, aten, aten_by_name
from fusegraph.graph import Tensor
from fusegraph.ops import TABLE

#: Operators of one float (or of a bool or integer converted to float) that are ops of the same name.
_ALIKE = (
    *("sigmoid", "tanh", "mish", "hardswish", "hardsigmoid", "relu", "erf"),
    *("neg", "abs", "reciprocal", "sqrt", "rsqrt", "ceil", "floor", "round", "trunc"),
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
)
#: Op -> the operators that compute the same from the same operands.
_SAME = {name: (f"{name}.default",) for name in _ALIKE} | {
    "swish": ("silu.default",),
    "swish_backward": ("silu_backward.default",),
    "max": ("maximum.default",),
    "min": ("minimum.default",),
    "div": ("div.Tensor", "div.Scalar"),
    "mod": ("fmod.Tensor", "fmod.Scalar"),
    "pow": ("pow.Tensor_Tensor", "pow.Scalar"),
}
_COMPARISONS = {"eq": "cmp_eq", "ne": "cmp_neq", "gt": "cmp_gt", "ge": "cmp_ge", "lt": "cmp_lt", "le": "cmp_le"}


def _applied(op: str) -> Any:
    return lambda c, *operands: c.apply(op, *operands)


def _comparison(op: str) -> Any:
    def handler(c: Call, a: Any, b: Any) -> Tensor:
        if not isinstance(b, Tensor):
            if isinstance(b, float) and not a.dtype.is_float:
                a = c.cast(a, float32)
            elif a.dtype.is_bool and not isinstance(b, bool):
                a = c.cast(a, int64)
            b = c.number(b, a.dtype)
        return getattr(c.graph, op)(a, b)

    return handler


for _op, _operators in _SAME.items():
    aten(*_operators)(_applied(_op))
HANDLERS.update(
    {f"aten.{name}.{kind}": _comparison(op) for name, op in _COMPARISONS.items() for kind in ("Tensor", "Scalar")}
)


# ---- arithmetic


def _scaled(c: Call, x: Any, alpha: float) -> Any:
    """Returns alpha x, without a node if alpha is 1."""
    if alpha == 1:
        return x
    return alpha * x if not isinstance(x, Tensor) else c.apply("mul", x, alpha)


@aten("add.Tensor", "add.Scalar")
def _add(c: Call, a: Any, b: Any, alpha: float = 1) -> Tensor:
    if c.dtype.is_bool:
        return c.graph.logical_or(a, b if alpha else False)
    return c.apply("add", a, _scaled(c, b, alpha))


@aten("sub.Tensor", "sub.Scalar")
def _sub(c: Call, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return c.apply("sub", a, _scaled(c, b, alpha))


@aten("rsub.Scalar", "rsub.Tensor")
def _rsub(c: Call, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return c.apply("sub", b, _scaled(c, a, alpha))


@aten("mul.Tensor", "mul.Scalar")
def _mul(c: Call, a: Any, b: Any) -> Tensor:
    if c.dtype.is_bool:
        return c.graph.logical_and(a, b)
    return c.apply("mul", a, b)


@aten("prims.fma.default")
def _fma(c: Call, a: Any, b: Any, term: Any) -> Tensor:
    return c.apply("add", c.apply("mul", a, b), term)


@aten("div.Tensor_mode", "div.Scalar_mode")
def _div_rounded(c: Call, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
    """Divides and rounds; floor is as in Python: x minus the remainder with the divisor's sign, divided."""
    if rounding_mode is None:
        return c.apply("div", a, b)
    exact = c.dtype.is_float
    if rounding_mode == "trunc":
        return c.cast(c.graph.trunc(c.apply("div", a, b))) if exact else c.apply("quotient", a, b)
    a, b = (c.operand(x, c.dtype) for x in (a, b))
    rest = c.graph.mod(a, b)
    below = c.graph.logical_and(c.graph.cmp_neq(rest, 0), c.graph.cmp_neq(rest < 0, b < 0))
    if not exact:
        return c.graph.sub(c.graph.quotient(a, b), c.cast(below))
    quotient = c.graph.sub((a - rest) / b, c.graph.cast(below, a.dtype))
    whole = c.graph.floor(quotient)
    nearest = c.graph.add(whole, c.graph.cast(c.graph.cmp_gt(quotient - whole, 0.5), a.dtype))
    return c.cast(c.graph.binary_select(a / b, nearest, c.graph.cmp_eq(b, 0)))


@aten("pow.Tensor_Scalar")
def _pow_scalar(c: Call, x: Tensor, exponent: float) -> Tensor:
    if exponent in (2, 3):
        square = c.apply("mul", x, x)
        return square if exponent == 2 else c.apply("mul", square, x)
    if exponent in (0.5, -0.5, -1) and c.dtype.is_float:
        return c.apply({0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}[exponent], x)
    return c.apply("pow", x, exponent)


@aten("remainder.Tensor", "remainder.Scalar")
def _remainder(c: Call, a: Any, b: Any) -> Tensor:
    """Returns the remainder with the sign of b."""
    divisor = c.operand(b, c.dtype)
    signed = c.apply("mod", a, divisor)
    other = c.graph.logical_and(c.graph.cmp_neq(signed, 0), c.graph.cmp_neq(signed < 0, divisor < 0))
    return c.cast(c.graph.binary_select(signed + divisor, signed, other))


@aten("clamp.default", "clamp_min.default")
def _clamp(c: Call, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    low, high = (None if low == -inf else low), (None if high == inf else high)
    if low is None and high is None:
        return c.graph.identity(c.cast(x))
    if not isinstance(low, Size) and not isinstance(high, Size):
        return c.apply("clamp", x, min=low, max=high)
    x = x if low is None else c.apply("max", x, low)
    return x if high is None else c.apply("min", x, high)


@aten("hardtanh.default")
def _hardtanh(c: Call, x: Tensor, low: float = -1, high: float = 1) -> Tensor:
    return _clamp(c, x, low, high)


@aten("clamp_max.default")
def _clamp_max(c: Call, x: Tensor, high: float) -> Tensor:
    return _clamp(c, x, None, high)


@aten("clamp.Tensor")
def _clamp_tensor(c: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    raised = x if low is None else c.apply("max", x, low)
    return raised if high is None else c.apply("min", raised, high)


# ---- activations with numbers, and gradients


@aten("gelu.default")
def _gelu(c: Call, x: Tensor, approximate: str = "none") -> Tensor:
    return c.apply("gelu_approx_tanh" if approximate == "tanh" else "gelu", x)


@aten("gelu_backward.default")
def _gelu_backward(c: Call, loss: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    return c.apply("gelu_approx_tanh_backward" if approximate == "tanh" else "gelu_backward", loss, x)


@aten("leaky_relu.default")
def _leaky_relu(c: Call, x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return c.apply("leaky_relu", x, negative_slope=negative_slope)


@aten("elu.default")
def _elu(c: Call, x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    if input_scale != 1:
        raise NotSupportedError("elu with an input_scale")
    return _scaled(c, c.apply("elu", x, alpha=alpha), scale)


@aten("softplus.default")
def _softplus(c: Call, x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if threshold < 20:  # above it torch returns x; the op does so to the last digit only from 20 on
        raise NotSupportedError(f"softplus with a threshold of {threshold}")
    return c.apply("softplus", x, beta=beta)


@aten("log10.default")
def _log10(c: Call, x: Tensor) -> Tensor:
    wide = float32 if c.dtype.itemsize < 4 else c.dtype
    return c.cast(c.graph.mul(c.graph.log(c.cast(x, wide)), c.number(1 / log(10), wide)))


def _beside_nan(op: str) -> Any:
    """Returns the handler for the larger or smaller of two elements, which ignores one NaN."""

    def handler(c: Call, a: Tensor, b: Tensor) -> Tensor:
        if not c.dtype.is_float:
            return c.apply(op, a, b)
        a, b = (c.cast(x) for x in (a, b))
        either = c.graph.binary_select(a, c.apply(op, a, b), c.graph.isnan(b))
        return c.cast(c.graph.binary_select(b, either, c.graph.isnan(a)))

    return handler


HANDLERS["aten.fmax.default"] = _beside_nan("max")
HANDLERS["aten.fmin.default"] = _beside_nan("min")


# ---- truth


def _truth(op: str) -> Any:
    return lambda c, *operands: getattr(c.graph, op)(*operands)


HANDLERS.update({f"aten.{op}.default": _truth(op) for op in ("logical_and", "logical_or", "logical_not")})


def _bits(op: str) -> Any:
    """Returns the handler for an op on the bits of integers; on bools it is the logical one, if there is one."""
    logical = op.replace("bitwise", "logical")

    def handler(c: Call, *operands: Any) -> Tensor:
        given = [x if isinstance(x, Tensor) else c.graph.constant(x, dtype=c.dtype) for x in operands]
        return getattr(c.graph, logical if c.dtype.is_bool and logical in TABLE else op)(*map(c.cast, given))

    return handler


for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    HANDLERS |= {f"aten.{_name}.{kind}": _bits(_name) for kind in ("Tensor", "Scalar")}
for _name, _op in (("left", "shift_left"), ("right", "shift_right")):
    HANDLERS |= {f"aten.bitwise_{_name}_shift.{kind}": _bits(_op) for kind in ("Tensor", "Tensor_Scalar")}
    HANDLERS |= {f"aten.__{_name[0]}shift__.{kind}": _bits(_op) for kind in ("Tensor", "Scalar")}
HANDLERS["aten.bitwise_not.default"] = _bits("bitwise_not")


@aten("logical_xor.default")
def _xor(c: Call, a: Tensor, b: Tensor) -> Tensor:
    return c.graph.cmp_neq(c.cast(a, bool_), c.cast(b, bool_))


@aten("sign.default")
def _sign(c: Call, x: Tensor) -> Tensor:
    # Of NaN, the op gives NaN and torch gives 0.
    return c.graph.sub(c.cast(c.graph.cmp_gt(x, 0)), c.cast(c.graph.cmp_lt(x, 0)))


@aten("isnan.default")
def _isnan(c: Call, x: Tensor) -> Tensor:
    return c.graph.isnan(x) if x.dtype.is_float else c.graph.cmp_neq(x, x)


@aten("isinf.default")
def _isinf(c: Call, x: Tensor) -> Tensor:
    return c.graph.cmp_eq(c.graph.abs(x), float("inf")) if x.dtype.is_float else c.graph.cmp_neq(x, x)


@aten("where.self")
def _where(c: Call, condition: Tensor, a: Any, b: Any) -> Tensor:
    # Tensors of rank 0 may come as constants, so the result's dtype decides.
    a, b = (c.operand(x, c.dtype) for x in (a, b))
    return c.cast(c.graph.binary_select(a, b, condition))


# ---- copies and casts


@aten("clone.default", "lift_fresh_copy.default")
def _clone(c: Call, x: Tensor, memory_format: Any = None) -> Tensor:
    return c.graph.identity(x)


@aten_by_name("copy.default")
def _copy(c: Call, src: Any) -> Tensor:
    if not isinstance(src, Tensor):
        return c.spread(c.graph.constant(src, dtype=c.dtype), c.form.shape)
    return c.spread(c.converted(src) if src.dtype != c.dtype else c.graph.identity(src), c.form.shape)


@aten("_to_copy.default", "prims.convert_element_type.default")
def _to_copy(c: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return c.converted(x) if x.dtype != c.dtype else c.graph.identity(x)

"""Operators that compute each element by itself: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from math import inf

from fusegraph.dtypes import DType, float8_e8m0, float32, float64, int32, int64
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor

#: Operators that are a method of the same name in lower case.
_SAME_NAME = """
Abs Acos Acosh Add Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor HardSwish IsNaN Log Mish Mul Neg Reciprocal Relu
Round Sigmoid Sign Sin Sinh Softplus Sqrt Sub Tan Tanh
"""
#: Operators that are one method -> its name, and the attributes that it takes after the operands.
_METHODS: dict[str, tuple[str, ...]] = {
    **{name: (name.lower(),) for name in _SAME_NAME.split()},
    "And": ("logical_and",),
    "BitwiseAnd": ("bitwise_and",),
    "BitwiseNot": ("bitwise_not",),
    "BitwiseOr": ("bitwise_or",),
    "BitwiseXor": ("bitwise_xor",),
    "Elu": ("elu", "alpha"),
    "Equal": ("cmp_eq",),
    "Greater": ("cmp_gt",),
    "GreaterOrEqual": ("cmp_ge",),
    "LeakyRelu": ("leaky_relu", "alpha"),
    "Less": ("cmp_lt",),
    "LessOrEqual": ("cmp_le",),
    "Not": ("logical_not",),
    "Or": ("logical_or",),
    "Swish": ("swish", "alpha"),
    "Xor": ("cmp_neq",),
}


def _method(name: str, attributes: Sequence[str], call: Call, *operands: Tensor) -> Tensor:
    return getattr(call.graph, name)(*operands, *(call[a] for a in attributes))


for _operator, (_name, *_attributes) in _METHODS.items():
    operator(_operator)(partial(_method, _name, _attributes))


@operator("Identity")
def identity(_: Call, x: Tensor) -> Tensor:
    return x


# ---- arithmetic


@operator("Div")
def divide(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """Divides; quotients of integers are rounded towards zero."""
    return call.graph.div(a, b) if a.dtype.is_float else call.graph.quotient(a, b)


@operator("BitShift")
def bit_shift(call: Call, a: Tensor, b: Tensor) -> Tensor:
    left = call.word("direction", "LEFT", "RIGHT") == "LEFT"
    return call.graph.shift_left(a, b) if left else call.graph.shift_right(a, b)


@operator("Pow")
def power(call: Call, x: Tensor, exponent: Tensor) -> Tensor:
    graph = call.graph
    base = x if x.dtype.is_float else graph.cast(x, float64)  # exact up to 2^53
    return graph.cast(graph.pow(base, exponent), x.dtype)


@operator("Mod")
def modulo(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """Returns C's remainder (with the dividend's sign) with fmod, else one with the divisor's sign."""
    graph = call.graph
    rest = graph.mod(a, b)
    if call["fmod"] or a.dtype.name == "uint8":
        return rest
    other = graph.logical_and(graph.cmp_neq(rest, 0), graph.cmp_neq(graph.cmp_lt(rest, 0), graph.cmp_lt(b, 0)))
    return graph.binary_select(graph.add(rest, b), rest, other)


def _all_of(method: str, call: Call, first: Tensor, *others: Tensor) -> Tensor:
    return reduce(getattr(call.graph, method), others, first)


operator("Max")(partial(_all_of, "max"))
operator("Min")(partial(_all_of, "min"))
operator("Sum")(partial(_all_of, "add"))


@operator("Mean")
def mean(call: Call, *operands: Tensor) -> Tensor:
    return call.graph.div(_all_of("add", call, *operands), len(operands))


@operator("Clip")
def clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Returns min(max(x, low), high), in ONNX's order: if low is above high, the result is high."""
    graph = call.graph
    for bound in (low, high):
        if bound is not None and bound.size != 1:
            raise ModelError(f"a bound is one number, got {list(bound.shape)}")
    known = [None if b is None else call.values.known(b) for b in (low, high)]
    if all((b is None) == (k is None) for b, k in zip((low, high), known)):
        least, most = (None if k is None else k.reshape(()).astype(float if x.dtype.is_float else int) for k in known)
        if least is None and most is None:
            return x
        finite = all(v is None or abs(v) < inf for v in (least, most))
        if finite and (least is None or most is None or least <= most):
            bounds = {"min": least, "max": most}
            return graph.clamp(x, **{k: v if v is None else v.item() for k, v in bounds.items()})
    if low is not None:
        x = graph.max(x, graph.reshape(low, ()))
    return x if high is None else graph.min(x, graph.reshape(high, ()))


# ---- comparisons and logic


@operator("IsInf")
def is_inf(call: Call, x: Tensor) -> Tensor:
    graph = call.graph
    if call["detect_negative"] and call["detect_positive"]:
        return graph.cmp_eq(graph.abs(x), inf)
    if call["detect_negative"] or call["detect_positive"]:
        return graph.cmp_eq(x, inf if call["detect_positive"] else -inf)
    return graph.broadcast(graph.constant(False), x.shape)


@operator("Where")
def where(call: Call, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return call.graph.binary_select(x, y, condition)


# ---- activations


@operator("Selu")
def selu(call: Call, x: Tensor) -> Tensor:
    return call.graph.mul(call.graph.elu(x, call["alpha"]), call["gamma"])


@operator("Celu")
def celu(call: Call, x: Tensor) -> Tensor:
    return call.graph.mul(call.graph.elu(call.graph.div(x, call["alpha"]), 1.0), call["alpha"])


@operator("Gelu")
def gelu(call: Call, x: Tensor) -> Tensor:
    if call["approximate"] not in ("none", "tanh"):
        raise call.refuse(f"approximate {call['approximate'][:40]}")
    return call.graph.gelu_approx_tanh(x) if call["approximate"] == "tanh" else call.graph.gelu(x)


@operator("HardSigmoid")
def hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    return call.graph.clamp(call.graph.add(call.graph.mul(x, call["alpha"]), call["beta"]), 0.0, 1.0)


@operator("PRelu")
def prelu(call: Call, x: Tensor, slope: Tensor) -> Tensor:
    return call.graph.binary_select(call.graph.mul(x, slope), x, call.graph.cmp_lt(x, 0))


@operator("ThresholdedRelu")
def thresholded_relu(call: Call, x: Tensor) -> Tensor:
    return call.graph.binary_select(x, 0.0, call.graph.cmp_gt(x, call["alpha"]))


@operator("Shrink")
def shrink(call: Call, x: Tensor) -> Tensor:
    graph, edge, bias = call.graph, call["lambd"], call["bias"]
    if not x.dtype.is_float:
        raise call.refuse(f"type {x.dtype}")
    above = graph.binary_select(graph.sub(x, bias), 0.0, graph.cmp_gt(x, edge))
    return graph.binary_select(graph.add(x, bias), above, graph.cmp_lt(x, -edge))


@operator("Softsign")
def softsign(call: Call, x: Tensor) -> Tensor:
    return call.graph.div(x, call.graph.add(call.graph.abs(x), 1.0))


@operator("Dropout")
def dropout(call: Call, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None) -> list[Tensor]:
    """Keeps everything, as in inference; training mode is refused unless ratio is 0."""
    trained = training is not None and call.number(training, "training_mode")
    if trained and (ratio is None or call.number(ratio, "ratio")):
        raise call.refuse("training mode")
    return [x, call.graph.broadcast(call.graph.constant(True), x.shape)]


# ---- casts


def _cast(call: Call, x: Tensor, dtype: DType) -> Tensor:
    """Casts; floats beyond the range of an integer of fewer than 8 bits wrap around, as in ONNX's own evaluator."""
    if dtype == float8_e8m0 and x.dtype != dtype:
        return call.graph.cast(_power_of_two(call, x), dtype)
    if x.dtype.is_float and dtype.is_int and dtype.is_packed:
        x = call.graph.cast(x, int32)
    return call.graph.cast(x, dtype, saturate=call["saturate"] != 0)


def _power_of_two(call: Call, x: Tensor) -> Tensor:
    """Rounds positive numbers to powers of 2 as the attribute round_mode says; others stay, for the cast to judge.

    Where the cast saturates, numbers are moved into float8_e8m0's range, of which 0 is the least then.
    """
    graph, mode = call.graph, "up" if call["round_mode"] is None else call.word("round_mode", "up", "down", "nearest")
    narrow = x.dtype.is_float and x.dtype != float64
    wide, kind, places = (float32, int32, 23) if narrow else (float64, int64, 52)
    x = graph.cast(x, wide)
    least, largest = 2.0**-127, 2.0**127
    if call["saturate"]:
        x = graph.binary_select(least, x, graph.logical_and(x >= 0.0, x < least))
        x = graph.binary_select(largest, x, x > largest)
    if mode == "nearest":
        return x
    bits = graph.bitcast(x, dtype=kind)
    if mode == "up":
        bits = graph.add(bits, (1 << places) - 1)
    found = graph.max(graph.bitcast(graph.bitwise_and(bits, -1 << places), dtype=wide), least)
    return graph.binary_select(found, x, x > least)


@operator("Cast")
def cast(call: Call, x: Tensor) -> Tensor:
    return _cast(call, x, call.dtype(call["to"]))


@operator("BitCast")
def bitcast(call: Call, x: Tensor) -> Tensor:
    return call.graph.bitcast(x, dtype=call.dtype(call["to"]))


@operator("CastLike")
def cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    return _cast(call, x, like.dtype)

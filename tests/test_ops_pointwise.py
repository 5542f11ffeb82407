"""Pointwise ops of the table against independent formulas, and what they refuse.  One line an op in `CASES`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import special

from fusegraph import dtypes as dt
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops import TABLE, Kind, TensorType
from fusegraph.ops.attributes import checked

ROOT_2_PI = np.sqrt(2 / np.pi)
VALUES = np.concatenate([
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 6.0, 1e-30, -1e-30, 1e30, -1e30],
    [1e300, -1e300, 5e-324, np.inf, -np.inf, np.nan], np.linspace(-12, 12, 97), np.linspace(-700, 700, 29),
])  # fmt: skip
PAIRS = np.meshgrid(VALUES, VALUES)
INTEGERS = np.array([0, 1, -1, 2, -3, 5, 7, 31, 32, 33, -100, 12345, 2**31 - 1, -(2**31)], np.int32)
#: Ops of which the formulas are less accurate than the references.
INEXACT = ("sin", "cos", "tan", "exp", "tanh", "sinh", "cosh", "atanh", "asin", "acos")
#: All but random numbers, which are in test_random.
POINTWISE = {name: op for name, op in TABLE.items() if op.kind is Kind.POINTWISE and not op.integers}


def phi(x: Any) -> Any:
    return np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def gelu_tanh_slope(x: Any) -> Any:
    x = np.where(np.isinf(x), x, np.clip(x, -1e9, 1e9))  # constant beyond, where x**3 would overflow
    u = ROOT_2_PI * (x + 0.044715 * x**3)
    return special.expit(2 * u) + x * 0.5 / np.cosh(u) ** 2 * ROOT_2_PI * (1 + 3 * 0.044715 * x**2)


def swish_slope(x: Any, beta: float) -> Any:
    s = special.expit(beta * x)
    return s + beta * x * s * special.expit(-beta * x)


def fmod(a: Any, b: Any) -> Any:
    def one(x: float, y: float) -> float:
        try:
            return math.fmod(x, y)
        except ValueError:
            return np.nan

    return np.vectorize(one, otypes=[float])(a, b)


def asinh_values(x: Any) -> Any:
    a = np.minimum(abs(x), 1e150)
    return np.copysign(
        np.where(abs(x) > 1e150, np.log(abs(x)) + np.log(2), np.log1p(a + a * a / (1 + np.hypot(1, a)))), x
    )


def shifted(a: Any, b: Any, shift: Callable[[int, int], int]) -> Any:
    """Of int32, by exact integers; by all bits, and more, where b is not one of the 32."""
    exact = [shift(int(x), int(n) if 0 <= n < 32 else 64) for x, n in zip(a, b)]
    return np.array([(e + 2**31) % 2**32 - 2**31 for e in exact])


def power(a: Any, b: Any) -> Any:
    def one(x: float, y: float) -> float:
        try:
            return math.pow(x, y)
        except OverflowError:
            return np.inf if x > 0 or y % 2 == 0 else -np.inf
        except ValueError:
            return np.nan if x != 0 else np.copysign(np.inf, x) if y % 2 == 1 else np.inf

    return np.vectorize(one, otypes=[float])(a, b)


def relu_values(x: Any, slope: float, low: float, high: float) -> Any:
    return np.minimum(np.where(x < low, low + slope * (x - low), x), high)


Formula = Callable[..., Any]
#: op -> list of (attributes, formula in float64 of the operands, independent of the entry's reference).
CASES: dict[str, list[tuple[dict[str, Any], Formula]]] = {
    "add": [({}, lambda a, b: a + b)],
    "sub": [({}, lambda a, b: a - b)],
    "mul": [({}, lambda a, b: a * b)],
    "div": [({}, lambda a, b: a / b)],
    "bias": [({}, lambda a, b: a + b)],
    "scale": [({}, lambda a, b: a * b)],
    "add_square": [({}, lambda a, b: a + b**2)],
    "mod": [({}, fmod)],
    "pow": [({}, power)],
    "max": [({}, lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a > b, a, b)))],
    "min": [({}, lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a < b, a, b)))],
    "neg": [({}, lambda x: 0 - x)],
    "abs": [({}, lambda x: np.where(x < 0, -x, x))],
    "sign": [({}, lambda x: np.where(np.isnan(x), x, 1.0 * (x > 0) - (x < 0)))],
    "reciprocal": [({}, lambda x: x ** np.float64(-1))],
    "sqrt": [({}, lambda x: np.where(x == -np.inf, np.nan, x**0.5))],
    "rsqrt": [({}, lambda x: np.where(x == -np.inf, np.nan, 1 / np.sqrt(x)))],
    "clamp": [
        ({"min": -1.5, "max": 2}, lambda x: np.minimum(np.maximum(x, -1.5), 2)),
        ({"min": None, "max": 2.0}, lambda x: np.minimum(x, 2)),
        ({"min": -1.0, "max": None}, lambda x: np.maximum(x, -1)),
    ],
    "ceil": [({}, lambda x: -np.floor(-x))],
    "floor": [({}, lambda x: -np.ceil(-x))],
    "round": [({}, np.round)],
    "identity": [({}, lambda x: x)],
    "narrow": [({"dtype": "float32"}, lambda x: x)],
    "bitcast": [({}, lambda x: np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint64).reshape(x.shape))],
    "gen_index": [({"axis": -1}, lambda x: np.arange(x.size)), ({"axis": 0}, lambda x: np.indices(x.shape)[0])],
    "exp": [({}, lambda x: np.exp2(x / 4 * np.log2(np.e)) ** 4)],
    "exp2": [({}, lambda x: np.float64(2) ** x)],
    "expm1": [({}, special.expm1)],
    "log": [({}, lambda x: special.xlogy(1, x))],
    "log2": [({}, lambda x: np.log(x) / np.log(2))],
    "log1p": [({}, special.log1p)],
    "sin": [({}, lambda x: np.imag(np.exp(1j * x)))],
    "cos": [({}, lambda x: np.real(np.exp(1j * x)))],
    "tan": [({}, lambda x: np.sin(x) / np.cos(x))],
    "asin": [({}, lambda x: np.arctan2(x, np.sqrt((1 - x) * (1 + x))))],
    "acos": [({}, lambda x: np.arctan2(np.sqrt((1 - x) * (1 + x)), x))],
    "atan": [({}, lambda x: np.arctan2(x, 1))],
    "sinh": [({}, lambda x: np.copysign(0.5, x) * (np.expm1(abs(x)) + 1 - np.exp(-abs(x))))],
    "cosh": [({}, lambda x: 0.5 * np.exp(x) + 0.5 * np.exp(-x))],
    "asinh": [({}, asinh_values)],
    "acosh": [({}, lambda x: np.log(x) + np.log1p(np.sqrt(1 - 1 / x) * np.sqrt(1 + 1 / x)))],
    "atanh": [({}, lambda x: 0.5 * (np.log1p(x) - np.log1p(-x)))],
    "trunc": [({}, lambda x: np.copysign(np.floor(abs(x)), x))],
    "quotient": [({}, lambda a, b: np.where(b == 0, 0, a / np.where(b == 0, 1, b)).astype(np.int64).astype(np.int32))],
    "bitwise_and": [({}, lambda a, b: ~(~a | ~b))],
    "bitwise_or": [({}, lambda a, b: ~(~a & ~b))],
    "bitwise_xor": [({}, lambda a, b: (a | b) - (a & b))],
    "bitwise_not": [({}, lambda x: -1 - x)],
    "shift_left": [({}, lambda a, b: shifted(a, b, lambda x, n: x * 2**n))],
    "shift_right": [({}, lambda a, b: shifted(a, b, lambda x, n: x // 2**n))],
    "erf": [({}, special.erf)],
    "cmp_eq": [({}, lambda a, b: a == b)],
    "cmp_neq": [({}, lambda a, b: ~(a == b))],
    "cmp_gt": [({}, lambda a, b: b < a)],
    "cmp_ge": [({}, lambda a, b: b <= a)],
    "cmp_lt": [({}, lambda a, b: b > a)],
    "cmp_le": [({}, lambda a, b: b >= a)],
    "logical_and": [({}, lambda a, b: a.astype(bool) & b.astype(bool))],
    "logical_or": [({}, lambda a, b: a.astype(bool) | b.astype(bool))],
    "logical_not": [({}, lambda x: ~x.astype(bool))],
    "isnan": [({}, lambda x: ~(x == x))],
    "binary_select": [({}, lambda a, b, mask: np.choose(mask, [b, a]))],
    "relu": [
        ({}, lambda x: np.where(x < 0, 0, x)),
        ({"upper_clip": 6}, lambda x: np.minimum(np.maximum(x, 0), 6)),
        ({"lower_clip": -1.0}, lambda x: np.maximum(x, -1)),
        ({"negative_slope": 0.1}, lambda x: relu_values(x, 0.1, 0, np.inf)),
        ({"negative_slope": 0.1, "lower_clip": -2.0, "upper_clip": 3.0}, lambda x: relu_values(x, 0.1, -2, 3)),
    ],
    "relu_backward": [
        ({}, lambda g, x: np.where(x > 0, g, 0)),
        ({"negative_slope": 0.1, "lower_clip": -2.0}, lambda g, x: g * np.where(x > -2, 1, 0.1)),
        ({"upper_clip": 3.0}, lambda g, x: np.where((x > 0) & (x < 3), g, 0)),
        (
            {"negative_slope": -0.5, "upper_clip": 3.0},
            lambda g, x: np.where(x >= 3, 0, np.where(x <= -6, 0, g * np.where(x > 0, 1, -0.5))),
        ),
    ],
    "leaky_relu": [({"negative_slope": 0.01}, lambda x: np.maximum(x, 0) + 0.01 * np.minimum(x, 0))],
    "leaky_relu_backward": [({"negative_slope": 0.01}, lambda g, x: g * np.where(x > 0, 1, 0.01))],
    "elu": [({}, lambda x: np.maximum(x, 0) + np.expm1(np.minimum(x, 0))),
            ({"alpha": 0.5}, lambda x: np.maximum(x, 0) + 0.5 * np.expm1(np.minimum(x, 0)))],
    "elu_backward": [({"alpha": 0.5}, lambda g, x: g * np.where(x > 0, 1, 0.5 * np.exp(x)))],
    "sigmoid": [({}, special.expit)],
    "sigmoid_backward": [({}, lambda g, x: g * (special.expit(x) * special.expit(-x)))],
    "tanh": [({}, lambda x: 2 * special.expit(2 * x) - 1)],
    "tanh_backward": [({}, lambda g, x: g * (1 / np.cosh(x) ** 2))],
    "softplus": [({}, lambda x: np.logaddexp(0, x)), ({"beta": 3}, lambda x: np.logaddexp(0, 3 * x) / 3)],
    "softplus_backward": [({"beta": 3.0}, lambda g, x: g * special.expit(3 * x))],
    "swish": [({}, lambda x: x * special.expit(x)), ({"beta": 1.7}, lambda x: x * special.expit(1.7 * x))],
    "swish_backward": [({}, lambda g, x: g * swish_slope(x, 1)), ({"beta": 1.7}, lambda g, x: g * swish_slope(x, 1.7))],
    "mish": [({}, lambda x: x * np.tanh(np.logaddexp(0, x)))],
    "gelu": [({}, lambda x: x * special.ndtr(x))],
    "gelu_backward": [({}, lambda g, x: g * (special.ndtr(x) + x * phi(x)))],
    "gelu_approx_tanh": [({}, lambda x: x * special.expit(2 * ROOT_2_PI * (x + 0.044715 * x * x * x)))],
    "gelu_approx_tanh_backward": [({}, lambda g, x: g * gelu_tanh_slope(x))],
    "hardsigmoid": [({}, lambda x: np.minimum(np.maximum(x / 6 + 0.5, 0), 1))],
    "hardswish": [({}, lambda x: x * np.minimum(np.maximum(x / 6 + 0.5, 0), 1))],
}  # fmt: skip


def types(*shapes_and_dtypes: tuple[tuple[int, ...], dt.DType]) -> tuple[TensorType, ...]:
    return tuple(TensorType(shape, dtype) for shape, dtype in shapes_and_dtypes)


def complete(name: str, attributes: dict[str, Any], operands: tuple[TensorType, ...]) -> dict[str, Any]:
    """Completes attributes by the op's defaults, normalized as the graph builder does."""
    op = TABLE[name]
    assert op.normalize is not None
    return op.normalize(operands, {**op.attributes, **checked(attributes)})


def run(name: str, attributes: dict[str, Any], *arrays: np.ndarray, dtype: dt.DType = dt.float64) -> np.ndarray:
    op = TABLE[name]
    given = tuple(TensorType(a.shape, dt.bool_ if k in op.masks else dtype) for k, a in zip(op.operands, arrays))
    return op.reference(*arrays, **complete(name, attributes, given))


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(POINTWISE)


def test_a_half_is_an_exponent_like_others() -> None:
    """Of one number for all: C's pow, not a square root, of -inf and -0."""
    given = np.array([-np.inf, -0.0, 0.0, np.inf, 4.0, -4.0])
    with np.errstate(all="ignore"):
        found = TABLE["pow"].reference(given, np.array(0.5))
    np.testing.assert_array_equal(found, power(given, 0.5))
    assert not np.signbit(found[:5]).any()


@pytest.mark.parametrize("name", CASES)
def test_reference(name: str) -> None:
    arity, floats = len(TABLE[name].operands), "float" in TABLE[name].cuda or not TABLE[name].reads_values
    if not floats:
        arrays = [p.ravel() for p in np.meshgrid(*[INTEGERS] * arity)]
    elif arity == 1:
        arrays = [VALUES]
    elif name.endswith("_backward"):
        arrays = [np.full_like(VALUES, -1.25), VALUES]
    else:
        arrays = [p.ravel() for p in PAIRS]
    if arity == 3:
        arrays.append(np.arange(arrays[0].size) % 3 == 0)
    for attributes, formula in CASES[name]:
        with np.errstate(all="ignore"):
            expected = formula(*arrays)
        result = run(name, attributes, *arrays, dtype=dt.float64 if floats else dt.int32)
        tolerance = {"rtol": 1e-13, "atol": 1e-300}
        if name in INEXACT:
            tolerance = {"rtol": 1e-11, "atol": 1e-15}
        if "backward" in name or name.startswith("hard"):
            tolerance["atol"] = 1e-15
        finite = np.abs(arrays[0]) < 1e15 if name in ("sin", "cos", "tan") else slice(None)
        np.testing.assert_allclose(result[finite], np.asarray(expected)[finite], **tolerance, err_msg=f"{attributes}")


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith("_backward")])
def test_backward_is_the_slope_of_forward(name: str) -> None:
    points = np.array([-7.3, -3.1, -2.2, -1.9, -0.7, -0.1, 0.1, 0.6, 2.4, 2.9, 3.3, 5.8])
    h = 1e-6
    for attributes, _ in CASES[name]:
        forward = name.removesuffix("_backward")
        slope = (run(forward, attributes, points + h) - run(forward, attributes, points - h)) / (2 * h)
        np.testing.assert_allclose(run(name, attributes, np.full_like(points, 3.0), points), 3 * slope, atol=1e-8)


def test_at_kinks_and_infinities() -> None:
    one, zero = np.ones(1), np.zeros(1)
    assert run("relu_backward", {}, one, zero) == 0
    assert run("relu_backward", {"negative_slope": 0.25}, one, zero) == 0.25
    assert run("relu_backward", {"upper_clip": 6.0}, one, 6 * one) == 0
    assert run("relu_backward", {}, np.array([np.inf]), -one) == 0
    assert run("elu_backward", {"alpha": 0.5}, one, zero) == 0.5
    for name in ("relu", "gelu", "swish", "mish", "softplus", "elu"):
        assert np.isnan(run(name, {}, np.array([np.nan])))
        assert run(name, {}, np.array([np.inf])) == np.inf
    assert run("relu", {}, np.array([-np.inf])) == 0
    for name in ("gelu", "gelu_approx_tanh", "swish", "mish", "hardswish"):  # -inf * 0
        assert np.isnan(run(name, {}, np.array([-np.inf])))


def wrapped(value: Any, dtype: dt.DType) -> Any:
    """Wraps integers around in two's complement of the dtype's width."""
    low, high = int(dtype.min), int(dtype.max)
    return (value - low) % (high - low + 1) + low


def truncated_remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, np.sign(a) * (abs(a) % np.where(b == 0, 1, abs(b))))


@pytest.mark.parametrize("dtype", [dt.int8, dt.uint8], ids=str)
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("bias", lambda a, b: a + b),
        ("scale", lambda a, b: a * b),
        ("add_square", lambda a, b: a + b * b),
        ("mod", truncated_remainder),
        ("quotient", lambda a, b: np.where(b == 0, 0, np.sign(a * b) * (abs(a) // np.where(b == 0, 1, abs(b))))),
        ("bitwise_and", lambda a, b: (a + b - (a ^ b)) // 2),
        ("bitwise_or", lambda a, b: (a + b + (a ^ b)) // 2),
        ("bitwise_xor", lambda a, b: a + b - 2 * (a & b)),
        ("bitwise_not", lambda a, b: -1 - a),
        ("shift_left", lambda a, b: np.where((b >= 0) & (b < 8), a * 2 ** np.clip(b, 0, 8), 0)),
        ("shift_right", lambda a, b: a // 2 ** np.where((b >= 0) & (b < 8), b, 8)),
        ("trunc", lambda a, b: a),
        ("max", lambda a, b: np.where(a > b, a, b)),
        ("min", lambda a, b: np.where(a < b, a, b)),
        ("neg", lambda a, b: -a),
        ("abs", lambda a, b: np.where(a < 0, -a, a)),
        ("sign", lambda a, b: (a > 0) * 1 - (a < 0) * 1),
        ("relu", lambda a, b: np.where(a < 0, 0, a)),
    ],
)
def test_integers_are_exact_and_wrap(name: str, exact: Formula, dtype: dt.DType) -> None:
    values = np.arange(int(dtype.min), int(dtype.max) + 1).astype(dtype.numpy)
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    result = run(name, {}, *((a,) if len(TABLE[name].operands) == 1 else (a, b)), dtype=dtype)
    assert result.dtype == dtype.numpy
    np.testing.assert_array_equal(result, wrapped(exact(a.astype(np.int64), b.astype(np.int64)), dtype))


@pytest.mark.parametrize("dtype", [dt.int32, dt.int64], ids=str)
def test_wide_integers_at_their_limits(dtype: dt.DType) -> None:
    low, high = int(dtype.min), int(dtype.max)
    values = np.array([low, low + 1, -7, -1, 0, 1, 3, high - 1, high], dtype=dtype.numpy)
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    for name, exact in (("add", int.__add__), ("sub", int.__sub__), ("mul", int.__mul__)):
        expected = [wrapped(exact(int(x), int(y)), dtype) for x, y in zip(a, b)]
        np.testing.assert_array_equal(run(name, {}, a, b, dtype=dtype), expected)
    remainders = [0 if y == 0 else abs(int(x)) % abs(int(y)) * (-1 if x < 0 else 1) for x, y in zip(a, b)]
    np.testing.assert_array_equal(run("mod", {}, a, b, dtype=dtype), remainders)
    np.testing.assert_array_equal(run("abs", {}, values[:1], dtype=dtype), [low])


# ---- types

FLOAT, INT8 = [((1,), dt.float32)], [((1,), dt.int8)]


def infer(name: str, *given: tuple[tuple[int, ...], dt.DType], **attributes: Any) -> TensorType:
    op, operands = TABLE[name], types(*given)
    return op.infer(operands, complete(name, attributes, operands))


def test_result_types() -> None:
    f16, i8 = dt.float16, dt.int8
    assert infer("add", ((2, 1, 4), f16), ((3, 1), dt.bfloat16)) == TensorType((2, 3, 4), dt.float32)
    assert infer("mul", ((0, 3), i8), ((1, 3), dt.uint8)) == TensorType((0, 3), dt.int32)
    assert infer("add", ((), i8), ((5,), i8)) == TensorType((5,), i8)
    assert infer("cmp_gt", ((4,), f16), ((), f16)) == TensorType((4,), dt.bool_)
    assert infer("logical_not", ((4,), i8)) == TensorType((4,), dt.bool_)
    assert infer("isnan", ((4,), f16)).dtype == dt.bool_
    assert infer("gen_index", ((4, 2), f16), axis=-2) == TensorType((4, 2), dt.int32)
    assert infer("identity", ((4,), f16), dtype="int8") == TensorType((4,), i8)
    assert infer("identity", ((4,), f16)).dtype == f16
    assert infer("binary_select", ((4,), i8), ((2, 1), i8), ((4,), dt.int64)) == TensorType((2, 4), i8)
    assert infer("max", ((1,), dt.bool_), ((1,), dt.bool_)).dtype == dt.bool_


def test_normalized_attributes() -> None:
    one = types(((2, 3), dt.float16))
    assert complete("gen_index", {"axis": -1}, one) == {"axis": 1}
    assert complete("identity", {"dtype": "half"}, one) == {"dtype": dt.float16, "saturate": True}
    clamp = complete("clamp", {"min": np.float32(0.5), "max": 2}, one)
    assert clamp == {"min": 0.5, "max": 2.0}
    assert all(type(v) is float for v in clamp.values())
    assert type(complete("clamp", {"min": 1.0}, types(((1,), dt.int8)))["min"]) is int


@pytest.mark.parametrize(
    ("error", "text", "name", "given", "attributes"),
    [
        (ShapeError, r"\[2, 3\] and \[4, 3\].*axis -2.*2 and 4", "add", [((2, 3), dt.int8), ((4, 3), dt.int8)], {}),
        (ShapeError, r"sizes are 0 and 3", "add", [((0,), dt.int8), ((3,), dt.int8)], {}),
        (DTypeError, r"exp does not take int32; cast to one of float64, float32, ", "exp", [((1,), dt.int32)], {}),
        (DTypeError, r"div does not take uint8", "div", [((1,), dt.uint8)] * 2, {}),
        (DTypeError, r"add does not take bool; cast to one of .*int64", "add", [((1,), dt.bool_)] * 2, {}),
        (DTypeError, r"unknown dtype 'int7'", "identity", INT8, {"dtype": "int7"}),
        (AttributeValueError, r"min is at most max, got min = 2.0 and max = 1.0", "clamp", FLOAT, {"min": 2, "max": 1}),
        (AttributeValueError, r"min, max or both", "clamp", FLOAT, {}),
        (AttributeValueError, r"min = 0.5 is no int8", "clamp", INT8, {"min": 0.5}),
        (AttributeValueError, r"max = 300 is no int8, an integer in \[-128, 127\]", "clamp", INT8, {"max": 300}),
        (AttributeValueError, r"1e\+39 does not fit", "clamp", [((1,), dt.float16)], {"max": 1e39}),
        (AttributeValueError, r"alpha is a finite number, got nan", "elu", FLOAT, {"alpha": np.nan}),
        (AttributeValueError, r"negative_slope is a number, got '0'", "leaky_relu", FLOAT, {"negative_slope": "0"}),
        (AttributeValueError, r"negative_slope is a number, got True", "leaky_relu", FLOAT, {"negative_slope": True}),
        (AttributeValueError, r"negative_slope is 0 for int8", "relu", INT8, {"negative_slope": 2}),
        (AttributeValueError, r"lower_clip is at most upper_clip", "relu", FLOAT, {"upper_clip": -1}),
        (AttributeValueError, r"beta is positive, got 0", "softplus", FLOAT, {"beta": 0}),
        (AttributeValueError, r"alpha is a finite number, got inf", "elu", FLOAT, {"alpha": np.inf}),
        (AttributeValueError, r"axis 2 is not one of the 2 axes of", "gen_index", [((4, 5), dt.int8)], {"axis": 2}),
        (ShapeError, r"too long for an int32", "gen_index", [((2**31,), dt.int8)], {"axis": 0}),
        (AttributeValueError, r"axis is an integer, got 0.5", "gen_index", [((4, 5), dt.int8)], {"axis": 0.5}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, name: str, given: Any, attributes: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        infer(name, *given, **attributes)


def test_entries_are_complete() -> None:
    for name, op in POINTWISE.items():
        assert op.doc, name
        assert op.cuda or name == "gen_index", name
        assert all(kind in ("float", "int", "bool") for kind in op.cuda), name

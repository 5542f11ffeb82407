"""Activation functions and their gradients, ``<name>_backward(loss, input)``, where input is the forward op's operand.

The references are written so that they are accurate in the tails, where the textbook formulas cancel.  Bounds in ulps
hold for approximate instructions as inexact as PTX allows them to be (tests/test_device_math.py).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.errors import AttributeValueError
from fusegraph.ops.base import REQUIRED, Array, Attributes
from fusegraph.ops.pointwise import FUNCTION, ROUNDING, SIMPLE, backward, number, optional_number, positive, unary
from fusegraph.ops.reverse import Reverse, by_backward, linear

# ---- references

_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_TANH_SCALE = math.sqrt(8 / math.pi)  # gelu_approx_tanh is x * sigmoid(_TANH_SCALE * (x + 0.044715 x^3))


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, e, 1.0) / (1 + e))


def _sigmoid_slope(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.asarray(e / (1 + e) ** 2)


def _normal_cdf(x: Array) -> Array:
    return np.asarray(0.5 * _erfc(-x * math.sqrt(0.5)))


def _gelu_backward(loss: Array, input: Array) -> Array:
    density = np.exp(-0.5 * input * input) / math.sqrt(2 * math.pi)
    return np.asarray(loss * (_normal_cdf(input) + input * density))


def _gelu_approx_tanh(x: Array) -> Array:
    return np.asarray(x * _sigmoid(_TANH_SCALE * x * (1 + 0.044715 * x * x)))


def _gelu_approx_tanh_backward(loss: Array, input: Array) -> Array:
    square = np.minimum(input * input, 1e4)  # beyond it the second term is 0, and 0 * inf would be NaN
    u = _TANH_SCALE * input * (1 + 0.044715 * square)
    slope = _TANH_SCALE * (1 + 3 * 0.044715 * square)
    return np.asarray(loss * (_sigmoid(u) + input * _sigmoid_slope(u) * slope))


def _mish(x: Array) -> Array:
    w = np.exp(np.minimum(x, 40))  # tanh(log(1 + w)) = w (w + 2) / (w (w + 2) + 2)
    n = w * (w + 2)
    return np.asarray(x * (n / (n + 2)))


def _swish_backward(loss: Array, input: Array, beta: float) -> Array:
    return np.asarray(loss * (_sigmoid(beta * input) + beta * (input * _sigmoid_slope(beta * input))))


def _loss_scale(loss: Array, input: Array, **_: float) -> Array:
    """Returns the magnitude of the terms of gradients that cross zero: about the loss, as their factors are near 1."""
    return np.abs(loss)


# ---- relu


def _relu(x: Array, negative_slope: float, lower_clip: float, upper_clip: float | None) -> Array:
    if negative_slope == 0:
        y = np.maximum(x, np.asarray(lower_clip, dtype=x.dtype))
    else:
        y = np.where(x > lower_clip, x, lower_clip + negative_slope * (x - lower_clip))
    return np.asarray(y if upper_clip is None else np.minimum(y, np.asarray(upper_clip, dtype=x.dtype)))


def _relu_cuda(values: Attributes) -> str:
    slope, lower = values["negative_slope"], values["lower_clip"]
    if slope == 0:
        text = "math::maximum({x}, {lower_clip})" if lower else "math::relu({x})"
    else:
        text = f"math::leaky_relu({{x}}, {{negative_slope}}{', {lower_clip}' if lower else ''})"
    return text if values["upper_clip"] is None else f"math::minimum({text}, {{upper_clip}})"


def _relu_backward(
    loss: Array, input: Array, negative_slope: float, lower_clip: float, upper_clip: float | None
) -> Array:
    left = negative_slope * loss if negative_slope else np.zeros_like(loss)
    gradient = np.where(input > lower_clip, loss, left)
    if upper_clip is None:
        return gradient
    return np.where(_relu(input, negative_slope, lower_clip, None) >= upper_clip, 0.0, gradient)


def _relu_backward_cuda(values: Attributes) -> str:
    slope, lower = values["negative_slope"], values["lower_clip"]
    corner = ", {lower_clip}" if lower else ""
    if slope == 0:
        text = f"math::relu_backward({{loss}}, {{input}}{corner})"
    else:
        text = f"math::leaky_relu_backward({{loss}}, {{input}}, {{negative_slope}}{corner})"
    if values["upper_clip"] is None:
        return text
    forward = _relu_cuda({**values, "upper_clip": None}).replace("{x}", "{input}")
    return f"{forward} >= {{upper_clip}} ? 0 : {text}"


def _check_relu(values: dict[str, Any], dtype: DType) -> None:
    lower, upper = values["lower_clip"], values["upper_clip"]
    if upper is not None and lower > upper:
        raise AttributeValueError(f"lower_clip is at most upper_clip, got {lower} and {upper}")
    if not dtype.is_float and values["negative_slope"] != 0:
        raise AttributeValueError(f"negative_slope is 0 for {dtype} operands; cast to a float first")


_RELU: Any = {
    "negative_slope": (0.0, number),
    "lower_clip": (0.0, number),
    "upper_clip": (None, optional_number),
}

unary(
    "relu",
    _relu,
    """x above lower_clip, lower_clip + negative_slope * (x - lower_clip) below, and at most upper_clip.

    An upper_clip of None is no limit.  With the defaults max(x, 0).  NaN stays NaN.""",
    ROUNDING,
    attributes=_RELU,
    validate=_check_relu,
    float=_relu_cuda,
    int=_relu_cuda,
    ulps=3,
    scale=lambda x, negative_slope, lower_clip, upper_clip: np.abs(x) + abs(lower_clip),
    gradient=by_backward,
)
backward(
    "relu_backward",
    _relu_backward,
    """Gradient of relu: loss where x > lower_clip, negative_slope * loss elsewhere, 0 where relu reaches upper_clip.

    So at lower_clip it is the gradient of the side below.  NaN in the input is not above lower_clip.""",
    SIMPLE,
    attributes=_RELU,
    validate=_check_relu,
    float=_relu_backward_cuda,
    ulps=1,
    gradient=linear(),
)
unary(
    "leaky_relu",
    lambda x, negative_slope: np.where(x > 0, x, negative_slope * x),
    "x above 0, negative_slope * x below.",
    SIMPLE,
    attributes={"negative_slope": (REQUIRED, number)},
    ulps=2,
    gradient=by_backward,
)
backward(
    "leaky_relu_backward",
    lambda loss, input, negative_slope: np.where(input > 0, loss, negative_slope * loss),
    "Gradient of leaky_relu: loss where x > 0, negative_slope * loss elsewhere, at 0 and for NaN too.",
    SIMPLE,
    attributes={"negative_slope": (REQUIRED, number)},
    ulps=1,
    gradient=linear(),
)

# ---- exponential


unary(
    "elu",
    lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)),
    "x above 0, alpha * (exp(x) - 1) below.",
    FUNCTION,
    attributes={"alpha": (1.0, number)},
    ulps=3,
    gradient=by_backward,
)
backward(
    "elu_backward",
    lambda loss, input, alpha: np.where(input > 0, loss, loss * (alpha * np.exp(input))),
    "Gradient of elu: loss where x > 0, alpha * exp(x) * loss elsewhere (alpha * loss at 0).",
    FUNCTION,
    attributes={"alpha": (1.0, number)},
    ulps=4,
    gradient=linear(
        lambda at, loss, x, alpha: at.graph.binary_select(
            0.0, at.loss * at.graph.elu_backward(loss, x, alpha), at.graph.cmp_gt(x, 0)
        )
    ),
)


def _by_sigmoid_slope(at: Reverse, loss: Any, x: Any) -> Any:
    """The slope s (1 - s) has the slope s (1 - s) (1 - 2 s), and 1 - 2 s is -tanh(x / 2)."""
    return at.loss * (at.graph.sigmoid_backward(loss, x) * (at.graph.tanh(x * 0.5) * -1.0))


unary("sigmoid", _sigmoid, "1 / (1 + exp(-x))", FUNCTION, ulps=8, gradient=by_backward)
backward(
    "sigmoid_backward",
    lambda loss, input: loss * _sigmoid_slope(input),
    "Gradient of sigmoid.",
    FUNCTION,
    ulps=11,
    gradient=linear(_by_sigmoid_slope),
)
unary("tanh", np.tanh, "Hyperbolic tangent.", FUNCTION, ulps=4, finite=True, gradient=by_backward)
backward(
    "tanh_backward",
    lambda loss, input: loss * (4 * _sigmoid_slope(2 * input)),
    "Gradient of tanh, (1 - tanh(x)^2) * loss.",
    FUNCTION,
    ulps=11,
    gradient=linear(lambda at, loss, x: at.loss * (at.graph.tanh_backward(loss, x) * (at.graph.tanh(x) * -2.0))),
)
# beta * x is rounded before exp, which magnifies the error by |beta * x|, at most 104 where exp does not underflow.
unary(
    "softplus",
    lambda x, beta: np.maximum(x, 0) + np.log1p(np.exp(-beta * np.abs(x))) / beta,
    "log(1 + exp(beta * x)) / beta, for positive beta.",
    FUNCTION,
    attributes={"beta": (1.0, positive)},
    float=lambda values: "math::softplus({x})" if values["beta"] == 1 else "math::softplus({x}, {beta})",
    ulps=110,
    gradient=by_backward,
)
backward(
    "softplus_backward",
    lambda loss, input, beta: loss * _sigmoid(beta * input),
    "Gradient of softplus.",
    FUNCTION,
    attributes={"beta": (1.0, positive)},
    float=lambda values: "math::softplus_backward({loss}, {input}" + (")" if values["beta"] == 1 else ", {beta})"),
    ulps=110,
    gradient=linear(lambda at, loss, x, beta: at.loss * (at.graph.sigmoid_backward(loss, x * beta) * beta)),
)
unary(
    "swish",
    lambda x, beta: x * _sigmoid(beta * x),
    "x * sigmoid(beta * x)",
    FUNCTION,
    attributes={"beta": (1.0, number)},
    float=lambda values: "math::swish({x})" if values["beta"] == 1 else "math::swish({x}, {beta})",
    ulps=110,
    gradient=by_backward,
)
backward(
    "swish_backward",
    _swish_backward,
    "Gradient of swish.",
    FUNCTION,
    attributes={"beta": (1.0, number)},
    float=lambda values: "math::swish_backward({loss}, {input}" + (")" if values["beta"] == 1 else ", {beta})"),
    ulps=8,
    scale=_loss_scale,
    gradient=linear(
        # with s = sigmoid(beta x): 2 beta s' + beta x (beta s''), s'' being s' tanh(beta x / 2) (-1)
        lambda at, loss, x, beta: (
            at.loss
            * (at.graph.sigmoid_backward(loss, x * beta) * ((2.0 - (x * beta) * at.graph.tanh(x * (beta / 2))) * beta))
        )
    ),
)


def _by_mish(at: Reverse, x: Any) -> Any:
    """With t = tanh(softplus(x)): t + x (1 - t^2) sigmoid(x)."""
    g = at.graph
    plus = g.softplus(x)
    return at.loss * (g.tanh(plus) + x * (g.tanh_backward(g.sigmoid(x), plus)))


unary("mish", _mish, "x * tanh(log(1 + exp(x)))", FUNCTION, ulps=10, cudnn=False, gradient=_by_mish)

# ---- GELU.  References are off far out in the tail, from the rounded arguments of erfc and exp.

unary(
    "gelu",
    lambda x: x * _normal_cdf(x),
    "x / 2 * (1 + erf(x / sqrt(2)))",
    FUNCTION,
    ulps=11,
    reference_ulps=3000,
    gradient=by_backward,
)


def _by_gelu_slope(at: Reverse, loss: Any, x: Any) -> Any:
    """The slope of cdf(x) + x density(x) is (2 - x^2) density(x)."""
    density = at.graph.exp((x * x) * -0.5) * (1 / math.sqrt(2 * math.pi))
    return at.loss * (loss * ((2.0 - x * x) * density))


backward(
    "gelu_backward",
    _gelu_backward,
    "Gradient of gelu.",
    FUNCTION,
    ulps=8,
    scale=_loss_scale,
    gradient=linear(_by_gelu_slope),
)
unary(
    "gelu_approx_tanh",
    _gelu_approx_tanh,
    "x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))",
    FUNCTION,
    ulps=300,
    reference_ulps=3000,
    gradient=by_backward,
)


def _by_gelu_approx_tanh_slope(at: Reverse, loss: Any, x: Any) -> Any:
    """With u as in the gradient: s'(u) (2 u' + x u'' - x u'^2 tanh(u / 2)), s being sigmoid."""
    g, square = at.graph, x * x
    u = x * (square * 0.044715 + 1.0) * _TANH_SCALE
    first, second = (square * (3 * 0.044715) + 1.0) * _TANH_SCALE, x * (6 * 0.044715 * _TANH_SCALE)
    rest = first * 2.0 + x * (second - first * first * g.tanh(u * 0.5))
    return at.loss * (g.sigmoid_backward(loss, u) * rest)


backward(
    "gelu_approx_tanh_backward",
    _gelu_approx_tanh_backward,
    "Gradient of gelu_approx_tanh.",
    FUNCTION,
    ulps=16,
    scale=_loss_scale,
    gradient=linear(_by_gelu_approx_tanh_slope),
)

# ---- piecewise linear relatives


def _inside(at: Reverse, x: Any) -> Any:
    return at.graph.logical_and(at.graph.cmp_gt(x, -3), at.graph.cmp_lt(x, 3))


unary(
    "hardsigmoid",
    lambda x: np.clip(x + 3, 0, 6) / 6,
    "min(max(x + 3, 0), 6) / 6",
    SIMPLE,
    ulps=3,
    cudnn=False,
    gradient=lambda at, x: at.graph.binary_select(at.loss * (1 / 6), 0.0, _inside(at, x)),
)
unary(
    "hardswish",
    lambda x: x * (np.clip(x + 3, 0, 6) / 6),
    "x * min(max(x + 3, 0), 6) / 6",
    SIMPLE,
    ulps=4,
    cudnn=False,
    gradient=lambda at, x: at.graph.binary_select(
        at.loss * (x * (1 / 3) + 0.5), at.graph.binary_select(at.loss, 0.0, at.graph.cmp_ge(x, 3)), _inside(at, x)
    ),
)

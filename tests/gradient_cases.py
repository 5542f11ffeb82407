"""Ops of the table applied to arrays, with the same function in torch: what test_gradients.py differentiates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]


@dataclass
class Case:
    """An op applied to arrays; ``of`` is the same function in torch, None where differences are taken.

    attributes  of the op; "operands" names those that the arrays are, where some are left out.
    still       the positions of arrays of floats that no gradient is asked for, besides those of integers and bool.
    results     which of several results are differentiated.
    """

    arrays: Sequence[Array]
    of: Function | None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    still: Sequence[int] = ()
    results: Sequence[int] = (0,)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape)


def between(low: float, high: float, *shape: int) -> Array:
    return np.random.default_rng(sum(shape)).uniform(low, high, shape)


VALUES = np.concatenate([normal(20) * 3, [0.5, -0.5, 1.0, -1.0]])
_POSITIVE = between(0.1, 3, 20)
_INNER = between(-0.9, 0.9, 20)


def unary(of: Function | None, x: Array = VALUES, **attributes: Any) -> list[Case]:
    return [Case([x], of, attributes)]


def binary(of: Function | None, low: float = -2, high: float = 2) -> list[Case]:
    """Two operands: of one shape, broadcast both ways, and of different ranks."""
    shapes = [((3, 4), (3, 4)), ((3, 1), (1, 4)), ((2, 3, 4), (4,)), ((), (5,)), ((1, 4), (2, 3, 1))]
    return [Case([between(low, high, *a), between(low, high, *b) + 0.01], of) for a, b in shapes]


# ---- reductions

_OF_MODES: dict[str, Function] = {
    "add": torch.sum,
    "avg": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "amax": lambda t, dim, keepdim: t.abs().amax(dim=dim, keepdim=keepdim),
    "norm1": lambda t, dim, keepdim: t.abs().sum(dim=dim, keepdim=keepdim),
    "norm2": torch.linalg.vector_norm,
    "logaddexp": torch.logsumexp,
    "var": torch.var,
}


def reductions() -> list[Case]:
    cases = []
    for mode, of in _OF_MODES.items():
        for axes, dim in ((None, (0, 1, 2)), (1, (1,)), ((0, 2), (0, 2))):
            for keep in (True, False):
                at = {"mode": mode, "axes": axes, "keepdims": keep, "correction": int(mode == "var")}
                cases.append(Case([normal(3, 4, 5)], partial(of, dim=dim, keepdim=keep), at))
    cases += [
        Case([normal(3)], lambda t: t * 1, {"mode": mode, "axes": ()}) for mode in ("add", "avg", "max", "min", "mul")
    ]
    zeros = np.array([[1.5, 0.0, 2.0], [0.0, 0.0, 1.0], [1.0, -2.0, 3.0]])
    for x in (normal(3, 4), zeros):
        cases.append(Case([x], lambda t: t.prod(1, keepdim=True), {"mode": "mul", "axes": 1}))
        rest = {"mode": "mul_no_zeros", "axes": 1}
        cases.append(Case([x], lambda t: torch.where(t == 0, 1.0, t).prod(1, keepdim=True), rest))
    ties = np.array([[1.0, 1.0, 0.0], [2.0, -2.0, -2.0]])
    length = partial(torch.linalg.vector_norm, dim=1, keepdim=True)
    return [
        *cases,
        Case([ties], lambda t: t.amax(1, keepdim=True), {"mode": "max", "axes": 1}),
        Case([np.zeros((2, 3))], length, {"mode": "norm2", "axes": 1}),
    ]


# ---- products

_WAYS: tuple[tuple[int, dict[str, Any], int, tuple[int, ...], tuple[int, ...]], ...] = (
    (1, {"stride": 2, "padding": 1, "dilation": 2}, 1, (11,), (3,)),
    (2, {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}, 2, (7, 8), (3, 2)),
    (2, {}, 1, (5, 5), (1, 1)),
    (2, {"stride": 3}, 4, (8, 9), (2, 2)),
    (3, {"padding": 1}, 4, (3, 4, 3), (2, 3, 2)),
)


def _loss(x: Array, w: Array, rank: int, how: Any) -> Array:
    return normal(*getattr(F, f"conv{rank}d")(torch.tensor(x), torch.tensor(w), **how).shape)


def convolutions() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {"conv_fprop": [], "conv_dgrad": [], "conv_wgrad": []}
    for rank, how, groups, size, taps in _WAYS:
        x, w, how = normal(2, 4, *size), normal(4, 4 // groups, *taps), {**how, "groups": groups}
        loss = _loss(x, w, rank, how)
        by_x, by_w = (getattr(torch.nn.grad, f"conv{rank}d_{key}") for key in ("input", "weight"))
        found["conv_fprop"].append(Case([x, w], partial(getattr(F, f"conv{rank}d"), **how), how))
        found["conv_dgrad"].append(
            Case([loss, w], lambda y, w, f=by_x, n=x.shape, h=how: f(n, w, y, **h), {**how, "size": size})
        )
        found["conv_wgrad"].append(
            Case([x, loss], lambda x, y, f=by_w, n=w.shape, h=how: f(x, n, y, **h), {**how, "taps": taps})
        )
    flipped = {"mode": "convolution", "padding": ((1, 2), (0, 1))}
    w = normal(3, 2, 3, 2)
    found["conv_fprop"].append(Case([normal(1, 2, 6, 5), w], None, flipped))
    found["conv_dgrad"].append(Case([normal(1, 3, 7, 5), w], None, flipped))
    found["conv_wgrad"].append(Case([normal(1, 2, 6, 5), normal(1, 3, 7, 5)], None, flipped))
    return found


def matrices() -> list[Case]:
    shapes = (
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 3, 4), (3, 4, 2)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((1, 3, 4), (1, 4, 2)),
        ((1, 3, 4), (2, 1, 4, 2)),
    )
    return [Case([normal(*a), normal(*b, seed=1)], torch.matmul) for a, b in shapes]


# ---- movement


def pads() -> list[Case]:
    x = normal(1, 2, 4, 5)
    constant = Case([x], lambda t: F.pad(t, (1, 2, 0, 3)), {"padding": (0, 0, (0, 3), (1, 2)), "value": 4.0})
    return [
        constant,
        *(
            Case([x], partial(F.pad, pad=(3, 1, 1, 2), mode=mode), {"padding": (0, 0, (1, 2), (3, 1)), "mode": mode})
            for mode in ("reflect", "replicate")
        ),
    ]


def slices() -> list[Case]:
    x = normal(7, 6)
    return [
        Case([x], lambda t: t[1:5, ::2], {"starts": (1, 0), "stops": (5, None), "steps": (1, 2)}),
        Case([x], lambda t: t.flip(0)[0:6:3], {"starts": (6, None), "stops": (0, None), "steps": (-3, None)}),
        Case([x], lambda t: t.flip(1), {"steps": (None, -1)}),
        Case([x], lambda t: t[2:2], {"starts": (2, None), "stops": (2, None)}),
        Case([x], lambda t: t[3:4, 2::5], {"starts": (3, 2), "stops": (4, None), "steps": (9, 5)}),
    ]


def _clipped(t: Any) -> Any:
    return torch.where(t > 0.5, t, 0.5 + 0.1 * (t - 0.5)).clamp(max=2)


def _head(how: Mapping[str, Any]) -> Function:
    def losses(x: Any, w: Any, target: Any, bias: Any) -> tuple[Any, Any]:
        logits = F.linear(x, w, bias)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **how)
        return loss.reshape(target.shape if loss.ndim else ()), logits.logsumexp(-1)

    return losses


_CLASSES = np.array([[0, 6, 4, 3], [2, 2, 5, 1]])
_ONES = Case([np.ones(3), np.array([1.0, 2.0, 0.0])], torch.maximum)

#: op -> where it is differentiated.
CASES: dict[str, list[Case]] = {
    "reduction": reductions(),
    "matmul": matrices(),
    **convolutions(),
    # arithmetic
    "add": binary(torch.add),
    "sub": binary(torch.sub),
    "mul": binary(torch.mul),
    "div": binary(torch.div, 0.5, 2),
    "bias": binary(torch.add),
    "scale": binary(torch.mul),
    "add_square": binary(lambda a, b: a + b * b),
    "mod": binary(torch.fmod, 0.3, 2),
    "pow": [
        *binary(torch.pow, 0.3, 2),
        Case([np.array([0.0, 0.0, -2.0, 3.0]), np.array([0.0, 2.0, 3.0, 0.0])], torch.pow, still=(1,)),
    ],
    "max": [*binary(torch.maximum), _ONES],
    "min": [*binary(torch.minimum), Case(_ONES.arrays, torch.minimum)],
    "neg": unary(torch.neg),
    "abs": unary(torch.abs),
    "sign": unary(torch.sign),
    "reciprocal": unary(torch.reciprocal),
    "sqrt": unary(torch.sqrt, _POSITIVE),
    "rsqrt": unary(torch.rsqrt, _POSITIVE),
    "clamp": [
        *unary(lambda t: t.clamp(-0.5, 1), min=-0.5, max=1),
        *unary(lambda t: t.clamp(min=0.5), min=0.5),
        *unary(lambda t: t.clamp(max=0.5), max=0.5),
    ],
    "ceil": unary(torch.ceil),
    "floor": unary(torch.floor),
    "trunc": unary(torch.trunc),
    "round": unary(torch.round),
    "identity": [*unary(lambda t: t * 1), *unary(lambda t: t.float(), dtype="float32")],
    "narrow": unary(lambda t: t.float(), dtype="float32"),
    # functions
    "exp": unary(torch.exp),
    "exp2": unary(torch.exp2),
    "expm1": unary(torch.expm1),
    "log": unary(torch.log, _POSITIVE),
    "log2": unary(torch.log2, _POSITIVE),
    "log1p": unary(torch.log1p, _POSITIVE),
    "sin": unary(torch.sin),
    "cos": unary(torch.cos),
    "tan": unary(torch.tan, _INNER),
    "asin": unary(torch.asin, _INNER),
    "acos": unary(torch.acos, _INNER),
    "atan": unary(torch.atan),
    "sinh": unary(torch.sinh),
    "cosh": unary(torch.cosh),
    "asinh": unary(torch.asinh),
    "acosh": unary(torch.acosh, _POSITIVE + 1),
    "atanh": unary(torch.atanh, _INNER),
    "erf": unary(torch.erf),
    "binary_select": [
        Case([normal(3, 4), normal(4), between(-1, 1, 3, 1) > 0], lambda a, b, m: torch.where(m, a, b)),
        Case([normal(4), normal(3, 1), np.array([0.0, 1.0, 2.0, 0.0])], lambda a, b, m: torch.where(m != 0, a, b)),
    ],
    # activations
    "relu": [
        *unary(torch.relu),
        *unary(_clipped, between(-1, 4, 9), negative_slope=0.1, lower_clip=0.5, upper_clip=2.0),
    ],
    "leaky_relu": unary(lambda t: F.leaky_relu(t, 0.2), negative_slope=0.2),
    "elu": unary(lambda t: F.elu(t, 0.7), alpha=0.7),
    "sigmoid": unary(torch.sigmoid),
    "tanh": unary(torch.tanh),
    "softplus": unary(lambda t: F.softplus(t, 1.5, 1e9), beta=1.5),
    "swish": unary(lambda t: t * torch.sigmoid(1.5 * t), beta=1.5),
    "mish": unary(F.mish),
    "gelu": unary(F.gelu),
    "gelu_approx_tanh": unary(lambda t: F.gelu(t, approximate="tanh")),
    "hardsigmoid": unary(lambda t: (t + 3).clamp(0, 6) / 6),
    "hardswish": unary(lambda t: t * (t + 3).clamp(0, 6) / 6),
    # movement
    "transpose": [Case([normal(2, 3, 4)], lambda t: t.permute(2, 0, 1), {"perm": (2, 0, 1)})],
    "reshape": [Case([normal(2, 3, 4)], lambda t: t.reshape(4, 6), {"shape": (4, 6)})],
    "broadcast": [Case([normal(3, 1)], lambda t: t.expand(2, 3, 4), {"shape": (2, 3, 4)})],
    "slice": slices(),
    "pad": pads(),
    "concatenate": [Case([normal(2, 3), normal(2, 1), normal(2, 2)], lambda *t: torch.cat(t, 1), {"axis": 1})],
    "gather": [
        Case([normal(3, 5, 2), np.array([[0, 4, 4], [1, 0, 2]])], lambda t, i: t[:, i], {"axis": 1}),
        Case([normal(300, 2), np.array([3, -1, 127], np.int8)], lambda t, i: t[[3, 0, 127]], {"axis": 0}),
        Case([normal(4), np.array(2)], lambda t, i: t[2], {"axis": 0}),
    ],
    "linear_cross_entropy": [
        Case([normal(2, 4, 3), normal(7, 3), _CLASSES, normal(7)], _head(how), how, results=of)
        for how in ({"ignore_index": 2}, {"reduction": "none", "label_smoothing": 0.1}, {"reduction": "sum"})
        for of in ((0,), (0, 1))
    ],
    # random numbers depend on a shape alone
    "rng_uniform": [Case([normal(3, 4)], lambda t: t * 0, {"seed": 1, "offset": 2})],
    "rng_normal": [Case([normal(3, 4)], lambda t: t * 0, {"seed": 1, "offset": 2})],
}

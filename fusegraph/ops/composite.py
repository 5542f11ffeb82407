"""Composites: ops that are made of others of the table; `passes.decompose` writes them out.

What lies between is computed, and kept where it must be kept, in float32 (float64 for float64), whatever the operands'
dtype; the result alone is rounded to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Protocol

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.ops.base import Kind, Op, TensorType, register
from fusegraph.ops.pointwise import accepted_kinds, number
from fusegraph.ops.reduction import normal_axes

Array = np.ndarray[Any, Any]


class Writing(Protocol):
    """Where a composite's nodes are added: op and operands, the name of the part, the attributes."""

    def __call__(self, op: str, part: str, *operands: Any, **attributes: Any) -> Any: ...


Expand = Callable[..., Any]


def _single_axis(value: Any, shape: tuple[int, ...]) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise AttributeValueError(f"axis is an integer, got {value!r}")
    return normal_axes(value, len(shape))[0]


def _not_negative(name: str, value: Any, dtype: DType, shape: tuple[int, ...]) -> float:
    result = float(number(name, value, dtype, shape))
    if result < 0:
        raise AttributeValueError(f"{name} is not negative, got {value!r}")
    return result


def _composite(
    name: str,
    operands: tuple[str, ...],
    attributes: Mapping[str, Any],
    reference: Callable[..., Array],
    expand: Expand,
    doc: str,
    *,
    reduces: bool = False,
    needs_elements: bool = True,
    cudnn: str | None = None,
) -> None:
    """Registers a composite of floats.

    reduces: whether the axes go, as in a reduction; needs_elements: whether rows of no elements have no result.
    """

    def normalize(types: tuple[TensorType, ...], values: Mapping[str, Any]) -> dict[str, Any]:
        x = types[0]
        accepted_kinds(name, op.promoted(types), ("float",))
        accepted_kinds(name, x.dtype, ("float",))
        normal = dict(values)
        if "axis" in normal:
            normal["axis"] = _single_axis(normal["axis"], x.shape)
        if "axes" in normal:
            normal["axes"] = normal_axes(normal["axes"], len(x.shape))
        if "epsilon" in normal:
            normal["epsilon"] = _not_negative("epsilon", normal["epsilon"], x.dtype, x.shape)
        if "keepdims" in normal and not isinstance(normal["keepdims"], (bool, np.bool_)):
            raise AttributeValueError(f"keepdims is True or False, got {normal['keepdims']!r}")
        return normal

    def infer(types: tuple[TensorType, ...], values: Mapping[str, Any]) -> TensorType:
        x, normal = types[0], normalize(types, values)
        axes = normal.get("axes", (normal.get("axis"),))
        for d in axes if needs_elements else ():
            if x.shape[d] == 0:
                raise ShapeError(f"{name} of no elements: axis {d} has size 0")
        for key, other in zip(operands[1:], types[1:]):
            if np.broadcast_shapes(*_padded(x.shape, other.shape)) != x.shape:
                raise ShapeError(f"{key} {list(other.shape)} does not broadcast to x {list(x.shape)}")
        if not reduces:
            return x
        kept = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
        dropped = tuple(n for d, n in enumerate(x.shape) if d not in axes)
        return TensorType(kept if normal["keepdims"] else dropped, x.dtype)

    def quiet(*arrays: Array, **values: Any) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(reference(*arrays, **values))

    op = register(
        Op(
            name=name,
            kind=Kind.COMPOSITE,
            operands=operands,
            infer=infer,
            reference=quiet,
            attributes=attributes,
            normalize=normalize,
            expand=expand,
            cudnn=cudnn,
            keeps_layout=not reduces,
            doc=doc,
        )
    )


def _padded(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes for NumPy to broadcast; raises ShapeError if it cannot."""
    try:
        np.broadcast_shapes(shape, other)
    except ValueError:
        raise ShapeError(f"shapes {list(shape)} and {list(other)} do not broadcast") from None
    return shape, other


# ---- softmax and its logarithm


def _softmax_reference(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


def _softmax(write: Writing, x: Any, axis: int) -> Any:
    shifted = write("sub", "shifted", x, write("reduction", "max", x, mode="max", axes=axis))
    e = write("exp", "exp", shifted)
    total = write("reduction", "sum", e, mode="add", axes=axis)
    return write("mul", "", e, write("reciprocal", "scale", total))


_composite(
    "softmax",
    ("x",),
    {"axis": -1},
    _softmax_reference,
    _softmax,
    """exp(x - max) / sum(exp(x - max)) along an axis.  NaN where a row holds NaN or plus infinity or nothing but minus
    infinity, as this formula gives in NumPy; ShapeError for rows of no elements.""",
)


def _log_softmax_reference(x: Array, axis: int) -> Array:
    shifted = x - x.max(axis=axis, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True)))


def _log_softmax(write: Writing, x: Any, axis: int) -> Any:
    shifted = write("sub", "shifted", x, write("reduction", "max", x, mode="max", axes=axis))
    total = write("reduction", "sum", write("exp", "exp", shifted), mode="add", axes=axis)
    return write("sub", "", shifted, write("log", "log", total))


_composite(
    "log_softmax",
    ("x",),
    {"axis": -1},
    _log_softmax_reference,
    _log_softmax,
    """The logarithm of softmax along an axis, without overflow or underflow; not finite where softmax is NaN.""",
)


def _logsumexp_reference(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    most = x.max(axis=axes, keepdims=True)
    shift = np.where(np.isfinite(most), most, 0.0)
    result = shift + np.log(np.exp(x - shift).sum(axis=axes, keepdims=True))
    return np.asarray(result if keepdims else result.squeeze(axes))


def _logsumexp(write: Writing, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    def shift(keep: bool, name: str) -> Any:
        """The maximum, or 0 where it is infinite: the difference of two infinities would be NaN."""
        most = write("reduction", f"max{name}", x, mode="max", axes=axes, keepdims=keep)
        finite = write("cmp_lt", f"finite{name}", write("abs", f"magnitude{name}", most), inf)
        return write("binary_select", f"shift{name}", most, 0.0, finite)

    before = shift(True, "")
    e = write("exp", "exp", write("sub", "shifted", x, before))
    total = write("reduction", "sum", e, mode="add", axes=axes, keepdims=keepdims)
    return write("add", "", write("log", "log", total), before if keepdims else shift(False, " dropped"))


_composite(
    "logsumexp",
    ("x",),
    {"axes": -1, "keepdims": True},
    _logsumexp_reference,
    _logsumexp,
    """log(sum(exp(x))) along axes (None: all), without overflow.  Minus infinity for rows of nothing else; ShapeError
    for rows of no elements.  keepdims as in a reduction.""",
    reduces=True,
)


# ---- norms


def _layernorm_reference(x: Array, scale: Array, bias: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    centred = x - x.mean(axis=axes, keepdims=True)
    variance = (centred * centred).mean(axis=axes, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + epsilon) * scale + bias)


def _layernorm(write: Writing, x: Any, scale: Any, bias: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    centred = write("sub", "centred", x, write("reduction", "mean", x, mode="avg", axes=axes))
    square = write("mul", "square", centred, centred)
    variance = write("reduction", "variance", square, mode="avg", axes=axes)
    spread = write("rsqrt", "inverse", write("add", "shifted", variance, epsilon))
    return write("add", "", write("mul", "scaled", write("mul", "normal", centred, spread), scale), bias)


_composite(
    "layernorm",
    ("x", "scale", "bias"),
    {"axes": -1, "epsilon": 1e-5},
    _layernorm_reference,
    _layernorm,
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance (of the numbers themselves, without
    Bessel's correction) along axes (None: all).  The variance is the mean of the squared differences from the mean, so
    that large offsets cost no digits.  scale and bias broadcast to x, whose dtype the result has.""",
    needs_elements=False,
    cudnn="layernorm",
)


def _rmsnorm_reference(x: Array, scale: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + epsilon) * scale)


def _rmsnorm(write: Writing, x: Any, scale: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    mean = write("reduction", "mean", write("mul", "square", x, x), mode="avg", axes=axes)
    inverse = write("rsqrt", "inverse", write("add", "shifted", mean, epsilon))
    return write("mul", "", write("mul", "normal", x, inverse), scale)


_composite(
    "rmsnorm",
    ("x", "scale"),
    {"axes": -1, "epsilon": 1e-5},
    _rmsnorm_reference,
    _rmsnorm,
    """x / sqrt(mean(x^2) + epsilon) * scale, the mean along axes (None: all).  scale broadcasts to x, whose dtype the
    result has.""",
    needs_elements=False,
    cudnn="rmsnorm",
)

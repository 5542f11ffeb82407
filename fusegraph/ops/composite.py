"""Composites: ops that are made of others of the table; `passes.decompose` writes them out.

What lies between is computed, and kept where it must be kept, in float32 (float64 for float64 and for results of it),
whatever the operands' dtype; the result alone is rounded to its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any, Protocol

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.layout import broadcast
from fusegraph.ops.base import Array, Attributes, Kind, Op, Role, TensorType, Types, register
from fusegraph.ops.modes import reduced_shape
from fusegraph.ops.pointwise import accepted_kinds, number
from fusegraph.ops.reduction import normal_axes
from fusegraph.ops.reverse import Reverse, by_backward_of_y, kept


class Writing(Protocol):
    """Where a composite's nodes are added: op and operands, the name of the part, the attributes."""

    def __call__(self, op: str | Op, part: str, *operands: Any, **attributes: Any) -> Any: ...


Expand = Callable[..., Any]
#: Values of norm_forward_phase: training keeps what the gradient needs.
PHASES = ("inference", "training")


def single_axis(value: Any, shape: tuple[int, ...]) -> int:
    return normal_axes(value, len(shape))[0]


def not_negative(name: str, value: Any, dtype: DType, shape: tuple[int, ...]) -> float:
    result = float(number(name, value, dtype, shape))
    if result < 0:
        raise AttributeValueError(f"{name} is not negative, got {value!r}")
    return result


#: (operand types, attributes in canonical form) -> the types of the results.
Infer = Callable[[Types, Attributes], TensorType | Types]


def like_first(types: Types, _: Attributes) -> TensorType:
    """Returns the first operand's type: the result has its shape and dtype."""
    return types[0]


def reduced(x: TensorType, axes: tuple[int, ...], keepdims: bool = True) -> TensorType:
    """Returns the type of x reduced along axes."""
    return TensorType(reduced_shape(x.shape, axes, keepdims), x.dtype)


def averaged(x: Array, axes: tuple[int, ...]) -> Array:
    """Returns the mean along axes, which are kept; NaN, without a warning, where there are no elements."""
    return np.asarray(x.sum(axis=axes, keepdims=True) / np.float64(prod(x.shape[d] for d in axes)))


def check_integers(op: Op, types: Types) -> None:
    """Raises DTypeError or ShapeError unless each of an op's operands called integers is one integer."""
    for key, t in zip(op.operands, types):
        if key in op.integers and not t.dtype.is_int:
            raise DTypeError(f"{key} is an integer, got {t.dtype}")
        if key in op.integers and (prod(t.shape) != 1 or len(t.shape) > len(types[0].shape)):
            raise ShapeError(f"{key} is one number, got {list(t.shape)}")


def _checked(name: str, value: Any, x: TensorType) -> Any:
    """Returns an attribute that composites share, in canonical form; others as they are."""
    if name == "axis":
        return single_axis(value, x.shape)
    if name == "axes":
        return normal_axes(value, len(x.shape))
    if name == "epsilon":
        return not_negative(name, value, x.dtype, x.shape)
    if name in ("momentum", "probability") and not 0 <= float(number(name, value, x.dtype, x.shape)) <= 1:
        raise AttributeValueError(f"{name} is between 0 and 1, got {value!r}")
    return value


def composite(
    name: str,
    operands: tuple[str, ...],
    attributes: Attributes,
    reference: Callable[..., Any],
    expand: Expand,
    doc: str,
    *,
    infer: Infer = like_first,
    broadcasts: tuple[str, ...] | None = None,
    keeps_layout: bool = True,
    **rest: Any,
) -> None:
    """Registers a composite of floats.

    All operands broadcast to the first or, with ``broadcasts``, only those that it names.  Operands called x, y or loss
    have the first one's shape.  The other arguments are `Op`'s; NumPy's floating-point warnings are off while the
    reference runs.
    """

    def normalize(types: Types, values: Attributes) -> dict[str, Any]:
        accepted_kinds(name, op.promoted(types), ("float",))
        accepted_kinds(name, types[0].dtype, ("float",))
        check_integers(op, types)
        return {key: _checked(key, value, types[0]) for key, value in values.items()}

    def inferred(types: Types, values: Attributes) -> TensorType | Types:
        x = types[0]
        for key, other in zip(operands[1:], types[1:]):
            if broadcasts is not None and key not in (*broadcasts, "x", "y", "loss"):
                continue
            try:
                wide = broadcast([x.shape, other.shape])
            except ShapeError:
                raise ShapeError(f"shapes {list(x.shape)} and {list(other.shape)} do not broadcast") from None
            if wide != x.shape:
                raise ShapeError(f"{key} {list(other.shape)} does not broadcast to {operands[0]} {list(x.shape)}")
            if key in ("x", "y", "loss") and other.shape != x.shape:
                raise ShapeError(f"{key} {list(other.shape)} has not the shape of {operands[0]} {list(x.shape)}")
        found = infer(types, values)
        for result in found if isinstance(found, tuple) else (found,):  # some have the dtype of another operand
            accepted_kinds(name, result.dtype, ("float",))
        return found

    op = register(
        Op(
            name=name,
            kind=Kind.COMPOSITE,
            operands=operands,
            infer=inferred,
            reference=np.errstate(all="ignore")(reference),
            attributes=attributes,
            words={"norm_forward_phase": PHASES} if "norm_forward_phase" in attributes else {},
            normalize=normalize,
            expand=expand,
            keeps_layout=keeps_layout,
            doc=doc,
            **rest,
        )
    )


# ---- softmax and its logarithm


def _greatest(x: Array, axes: Any) -> Array:
    """Returns the maximum along axes, which are kept; minus infinity of no elements."""
    return np.asarray(x.max(axis=axes, keepdims=True, initial=-inf))


def _softmax_reference(x: Array, axis: int) -> Array:
    e = np.exp(x - _greatest(x, axis))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


def _softmax(write: Writing, x: Any, axis: int) -> Any:
    if x.shape[axis] == 0:  # there is no maximum of no elements, and nothing to make of it
        return write("exp", "", x)
    shifted = write("sub", "shifted", x, write("reduction", "max", x, mode="max", axes=axis))
    e = write("exp", "exp", shifted)
    total = write("reduction", "sum", e, mode="add", axes=axis)
    return write("mul", "", e, write("reciprocal", "scale", total))


composite(
    "softmax",
    ("x",),
    {"axis": -1},
    _softmax_reference,
    _softmax,
    """exp(x - max) / sum(exp(x - max)) along an axis.  NaN where a row holds NaN or plus infinity or nothing but minus
    infinity, as this formula gives in NumPy.""",
    gradient=by_backward_of_y,
)


def _log_softmax_reference(x: Array, axis: int) -> Array:
    shifted = x - _greatest(x, axis)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True)))


def _log_softmax(write: Writing, x: Any, axis: int) -> Any:
    if x.shape[axis] == 0:
        return write("exp", "", x)
    shifted = write("sub", "shifted", x, write("reduction", "max", x, mode="max", axes=axis))
    total = write("reduction", "sum", write("exp", "exp", shifted), mode="add", axes=axis)
    return write("sub", "", shifted, write("log", "log", total))


composite(
    "log_softmax",
    ("x",),
    {"axis": -1},
    _log_softmax_reference,
    _log_softmax,
    """The logarithm of softmax along an axis, without overflow or underflow; not finite where softmax is NaN.""",
    role=Role.LOG_SOFTMAX,
    gradient=by_backward_of_y,
)


def _logsumexp_reference(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    most = _greatest(x, axes)
    shift = np.where(np.isfinite(most), most, 0.0)
    result = shift + np.log(np.exp(x - shift).sum(axis=axes, keepdims=True))
    return np.asarray(result if keepdims else result.squeeze(axes))


def _logsumexp(write: Writing, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    def shift(keep: bool, name: str) -> Any:
        """Returns the maximum, or 0 where it is infinite: the difference of two infinities would be NaN."""
        most = write("reduction", f"max{name}", x, mode="max", axes=axes, keepdims=keep)
        finite = write("cmp_lt", f"finite{name}", write("abs", f"magnitude{name}", most), inf)
        return write("binary_select", f"shift{name}", most, 0.0, finite)

    if any(x.shape[d] == 0 for d in axes):
        return write("log", "", write("reduction", "sum", x, mode="add", axes=axes, keepdims=keepdims))
    before = shift(True, "")
    e = write("exp", "exp", write("sub", "shifted", x, before))
    total = write("reduction", "sum", e, mode="add", axes=axes, keepdims=keepdims)
    return write("add", "", write("log", "log", total), before if keepdims else shift(False, " dropped"))


def _by_logsumexp(at: Reverse, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """The softmax; zero where all is minus infinity."""
    g, y = at.graph, kept(at, at.y, x.shape, axes)
    shift = g.binary_select(0.0, y, g.cmp_eq(y, -inf))
    return kept(at, at.loss, x.shape, axes) * g.exp(x - shift)


composite(
    "logsumexp",
    ("x",),
    {"axes": -1, "keepdims": True},
    _logsumexp_reference,
    _logsumexp,
    """log(sum(exp(x))) along axes (None: all), without overflow.  Minus infinity for rows of nothing else, and for rows
    of no elements.  keepdims as in a reduction.""",
    infer=lambda types, at: reduced(types[0], at["axes"], at["keepdims"]),
    keeps_layout=False,
    gradient=_by_logsumexp,
)


# ---- their gradients


def _softmax_backward_reference(loss: Array, y: Array, axis: int) -> Array:
    return np.asarray(y * (loss - (loss * y).sum(axis=axis, keepdims=True)))


def _softmax_backward(write: Writing, loss: Any, y: Any, axis: int) -> Any:
    total = write("reduction", "sum", write("mul", "product", loss, y), mode="add", axes=axis)
    return write("mul", "", y, write("sub", "difference", loss, total))


composite(
    "softmax_backward",
    ("loss", "y"),
    {"axis": -1},
    _softmax_backward_reference,
    _softmax_backward,
    """The gradient of softmax along an axis, y * (loss - sum(loss * y)): loss is that of the result, y the result.""",
)


def _log_softmax_backward_reference(loss: Array, y: Array, axis: int) -> Array:
    return np.asarray(loss - np.exp(y) * loss.sum(axis=axis, keepdims=True))


def _log_softmax_backward(write: Writing, loss: Any, y: Any, axis: int) -> Any:
    total = write("reduction", "sum", loss, mode="add", axes=axis)
    return write("sub", "", loss, write("mul", "product", write("exp", "exp", y), total))


composite(
    "log_softmax_backward",
    ("loss", "y"),
    {"axis": -1},
    _log_softmax_backward_reference,
    _log_softmax_backward,
    """The gradient of log_softmax along an axis, loss - exp(y) * sum(loss): loss is that of the result, y the
    result.""",
)

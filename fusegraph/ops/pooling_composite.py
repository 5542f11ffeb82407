"""Ops made of pooling and others: gradients that find the maxima again, global pooling, local normalisations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusegraph.dtypes import int32
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops.base import REQUIRED, TABLE, Array, Attributes, Kind, Op, TensorType, Types, register
from fusegraph.ops.composite import Expand, Writing, not_negative, reduced, single_axis
from fusegraph.ops.convolution import spread
from fusegraph.ops.pointwise import accepted_kinds, number
from fusegraph.ops.pooling import ADAPTIVE_DOC, SLIDING, WINDOW_DOC, check_window, forward_windows, normal
from fusegraph.ops.reverse import Reverse, Rule, by_backward


def _register(
    name: str,
    operands: tuple[str, ...],
    attributes: Attributes,
    normalize: Callable[[Types, Attributes], dict[str, Any]],
    infer: Callable[[Types, Attributes], TensorType],
    reference: Callable[..., Array],
    expand: Expand,
    doc: str,
    gradient: Rule | None = None,
) -> None:
    register(
        Op(
            name=name,
            kind=Kind.COMPOSITE,
            operands=operands,
            attributes=attributes,
            normalize=normalize,
            infer=infer,
            reference=np.errstate(all="ignore")(reference),
            expand=expand,
            gradient=gradient,
            keeps_layout=True,
            doc=doc,
        )
    )


# ---- gradients of maxima, given the image


def _sizes(x: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x.shape[a] for a in axes)


def _gradient(name: str, attributes: Attributes, doc: str) -> None:
    """Registers name_backward (loss, x), which computes anew where the maxima are."""
    index, backward = TABLE[f"{name}_index"], TABLE[f"{name}_backward_index"]

    def normalize(types: Types, values: Attributes) -> dict[str, Any]:
        loss, x = types
        accepted_kinds(f"{name}_backward", loss.dtype, ("float",))
        accepted_kinds(f"{name}_backward", x.dtype, ("float",))
        if len(loss.shape) != len(x.shape):
            raise ShapeError(f"the loss of an image {list(x.shape)} has as many dimensions, got {list(loss.shape)}")
        return normal(x, values)

    def of_image(loss: Any, values: Attributes) -> dict[str, Any]:
        """Returns the attributes of the forward op."""
        return dict(values) if attributes else {**values, "size": _sizes(loss, values["axes"])}

    def infer(types: Types, values: Attributes) -> TensorType:
        loss, x = types
        _, shape = forward_windows(x.shape, of_image(loss, values))
        if loss.shape != shape:
            raise ShapeError(f"the loss of an image {list(x.shape)} is {list(shape)}, got {list(loss.shape)}")
        return TensorType(x.shape, loss.dtype)

    def reference(loss: Array, x: Array, **values: Any) -> Array:
        found = index.reference(x, **of_image(loss, values), dtype=int32)
        return np.asarray(backward.reference(loss, found, **{**values, "size": _sizes(x, values["axes"])}))

    def expand(write: Writing, loss: Any, x: Any, **values: Any) -> Any:
        found = write(index.name, "index", x, **of_image(loss, values))
        return write(backward.name, "", loss, found, **{**values, "size": _sizes(x, values["axes"])})

    def gradient(at: Reverse, loss: Any, x: Any, **values: Any) -> Any:
        """The gradient of each window comes from where its maximum is."""
        g, axes = at.graph, values["axes"]
        found = getattr(g, index.name)(x, **of_image(loss, values))
        rows = [d for d in range(x.rank) if d not in axes]
        order, back = [*rows, *axes], sorted(range(x.rank), key=[*rows, *axes].__getitem__)

        def lines(tensor: Any) -> Any:
            return g.reshape(g.transpose(tensor, order), [*(tensor.shape[d] for d in rows), -1])

        taken = g.reshape(g.take_along_axis(lines(at.loss), lines(found)), [loss.shape[d] for d in order])
        return g.binary_select(g.transpose(taken, back), 0.0, g.cmp_ge(found, 0))

    operands = ("loss", "x")
    _register(
        f"{name}_backward", operands, {**attributes, "axes": None}, normalize, infer, reference, expand, doc, gradient
    )


_gradient(
    "max_pool",
    SLIDING,
    f"""Gradient of max_pool: every element of the image sums the losses of the windows that chose it, in a fixed order.

        Where the maxima are is found anew; max_pool_backward_index takes what max_pool_index found.{WINDOW_DOC}""",
)
_gradient(
    "adaptive_max_pool",
    {},
    f"""Gradient of adaptive_max_pool: every element of the image sums the losses of the windows that chose it, in a
        fixed order.  The windows follow from the shapes of loss and x.{ADAPTIVE_DOC}""",
)


# ---- global pooling


def _global(name: str, mode: str, doc: str) -> None:
    reduction = TABLE["reduction"]

    def normalize(types: Types, values: Attributes) -> dict[str, Any]:
        if types[0].dtype.is_bool or (mode == "avg" and not types[0].dtype.is_float):
            raise DTypeError(f"{name} does not take {types[0].dtype}; cast it")
        return normal(types[0], values)

    def infer(types: Types, values: Attributes) -> TensorType:
        if mode == "max" and any(types[0].shape[a] == 0 for a in values["axes"]):
            raise ShapeError(f"{name} of no elements")
        return reduced(types[0], values["axes"])

    def reference(x: Array, **values: Any) -> Array:
        return np.asarray(reduction.reference(x, mode=mode, axes=values["axes"], keepdims=True, dtype=None))

    def expand(write: Writing, x: Any, **values: Any) -> Any:
        return write("reduction", "", x, mode=mode, axes=values["axes"])

    _register(name, ("x",), {"axes": None}, normalize, infer, reference, expand, doc)


_global(
    "global_max_pool",
    "max",
    """The largest element of each channel of an image (N, C, spatial...), or along the axes: a reduction that keeps the
    dimensions.  NaN wins.""",
)
_global(
    "global_avg_pool",
    "avg",
    """The mean of each channel of an image (N, C, spatial...), or along the axes: a reduction that keeps the
    dimensions.  The result has x's dtype.""",
)


# ---- local normalisations


def _local(
    name: str, attributes: Attributes, reference: Callable[..., Array], expand: Expand, doc: str, *, axis: bool
) -> None:
    """Registers a normalisation of every element by a window around it, or its gradient (loss, x).

    axis: the window is along a single axis.
    """
    operands = ("loss", "x") if name.endswith("_backward") else ("x",)

    def normalize(types: Types, values: Attributes) -> dict[str, Any]:
        x = types[-1]
        for t in types:
            accepted_kinds(name, t.dtype, ("float",))
        if types[0].shape != x.shape:
            raise ShapeError(f"loss {list(types[0].shape)} has not the shape of x {list(x.shape)}")
        result = dict(values)
        if axis:
            result["axis"] = single_axis(values["axis"], x.shape)
            result["window"] = check_window(spread(values["window"], 1, "window", 1))[0]
        else:
            result["axes"] = normal(x, {"axes": values["axes"]})["axes"]
            result["window"] = check_window(spread(values["window"], len(result["axes"]), "window", 1))
        for key in ("alpha", "beta"):
            if key in values:
                result[key] = float(number(key, values[key], x.dtype, x.shape))
        for key in ("k", "epsilon"):
            if key in values:
                result[key] = not_negative(key, values[key], x.dtype, x.shape)
        if result.get("epsilon") == 0:
            raise AttributeValueError("epsilon is positive, got 0")
        return result

    # Windows have elements only if x has; without any there is nothing to normalise.
    def some(*arrays: Array, **values: Any) -> Array:
        return reference(*arrays, **values) if arrays[0].size else arrays[0]

    def written(write: Writing, *tensors: Any, **values: Any) -> Any:
        return expand(write, *tensors, **values) if tensors[0].size else write("identity", "", tensors[0])

    gradient = None if name.endswith("_backward") else by_backward
    _register(name, operands, attributes, normalize, lambda types, _: types[0], some, written, doc, gradient)


def _around(window: tuple[int, ...], axes: tuple[int, ...], include: bool) -> dict[str, Any]:
    """Returns the attributes of an avg_pool over the elements around each element."""
    return {
        "window": window,
        "stride": (1,) * len(window),
        # with which a result has the size of x, as torch pads for local_response_norm
        "padding": tuple((size // 2, (size - 1) // 2) for size in window),
        "ceil_mode": False,
        "count_include_pad": include,
        "axes": axes,
    }


def _response_reference(x: Array, window: int, alpha: float, beta: float, k: float, axis: int) -> Array:
    mean = TABLE["avg_pool"].reference(x * x, **_around((window,), (axis,), True))
    return np.asarray(x / (k + alpha * mean) ** beta)


def _response(write: Writing, x: Any, window: int, alpha: float, beta: float, k: float, axis: int) -> Any:
    mean = write("avg_pool", "mean", write("mul", "square", x, x), **_around((window,), (axis,), True))
    scale = write("add", "scale", write("mul", "scaled", mean, alpha), k)
    return write("div", "", x, write("pow", "power", scale, beta))


def _shares(x: Any, window: tuple[int, ...], axes: tuple[int, ...], include: bool) -> dict[str, Any]:
    """Returns the attributes of an avg_pool_backward that gives every element its shares of the windows it is in."""
    return {**_around(window, axes, include), "size": _sizes(x, axes)}


_RESPONSE = {"window": 5, "alpha": 1e-4, "beta": 0.75, "k": 1.0, "axis": 1}

_local(
    "local_response_norm",
    _RESPONSE,
    _response_reference,
    _response,
    """x / (k + alpha * m)^beta, m being the mean of the squares of the window elements around each along an axis (the
    channels), zeros beyond the ends included: torch's local_response_norm, Krizhevsky et al. 2012.  An even window
    reaches further back.""",
    axis=True,
)


def _response_backward_reference(
    loss: Array, x: Array, window: int, alpha: float, beta: float, k: float, axis: int
) -> Array:
    scale = k + alpha * TABLE["avg_pool"].reference(x * x, **_around((window,), (axis,), True))
    power = scale**-beta
    product = loss * x * power / scale
    shares = TABLE["avg_pool_backward"].reference(product, **_shares(x, (window,), (axis,), True))
    return np.asarray(loss * power - 2 * alpha * beta * x * shares)


def _response_backward(
    write: Writing, loss: Any, x: Any, window: int, alpha: float, beta: float, k: float, axis: int
) -> Any:
    mean = write("avg_pool", "mean", write("mul", "square", x, x), **_around((window,), (axis,), True))
    scale = write("add", "scale", write("mul", "scaled", mean, alpha), k)
    direct = write("mul", "direct", loss, write("pow", "power", scale, -beta))
    product = write("div", "product", write("mul", "weighted", direct, x), scale)
    shares = write("avg_pool_backward", "shares", product, **_shares(x, (window,), (axis,), True))
    return write("sub", "", direct, write("mul", "around", write("mul", "doubled", x, 2 * alpha * beta), shares))


_local(
    "local_response_norm_backward",
    _RESPONSE,
    _response_backward_reference,
    _response_backward,
    """Gradient of local_response_norm: loss is that of the result, x the operand.  With s = k + alpha * m it is
    loss / s^beta - 2 * alpha * beta * x * t, t being the sum of loss * x / s^(beta + 1) over the windows that an
    element is in, divided by their size.""",
    axis=True,
)


def _contrast_reference(x: Array, window: tuple[int, ...], epsilon: float, axes: tuple[int, ...]) -> Array:
    mean = TABLE["avg_pool"].reference
    around = _around(window, axes, False)
    centred = x - mean(x, **around)
    return np.asarray(centred / np.maximum(np.sqrt(mean(centred * centred, **around)), epsilon))


def _contrast(write: Writing, x: Any, window: tuple[int, ...], epsilon: float, axes: tuple[int, ...]) -> Any:
    around = _around(window, axes, False)
    centred = write("sub", "centred", x, write("avg_pool", "mean", x, **around))
    variance = write("avg_pool", "variance", write("mul", "square", centred, centred), **around)
    return write("div", "", centred, write("max", "deviation", write("sqrt", "root", variance), epsilon))


_CONTRAST = {"window": REQUIRED, "epsilon": 1e-5, "axes": None}

_local(
    "local_contrast_norm",
    _CONTRAST,
    _contrast_reference,
    _contrast,
    """d / max(sqrt(v), epsilon): d is x less the mean of the window around each element, v the mean of d^2 in the
    window; the windows' elements outside of x do not count.  Subtractive and divisive normalisation as by Jarrett et
    al. 2009, with windows of even weights.  axes are by default the spatial ones of x (N, C, spatial...).""",
    axis=False,
)


def _contrast_backward_reference(
    loss: Array, x: Array, window: tuple[int, ...], epsilon: float, axes: tuple[int, ...]
) -> Array:
    mean, spread_out = TABLE["avg_pool"].reference, TABLE["avg_pool_backward"].reference
    around, shares = _around(window, axes, False), _shares(x, window, axes, False)
    centred = x - mean(x, **around)
    root = np.sqrt(mean(centred * centred, **around))
    deviation = np.maximum(root, epsilon)
    direct = loss / deviation
    product = np.where(root > epsilon, direct * centred / deviation / deviation, 0.0)
    by_centred = direct - centred * spread_out(product, **shares)
    return np.asarray(by_centred - spread_out(by_centred, **shares))


def _contrast_backward(
    write: Writing, loss: Any, x: Any, window: tuple[int, ...], epsilon: float, axes: tuple[int, ...]
) -> Any:
    around, shares = _around(window, axes, False), _shares(x, window, axes, False)
    centred = write("sub", "centred", x, write("avg_pool", "mean", x, **around))
    root = write("sqrt", "root", write("avg_pool", "variance", write("mul", "square", centred, centred), **around))
    deviation = write("max", "deviation", root, epsilon)
    direct = write("div", "direct", loss, deviation)
    normalised = write("div", "normal", write("mul", "weighted", direct, centred), deviation)
    ratio = write("div", "ratio", normalised, deviation)
    product = write("binary_select", "product", ratio, 0.0, write("cmp_gt", "varies", root, epsilon))
    along = write("mul", "along", centred, write("avg_pool_backward", "spread", product, **shares))
    by_centred = write("sub", "by centred", direct, along)
    return write("sub", "", by_centred, write("avg_pool_backward", "shares", by_centred, **shares))


_local(
    "local_contrast_norm_backward",
    _CONTRAST,
    _contrast_backward_reference,
    _contrast_backward,
    """Gradient of local_contrast_norm: loss is that of the result, x the operand.  Where sqrt(v) is at most epsilon,
    the divisor is a constant.""",
    axis=False,
)

"""Norms, as composites: layernorm and its kin, batchnorm, and the statistics that they are made of.

Variances are means of squared differences from the mean, so that large offsets cost no digits.  Statistics are float32
(float64 for float64), whatever the operands' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from codegen.sizes import Size, smaller
from fusegraph.dtypes import float32, float64
from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.ops.base import REQUIRED, Array, Attributes, TensorType, Types
from fusegraph.ops.composite import Writing, averaged, composite, reduced
from fusegraph.ops.reverse import Reverse

#: Which axes a norm is along: from the rank of its operand and its attributes.
Along = Callable[[int, Attributes], tuple[int, ...]]

_STATISTICS = """With norm_forward_phase="training" there are more results, for the gradient: {more}, each of one
    element for all that share it."""


def statistic(x: TensorType, axes: tuple[int, ...]) -> TensorType:
    """Returns the type of a mean along axes."""
    return TensorType(reduced(x, axes).shape, float64 if x.dtype == float64 else float32)


def given_axes(_: int, attributes: Attributes) -> tuple[int, ...]:
    """Returns the axes of a norm that has them as an attribute."""
    return tuple(attributes["axes"])


def batch_axes(rank: int, _: Attributes | None = None) -> tuple[int, ...]:
    """Returns all axes but that of the channels, the second."""
    if rank < 2:
        raise ShapeError(f"a batch has axes for images and channels at least, this has {rank}")
    return (0, *range(2, rank))


def instance_axes(rank: int, _: Attributes | None = None) -> tuple[int, ...]:
    """Returns the spatial axes."""
    if rank < 3:
        raise ShapeError(f"an instance has axes for images, channels and positions, this has {rank}")
    return tuple(range(2, rank))


# ---- what they share


def _by_norm(at: Reverse, x: Any, scale: Any, *others: Any, **attributes: Any) -> Any:
    """The gradient by the op ``<name>_backward``; the statistics are computed here if the norm did not keep them."""
    phase, epsilon = attributes.pop("norm_forward_phase", "training"), attributes.pop("epsilon")
    attributes.pop("momentum", None)
    kept = at.results
    if not scale.dtype.is_float:
        return NotImplemented
    if phase == "inference":
        forward = getattr(at.graph, at.name)
        kept = forward(x, scale, *others, epsilon=epsilon, norm_forward_phase="training", **attributes)
    found = getattr(at.graph, f"{at.name}_backward")(at.loss, x, scale, *kept[1:3], **attributes)
    # The gradient by a bias is summed up in the shape of the scale.
    return *found[:2], *(found[2] if bias.shape == scale.shape else at.loss for bias in others[:1])


def _centred_reference(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array, Array]:
    middle = averaged(x, axes)
    variance = averaged((x - middle) ** 2, axes)
    inverse = 1 / np.sqrt(variance + epsilon)
    return (x - middle) * inverse, middle, variance, inverse


def _centred(write: Writing, x: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any, Any]:
    """Returns (normal, mean, variance, 1 / sqrt(variance + epsilon))."""
    mean = write("reduction", "mean", x, mode="avg", axes=axes)
    centred = write("sub", "centred", x, mean)
    variance = write("reduction", "variance", write("mul", "square", centred, centred), mode="avg", axes=axes)
    inverse = write("rsqrt", "inverse", write("add", "shifted", variance, epsilon))
    return write("mul", "normal", centred, inverse), mean, variance, inverse


def _with_statistics(along: Along, count: int) -> Callable[..., Any]:
    """Returns the type rule of a norm: the operand's type and, in training, ``count`` statistics."""

    def infer(types: Types, attributes: Attributes) -> Any:
        x = types[0]
        axes = along(len(x.shape), attributes)
        more = count if attributes["norm_forward_phase"] == "training" else 0
        return (x, *[statistic(x, axes)] * more)

    return infer


def _layernorm(name: str, along: Along, attributes: Attributes, doc: str) -> None:
    """Registers a norm with mean and variance along some axes, scale and bias."""

    def reference(x: Array, scale: Array, bias: Array, epsilon: float, norm_forward_phase: str, **at: Any) -> Any:
        normal, mean, _, inverse = _centred_reference(x, along(x.ndim, at), epsilon)
        y = normal * scale + bias
        return (y, mean, inverse) if norm_forward_phase == "training" else y

    def expand(
        write: Writing, x: Any, scale: Any, bias: Any, epsilon: float, norm_forward_phase: str, **at: Any
    ) -> Any:
        normal, mean, _, inverse = _centred(write, x, along(x.rank, at), epsilon)
        y = write("add", "", write("mul", "scaled", normal, scale), bias)
        return (y, mean, inverse) if norm_forward_phase == "training" else y

    composite(
        name,
        ("x", "scale", "bias"),
        {**attributes, "epsilon": 1e-5, "norm_forward_phase": "inference"},
        reference,
        expand,
        f"{doc}\n\n    {_STATISTICS.format(more='mean and inv_variance, 1 / sqrt(variance + epsilon)')}",
        infer=_with_statistics(along, 2),
        results=("", "mean", "inv_variance"),
        cudnn=name,
        gradient=_by_norm,
    )


_layernorm(
    "layernorm",
    given_axes,
    {"axes": -1},
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance (of the numbers themselves, without
    Bessel's correction) along axes (None: all).  The variance is the mean of the squared differences from the mean, so
    that large offsets cost no digits.  scale and bias broadcast to x, whose dtype the result has.""",
)
_layernorm(
    "adalayernorm",
    given_axes,
    {"axes": -1},
    """layernorm whose scale and bias are other ones for each sample, such as [N, 1, C] for an x of [N, T, C].""",
)
_layernorm(
    "instancenorm",
    instance_axes,
    {},
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over the positions of each channel of
    each image; x is [N, C, ...], scale and bias are [1, C, 1, ...] as a rule.""",
)


def _rmsnorm_reference(x: Array, scale: Array, axes: tuple[int, ...], epsilon: float, norm_forward_phase: str) -> Any:
    inverse = 1 / np.sqrt(averaged(x * x, axes) + epsilon)
    y = x * inverse * scale
    return (y, inverse) if norm_forward_phase == "training" else y


def _rmsnorm(write: Writing, x: Any, scale: Any, axes: tuple[int, ...], epsilon: float, norm_forward_phase: str) -> Any:
    mean = write("reduction", "mean", write("mul", "square", x, x), mode="avg", axes=axes)
    inverse = write("rsqrt", "inverse", write("add", "shifted", mean, epsilon))
    y = write("mul", "", write("mul", "normal", x, inverse), scale)
    return (y, inverse) if norm_forward_phase == "training" else y


composite(
    "rmsnorm",
    ("x", "scale"),
    {"axes": -1, "epsilon": 1e-5, "norm_forward_phase": "inference"},
    _rmsnorm_reference,
    _rmsnorm,
    f"""x / sqrt(mean(x^2) + epsilon) * scale, the mean along axes (None: all).  scale broadcasts to x, whose dtype the
    result has.

    {_STATISTICS.format(more="inv_variance, 1 / sqrt(mean(x^2) + epsilon)")}""",
    infer=_with_statistics(given_axes, 1),
    results=("", "inv_variance"),
    cudnn="rmsnorm",
    gradient=_by_norm,
)


# ---- groups of channels


def in_groups(shape: tuple[int, ...], rank: int, groups: int) -> tuple[int, ...]:
    """Returns a shape that broadcasts to a batch of ``rank``, with the channels (axis 1) divided into groups."""
    padded = (1,) * (rank - len(shape)) + tuple(shape)
    channels = padded[1]
    return (padded[0], *((1, 1) if channels == 1 else (groups, channels // groups)), *padded[2:])


def group_axes(rank: int) -> tuple[int, ...]:
    """Returns the axes that are normalized once the channels are divided: a group's channels, and the positions."""
    return tuple(range(2, rank + 1))


def group_statistic(x: TensorType, groups: int) -> TensorType:
    """Returns the type of a mean of each group of each image."""
    return TensorType((x.shape[0], groups, *(1 for _ in x.shape[2:])), statistic(x, ()).dtype)


def check_groups(x: TensorType, groups: Any) -> None:
    """Raises AttributeValueError or ShapeError unless the channels can be divided."""
    batch_axes(len(x.shape))
    if groups is None or groups < 1:
        raise AttributeValueError(f"groups is a number of groups, got {groups!r}")
    if x.shape[1] % groups:
        raise ShapeError(f"{x.shape[1]} channels are not {groups} groups of as many each")


def _groupnorm_reference(
    x: Array, scale: Array, bias: Array, groups: int, epsilon: float, norm_forward_phase: str
) -> Any:
    divided = x.reshape(in_groups(x.shape, x.ndim, groups))
    normal, mean, _, inverse = _centred_reference(divided, group_axes(x.ndim), epsilon)
    y = normal.reshape(x.shape) * scale + bias
    shape = (x.shape[0], groups, *(1 for _ in x.shape[2:]))
    return (y, mean.reshape(shape), inverse.reshape(shape)) if norm_forward_phase == "training" else y


def divide(write: Writing, part: str, tensor: Any, rank: int, groups: int) -> Any:
    """Writes the reshape of an operand in which groups of channels are a dimension."""
    return write("reshape", f"{part} in groups", tensor, shape=in_groups(tensor.shape, rank, groups))


def _groupnorm(
    write: Writing, x: Any, scale: Any, bias: Any, groups: int, epsilon: float, norm_forward_phase: str
) -> Any:
    divided = partial(divide, write, rank=x.rank, groups=groups)
    normal, mean, _, inverse = _centred(write, divided("x", x), group_axes(x.rank), epsilon)
    y = write("add", "sum", write("mul", "scaled", normal, divided("scale", scale)), divided("bias", bias))
    y = write("reshape", "", y, shape=x.shape)
    if norm_forward_phase == "inference":
        return y
    shape = (x.shape[0], groups, *(1 for _ in x.shape[2:]))
    return y, write("reshape", "mean", mean, shape=shape), write("reshape", "inverse", inverse, shape=shape)


def _groupnorm_types(types: Types, attributes: Attributes) -> Any:
    x, groups = types[0], attributes["groups"]
    check_groups(x, groups)
    more = 2 if attributes["norm_forward_phase"] == "training" else 0
    return (x, *[group_statistic(x, groups)] * more)


composite(
    "groupnorm",
    ("x", "scale", "bias"),
    {"groups": REQUIRED, "epsilon": 1e-5, "norm_forward_phase": "inference"},
    _groupnorm_reference,
    _groupnorm,
    f"""(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over the positions and channels of each
    group of each image; x is [N, C, ...], its channels groups of as many each, scale and bias are [1, C, 1, ...] as a
    rule.

    {_STATISTICS.format(more="mean and inv_variance, [N, groups, 1, ...]")}""",
    infer=_groupnorm_types,
    results=("", "mean", "inv_variance"),
    gradient=_by_norm,
)


# ---- batches


def _unbiased(shape: tuple[int, ...]) -> float:
    """Returns Bessel's correction of the variance of a batch: n / (n - 1), or 1 where n is at most 1."""
    count = prod(shape[d] for d in batch_axes(len(shape)))
    return count / (count - 1) if count > 1 else 1.0


def _batchnorm_reference(
    x: Array, scale: Array, bias: Array, *running: Array, epsilon: float, momentum: float
) -> tuple[Array, ...]:
    normal, mean, variance, inverse = _centred_reference(x, batch_axes(x.ndim), epsilon)
    fresh = (mean, variance * _unbiased(x.shape))
    moved = ((1 - momentum) * old + momentum * new for old, new in zip(running, fresh))
    return normal * scale + bias, mean, inverse, *moved


def _batchnorm(
    write: Writing, x: Any, scale: Any, bias: Any, *running: Any, epsilon: float, momentum: float
) -> tuple[Any, ...]:
    normal, mean, variance, inverse = _centred(write, x, batch_axes(x.rank), epsilon)
    results = (write("add", "", write("mul", "scaled", normal, scale), bias), mean, inverse)
    if not running:
        return results

    def moved(part: str, old: Any, new: Any) -> Any:
        kept = write("mul", f"{part} kept", old, 1 - momentum)
        return write("add", part, kept, write("mul", f"{part} added", new, momentum))

    count = prod(x.shape[d] for d in batch_axes(x.rank))
    if isinstance(count, Size):
        whole = write("mul", "summed variance", variance, count)
        fresh = write("div", "unbiased", whole, count - smaller(count - 1, 1))
    else:
        fresh = write("mul", "unbiased", variance, _unbiased(x.shape))
    return *results, moved("next mean", running[0], mean), moved("next var", running[1], fresh)


def _batchnorm_types(types: Types, _: Attributes) -> Types:
    x, running = types[0], types[3:]
    shared = statistic(x, batch_axes(len(x.shape)))
    if len(running) == 1:
        raise ShapeError("in_running_mean and in_running_var go together: give both or neither")
    for name, t in zip(("in_running_mean", "in_running_var"), running):
        if t.shape != shared.shape:
            raise ShapeError(f"{name} has one element a channel, {list(shared.shape)}, got {list(t.shape)}")
    return x, shared, shared, *running


composite(
    "batchnorm",
    ("x", "scale", "bias", "in_running_mean", "in_running_var"),
    {"epsilon": 1e-5, "momentum": 0.1},
    _batchnorm_reference,
    _batchnorm,
    """Training's (x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over all of a batch for each
    channel; x is [N, C, ...], scale and bias are [1, C, 1, ...] as a rule.

    Results: y, mean, inv_variance (1 / sqrt(variance + epsilon)) and, if the running statistics ([1, C, 1, ...]) are
    given, next_running_mean and next_running_var: (1 - momentum) * old + momentum * new, where the new variance is that
    of the batch times n / (n - 1), n being the elements a channel (as it is where n is 1).""",
    infer=_batchnorm_types,
    results=("", "mean", "inv_variance", "next_running_mean", "next_running_var"),
    optional=2,
    cudnn="batchnorm",
    gradient=_by_norm,
)


def _batchnorm_inference(write: Writing, x: Any, mean: Any, inv_variance: Any, scale: Any, bias: Any) -> Any:
    normal = write("mul", "normal", write("sub", "centred", x, mean), inv_variance)
    return write("add", "", write("mul", "scaled", normal, scale), bias)


composite(
    "batchnorm_inference",
    ("x", "mean", "inv_variance", "scale", "bias"),
    {},
    lambda x, mean, inv_variance, scale, bias: (x - mean) * inv_variance * scale + bias,
    _batchnorm_inference,
    """(x - mean) * inv_variance * scale + bias, with statistics known before; all broadcast to x.""",
    cudnn="batchnorm_inference",
)


def _genstats_reference(x: Array) -> tuple[Array, Array]:
    axes = batch_axes(x.ndim)
    return x.sum(axis=axes, keepdims=True), (x * x).sum(axis=axes, keepdims=True)


def _genstats(write: Writing, x: Any) -> tuple[Any, Any]:
    axes = batch_axes(x.rank)
    total = write("reduction", "sum", x, mode="add", axes=axes)
    return total, write("reduction", "sum of squares", write("mul", "square", x, x), mode="add", axes=axes)


composite(
    "genstats",
    ("x",),
    {},
    _genstats_reference,
    _genstats,
    """(sum, sum of squares) over all of a batch for each channel; x is [N, C, ...].""",
    infer=lambda types, _: (statistic(types[0], batch_axes(len(types[0].shape))),) * 2,
    results=("", "sq_sum"),
    cudnn="genstats",
)

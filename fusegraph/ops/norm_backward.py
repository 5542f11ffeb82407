"""Gradients of the norms, ``<name>_backward(loss, x, scale, statistics)``, as composites.

With h = (x - mean) * inv_variance and g = loss * scale, the gradient by x is (g - avg(g) - h * avg(g * h)) *
inv_variance, the averages along the norm's axes; those by scale and bias are the sums of loss * h and of loss over all
that share an element of scale.  (rmsnorm has h = x * inv_variance and no avg(g).)
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from fusegraph.errors import ShapeError
from fusegraph.ops.base import REQUIRED, Array, Attributes, Types
from fusegraph.ops.composite import Writing, averaged, composite
from fusegraph.ops.modes import as_number
from fusegraph.ops.norm import (
    Along,
    batch_axes,
    check_groups,
    divide,
    given_axes,
    group_axes,
    group_statistic,
    in_groups,
    instance_axes,
)


def _shared_axes(shape: tuple[int, ...], own: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes along which a smaller shape repeats its elements: (those it lacks, those of its size 1)."""
    missing = len(shape) - len(own)
    ones = tuple(d for d in range(missing, len(shape)) if own[d - missing] == 1 and shape[d] != 1)
    return tuple(range(missing)), ones


def _sum_reference(x: Array, shape: tuple[int, ...]) -> Array:
    lacking, ones = _shared_axes(x.shape, shape)
    return np.asarray(x.sum(axis=ones, keepdims=True).sum(axis=lacking))


def _sum_to(write: Writing, part: str, x: Any, shape: tuple[int, ...]) -> Any:
    """Sums x to a smaller shape, over all that share an element of it."""
    lacking, ones = _shared_axes(x.shape, shape)
    if ones:
        x = write("reduction", f"{part} rows" if lacking else part, x, mode="add", axes=ones)
    return write("reduction", part, x, mode="add", axes=lacking, keepdims=False) if lacking else x


def _uniform(scale: Any, rank: int, axes: tuple[int, ...]) -> bool:
    """Returns true if a scale is the same number along the axes of the norm."""
    padded = (1,) * (rank - len(scale.shape)) + tuple(scale.shape)
    return all(padded[d] == 1 for d in axes)


def _gradients_reference(
    loss: Array, normal: Array, scale: Array, inverse: Array, axes: tuple[int, ...], *, centred: bool
) -> tuple[Array, Array, Array]:
    g = loss * scale
    inner = g - normal * averaged(g * normal, axes)
    if centred:
        inner = inner - averaged(g, axes)
    return inner * inverse, _sum_reference(loss * normal, scale.shape), _sum_reference(loss, scale.shape)


def _gradients(
    write: Writing, loss: Any, normal: Any, scale: Any, inverse: Any, axes: tuple[int, ...], *, centred: bool
) -> tuple[Any, Any, Any]:
    """Returns the gradients by x, scale and bias."""
    product = write("mul", "product", loss, normal)
    if _uniform(scale, loss.rank, axes):
        # The sums are the averages' numerators, or what these are made of: nothing is added up twice.
        factor = write("mul", "factor", scale, inverse)
        products = write("reduction", "products", product, mode="add", axes=axes)
        losses = write("reduction", "losses", loss, mode="add", axes=axes)
        count = as_number(max(prod(loss.shape[d] for d in axes), 1))
        along, mean = (write("div", f"{n} mean", t, count) for n, t in (("product", products), ("loss", losses)))
        g, by_scale, by_bias = loss, products, losses
    else:
        factor, g = inverse, write("mul", "g", loss, scale)
        along = write("reduction", "product mean", write("mul", "g product", g, normal), mode="avg", axes=axes)
        mean = write("reduction", "g mean", g, mode="avg", axes=axes) if centred else None
        by_scale, by_bias = product, loss
    inner = write("sub", "along", g, write("mul", "across", normal, along))
    if centred:
        inner = write("sub", "inner", inner, mean)
    dx = write("mul", "", inner, factor)
    return dx, _sum_to(write, "dscale", by_scale, scale.shape), _sum_to(write, "dbias", by_bias, scale.shape)


def _types(types: Types, _: Attributes) -> Types:
    x, scale = types[1:3]
    return x, scale, scale


def _layernorm_backward(forward: str, along: Along, attributes: Attributes) -> None:
    """Registers the gradient of a norm with mean and variance along some axes."""

    def reference(loss: Array, x: Array, scale: Array, mean: Array, inv_variance: Array, **at: Any) -> Any:
        normal = (x - mean) * inv_variance
        return _gradients_reference(loss, normal, scale, inv_variance, along(x.ndim, at), centred=True)

    def expand(write: Writing, loss: Any, x: Any, scale: Any, mean: Any, inv_variance: Any, **at: Any) -> Any:
        normal = write("mul", "normal", write("sub", "centred", x, mean), inv_variance)
        return _gradients(write, loss, normal, scale, inv_variance, along(x.rank, at), centred=True)

    composite(
        f"{forward}_backward",
        ("loss", "x", "scale", "mean", "inv_variance"),
        attributes,
        reference,
        expand,
        f"""The gradients of {forward}: (dx, dscale, dbias).  loss is that of the result, mean and inv_variance are the
    statistics that training kept; dscale and dbias have the shape of scale.""",
        infer=_types,
        results=("", "dscale", "dbias"),
        cudnn=f"{forward}_backward",
    )


_layernorm_backward("layernorm", given_axes, {"axes": -1})
_layernorm_backward("adalayernorm", given_axes, {"axes": -1})
_layernorm_backward("instancenorm", instance_axes, {})
_layernorm_backward("batchnorm", batch_axes, {})


def _groupnorm_backward_reference(
    loss: Array, x: Array, scale: Array, mean: Array, inv_variance: Array, groups: int
) -> tuple[Array, ...]:
    wide = np.broadcast_to(scale, np.broadcast_shapes((1,) * x.ndim, scale.shape))
    parts = [t.reshape(in_groups(t.shape, x.ndim, groups)) for t in (loss, x, wide)]
    own = (x.shape[0], groups, *(1 for _ in range(x.ndim - 1)))
    mean, inverse = mean.reshape(own), inv_variance.reshape(own)
    normal = (parts[1] - mean) * inverse
    found = _gradients_reference(parts[0], normal, parts[2], inverse, group_axes(x.ndim), centred=True)
    return found[0].reshape(x.shape), found[1].reshape(scale.shape), found[2].reshape(scale.shape)


def _groupnorm_backward(
    write: Writing, loss: Any, x: Any, scale: Any, mean: Any, inv_variance: Any, groups: int
) -> tuple[Any, ...]:
    divided = partial(divide, write, rank=x.rank, groups=groups)
    own = (x.shape[0], groups, *(1 for _ in range(x.rank - 1)))
    centre = write("reshape", "mean in groups", mean, shape=own)
    inverse = write("reshape", "inverse in groups", inv_variance, shape=own)
    normal = write("mul", "normal", write("sub", "centred", divided("x", x), centre), inverse)
    axes = group_axes(x.rank)
    found = _gradients(write, divided("loss", loss), normal, divided("scale", scale), inverse, axes, centred=True)
    names, shapes = ("", "dscale", "dbias"), (x.shape, scale.shape, scale.shape)
    return tuple(write("reshape", name, t, shape=shape) for name, t, shape in zip(names, found, shapes))


def _groupnorm_backward_types(types: Types, attributes: Attributes) -> Types:
    x, groups = types[1], attributes["groups"]
    check_groups(x, groups)
    wanted = group_statistic(x, groups).shape
    for name, t in zip(("mean", "inv_variance"), types[3:]):
        if t.shape != wanted:
            raise ShapeError(f"{name} has one element a group, {list(wanted)}, got {list(t.shape)}")
    return _types(types, attributes)


composite(
    "groupnorm_backward",
    ("loss", "x", "scale", "mean", "inv_variance"),
    {"groups": REQUIRED},
    _groupnorm_backward_reference,
    _groupnorm_backward,
    """The gradients of groupnorm: (dx, dscale, dbias).  loss is that of the result, mean and inv_variance are the
    statistics that training kept; dscale and dbias have the shape of scale.""",
    infer=_groupnorm_backward_types,
    results=("", "dscale", "dbias"),
    broadcasts=("scale",),
)


def _rmsnorm_backward_reference(
    loss: Array, x: Array, scale: Array, inv_variance: Array, axes: tuple[int, ...]
) -> tuple[Array, Array]:
    return _gradients_reference(loss, x * inv_variance, scale, inv_variance, axes, centred=False)[:2]


def _rmsnorm_backward(
    write: Writing, loss: Any, x: Any, scale: Any, inv_variance: Any, axes: tuple[int, ...]
) -> tuple[Any, Any]:
    normal = write("mul", "normal", x, inv_variance)
    return _gradients(write, loss, normal, scale, inv_variance, axes, centred=False)[:2]


composite(
    "rmsnorm_backward",
    ("loss", "x", "scale", "inv_variance"),
    {"axes": -1},
    _rmsnorm_backward_reference,
    _rmsnorm_backward,
    """The gradients of rmsnorm: (dx, dscale).  loss is that of the result, inv_variance is the statistic that training
    kept; dscale has the shape of scale.""",
    infer=lambda types, at: _types(types, at)[:2],
    results=("", "dscale"),
    cudnn="rmsnorm_backward",
)

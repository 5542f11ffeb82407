"""ATen's norms, written as composite ops of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fusegraph.frontends.torch.table import Call, aten
from fusegraph.frontends.torch.vectors import Layer, line
from fusegraph.graph import Tensor


def _or(c: Call, x: Tensor | None, value: float, like: Tensor) -> Tensor:
    """Returns a scale or bias, or a constant ``value`` if it is missing."""
    return x if x is not None else c.graph.constant(value, dtype=like.dtype)


def _column(x: Tensor, rank: int) -> Tensor:
    """Reshapes a vector with one element per channel so that it broadcasts to images of a rank."""
    return x.reshape((1, -1, *(1,) * (rank - 2))) if x.rank == 1 else x


@aten("native_layer_norm.default")
def _layer_norm(
    c: Call, x: Tensor, shape: Sequence[int], scale: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, ...]:
    y, mean, inverse = c.graph.layernorm(
        x,
        _or(c, scale, 1, x),
        _or(c, bias, 0, x),
        axes=tuple(range(x.rank - len(shape), x.rank)),
        epsilon=epsilon,
        norm_forward_phase="training",
    )
    return c.cast(y), _as(c, mean, 1), _as(c, inverse, 2)


@aten("native_layer_norm_backward.default")
def _layer_norm_backward(
    c: Call,
    loss: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    inverse: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    one = scale if scale is not None else c.graph.broadcast(_or(c, None, 1, x), tuple(shape))
    dx, dscale, dbias = c.graph.layernorm_backward(
        loss, x, one, mean, inverse, axes=tuple(range(x.rank - len(shape), x.rank))
    )
    results = (dx, dscale, dbias)
    return tuple(_as(c, g, n) if wanted else None for n, (g, wanted) in enumerate(zip(results, output_mask)))


@aten("native_group_norm.default")
def _group_norm(
    c: Call,
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    _n: int,
    _c: int,
    _hw: int,
    groups: int,
    epsilon: float,
) -> tuple[Tensor, ...]:
    y, mean, inverse = c.graph.groupnorm(
        x,
        _column(_or(c, scale, 1, x), x.rank),
        _column(_or(c, bias, 0, x), x.rank),
        groups=groups,
        epsilon=epsilon,
        norm_forward_phase="training",
    )
    shape = (x.shape[0], groups)
    return c.cast(y), _as(c, mean.reshape(shape), 1), _as(c, inverse.reshape(shape), 2)


def _as(c: Call, x: Tensor, number: int) -> Tensor:
    """Casts result ``number`` to the dtype that torch gives it."""
    form = c.forms[number]
    return x if form is None else c.cast(x, form.dtype)


@aten("_native_batch_norm_legit_no_training.default")
def _batch_norm_inference(
    c: Call,
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor | None, ...]:
    layer = Layer(scale, bias, mean, variance, epsilon)
    factor, term = c.lines.get(layer) or line(c.graph, layer)
    return c.cast(x * _column(factor, x.rank) + _column(term, x.rank)), *_known(c, mean, variance, epsilon)


def _known(c: Call, mean: Tensor, variance: Tensor, epsilon: float) -> Iterator[Tensor | None]:
    """Yields the statistics that torch returns if they were known, None if unused; they are empty on a CPU."""
    for number in (1, 2):
        form = c.forms[number]
        if number not in c.used or form is None or form.dtype is None:
            yield None
        elif 0 in form.shape:
            yield c.graph.broadcast(c.graph.constant(0, dtype=form.dtype), form.shape)
        else:
            value = c.graph.identity(mean) if number == 1 else c.graph.rsqrt(variance + epsilon)
            yield c.cast(value, form.dtype)


@aten("_native_batch_norm_legit_functional.default")
def _batch_norm(
    c: Call,
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor | None, ...]:
    if not training:
        results = _batch_norm_inference(c, x, scale, bias, mean, variance, momentum, epsilon)
        return *results, c.graph.identity(mean), c.graph.identity(variance)
    return _of_batch(c, x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum)


@aten("_native_batch_norm_legit.no_stats")
def _batch_norm_alone(
    c: Call, x: Tensor, scale: Tensor | None, bias: Tensor | None, training: bool, momentum: float, epsilon: float
) -> tuple[Tensor | None, ...]:
    """Normalizes without running statistics: by those of the batch, in training or not."""
    return _of_batch(c, x, scale, bias, epsilon=epsilon, momentum=momentum)


def _of_batch(
    c: Call, x: Tensor, scale: Tensor | None, bias: Tensor | None, *running: Tensor, **numbers: Any
) -> tuple[Tensor, ...]:
    vectors: Any = (_column(t, x.rank) for t in (_or(c, scale, 1, x), _or(c, bias, 0, x), *running))
    y, *statistics = c.graph.batchnorm(x, *vectors, **numbers)
    return c.cast(y), *(_as(c, v.reshape(-1), n) for n, v in enumerate(statistics, start=1))


@aten("native_batch_norm_backward.default")
def _batch_norm_backward(
    c: Call,
    loss: Tensor,
    x: Tensor,
    scale: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    inverse: Tensor | None,
    training: bool,
    epsilon: float,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    channels = (1, x.shape[1], *(1,) * (x.rank - 2))
    one = _column(scale, x.rank) if scale is not None else c.graph.broadcast(_or(c, None, 1, x), channels)
    if training:
        assert mean is not None
        assert inverse is not None
        dx, dscale, dbias = c.graph.batchnorm_backward(loss, x, one, _column(mean, x.rank), _column(inverse, x.rank))
    else:
        assert running_mean is not None
        assert running_var is not None
        slope = _column(c.graph.rsqrt(running_var + epsilon), x.rank)
        images = (0, *range(2, x.rank))
        dx = loss * slope * one
        normal = (x - _column(running_mean, x.rank)) * slope
        dscale = c.graph.reduction(loss * normal, mode="add", axes=images)
        dbias = c.graph.reduction(loss, mode="add", axes=images)
    results = (dx, dscale.reshape(-1), dbias.reshape(-1))
    return tuple(_as(c, g, n) if wanted else None for n, (g, wanted) in enumerate(zip(results, output_mask)))

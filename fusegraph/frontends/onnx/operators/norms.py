"""Normalizations."""

from __future__ import annotations

from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor
from fusegraph.ops.reduction import normal_axes


def per_channel(call: Call, x: Tensor, value: Tensor) -> Tensor:
    """Reshapes one number per channel so that it broadcasts to an image (N, C, spatial...).  Raises ModelError."""
    if value.rank != 1 or x.rank < 2:
        raise ModelError(f"one number a channel of {list(x.shape)} is wanted, got {list(value.shape)}")
    return call.graph.reshape(value, [1, value.size, *(1 for _ in x.shape[2:])])


@operator("BatchNormalization")
def batch_normalization(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> list[Tensor]:
    graph, epsilon = call.graph, call["epsilon"]
    wide = [per_channel(call, x, t) for t in (scale, bias, mean, variance)]
    if not call["training_mode"]:
        inverse = graph.rsqrt(graph.add(wide[3], epsilon))
        return [graph.cast(graph.batchnorm_inference(x, wide[2], inverse, wide[0], wide[1]), x.dtype)]
    # The running variance moves towards that of the batch without Bessel's correction.
    kept, axes = call["momentum"], [0, *range(2, x.rank)]
    y, batch_mean, _ = graph.batchnorm(x, wide[0], wide[1], epsilon=epsilon)
    centred = graph.sub(x, graph.reduction(x, "avg", axes))
    batch_variance = graph.reduction(graph.mul(centred, centred), "avg", axes)
    moved = [
        graph.reshape(graph.cast(graph.add(graph.mul(old, kept), graph.mul(new, 1 - kept)), old.dtype), [-1])
        for old, new in ((wide[2], batch_mean), (wide[3], batch_variance))
    ]
    return [y, *moved]


@operator("InstanceNormalization")
def instance_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    scale, bias = (per_channel(call, x, t) for t in (scale, bias))
    return call.graph.instancenorm(x, scale, bias, epsilon=call["epsilon"])


@operator("GroupNormalization")
def group_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalizes groups of channels; scale and bias are per group before version 21, then per channel."""
    graph, groups = call.graph, call["num_groups"]
    if call.version < 21 and x.rank >= 2 and groups > 0 and x.shape[1] % groups == 0:
        each = x.shape[1] // groups
        scale, bias = (
            graph.reshape(graph.broadcast(graph.reshape(t, [groups, 1]), [groups, each]), [-1]) for t in (scale, bias)
        )
    scale, bias = (per_channel(call, x, t) for t in (scale, bias))
    return graph.groupnorm(x, scale, bias, groups=groups, epsilon=call["epsilon"])


def _trailing(call: Call, x: Tensor) -> tuple[int, ...]:
    """Returns all axes from that of the attribute on."""
    (first,) = normal_axes(call["axis"], x.rank)
    return tuple(range(first, x.rank))


@operator("LayerNormalization")
def layer_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    graph, axes = call.graph, _trailing(call, x)
    shift = graph.constant(0, dtype=x.dtype) if bias is None else bias
    if call.wanted == 1:
        return [graph.layernorm(x, scale, shift, axes, call["epsilon"])]
    return list(graph.layernorm(x, scale, shift, axes, call["epsilon"], norm_forward_phase="training"))


@operator("RMSNormalization")
def rms_normalization(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    return call.graph.rmsnorm(x, scale, _trailing(call, x), call["epsilon"])


@operator("LpNormalization")
def lp_normalization(call: Call, x: Tensor) -> Tensor:
    """Returns x divided by its norm along an axis; 0 where the norm is 0."""
    graph = call.graph
    if call["p"] not in (1, 2):
        raise ModelError(f"p is 1 or 2, got {call['p']}")
    norm = graph.reduction(x, "norm1" if call["p"] == 1 else "norm2", call["axis"])
    return graph.binary_select(0.0, graph.div(x, norm), graph.cmp_eq(norm, 0.0))


@operator("MeanVarianceNormalization")
def mean_variance_normalization(call: Call, x: Tensor) -> Tensor:
    graph, axes = call.graph, call["axes"] or [0, 2, 3]
    centred = graph.sub(x, graph.reduction(x, "avg", axes))
    deviation = graph.sqrt(graph.reduction(graph.mul(centred, centred), "avg", axes))
    return graph.div(centred, graph.add(deviation, 1e-9))


@operator("LRN")
def local_response_normalization(call: Call, x: Tensor) -> Tensor:
    """Normalizes over a window of channels.

    An even window reaches further forward in ONNX and further back in `Graph.local_response_norm`, so channels are
    flipped for it.
    """
    graph, turned = call.graph, call["size"] % 2 == 0
    source = graph.flip(x, 1) if turned else x
    y = graph.local_response_norm(source, call["size"], call["alpha"], call["beta"], call["bias"])
    return graph.flip(y, 1) if turned else y

"""Pooling."""

from __future__ import annotations

from math import prod

from fusegraph.dtypes import int64
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators.products import Pads, Window, window_of
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor


def _window(call: Call, x: Tensor) -> tuple[list[int], *Window]:
    """Returns taps, stride, padding and dilation.  Raises ModelError for a wrong kernel_shape."""
    rank, taps = x.rank - 2, call["kernel_shape"]
    if rank < 1 or len(taps) != rank or min(taps) < 1:
        raise ModelError(f"kernel_shape {taps[:8]} is not one of an image {list(x.shape)}")
    if rank > 3:
        raise call.refuse(f"{rank} spatial dimensions")
    return taps, *window_of(call, x.shape[2:], taps)


def _ceil(call: Call) -> bool:
    """Tells whether a last window may extend beyond the end; with auto_pad, ceil_mode has no effect."""
    return bool(call["ceil_mode"]) and call["auto_pad"] in (None, "NOTSET")


@operator("MaxPool")
def max_pool(call: Call, x: Tensor) -> list[Tensor]:
    graph = call.graph
    window = (*_window(call, x), _ceil(call))
    y = graph.max_pool(x, *window)
    if call.wanted == 1:
        return [y]
    where = graph.max_pool_index(x, *window, dtype=int64)
    if call["storage_order"]:
        where = _columns_first(call, where, x.shape[2:])
    # The op's positions are within one image and channel, ONNX's within the whole tensor.
    images, channels = (graph.cast(graph.gen_index(where, axis), int64) for axis in (0, 1))
    plane = prod(x.shape[2:])
    start = graph.add(graph.mul(images, x.shape[1] * plane), graph.mul(channels, plane))
    return [y, graph.add(where, start)]


def _columns_first(call: Call, place: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Converts row-major positions in an image to those in which the first dimension varies fastest."""
    graph, total = call.graph, None
    for d in reversed(range(len(sizes))):
        own = graph.mod(graph.quotient(place, prod(sizes[d + 1 :])), sizes[d])
        total = own if total is None else graph.add(graph.mul(total, sizes[d]), own)
    return place if total is None else total


@operator("AveragePool")
def average_pool(call: Call, x: Tensor) -> Tensor:
    graph, window = call.graph, _window(call, x)
    taps, stride, padding, dilation = window
    count = bool(call["count_include_pad"])
    if set(dilation) == {1}:
        return graph.avg_pool(x, taps, stride, padding, _ceil(call), count)
    beyond = _beyond(call, x, *window)
    ones = graph.broadcast(graph.constant(1, dtype=x.dtype), [1, 1, *x.shape[2:]])
    if count:
        ones, padding = graph.pad(ones, [(0, 0), (0, 0), *padding], value=1), [(0, 0)] * len(taps)
    numbers = _sums(call, ones, taps, stride, padding, dilation, beyond)
    return graph.div(_sums(call, x, *window, beyond), numbers)


def _beyond(call: Call, x: Tensor, taps: list[int], stride: list[int], padding: Pads, dilation: list[int]) -> list[int]:
    """Returns how far a last window extends beyond the end, if it starts inside or in the padding before."""
    result = []
    for n, k, s, d, (before, after) in zip(x.shape[2:], taps, stride, dilation, padding):
        room = n + before + after - (k - 1) * d - 1
        hangs = _ceil(call) and room >= 0 and room % s and (room // s + 1) * s < n + before
        result.append(s - room % s if hangs else 0)
    return result


def _sums(
    call: Call, x: Tensor, taps: list[int], stride: list[int], padding: Pads, dilation: list[int], beyond: list[int]
) -> Tensor:
    """Returns the sum of every window: a convolution of each channel with ones."""
    graph = call.graph
    planes = graph.reshape(x, [x.shape[0] * x.shape[1], 1, *x.shape[2:]])
    ones = graph.broadcast(graph.constant(1, dtype=x.dtype), [1, 1, *taps])
    reaching = [(before, after + more) for (before, after), more in zip(padding, beyond)]
    y = graph.conv_fprop(planes, ones, stride, reaching, dilation)
    return graph.reshape(y, [*x.shape[:2], *y.shape[2:]])


@operator("LpPool")
def lp_pool(call: Call, x: Tensor) -> Tensor:
    """Returns the p-th root of the sum of the p-th powers in every window."""
    graph, p, window = call.graph, call["p"], _window(call, x)
    taps, stride, padding, dilation = window
    powers = _power(call, x, p)
    if set(dilation) == {1}:
        sums = graph.mul(graph.avg_pool(powers, taps, stride, padding, _ceil(call)), prod(taps))
    else:
        sums = _sums(call, powers, *window, _beyond(call, x, *window))
    return _root(call, sums, p)


def _power(call: Call, x: Tensor, p: int) -> Tensor:
    if p < 1:
        raise ModelError(f"p is at least 1, got {p}")
    return call.graph.mul(x, x) if p == 2 else call.graph.pow(call.graph.abs(x), p) if p != 1 else call.graph.abs(x)


def _root(call: Call, x: Tensor, p: int) -> Tensor:
    return call.graph.sqrt(x) if p == 2 else call.graph.pow(x, 1 / p) if p != 1 else x


@operator("GlobalAveragePool")
def global_average_pool(call: Call, x: Tensor) -> Tensor:
    return call.graph.global_avg_pool(x)


@operator("GlobalMaxPool")
def global_max_pool(call: Call, x: Tensor) -> Tensor:
    return call.graph.global_max_pool(x)


@operator("GlobalLpPool")
def global_lp_pool(call: Call, x: Tensor) -> Tensor:
    if x.rank < 3:
        raise ModelError(f"an image (N, C, spatial...) is wanted, got {list(x.shape)}")
    sums = call.graph.reduction(_power(call, x, call["p"]), "add", range(2, x.rank))
    return _root(call, sums, call["p"])

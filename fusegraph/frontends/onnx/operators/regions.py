"""Operators that read or write an image at places given by other inputs: regions, deformed windows, columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import inf, prod

import numpy as np

from fusegraph.dtypes import DType, float32, float64, int32, int64
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators.norms import per_channel
from fusegraph.frontends.onnx.operators.products import per_axis, taps_of, window_of
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.frontends.onnx.tensors import Array, checked_shape
from fusegraph.graph import Graph, Tensor
from fusegraph.resampling import around

#: The most samples along one side of a part of a region, if the region's size decides how many there are.
MAX_SAMPLES = 1024


def _counting(x: Tensor) -> DType:
    """Returns the integer dtype for positions in a tensor."""
    return int64 if x.size >= 2**31 else int32


def _line(graph: Graph, size: int, rank: int, axis: int, dtype: DType) -> Tensor:
    """Returns 0, 1, ... along an axis of ``rank`` dimensions."""
    return graph.reshape(graph.arange(size, dtype=dtype), [size if d == axis else 1 for d in range(rank)])


# ---- regions


@operator("RoiAlign")
def roi_align(call: Call, x: Tensor, rois: Tensor, images: Tensor) -> Tensor:
    """Pools parts of regions from samples on a grid, each interpolated between four elements.

    With sampling_ratio 0 the number of samples depends on the regions' sizes, so their values must be known.
    """
    graph, sizes = call.graph, (call["output_height"], call["output_width"])
    if x.rank != 4 or rois.rank != 2 or rois.shape[1] != 4 or images.shape != rois.shape[:1]:
        raise ModelError(
            f"an image (N, C, H, W), regions (R, 4) and their images (R) are wanted, got {list(x.shape)}, "
            f"{list(rois.shape)} and {list(images.shape)}"
        )
    mode, how = call["mode"], call["coordinate_transformation_mode"] or "output_half_pixel"
    if mode not in ("avg", "max") or how not in ("half_pixel", "output_half_pixel"):
        raise ModelError(f"there is no mode {mode[:40]!r}, or no coordinate_transformation_mode {how[:40]!r}")
    checked_shape("its result", sizes)
    wide = float64 if x.dtype == float64 else float32
    whole = how == "half_pixel"
    scaled = graph.sub(graph.mul(graph.cast(rois, wide), call["spatial_scale"]), 0.5 if whole else 0.0)
    counts = [_samples(call, rois, d, sizes[d], whole) for d in (0, 1)]
    taps, used, inside = [], [], []
    for d, (parts, samples) in enumerate(zip(sizes, counts)):
        first, last = (graph.reshape(scaled[:, 1 - d + 2 * end], [-1, 1, 1, 1, 1, 1]) for end in (0, 1))
        extent = graph.sub(last, first)
        extent = extent if whole else graph.max(extent, 1.0)
        each = graph.div(extent, float(max(parts, 1)))
        part, sample = (
            _line(graph, n, 6, 2 + d + more, wide) for n, more in ((parts, 0), (max(1, int(samples.max(initial=1))), 2))
        )
        number = graph.constant(samples.reshape(-1, 1, 1, 1, 1, 1).astype(wide.numpy))
        within = graph.div(graph.mul(graph.add(sample, 0.5), each), graph.max(number, 1.0))
        place = graph.add(graph.add(first, graph.mul(part, each)), within)
        used.append(graph.cmp_lt(sample, number))
        size = x.shape[2 + d]
        inside.append(graph.logical_and(graph.cmp_ge(place, -1.0), graph.cmp_le(place, float(size))))
        taps.append(around(graph, graph.clamp(place, 0, size - 1), size, "linear", "border"))
    counted = _counting(x)
    image = graph.reshape(graph.cast(images, counted), [-1, 1, 1, 1, 1, 1])
    plane = graph.add(graph.mul(image, x.shape[1]), _line(graph, x.shape[1], 6, 1, counted))
    parts_of = [_read(graph, x, plane, chosen, wide) for chosen in product(*taps)]
    total = reduce(graph.add if mode == "avg" else graph.max, parts_of)
    total = graph.binary_select(total, 0.0, graph.logical_and(*inside))
    exists = graph.logical_and(*used)
    if mode == "avg":
        total = graph.reduction(graph.binary_select(total, 0.0, exists), "add", [4, 5], keepdims=False)
        y = graph.div(total, np.maximum(counts[0] * counts[1], 1).reshape(-1, 1, 1, 1).astype(wide.numpy))
    else:
        y = graph.reduction(graph.binary_select(total, -inf, exists), "max", [4, 5], keepdims=False)
        y = graph.binary_select(y, 0.0, (counts[0] * counts[1] > 0).reshape(-1, 1, 1, 1))
    return graph.cast(y, x.dtype)


def _samples(call: Call, rois: Tensor, axis: int, parts: int, whole: bool) -> Array:
    """Returns how many samples there are along an axis in each part of every region.  Raises ModelError if too many."""
    ratio = call["sampling_ratio"]
    if ratio > 0:
        return np.full(rois.shape[0], ratio)
    known = call.known(rois, "regions, which say how many samples there are,").astype(np.float64)
    extents = (known[:, 3 - axis] - known[:, 1 - axis]) * call["spatial_scale"]
    counts = np.ceil((extents if whole else np.maximum(extents, 1.0)) / max(parts, 1))
    if not (np.isfinite(counts).all() and (counts <= MAX_SAMPLES).all()):
        raise ModelError(f"a part of a region has more than {MAX_SAMPLES} samples along a side")
    return np.maximum(counts, 0).astype(np.int64)


def _read(
    graph: Graph, x: Tensor, plane: Tensor, chosen: Sequence[tuple[Tensor, Tensor | None]], wide: DType
) -> Tensor:
    """Returns the elements of planes of x at indices along its other dimensions, times their weights."""
    place, weight = plane, None
    for (index, factor), size in zip(chosen, x.shape[2:]):
        place = graph.add(graph.mul(place, size), graph.cast(index, plane.dtype))
        weight = factor if weight is None or factor is None else graph.mul(weight, factor)
    part = graph.cast(graph.gather(graph.reshape(x, [-1]), place), wide)
    return part if weight is None else graph.mul(part, weight)


@operator("DeformConv")
def deform_conv(
    call: Call, x: Tensor, w: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Returns a convolution whose taps are moved by offsets, interpolated, and multiplied by a mask.

    The values read become the channels of a 1x1 convolution.
    """
    graph, taps, rank = call.graph, taps_of(call, x, w), x.rank - 2
    stride, padding, dilation = window_of(call, x.shape[2:], taps)
    images, channels, shares, count = x.shape[0], x.shape[1], call["offset_group"], prod(taps)
    out = offset.shape[2:]
    reach = [n + sum(p) - (k - 1) * d - 1 for n, p, k, d in zip(x.shape[2:], padding, taps, dilation)]
    if shares < 1 or channels % shares or offset.shape != (images, shares * count * rank, *out) or len(out) != rank:
        raise ModelError(f"offsets {list(offset.shape)} are not {shares} groups of those of {list(w.shape)}")
    if any(r < 0 or n != r // s + 1 for n, r, s in zip(out, reach, stride)):
        raise ModelError(f"offsets {list(offset.shape)} are not those of the windows of {list(x.shape)}")
    wide = float64 if x.dtype == float64 else float32
    shape = [images, shares, 1, *taps, *out]
    moved = graph.reshape(graph.cast(offset, wide), [images, shares, *taps, rank, *out])
    axes = []
    for d in range(rank):
        own = graph.reshape(moved[(slice(None),) * (2 + rank) + (d,)], shape)
        tap, window = (_line(graph, n, len(shape), 3 + d + more, wide) for n, more in ((taps[d], 0), (out[d], rank)))
        start = graph.add(graph.mul(tap, dilation[d]), graph.sub(graph.mul(window, stride[d]), padding[d][0]))
        axes.append(around(graph, graph.add(own, start), x.shape[2 + d], "linear", "zeros"))
    counted, each = _counting(x), channels // shares
    image, share, channel = (_line(graph, n, len(shape), d, counted) for d, n in enumerate((images, shares, each)))
    plane = graph.add(graph.mul(graph.add(graph.mul(image, shares), share), each), channel)
    total = None
    for chosen in product(*axes):
        part = _read(graph, x, plane, chosen, wide)
        total = part if total is None else graph.add(total, part)
    assert total is not None
    if mask is not None:
        total = graph.mul(total, graph.reshape(mask, shape))
    columns = graph.reshape(graph.cast(total, x.dtype), [images, channels * count, *out])
    filters = graph.reshape(w, [w.shape[0], w.shape[1] * count, *(1 for _ in out)])
    y = graph.conv_fprop(columns, filters, groups=call["group"])
    return y if bias is None else graph.add(y, per_channel(call, y, bias))


# ---- columns and planes


@operator("Col2Im")
def col2im(call: Call, x: Tensor, image: Tensor, block: Tensor) -> Tensor:
    """Turns (N, C * elements of a block, blocks) into images; overlapping elements are added up.

    It is the gradient of a convolution each of whose filters takes one element of a block.
    """
    graph = call.graph
    sizes = checked_shape("the image", call.integers(image, "the image's shape"))
    taps = checked_shape("the block", call.integers(block, "the block's shape"))
    rank, count = len(sizes), prod(taps)
    if len(taps) != rank or not count or x.rank != 3 or x.shape[1] % count:
        raise ModelError(f"{list(x.shape)} are no columns of blocks {list(taps)} of an image {list(sizes)}")
    if not 1 <= rank <= 3:
        raise call.refuse(f"{rank} spatial dimensions")
    stride, dilation = (per_axis(call, name, rank) for name in ("strides", "dilations"))
    pads = call["pads"] or [0] * (2 * rank)
    if len(pads) != 2 * rank or min(pads) < 0:
        raise ModelError(f"pads has {2 * rank} numbers of at least 0, got {pads[:8]}")
    padding = list(zip(pads[:rank], pads[rank:]))
    blocks = [(n + sum(p) - (k - 1) * d - 1) // s + 1 for n, p, k, d, s in zip(sizes, padding, taps, dilation, stride)]
    if min(blocks) < 1 or prod(blocks) != x.shape[2]:
        raise ModelError(f"an image {list(sizes)} has {blocks} blocks, got {x.shape[2]} columns")
    channels = x.shape[1] // count
    columns = graph.reshape(x, [x.shape[0], x.shape[1], *blocks])
    one = np.eye(count, dtype=x.dtype.numpy).reshape(1, count, *taps)
    filters = graph.reshape(graph.broadcast(graph.constant(one), [channels, *one.shape[1:]]), [-1, 1, *taps])
    return graph.conv_dgrad(columns, filters, sizes, stride, padding, dilation, channels)


@operator("MaxUnpool")
def max_unpool(call: Call, x: Tensor, places: Tensor, shape: Tensor | None = None) -> Tensor:
    """Puts the elements of x at their places in the image that was pooled, and zeros elsewhere.

    If output_shape is larger than that image, zeros are added after it.
    """
    graph, rank, taps = call.graph, x.rank - 2, call["kernel_shape"]
    stride, pads = per_axis(call, "strides", rank), call["pads"] or [0] * (2 * rank)
    if rank < 1 or len(taps) != rank or min(taps) < 1 or len(pads) != 2 * rank or places.shape != x.shape:
        raise ModelError(f"{list(x.shape)} with places {list(places.shape)} has no windows {taps[:8]}")
    each = zip(x.shape[2:], stride, taps, pads[:rank], pads[rank:])
    own = checked_shape("the image", (*x.shape[:2], *((n - 1) * s + k - a - b for n, s, k, a, b in each)))
    target = own if shape is None else checked_shape("its result", call.integers(shape, "the shape"))
    if len(target) != len(own) or any(a > b for a, b in zip(own, target)):
        raise ModelError(f"output_shape {list(target)} is smaller than {list(own)}")
    zeros = graph.broadcast(graph.constant(0, dtype=x.dtype), [prod(own)])
    y = graph.scatter(zeros, graph.reshape(places, [-1]), graph.reshape(x, [-1]), 0)
    return graph.pad(graph.reshape(y, own), [(0, b - a) for a, b in zip(own, target)])

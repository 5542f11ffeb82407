"""Operators that read or write elements at positions given by tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from codegen.sizes import Size
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor
from fusegraph.ops.reduction import normal_axes

# ---- reading


def positions(call: Call, index: Tensor, size: int) -> Tensor:
    """Returns an index in which negative numbers, which count from the end, are made positive.

    Raises ModelError for known indices that are out of range; others are clamped by the ops that take them.
    """
    if not index.dtype.is_int:
        raise ModelError(f"indices are integers, got {index.dtype}")
    known = call.values.known(index)
    if known is not None and known.size:
        if known.min() < -size or known.max() >= size:
            raise ModelError(f"indices {known.min()} to {known.max()} are out of range for {size} elements")
        if known.min() >= 0:
            return index
        if not isinstance(size, Size):
            return call.graph.constant(np.where(known < 0, known + size, known).astype(known.dtype))
    return call.graph.binary_select(call.graph.add(index, size), index, call.graph.cmp_lt(index, 0))


@operator("Gather")
def gather(call: Call, x: Tensor, index: Tensor) -> Tensor:
    """Gathers along an axis; it is a slice if the position is one known number."""
    (axis,) = normal_axes(call["axis"], x.rank)
    known = call.values.followed(index)
    if known is not None and not known.shape and index.dtype.is_int:
        key = [slice(None)] * axis + [call.number(index, "the index")]
        return x[tuple(key)]
    return call.graph.gather(x, positions(call, index, x.shape[axis]), axis)


@operator("GatherElements")
def gather_elements(call: Call, x: Tensor, index: Tensor) -> Tensor:
    (axis,) = normal_axes(call["axis"], x.rank)
    return call.graph.take_along_axis(x, positions(call, index, x.shape[axis]), axis)


@operator("GatherND")
def gather_nd(call: Call, x: Tensor, index: Tensor) -> Tensor:
    batch = call["batch_dims"]
    if not 0 <= batch < min(x.rank, index.rank):
        raise ModelError(f"batch_dims {batch} is not less than the ranks {x.rank} and {index.rank}")
    return call.graph.gather_nd(x, _from_the_end(call, index, x.shape[batch:]), batch)


def _from_the_end(call: Call, index: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Returns positions along several dimensions (the last dimension of ``index``) with negative ones made positive."""
    if not index.dtype.is_int or not index.rank or index.shape[-1] > len(sizes):
        raise ModelError(f"indices {index.dtype} {list(index.shape)} are not positions along {list(sizes)}")
    ends = call.graph.cast(call.values.of(sizes[: index.shape[-1]]), index.dtype)
    return call.graph.binary_select(call.graph.add(index, ends), index, call.graph.cmp_lt(index, 0))


@operator("OneHot")
def one_hot(call: Call, index: Tensor, depth: Tensor, both: Tensor) -> Tensor:
    graph, count = call.graph, call.integer(depth, "depth")
    if count < 1 or both.shape != (2,):
        raise ModelError(f"depth is positive and values are two, got {count} and {list(both.shape)}")
    whole = index if index.dtype.is_int else graph.cast(index, "int64")
    return graph.one_hot(positions_or_beyond(call, whole, count), count, call["axis"], both[1], both[0], both.dtype)


def positions_or_beyond(call: Call, index: Tensor, size: int) -> Tensor:
    """Returns an index in which numbers from -size to -1 are made positive; those out of range stay so."""
    graph = call.graph
    negative = graph.logical_and(graph.cmp_lt(index, 0), graph.cmp_ge(index, -size))
    return graph.binary_select(graph.add(index, size), index, negative)


@operator("Compress")
def compress(call: Call, x: Tensor, condition: Tensor) -> Tensor:
    """Keeps the elements at which the condition is true; it must be known, because the shape depends on it."""
    kept = np.flatnonzero(call.known(condition, "the condition"))
    if call["axis"] is None:
        x, axis = call.graph.reshape(x, [-1]), 0
    else:
        (axis,) = normal_axes(call["axis"], x.rank)
    if kept.size and kept[-1] >= x.shape[axis]:
        raise ModelError(f"the condition keeps element {kept[-1]} of {x.shape[axis]}")
    return call.graph.resample(x, axis, kept)


@operator("ReverseSequence")
def reverse_sequence(call: Call, x: Tensor, lengths: Tensor) -> Tensor:
    """Reverses the first elements of each sequence, as many as its length; the others stay."""
    graph, batch, time = call.graph, call["batch_axis"], call["time_axis"]
    if {batch, time} != {0, 1} or x.rank < 2 or lengths.shape != (x.shape[batch],):
        raise ModelError(f"batch_axis and time_axis are 0 and 1, with a length for each of {list(x.shape)}")
    place = graph.gen_index(graph.broadcast(graph.constant(0), x.shape[:2]), time)
    length = graph.cast(graph.unsqueeze(lengths, time), "int32")
    turned = graph.binary_select(graph.sub(graph.sub(length, 1), place), place, graph.cmp_lt(place, length))
    index = graph.unsqueeze(turned, list(range(2, x.rank))) if x.rank > 2 else turned
    return graph.take_along_axis(x, graph.broadcast(index, x.shape), time)


# ---- writing


def _reduction(call: Call) -> Any:
    reduction = call["reduction"] or "none"
    if reduction not in ("none", "add", "mul", "max", "min"):
        raise ModelError(f"reduction is one of none, add, mul, max, min, got {reduction[:40]!r}")
    return reduction


@operator("Scatter", "ScatterElements")
def scatter_elements(call: Call, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    (axis,) = normal_axes(call["axis"], x.rank)
    if index.shape != updates.shape:
        raise ModelError(f"indices {list(index.shape)} and updates {list(updates.shape)} have one shape")
    return call.graph.scatter(x, positions(call, index, x.shape[axis]), updates, axis, _reduction(call))


@operator("ScatterND")
def scatter_nd(call: Call, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    places = _from_the_end(call, index, x.shape)
    if not index.shape[-1]:
        raise call.refuse("positions along no dimension")
    return call.graph.scatter_nd(x, places, updates, _reduction(call))


@operator("TensorScatter")
def tensor_scatter(call: Call, x: Tensor, updates: Tensor, start: Tensor | None = None) -> Tensor:
    """Writes updates at consecutive positions from each sample's start, as in a cache of keys or values."""
    graph, (axis,) = call.graph, normal_axes(call["axis"], x.rank)
    mode = call.word("mode", "linear", "circular")
    line = [updates.shape[d] if d == axis else 1 for d in range(x.rank)]
    places = graph.reshape(graph.arange(updates.shape[axis], dtype="int64" if start is None else start.dtype), line)
    if start is not None:
        places = graph.add(places, graph.reshape(start, [x.shape[0], *(1 for _ in x.shape[1:])]))
    if mode == "circular":
        places = graph.mod(places, x.shape[axis])
    shape = [n if d in (0, axis) else 1 for d, n in enumerate(updates.shape)]
    return graph.scatter(x, graph.broadcast(places, shape), updates, axis)


# ---- triangles


@operator("Trilu")
def trilu(call: Call, x: Tensor, diagonal: Tensor | None = None) -> Tensor:
    offset = 0 if diagonal is None else call.integer(diagonal, "k")
    return call.graph.triu(x, offset) if call["upper"] else call.graph.tril(x, offset)

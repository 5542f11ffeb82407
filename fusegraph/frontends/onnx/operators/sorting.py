"""Operators that sort, or select elements by their values.

For all but TopK the number of results depends on the values.  If it was not given, the values must be known while the
graph is built, as constants or as values given for inputs; the results are then constants.
"""

from __future__ import annotations

import numpy as np

from fusegraph.dtypes import int64
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators import sizes
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.frontends.onnx.tensors import Array
from fusegraph.graph import Graph, Tensor
from fusegraph.ops.convert import to_reference
from fusegraph.ops.reduction import normal_axes


@operator("TopK")
def topk(call: Call, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the elements and their positions, always sorted."""
    (axis,) = normal_axes(call["axis"], x.rank)
    count, largest = call.integer(k, "K"), bool(call["largest"])
    if not 0 <= count <= x.shape[axis]:
        raise ModelError(f"K is from 0 to the {x.shape[axis]} elements of axis {axis}, got {count}")
    return call.graph.topk(x, count, axis, largest), call.graph.topk_index(x, count, axis, largest, int64)


@operator("NonZero")
def non_zero(call: Call, x: Tensor) -> Tensor:
    """Returns the positions of elements that are not 0, one per column; for a tensor of rank 0 there are no rows."""
    size = call.given_size([x.rank, None])
    if size is not None:
        return sizes.non_zero(call, x, size)
    value = _known(call, x)
    found = np.stack(np.nonzero(value)) if x.rank else np.zeros((0, np.count_nonzero(value)))
    return call.graph.constant(found.astype(np.int64))


@operator("Unique")
def unique(call: Call, x: Tensor) -> list[Tensor]:
    """Returns distinct elements, or slices along an axis, sorted or in order of first occurrence, and their places."""
    axis = call["axis"]
    if axis is not None:
        (axis,) = normal_axes(axis, x.rank)
    size = call.given_size([None] if axis is None else [None if d == axis else n for d, n in enumerate(x.shape)])
    if size is not None:
        if axis is not None and x.rank > 1:
            raise call.refuse("slices, where the number of results was given")
        return sizes.unique(call, x, size)
    value = _known(call, x)
    value = value.reshape(-1) if axis is None else value
    wide = to_reference(value, x.dtype)
    _, first, inverse, counts = np.unique(wide, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    inverse = inverse.reshape(-1)
    if not call["sorted"]:
        order = np.argsort(first)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    every = [np.take(value, first, axis or 0), *(a.astype(np.int64) for a in (first, inverse, counts))]
    return [call.graph.constant(found) for found in every]


@operator("NonMaxSuppression")
def non_max_suppression(
    call: Call,
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | None = None,
    overlap: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    """Returns (batch, class, box) of the boxes that are kept, in each class those with the best scores first.

    A box is removed if its overlap with a kept one of a better score exceeds iou_threshold times their union.
    """
    if boxes.rank != 3 or boxes.shape[2] != 4 or scores.shape[::2] != boxes.shape[:2] or scores.rank != 3:
        raise ModelError(
            f"boxes are (batches, boxes, 4), scores (batches, classes, boxes), got {list(boxes.shape)} and "
            f"{list(scores.shape)}"
        )
    count = 0 if most is None else int(call.number(most, "max_output_boxes_per_class"))
    share = 0.0 if overlap is None else float(call.number(overlap, "iou_threshold"))
    threshold = -np.inf if least is None else float(call.number(least, "score_threshold"))
    centred = bool(call["center_point_box"])
    size = call.given_size([None, 3])
    if size is not None:
        left = call.graph.binary_select(scores, -np.inf, call.graph.cmp_gt(scores, threshold))
        return sizes.non_max_suppression(call, _sides(call.graph, boxes, centred), left, count, share, size)
    corners, values = _corners(_known(call, boxes).astype(np.float64), centred), _known(call, scores)
    found = []
    for batch, of_classes in enumerate(values):
        for number, row in enumerate(of_classes):
            order = np.argsort(-row.astype(np.float64), kind="stable")
            order = order[row[order] > threshold]
            found += [(batch, number, box) for box in _kept(corners[batch], order, count, share)]
    return call.graph.constant(np.array(found, np.int64).reshape(-1, 3))


def _known(call: Call, x: Tensor) -> Array:
    """Returns a value on which the shape of the result depends; it must be known as that shape was not given."""
    name = call.node.output[0][:80]
    return call.known(x, f"the input, or the shape of the result as shapes={{{name!r}: ...}},")


def _sides(graph: Graph, boxes: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """Returns the lower and upper corners of boxes, (..., 2) each, as `_corners` does for known ones."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if centred:
        first, second = graph.sub(first, second / 2), graph.add(first, second / 2)
    return graph.min(first, second), graph.max(first, second)


def _corners(boxes: Array, centred: bool) -> Array:
    """Returns the lower and upper corners of boxes, (..., 2, 2), from two corners each, or from a center and sizes."""
    pairs = boxes.reshape(*boxes.shape[:-1], 2, 2)
    if centred:
        middle, half = pairs[..., 0, :], pairs[..., 1, :] / 2
        pairs = np.stack([middle - half, middle + half], axis=-2)
    return np.stack([pairs.min(axis=-2), pairs.max(axis=-2)], axis=-2)


def _kept(corners: Array, order: Array, count: int, share: float) -> list[int]:
    """Returns the boxes, at most ``count``, that are kept of those in ``order``, the best first."""
    area = np.prod(corners[:, 1] - corners[:, 0], axis=-1)
    kept: list[int] = []
    while order.size and len(kept) < count:
        box, order = int(order[0]), order[1:]
        kept.append(box)
        least, most = np.maximum(corners[order, 0], corners[box, 0]), np.minimum(corners[order, 1], corners[box, 1])
        both = np.prod(np.maximum(most - least, 0), axis=-1)
        together = area[order] + area[box] - both
        order = order[both <= share * together]
    return kept

"""Selections whose number of results was given: computed by the graph, then cut off or filled up.

The first selected elements are found by sorting 0 and 1 (not selected, selected), which keeps the order of equal ones.
"""

from __future__ import annotations

from fusegraph.dtypes import int32, int64
from fusegraph.frontends.onnx.table import Call
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import packed_strides

#: Fills up positions.
NOTHING = -1


def first_of(graph: Graph, chosen: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the int64 positions of the first elements that are true, and whether each exists: ``size`` of both."""
    count = min(size, chosen.size)
    flags = graph.cast(chosen, "uint8")
    index, found = graph.topk_index(flags, count, 0, True, int64), graph.cmp_neq(graph.topk(flags, count), 0)
    beyond = [(0, size - count)]
    return (index, found) if count == size else (graph.pad(index, beyond), graph.pad(found, beyond))


def non_zero(call: Call, x: Tensor, size: int) -> Tensor:
    """Returns (dimensions, size): the positions of elements that are not 0, in order, then -1."""
    graph = call.graph
    if not x.rank or not x.size:
        return graph.broadcast(graph.constant(NOTHING, dtype=int64), (x.rank, size))
    flat = graph.reshape(x, [-1])
    index, found = first_of(graph, flat if x.dtype.is_bool else graph.cmp_neq(flat, 0), size)
    steps, sizes = (graph.reshape(graph.constant(v, dtype=int64), [-1, 1]) for v in (packed_strides(x.shape), x.shape))
    return graph.binary_select(graph.mod(graph.quotient(index, steps), sizes), NOTHING, found)


def unique(call: Call, x: Tensor, size: int) -> list[Tensor]:
    """Returns distinct elements, their first positions, the number of each element of x among them, and their counts.

    All but the third have ``size`` elements.
    """
    if not x.size:
        raise call.refuse("no elements")
    graph, flat = call.graph, call.graph.reshape(x, [-1])
    values, order = graph.sort(flat), graph.sort_index(flat, dtype=int64)
    differs = graph.cmp_neq(values[1:], values[:-1])
    if x.dtype.is_float:  # all NaNs are equal here
        alike = graph.logical_and(graph.isnan(values[1:]), graph.isnan(values[:-1]))
        differs = graph.logical_and(differs, graph.logical_not(alike))
    begins = graph.concatenate(graph.constant([True], dtype="bool"), differs)
    begin, found = first_of(graph, begins, size + 1)  # one more, at which the last one ends
    begin, end = (graph.binary_select(begin, x.size, found)[part] for part in (slice(size), slice(1, None)))
    found = found[:size]
    y, counts = graph.gather(values, begin), graph.sub(end, begin)  # positions beyond the end gather the last element
    first = graph.binary_select(graph.gather(order, begin), NOTHING, found)
    number = graph.sub(graph.cumsum(graph.cast(begins, int64), dtype=int64), 1)
    inverse = graph.gather(number, graph.sort_index(order))
    if not call["sorted"]:
        turn = graph.sort_index(graph.binary_select(first, x.size, found))
        y, first, counts = (graph.gather(t, turn) for t in (y, first, counts))
        inverse = graph.gather(graph.sort_index(turn, dtype=int64), inverse)
    return [y, first, inverse, counts]


def non_max_suppression(
    call: Call, corners: tuple[Tensor, Tensor], scores: Tensor, most: int, share: float, size: int
) -> Tensor:
    """Returns (size, 3): batch, class and box of the boxes that are kept, then -1.

    ``corners`` are the lower and the upper ones, each (batches, boxes, 2).  ``scores`` (batches, classes, boxes) are
    -inf for boxes that are excluded from the start.  Each of ``most`` steps keeps the box of the best score in every
    class, and removes those that overlap it by more than ``share`` of the union.
    """
    graph, (batches, classes, boxes) = call.graph, scores.shape
    most = min(most, boxes, size)
    nothing = graph.broadcast(graph.constant(NOTHING, dtype=int64), (size, 3))
    if not most or not scores.size:
        return nothing
    call.check_size(32 * most)
    sides = [corner[..., d] for corner in corners for d in (0, 1)]  # (batches, boxes) each
    table = [*sides, _area(graph, *sides)]
    *sides, area = (graph.unsqueeze(t, 1) for t in table)
    joined = graph.reshape(graph.concatenate(*(graph.unsqueeze(t, 2) for t in table), axis=2), [-1, len(table)])
    rows = graph.mul(graph.reshape(graph.arange(batches, dtype=int32), [-1, 1, 1]), boxes)
    place = graph.gen_index(scores, 2)
    kept = []
    for _ in range(most):
        best = graph.cast(graph.reduction(scores, "argmax", 2), int32)
        there = graph.cmp_gt(graph.reduction(scores, "max", 2), -float("inf"))
        kept.append(graph.binary_select(best, NOTHING, there))
        own = graph.gather(joined, graph.add(best, rows))  # (batches, classes, 1, 5)
        low = [graph.max(side, own[..., d]) for d, side in enumerate(sides[:2])]
        high = [graph.min(side, own[..., d]) for d, side in enumerate(sides[2:], 2)]
        both = _area(graph, *low, *high)
        together = graph.sub(graph.add(area, own[..., 4]), both)
        covered = graph.cmp_gt(both, graph.mul(together, share))
        gone = graph.logical_or(covered, graph.cmp_eq(place, best))
        scores = graph.binary_select(-float("inf"), scores, gone)
    flat = graph.reshape(graph.concatenate(*kept, axis=2) if most > 1 else kept[0], [-1])
    place, found = first_of(graph, graph.cmp_ge(flat, 0), size)
    columns = (
        graph.quotient(place, classes * most),
        graph.mod(graph.quotient(place, most), classes),
        graph.cast(graph.gather(flat, place), int64),
    )
    rows = graph.concatenate(*(graph.unsqueeze(t, 1) for t in columns), axis=1)
    return graph.binary_select(rows, nothing, graph.unsqueeze(found, 1))


def _area(graph: Graph, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Tensor:
    """Returns the area between two corners; 0 if they are in the wrong order."""
    height, width = graph.sub(bottom, top), graph.sub(right, left)
    return graph.mul(graph.max(height, 0), graph.max(width, 0))

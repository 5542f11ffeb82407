"""Gathers at known positions that are a few runs of neighbours, or one of which each is repeated: tensors that are
rolled, or enlarged to the nearest element, which torch and ONNX write so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from codegen.sizes import Size
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Array, Kind, Role
from fusegraph.ops.convert import to_reference
from fusegraph.ops.evaluate import evaluate
from fusegraph.passes.rewrite import Rewrite, Rewritten, replaced

#: Of more runs each element's place is looked up.
MOST_RUNS = 4
#: Positions that are looked at.
MOST_POSITIONS = 1 << 16


class Runs(NamedTuple):
    """The first and the last position of each run, and how often each position is taken, one time after the other."""

    ends: list[tuple[int, int]]
    times: int = 1


def take_runs(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Writes gathers at a few runs of neighbouring positions as slices, one after the other, or as one repeated."""
    return replaced(graph, lambda node: _runs(graph, node), _write)


def _runs(graph: Graph, node: Node) -> Runs | None:
    """Returns the runs of positions that a gather takes; None for other nodes."""
    if node.op.role is not Role.GATHER:
        return None
    x, index = node.inputs
    size = x.shape[node.attributes["axis"]]
    if isinstance(size, Size) or index.rank != 1 or not node.output.size:
        return None
    places = _known(graph, index)
    if places is None or places.min() < 0 or places.max() >= size:
        return None
    first, last = int(places[0]), int(places[-1])
    times = len(places) // max(last - first + 1, 1)
    if times > 1 and np.array_equal(places, np.repeat(np.arange(first, last + 1), times)):
        return Runs([(first, last)], times)
    ends = np.flatnonzero(np.diff(places) != 1)
    if len(ends) >= MOST_RUNS:
        return None
    firsts, lasts = places[np.r_[0, ends + 1]], places[np.r_[ends, len(places) - 1]]
    return Runs([(int(first), int(last)) for first, last in zip(firsts, lasts)])


def _known(graph: Graph, tensor: Tensor) -> Array | None:
    """Returns the integers of a line that follow from other integers that are known; None for others."""
    if tensor.rank > 1 or isinstance(tensor.size, Size) or tensor.size > MOST_POSITIONS or tensor.dtype.is_float:
        return None
    if tensor.value is not None:
        return to_reference(np.asarray(tensor.value), tensor.dtype)
    node = graph.producer(tensor)
    if node is None or node.op.random or node.kind not in (Kind.POINTWISE, Kind.MOVEMENT):
        return None
    is_index = node.op.role is Role.INDEX  # Positions follow from the shape alone.
    operands = [np.zeros(node.inputs[0].shape)] if is_index else [_known(graph, t) for t in node.inputs]
    if any(x is None for x in operands):
        return None
    types = tuple(t.type for t in node.inputs)
    (found,) = evaluate(node.op, types, node.attributes, (tensor.dtype,), [x for x in operands if x is not None])
    return np.broadcast_to(found, tensor.shape).astype(np.int64) if tensor.dtype.is_int else found


def _write(rewrite: Rewrite, node: Node, runs: Runs) -> None:
    graph, x, axis = rewrite.graph, rewrite.new[node.inputs[0]], node.attributes["axis"]

    def part(first: int, last: int) -> Tensor:
        starts, stops = [0] * x.rank, list(x.shape)
        starts[axis], stops[axis] = first, last + 1
        cut = {"starts": tuple(starts), "stops": tuple(stops), "steps": (1,) * x.rank}
        return graph.apply(TABLE["slice"], (x,), cut)

    if runs.times > 1:
        (only,) = runs.ends
        shape = list(x.shape)
        shape[axis : axis + 1] = only[1] - only[0] + 1, 1
        taken = x if shape[axis] == x.shape[axis] else part(*only)
        apart = graph.apply(TABLE["reshape"], (taken,), {"shape": tuple(shape)})
        shape[axis + 1] = runs.times
        every = graph.apply(TABLE["broadcast"], (apart,), {"shape": tuple(shape)})
        graph.add_node(Node(TABLE["reshape"], (every,), {"shape": node.output.shape}, rewrite.result(node.output)))
        return
    joined = TABLE["concatenate"]
    parts = tuple(part(*run) for run in runs.ends)
    graph.add_node(Node(joined, parts, {**joined.attributes, "axis": axis}, rewrite.result(node.output)))

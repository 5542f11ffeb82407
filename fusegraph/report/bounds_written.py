"""Bounds of what users write as one and what becomes several nodes: composites, and calls such as einsum.

Their values are their own NumPy meaning; what the nodes' analysis (`report.bounds`) finds is the bound around these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fusegraph.calls import Call
from fusegraph.dtypes import float32
from fusegraph.engines.reference import apply_all
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Array, Kind

#: Random draws of `_spread`, by how many roundings each operand moves in one, and how many times as far as results then
#: move they may be off: n roundings in a row that all go one way are sqrt(n) times as far as those of a draw.
PROBES, ROUNDINGS, SPREAD = 2, 8.0, 16.0


def too_narrow(graph: Graph) -> frozenset[str]:
    """Returns the tensors within calls whose dtype is narrower than the result's: to round to it is wrong."""
    return frozenset(
        t.name
        for result, call in graph.calls.items()
        for t in call.inner
        if t.dtype.is_float and result.dtype.is_float and t.dtype.unit_roundoff > result.dtype.unit_roundoff
    )


def meant(
    node: Node,
    call: Call | None,
    known: Mapping[Tensor, tuple[Array, Array]],
    parts: Mapping[Tensor, tuple[Array, Array]],
) -> dict[Tensor, tuple[Array, Array]]:
    """Returns the results of a composite, or of a call that the node is the last of, and their bounds.

    ``parts`` has values and bounds as they follow from the nodes that it is made of.  Those values may be off by what
    the operands' and the result's rounding explains (`_spread`): roundings within are meant.  Where the nodes tell
    nothing although the operands are so small that nothing need overflow, as of elements at computed places, that is
    the bound, too; but not for products of many elements.
    """
    operands = call.operands if call is not None else node.inputs

    def results(values: Mapping[Tensor, Array]) -> tuple[Array, ...]:
        if call is not None:
            return call.results(node, values)
        return apply_all(node, [values[t] for t in node.inputs])

    values = {t: known[t][0] for t in operands}
    exact = results(values)
    makers = [tensor.graph.producer(tensor) for tensor in call.inner] if call is not None else [node]
    short = all(n is not None and n.kind in (Kind.POINTWISE, Kind.MOVEMENT, Kind.COMPOSITE) for n in makers)
    size = max((float(np.abs(v).max(initial=0)) for v in values.values() if v.dtype.kind == "f"), default=0.0)
    found = {}
    for tensor, value, spread in zip(node.outputs, exact, _spread(results, node.outputs, exact, operands, known)):
        value = np.broadcast_to(value, tensor.shape)
        if tensor not in parts:
            found[tensor] = value, np.broadcast_to(spread, value.shape)
            continue
        other, error = parts[tensor]
        other = np.broadcast_to(other, value.shape)
        if node.op.weighs if call is None else call.weighs:
            value = np.where(np.isfinite(value) & np.isfinite(other), value, other)
        apart = np.minimum(distance(value, other), spread)
        small = short and size**3 < tensor.dtype.max  # products of three numbers do not overflow
        unknown = np.where(np.isnan(spread), np.inf, spread) if small else np.inf
        found[tensor] = value, np.where(np.isfinite(error), error + apart, unknown)
    return found


def _spread(
    results: Callable[[Mapping[Tensor, Array]], tuple[Array, ...]],
    made: Sequence[Tensor],
    exact: Sequence[Array],
    operands: Sequence[Tensor],
    known: Mapping[Tensor, tuple[Array, Array]],
) -> list[Array]:
    """Returns how far results move, many times over, as operands of floats are rounded or move by their bounds: an
    estimate, by a few random draws; infinite where one of these is not finite, or where an operand may be anything.
    """
    rng = np.random.default_rng(0)
    moved = [np.zeros(np.shape(x)) for x in exact]
    unknown = any(np.isinf(known[t][1]).any() for t in operands)
    for _ in range(PROBES):
        steps = {}
        for t in operands:
            value, error = known[t]
            if t.dtype.is_float:
                rounded = ROUNDINGS * t.dtype.unit_roundoff * np.where(np.isfinite(value), np.abs(value), 0.0)
                steps[t] = rng.choice([-1.0, 1.0], value.shape) * (rounded + np.where(np.isfinite(error), error, 0.0))
        for way in (-1, 1):  # both, as one of them crosses a discontinuity
            values = {t: known[t][0] + way * steps[t] if t in steps else known[t][0] for t in operands}
            moved = [np.maximum(m, distance(a, b)) for m, a, b in zip(moved, exact, results(values))]
    every = []
    for t, x, m in zip(made, exact, moved):
        size = np.where(np.isfinite(x), np.abs(x.astype(np.float64)), 0.0)
        unit = max(SPREAD * float32.unit_roundoff, 2 * t.dtype.unit_roundoff if t.dtype.is_float else 0.0)
        every.append(np.where(unknown, np.inf, SPREAD * m + unit * size))
    return every


def distance(a: Array, b: Array) -> Array:
    """Returns |a - b|; infinite where only one is NaN or they are different infinities."""
    if a.dtype == np.bool_:
        return np.asarray(a != b, np.float64)
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    distance = np.abs(x - y)
    return np.asarray(np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance)))

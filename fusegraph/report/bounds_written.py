"""Bounds of what users write as one op but becomes several nodes: composites, and calls such as einsum.

Their values come from their own NumPy definition; their bounds come from the analysis of the nodes (`report.bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fusegraph.calls import Call
from fusegraph.dtypes import float32
from fusegraph.engines.reference import apply_all
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Array, Kind

#: `_spread`: the number of random draws, by how many roundings each operand moves in a draw, and by how much the
#: results' movement is multiplied: n roundings that all go one way move sqrt(n) times as far as random ones.
PROBES, ROUNDINGS, SPREAD = 2, 8.0, 16.0


def too_narrow(graph: Graph) -> frozenset[str]:
    """Returns the names of tensors within calls that are narrower than the result, and so may not be rounded."""
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
    """Returns the results of a composite, or of a call whose last node is ``node``, with their bounds.

    ``parts`` has the values and bounds that follow from the nodes that it is made of.  Those values may differ from the
    definition by as much as rounding of operands and results explains (`_spread`), because the nodes round within.
    `_spread` alone is the bound if the nodes give none (an infinite one, as for elements at computed places), unless
    operands are so large that something may overflow or elements are multiplied and summed.
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
        small = short and size < float(tensor.dtype.max) ** (1 / 3)  # products of three numbers do not overflow
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
    """Estimates generously how far results move when float operands are rounded or move by their bounds.

    The estimate comes from a few random draws.  It is infinite where a draw turns a finite result into one that is not,
    and everywhere if a bound of an operand is infinite.
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
        for way in (-1, 1):  # both, as perhaps only one of them crosses a discontinuity
            values = {t: known[t][0] + way * steps[t] if t in steps else known[t][0] for t in operands}
            moved = [np.maximum(m, distance(a, b)) for m, a, b in zip(moved, exact, results(values))]
    every = []
    for t, x, m in zip(made, exact, moved):
        size = np.where(np.isfinite(x), np.abs(x.astype(np.float64)), 0.0)
        unit = max(SPREAD * float32.unit_roundoff, 2 * t.dtype.unit_roundoff if t.dtype.is_float else 0.0)
        every.append(np.where(unknown, np.inf, SPREAD * m + unit * size))
    return every


def distance(a: Array, b: Array) -> Array:
    """Returns |a - b| in float64; infinite where only one of them is NaN, or they are different infinities."""
    if a.dtype == np.bool_:
        return np.asarray(a != b, np.float64)
    x, y = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    distance = np.abs(x - y)
    if all_finite(distance):
        return np.asarray(distance)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    return np.asarray(np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance)))


def all_finite(array: Array) -> bool:
    """Tells whether no element is infinite or NaN: most arrays need none of the work that these take."""
    return bool(np.isfinite(array).all())

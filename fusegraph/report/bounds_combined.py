"""How far kernels may be from the reference that combine elements: along an axis (scans), or at places (scatters).

See `report.bounds`, which asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.scan import RUNNING

Array = np.ndarray[Any, Any]


def tiny(dtype: DType) -> float:
    """The smallest normal number: results below it may be flushed or lose digits."""
    return float(ml_dtypes.finfo(dtype.numpy).tiny)


def scan(graph: Graph, node: Node, operand: tuple[Array, Array]) -> Array:
    """That of every sum or product of its terms, in any order; extremes are exact."""
    x, e = operand[0], np.broadcast_to(operand[1], operand[0].shape)
    axis, reverse = node.attributes["axis"], node.attributes["reverse"]

    def along(op: str, values: Array) -> Array:
        return RUNNING[op].along(np.asarray(values, np.float64), axis, reverse)

    moves = along("cummax", np.where(np.isnan(e), np.inf, e))
    if not node.output.dtype.is_float:
        return np.where(moves == 0, 0.0, np.inf)
    if node.op.fold in ("max", "min"):
        return moves
    compute = compute_dtype(node.inputs[0].dtype, graph.compute_dtype)
    unit, largest, count = compute.unit_roundoff, compute.max * (1 - 2.0**-10), x.shape[axis]
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)
    if node.op.fold == "logaddexp":
        # No operand moves the result by more than it moves itself; each step rounds numbers up to this size.
        size = along("cummax", finite + e) + np.log(max(count, 1)) + 1
        error = moves + 8 * count * unit * size
        return np.where(size + error > largest, np.inf, error)
    if node.op.fold == "mul":
        total = along("cumprod", finite)
        moved = np.where(moves > 0, along("cumprod", finite + e) - total, 0.0)
        # The products of neighbours that there may be on the way: quotients of two of the products from the first on.
        logs = along("cumsum", np.log2(np.where(finite > 0, finite + e, 1.0)))
        rise, fall = logs - along("cummin", np.minimum(logs, 0.0)), logs - along("cummax", np.maximum(logs, 0.0))
        most, least = np.exp2(along("cummax", rise)), np.exp2(along("cummin", fall))
        error = moved + (2 * count + 2) * unit * (total + moved)
        # A partial product may overflow, or lose its digits, on the way to a result that is in range.
        error = error + np.where(least < tiny(compute), (count + 1) * tiny(compute) * most, 0.0)
        error = np.where((most > largest) | np.isinf(moves), np.inf, error)
    else:
        total = along("cumsum", finite)
        error = (count + 3) * unit * total + count * tiny(compute)
        error = error + along("cumsum", e) * (1 + (count + 3) * unit)
        error = np.where(total + error > largest, np.inf, error)
    return np.where(np.isnan(error), np.inf, error)


def scatter(graph: Graph, node: Node, operands: Sequence[tuple[Array, Array]]) -> Array:
    """That of what is put or combined at each place, in any order; where an index is not known for sure, anything."""
    (x, ex), (index, ei), (updates, eu) = ((v, np.broadcast_to(e, v.shape)) for v, e in operands)
    attributes = {**node.attributes}
    reduction = attributes.pop("reduction")
    if ei.any():
        return np.full(node.output.shape, np.inf)

    def put(own: Array, values: Array, how: str) -> Array:
        return np.asarray(node.op.reference(own, index, values, reduction=how, **attributes))

    moves = put(ex, eu, "none" if reduction == "none" else "max")
    if reduction in ("none", "max", "min"):
        return moves
    if not node.output.dtype.is_float:
        return np.where(moves > 0, np.inf, 0.0)
    compute = compute_dtype(node.output.dtype, graph.compute_dtype)
    unit, largest = compute.unit_roundoff, compute.max * (1 - 2.0**-10)
    ours, theirs = (np.where(np.isfinite(v), np.abs(v), 0.0) for v in (x, updates))
    terms = put(np.ones(x.shape), np.ones(updates.shape), "add")
    if reduction == "mul":
        total = put(ours, theirs, "mul")
        moved = put(ours + ex, theirs + eu, "mul") - total
        most = put(np.maximum(ours + ex, 1.0), np.maximum(theirs + eu, 1.0), "mul")
        small, fewer = (np.minimum(np.where(v > 0, v, 1.0), 1.0) for v in (ours, theirs))
        least = put(small, fewer, "mul")
        error = moved + (2 * terms + 2) * unit * (total + moved)
        error = error + np.where(least < tiny(compute), (terms + 1) * tiny(compute) * most, 0.0)
        error = np.where(most > largest, np.inf, error)
    else:
        total = put(ours, theirs, "add")
        error = (terms + 3) * unit * total + terms * tiny(compute) + put(ex, eu, "add") * (1 + (terms + 3) * unit)
        error = np.where(total + error > largest, np.inf, error)
        if reduction == "mean":
            count = np.maximum(terms, 1.0)
            error = error / count + 2 * unit * (total + error) / count + tiny(compute)
    error = np.where(moves == np.inf, np.inf, error)
    return np.where(np.isnan(error), np.inf, error)

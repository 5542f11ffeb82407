"""Error bounds of ops that combine elements: along axes (reductions, scans), or at indexed places (scatter).

`report.bounds` uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import ml_dtypes
import numpy as np

from codegen.combiners import ADD, LOGADDEXP, MAX, MIN, MUL, Combiner
from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node
from fusegraph.ops.base import Array
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.modes import COMBINED
from fusegraph.ops.scan import along as running
from fusegraph.ops.scatter import REDUCTIONS


def tiny(dtype: DType) -> float:
    """Returns the smallest normal number: results below it may be flushed or lose digits."""
    return float(ml_dtypes.finfo(dtype.numpy).tiny)


#: (combiner, function of terms and their errors) -> the function's values, combined over the same elements as terms.
Over = Callable[[Combiner, Callable[[Array, Array], Array]], Array]
#: Returns the largest and the smallest partial product that may occur.
Runs = Callable[[], tuple[Array, Array]]


def combined(
    combiner: Combiner, over: Over, count: int | Array, compute: DType, runs: Runs | None = None
) -> tuple[Array, Array]:
    """Returns (bound, magnitude of the result) of at most ``count`` terms combined in any order.

    The bound includes the effect of the terms' own errors.  Minima, maxima and integers without errors are exact.
    """
    # A term with an infinite bound may be NaN, and a NaN decides the result.
    moves = over(MAX, lambda _, e: np.where(np.isnan(e), np.inf, e))
    if not compute.is_float:
        return np.where(moves > 0, np.inf, 0.0), moves
    if combiner.selects:
        return moves, moves
    error, size = ERRORS[combiner.name](over, count, compute, moves, runs)
    error = np.where(size + error > compute.max * (1 - 2.0**-10), np.inf, error)
    return np.where(np.isnan(error) | np.isinf(moves), np.inf, error), size


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def _sum(over: Over, count: int | Array, compute: DType, moves: Array, _: Runs | None) -> tuple[Array, Array]:
    total, unit = over(ADD, lambda x, _: _finite(x)), compute.unit_roundoff
    error = (count + 3) * unit * total + count * tiny(compute)
    return error + over(ADD, lambda _, e: e) * (1 + (count + 3) * unit), total


def _product(over: Over, count: int | Array, compute: DType, moves: Array, runs: Runs | None) -> tuple[Array, Array]:
    total = over(MUL, lambda x, _: _finite(x))
    moved = over(MUL, lambda x, e: _finite(x) + e) - total
    if runs is not None:
        most, least = runs()
    else:
        most = over(MUL, lambda x, e: np.maximum(_finite(x) + e, 1.0))
        least = over(MUL, lambda x, _: np.minimum(np.where(_finite(x) > 0, _finite(x), 1.0), 1.0))
    error = moved + (2 * count + 2) * compute.unit_roundoff * (total + moved)
    # A partial product may overflow or underflow although the result is in range; if it is 0, its product with an
    # infinity is NaN.
    error = error + np.where(least < tiny(compute), (count + 1) * tiny(compute) * most, 0.0)
    infinite = over(MAX, lambda x, _: np.isinf(x).astype(np.float64)) > 0
    error = np.where(infinite & ((least < tiny(compute)) | (moves > 0)), np.inf, error)
    return np.where(most > compute.max * (1 - 2.0**-10), np.inf, error), total


def _logarithm(over: Over, count: int | Array, compute: DType, moves: Array, _: Runs | None) -> tuple[Array, Array]:
    # The result moves by no more than an operand does; each step rounds numbers up to this size.
    size = over(MAX, lambda x, e: _finite(x) + e) + np.log(np.maximum(count, 1)) + 1
    return moves + 8 * count * compute.unit_roundoff * size, size


#: Name of a combiner that rounds -> function that returns (error, magnitude of the result).
ERRORS = {ADD.name: _sum, MUL.name: _product, LOGADDEXP.name: _logarithm}


def reduction(graph: Graph, node: Node, operand: tuple[Array, Array], value: Array) -> Array:
    """Returns the bound of a reduction, by its mode; minima and maxima are exact."""
    x, e = operand
    mode, axes, keepdims = COMBINED[node.attributes["mode"]], node.attributes["axes"], node.attributes["keepdims"]
    if mode.before is not None:
        magnitude = np.abs(x)
        x, e = mode.before.numpy(magnitude), mode.before.moves(_finite(x), e)

    def over(combiner: Combiner, of: Callable[[Array, Array], Array]) -> Array:
        start = max(combiner.neutral, 0.0)  # of magnitudes
        return np.asarray(combiner.ufunc.reduce(of(x, e), axis=axes, keepdims=keepdims, initial=start))

    compute, count = compute_dtype(node.inputs[0].dtype, graph.compute_dtype), prod(x.shape[d] for d in axes)
    error, size = combined(mode.combiner, over, count, compute)
    if mode.after is not None:
        error = mode.after.error(error, size, value, count, compute.unit_roundoff, tiny(compute))
    return np.where(np.isnan(error), np.inf, error)


def scan(graph: Graph, node: Node, operand: tuple[Array, Array]) -> Array:
    """Returns the bound of a scan: that of each of its sums or products in any order; minima and maxima are exact."""
    x, e = operand[0], np.broadcast_to(operand[1], operand[0].shape)
    axis, reverse, combiner = node.attributes["axis"], node.attributes["reverse"], node.op.combiner
    assert combiner is not None

    def along(how: Combiner, values: Array) -> Array:
        return running(how, np.asarray(values, np.float64), axis, reverse)

    def runs() -> tuple[Array, Array]:
        """Returns the largest and smallest product of consecutive elements, as quotients of two prefix products."""
        finite = _finite(x)
        logs = along(ADD, np.log2(np.where(finite > 0, finite + e, 1.0)))
        rise, fall = logs - along(MIN, np.minimum(logs, 0.0)), logs - along(MAX, np.maximum(logs, 0.0))
        return np.exp2(along(MAX, rise)), np.exp2(along(MIN, fall))

    compute = compute_dtype(node.inputs[0].dtype, graph.compute_dtype)
    return combined(combiner, lambda how, of: along(how, of(x, e)), x.shape[axis], compute, runs)[0]


def scatter(graph: Graph, node: Node, operands: Sequence[tuple[Array, Array]]) -> Array:
    """Returns the bound of what is put or combined at each place in any order; infinite if an index is uncertain."""
    (x, ex), (index, ei), (updates, eu) = ((v, np.broadcast_to(e, v.shape)) for v, e in operands)
    attributes = {**node.attributes}
    reduction = attributes.pop("reduction")
    if ei.any():
        return np.full(node.output.shape, np.inf)

    def put(own: Array, values: Array, how: str) -> Array:
        return np.asarray(node.op.reference(own, index, values, reduction=how, **attributes))

    combiner = REDUCTIONS[reduction]
    if combiner is None:
        return put(ex, eu, reduction)
    compute = compute_dtype(node.output.dtype, graph.compute_dtype)
    terms = put(np.ones(x.shape), np.ones(updates.shape), ADD.name)
    error, total = combined(combiner, lambda how, of: put(of(x, ex), of(updates, eu), how.name), terms, compute)
    if reduction == "mean":
        count = np.maximum(terms, 1.0)
        error = error / count + 2 * compute.unit_roundoff * (total + error) / count + tiny(compute)
    return np.where(np.isnan(error), np.inf, error)

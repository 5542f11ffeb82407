"""How far a correct kernel may be from the reference: a running error analysis along the graph.

Every tensor gets a value (float64, `engines.reference`) and a bound on the absolute error of computing it in the compute type,
rounding where the compiled graph rounds.  A pointwise node's bound is what its result moves by when its operands move by
their bounds, plus the rounding of the node itself; where an operand may cross a discontinuity (floor, a comparison, a cast to
an integer) the bound grows to the jump by itself.  Contractions use the classical bound of a sum of products (Higham,
"Accuracy and Stability of Numerical Algorithms", section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from fusegraph.dtypes import DType, float32, float64
from fusegraph.engines.reference import apply
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Kind
from fusegraph.ops.convert import round_to, to_reference

Array = np.ndarray[Any, Any]

#: Relative error of the approximate instructions, used where everything is stored in 16 bits or fewer.
APPROXIMATE = 2.0**-15


@dataclass(frozen=True)
class Rounding:
    """Where the compiled graph rounds.

    materialized  names of tensors written to memory between kernels (rounded to their dtype).
    approximate   names of tensors computed with approximate instructions.
    strict        every intermediate is rounded.
    """

    materialized: frozenset[str] = frozenset()
    approximate: frozenset[str] = frozenset()
    strict: bool = False


def bounded(graph: Graph, inputs: Mapping[str, Array], rounding: Rounding) -> dict[Tensor, tuple[Array, Array]]:
    """(reference value, bound on the absolute error) of every tensor, from the inputs as stored, by name."""
    result: dict[Tensor, tuple[Array, Array]] = {}
    for tensor in graph.tensors.values():
        if tensor.value is not None:
            value = to_reference(tensor.value, tensor.dtype)
            result[tensor] = value, np.zeros(value.shape)
    for tensor in graph.inputs:
        value = to_reference(inputs[tensor.name], tensor.dtype)
        result[tensor] = value, np.zeros(value.shape)
    for node in graph.nodes:
        with np.errstate(all="ignore"):
            result[node.output] = _node(graph, node, [result[t] for t in node.inputs], rounding)
    return result


def _node(graph: Graph, node: Node, operands: Sequence[tuple[Array, Array]], rounding: Rounding) -> tuple[Array, Array]:
    tensor = node.output
    value = np.broadcast_to(apply(node, [v for v, _ in operands]), tensor.shape)
    if node.kind is Kind.CONTRACTION:
        error = _contraction(graph, node, operands, value)
    else:
        error = _propagated(node, operands, value)
    compute = compute_dtype(tensor.dtype, graph)
    if tensor.dtype.is_float:
        magnitude = np.where(np.isnan(value), 0.0, np.abs(value)) + error
        if node.kind is not Kind.CONTRACTION:
            unit = 2 * max(node.op.ulps, 1.0) * compute.unit_roundoff
            if tensor.name in rounding.approximate:
                unit += APPROXIMATE
            error = error + unit * magnitude + 8 * tiny(compute)
        error = np.where(magnitude > compute.max * (1 - 2.0**-10), np.inf, error)
        error = np.where(np.isfinite(value) | (error > 0), error, 0.0)
        if rounding.strict:
            value = round_to(value, tensor.dtype)
        if rounding.strict or tensor.name in rounding.materialized:
            error = error + _rounded(np.where(np.isnan(value), 0.0, np.abs(value)) + error, tensor.dtype)
        error = np.where(np.isnan(value) & ~np.isinf(error), 0.0, error)
        error = np.where(np.isnan(error), np.inf, error)
    return value, error


def compute_dtype(dtype: DType, graph: Graph) -> DType:
    """The dtype in which values of a dtype are computed."""
    return dtype if not dtype.is_float or dtype == float64 else float64 if graph.compute_dtype == float64 else float32


def tiny(dtype: DType) -> float:
    """The smallest normal number: results below it may be flushed or lose digits."""
    return float(ml_dtypes.finfo(dtype.numpy).tiny)


def _rounded(magnitude: Array, dtype: DType) -> Array:
    """What rounding to a dtype may add: half a unit in the last place, and what saturation or overflow takes away."""
    error = dtype.unit_roundoff * 2 * magnitude + tiny(dtype) * dtype.unit_roundoff * 2
    return np.where(magnitude > dtype.max * (1 - dtype.unit_roundoff), np.inf, error)


def _contraction(graph: Graph, node: Node, operands: Sequence[tuple[Array, Array]], value: Array) -> Array:
    """(K + 2) u sum |a||b|, plus what the factors' own errors bring."""
    if not node.output.dtype.is_float:
        if all(not e.any() for _, e in operands):
            return np.zeros(value.shape)
        return np.full(value.shape, np.inf)
    (a, ea), (b, eb) = ((np.asarray(v, np.float64), e) for v, e in operands)
    attributes = {**node.attributes}
    products = a.shape[-1] if node.op.name == "matmul" else prod(node.inputs[1].shape[1:])

    def sums(x: Array, y: Array) -> Array:
        return np.asarray(node.op.reference(np.abs(x), np.abs(y), **attributes))

    dtypes = node.op.operand_dtypes(tuple(t.type for t in node.inputs))
    unit = compute_dtype(dtypes[0], graph).unit_roundoff if dtypes[0].is_float else 0.0
    magnitude = sums(a, b)
    finite = sums(np.where(np.isfinite(a), a, 0.0), np.where(np.isfinite(b), b, 0.0))
    error = (products + 2) * unit * magnitude + products * tiny(float32)
    # Whether a partial sum overflows depends on the order of summation.
    largest = compute_dtype(dtypes[0], graph).max * (1 - 2.0**-10)
    error = np.where(finite > largest, np.inf, error)
    if ea.any() or eb.any():
        error = error + sums(ea, b) + sums(a, eb) + sums(ea, eb)
    return np.where(np.isnan(error), np.inf, error)


def _propagated(node: Node, operands: Sequence[tuple[Array, Array]], value: Array) -> Array:
    """The sum over operands of how far the result moves when that operand moves by its bound, either way or onto the
    place where a discontinuity is likely (zero, or another operand)."""
    values = [v for v, _ in operands]
    total = np.zeros(value.shape)
    for position, (v, e) in enumerate(operands):
        if not e.any():
            continue
        moved = 0.0
        for candidate in _moved(values, position, v, e, node.inputs[position].dtype):
            other = np.broadcast_to(apply(node, [*values[:position], candidate, *values[position + 1 :]]), value.shape)
            moved = np.maximum(moved, _distance(value, other))
        total = total + moved
    return total


def _moved(values: Sequence[Array], position: int, v: Array, e: Array, dtype: DType) -> list[Array]:
    if dtype.is_bool:
        return [np.where(e > 0, ~v, v)]
    if dtype.is_int:
        step = np.minimum(e, 2.0**40).astype(np.int64)
        wide = v.astype(np.int64)
        moved = [np.clip(wide + s, int(dtype.min), int(dtype.max)).astype(v.dtype) for s in (step, -step)]
        return moved
    v = np.where(np.isnan(v) & np.isinf(e), 0.0, v)  # nothing is known of such a value, not even that it is NaN
    low, high = v - e, v + e
    targets = [np.zeros(())] + [x for k, x in enumerate(values) if k != position and x.dtype.kind == "f"]
    result = [low, high]
    for target in targets:
        try:
            shape = np.broadcast_shapes(v.shape, target.shape)
        except ValueError:
            continue
        if shape == v.shape:
            result.append(np.clip(target, low, high))
        else:
            result.append(np.clip(np.broadcast_to(target, shape), low, high))
    return result


def _distance(a: Array, b: Array) -> Array:
    """|a - b|; infinite where only one is NaN or they are different infinities."""
    if a.dtype == np.bool_:
        return (a != b).astype(np.float64)
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    distance = np.abs(x - y)
    return np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))


def accepts(dtype: DType, actual: Array, value: Array, error: Array) -> Array:
    """Where an output, as stored, is what a correct kernel may give for this reference value and bound.

    Rounding is monotonic, so a correct result lies between the roundings of value - error and value + error.
    """
    seen = to_reference(actual, dtype)
    if not dtype.is_float:
        exact = seen == value
        if dtype.is_bool:
            return exact | (error > 0)
        with np.errstate(all="ignore"):
            return exact | (np.abs(seen.astype(np.float64) - value.astype(np.float64)) <= error)
    with np.errstate(all="ignore"):
        slack = error + 2 * np.abs(value) * 2.0**-53
        low, high = round_to(value - slack, dtype), round_to(value + slack, dtype)
        inside = (low <= seen) & (seen <= high)
    return inside | (np.isnan(seen) & np.isnan(value)) | np.isinf(error)

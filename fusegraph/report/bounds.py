"""How far a correct kernel may be from the reference: a running error analysis along the graph.

Every tensor gets a value (float64, `engines.reference`) and a bound on the absolute error of computing it in the
compute type, rounding where the compiled graph rounds.  A pointwise node's bound is how far its result moves when its
operands move by their bounds, plus the rounding of the node itself.  If an operand may cross a discontinuity (floor, a
comparison, a cast to an integer), this includes the jump.  Contractions use the classical bound of a sum of products
(Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from codegen.bf16x6 import LEAST_TERMS
from fusegraph.dtypes import DType, float32, float64
from fusegraph.engines.reference import apply
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops import TABLE, winograd
from fusegraph.ops.base import Array, Kind, Role
from fusegraph.ops.contraction import TF32
from fusegraph.ops.convert import round_to, to_reference
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.passes.decompose import decompose
from fusegraph.pattern import made_of
from fusegraph.report.bounds_bf16x6 import underflow
from fusegraph.report.bounds_combined import reduction, scan, scatter, tiny
from fusegraph.report.bounds_sparse import left_out
from fusegraph.report.bounds_written import all_finite, distance, meant, too_narrow

#: Relative error of the approximate instructions, which are used if everything is stored in 16 bits or fewer.
APPROXIMATE = 2.0**-15
#: Relative error of a float32 sum in tensor cores: they align the terms and truncate below a few guard bits (Fasi,
#: Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021), which loses less than four times as
#: much as rounding.
TENSOR_CORE_UNIT = 2.0**-22
#: The same for fp8 products on tensor cores whose sums keep 14 bits, and how many products one instruction adds to a
#: sum at once: these terms and the sum are truncated to 14 bits from the leading bit of the largest.
FP8_UNIT, FP8_AT_ONCE = 2.0**-13, 32
#: Relative error of a float32 operand in tf32: 10 bits after the leading one, rounded to nearest.
TF32_UNIT = 2.0**-11
_ZERO = np.zeros(())


@dataclass(frozen=True)
class Rounding:
    """Where the compiled graph rounds.

    materialized  names of tensors written to memory between kernels, which rounds them to their dtype.
    approximate   names of tensors computed with approximate instructions.
    strict        whether every intermediate is rounded.
    coarse        names of sums of fp8 products that tensor cores may keep to 14 bits -> the most products added up so
                  before such partial sums are added up in float32 (0: all products).
    winograd      names of convolutions by Winograd's algorithm -> the results along a side of its tiles.
    scaled        names of tensors that are rounded to their dtype before they are divided by their sum, or before their
                  rows are scaled.
    """

    materialized: frozenset[str] = frozenset()
    approximate: frozenset[str] = frozenset()
    strict: bool = False
    coarse: Mapping[str, int] = field(default_factory=dict)
    winograd: Mapping[str, int] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()


def bounded(graph: Graph, inputs: Mapping[str, Array], rounding: Rounding) -> dict[Tensor, tuple[Array, Array]]:
    """Returns (reference value, bound on the absolute error) of every tensor; ``inputs`` are arrays as stored, by name.

    The value of a composite op, or of a function's call (`fusegraph.calls`), comes from its own NumPy definition, which
    shares nothing with the nodes that it decomposes to.  The bound follows from these nodes, which have the names that
    `passes.decompose` gives them.  See `report.bounds_written`.
    """
    rounding = replace(rounding, materialized=rounding.materialized - too_narrow(graph))
    written_out = decompose(graph)
    counterpart = written_out.counterparts  # constants without effect have none
    result = _begun(graph, inputs)
    found = {counterpart[t]: both for t, both in result.items() if t in counterpart}
    found |= _exact({t: t.value for t in written_out.graph.tensors.values() if t.value is not None and t not in found})
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            call, composite = graph.calls.get(node.output), node.op.is_composite(node.attributes)
            if composite:
                made = [counterpart[t] for t in node.outputs if t in counterpart]
                for part in _between(written_out.graph, made, found):
                    found[part.output] = _node(written_out.graph, part, [found[t] for t in part.inputs], rounding)
                parts = {t: found[counterpart[t]] for t in node.outputs if t in counterpart}
            else:
                parts = {node.output: _node(graph, node, [result[t] for t in node.inputs], rounding)}
            of_node = meant(node, call, result, parts) if composite or call is not None else parts
            result |= of_node
            found |= {counterpart[t]: both for t, both in of_node.items() if t in counterpart}
    return result


def _begun(graph: Graph, inputs: Mapping[str, Array]) -> dict[Tensor, tuple[Array, Array]]:
    """Returns the values and zero errors of constants and inputs."""
    stored = {t: t.value for t in graph.tensors.values() if t.value is not None}
    return _exact(stored | {t: inputs[t.name] for t in graph.inputs})


def _exact(stored: Mapping[Tensor, Array]) -> dict[Tensor, tuple[Array, Array]]:
    """Returns the values of tensors that are exact, with errors of zero."""
    values = {t: to_reference(array, t.dtype) for t, array in stored.items()}
    return {t: (value, np.broadcast_to(_ZERO, value.shape)) for t, value in values.items()}


def _between(graph: Graph, targets: Iterable[Tensor], known: Collection[Tensor]) -> list[Node]:
    """Returns the nodes that tensors follow from, back to those that are known, in the order of the graph."""
    left = [t for t in targets if t not in known]
    found = made_of(graph, left, lambda node: [t for t in node.inputs if t not in known])
    return [node for node in graph.nodes if node in found] if found else []


def _node(graph: Graph, node: Node, operands: Sequence[tuple[Array, Array]], rounding: Rounding) -> tuple[Array, Array]:
    tensor = node.output
    value = np.broadcast_to(apply(node, [v for v, _ in operands]), tensor.shape)
    if node.kind is Kind.CONTRACTION:
        if tensor.name in rounding.winograd:
            error = _winograd(node, operands, rounding.winograd[tensor.name])
        else:
            error = _contraction(graph, node, operands, value, coarse=rounding.coarse.get(tensor.name))
        if (unknown := left_out(graph, node, [v for v, _ in operands])) is not None:
            error = np.where(unknown, np.inf, error)
    elif node.kind is Kind.REDUCTION:
        error = reduction(graph, node, operands[0], value)
    elif node.kind is Kind.SCAN:
        error = scan(graph, node, operands[0])
    elif node.kind is Kind.SORT:
        error = _sort(node, operands[0])
    elif node.kind is Kind.SCATTER:
        error = scatter(graph, node, operands)
    elif node.kind is Kind.POOLING:
        error = _window(graph, node, operands)
    elif node.kind in (Kind.MOVEMENT, Kind.ASSIGN):
        error = _taken_along(node, operands)
    else:
        error = _propagated(node, operands, value)
    if not tensor.dtype.is_float:
        return value, error
    compute = compute_dtype(tensor.dtype, graph.compute_dtype)
    tame = all_finite(value)
    settled = False if tame else ~np.isfinite(value) & (error == 0)  # infinite or NaN, whatever is rounded
    magnitude = (np.abs(value) if tame else np.where(np.isnan(value), 0.0, np.abs(value))) + error
    if node.kind not in (
        Kind.POINTWISE,
        Kind.MOVEMENT,
        Kind.ASSIGN,
    ):  # the accumulator may be wider than the result's compute type
        _, error = _rounded(value, error, compute, strict=False)
    elif node.op.role is Role.NARROW:  # from float64 to a dtype that is computed in float32
        if compute_dtype(node.inputs[0].dtype, graph.compute_dtype) != compute:
            _, error = _rounded(value, error, compute, strict=False)
    elif node.op.ulps:
        approximate = tensor.name in rounding.approximate
        unit = 2 * max(node.op.ulps, 1.0) * compute.unit_roundoff + 2 * node.op.reference_ulps * float64.unit_roundoff
        scale = magnitude if node.op.scale is None else np.maximum(magnitude, _scale(node, operands))
        error = error + (unit + APPROXIMATE * approximate) * scale + (128 if approximate else 8) * tiny(compute)
    largest = compute.max * (1 - 2.0**-10)
    if not tame or not magnitude.max(initial=0.0) <= largest:
        error = np.where(magnitude > largest, np.inf, error)
        error = np.where(settled, 0.0, error)
    if rounding.strict or tensor.name in rounding.materialized:
        value, error = _rounded(value, error, tensor.dtype, strict=rounding.strict)
    if tensor.name in rounding.scaled:
        error = error + 2 * tensor.dtype.unit_roundoff * (np.abs(value) + error) + tiny(tensor.dtype)
    if not tame:
        error = np.where(np.isnan(value) & ~np.isinf(error), 0.0, error)
    return value, error if all_finite(error) else np.where(np.isnan(error), np.inf, error)


def _scale(node: Node, operands: Sequence[tuple[Array, Array]]) -> Array:
    """Returns the magnitude of the terms of an op whose terms may cancel."""
    assert node.op.scale is not None
    scale = np.broadcast_to(node.op.scale(*(v for v, _ in operands), **node.attributes), node.output.shape)
    return np.where(np.isfinite(scale), scale, 0.0)


def _rounded(value: Array, error: Array, dtype: DType, *, strict: bool) -> tuple[Array, Array]:
    """Returns the reference (itself rounded in strict mode) and how far from it a rounded value may be.

    Rounding is monotonic, even where it saturates or overflows: the result lies between the rounded limits.  It changes
    no value that the dtype holds, as those that were read from memory and only moved.
    """
    if not error.any() and np.array_equal(round_to(value, dtype), value):
        return value, error
    center = round_to(value, dtype) if strict else value
    slack = _slack(value, error)
    ends = [distance(center, round_to(end, dtype)) for end in (value - slack, value + slack)]
    rounded = np.maximum(*ends)
    rounded = rounded if all_finite(error) else np.where(np.isinf(error), np.inf, rounded)
    # Unless strict, consumers in the same kernel take the value from before the rounding.
    return center, rounded if strict else np.maximum(rounded, error)


def _slack(value: Array, error: Array) -> Array:
    """Returns the bound, plus the rounding error of adding it to the value in float64."""
    size = np.abs(value) if all_finite(value) else np.where(np.isfinite(value), np.abs(value), 0.0)
    return np.asarray(error + 2 * float64.unit_roundoff * size)


def _contraction(
    graph: Graph, node: Node, operands: Sequence[tuple[Array, Array]], value: Array, *, coarse: int | None
) -> Array:
    """Returns the bound (K + 2) u sum |a||b|, plus the operands' own errors, which include their rounding to tf32.

    If ``coarse`` is not None, tensor cores may truncate sums of at most so many fp8 products (0: all), which is added.
    """
    if not node.output.dtype.is_float:
        return np.full(value.shape, np.inf if any(e.any() for _, e in operands) else 0.0)
    (a, ea), (b, eb) = ((np.abs(np.asarray(v, np.float64)), e) for v, e in operands)
    attributes = {**node.attributes}
    types = tuple(t.type for t in node.inputs)
    assert node.op.products is not None
    products = node.op.products(types, attributes)

    def sums(x: Array, y: Array) -> Array:
        """Returns the sums of products of magnitudes."""
        return np.asarray(node.op.reference(x, y, **attributes))

    common = node.op.promoted(types)
    compute = compute_dtype(common, graph.compute_dtype)
    unit = compute.unit_roundoff if common.is_float else 0.0
    if common.is_float and compute == float32 and (common != float32 or attributes["compute_dtype"] == TF32):
        unit = TENSOR_CORE_UNIT
        if common == float32:
            ea, eb = (e + _tf32_error(v) for v, e in ((a, ea), (b, eb)))
    magnitude = finite = sums(a, b)
    if not (all_finite(a) and all_finite(b)):
        finite = sums(np.where(np.isfinite(a), a, 0.0), np.where(np.isfinite(b), b, 0.0))
    error = (products + 2) * unit * magnitude + products * tiny(float32)
    if compute == common == float32 and unit != TENSOR_CORE_UNIT and products >= LEAST_TERMS:
        error = error + underflow(a, b, sums)  # tensor cores may multiply parts: else no less precise (`units`)
    if coarse is not None:
        together = min(coarse or products, products)
        error = error + (together + 2 * -(-together // FP8_AT_ONCE)) * FP8_UNIT * magnitude
    # Whether a partial sum overflows depends on the order of summation.
    largest = compute.max * (1 - 2.0**-10)
    if not finite.max(initial=0.0) <= largest:
        error = np.where(finite > largest, np.inf, error)
    if ea.any():
        error = error + sums(ea, b + eb if eb.any() else b)
    if eb.any():
        error = error + sums(a, eb)
    return error if all_finite(error) else np.where(np.isnan(error), np.inf, error)


def _winograd(node: Node, operands: Sequence[tuple[Array, Array]], tile: int) -> Array:
    """Returns the bound for Winograd's algorithm in float32, plus the effect of the operands' own errors.

    Every term of a result is rounded at most 10 times in the filter's transform (inexact coefficients included), 8
    times in the input's, 10 times in the output's, once as a product, and once by each addition over the channels
    (`codegen/device/winograd.cuh`).  The bound is that many u times the sum of the terms' magnitudes, which is the same
    algorithm with the magnitudes of its coefficients.  A value that may overflow or is not finite spoils its whole
    tile.
    """
    (x, ex), (taps, et) = ((np.asarray(v, np.float64), e) for v, e in operands)
    attributes, shape = {**node.attributes}, node.output.shape
    of_filter, of_input, of_output = winograd.transforms(node.op.role, attributes, shape, tile)
    u = winograd.filter_transform(np.abs(taps) + et, **of_filter, magnitude=True)
    v = winograd.input_transform(np.abs(x) + ex, **of_input, magnitude=True)
    terms = x.shape[1] + 29
    unit = terms * float32.unit_roundoff
    m = v @ u
    spread = v.sum(axis=2, keepdims=True) + u.sum(axis=1, keepdims=True) + terms  # the effect of underflow
    error = winograd.output_transform(unit / (1 - unit) * m + 2 * tiny(float32) * spread, **of_output, magnitude=True)
    # Intermediates of a transform are at most 32 times as large as its largest result.
    largest = float32.max / 32
    spoilt = ~(v < largest).all(axis=2, keepdims=True) | ~(u < largest).all(axis=1, keepdims=True) | ~(m < largest)
    everywhere = np.broadcast_to(spoilt.any(axis=0), m.shape).astype(np.float64)
    error = np.where(winograd.output_transform(everywhere, **of_output, magnitude=True) > 0, np.inf, error)
    error = np.where(winograd.output_transform(m, **of_output, magnitude=True) < largest, error, np.inf)
    if ex.any() or et.any():
        for a, b in ((ex, np.abs(taps)), (np.abs(x), et), (ex, et)):
            error = error + node.op.reference(a, b, **attributes)
    return np.where(np.isnan(error), np.inf, error)


def _window(graph: Graph, node: Node, operands: Sequence[tuple[Array, Array]]) -> Array:
    """Returns the bound of pooling: that of a sum or mean over the largest window, or the largest error in a window.

    The latter is for maxima, which do not round.  Positions of maxima are exact if no operand has an error.
    """
    (x, e), attributes, combiner = operands[0], {**node.attributes}, node.op.combiner
    e = np.where(np.isnan(e), np.inf, np.broadcast_to(e, x.shape))
    assert combiner is not None
    if combiner.selects:
        attributes.pop("dtype", None)
        most = np.maximum(TABLE["max_pool"].reference(e, **attributes), 0.0)
        return np.asarray(most if node.output.dtype.is_float else np.where(most > 0, np.inf, 0.0))
    rest = [index for index, _ in operands[1:]]
    if any(moved.any() for _, moved in operands[1:]):
        return np.full(node.output.shape, np.inf)

    def folded(values: Array) -> Array:
        found = node.op.reference(values, *rest, **attributes)
        return np.where(np.isnan(found), 0.0, found)  # a mean of no elements is NaN, whatever is rounded

    assert node.op.windows is not None
    windows, _ = node.op.windows(tuple(t.type for t in node.inputs), attributes)
    count = int(np.prod([w.count for w in windows.values()], dtype=np.int64))
    compute = compute_dtype(node.inputs[0].dtype, graph.compute_dtype)
    total = folded(np.where(np.isfinite(x), np.abs(x), 0.0))
    error = (count + 6) * compute.unit_roundoff * total + count * tiny(compute) + folded(e) * (1 + 2.0**-10)
    return np.where((total * count + error) > compute.max * (1 - 2.0**-10), np.inf, error)


def _taken_along(node: Node, operands: Sequence[tuple[Array, Array]]) -> Array:
    """Returns the bounds of the elements that were moved to the result; infinite where a position is uncertain."""
    attributes = {**node.attributes}
    if node.op.role is Role.PAD:
        attributes["value"] = 0
    keys = node.op.names(len(operands))
    given = [v if key in node.op.integers else np.broadcast_to(e, v.shape) for key, (v, e) in zip(keys, operands)]
    error = np.asarray(node.op.reference(*given, **attributes), np.float64)
    for key, (v, e) in zip(keys, operands):
        if key in node.op.integers and e.any():
            if node.kind is Kind.ASSIGN:
                return np.full(error.shape, np.inf)
            axis = node.attributes["axis"]
            after = error.ndim - axis - v.ndim
            doubtful = np.broadcast_to(e, v.shape) != 0
            error = np.where(doubtful.reshape((1,) * axis + v.shape + (1,) * after), np.inf, error)
    return error


def _sort(node: Node, operand: tuple[Array, Array]) -> Array:
    """Returns the bound of sorting: no element moves farther than the largest bound in its row.

    Sorted positions are exact if no operand has an error.
    """
    x, e = operand
    e = np.broadcast_to(np.where(np.isnan(e), np.inf, e), x.shape)
    most = np.broadcast_to(e.max(axis=node.attributes["axis"], keepdims=True, initial=0.0), node.output.shape)
    return most if node.attributes.get("dtype") is None else np.where(most > 0, np.inf, 0.0)


def _tf32_error(value: Array) -> Array:
    """Returns how far tf32 may be from the operand: subnormal numbers may become 0, the largest ones infinite."""
    magnitude = np.where(np.isfinite(value), np.abs(value), 0.0)
    error = np.where(magnitude < tiny(float32), magnitude, magnitude * TF32_UNIT)
    return np.where(magnitude > float32.max * (1 - TF32_UNIT), np.inf, error)


def _propagated(node: Node, operands: Sequence[tuple[Array, Array]], value: Array) -> Array:
    """Returns how far the result moves when the operands move by their bounds.

    That is the sum over operands of how far each moves the result alone, when it moves to either end of its bound or to
    where a discontinuity is likely (zero, or the value of another operand).  If it is more, it is how far all operands
    together move the result at the ends of their bounds; for comparisons, also at the likely discontinuities.
    """
    values = [_known(v, e) for v, e in operands]
    inexact = [k for k, (_, e) in enumerate(operands) if e.any() and node.op.operands[k] not in node.op.shapes]
    moves = {k: _moved(values, k, operands[k][1], node.inputs[k].dtype) for k in inexact}

    def moved_by(moved: Mapping[int, Array]) -> Array:
        other = apply(node, [moved.get(k, v) for k, v in enumerate(values)])
        return distance(value, np.broadcast_to(other, value.shape))

    total = np.zeros(value.shape)
    for k in inexact:
        total = total + np.maximum.reduce([moved_by({k: candidate}) for candidate in moves[k]])
    if len(inexact) > 1:
        # A continuous function moves farthest at the ends; a comparison may change where all operands are 0.
        most = 2 if node.output.dtype.is_float else None
        for ends in product(*(moves[k][:most] for k in inexact)):
            total = np.maximum(total, moved_by(dict(zip(inexact, ends))))
    if inexact and node.op.turns is not None:
        corners = [node.op.turns(*at) for at in product(*(moves.get(k, (v,)) for k, v in enumerate(values)))]
        spread = np.maximum.reduce(np.broadcast_arrays(*corners)) - np.minimum.reduce(np.broadcast_arrays(*corners))
        total = np.where(spread < 1, total, np.inf)
    if inexact and node.op.role in (Role.EQ, Role.NE):  # may change wherever the operands' ranges meet
        spans = [moves[k][:2] if k in moves else (v, v) for k, v in enumerate(values)]
        meet = np.maximum(*(low for low, _ in spans)) <= np.minimum(*(high for _, high in spans))
        total = np.maximum(total, meet & np.logical_or(*(e > 0 for _, e in operands)))
    if node.op.role in (Role.BITS, Role.BITCAST):
        for k in inexact:
            total = np.where(operands[k][1] > 0, np.inf, total)
    if node.op.role is Role.BITCAST:  # NaN has many patterns
        total = np.where(np.isnan(values[0].astype(np.float64)), np.inf, total)
    return total


def _known(value: Array, error: Array) -> Array:
    """Returns the values, with 0 in place of a NaN whose bound is infinite: it may be any number."""
    return np.where(np.isnan(value) & np.isinf(error), 0.0, value) if value.dtype.kind == "f" else value


def _moved(values: Sequence[Array], position: int, error: Array, dtype: DType) -> list[Array]:
    """Returns values of an operand within its bound: the two ends first, then where a discontinuity is likely."""
    v = values[position]
    if dtype.is_bool:
        return [np.where(error > 0, ~v, v), v]
    targets = [np.zeros(())] + [x for k, x in enumerate(values) if k != position and x.dtype != np.bool_]
    if dtype.is_float:
        known = np.where(np.isinf(error), 0.0, v)  # values with an infinite bound may be any number
        low, high = known - error, known + error
    else:
        least, most = (np.array(n, v.dtype) for n in (dtype.min, dtype.max))
        unsigned = f"u{v.dtype.itemsize}"  # holds the distances to both ends without overflow
        step = np.minimum(error, min(2.0**40, 2.0**dtype.bits - 1)).astype(unsigned)
        low = np.where((v - least).view(unsigned) > step, (v.view(unsigned) - step).view(v.dtype), least)
        high = np.where((most - v).view(unsigned) > step, (v.view(unsigned) + step).view(v.dtype), most)
    result = [low, high]
    for target in targets:
        with np.errstate(all="ignore"):
            place = target.astype(np.float64) if dtype.is_float else np.nan_to_num(np.rint(target)).astype(np.int64)
        result.append(np.clip(place, low, high).astype(v.dtype))
    if dtype.is_float and np.isinf(error).any():  # a value with an infinite bound may be NaN
        result.append(np.where(np.isinf(error), np.nan, v))
    return result


def accepts(dtype: DType, actual: Array, value: Array, error: Array) -> Array:
    """Returns a mask of the elements of an output that a correct kernel may give for this reference value and bound.

    Rounding is monotonic, so a correct result lies between the roundings of value - error and value + error.
    """
    seen = to_reference(actual, dtype)
    if not dtype.is_float:
        exact = seen == value
        if dtype.is_bool:
            return np.asarray(exact | (error > 0))
        with np.errstate(all="ignore"):  # as float64, large integers that differ may be equal
            near = np.abs(seen.astype(np.float64) - value.astype(np.float64)) <= error
        return np.asarray(exact | (near & (error > 0)))
    with np.errstate(all="ignore"):
        slack = _slack(value, error)
        low, high = round_to(value - slack, dtype), round_to(value + slack, dtype)
        inside = (low <= seen) & (seen <= high)
    return np.asarray(inside | (np.isnan(seen) & np.isnan(value)) | np.isinf(error))

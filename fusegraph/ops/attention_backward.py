"""``sdpa_backward``, the gradients of `ops.attention`'s sdpa, and what `passes.attention_backward` makes of them.

With p the probabilities, that is the exponentials of the scores less ``stats``, the gradient by a score is p * (dO v^T
- row_dot), row_dot being the sum of o * dO of its query (Dao et al., "FlashAttention", 2022, appendix B).  A composite.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from fusegraph.dtypes import bool_, float32, float64, int32
from fusegraph.errors import DTypeError, ShapeError
from fusegraph.ops import attention as forward
from fusegraph.ops import attention_packed as packed
from fusegraph.ops import attention_paged as paged
from fusegraph.ops.attention_band import multiplications
from fusegraph.ops.base import Array, Attributes, Kind, Op, TensorType, Types, register
from fusegraph.ops.composite import Writing
from fusegraph.ops.random import drop, kept, kept_scale

OPTIONAL = ("bias", "mask", *forward.LENGTHS, *forward.NUMBERS, *packed.OFFSETS, "sink_token")
OPERANDS = ("q", "k", "v", "o", "dO", "stats", *OPTIONAL)
#: Operands that there always are.
FIRST = len(OPERANDS) - len(OPTIONAL)
DESCALES = ("descale_q", "descale_k", "descale_v")
#: Operands of attention that are for inference only -> why its gradient lacks them.
ABSENT = {
    **dict.fromkeys(paged.TABLES, "attention to pages is for inference, it has no gradient"),
    **dict.fromkeys(DESCALES, "attention of 8-bit floats is for inference, it has no gradient"),
}


def _forward(types: Types, values: Attributes) -> tuple[Types, dict[str, Any]]:
    """Returns the operands' types and the attributes of the sdpa whose gradients are asked for."""
    given = dict(zip(OPTIONAL, types[FIRST:]))
    # the types of what stands for an operand that is left out
    kinds = {**dict.fromkeys(forward.INTEGERS, int32), "mask": bool_}
    rest = [given.get(key, TensorType((), kinds.get(key, float32))) for key in forward.OPERANDS[3:]]
    return (*types[:3], *rest), {**values, "generate_stats": True}


def _normalize(types: Types, values: Attributes) -> dict[str, Any]:
    for key, t in zip(OPERANDS[3:6], types[3:6]):
        if not t.dtype.is_float:
            raise DTypeError(f"{key} is of floats, got {t.dtype}")
    for key, t in zip(OPERANDS[:5], types[:5]):
        if t.dtype.itemsize == 1:
            raise DTypeError(f"{key} is {t.dtype}: {ABSENT[DESCALES[0]]}")
    result = forward.normalize(*_forward(types, values))
    del result["generate_stats"]
    return {**result, "dropout_probability": forward.checked_dropout(types, values, OPERANDS)}


def _infer(types: Types, values: Attributes) -> Types:
    made = forward.infer(*_forward(types, values))
    assert isinstance(made, tuple)
    out, stats = made
    for key, t, wanted in zip(OPERANDS[3:6], types[3:6], (out, out, stats)):
        if t.shape != wanted.shape:
            raise ShapeError(f"{key} {list(t.shape)} has not the shape {list(wanted.shape)}")
    return (*types[:3], *types[FIRST : FIRST + 1], *types[FIRST + OPTIONAL.index("sink_token") :])


def _summed(shape: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes of a shape along which a tensor of a smaller one, of equal rank, repeats its elements."""
    return tuple(d for d, (n, m) in enumerate(zip(shape, own)) if m == 1 and n != 1)


def _expand(
    write: Writing,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    loss: Any,
    stats: Any,
    *others: Any,
    dropout_probability: float,
    **attributes: Any,
) -> tuple[Any, ...]:
    given = forward.present(others, OPTIONAL)
    made = forward.scored(write, q, k, v, given, **attributes)
    wide = "float64" if q.dtype == float64 else "float32"
    grouped, rank = q.shape[1] != k.shape[1], len(made.q.shape)

    def widened(x: Any, part: str) -> Any:
        return x if str(x.dtype) == wide else write("identity", part, x, dtype=wide)

    def turned(x: Any, part: str) -> Any:
        return write("transpose", part, x, perm=(*range(rank - 2), rank - 1, rank - 2))

    def shared(part: str, weights: Any, x: Any, target: Any) -> Any:
        """Returns the sums over queries of weights times x, and over the heads that share keys."""
        if not grouped:
            return write("matmul", part, turned(weights, f"{part} weights"), x, dtype=target.dtype)
        each = write("matmul", f"{part} of heads", turned(weights, f"{part} weights"), x, dtype=wide)
        total = write("reduction", f"{part} of groups", each, mode="add", axes=2)
        if target.dtype != total.dtype:
            total = write("narrow", f"rounded {part}", total, dtype=target.dtype)
        return write("reshape", part, total, shape=target.shape)

    result, gradient = made.headed(o, "result"), made.headed(loss, "gradient of result")
    products = write("mul", "result by gradient", widened(result, "wide result"), widened(gradient, "wide gradient"))
    row_dot = write("reduction", "row_dot", products, mode="add", axes=-1)
    stats = widened(made.headed(stats, "log sums"), "wide log sums")
    lse = write("binary_select", "lse", inf, stats, write("cmp_eq", "none", stats, -inf))
    by_p = write("matmul", "by probabilities", gradient, turned(made.v, "values turned"), dtype=wide)

    def weights(made: forward.Scored) -> tuple[Any, Any, Any]:
        """Returns what the loss is multiplied with, and the gradients by scores and by products, rounded."""
        p = write("exp", "probabilities", write("sub", "shifted", made.scores, lse))
        dropped, by_dropped = p, by_p
        if dropout_probability:
            seed, offset = (others[OPTIONAL.index(key)] for key in forward.NUMBERS)
            keep = kept(write, p, seed, offset, dropout_probability)
            dropped, by_dropped = (
                drop(write, x, keep, dropout_probability, part) for x, part in ((p, "dropped"), (by_p, "by dropped"))
            )
        by_score = write("mul", "by scores", p, write("sub", "by probabilities less row_dot", by_dropped, row_dot))
        by_product = by_score
        if made.tanh is not None:
            slope = write("sub", "slope", 1.0, write("mul", "square", made.tanh, made.tanh))
            by_product = write("mul", "by capped", by_score, slope)
        by_product = write("mul", "by products", by_product, made.scale)
        if loss.dtype != dropped.dtype:
            dropped = write("narrow", "rounded", dropped, dtype=loss.dtype)
        if q.dtype != by_product.dtype:
            by_product = write("narrow", "rounded by products", by_product, dtype=q.dtype)
        return dropped, by_score, by_product

    dropped, by_score, by_product = weights(made)
    by_q = write("matmul", "by queries", by_product, made.k, dtype=q.dtype)
    if grouped:
        by_q = write("reshape", "by q", by_q, shape=q.shape)
    if packed.OFFSETS[0] in given:  # kernels over keys need an interval of queries for each key
        dropped, _, by_product = weights(forward.scored(write, q, k, v, given, of_keys=True, **attributes))
    results: tuple[Any, ...] = (
        by_q,
        shared("by keys", by_product, made.q, k),
        shared("by values", dropped, gradient, v),
    )

    def added(part: str, x: Any, target: Any, key: str) -> Any:
        """Returns the sums of x over the axes along which an operand is repeated, in that operand's shape."""
        if target.size == 0 or key not in given:  # an operand that changes nothing
            total = write("reduction", f"sum {part}", x, mode="add", axes=tuple(range(rank)), keepdims=False)
            return write("reshape", part, total, shape=target.shape)
        own = made.headed(target, f"shape of {key}").shape
        own = (1,) * (rank - len(own)) + tuple(own)
        axes = _summed(x.shape, own)
        total = write("reduction", f"sums {part}", x, mode="add", axes=axes) if axes else x
        return write("reshape", part, total, shape=target.shape) if own != target.shape else total

    if others:
        results = (*results, added("by bias", by_score, others[0], "bias"))
    if len(others) == len(OPTIONAL):
        sink = widened(made.headed(others[-1], "sink"), "wide sink")
        weight = write("exp", "probability of sink", write("sub", "sink shifted", sink, lse))
        by_sink = write("neg", "by each sink", write("mul", "sink by row_dot", weight, row_dot))
        results = (*results, added("by sink", by_sink, others[-1], "sink_token"))
    return results


def _reference(*arrays: Array, **attributes: Any) -> tuple[Array, ...]:
    """Computes the gradients in float64, with all scores in memory."""
    q, k, v, o, loss, stats, *others = (np.asarray(x) for x in arrays)
    given = dict(zip(OPTIONAL, others))
    batch, heads, _, depth = q.shape
    group = heads // k.shape[1]
    scale = attributes["attn_scale"]
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    with np.errstate(all="ignore"):
        scores, slope, _ = forward.scores_reference(q, wide_k, given, attributes)
        p = np.exp(scores - np.where(stats == -inf, inf, stats))
        row_dot = (o * loss).sum(axis=-1, keepdims=True)
        kept: Array | float = 1.0
        if probability := attributes["dropout_probability"]:
            kept = kept_scale(probability) * forward.kept_reference(p, group, given, probability)
        by_score = p * (kept * np.matmul(loss, wide_v.swapaxes(-1, -2)) - row_dot)
        by_product = by_score * slope * (1 / np.sqrt(depth) if scale is None else scale)
        by_q = np.matmul(by_product, wide_k)
        by_k, by_v = (
            np.matmul(weights.swapaxes(-1, -2), x).reshape(batch, k.shape[1], group, *like.shape[2:]).sum(axis=2)
            for weights, x, like in ((by_product, q, k), (kept * p, loss, v))
        )
        by_sink = -np.exp(given.get("sink_token", -inf) - np.where(stats == -inf, inf, stats)) * row_dot

    def added(x: Array, target: Array) -> Array:
        own = (1,) * (4 - target.ndim) + target.shape
        return np.asarray(x.sum(axis=_summed(x.shape, own), keepdims=True)).reshape(target.shape)

    more = [added(by_score, others[0])] if others else []
    more += [added(by_sink, others[-1])] if "sink_token" in given else []
    return by_q, by_k, by_v, *more


register(
    Op(
        name="sdpa_backward",
        kind=Kind.COMPOSITE,
        operands=OPERANDS,
        infer=_infer,
        reference=_reference,
        attributes={**forward.SCORES, "dropout_probability": 0.0},
        words=forward.WORDS,
        normalize=_normalize,
        multiplications=lambda types, at: multiplications(types, 3, 2, at),
        expand=_expand,
        results=("", "dK", "dV", "dBias", "dSink_token"),
        optional=len(OPTIONAL),
        neutral={key: forward.NEUTRAL[key] for key in OPTIONAL},
        absent=ABSENT,
        as_stored=True,
        weighs=True,
        masks=("mask",),
        integers=("stats", "bias", "sink_token", *forward.LENGTHS, *forward.NUMBERS, *packed.OFFSETS),
        keeps_layout=True,
        cudnn="sdpa_backward",
        doc="""The gradients of sdpa by q, k and v, by a bias if any operand follows stats, and by a sink_token.

        o (B, H, Sq, Dv) and stats (B, H, Sq, 1) are what sdpa gave with generate_stats, dO is the gradient by o; q, k,
        v, the other operands and the attributes are those of sdpa.  The results have the shapes and dtypes of q, k, v
        and bias.  A query that meets no key has the gradient 0.  The stats contain what the other gradients need of a
        sink_token: it may be left out, and then there is no gradient by it.

        A packed batch is given as in sdpa; tokens of no sequence have the gradient 0.  Like all that is masked, they
        are multiplied with 0 unless their whole tile is masked: they have to be finite.

        Deterministic: the sums over queries, and over the heads of q that share those of k and v, have a fixed order.
        The gradients by scores are rounded to q's dtype, the probabilities to dO's, before they are multiplied.""",
    )
)

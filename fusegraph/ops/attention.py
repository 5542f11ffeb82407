"""``sdpa``, scaled dot-product attention, and what `passes.attention` makes of it.

The op is a composite: products, a softmax and products again, with pointwise nodes on the scores in between, which
`passes.attention` recognises whatever they are.  `scored` and `_expand` write what an operand or attribute adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np

from fusegraph.dtypes import float32, float64
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops import attention_packed as packed
from fusegraph.ops import attention_paged as paged
from fusegraph.ops import attention_softmax as softmaxes
from fusegraph.ops.attention_band import alibi_slopes, multiplications
from fusegraph.ops.base import Array, Attributes, Kind, Op, TensorType, Types, register
from fusegraph.ops.composite import Writing
from fusegraph.ops.pointwise import number
from fusegraph.ops.random import drop, kept, kept_scale, threshold, uniform
from fusegraph.ops.reverse import Reverse

WORDS = {"diagonal_alignment": ("TOP_LEFT", "BOTTOM_RIGHT")}
LENGTHS = ("seq_len_q", "seq_len_kv")
NUMBERS = ("seed", "offset")
OPERANDS = ("q", "k", "v", "bias", "mask", *LENGTHS, "sink_token", *NUMBERS, *packed.OFFSETS, *paged.TABLES)
INTEGERS = (*LENGTHS, *NUMBERS, *packed.OFFSETS, *paged.TABLES)
#: Bounds of a band are at most this, which excludes nothing: positions and bounds add up to less than 2^31.
FURTHEST = 1 << 30
#: What adds nothing, in place of an operand that is left out in front of one that is not.
NEUTRAL = {
    "bias": 0.0,
    "mask": True,
    "seq_len_q": 2**31 - 1,
    "seq_len_kv": 2**31 - 1,
    "sink_token": -inf,
    "seed": 0,
    "offset": 0,
    **dict.fromkeys((*packed.OFFSETS, *paged.TABLES), -1),
}
#: Attributes of every attention: what becomes of products of queries and keys.
SCORES: dict[str, Any] = {
    "attn_scale": None,
    "diagonal_alignment": "TOP_LEFT",
    "diagonal_band_left_bound": None,
    "diagonal_band_right_bound": None,
    "use_causal_mask": False,
    "use_alibi_mask": False,
    "soft_cap": None,
}


def normalize(types: Types, values: Attributes) -> dict[str, Any]:
    q = types[0]
    result = dict(values)
    for key, t in zip(OPERANDS, types):
        if key in INTEGERS and not t.dtype.is_int:
            raise DTypeError(f"{key} is an integer, got {t.dtype}")
        if key not in (*INTEGERS, "mask") and not t.dtype.is_float:
            raise DTypeError(f"{key} is of floats, got {t.dtype}")
    for key in ("attn_scale", "soft_cap"):
        if values[key] is not None:
            result[key] = float(number(key, values[key], float64, q.shape))
    if result["soft_cap"] is not None and not 0 < result["soft_cap"] < inf:
        raise AttributeValueError(f"soft_cap is a positive number, got {values['soft_cap']!r}")
    # A band reaches as many keys to the left as its bound, the one on the diagonal among them.
    for key, least in (("diagonal_band_left_bound", 1), ("diagonal_band_right_bound", 0)):
        bound = values[key]
        if bound is not None and bound < least:
            raise AttributeValueError(f"{key} is an integer of at least {least}, or None, got {bound!r}")
        result[key] = None if bound is None else min(bound, FURTHEST)
    if result.pop("use_causal_mask"):
        if result["diagonal_band_right_bound"] not in (None, 0):
            raise AttributeValueError("use_causal_mask is diagonal_band_right_bound = 0; another one was given as well")
        result["diagonal_band_right_bound"] = 0
    result["use_causal_mask"] = False
    return result


def _normalize(types: Types, values: Attributes) -> dict[str, Any]:
    result = normalize(types, values)
    probability = checked_dropout(types, values, OPERANDS)
    longest = values["paged_attention_max_seq_len_kv"]
    if longest is not None and longest < 1:
        raise AttributeValueError(f"paged_attention_max_seq_len_kv is a positive integer, got {longest!r}")
    return {**result, "dropout_probability": probability}


def checked_dropout(types: Types, values: Attributes, operands: Sequence[str]) -> float:
    """Returns the probability of dropout.  Raises AttributeValueError if it is none, or lacks seed and offset."""
    probability = float(number("dropout_probability", values["dropout_probability"], float64, types[0].shape))
    if not 0 <= probability <= 1:
        raise AttributeValueError(f"dropout_probability is between 0 and 1, got {probability!r}")
    if probability and len(types) <= operands.index("offset"):
        raise AttributeValueError("dropout needs a seed and an offset")
    return probability


def infer(types: Types, values: Attributes) -> TensorType | Types:
    given = dict(zip(OPERANDS[3:], types[3:]))
    q = types[0].shape
    k, v = paged.sizes(types, given, values.get("paged_attention_max_seq_len_kv"))
    if not len(q) == len(k) == len(v) == 4:
        raise ShapeError("q, k and v have 4 dimensions: batch, heads, length, elements")
    if not q[0] == k[0] == v[0]:
        raise ShapeError(f"the batches differ: {q[0]}, {k[0]} and {v[0]}")
    if k[1] != v[1] or k[1] == 0 or q[1] % k[1]:
        raise ShapeError(f"{q[1]} heads of q are not shared evenly by {k[1]} heads of k and {v[1]} of v")
    if q[3] != k[3]:
        raise ShapeError(f"queries have {q[3]} elements, keys {k[3]}")
    if k[2] != v[2]:
        raise ShapeError(f"there are {k[2]} keys and {v[2]} values")
    if k[2] == 0:
        raise ShapeError("attention to no keys")
    if k[3] == 0:
        raise ShapeError("queries and keys have no elements")
    scores = (*q[:3], k[2])
    packed.check(given, types[0], LENGTHS)
    for key, t in given.items():
        if key in (*packed.OFFSETS, *paged.TABLES):
            continue
        target = (*q[:2], 1, 1) if key == "sink_token" else (q[0], 1, 1, 1) if key in LENGTHS else scores
        if key in NUMBERS:
            target = (1, 1, 1, 1)
        shape = (*t.shape, 1, 1, 1) if key in LENGTHS and len(t.shape) == 1 else t.shape
        shape = (1,) * (4 - len(shape)) + shape
        if len(shape) > 4 or any(n not in (1, m) for n, m in zip(shape, target)):
            raise ShapeError(f"{key} {list(t.shape)} does not broadcast to {list(target)}")
    result = TensorType((*q[:3], v[3]), types[0].dtype)
    wide = float64 if types[0].dtype == float64 else float32
    return (result, TensorType((*q[:3], 1), wide)) if values["generate_stats"] else result


@dataclass(frozen=True)
class Scored:
    """The scores of queries and keys, and what gradients need besides.

    q, k, v   with the heads in two dimensions if several share their keys.
    scores    of every query and key, minus infinity where they do not meet.
    scale     what the products were multiplied with.
    tanh      of a soft cap, the value before it is multiplied by the cap.
    headed    brings a tensor of rank 4 at most into the same form as q.
    exists    writes whether each query exists, one element a query; gives None if all do.
    """

    q: Any
    k: Any
    v: Any
    scores: Any
    scale: Any
    tanh: Any
    headed: Callable[[Any, str], Any]
    exists: Callable[[], Any]


def scored(
    write: Writing,
    q: Any,
    k: Any,
    v: Any,
    given: Mapping[str, Any],
    *,
    attn_scale: Any,
    soft_cap: float | None,
    factor: Any = None,
    modify: Callable[[Any], Any] | None = None,
    of_keys: bool = False,
    diagonal_alignment: str,
    diagonal_band_left_bound: int | None,
    diagonal_band_right_bound: int | None,
    use_causal_mask: bool,
    use_alibi_mask: bool,
) -> Scored:
    """Writes the scores; ``given`` are the optional operands, by name.

    factor multiplies the products, modify replaces the scaled scores.  of_keys: the masks of a packed batch are made of
    an interval of queries for each key, instead of an interval of keys for each query.
    """
    batch, heads, rows, depth = q.shape
    shared, keys = k.shape[1:3]
    wide = "float64" if q.dtype == float64 else "float32"

    def headed(tensor: Any, part: str) -> Any:
        """Returns a tensor of rank 4 at most with the heads in two dimensions, if several share their keys."""
        shape = (1,) * (4 - len(tensor.shape)) + tuple(tensor.shape)
        if shared != heads:
            split = (shared, heads // shared) if shape[1] == heads else (shape[1], 1)
            shape = (shape[0], *split, *shape[2:])
        if isinstance(tensor, np.ndarray):
            return tensor.reshape(shape)
        return tensor if shape == tensor.shape else write("reshape", part, tensor, shape=shape)

    if shared != heads:
        q = write("reshape", "queries", q, shape=(batch, shared, heads // shared, rows, depth))
        k, v = (write("reshape", n, x, shape=(batch, shared, 1, *x.shape[2:])) for n, x in (("keys", k), ("values", v)))
    rank = len(q.shape)
    turned = write("transpose", "keys turned", k, perm=(*range(rank - 2), rank - 1, rank - 2))
    scores = write("matmul", "products", q, turned, dtype=wide)
    if factor is not None:
        scores = write("mul", "descaled", scores, factor)
    scale = 1 / sqrt(depth) if attn_scale is None else attn_scale
    scores = write("mul", "scaled", scores, scale)
    if modify is not None:
        scores = modify(scores)
    inner = None
    if soft_cap is not None:
        inner = write("tanh", "tanh", write("mul", "share", scores, 1 / soft_cap))
        scores = write("mul", "capped", inner, soft_cap)
    if "bias" in given:
        scores = write("add", "biased", scores, headed(given["bias"], "bias"))
    # Positions; those of rows are moved so that row and key are equal on the diagonal.
    i, j = (write("gen_index", n, scores, axis=a) for n, a in (("row", rank - 2), ("key", rank - 1)))
    ones = (1,) * (rank - 1)
    lengths = {k: write("reshape", k, given[k], shape=(given[k].size, *ones)) for k in LENGTHS if k in given}
    diagonal, bottom = i, diagonal_alignment == "BOTTOM_RIGHT"
    sequences = packed.written(write, given, keys if of_keys else rows, rank, of_keys=of_keys)
    if sequences is not None:
        diagonal = write("add", "diagonal", i, sequences.ahead(bottom))
    elif bottom:
        last_key, last_row = lengths.get("seq_len_kv", keys), lengths.get("seq_len_q", rows)
        if not lengths:
            diagonal = write("add", "diagonal", i, keys - rows) if keys != rows else i
        else:
            diagonal = write("sub", "diagonal", write("add", "moved", i, last_key), last_row)
    if use_alibi_mask:
        slopes = headed(alibi_slopes(heads).reshape(1, heads, 1, 1), "slopes")
        first = i
        if sequences is not None:
            first = write("add", "query", i, sequences.ahead(False)) if bottom else diagonal
        distance = write("identity", "distance", write("sub", "ahead", j, first), dtype=wide)
        scores = write("add", "with alibi", scores, write("mul", "alibi", distance, slopes.astype(wide)))
    conditions = []
    if "mask" in given:
        conditions.append(headed(given["mask"], "mask"))
    if diagonal_band_right_bound is not None:
        right = write("add", "right", diagonal, diagonal_band_right_bound) if diagonal_band_right_bound else diagonal
        conditions.append(write("cmp_le", "right of band", j, right))
    if diagonal_band_left_bound is not None:
        left = write("sub", "left", diagonal, diagonal_band_left_bound)
        conditions.append(write("cmp_gt", "left of band", j, left))
    if sequences is not None:
        other = i if of_keys else j
        conditions.append(write("cmp_ge", "begun", other, sequences.first))
        conditions.append(write("cmp_lt", "not ended", other, sequences.last))
    if "seq_len_kv" in lengths:
        conditions.append(write("cmp_lt", "key exists", j, lengths["seq_len_kv"]))
    if "seq_len_q" in lengths:
        conditions.append(write("cmp_lt", "row exists", i, lengths["seq_len_q"]))
    if conditions:
        admitted = conditions[0]
        for condition in conditions[1:]:
            admitted = write("logical_and", "admitted", admitted, condition)
        scores = write("binary_select", "masked", scores, -inf, admitted)

    def exists() -> Any:
        if sequences is not None:
            return sequences.exists()
        if "seq_len_q" not in lengths:
            return None
        each = write("broadcast", "each row", lengths["seq_len_q"], shape=(batch, *(1,) * (rank - 3), rows, 1))
        return write("cmp_lt", "query exists", write("gen_index", "number of row", each, axis=rank - 2), each)

    return Scored(q, k, v, scores, scale, inner, headed, exists)


def present(operands: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the optional operands that add something, by name."""
    return {
        key: t
        for key, t in zip(names, operands)
        if t.value is None or t.size != 1 or float(t.value.reshape(-1)[0]) != NEUTRAL[key]
    }


@dataclass(frozen=True)
class Attended:
    """Attention as it was written: the result, its scores and softmax, and whether there is a sink."""

    out: Any
    scored: Scored
    softmax: softmaxes.Softmax
    sunk: bool

    def each(self, write: Writing, part: str, numbers: Any, absent: float) -> Any:
        """Returns numbers of each query as (B, H, Sq, 1).

        With a sink, queries that do not exist get ``absent``, as the sink would give them other numbers.
        """
        exists = self.scored.exists() if self.sunk else None
        if exists is not None:
            numbers = write("binary_select", f"{part} of queries", numbers, absent, exists)
        shape = (*self.out.shape[:3], 1)
        return numbers if numbers.shape == shape else write("reshape", part, numbers, shape=shape)

    def stats(self, write: Writing) -> Any:
        """Returns the logarithms of the sums of exponentials."""
        return self.each(write, "stats", softmaxes.log_sums(write, self.softmax), -inf)


def attended(
    write: Writing,
    q: Any,
    k: Any,
    v: Any,
    given: Mapping[str, Any],
    *,
    dtype: Any,
    weigh: Callable[[Any], Any] | None = None,
    **scoring: Any,
) -> Attended:
    """Writes attention, with a result of ``dtype``.

    weigh turns the probabilities into what the values are multiplied with; ``scoring`` are the keywords of `scored`.
    """
    made, sink = scored(write, q, k, v, given, **scoring), None
    if "sink_token" in given:
        sink = write("identity", "sink", made.headed(given["sink_token"], "sink token"), dtype=made.scores.dtype)
    found = softmaxes.softmax(write, made.scores, sink)
    p = found.probabilities if weigh is None else weigh(found.probabilities)
    if v.dtype != p.dtype:
        p = write("narrow", "rounded", p, dtype=v.dtype)
    out = write("matmul", "attended", p, made.v, dtype=dtype)
    shape = (*q.shape[:3], v.shape[-1])
    return Attended(
        out if out.shape == shape else write("reshape", "result", out, shape=shape), made, found, sink is not None
    )


def _expand(
    write: Writing,
    q: Any,
    k: Any,
    v: Any,
    *others: Any,
    dropout_probability: float,
    generate_stats: bool,
    paged_attention_max_seq_len_kv: int | None,
    **attributes: Any,
) -> Any:
    given = present(others, OPERANDS[3:])
    k, v = paged.written(write, given, k, v, paged_attention_max_seq_len_kv)

    def dropped(p: Any) -> Any:
        seed, offset = (others[OPERANDS.index(key) - 3] for key in NUMBERS)
        return drop(write, p, kept(write, p, seed, offset, dropout_probability), dropout_probability)

    weigh = dropped if dropout_probability else None
    found = attended(write, q, k, v, given, dtype=q.dtype, weigh=weigh, **attributes)
    return (found.out, found.stats(write)) if generate_stats else found.out


def scores_reference(
    q: Array, k: Array, given: Mapping[str, Array], attributes: Attributes
) -> tuple[Array, Array | float, Array]:
    """Returns the scores, their derivative by the scaled products, and whether each query exists; k has q's heads."""
    heads, rows, depth = q.shape[1:]
    keys, scale, cap = k.shape[2], attributes["attn_scale"], attributes["soft_cap"]
    scores = np.matmul(q, k.swapaxes(-1, -2)) * (1 / sqrt(depth) if scale is None else scale)
    slope: Array | float = 1.0
    if cap is not None:
        share = np.tanh(scores / cap)
        scores, slope = cap * share, 1 - share * share
    if "bias" in given:
        scores = scores + given["bias"]
    i, j = np.arange(rows)[:, None], np.arange(keys)
    ends = [given.get(n, np.array(m)).astype(np.int64) for n, m in (("seq_len_q", rows), ("seq_len_kv", keys))]
    neutral = NEUTRAL["seq_len_q"]
    ends = [np.where(x == neutral, m, x) if x.size == 1 else x for x, m in zip(ends, (rows, keys))]
    last_row, last_key = (x.reshape(-1, 1, 1, 1) for x in ends)
    bottom = attributes["diagonal_alignment"] == "BOTTOM_RIGHT"
    diagonal = i + (last_key - last_row if bottom else 0)
    sequences = packed.reference(given, rows)
    own, exists = i, np.broadcast_to(i < last_row, (*last_row.shape[:2], rows, 1))
    if sequences is not None:
        first, last, ahead, behind, exists = sequences
        diagonal, own = i + (behind if bottom else ahead), i + ahead
    if attributes["use_alibi_mask"]:
        scores = scores + alibi_slopes(heads).astype(np.float64)[:, None, None] * (j - own)
    admitted = np.broadcast_to((i < last_row) & (j < last_key), scores.shape)
    if "mask" in given:
        admitted = admitted & (given["mask"] != 0)
    left, right = attributes["diagonal_band_left_bound"], attributes["diagonal_band_right_bound"]
    if right is not None:
        admitted = admitted & (j <= diagonal + right)
    if left is not None:
        admitted = admitted & (j > diagonal - left)
    if sequences is not None:
        admitted = admitted & (j >= first) & (j < last)
    return np.where(admitted, scores, -inf), slope, exists


def kept_reference(p: Array, group: int, given: Mapping[str, Array], probability: float) -> Array:
    """Returns which of the probabilities dropout keeps; heads are numbered as groups of ``group`` that share keys."""
    shape = p.shape if group == 1 else (p.shape[0], -1, group, *p.shape[2:])
    seed, offset = (given[key].reshape(-1)[0] for key in NUMBERS)
    return uniform(np.empty(p.size).reshape(shape), seed, offset).reshape(p.shape) >= threshold(probability)


def _reference(*arrays: Array, **attributes: Any) -> Any:
    """Computes attention in float64, with all scores in memory."""
    q, k, v, *others = (np.asarray(x) for x in arrays)
    given = dict(zip(OPERANDS[3:], others))
    k, v = paged.reference(given, k, v, attributes["paged_attention_max_seq_len_kv"])
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    with np.errstate(all="ignore"):
        scores, _, exists = scores_reference(q, k, given, attributes)
        p, stats = softmaxes.reference(scores, given.get("sink_token"), exists)
        if probability := attributes["dropout_probability"]:
            p = np.where(kept_reference(p, group, given, probability), p * kept_scale(probability), 0.0)
        out = np.matmul(p, v)
        return (out, stats) if attributes["generate_stats"] else out


def _gradient(
    at: Reverse, *operands: Any, generate_stats: bool, paged_attention_max_seq_len_kv: Any, **how: Any
) -> Any:
    """The gradients by sdpa_backward, which needs the statistics; those of pages go through what sdpa is written as."""
    given = present(operands[3:], OPERANDS[3:])
    if any(key in given for key in paged.TABLES):
        return NotImplemented
    out = at.results if generate_stats else at.graph.sdpa(*operands, generate_stats=True, **how)
    found = at.graph.sdpa_backward(*operands[:3], out[0], at.loss, out[1], **given, **how)
    others = {"bias": 3, "sink_token": 4}
    return *found[:3], *(found[others[key]] if key in given and key in others else None for key in OPERANDS[3:])


register(
    Op(
        name="sdpa",
        kind=Kind.COMPOSITE,
        operands=OPERANDS,
        infer=infer,
        reference=_reference,
        attributes={
            **SCORES,
            "dropout_probability": 0.0,
            "paged_attention_max_seq_len_kv": None,
            "generate_stats": False,
        },
        words=WORDS,
        normalize=_normalize,
        multiplications=lambda types, at: multiplications(types, 1, 1, at),
        expand=_expand,
        gradient=_gradient,
        results=("", "stats"),
        optional=len(OPERANDS) - 3,
        neutral=NEUTRAL,
        as_stored=True,
        weighs=True,
        masks=("mask",),
        integers=("bias", "sink_token", *INTEGERS),
        keeps_layout=True,
        cudnn="sdpa",
        doc="""Scaled dot-product attention: softmax(q k^T * attn_scale, over keys) v for every batch and head.

        q is (B, H, Sq, D), k (B, Hk, Skv, D), v (B, Hk, Skv, Dv), in any layout; the result (B, H, Sq, Dv).  Hk divides
        H: neighbouring heads of q share those of k and v (grouped and multi-query attention).

        attn_scale (default 1 / sqrt(D)) multiplies the products of queries and keys; then come, in this order, if they
        are given: soft_cap * tanh(score / soft_cap), bias (added), alibi (the slope of the head times key - query, both
        counted from the first of their sequence), and the masks.  A query meets a key where mask is true, and in the
        band key <= query + right bound and key > query - left bound (use_causal_mask: right bound 0); with
        diagonal_alignment "BOTTOM_RIGHT" the band's positions count from the ends.  bias and mask broadcast to (B, H,
        Sq, Skv); seq_len_q and seq_len_kv, (B,) or (B, 1, 1, 1), say how many queries and keys a batch has; sink_token
        (1, H, 1, 1) is the score of one more key, whose value is 0.
        Paged caches: with page_table_k and page_table_v, (B, pages) or (B, 1, pages, 1), k and v are containers,
        (blocks, Hk, keys of a block, elements), and the keys of a batch those of the blocks whose numbers are in its
        row, one after the other (up to paged_attention_max_seq_len_kv); seq_len_kv says how many there are by now.

        A packed batch: q, k and v have B = 1 and as lengths the tokens of all sequences, of which those from
        ragged_offset_q[n] to ragged_offset_q[n + 1] - 1 (tokens, (sequences + 1,)) are the queries of sequence n, and
        likewise ragged_offset_kv for keys and values.  Queries meet the keys of their own sequence, positions count
        from its beginning; those of no sequence meet none.

        dropout_probability: a probability becomes 0 where the element of rng_uniform with this seed and offset, of the
        scores' shape, is less, and is divided by 1 - dropout_probability elsewhere (the softmax sums up all of them).
        generate_stats: also the logarithm of the sum of exponentials, (B, H, Sq, 1).
        A query that meets no key has the result 0, whatever the values are.  Its stats are -inf or, if the query
        exists, the sink_token; queries from seq_len_q on, and tokens of no sequence, do not exist.  Where a key is
        masked, the key and what is added to its score may be NaN or infinite.  Its value has to be finite: it is
        multiplied with 0, unless its whole tile is masked.  The probabilities are rounded to v's dtype before they are
        multiplied.""",
    )
)

"""Gradients of attention as several nodes, where no op of the table suffices."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from fusegraph.dtypes import float32
from fusegraph.frontends.cudnn.attention_asked import Asked, repeated, summed
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor
from fusegraph.ops import attention as ops


@dataclass(frozen=True)
class Gradients:
    """What the gradients are computed from, in float32 of shape (B, H, Sq, Skv).

    weights      the probabilities after dropout: times the loss, they give the gradient by values.
    by_scores    the gradient by scores.
    by_products  the gradient by the products of queries and keys.
    by_sink      the gradient by the sink of each query, (B, H, Sq, 1); None without one.
    """

    weights: Tensor
    by_scores: Tensor
    by_products: Tensor
    by_sink: Tensor | None


def gradients(
    reading: Reading,
    asked: Asked,
    node: Any,
    *,
    factor: Tensor | None = None,
    of_loss: Tensor | None = None,
    of_result: Tensor | None = None,
) -> Gradients:
    """Writes the nodes of the gradients as cuDNN computes them.

    Without a score_mod_bprop, a score_mod counts as having a derivative of 1.  ``factor`` scales the products of
    queries and keys, ``of_loss`` those of the loss and values, ``of_result`` those of the loss and o.
    """
    write = reading.write
    q, o, loss, stats = (asked.operands[key] for key in ("q", "o", "dO", "stats"))
    k, v = (repeated(reading, asked.operands[key], q.shape[1]) for key in "kv")
    given = {key: t for key, t in asked.given.items() if key != "sink_token"}
    made = ops.scored(write, q, k, v, given, modify=asked.modify, factor=factor, **asked.factors(reading))
    lse = write("binary_select", "", inf, stats, write("cmp_eq", "", stats, -inf))
    p = write("exp", "", write("sub", "", made.scores, lse))
    products = write("mul", "", reading.cast(o, float32), reading.cast(loss, float32))
    row_dot = write("reduction", "", products, mode="add", axes=-1)
    by_p = write("matmul", "", loss, _turned(reading, v), dtype=float32)
    row_dot = row_dot if of_result is None else write("mul", "", row_dot, of_result)
    by_p = by_p if of_loss is None else write("mul", "", by_p, of_loss)
    by_sink = None
    if "sink_token" in asked.operands:
        weight = write("exp", "", write("sub", "", reading.cast(asked.operands["sink_token"], float32), lse))
        by_sink = write("neg", "", write("mul", "", weight, row_dot))
    if len(asked.dropout) == 3 and asked.probability is None:  # a mask, a scale, and what is said to be its inverse
        mask, by, inverse = (reading.cast(t, float32) for t in asked.dropout)
        less = write("sub", "", write("mul", "", by_p, mask), write("mul", "", row_dot, inverse))
        by_scores = write("mul", "", write("mul", "", p, less), by)
    else:
        by_scores = write("mul", "", p, write("sub", "", asked.dropped(reading, by_p), row_dot))
    back = node.params.get("score_mod_bprop")
    by_products = by_scores if back is None else reading.modified(back, by_scores)
    by_products = write("mul", "", by_products, made.scale)
    return Gradients(asked.dropped(reading, p), by_scores, by_products, by_sink)


def by_queries(reading: Reading, asked: Asked, by_products: Tensor) -> Tensor:
    """Returns the gradient by queries, in float32."""
    k = repeated(reading, asked.operands["k"], asked.operands["q"].shape[1])
    return reading.write("matmul", "", by_products, k, dtype=float32)


def by_heads(reading: Reading, weights: Tensor, x: Tensor, heads: int) -> Tensor:
    """Returns float32 sums over queries of weights times x, and over query heads that share one of ``heads``."""
    return summed(reading, reading.write("matmul", "", _turned(reading, weights), x, dtype=float32), heads)


def summed_to(reading: Reading, x: Tensor, like: Tensor) -> Tensor:
    """Sums a gradient over the dimensions along which the tensor ``like`` was broadcast."""
    own = (1,) * (x.rank - like.rank) + tuple(like.shape)
    axes = tuple(d for d, (n, m) in enumerate(zip(x.shape, own)) if m == 1 and n != 1)
    total = reading.write("reduction", "", x, mode="add", axes=axes) if axes else x
    return reading.write("reshape", "", total, shape=like.shape) if own != like.shape else total


def _turned(reading: Reading, x: Tensor) -> Tensor:
    return reading.write("transpose", "", x, perm=(0, 1, 3, 2))

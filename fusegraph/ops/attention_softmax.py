"""The softmax of attention: scores -> probabilities, and the statistics of each query."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from fusegraph.ops.base import Array
from fusegraph.ops.composite import Writing


@dataclass(frozen=True)
class Softmax:
    """A softmax of scores: the probability of each key, and three numbers a query.

    largest  the largest score.
    total    the sum of exp(score - shift).
    shift    the largest score, or 0 where that is -inf.
    """

    probabilities: Any
    largest: Any
    total: Any
    shift: Any


def softmax(write: Writing, scores: Any, sink: Any = None) -> Softmax:
    """Writes the probabilities of scores, which are -inf where a key is masked; sink is the score of one more key."""
    most = write("reduction", "largest", scores, mode="max", axes=-1)
    if sink is not None:
        most = write("max", "largest with sink", most, sink)
    shift = write("binary_select", "shift", 0.0, most, write("cmp_eq", "alone", most, -inf))
    e = write("exp", "exponentials", write("sub", "shifted", scores, shift))
    total = write("reduction", "sum", e, mode="add", axes=-1)
    if sink is not None:
        total = write("add", "sum with sink", total, write("exp", "of sink", write("sub", "sink shifted", sink, shift)))
    divisor = write("binary_select", "divisor", 1.0, total, write("cmp_eq", "none", total, 0.0))
    p = write("mul", "probabilities", e, write("reciprocal", "inverse", divisor))
    return Softmax(p, most, total, shift)


def log_sums(write: Writing, found: Softmax) -> Any:
    """Writes the logarithm of the sum of exponentials of each query."""
    return write("add", "log sum", write("log", "log", found.total), found.shift)


def reference(scores: Array, sink: Array | None, exists: Array | bool) -> tuple[Array, Array]:
    """Returns the probabilities and the logarithms of sums of exponentials, for NumPy arrays."""
    most = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        most = np.maximum(most, sink)
    shift = np.where(most == -inf, 0.0, most)
    e = np.exp(scores - shift)
    total = e.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - shift)
    return e / np.where(total == 0, 1.0, total), np.where(exists, np.log(total) + shift, -inf)

"""What positions decide in attention: how many products it is made of, by the band of keys, and the slopes of alibi."""

from __future__ import annotations

from math import log2

import numpy as np

from fusegraph.ops.base import Array, Attributes, Types


def multiplications(types: Types, by_qk: int, by_v: int, attributes: Attributes) -> int:
    """Returns the multiplications of ``by_qk`` products of queries and keys and ``by_v`` products with values."""
    q, k, v = (t.shape for t in types[:3])
    return q[0] * q[1] * positions_met(q[2], k[2], attributes) * (by_qk * q[3] + by_v * v[3])


def positions_met(rows: int, keys: int, attributes: Attributes) -> int:
    """Returns how many pairs of query and key the band of an sdpa with these attributes holds."""
    left, right = attributes["diagonal_band_left_bound"], attributes["diagonal_band_right_bound"]
    diagonal = np.arange(rows) + (keys - rows if attributes["diagonal_alignment"] == "BOTTOM_RIGHT" else 0)
    last = np.full(rows, keys) if right is None else np.clip(diagonal + right + 1, 0, keys)
    first = np.zeros(rows, np.int64) if left is None else np.clip(diagonal - left + 1, 0, keys)
    return int(np.maximum(last - first, 0).sum())


def alibi_slopes(heads: int) -> Array:
    """Returns the slopes of Press, Smith and Lewis ("Train Short, Test Long", 2022), one a head."""
    whole = 2 ** int(log2(heads))
    slopes = [2.0 ** (-8 * (h + 1) / whole) for h in range(whole)]
    return np.array([*slopes, *(2.0 ** (-4 * (2 * h + 1) / whole) for h in range(heads - whole))], np.float32)

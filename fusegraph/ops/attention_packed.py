"""Packed batches of attention: sequences of different lengths one after the other, in tensors of all their tokens.

``ragged_offset_q`` and ``ragged_offset_kv`` say where each begins, as in cuDNN's ragged tensors, in tokens.  A query
may then meet an interval of keys, which is found once for each query, and a key an interval of queries.  For kernels
either is a mask like others; tiles that it masks are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.ops.base import Array, TensorType
from fusegraph.ops.composite import Writing

#: Of queries, and of keys and values: one number more than sequences.
OFFSETS = ("ragged_offset_q", "ragged_offset_kv")


def check(given: Mapping[str, TensorType], q: TensorType, lengths: Sequence[str]) -> None:
    """Raises ShapeError or AttributeValueError unless the offsets among the optional operands go with the others."""
    found = {key: given[key] for key in OFFSETS if key in given and given[key].shape not in ((), (1,))}
    if not found:
        return
    if len(found) == 1:
        raise AttributeValueError(
            f"a packed batch has offsets of queries and of keys, here is {next(iter(found))} alone"
        )
    for key, t in found.items():
        if t.shape[0] < 2 or any(n != 1 for n in t.shape[1:]) or len(t.shape) > 4:
            raise ShapeError(f"{key} is a row of one offset more than sequences, got {list(t.shape)}")
    if found[OFFSETS[0]].shape[0] != found[OFFSETS[1]].shape[0]:
        numbers = " and ".join(str(t.shape[0]) for t in found.values())
        raise ShapeError(f"there are {numbers} offsets of queries and keys")
    if q.shape[0] != 1:
        raise ShapeError(f"a packed batch is one of all tokens, got {q.shape[0]} of them")
    for key in lengths:
        if key in given and given[key].shape not in ((), (1,)):
            raise AttributeValueError(f"{key} and {OFFSETS[0]} both say how long sequences are")


@dataclass(frozen=True)
class Packed:
    """What a packed batch says of each query and the keys that it may meet, or of each key and its queries.

    first   the first key that it may meet.
    last    the one after the last.
    ahead   writes how far ahead the diagonal is, which runs through the first query and key of each sequence or, at the
            ``bottom``, through the last ones.
    exists  writes whether it is of any sequence.
    """

    first: Any
    last: Any
    ahead: Callable[[bool], Any]
    exists: Callable[[], Any]


def written(
    write: Writing, given: Mapping[str, Any], tokens: int, rank: int, *, of_keys: bool = False
) -> Packed | None:
    """Writes `Packed` of each query, (1, ..., tokens, 1), or of each key, (1, ..., 1, tokens); None if not packed."""
    if any(key not in given or given[key].size == 1 for key in OFFSETS):
        return None
    count = given[OFFSETS[0]].shape[0] - 1
    ends: list[Any] = []
    for key in OFFSETS:
        x = write("reshape", key, given[key], shape=(1,) * (rank - 1) + (count + 1,))
        if x.dtype.name != "int32":
            x = write("identity", f"{key} in 32 bits", x, dtype="int32")
        low, high = (0,) * rank, x.shape
        ends.append(write("slice", f"begin {key}", x, starts=low, stops=(*high[:-1], count)))
        ends.append(write("slice", f"end {key}", x, starts=(*low[:-1], 1), stops=high))
    q_begin, q_end, k_begin, k_end = ends
    own_ends, other = (ends[2:], "query") if of_keys else (ends[:2], "key")
    every = write("broadcast", "every sequence", own_ends[0], shape=(*(1,) * (rank - 2), tokens, count))
    token = write("gen_index", "token", every, axis=rank - 2)
    begun, lasts = write("cmp_ge", "begun", token, own_ends[0]), write("cmp_lt", "lasts", token, own_ends[1])
    own = write("logical_and", "own sequence", begun, lasts)  # of at most one of them: empty ones have no token

    # Tokens of no sequence get an empty interval, at the end of the last sequence before them: a tile that they share
    # with its tokens does not meet more tiles for them.
    count_own = write("reduction", "sequences", write("binary_select", "counted", 1, 0, own), mode="add", axes=-1)
    ended = write("logical_and", "ended", write("cmp_eq", "of none", count_own, 0), write("logical_not", "over", lasts))

    def of_own(part: str, numbers: Any, rest: Any, mode: str) -> Any:
        chosen = write("binary_select", f"{part} of own", numbers, rest, own)
        found = write("reduction", part, chosen, mode=mode, axes=-1)
        return write("reshape", part, found, shape=(*(1,) * (rank - 1), tokens)) if of_keys else found

    def ahead(bottom: bool) -> Any:
        ends = (k_end, q_end) if bottom else (k_begin, q_begin)
        return of_own("ahead", write("sub", "diagonals", *ends), 0, "add")

    first, last = (q_begin, q_end) if of_keys else (k_begin, k_end)
    rest = write("binary_select", "end of others", last, 0, ended)
    first, last = (of_own(f"{part} {other}", x, rest, "max") for part, x in (("first", first), ("last", last)))
    return Packed(first, last, ahead, lambda: write("cmp_gt", "of a sequence", count_own, 0))


def reference(given: Mapping[str, Array], rows: int) -> tuple[Array, ...] | None:
    """Returns the same as NumPy columns: first, last, ahead (top), ahead (bottom), exists; None if not packed."""
    found = [given.get(key, np.zeros(1, np.int64)).astype(np.int64).reshape(-1) for key in OFFSETS]
    if any(x.size == 1 for x in found):
        return None
    q, k = found
    token = np.arange(rows)[:, None]
    own = (token >= q[:-1]) & (token < q[1:])
    numbers = k[:-1], k[1:], k[:-1] - q[:-1], k[1:] - q[1:]
    return *(np.where(own, x, 0).sum(axis=1, keepdims=True) for x in numbers), own.any(axis=1, keepdims=True)

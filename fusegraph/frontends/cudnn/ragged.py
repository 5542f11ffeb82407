"""Ragged tensors of cuDNN's: sequences of different lengths, each where a tensor of offsets says.

Such a tensor has the shape and strides of one with all sequences padded, (B, H, S, D), but that of batch b begins
``ragged_offset[b]`` elements (times a multiplier) after the first.  How much memory there is, is not said.  Here it is
rows (`rows.Rows`), of which a table of numbers makes the padded tensor, and back.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from fusegraph.errors import LayoutError
from fusegraph.frontends.cudnn.rows import Rows
from fusegraph.graph import Tensor

if TYPE_CHECKING:
    from fusegraph.frontends.cudnn.reading import Reading

#: Ports of attention whose tensors may be ragged -> what says how many tokens of each batch there are.
LENGTHS = {
    **dict.fromkeys(("q", "o", "dO", "stats", "O", "Stats", "score_max", "score_sum_exp", "dQ"), "seq_len_q"),
    **dict.fromkeys(("k", "v", "dK", "dV"), "seq_len_kv"),
    **dict.fromkeys(("paged_attention_k_table", "paged_attention_v_table")),
}


def padded(reading: Reading, tensor: Any, rows: Tensor, lengths: Tensor) -> Tensor:
    """A ragged tensor with padding of zeros, of its rows; lengths say how many tokens of each batch there are."""
    write, memory = reading.write, reading.graph.ragged[rows]
    batch, heads, tokens, _ = memory.shape
    begin, _ = _ends(reading, tensor, memory)
    by_head, by_token = memory.steps
    every = write("broadcast", "", begin, shape=(batch, heads, tokens))
    token = write("gen_index", "", every, axis=2)
    place = write("add", "", every, write("mul", "", token, by_token))
    if by_head:
        place = write("add", "", place, write("mul", "", write("gen_index", "", every, axis=1), by_head))
    exists = write("cmp_lt", "", token, write("reshape", "", lengths, shape=(batch, 1, 1)))
    zero = reading.graph.constant(0, dtype=rows.dtype)
    if memory.count == 0:
        return write("broadcast", "", write("reshape", "", zero, shape=(1, 1, 1, 1)), shape=memory.shape)
    found = write("gather", "", rows, write("binary_select", "", place, 0, exists), axis=0)
    return write("binary_select", "", found, zero, write("reshape", "", exists, shape=(batch, heads, tokens, 1)))


def stored(reading: Reading, tensor: Any, memory: Rows, made: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """A padded tensor as the rows of a ragged one, and which of the rows are those of a token, (rows, 1): the others
    are not to be written.
    """
    write = reading.write
    batch, heads, tokens, depth = memory.shape
    begin, _ = _ends(reading, tensor, memory)
    every = write("broadcast", "", write("reshape", "", begin, shape=(1, batch)), shape=(memory.count, batch))
    row = write("gen_index", "", every, axis=0)
    rest = write("sub", "", row, every)
    own = write("cmp_ge", "", rest, 0)
    places: dict[str, Any] = {"head": 0, "token": 0}
    steps = dict(zip(places, memory.steps))
    for kind in sorted(places, key=lambda kind: -steps[kind]):  # the longer steps first
        if steps[kind]:
            places[kind] = write("quotient", "", rest, steps[kind])
            rest = write("sub", "", rest, write("mul", "", places[kind], steps[kind]))
    own = write("logical_and", "", own, write("cmp_eq", "", rest, 0))
    if steps["head"]:
        own = write("logical_and", "", own, write("cmp_lt", "", places["head"], heads))
    token = places["token"]
    own = write("logical_and", "", own, write("cmp_gt", "", write("reshape", "", lengths, shape=(1, batch)), token))
    if steps["token"]:
        own = write("logical_and", "", own, write("cmp_lt", "", token, tokens))
    number = write("mul", "", write("gen_index", "", every, axis=1), heads)
    if steps["head"]:
        number = write("add", "", number, places["head"])
    number = write("add", "", write("mul", "", number, tokens), token)
    chosen = write("reduction", "", write("binary_select", "", number, 0, own), mode="max", axes=1, keepdims=False)
    owned = write("reduction", "", write("binary_select", "", 1, 0, own), mode="max", axes=1)
    flat = write("reshape", "", made, shape=(batch * heads * tokens, depth))
    return write("gather", "", flat, chosen, axis=0), write("cmp_gt", "", owned, 0)


def between(reading: Reading, tensor: Any, memory: Rows) -> Tensor:
    """How many tokens there are from one offset to the next, (B, 1, 1, 1)."""
    begin, end = _ends(reading, tensor, memory)
    count = reading.write("sub", "", end, begin)
    if memory.steps[1] > 1:
        count = reading.write("quotient", "", count, memory.steps[1])
    return reading.write("reshape", "", count, shape=(memory.shape[0], 1, 1, 1))


def _ends(reading: Reading, tensor: Any, memory: Rows) -> tuple[Tensor, Tensor]:
    """The numbers of the rows at which each batch and the next begin, (B, 1, 1)."""
    write, batch = reading.write, memory.shape[0]
    offsets = reading.taken(tensor.ragged_offset)
    if offsets.size != batch + 1:
        raise LayoutError(f"the offsets of {tensor.name!r} are {batch + 1} numbers, got {list(offsets.shape)}")
    offsets = write("reshape", "", offsets, shape=(batch + 1, 1, 1))
    multiplier = int(getattr(tensor, "ragged_offset_multiplier", 1) or 1)
    common = gcd(multiplier, memory.unit)
    if multiplier // common != 1:
        offsets = write("mul", "", offsets, multiplier // common)
    if memory.unit // common != 1:
        offsets = write("quotient", "", offsets, memory.unit // common)
    if offsets.dtype.name != "int32":
        offsets = write("identity", "", offsets, dtype="int32")
    first, second = ((n, 0, 0) for n in (0, 1))
    return (
        write("slice", "", offsets, starts=first, stops=(batch, 1, 1)),
        write("slice", "", offsets, starts=second, stops=(batch + 1, 1, 1)),
    )

"""cuDNN's ragged tensors: sequences of different lengths, placed by a tensor of offsets.

Such a tensor has the shape and strides of one with all sequences padded, (B, H, S, D), but the sequence of batch b
begins ``ragged_offset[b]`` elements (times a multiplier) after the first.  cuDNN does not say how much memory there is.
Here it is an array of rows (`rows.Rows`), which computed row numbers turn into the padded tensor, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

from fusegraph.errors import LayoutError
from fusegraph.frontends.cudnn.rows import Rows
from fusegraph.graph import Tensor

#: Ports of attention whose tensors may be ragged -> the port of the sequence lengths, if any.
LENGTHS = {
    **dict.fromkeys(("q", "o", "dO", "stats", "O", "Stats", "score_max", "score_sum_exp", "dQ"), "seq_len_q"),
    **dict.fromkeys(("k", "v", "dK", "dV"), "seq_len_kv"),
    **dict.fromkeys(("paged_attention_k_table", "paged_attention_v_table")),
}


@dataclass(frozen=True)
class Ragged:
    """A ragged tensor.

    write    adds a node, as `reading.Reading.write` does.
    tensor   cuDNN's tensor.
    offsets  where each batch begins, and where the last ends.
    memory   the rows that represent it.
    """

    write: Callable[..., Tensor]
    tensor: Any
    offsets: Tensor
    memory: Rows

    def padded(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Returns the padded tensor made from its rows, padded with zeros; ``lengths`` are the tokens of each batch."""
        write, memory = self.write, self.memory
        batch, heads, tokens, _ = memory.shape
        begin, _ = self._ends()
        by_head, by_token = memory.steps
        every = write("broadcast", "", begin, shape=(batch, heads, tokens))
        token = write("gen_index", "", every, axis=2)
        place = write("add", "", every, write("mul", "", token, by_token))
        if by_head:
            place = write("add", "", place, write("mul", "", write("gen_index", "", every, axis=1), by_head))
        exists = write("cmp_lt", "", token, write("reshape", "", lengths, shape=(batch, 1, 1)))
        zero = rows.graph.constant(0, dtype=rows.dtype)
        if memory.count == 0:
            return write("broadcast", "", write("reshape", "", zero, shape=(1, 1, 1, 1)), shape=memory.shape)
        found = write("gather", "", rows, write("binary_select", "", place, 0, exists), axis=0)
        return write("binary_select", "", found, zero, write("reshape", "", exists, shape=(batch, heads, tokens, 1)))

    def stored(self, made: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of a padded tensor, and a mask (rows, 1) of those that belong to a token.

        The other rows are not to be written.
        """
        write, memory = self.write, self.memory
        batch, heads, tokens, depth = memory.shape
        begin, _ = self._ends()
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

    def between(self) -> Tensor:
        """Returns the number of tokens from each offset to the next, (B, 1, 1, 1)."""
        begin, end = self._ends()
        write, memory = self.write, self.memory
        count = write("sub", "", end, begin)
        if memory.steps[1] > 1:
            count = write("quotient", "", count, memory.steps[1])
        return write("reshape", "", count, shape=(memory.shape[0], 1, 1, 1))

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Returns the row numbers, each (B, 1, 1), at which each batch and the next one begin."""
        write, memory, offsets, batch = self.write, self.memory, self.offsets, self.memory.shape[0]
        if offsets.size != batch + 1:
            raise LayoutError(f"the offsets of {self.tensor.name!r} are {batch + 1} numbers, got {list(offsets.shape)}")
        offsets = write("reshape", "", offsets, shape=(batch + 1, 1, 1))
        multiplier = int(getattr(self.tensor, "ragged_offset_multiplier", 1) or 1)
        common = gcd(multiplier, memory.unit)
        if multiplier // common != 1:
            offsets = write("mul", "", offsets, multiplier // common)
        if memory.unit // common != 1:
            offsets = write("quotient", "", offsets, memory.unit // common)
        if offsets.dtype.name != "int32":
            offsets = write("identity", "", offsets, dtype="int32")
        begin, end = (write("slice", "", offsets, starts=(n, 0, 0), stops=(n + batch, 1, 1)) for n in (0, 1))
        return begin, end

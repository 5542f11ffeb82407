"""Which tiles of keys a tile of queries meets where masks depend on data: the producer finds out before it loads them.

A range compares integers that depend on the query with integers that depend on the key, such as the documents of a
sequence.  Of a tile, only the least and the largest of each matter: where no query can meet a key the tile is skipped,
and where every query meets every key no mask is evaluated.  A lane looks at one tile, the warp at 32.
"""

from __future__ import annotations

from codegen.attention.ranges import LANES, Ranges
from codegen.attention.scores import Scores
from codegen.attention.spec import AttentionSpec
from codegen.naming import Writer


class Listing:
    """Writes the producer's look at the tiles."""

    def __init__(self, w: Writer, spec: AttentionSpec, scores: Scores, block_rows: int) -> None:
        self.w, self.spec, self.scores, self.block_rows = w, spec, scores, block_rows
        self.ranges = Ranges(w, spec, scores.batch, scores.edge.pointers.loads)

    def rows(self) -> None:
        """Writes the extents of the block's queries, which begin at ``m0``."""
        self.ranges.tile("m0", self.block_rows)

    def open(self) -> None:
        """Opens the loop over tiles that are met, in lane 0: ``tile``, and ``whole``, whether no range is broken."""
        w, spec, keys = self.w, self.spec, self.scores.keys
        w.open(f"for (int end = last; end > first; end -= {LANES})")
        w.line("const int mine = end - 1 - lane;  // a lane looks at a tile")
        w.line("bool met = false, inside = false;")
        with w.block("if (mine >= first)"):
            stop = f"min((mine + 1) * {keys}, {spec.keys})" if self.scores.ragged else f"(mine + 1) * {keys}"
            self.ranges.keys(f"mine * {keys}", stop)
            numbers = range(len(spec.ranges))
            w.line(f"met = {' && '.join(f'{self.ranges.sum(n)} >= 0' for n in numbers)};")
            w.line(f"inside = {' && '.join(f'{self.ranges.sum(n, most=False)} >= 0' for n in numbers)};")
        w.line("const uint32 met_tiles = __ballot_sync(0xffffffffu, met);")
        w.line("const uint32 inside_tiles = __ballot_sync(0xffffffffu, inside);")
        w.line("if (lane != 0) continue;")
        w.open("for (uint32 left = met_tiles; left != 0; left &= left - 1, ++stage)")
        w.line("const int number = __ffs(left) - 1, tile = end - 1 - number;")
        w.line("const int whole = inside_tiles >> number & 1;")

    def close(self) -> None:
        self.w.close()
        self.w.close()

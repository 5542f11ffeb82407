"""Which tiles of keys a tile of queries meets where masks depend on data: the producer finds out before it loads them.

A range compares integers that depend on the query with integers that depend on the key, documents of a sequence, say.
Of a tile all that matters are the least and the largest of each: where no query can meet a key the tile is skipped, and
where every query meets every key no mask is evaluated.  A lane looks at one tile, the warp at 32.
"""

from __future__ import annotations

from codegen.attention_scores import Scores
from codegen.iteration import linear
from codegen.naming import Writer
from codegen.spec import AttentionSpec, Bound

LANES = 32
#: Further than any sum of positions and 32-bit integers.
FAR = "(int64(1) << 40)"


class Listing:
    """Writes the producer's look at the tiles.  C variables: ``rows_most0``, ``rows_least0``, ... of each range."""

    def __init__(self, w: Writer, spec: AttentionSpec, scores: Scores, block_rows: int) -> None:
        self.w, self.spec, self.scores, self.block_rows = w, spec, scores, block_rows

    def _part(self, bound: Bound, position: str, *, along_keys: bool) -> str:
        """What depends on the query (or key) at a position, of a range's sum."""
        spec, scores = self.spec, self.scores
        axis = -1 if along_keys else -2
        terms = [(f"int64({position})", bound.key if along_keys else bound.row)]
        for load, coefficient in bound.loads:
            op = spec.program.loads[load]
            if op.strides[axis]:
                place = linear([*zip(scores.batch, op.strides), (position, op.strides[axis])])
                terms.append((f"int64({scores.edge.pointers.loads[load]}[{place}])", coefficient))
        return linear(terms)

    def _rest(self, bound: Bound) -> str:
        """What depends on neither."""
        spec, scores = self.spec, self.scores
        terms = []
        for load, coefficient in bound.loads:
            op = spec.program.loads[load]
            if not any(op.strides[-2:]):
                place = linear(list(zip(scores.batch, op.strides)))
                terms.append((f"int64({scores.edge.pointers.loads[load]}[{place}])", coefficient))
        return linear(terms, bound.start)

    def _extremes(self, prefix: str, position: str, loop: str, *, along_keys: bool) -> None:
        """Writes the least and the largest over a loop."""
        w = self.w
        for n in range(len(self.spec.ranges)):
            w.line(f"int64 {prefix}_most{n} = -{FAR}, {prefix}_least{n} = {FAR};")
        w.open(loop)
        for n, bound in enumerate(self.spec.ranges):
            w.line(f"const int64 part{n} = {self._part(bound, position, along_keys=along_keys)};")
            w.line(f"{prefix}_most{n} = max({prefix}_most{n}, part{n});")
            w.line(f"{prefix}_least{n} = min({prefix}_least{n}, part{n});")
        w.close()

    def rows(self) -> None:
        """Writes the extremes of the block's queries, which begin at ``m0``."""
        w, spec = self.w, self.spec
        end = f"min(m0 + {self.block_rows}, {spec.rows})" if spec.rows % self.block_rows else f"m0 + {self.block_rows}"
        self._extremes("rows", "m", f"for (int m = m0 + lane; m < {end}; m += {LANES})", along_keys=False)
        for n, bound in enumerate(spec.ranges):
            for which, op in (("most", "Max"), ("least", "Min")):
                name = f"rows_{which}{n}"
                rest = self._rest(bound)
                more = f" + {rest}" if rest != "0" else ""
                w.line(f"{name} = reduce::lanes<reduce::{op}, {LANES}>({name}){more};")

    def open(self) -> None:
        """Opens the loop over tiles that are met, in lane 0: ``tile``, and ``whole``, whether no range is broken."""
        w, spec, keys = self.w, self.spec, self.scores.keys
        w.open(f"for (int end = last; end > first; end -= {LANES})")
        w.line("const int mine = end - 1 - lane;  // a lane looks at a tile")
        w.line("bool met = false, inside = false;")
        w.open("if (mine >= first)")
        stop = f"min((mine + 1) * {keys}, {spec.keys})" if self.scores.ragged else f"(mine + 1) * {keys}"
        self._extremes("keys", "n", f"for (int n = mine * {keys}; n < {stop}; ++n)", along_keys=True)
        numbers = range(len(spec.ranges))
        w.line(f"met = {' && '.join(f'rows_most{n} + keys_most{n} >= 0' for n in numbers)};")
        w.line(f"inside = {' && '.join(f'rows_least{n} + keys_least{n} >= 0' for n in numbers)};")
        w.close()
        w.line("const uint32 met_tiles = __ballot_sync(0xffffffffu, met);")
        w.line("const uint32 inside_tiles = __ballot_sync(0xffffffffu, inside);")
        w.line("if (lane != 0) continue;")
        w.open("for (uint32 left = met_tiles; left != 0; left &= left - 1, ++stage)")
        w.line("const int number = __ffs(left) - 1, tile = end - 1 - number;")
        w.line("const int whole = inside_tiles >> number & 1;")

    def close(self) -> None:
        self.w.close()
        self.w.close()

"""The ranges of an attention, conditions that compare integers of the query with integers of the key, over a tile: of
all its queries, or keys, only the least and the largest sum matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from codegen.iteration import linear
from codegen.naming import Writer
from codegen.spec import AttentionSpec, Bound

LANES = 32
#: Further than any sum of positions and 32-bit integers.
FAR = "(int64(1) << 40)"


class Ranges:
    """Writes the extremes of some of a spec's ranges.  batch are C expressions of the coordinates, pointers C names of
    the program's loads.  C variables: ``rows_most0``, ``rows_least0`` (if
    ``least``), ... of each range.
    """

    def __init__(
        self,
        w: Writer,
        spec: AttentionSpec,
        batch: Sequence[str],
        pointers: Sequence[str],
        numbers: Sequence[int] | None = None,
        *,
        least: bool = True,
    ) -> None:
        self.w, self.spec, self.batch, self.pointers = w, spec, batch, pointers
        self.sides = {"most": "max", "least": "min"} if least else {"most": "max"}
        chosen = range(len(spec.ranges)) if numbers is None else numbers
        self.ranges = {n: spec.ranges[n] for n in chosen}

    @staticmethod
    def intervals(spec: AttentionSpec) -> list[int]:
        """The numbers of the ranges that leave an interval of keys to each query, whatever the keys."""
        loads = spec.program.loads
        return [
            n for n, b in enumerate(spec.ranges) if b.key and not any(loads[load].strides[-1] for load, _ in b.loads)
        ]

    def _part(self, bound: Bound, position: str, *, along_keys: bool) -> str:
        """What depends on the query (or key) at a position, of a range's sum."""
        spec = self.spec
        axis = -1 if along_keys else -2
        terms = [(f"int64({position})", bound.key if along_keys else bound.row)]
        for load, coefficient in bound.loads:
            op = spec.program.loads[load]
            if op.strides[axis]:
                place = linear([*zip(self.batch, op.strides), (position, op.strides[axis])])
                terms.append((f"int64({self.pointers[load]}[{place}])", coefficient))
        return linear(terms)

    def _rest(self, bound: Bound) -> str:
        """What depends on neither."""
        spec = self.spec
        terms = []
        for load, coefficient in bound.loads:
            op = spec.program.loads[load]
            if not any(op.strides[-2:]):
                place = linear(list(zip(self.batch, op.strides)))
                terms.append((f"int64({self.pointers[load]}[{place}])", coefficient))
        return linear(terms, bound.start)

    def extremes(self, prefix: str, position: str, loop: str, *, along_keys: bool) -> None:
        """Writes the least and the largest over a loop."""
        w = self.w
        for n in self.ranges:
            start = {"most": f"-{FAR}", "least": FAR}
            w.line(f"int64 {', '.join(f'{prefix}_{side}{n} = {start[side]}' for side in self.sides)};")
        w.open(loop)
        for n, bound in self.ranges.items():
            w.line(f"const int64 part{n} = {self._part(bound, position, along_keys=along_keys)};")
            for side, function in self.sides.items():
                w.line(f"{prefix}_{side}{n} = {function}({prefix}_{side}{n}, part{n});")
        w.close()

    def rows(self, count: int) -> None:
        """Writes the extremes of ``count`` queries, which begin at ``m0``; all lanes of a warp look at some."""
        w, spec = self.w, self.spec
        end = f"min(m0 + {count}, {spec.rows})" if spec.rows % count else f"m0 + {count}"
        self.extremes("rows", "m", f"for (int m = m0 + lane; m < {end}; m += {LANES})", along_keys=False)
        for n, bound in self.ranges.items():
            for side, function in self.sides.items():
                name, op = f"rows_{side}{n}", function.title()
                rest = self._rest(bound)
                more = f" + {rest}" if rest != "0" else ""
                w.line(f"{name} = reduce::lanes<reduce::{op}, {LANES}>({name}){more};")

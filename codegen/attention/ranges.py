"""The ranges of an attention: conditions that compare integers of the query with integers of the key.

For a tile of queries, or of keys, only the least and the largest sum matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.attention.spec import AttentionSpec, Bound, held
from codegen.expr import Operand
from codegen.iteration import linear, long_enough, negated
from codegen.naming import Writer

LANES = 32
#: Neighbours that a lane reads at once, where it can, and how many such reads are in flight together.
VECTOR, UNROLL = 4, 8


@dataclass(frozen=True)
class Number:
    """An integer of a query or key: coefficient * position + sum of coefficient * load, the first of them positive."""

    position: int
    loads: tuple[tuple[int, int], ...]


class Ranges:
    """Writes the extents (least and largest value) of the sums of some of a spec's ranges.  ``batch`` are C expressions
    of the coordinates, ``pointers`` C names of the program's loads.

    C variables: ``rows0``, ``rows1``, ... the extents of the numbers of a tile of queries, ``keys0``, ... those of a
    tile of keys, ``rest0``, ... what depends on the batch alone in a range.
    """

    def __init__(
        self, w: Writer, spec: AttentionSpec, batch: Sequence[str], pointers: Sequence[str], chosen: Sequence[int]
    ) -> None:
        self.w, self.spec, self.batch, self.pointers = w, spec, batch, pointers
        self.ranges = {n: spec.ranges[n] for n in chosen}
        #: the numbers of keys (True) or queries, each once; and for each range the index of its number, and its sign
        self._numbers: dict[bool, list[Number]] = {}
        self._which: dict[bool, dict[int, tuple[int, int]]] = {}
        for of_keys in (False, True):
            parts = {n: self._part(bound, of_keys=of_keys) for n, bound in self.ranges.items()}
            distinct = list(dict.fromkeys(number for number, _ in parts.values()))
            self._numbers[of_keys] = distinct
            self._which[of_keys] = {n: (distinct.index(number), sign) for n, (number, sign) in parts.items()}

    @staticmethod
    def intervals(spec: AttentionSpec, *, of_queries: bool = False) -> list[int]:
        """Returns the indices of the ranges that leave each query an interval of keys, whatever the keys.

        With ``of_queries``, of those that leave each key an interval of queries, whatever the queries.
        """
        loads, other = spec.program.loads, -2 if of_queries else -1
        return [
            n
            for n, b in enumerate(spec.ranges)
            if (b.row if of_queries else b.key) and not any(loads[load].strides[other] for load, _ in b.loads)
        ]

    def _part(self, bound: Bound, *, of_keys: bool) -> tuple[Number, int]:
        """Returns the part of a range's sum that depends on the key (or query), and its sign."""
        axis = -1 if of_keys else -2
        position = bound.key if of_keys else bound.row
        loads = tuple((x, c) for x, c in bound.loads if self._load(x).strides[axis])
        leading = next((c for c in (position, *(c for _, c in loads)) if c), 1)
        sign = 1 if leading > 0 else -1
        return Number(sign * position, tuple((x, sign * c) for x, c in loads)), sign

    def _rest(self, bound: Bound) -> list[tuple[str, int]]:
        """Returns the loads of a range that depend on neither query nor key, and their coefficients."""
        return [(held(self._load(x), self._at(x)), c) for x, c in bound.loads if not any(self._load(x).strides[-2:])]

    def _load(self, number: int) -> Operand:
        return self.spec.program.loads[number]

    def _place(self, load: int, position: str, axis: int) -> str:
        op, most = self._load(load), self.spec.rows if axis == -2 else self.spec.keys
        step = op.strides[axis]
        return linear([*zip(self.batch, op.strides), (long_enough(position, most, step), step)])

    def _at(self, load: int, position: str = "0", axis: int = -1) -> str:
        return f"{self.pointers[load]}[{self._place(load, position, axis)}]"

    def _alone(self, number: Number) -> bool:
        """Tells whether a number is just what one load reads, and fits an int."""
        if number.position or [c for _, c in number.loads] != [1]:
            return False
        dtype = self._load(number.loads[0][0]).dtype
        return dtype.itemsize < 4 or dtype.name == "int32"

    def _vectors(self) -> bool:
        """Tells whether the numbers of neighbouring keys are read together."""
        found = [n for n in self._numbers[True] if n.loads]
        loads = [self._load(n.loads[0][0]) for n in found if self._alone(n)]
        return (
            len(loads) == len(found)
            and self.spec.keys % VECTOR == 0
            and all(op.strides[-1] == 1 and op.alignment % (VECTOR * op.dtype.itemsize) == 0 for op in loads)
            and not any(step % VECTOR for op in loads for step in op.strides[:-2])
        )

    def _value(self, number: Number, position: str, axis: int) -> str:
        if self._alone(number):
            return f"int({self._at(number.loads[0][0], position, axis)})"
        terms = [(f"int64({position})", number.position)]
        terms += [(held(self._load(x), self._at(x, position, axis)), c) for x, c in number.loads]
        return linear(terms)

    def extents(self, start: str, stop: str, *, of_keys: bool, lanes: bool = False) -> None:
        """Writes the extents of the numbers from start to stop - 1, of which a lane looks at all, or at every 32nd."""
        w, (axis, letter, name) = self.w, (-1, "n", "keys") if of_keys else (-2, "m", "rows")
        looped = []
        for k, number in enumerate(self._numbers[of_keys]):
            if number.loads or number.position:
                w.line(f"attention::Extent<{'int' if self._alone(number) else 'int64'}> {name}{k};")
            if number.loads:
                looped.append((k, number))
            elif number.position:  # positions grow: the first and the last say it all
                for position in (start, f"{stop} - 1"):
                    w.line(f"{name}{k}.add({linear([(f'int64({position})', number.position)])});")
        if not looped:
            return
        vectors = of_keys and not lanes and self._vectors()
        first, step = (f"{start} + lane", LANES) if lanes else (start, VECTOR if vectors else 1)
        w.line(f"#pragma unroll {UNROLL}")
        with w.block(f"for (int {letter} = {first}; {letter} < {stop}; {letter} += {step})"):
            for k, number in looped:
                if vectors:
                    load = number.loads[0][0]
                    place = f"{self.pointers[load]} + {self._place(load, letter, axis)}"
                    w.line(f"const auto part{k} = load<{VECTOR}>({place});")
                    w.unrolled_line(f"for (int e = 0; e < {VECTOR}; ++e) {name}{k}.add(part{k}[e]);")
                else:
                    w.line(f"{name}{k}.add({self._value(number, letter, axis)});")

    def tile(self, start: str, count: int, *, of_keys: bool = False) -> None:
        """Writes the extents of ``count`` queries, or keys, from ``start`` on; all lanes of a warp look at some."""
        w, (total, name) = self.w, (self.spec.keys, "keys") if of_keys else (self.spec.rows, "rows")
        end = f"min({start} + {count}, {total})" if total % count else f"{start} + {count}"
        self.extents(start, end, of_keys=of_keys, lanes=True)
        for k, number in enumerate(self._numbers[of_keys]):
            if number.loads:
                w.line(f"{name}{k}.over_lanes();")
        for n, bound in self.ranges.items():
            if rest := self._rest(bound):
                w.line(f"const int64 rest{n} = {linear(rest)};")

    def end(self, n: int, keys: int) -> str:
        """Returns the C expression of the first tile of so many keys that queries meet, or of that behind the last."""
        furthest, every = self.sum(n, keys=False), self.spec.keys
        if self.ranges[n].key > 0:
            return f"int(min(max({negated(furthest)}, int64(0)), int64({every}))) / {keys}"
        return f"int(min(max({furthest} + {keys}, int64(0)), int64({-(-every // keys) * keys}))) / {keys}"

    def of_row(self, n: int, row: str) -> str:
        """Returns the C expression of a range's sum for this query and key 0."""
        bound = self.ranges[n]
        terms = [(f"int64({row})", bound.row)]
        terms += [(held(self._load(x), self._at(x, row, -2)), c) for x, c in bound.loads]
        return linear(terms, bound.start)

    def sum(self, n: int, *, most: bool = True, rows: bool = True, keys: bool = True) -> str:
        """Returns the largest (or least) value of a range's sum, or of its parts without ``rows`` or ``keys``."""
        parts = [(f"rest{n}", 1)] if self._rest(self.ranges[n]) else []
        for name, of_keys in [("rows", False)] * rows + [("keys", True)] * keys:
            k, sign = self._which[of_keys][n]
            number = self._numbers[of_keys][k]
            if number.loads or number.position:
                parts.append((f"int64({name}{k}.{'most' if most == (sign > 0) else 'least'})", sign))
        start = self.ranges[n].start
        return linear(parts, start) if parts else f"int64({start})"

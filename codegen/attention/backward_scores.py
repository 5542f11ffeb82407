"""What all forms of attention's gradients share: which tiles meet, and the program on scores; rows are either side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import e, log2, prod

from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.ranges import Ranges
from codegen.attention.scores import Scores
from codegen.attention.spec import Bound
from codegen.buffers import Edge, every, where
from codegen.expr import Operand, literal
from codegen.iteration import extent
from codegen.kernel import Kernel, converted, tile_at
from codegen.sizes import smaller

#: C variables of what ranges say of a tile's rows: see `BackwardScores`.
INTERVALS = ("low", "high", "begin", "end")


def own_ranges(spec: AttentionBackwardSpec) -> tuple[Bound, ...]:
    """Returns the ranges by which each row meets an interval of columns."""
    a = spec.attention
    own = [a.ranges[n] for n in Ranges.intervals(a, of_queries=not spec.queries)]
    if spec.summed > 1:  # they are looked at once for all heads
        own = [b for b in own if not any(a.program.loads[load].strides[len(a.batch) - 1] for load, _ in b.loads)]
    return tuple(own)


def without_places(spec: AttentionBackwardSpec) -> AttentionBackwardSpec:
    """Returns the same spec with its own ranges alone; if it has no others, ``inside`` is where none is broken."""
    a, own = spec.attention, own_ranges(spec)
    if len(own) == len(a.ranges):
        a = replace(a, inside=a.within, inside_loads=a.within_loads)
    return replace(spec, attention=replace(a, ranges=own))


@dataclass(frozen=True)
class Sums:
    """What is added up for a result, whose rows have so many elements: products of gradients or of probabilities.

    name     the C variable of the sums.
    factors  what is multiplied with a tile, of those that are brought the one of this number.
    written  the C name of the result, which is the sums times a number.
    """

    name: str
    factors: str
    tile: int
    operand: Operand
    written: str
    elements: int
    times: float


def sums(spec: AttentionBackwardSpec, written: Sequence[str]) -> list[Sums]:
    """Returns the sums of a spec's results that have elements, given the C names of what is written."""
    a, names, found = spec.attention, iter(written), []
    if spec.first is not None:
        found.append(Sums("by_s", "d", 0, spec.first, next(names), a.depth, spec.factor))
    if spec.second is not None:
        found.append(Sums("by_p", "s", 1, spec.second, next(names), a.width, 1.0))
    return [x for x in found if x.elements]


class BackwardScores(Scores):
    """Writes what depends on the spec alone, for tiles of ``height`` rows and ``width`` columns.

    C variables: ``r0`` and ``c0``, the first row and column of a tile; ``b0``, ``b1``, ... as in `Scores`; ``low``,
    ``high``, ``begin`` and ``end``, which follow from ranges: the rows of a tile meet no column before low or from high
    on, and every column from begin to end - 1.
    """

    whole: AttentionBackwardSpec

    def __init__(self, w: Kernel, spec: AttentionBackwardSpec, height: int, width: int) -> None:
        self.height, self.width = height, width
        #: whether keys that do not exist count, too, when it is asked which tiles meet
        self.whole_tiles = False
        super().__init__(w, spec.attention, width if spec.queries else height)
        self.whole = spec
        self.turned, self.row_tiles = not spec.queries, Edge(spec.attention.rows, height if spec.queries else width)
        if self.turned:
            self.ragged = False  # what becomes of keys that do not exist is not stored
        self.ranged, self.tiles = bool(spec.attention.ranges), Edge(spec.rows, height).tiles
        #: whether the last rows begin first: later queries meet more keys
        growing = any(b.row > 0 and b.key < 0 for b in spec.attention.bounds)
        self.last_first = growing and (spec.queries or spec.fused)
        #: whether ranges that give intervals are all there are, so that begin and end matter
        self.settled = self.ranged and spec.attention.inside == spec.attention.within
        self.differ = bool(spec.attention.bounds) or self.settled or self.ragged
        self.starts |= {"slope_of": ""} if spec.sloped else {}

    def _places(self) -> list[int]:
        a, spec = self.spec, self.whole
        of_queries, of_keys = ((*a.batch, n) for n in (a.rows, a.keys))
        own = of_queries if spec.queries else of_keys
        spaces = [((*of_queries, a.depth), a.q), ((*of_keys, a.depth), a.k), ((*of_keys, a.width), a.v)]
        spaces += [((*of_queries, a.width), a.out), (of_queries, spec.lse), (of_queries, spec.row_dot)]
        results = ((*own, a.depth), spec.first), ((*own, a.width), spec.second), (a.space, spec.by_scores)
        spaces += [(space, op) for space, op in results if op is not None]
        return [extent(space, op.strides) for space, op in (*spaces, *((a.space, op) for op in a.loads))]

    @property
    def plain(self) -> bool:
        """Whether the score where no bound is broken is the product itself, and has the slope 1."""
        return super().plain and not self.whole.sloped

    def intervals(self) -> None:
        """Writes ``low``, ``high``, ``begin`` and ``end``; all lanes of a warp look at some rows."""
        if not self.ranged:
            return
        w, a, spec = self.w, self.spec, self.whole
        queries, total = spec.queries, spec.cols
        ranges = self.ranges()
        w.line(f"int {', '.join(f'{x} = {n}' for x, n in zip(INTERVALS, (0, total, 0, total)))};")
        with w.block(""):
            ranges.tile("r0", self.height, of_keys=not queries)
            for n, bound in enumerate(a.ranges):
                for most, names in ((True, INTERVALS[:2]), (False, INTERVALS[2:])):
                    rest = ranges.sum(n, most=most, rows=queries, keys=not queries)
                    self._limit(bound.key if queries else bound.row, rest, *names, total)

    def of_ranges(self, rows: int, starts: list[str], stops: list[str]) -> None:
        if self.ranged:
            starts.append(f"low / {self.width}")
            stops.append(f"(high + {self.width - 1}) / {self.width}")

    def place(self, number: str, heads: int) -> None:
        """Writes where the tile of rows of this number is, if so many heads are worked on together."""
        tiles, batches = self.tiles, prod(self.whole.batch)
        self.w.line(f"const Tile at = {tile_at(number, batches, tiles, smaller(batches, heads))};")
        self.w.line(f"const int r0 = {f'({tiles - 1} - at.col)' if self.last_first else 'at.col'} * {self.height};")
        self.coordinates("at.row", self.whole.batch)

    @contextmanager
    def met(self) -> Iterator[None]:
        """Writes a loop over the heads that share keys; rows meet tiles of columns from ``first`` to ``last`` - 1."""
        spec, head = self.whole, f"b{len(self.spec.batch) - 1}"
        with self.w.loop(f"for ({self.t} {head} = 0; {head} < {spec.summed}; ++{head})", when=spec.summed > 1):
            self.bound_numbers()
            if spec.queries:
                self.keys_met("r0", self.height)
            else:
                first, last = self._range("r0", self.key_tiles, self.row_tiles, keys=True, whole=self.whole_tiles)
                self.w.line(f"const int first = {first}, last = {last};  // tiles of queries that the keys may meet")
            yield

    def unbroken(self, top: str, group: int) -> str:
        """Returns the C condition that so many rows from ``top`` on and a tile of columns break no bound or range."""
        rows, columns = (top, group), ("c0", self.width)
        bounds = self.inside(*columns, *rows) if self.turned else self.inside(*rows, *columns)
        return every(bounds, f"c0 >= begin && c0 + {self.width} <= end" if self.settled else "")

    def lse_of(self, name: str, query: str, exists: str) -> str:
        """Returns the C expression of the lse of a query, to base 2; infinity (no probabilities) if there is none."""
        op, real = self.whole.lse, self.spec.program.real
        text = f"{literal(log2(e), real)} * {converted(op, f'{name}[{self.offset(op, query)}]', real)}"
        text = f"attention::lse({text})" if self.whole.guarded else text
        return where(exists, text, f"infinity<{real}>()")

    def row_dot_of(self, name: str, query: str, exists: str) -> str:
        """Returns the C expression of the row_dot of a query; 0 if it does not exist."""
        op, real = self.whole.row_dot, self.spec.program.real
        text = converted(op, f"{name}[{self.offset(op, query)}]", real)
        return where(exists, text, literal(0.0, real))

"""Masks of attention: which tiles of queries and of keys may meet, and in which no bound and no range is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codegen.attention.ranges import Ranges
from codegen.attention.spec import AttentionSpec, Bound, held
from codegen.buffers import Edge, every
from codegen.epilogue import Epilogue
from codegen.expr import Anchor, Operand
from codegen.iteration import linear, negated
from codegen.kernel import Kernel

#: More than there are queries and keys.  Bounds further away are moved to this distance: they decide the same, and what
#: is added to them still fits an int.
FAR = 1 << 30
#: More neighbours than any program reads at once.
VECTOR = 16


class Masks:
    """Writes what follows from the bounds and ranges of a spec, by the programs ``edge``, on all scores, and ``inner``,
    where none of them is broken; see `codegen.attention.scores.Scores`.
    """

    def __init__(self, w: Kernel, spec: AttentionSpec, keys: int, *, listed: bool, spanned: bool) -> None:
        self.w, self.spec, self.keys, self.listed, self.spanned = w, spec, keys, listed, spanned
        self.real = real = spec.program.real
        known = listed or spanned
        inner, loads = (spec.within, spec.within_loads) if known else (spec.inside, spec.inside_loads)
        self.edge, self.inner = (Epilogue(w, p, w.names, spec.space, real, real) for p in (spec.program, inner))
        self.inner.pointers.loads = [self.edge.pointers.loads[n] for n in loads]
        #: the tiles of queries and of keys
        self.row_tiles, self.key_tiles = Edge(spec.rows, 1), Edge(spec.keys, keys)
        #: whether scores of keys that do not exist must be told apart
        self.ragged = self.key_tiles.ragged or spanned
        #: whether tiles differ: some may break bounds or ranges, or reach past the end
        self.differ = bool(spec.bounds) or self.ragged or known
        self.batch = [f"b{d}" if size > 1 else "0" for d, size in enumerate(spec.batch)]

    @property
    def plain(self) -> bool:
        """Whether the score where no bound is broken is the product itself."""
        return self.inner.program.stores[0].value == Anchor(0)

    def offset(self, op: Operand, *place: str) -> str:
        """Returns the C expression of an element's offset; ``place`` is its position behind this batch."""
        return linear(list(zip((*self.batch, *place), op.strides)))

    @property
    def divides_data(self) -> bool:
        """Whether parts divide the tiles that are met, which depend on data, and not all that there are."""
        return self.spec.parts > 1 and any(
            bound.key and bound.loads for bound in (*self.spec.bounds, *self.spec.ranges)
        )

    def bound_numbers(self) -> None:
        """Writes the parts of bounds that are read from tensors of the batch."""
        spec = self.spec
        for n, bound in enumerate(spec.bounds):
            if bound.loads:
                terms = []
                for load, coefficient in bound.loads:
                    operand = spec.program.loads[load]
                    place = f"{self.edge.pointers.loads[load]}[{self.offset(operand)}]"
                    terms.append((held(operand, place), coefficient))
                far = f"int64({FAR})"
                self.w.line(f"const int bound{n} = int(min(max({linear(terms, bound.start)}, -{far}), {far}));")

    def _start(self, number: int, bound: Bound) -> tuple[list[tuple[str, int]], int]:
        """Returns the part of a bound that depends on neither query nor key: terms and a constant."""
        return ([(f"bound{number}", 1)], 0) if bound.loads else ([], min(max(bound.start, -FAR), FAR))

    def keys_met(self, m0: str, rows: int, *, some: bool = False) -> None:
        """Writes ``first`` and ``last``: queries m0 to m0 + rows - 1 may meet the tiles of keys from first to last - 1.

        With ``some`` there is at least one tile, if need be one in which no query meets a key.
        """
        first, last = self.keys_range(m0, rows)
        if self.divides_data:
            parts = self.spec.parts
            self.w.line(f"const int start = {first}, stop = max(start, {last});")
            self.w.line(f"const int each = (stop - start + {parts - 1}) / {parts};  // tiles of a part")
            first, last = "min(stop, start + int(b0) * each)", "min(stop, first + each)"
        if some and self.spec.bounds:
            # A bound that rules out all tiles together also rules out each one.
            first = f"min({first}, {self.key_tiles.tiles - 1})" if first != "0" else first
            last = f"max(first + 1, {last})"
        self.w.line(f"const int first = {first}, last = {last};  // tiles of keys that the queries may meet")

    def keys_range(self, m0: str, rows: int, *, whole: bool = False) -> tuple[str, str]:
        """Returns C expressions of the first tile of keys that these queries may meet, and of the one behind the last.

        With ``whole``, queries that do not exist count, too.
        """
        return self._range(m0, Edge(self.spec.rows, rows), self.key_tiles, whole=whole)

    def _range(self, start: str, own: Edge, other: Edge, *, keys: bool = False, whole: bool = False) -> tuple[str, str]:
        """Returns `keys_range`'s of the other side's tiles for a tile of queries; or of ``keys``, for queries."""
        end = _end(start, Edge(own.total, 1 if whole else own.size), own.size)
        starts, stops, none = [], [], []
        for n, bound in enumerate(self.spec.bounds):
            most = self._most(n, start, end, keys=keys)
            step = bound.row if keys else bound.key
            if step > 0:
                starts.append(f"max(0, {self._most(n, start, end, keys=keys, sign=-1)}) / {other.size}")
            elif step < 0:
                stops.append(f"max(0, {most} + {other.size}) / {other.size}")
            else:
                none.append(f"{most} < 0")
        if not self.listed:
            self.of_ranges(own.size, starts, stops)
        first, last = "0", str(other.tiles)
        if self.spec.parts > 1 and not self.divides_data:
            each = -(-other.tiles // self.spec.parts)
            starts.append(f"int(b0) * {each}")
            stops.append(f"int(b0) * {each} + {each}")
        for text in starts:
            first = f"max({first}, {text})" if first != "0" else text
        for text in stops:
            last = f"min({last}, {text})"
        return first, f"{' || '.join(none)} ? 0 : {last}" if none else last

    def _most(self, number: int, start: str, end: str, *, keys: bool = False, sign: int = 1) -> str:
        """Returns a bound's largest row * i + start for queries i, or key * j + start; sign -1: its negative."""
        bound = self.spec.bounds[number]
        terms, constant = self._start(number, bound)
        step = bound.key if keys else bound.row
        if step:
            terms = [(f"({end})" if step > 0 and end != start else start, step), *terms]
        return linear([(text, sign * step) for text, step in terms], sign * constant)

    def ranges(self, chosen: Sequence[int] | None = None) -> Ranges:
        """Returns what writes the extents of some of the ranges, or of all."""
        every = range(len(self.spec.ranges))
        return Ranges(self.w, self.spec, self.batch, self.edge.pointers.loads, every if chosen is None else chosen)

    def of_ranges(self, rows: int, starts: list[str], stops: list[str]) -> None:
        """Adds the first tiles of keys that ranges let queries meet to ``starts``, and those behind to ``stops``."""
        intervals = Ranges.intervals(self.spec)
        if not intervals:
            return
        ranges = self.ranges(intervals)
        ranges.tile("m0", rows)
        for n in intervals:
            (starts if self.spec.ranges[n].key > 0 else stops).append(ranges.end(n, self.keys))

    @property
    def step(self) -> int:
        """What a span's first key is a multiple of: pages and parts hold whole tiles, and programs read vectors."""
        spec = self.spec
        if spec.pages is not None or spec.parts > 1:
            return self.keys
        vectors = spec.weight is not None or spec.q.dtype.itemsize == 1
        return VECTOR if vectors or any(any(op.strides[-1:]) for op in spec.loads) else 1

    def span(self, m0: str, rows: int, *, some: bool) -> None:
        """Writes ``base`` and ``tiles``, which say what keys the queries m0 to m0 + rows - 1 may meet.

        ``base`` is the first such key, or one before it; ``tiles`` counts the tiles of keys from there on, with
        ``some`` at least one.
        """
        w, spec, keys = self.w, self.spec, self.keys
        ranges = self.ranges()
        ranges.tile(m0, rows)
        w.line(f"int low = 0, high = {spec.keys};  // keys that some of the queries may meet")
        end = _end(m0, Edge(spec.rows, rows), rows)
        for n, bound in enumerate(spec.bounds):
            self._limit(bound.key, f"int64({self._most(n, m0, end)})", "low", "high")
        for n, bound in enumerate(spec.ranges):
            self._limit(bound.key, ranges.sum(n, keys=False), "low", "high")
        if spec.parts > 1:
            w.line(f"const int start = low / {keys} * {keys}, every = {keys * spec.parts};")
            w.line(f"const int each = (max(0, high - start) + every - 1) / every * {keys};  // keys of a part")
            w.line("low = max(low, start + int(b0) * each);")
            w.line("high = min(high, start + int(b0) * each + each);")
        base = f"low / {self.step} * {self.step}" if self.step > 1 else "low"
        w.line(f"const int base = {base}, tiles = max({'1' if some else '0'}, (high - base + {keys - 1}) / {keys});")

    def interval(self, row: str) -> None:
        """Writes ``begin[f]`` and ``end[f]``: bounds and ranges let this query meet the keys from begin to end - 1."""
        w, spec = self.w, self.spec
        ranges = self.ranges()
        w.line("begin[f] = 0;")
        w.line(f"end[f] = {spec.keys};")
        for n, bound in enumerate(spec.bounds):
            terms, constant = self._start(n, bound)
            self._limit(bound.key, f"int64({linear([(row, bound.row), *terms], constant)})", "begin[f]", "end[f]")
        for n, bound in enumerate(spec.ranges):
            self._limit(bound.key, ranges.of_row(n, row), "begin[f]", "end[f]")

    def _limit(self, key: int, rest: str, low: str, high: str, total: int = 0) -> None:
        """Writes the narrowing of an interval, of keys or ``total`` positions, to those n with key * n + rest >= 0."""
        if not key:
            self.w.line(f"if ({rest} < 0) {high} = 0;")
            return
        limit = negated(rest) if key > 0 else f"{rest} + 1".removesuffix(" - 1 + 1")
        name, which = (low, "max") if key > 0 else (high, "min")
        self.w.line(f"{name} = {which}({name}, int(min(max({limit}, int64(0)), int64({total or self.spec.keys}))));")

    def inside(self, m0: str, rows: int, n0: str, keys: int) -> str:
        """Returns the C condition that no bound is broken by so many queries from m0 on and keys from n0 on."""
        conditions = ["whole"] if self.listed else []
        m0, n0 = (text if text.isidentifier() else f"({text})" for text in (m0, n0))
        if self.ragged:
            conditions.append(f"{n0} + {keys} <= {self.spec.keys}")
        for n, bound in enumerate(self.spec.bounds):
            terms, constant = self._start(n, bound)
            constant += min(0, bound.row) * (rows - 1) + min(0, bound.key) * (keys - 1)
            conditions.append(f"{linear([(m0, bound.row), *terms, (n0, bound.key)], constant)} >= 0")
        return every(*conditions)

    def by_tile(self, unbroken: Callable[[], str], write: Callable[[bool], None]) -> None:
        """Writes the code that computes the scores of a tile, apart for tiles in which no bound and no range is broken.

        ``unbroken`` returns the C condition for this, and ``write`` is told whether it holds.
        """
        w = self.w
        if not self.differ:
            write(True)
            return
        with w.block(f"if ({unbroken()})"):
            if self.plain:
                w.line("return;  // the products are the scores")
            else:
                write(True)
                w.otherwise()
                write(False)
        if self.plain:
            write(False)


def _end(start: str, edge: Edge, count: int) -> str:
    """Returns the C expression of the last of ``count`` positions from ``start`` on, that exists."""
    return start if count == 1 else edge.held(f"{start} + {count - 1}")

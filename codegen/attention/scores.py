"""What all forms of attention share: the batch, which keys a tile of queries may meet, and the program on scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import e, log2, prod
from typing import Any

from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.computed import RowsPrologue
from codegen.attention.ranges import Ranges
from codegen.buffers import Edge, every, guard
from codegen.epilogue import Epilogue, Run
from codegen.expr import Anchor, Operand, Program, Store, literal
from codegen.iteration import (
    bounds,
    collapse,
    coordinates,
    extent,
    far,
    linear,
    long,
    negated,
    restrided,
    signed_index_type,
)
from codegen.kernel import Kernel, converted, parameter
from codegen.naming import Names, Writer
from codegen.spec import AttentionSpec, Bound, ComputedRows, KernelSource, Pages

#: More than there are queries and keys.  Bounds further away are moved to this distance: they decide the same, and what
#: is added to them still fits an int.
FAR = 1 << 30
#: More neighbours than any program reads at once.
VECTOR = 16


def all_arguments(spec: AttentionSpec, source: KernelSource) -> KernelSource:
    """Returns a kernel without the parameter for the order in which blocks count, which it does not use."""
    if spec.order is None:
        return source
    return replace(source, parameters=tuple(range(len(spec.read) + len(spec.loads) + len(spec.written))))


def merged(spec: AttentionSpec) -> AttentionSpec:
    """Returns the same spec with neighbouring batch dimensions merged where every tensor steps over them alike."""
    rank, lead = len(spec.batch), int(spec.parts > 1)  # parts stay the first dimension
    prologues = [c.program for c in spec.computed if c is not None]
    others = [p for p in (spec.weight, spec.epilogue) if p is not None]
    programs = (*prologues, spec.program, spec.inside, spec.within, *others)
    every = [op.strides for op in (*spec.arguments, *spec.written)]
    every += [x for p in programs for x in (*(op.strides for op in p.loads), *p.indices)]
    batch, over = collapse(spec.batch[lead:], [x[lead:rank] for x in every], range(rank - lead))
    batch = (*spec.batch[:lead], *batch)
    new = {x: (*x[:lead], *b, *x[rank:]) for x, b in zip(every, over)}
    nowhere = (0,) * (len(batch) + 2)

    def moved(x: Any) -> Any:
        """Returns operands, and programs without memory of their own, with the strides over the new batch."""
        if isinstance(x, Operand):
            return replace(x, strides=new[x.strides])
        if isinstance(x, Program):
            loads, indices = (new[op.strides] for op in x.loads), (new[y] for y in x.indices)
            return restrided(x, [*loads, *(nowhere for _ in x.stores), *indices])
        if isinstance(x, Pages):
            return replace(x, table=moved(x.table))
        if isinstance(x, ComputedRows):
            return replace(x, program=moved(x.program))
        return tuple(moved(y) for y in x) if isinstance(x, tuple) else x

    epilogue = spec.epilogue
    if epilogue is not None:
        stores = tuple(replace(store, operand=moved(store.operand)) for store in epilogue.stores)
        epilogue = replace(moved(epilogue), stores=stores)
    names = "q", "k", "v", "sink", "stats", "pages", "program", "inside", "within", "weight", "computed"
    values = {name: moved(getattr(spec, name)) for name in names}
    return replace(spec, batch=batch, out=moved(spec.results[0]), epilogue=epilogue, **values)


class Scores:
    """Writes what depends on the spec alone; ``keys`` is the number of keys of a tile.

    listed   the producer lists the tiles that are met, and tells of each whether no range is broken in it (``whole``).
    spanned  ranges, too, leave each query an interval of keys, known for a thread's rows (``begin`` and ``end``).

    C variables: ``b0``, ``b1``, ... coordinates of the batch; ``bound0``, ... what the numbers of a bound add up to.
    """

    def __init__(
        self, w: Writer, spec: AttentionSpec, names: Names, keys: int, *, listed: bool = False, spanned: bool = False
    ) -> None:
        self.w, self.spec, self.keys, self.listed, self.spanned = w, spec, keys, listed, spanned
        self.real = real = spec.program.real
        self.t = signed_index_type(*self._places())
        known = listed or spanned
        inner, loads = (spec.within, spec.within_loads) if known else (spec.inside, spec.inside_loads)
        self.edge, self.inner = (Epilogue(w, p, names, spec.space, real, real) for p in (spec.program, inner))
        self.inner.pointers.loads = [self.edge.pointers.loads[n] for n in loads]
        self.computed = tuple(None if c is None else RowsPrologue(w, c, names) for c in spec.computed)
        out = (*spec.batch, spec.rows, spec.width)
        self.weight, self.epilogue = (
            None if p is None else Epilogue(w, p, names, space, real, real)
            for p, space in ((spec.weight, spec.space), (spec.epilogue, out))
        )
        #: what a span's first key is a multiple of: pages and parts hold whole tiles, and programs read aligned vectors
        self.step = 1
        if spec.pages is not None or spec.parts > 1:
            self.step = keys
        elif spec.weight is not None or spec.q.dtype.itemsize == 1 or any(any(op.strides[-1:]) for op in spec.loads):
            self.step = VECTOR
        #: whether rows of tiles are keys, and columns queries
        self.turned = False
        #: what a score's program writes: C variables, and their values for keys that do not exist
        self.starts = {"score": f"-infinity<{real}>()"}
        #: the tiles of queries and of keys
        self.row_tiles, self.key_tiles = Edge(spec.rows, 1), Edge(spec.keys, keys)
        #: whether scores of keys that do not exist must be told apart
        self.ragged = self.key_tiles.ragged or spanned
        #: whether tiles differ: some may break bounds or ranges, or reach past the end
        self.differ = bool(spec.bounds) or self.ragged or known
        self.batch = [f"b{d}" if size > 1 else "0" for d, size in enumerate(spec.batch)]

    def _places(self) -> list[int]:
        """Returns how far the places of what the kernel reads and writes reach."""
        spec = self.spec
        after = () if spec.epilogue is None else spec.epilogue.loads
        scored = (*spec.program.loads, *(() if spec.weight is None else spec.weight.loads))
        queries, keys, values = (
            (*spec.batch, *size) for size in ((spec.rows, spec.depth), (spec.keys, spec.depth), (spec.keys, spec.width))
        )
        out = (*spec.batch, spec.rows, spec.width)
        spaces = [(queries, spec.q), (keys, spec.k), (values, spec.v), *((out, op) for op in (*spec.results, *after))]
        places = [extent(space, op.strides) for space, op in (*spaces, *((spec.space, op) for op in scored))]
        for rows, computed in zip((spec.rows, spec.keys, spec.keys), spec.computed):
            if computed is not None:
                space = (*spec.batch, rows, *computed.elements)
                places += [*bounds(computed.program.loads, space), *far(computed.program)]
        return [*places, *(p.blocks * p.step for p in spec.pages or ())]

    @property
    def own_tiles(self) -> Edge:
        """The tiles of rows."""
        return self.key_tiles if self.turned else self.row_tiles

    @property
    def plain(self) -> bool:
        """Whether the score where no bound is broken is the product itself."""
        return self.inner.program.stores[0].value == Anchor(0)

    def page(self, pages: Pages, table: str, number: str) -> str:
        """Returns the C expression of the block that holds a page, given by its number (a C expression of one that
        exists).
        """
        place = self.offset(pages.table, f"({number})")
        return f"min(max(int({table}[{place}]), 0), {pages.blocks - 1})"

    def offset(self, op: Operand, *place: str) -> str:
        """Returns the C expression of the offset of an element of this batch; ``place`` is its position behind the
        batch.
        """
        return linear(list(zip((*self.batch, *place), op.strides)))

    def row_terms(self, op: Operand, pages: tuple[Pages, str] | None, row: str, total: int) -> list[tuple[str, int]]:
        """Returns the terms of a row's offset.

        With pages, and the C name of their table, writes which one the row is in; rows beyond the last count as it.
        """
        terms = list(zip(self.batch, op.strides))
        if pages is None:
            return [*terms, (row, op.strides[-2])]
        size = pages[0].size
        self.w.line(f"const {self.t} known = min({row}, {self.t}({total - 1}));")
        self.w.line(f"const {self.t} page = {self.page(*pages, f'known / {size}')};")
        return [*terms, (f"(known % {size})", op.strides[-2]), ("page", pages[0].step)]

    def parameters(self) -> list[str]:
        """Returns the parameters for the tensors that the programs read."""
        first = [p for c in self.computed if c is not None for p in c.pointers.parameters()[: c.reads]]
        names = [n for e in (self.edge, self.weight, self.epilogue) if e is not None for n in e.pointers.loads]
        loads = self.spec.loads[len(first) :]
        return [*first, *(parameter(op, name) for op, name in zip(loads, names))]

    def written(self, names: Names) -> list[str]:
        """Returns the C names of what is written."""
        results = [names.unique(self.spec.out.name)] if self.epilogue is None else self.epilogue.pointers.stores
        return [*results, *([] if self.spec.stats is None else [names.unique(self.spec.stats.name)])]

    def unit(self) -> None:
        """Writes what scores are multiplied by for exponentials to base 2."""
        real = self.spec.program.real
        self.w.line(f"const {real} unit = {literal(self.spec.scale * log2(e), real)};  // of a score, to base 2")

    def scalars(self) -> None:
        """Writes the reads of operands with one value: once, outside of all loops."""
        self.edge.scalars()
        if not self.plain:
            self.inner.scalars()
        for written in (self.weight, self.epilogue, *self.computed):
            if written is not None:
                written.scalars()

    def coordinates(self, number: str, batch: Sequence[int] | None = None) -> None:
        """Writes the coordinates of the batch, or of its first dimensions, with this number (a C expression)."""
        sizes = self.spec.batch if batch is None else batch
        coordinates(self.w, self.t, "b", number, sizes, long(sizes))

    def bound_numbers(self) -> None:
        """Writes the parts of bounds that are read from tensors of the batch."""
        spec = self.spec
        for n, bound in enumerate(spec.bounds):
            if bound.loads:
                terms = []
                for load, coefficient in bound.loads:
                    operand = spec.program.loads[load]
                    place = f"{self.edge.pointers.loads[load]}[{self.offset(operand)}]"
                    terms.append((f"int64({place})", coefficient))
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
        if self.spec.parts > 1:
            part, each = "b0" if self.t == "int32" else "int(b0)", -(-other.tiles // self.spec.parts)
            starts.append(f"{part} * {each}")
            stops.append(f"{part} * {each} + {each}")
        for text in starts:
            first = f"max({first}, {text})" if first != "0" else text
        for text in stops:
            last = f"min({last}, {text})"
        return first, f"{' || '.join(none)} ? 0 : {last}" if none else last

    def _most(self, number: int, start: str, end: str, *, keys: bool = False, sign: int = 1) -> str:
        """Returns the C expression of the largest value of row * i + start of a bound, for queries i from ``start`` to
        ``end``; or of key * j + start, for ``keys``.  With the sign -1, its negative.
        """
        bound = self.spec.bounds[number]
        terms, constant = self._start(number, bound)
        step = bound.key if keys else bound.row
        if step:
            terms = [(f"({end})" if step > 0 and end != start else start, step), *terms]
        return linear([(text, sign * step) for text, step in terms], sign * constant)

    def of_ranges(self, rows: int, starts: list[str], stops: list[str]) -> None:
        """Adds to ``starts`` the first tiles of keys that ranges let queries meet, and to ``stops`` those behind the
        last ones.
        """
        intervals = Ranges.intervals(self.spec)
        ranges = Ranges(self.w, self.spec, self.batch, self.edge.pointers.loads, intervals)
        if intervals:
            ranges.tile("m0", rows)
        for n in intervals:
            (starts if self.spec.ranges[n].key > 0 else stops).append(ranges.end(n, self.keys))

    def span(self, m0: str, rows: int, *, some: bool) -> None:
        """Writes ``base`` and ``tiles``, which say what keys the queries m0 to m0 + rows - 1 may meet.

        ``base`` is the first such key, or one before it; ``tiles`` counts the tiles of keys from there on, with
        ``some`` at least one.
        """
        w, spec, keys = self.w, self.spec, self.keys
        ranges = Ranges(w, spec, self.batch, self.edge.pointers.loads)
        ranges.tile(m0, rows)
        w.line(f"int low = 0, high = {spec.keys};  // keys that some of the queries may meet")
        end = _end(m0, Edge(spec.rows, rows), rows)
        for n, bound in enumerate(spec.bounds):
            self._limit(bound.key, f"int64({self._most(n, m0, end)})", "low", "high")
        for n, bound in enumerate(spec.ranges):
            self._limit(bound.key, ranges.sum(n, keys=False), "low", "high")
        if spec.parts > 1:
            each = -(-spec.keys // (keys * spec.parts)) * keys
            part = "b0" if self.t == "int32" else "int(b0)"
            w.line(f"low = max(low, {part} * {each});")
            w.line(f"high = min(high, {part} * {each} + {each});")
        base = f"low / {self.step} * {self.step}" if self.step > 1 else "low"
        w.line(f"const int base = {base}, tiles = max({'1' if some else '0'}, (high - base + {keys - 1}) / {keys});")

    def interval(self, row: str) -> None:
        """Writes ``begin[f]`` and ``end[f]``: bounds and ranges let this query meet the keys from begin to end - 1."""
        w, spec = self.w, self.spec
        every = Ranges(w, spec, self.batch, self.edge.pointers.loads)
        w.line("begin[f] = 0;")
        w.line(f"end[f] = {spec.keys};")
        for n, bound in enumerate(spec.bounds):
            terms, constant = self._start(n, bound)
            self._limit(bound.key, f"int64({linear([(row, bound.row), *terms], constant)})", "begin[f]", "end[f]")
        for n, bound in enumerate(spec.ranges):
            self._limit(bound.key, every.of_row(n, row), "begin[f]", "end[f]")

    def _limit(self, key: int, rest: str, low: str, high: str) -> None:
        """Writes the narrowing of an interval of keys to those n for which key * n + rest, a C expression, is not
        negative.
        """
        if not key:
            self.w.line(f"if ({rest} < 0) {high} = 0;")
            return
        limit = negated(rest) if key > 0 else f"{rest} + 1".removesuffix(" - 1 + 1")
        name, which = (low, "max") if key > 0 else (high, "min")
        self.w.line(f"{name} = {which}({name}, int(min(max({limit}, int64(0)), int64({self.spec.keys}))));")

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

    def existing(self, columns: Edge) -> str:
        """Returns the C condition that the element (m, n) of a tile's rows exists, empty if all do."""
        return every(self.own_tiles.inside("m"), columns.inside("n"))

    def store_sums(self, name: str, op: Operand, first: str, columns: Edge, value: Callable[[str], str]) -> None:
        """Stores a tile from fragments whose rows begin at the C variable ``first``, two neighbours at a time where
        they are one access.

        ``value`` returns the C expression of a thread's i-th element.
        """
        w = self.w
        pairs = op.strides[-1] == 1 and columns.total % 2 == 0 and op.alignment % (2 * op.dtype.itemsize) == 0
        pairs = pairs and not any(x % 2 for x in op.strides[:-1])
        with w.unrolled(f"for (int i = 0; i < {columns.size // 2}; i += {1 + pairs})"):
            last = "" if pairs else " + i % 2"
            w.line(f"const {self.t} m = {first} + row + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2{last};")
            place, condition = self.offset(op, "m", "n"), guard(self.existing(columns))
            if pairs:
                w.line(f"Vector<{op.dtype.ctype}, 2> v;")
                w.line(f"v[0] = {stored(op, value('i'), 'float')};")
                w.line(f"v[1] = {stored(op, value('i + 1'), 'float')};")
                w.line(f"{condition}store({name} + {place}, v);")
            else:
                w.line(f"{condition}{name}[{place}] = {stored(op, value('i'), 'float')};")

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

    def score(self, row: str, col: str, product: str, *, inside: bool, count: int = 2) -> None:
        """Writes the score, and its slope if it has one, of ``count`` neighbours in a tile's row, from (row, col) on.

        ``product`` is the C expression of the e-th product.  Keys that do not exist have minus infinity.
        """
        epilogue = self.inner if inside or self.spanned else self.edge
        guarded = not inside and self.ragged
        if self.spanned:  # keys that do not exist are behind the last that a query meets
            guarded &= any(op.strides[-1] for op in epilogue.program.loads)
        self.evaluate(epilogue, self.starts, row, col, product, guarded=guarded, count=count)
        if self.spanned and not inside:
            with self.w.unrolled(f"for (int e = 0; e < {count}; ++e)"):
                self.w.line(f"score[e] = begin[f] <= {col} + e && {col} + e < end[f] ? score[e] : -infinity<float>();")

    def weigh(self, row: str, col: str, value: str, *, count: int = 2) -> None:
        """Writes ``weighted``, what becomes of exponentials, probabilities or products with the loss: see `score`."""
        assert self.weight is not None
        # Exponentials of keys that do not exist are 0, and so is what is linear in them.
        guarded = self.ragged and any(op.strides[-1] for op in self.weight.program.loads)
        self.evaluate(self.weight, {"weighted": ""}, row, col, value, guarded=guarded, count=count)

    def _held(self, position: str, edge: Edge) -> str:
        """Returns the C expression of a position that exists."""
        return f"min({position}, {self.t}({edge.total - 1}))" if edge.ragged else position

    def evaluate(
        self,
        epilogue: Epilogue,
        starts: Mapping[str, str],
        row: str,
        col: str,
        value: str,
        *,
        guarded: bool,
        count: int,
    ) -> None:
        """Writes a program on ``count`` neighbours in a tile's row, which are queries if rows are keys.

        ``starts`` are the C variables of its results, and their values for keys that do not exist, if those are
        ``guarded``.
        """
        w, rows, keys = self.w, self.row_tiles, self.key_tiles
        of_rows, of_keys = (any(op.strides[axis] for op in epilogue.program.loads) for axis in (-2, -1))
        m, n = (col, row) if self.turned else (row, col)
        missing = (lambda e: f"{n} + {e} >= {keys.total}") if guarded else None
        clamped, place = None, [m, n]
        if self.turned and of_keys:
            place[1] = self._held(n, keys)
        if self.turned and of_rows and rows.ragged and count > 1:
            missing, clamped = (lambda e: f"{m} + {e} >= {rows.total}"), self._held(f"{m} + e", rows)
        elif of_rows:
            place[0] = self._held(m, rows)
        if count == 1:
            every = (f"{name}[1] = {{{start if guarded else ''}}}" for name, start in starts.items())
            w.line(f"{self.real} {', '.join(every)};")
        else:
            for name, start in starts.items():
                begin = f" = {{{{{', '.join([start] * count)}}}}}" if start else " = {}"
                w.line(f"Vector<{self.real}, {count}> {name}{begin if guarded else ''};")
        run = Run(count, len(self.batch) + (not self.turned), "e", missing, clamped)
        with w.block(f"if ({n} < {keys.total})", when=guarded and count == 1):
            epilogue.results([*self.batch, *place], [value], run, staged=list(starts))


def _end(start: str, edge: Edge, count: int) -> str:
    """Returns the C expression of the last of ``count`` positions from ``start`` on, that exists."""
    return start if count == 1 else edge.held(f"{start} + {count - 1}")


def stored(op: Operand, text: str, real: str) -> str:
    """Returns the C expression of a value in the dtype in which it is stored."""
    return text if op.dtype.ctype == real else f"convert<{op.dtype.ctype}>({text})"


def argument_names(spec: AttentionSpec, names: Names) -> list[str]:
    """Returns the C names of a spec's arguments, "" for those that are computed."""
    return [names.unique(op.name) if n in spec.read else "" for n, op in enumerate(spec.arguments)]


def signature(
    k: Kernel,
    spec: AttentionSpec | AttentionBackwardSpec,
    scores: Scores,
    arguments: Sequence[str],
    written: Sequence[str],
) -> None:
    """Adds a kernel's parameters, given the C names of its arguments, "" for those that are computed, and results."""
    k.parameters += [parameter(op, name) for op, name in zip(spec.arguments, arguments) if name]
    k.parameters += scores.parameters()
    k.parameters += [parameter(op, name, written=True) for op, name in zip(spec.written, written)]


def sink_value(w: Writer, spec: AttentionSpec, name: str, batch: Sequence[str], real: str) -> str:
    """Writes the score of the sink, in the unit of the other scores; returns its C name."""
    assert spec.sink is not None
    value = converted(spec.sink, f"{name}[{linear(list(zip(batch, spec.sink.strides)))}]", real)
    inverse = literal(1 / spec.scale, real)
    w.line(f"const {real} sunk = {value}{'' if spec.scale == 1 else f' * {inverse}'};")
    return "sunk"


def kernel_details(spec: AttentionSpec) -> list[str]:
    """Returns lines of the kernel's heading."""
    batch = prod(spec.batch)
    sizes = f"{f'{batch} x ' if batch > 1 else ''}{spec.rows} queries and {spec.keys} keys of {spec.depth} elements"
    return [f"{sizes}, values of {spec.width}, {spec.q.dtype.name}"]


def approximated(spec: AttentionSpec) -> Program:
    """Returns the program as the heading of a kernel sees it: stored in the dtype of the result."""
    stores = tuple(Store(op, spec.program.stores[0].value) for op in spec.results)
    exact = spec.program.exact or spec.stats is not None
    return replace(spec.program, stores=stores, exact=exact)

"""What all forms of attention share: the batch, which keys a tile of queries may meet, and the program on scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import e, log2, prod
from typing import Any

from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.computed import RowsPrologue
from codegen.attention.masks import Masks
from codegen.attention.spec import AttentionSpec, ComputedRows, Pages
from codegen.buffers import Edge, every, guard
from codegen.epilogue import Epilogue, Run
from codegen.expr import Operand, Program, Store, literal
from codegen.iteration import bounds, collapse, coordinates, extent, far, long, signed_index_type
from codegen.kernel import Kernel, converted, parameter
from codegen.naming import Names
from codegen.records import once
from codegen.spec import KernelSource


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

    def moved(x: Any) -> Any:
        """Returns operands, and programs that store nothing in memory, with the strides over the new batch."""
        if isinstance(x, Operand):
            return replace(x, strides=new[x.strides])
        if isinstance(x, Program):
            loads = tuple(replace(op, strides=new[op.strides]) for op in x.loads)
            return replace(x, loads=loads, indices=tuple(new[y] for y in x.indices))
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


class Scores(Masks):
    """Writes what depends on the spec alone; ``keys`` is the number of keys of a tile.

    listed   the producer lists the tiles that are met, and tells of each whether no range is broken in it (``whole``).
    spanned  ranges, too, leave each query an interval of keys, known for a thread's rows (``begin`` and ``end``).

    C variables: ``b0``, ``b1``, ... coordinates of the batch; ``bound0``, ... what the numbers of a bound add up to.
    """

    def __init__(
        self, w: Kernel, spec: AttentionSpec, keys: int, *, listed: bool = False, spanned: bool = False
    ) -> None:
        super().__init__(w, spec, keys, listed=listed, spanned=spanned)
        #: what the kernel is for
        self.whole: AttentionSpec | AttentionBackwardSpec = spec
        self.computed = tuple(None if c is None else RowsPrologue(w, c, w.names) for c in spec.computed)
        self.weight, self.epilogue = (
            None if p is None else Epilogue(w, p, w.names, space, self.real, self.real)
            for p, space in ((spec.weight, spec.space), (spec.epilogue, (*spec.batch, spec.rows, spec.width)))
        )
        #: whether rows of tiles are keys, and columns queries
        self.turned = False
        #: what a score's program writes: C variables, and their values for keys that do not exist
        self.starts = {"score": f"-infinity<{self.real}>()"}

    @once
    def t(self) -> str:
        """The C type of places."""
        return signed_index_type(*self._places())

    def _places(self) -> list[int]:
        """Returns how far the places of what the kernel reads and writes reach."""
        spec = self.spec
        after = () if spec.epilogue is None else spec.epilogue.loads
        scored = (*spec.program.loads, *(() if spec.weight is None else spec.weight.loads))
        sizes = (spec.rows, spec.depth), (spec.keys, spec.depth), (spec.keys, spec.width), (spec.rows, spec.width)
        queries, keys, values, out = ((*spec.batch, *size) for size in sizes)
        spaces = [(queries, spec.q), (keys, spec.k), (values, spec.v), *((out, op) for op in (*spec.results, *after))]
        places = [extent(space, op.strides) for space, op in (*spaces, *((spec.space, op) for op in scored))]
        for rows, computed in zip((spec.rows, spec.keys, spec.keys), spec.computed):
            if computed is not None:
                space = (*spec.batch, rows, *computed.elements)
                places += [*bounds(computed.program.loads, space), *far(computed.program)]
        return [*places, *(p.blocks * p.step for p in spec.pages or ())]

    @property
    def sides(self) -> tuple[Edge, Edge]:
        """The tiles of rows and those of columns."""
        return (self.key_tiles, self.row_tiles) if self.turned else (self.row_tiles, self.key_tiles)

    def page(self, pages: Pages, table: str, number: str) -> str:
        """Returns the C expression of the block that holds a page, given that of the number of one that exists."""
        place = self.offset(pages.table, f"({number})")
        return f"min(max(int({table}[{place}]), 0), {pages.blocks - 1})"

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

    def written(self) -> list[str]:
        """Returns the C names of what is written."""
        names = self.w.names
        results = [names.unique(self.spec.out.name)] if self.epilogue is None else self.epilogue.pointers.stores
        return [*results, *([] if self.spec.stats is None else [names.unique(self.spec.stats.name)])]

    def complete(
        self,
        arguments: Sequence[str],
        written: Sequence[str],
        detail: str,
        *,
        tiles: int,
        threads: int,
        cluster: int = 1,
    ) -> KernelSource:
        """Returns the kernel, with so many blocks for each batch, given the C names of its arguments, empty for those
        that are computed, and of what it writes, without the order in which blocks count.
        """
        k, spec, blocks = self.w, self.whole, tiles * prod(self.whole.batch)
        k.parameters += [parameter(op, name) for op, name in zip(spec.arguments, arguments) if name]
        k.parameters += self.parameters()
        k.parameters += [parameter(op, name, written=True) for op, name in zip(spec.written, written)]
        program = approximated(spec) if isinstance(spec, AttentionSpec) else spec.program
        details, numbers = (kernel_detail(self.spec), detail), range(len(k.parameters))
        return k.source(
            program, details, blocks=blocks, threads=threads, barriers=True, arguments=numbers, cluster=cluster
        )

    def sunk(self, name: str) -> None:
        """Writes the score of the sink, which is called ``name``, in the unit of the other scores: ``sunk``."""
        sink, real = self.spec.sink, self.real
        assert sink is not None
        value = converted(sink, f"{name}[{self.offset(sink)}]", real)
        inverse = "" if self.spec.scale == 1 else f" * {literal(1 / self.spec.scale, real)}"
        self.w.line(f"const {real} sunk = {value}{inverse};")

    def unit(self) -> None:
        """Writes what scores are multiplied by for exponentials to base 2."""
        value = literal(self.spec.scale * log2(e), self.real)
        self.w.line(f"const {self.real} unit = {value};  // of a score, to base 2")

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

    def existing(self, columns: Edge) -> str:
        """Returns the C condition that the element (m, n) of a tile's rows exists, empty if all do."""
        return every(self.sides[0].inside("m"), columns.inside("n"))

    @contextmanager
    def neighbours(self, place: str, step: int = 4) -> Iterator[None]:
        """Writes a loop over a thread's elements of a tile, two neighbours at a time, with a place unless it is ""."""
        count = self.sides[1].size // 2
        with self.w.unrolled(f"for (int j = 0; j < {count}; j += {step})", "for (int f = 0; f < 2; ++f)"):
            if place:
                self.w.line(f"const {self.t} {place};")
            yield

    def keep(self, array: str, vector: str, first: str = "j + f * 2") -> None:
        """Writes a vector of two to an array, the first of them at an index."""
        self.w.line(f"{array}[{first}] = {vector}[0];")
        self.w.line(f"{array}[{first} + 1] = {vector}[1];")

    def store_sums(
        self, name: str, op: Operand, first: str, columns: Edge, value: Callable[[str], str], tile: str = ""
    ) -> None:
        """Stores a tile from fragments whose rows begin at the C variable ``first``, two neighbours at a time where
        they are one access.

        ``value`` returns the C expression of a thread's i-th element; ``tile`` is the number of the tile of columns, if
        it is not the only one.
        """
        w = self.w
        start = f"{tile} * {columns.size} + " if tile else ""
        pairs = not tile and op.strides[-1] == 1 and op.alignment % (2 * op.dtype.itemsize) == 0
        pairs = pairs and not any(x % 2 for x in (columns.total, *op.strides[:-1]))
        with w.unrolled(f"for (int i = 0; i < {columns.size // 2}; i += {1 + pairs})"):
            last = "" if pairs else " + i % 2"
            w.line(f"const {self.t} m = {first} + row + i / 2 % 2 * 8, n = {start}i / 4 * 8 + lane % 4 * 2{last};")
            place, condition = self.offset(op, "m", "n"), guard(self.existing(columns))
            if pairs:
                w.line(f"Vector<{op.dtype.ctype}, 2> v;")
                w.line(f"v[0] = {stored(op, value('i'), 'float')};")
                w.line(f"v[1] = {stored(op, value('i + 1'), 'float')};")
                w.line(f"{condition}store({name} + {place}, v);")
            else:
                w.line(f"{condition}{name}[{place}] = {stored(op, value('i'), 'float')};")

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
        """Returns the C expression of a position, or of the last one, if it does not exist."""
        return f"min({position}, {self.t}({edge.total - 1}))"

    def evaluate(
        self, epilogue: Epilogue, starts: dict[str, str], row: str, col: str, value: str, *, guarded: bool, count: int
    ) -> None:
        """Writes a program on ``count`` neighbours in a tile's row, which are queries if rows are keys.

        ``starts`` are the C variables of its results, and their values for keys that do not exist, if those are
        ``guarded``.
        """
        w, rows, keys = self.w, self.row_tiles, self.key_tiles
        of_rows, of_keys = (
            edge.ragged and any(op.strides[axis] for op in epilogue.program.loads)
            for axis, edge in ((-2, rows), (-1, keys))
        )
        m, n = (col, row) if self.turned else (row, col)
        missing = (lambda e: f"{n} + {e} >= {keys.total}") if guarded else None
        clamped, place = None, [m, n]
        if self.turned and of_keys:
            place[1] = self._held(n, keys)
        if self.turned and of_rows and count > 1:
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


def stored(op: Operand, text: str, real: str) -> str:
    """Returns the C expression of a value in the dtype in which it is stored."""
    return text if op.dtype.ctype == real else f"convert<{op.dtype.ctype}>({text})"


def argument_names(spec: AttentionSpec, names: Names) -> list[str]:
    """Returns the C names of a spec's arguments, "" for those that are computed."""
    return [names.unique(op.name) if n in spec.read else "" for n, op in enumerate(spec.arguments)]


def kernel_detail(spec: AttentionSpec) -> str:
    """Returns a line of the kernel's heading."""
    batch = prod(spec.batch)
    sizes = f"{f'{batch} x ' if batch > 1 else ''}{spec.rows} queries and {spec.keys} keys of {spec.depth} elements"
    return f"{sizes}, values of {spec.width}, {spec.q.dtype.name}"


def approximated(spec: AttentionSpec) -> Program:
    """Returns the program as the heading of a kernel sees it: stored in the dtype of the result."""
    stores = tuple(Store(op, spec.program.stores[0].value) for op in spec.results)
    exact = spec.program.exact or spec.stats is not None
    return replace(spec.program, stores=stores, exact=exact)

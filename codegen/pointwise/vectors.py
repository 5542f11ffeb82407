"""Pointwise kernels that walk memory in one order: every thread handles vectors of neighbouring elements.

flat    a thread's vectors are a block's width apart along the merged space;
rows    when an operand repeats along the second-fastest dimension (a bias), a thread takes the same columns of
        several rows, so that the operand stays in registers;
cycles  the same where rows are no whole number of vectors: the vectors of a thread are a multiple of
        lcm(columns, vector) elements apart, after which columns and alignment repeat.

A vector that starts in one row may end in the next.  It has ``left`` elements in the first; as a row is no shorter
than a vector, its last element is in the second row if any is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from codegen.buffers import Edge
from codegen.declined import Declined
from codegen.expr import TableRead
from codegen.iteration import Coordinates, Point, linear
from codegen.kernel import block_number, thread_number
from codegen.l2_policy import streams
from codegen.naming import Writer
from codegen.pointwise.body import Body, Position, kept_type, packs, plus, read, vector_type
from codegen.pointwise.schedule import THREADS, PointwiseSchedule, access, cycle, normalize, repeats
from codegen.pointwise.tables import ahead
from codegen.sizes import Size
from codegen.spec import KernelSource, PointwiseSpec

#: Bytes of registers for what a thread reads of tables before it computes.
MOST_STAGED = 128


class _Place:
    """Where a vector is, given the C variable that holds the position of its first element, or that element."""

    def __init__(
        self, w: Writer, shape: tuple[int, ...], s: PointwiseSchedule, variable: str = "i", point: Point | None = None
    ) -> None:
        self._w, self._shape, self._s, self.variable = w, shape, s, variable
        self._first = Coordinates(w, variable, shape, s.itype, variable)
        self.offset = self._first.offset if point is None else point.offset
        self._last: Coordinates | None = None
        self._left = False
        #: whether some of the vector's elements may be past the end
        self.ragged = prod(shape) % s.vector != 0

    def left(self) -> str:
        """Returns the C expression of how many of the vector's elements are in its first row."""
        name = "left" if self.variable == "i" else f"{self.variable}_left"
        if not self._left:
            self._w.line(f"const {self._s.itype} {name} = {self._shape[-1]} - {self._first[len(self._shape) - 1]};")
            self._left = True
        return name

    def second(self, strides: tuple[int, ...]) -> str:
        """Returns the offset in the second row of the (perhaps negative) column that element 0 would have there."""
        terms = []
        if any(strides[:-1]):
            if self._last is None:
                ahead = f"{self.variable} + {self._s.vector - 1}"
                end = f"{ahead} < size ? {ahead} : size - 1" if self.ragged else ahead
                self._w.line(f"const {self._s.itype} last = {end};")
                self._last = Coordinates(self._w, "last", self._shape, self._s.itype, "last")
            terms = self._last.terms(strides[:-1])
        if not strides[-1]:
            return linear(terms)
        col = self._first[len(self._shape) - 1]
        return linear([*terms, (col, strides[-1])], -self._shape[-1] * strides[-1])

    def each(self, strides: tuple[int, ...], kind: str) -> str:
        """Returns the C expression of the offset of element ``e``, for all kinds of access but "element"."""
        if kind == "uniform":
            return self.offset(strides)
        step = linear([("e", strides[-1])]) if strides[-1] else ""
        if kind in ("strided", "vector"):
            return " + ".join(t for t in (self.offset(strides), step) if t not in ("", "0"))
        first, second = self.offset(strides), self.second(strides)
        chosen = f"(e < {self.left()} ? {first} : {second})"
        return f"{chosen} + {step}" if step else chosen


class VectorsRenderer:
    """Writes a kernel in the form of its schedule."""

    def __init__(self, spec: PointwiseSpec, schedule: PointwiseSchedule) -> None:
        self.schedule = schedule
        self.shape, self.program = normalize(spec)
        self.total = prod(self.shape)
        self.body = Body(spec.name, self.program)
        self.w = self.body.w
        self.kinds = [access(op.strides, self.shape, schedule.vector, op) for op in self.program.loads]
        self.loads = self.body.varying_loads()
        self.ahead = ahead(self.program, self.shape, schedule.vector)
        #: whether what is read of tables stays in registers, so that all of a thread's reads are under way at once
        self.staged = schedule.unroll > 1 and 0 < self._staged_bytes() <= MOST_STAGED
        #: loads that are read once, and those of them that the L2 cache is to evict last
        self.once = streams(self.program, self.shape)
        self.evict_last = self.once if schedule.evict_last else frozenset()

    def _staged_bytes(self) -> int:
        """Returns the bytes of a thread's registers for all that it reads of tables."""
        reads = [self.program.instructions[k] for k in (*self.ahead.reads, *self.ahead.single)]
        tables = [self.program.read_by(read)[0] for read in reads if isinstance(read, TableRead)]
        return self.schedule.unroll * self.schedule.vector * sum(table.dtype.itemsize for table in tables)

    # ---- structure

    def render(self) -> KernelSource:
        """Returns the kernel.  Raises Declined for a form that rows of sizes that vary do not have."""
        s = self.schedule
        if s.form != "flat" and isinstance(self.shape[-1], Size) and (s.form == "cycles" or self.shape[-1] % s.vector):
            raise Declined(f"rows are no whole vectors of {s.vector} at all sizes")
        dims = " x ".join(str(size) for size in self.shape)
        plural = "vectors" if s.unroll > 1 else "vector"
        details = [f"{dims} elements, {s.vector} a vector, {s.unroll} {plural} in flight a thread"]
        blocks = {"flat": self._flat, "rows": self._rows, "cycles": self._cycles}[s.form]()
        return self.w.source(self.program, details, blocks=blocks if self.total else 0, threads=THREADS)

    def _flat(self) -> int:
        s = self.schedule
        vectors = Edge(self.total, THREADS * s.vector * s.unroll)
        self._size(vectors)
        thread = f"{block_number(s.itype)} * {THREADS * s.unroll} + threadIdx.x"
        self._apart(thread if s.vector == 1 else f"({thread}) * {s.vector}", vectors)
        return vectors.tiles

    def _size(self, vectors: Edge) -> None:
        if vectors.ragged:
            kind = "const" if isinstance(self.total, Size) else "constexpr"
            self.w.line(f"{kind} {self.schedule.itype} size = {self.total};")

    def _apart(self, first: str, vectors: Edge, shared: _Place | None = None, once: Sequence[int] = ()) -> None:
        """Writes the program for vectors at even distances, the first of which is at ``first``."""
        w, s = self.w, self.schedule
        w.line(f"const {s.itype} {'first' if s.unroll > 1 else 'i'} = {first};")
        if s.unroll == 1 and vectors.ragged:
            w.line("if (i >= size) return;")
        self.body.scalars()
        if shared is not None:
            self._load(shared, once, one=True)
        largest = self.total - s.vector if vectors.ragged else None
        step = vectors.size // s.unroll
        self._vectors("i", f"first + u * {step}", largest, lambda: _Place(w, self.shape, s), once)

    def _rows(self) -> int:
        w, s = self.w, self.schedule
        rows, cols = self.shape[-2:]
        outer_shape = self.shape[:-2]
        vectors, groups = cols // s.vector, -(-rows // s.unroll)
        threads = prod(outer_shape) * groups * vectors
        blocks = thread_number(w, s.itype, "v", Edge(threads, THREADS))
        w.line(f"const {s.itype} col = v % {vectors}{f' * {s.vector}' if s.vector > 1 else ''};")
        last = f" % {groups}" if outer_shape else ""
        row = "row0" if s.unroll > 1 else "row"
        w.line(f"const {s.itype} {row} = v / {vectors}{last}{f' * {s.unroll}' if s.unroll > 1 else ''};")
        if outer_shape:
            w.line(f"const {s.itype} outer = v / {vectors * groups};")
        places = Coordinates(w, "outer", outer_shape, s.itype, "outer")
        outer = [places[d] for d in range(len(outer_shape))]

        def place(row: str) -> _Place:
            return _Place(w, self.shape, s, point=Point(w, s.itype, [*outer, row], [("col", "col", (cols,))]))

        self.body.scalars()
        repeated = [n for n in self.loads if self.program.loads[n].strides[-2] == 0]
        self._load(place(row), repeated, one=True)
        largest = None if rows % s.unroll == 0 else rows - 1
        self._vectors("row", "row0 + u", largest, lambda: place("row"), repeated)
        return blocks

    def _cycles(self) -> int:
        """Writes the cycles form: ``first + u * length`` has the column of ``at`` for all u; returns the blocks."""
        w, s = self.w, self.schedule
        length = cycle(self.shape, s.vector)
        vectors, cycles = length // s.vector, Edge(self.total, length * s.unroll)
        self._size(cycles)
        blocks = thread_number(w, s.itype, "v", Edge(vectors * cycles.tiles, THREADS))
        step = f" * {s.vector}" if s.vector > 1 else ""
        w.line(f"const {s.itype} at = v % {vectors}{step};  // in a cycle of columns")
        repeated = [n for n in self.loads if repeats(self.program.loads[n])]
        shared = _Place(w, (length // self.shape[-1], self.shape[-1]), s, "at")
        self._apart(f"v / {vectors} * {cycles.size} + at", cycles, shared, repeated)
        return blocks

    def _vectors(
        self, name: str, position: str, largest: int | None, place: Callable[[], _Place], once: Sequence[int] = ()
    ) -> None:
        """Writes the thread's loads but those done ``once``, then its arithmetic, one vector after the other.

        ``name`` and ``position`` are the C variable that says where a vector is, and its value; ``largest`` is its
        largest value if some of the thread's vectors may be outside the space.
        """
        s, loads = self.schedule, [n for n in self.loads if n not in once]
        if s.unroll == 1:
            only = place()
            self._load(only, loads)
            self._compute(only, once)
            return
        self._declare(loads)
        inside = "" if largest is None else "i < size" if name == "i" else f"{name} < {largest + 1}"
        whole = self.total % s.vector == 0
        at = Position(s.itype, name, position, s.unroll, inside, largest or 0, loads=bool(loads), whole=whole)
        if self.staged:
            self.body.declare_reads(self.ahead, s.vector, s.unroll)
        tables = partial(self._read_tables, once=once) if self.staged else None
        self.body.in_flight(at, place, lambda p: self._load(p, loads), lambda p: self._compute(p, once), tables)

    # ---- operands

    def _register_type(self, n: int) -> str:
        return vector_type(self.program.loads[n], self._held(n))

    def _held(self, n: int) -> int:
        """Returns how many elements of a load a thread holds for a vector."""
        vector, kind = self.schedule.vector, self.kinds[n]
        return vector // self.shape[-1] if kind == "spread" else {"uniform": 1, "pair": 2}.get(kind, vector)

    def _declare(self, loads: list[int]) -> None:
        for n in loads:
            operand, packed = self.program.loads[n], self._packs(n)
            kind = kept_type(operand, self.schedule.vector, packed) if packed else self._register_type(n)
            self.w.line(f"{kind} {self.body.register(n)}[{self.schedule.unroll}];")

    def _packs(self, n: int) -> bool:
        """Tells whether a load of an unrolled loop is kept as packed words."""
        vector = self.kinds[n] == "vector" and self.schedule.unroll > 1
        return vector and packs(self.program.loads[n], self.schedule.vector, self.total % self.schedule.vector != 0)

    def _load(self, place: _Place, loads: Sequence[int], *, one: bool = False) -> None:
        """Writes the loads of one vector of every operand; with ``one``, of a vector that all iterations share."""
        w, vector = self.w, self.schedule.vector
        at = "[u]" if self.schedule.unroll > 1 and not one else ""
        for n in loads:
            operand, pointer, kind = self.program.loads[n], self.body.pointers.loads[n], self.kinds[n]
            # In a cycle only the column counts, and all other strides of what repeats are 0.
            strides = operand.strides if place.variable == "i" else (0, operand.strides[-1])
            register = self.body.register(n)
            whole = f"{register}{at}" if at else f"const {self._register_type(n)} {register}"
            if kind == "spread":
                read(w, whole, pointer, place.offset(strides), self._held(n))
            elif kind == "vector" or vector == 1 or kind == "uniform":
                once = "_once" if n in self.once and not place.ragged else ""
                last = "load_evict_last" if n in self.evict_last and not place.ragged else f"load{once}"
                load = f"load_packed{once}" if at and self._packs(n) else last
                count = vector if kind == "vector" else 1
                read(w, whole, pointer, place.offset(strides), count, load=load, more=self._count(place))
            elif kind == "pair":
                first, second = place.offset(strides), place.second(strides)
                kind = self._register_type(n) if at else ""
                w.line(f"{whole} = {kind}{{{pointer}[{first}], {pointer}[{second}]}};")
            else:
                if not at:
                    w.line(f"{self._register_type(n)} {register};")
                self._each(place, strides, kind, f"{register}{at}[e] = {pointer}[{{}}];")

    def _count(self, place: _Place) -> str:
        return f", size - {place.variable}" if place.ragged else ""

    def _each(self, place: _Place, strides: tuple[int, ...], kind: str, line: str) -> None:
        """Writes a loop over a vector's elements with one access each: ``line``, with the offset in place of ``{}``."""
        w, s = self.w, self.schedule
        guard = f"if ({place.variable} + e < size) " if place.ragged else ""
        if kind != "element":
            text = line.format(place.each(strides, kind))
            w.each_element(s.vector, f"{guard}{text}")
            return
        with w.unrolled(f"for (int e = 0; e < {s.vector}; ++e)"):
            w.line(f"const {s.itype} o = {place.variable} + e;")
            with w.guarded("o < size" if guard else ""):
                offset = Coordinates(w, "o", self.shape[-len(strides) :], s.itype, "o").offset(strides)
                w.line(line.format(offset))

    # ---- arithmetic

    def _compute(self, place: _Place, once: Sequence[int]) -> None:
        """Writes the program for one vector, and its stores; ``once`` are the loads that all iterations share."""
        w, s, program = self.w, self.schedule, self.program
        loaded, indices = self._loaded(place, once), self._indices(place)
        if s.vector == 1:
            offsets = [place.offset(store.operand.strides) for store in program.stores]
            texts = self.body.element(loaded, indices())
            for pointer, offset, text in zip(self.body.pointers.stores, offsets, texts):
                w.line(f"{pointer}[{offset}] = {text};")
            return
        if self.ahead.reads and not self.staged:
            self.body.ahead(self.ahead, s.vector, *self._first(place, loaded))
        results = self.body.elements(s.vector, loaded, indices)
        for store, name, pointer in zip(program.stores, results, self.body.pointers.stores):
            strides = store.operand.strides
            kind = access(strides, self.shape, s.vector, store.operand)
            if kind == "vector":
                w.line(f"store({plus(pointer, place.offset(strides))}, {name}{self._count(place)});")
            else:
                kind = {"scalar": "strided", "uniform": "strided", "pair": "split"}.get(kind, kind)
                self._each(place, strides, kind, f"{pointer}[{{}}] = {name}[e];")

    def _read_tables(self, place: _Place, once: Sequence[int]) -> None:
        """Writes the reads of tables for one vector."""
        loaded = self._loaded(place, once)
        each = loaded, self._indices(place)
        self.body.read_tables(self.ahead, self.schedule.vector, self._first(place, loaded), each)

    def _loaded(self, place: _Place, once: Sequence[int]) -> dict[int, str]:
        """Returns loads of element ``e`` of a vector in C; ``once`` are those that all iterations share."""
        s, loaded = self.schedule, {}
        for n in self.loads:
            at = "" if s.unroll == 1 or n in once else "[u]"
            register = f"{self.body.register(n)}{at}"
            if self.kinds[n] == "pair":
                loaded[n] = f"e < {place.left()} ? {register}[0] : {register}[1]"
            elif self.kinds[n] == "spread":
                loaded[n] = f"{register}[e / {self.shape[-1]}]"
            else:
                loaded[n] = register if s.vector == 1 or self.kinds[n] == "uniform" else f"{register}[e]"
        return loaded

    def _first(self, place: _Place, loaded: Mapping[int, str]) -> tuple[dict[int, str], list[str]]:
        """Returns what is known of a vector's first element: loads that are the same for all, and its indices."""
        same = {n: text for n, text in loaded.items() if self.kinds[n] in ("scalar", "uniform")}
        return same, [place.offset(strides) for strides in self.program.indices]

    def _indices(self, place: _Place) -> Callable[[], list[str]]:
        """Returns what writes the indices of element ``e`` of a vector; writes what is the same for all elements."""
        s, program = self.schedule, self.program
        kinds = [access(strides, self.shape, s.vector, None) for strides in program.indices]
        indices = [
            "" if kind == "element" and s.vector > 1 else self._index(place, strides, kind)
            for strides, kind in zip(program.indices, kinds)
        ]

        def own_indices() -> list[str]:
            if s.vector == 1 or "element" not in kinds:
                return indices
            self.w.line(f"const {s.itype} o = {place.variable} + e;")
            own = Coordinates(self.w, "o", self.shape, s.itype, "o")
            return [text or own.offset(strides) for text, strides in zip(indices, program.indices)]

        return own_indices

    def _index(self, place: _Place, strides: tuple[int, ...], kind: str) -> str:
        return "0" if kind == "scalar" else place.offset(strides) if kind == "element" else place.each(strides, kind)

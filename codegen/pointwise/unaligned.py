"""Pointwise kernels over rows that begin anywhere in memory.

Every row is cut into vectors that are aligned in the first output (`pointwise.alignment`).  The first and the last
vector of a row may reach over its ends.  What they read there is not used (the array's own memory, or zero outside of
it), and they write their elements one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from codegen.buffers import Edge
from codegen.iteration import Coordinates, Point, bounds, extent, far, index_type
from codegen.kernel import block_number, thread_number
from codegen.pointwise import alignment
from codegen.pointwise.body import Body, Position, plus, read, vector_type
from codegen.pointwise.schedule import ENOUGH_BLOCKS, THREADS, PointwiseSchedule, normalize
from codegen.spec import KernelSource, PointwiseSpec
from codegen.target import PORTABLE, Target

#: Most bytes of a vector and its neighbours: with more, a thread runs short of registers.
MOST_BYTES = 32
#: Fewest vectors of a row: elements of the first and the last are written one by one.
LEAST_VECTORS = 8


def unaligned_schedules(spec: PointwiseSpec, target: Target = PORTABLE) -> Iterator[PointwiseSchedule]:
    """Yields schedules of this form, best guess first.

    There are none if an operand is not contiguous along the rows, if rows or the whole space are short, or if the
    program reads tables: it runs outside of rows as well.
    """
    shape, program = normalize(spec)
    operands = [op for op in program.operands if any(op.strides)]
    sizes = [op.dtype.itemsize for op in operands]
    lead = program.stores[0].operand
    if not sizes or lead.strides[-1] != 1 or program.tables:
        return
    vector = 16 // min(sizes)
    while vector * max(sizes) > MOST_BYTES:
        vector //= 2
    enough = ENOUGH_BLOCKS * target.sms * THREADS
    while vector > 1 and (shape[-1] < LEAST_VECTORS * vector or 4 * prod(shape) < enough * vector):
        vector //= 2
    if vector == 1 or vector * min(sizes) < alignment.LEAST:
        return
    loads = [alignment.access(op, lead, vector) for op in program.loads]
    if None in loads or not all(
        store.operand is lead or alignment.congruent(store.operand, lead, vector) for store in program.stores
    ):
        return
    unroll = 1 if vector * max(sizes) >= 16 else 4
    while unroll > 1 and prod(shape) < enough * vector * unroll:
        unroll //= 2
    best = PointwiseSchedule(vector, unroll, "unaligned", index_type(*bounds(program.operands, shape), *far(program)))
    yield best
    yield replace(best, unroll=2)
    if vector > 2 and vector // 2 * min(sizes) >= alignment.LEAST:
        yield replace(best, vector=vector // 2)
        yield replace(best, vector=vector // 2, unroll=2)


class UnalignedRenderer:
    """Writes a kernel whose rows begin anywhere."""

    def __init__(self, spec: PointwiseSpec, schedule: PointwiseSchedule) -> None:
        self.s = schedule
        self.shape, self.program = normalize(spec)
        self.body = Body(spec.name, self.program)
        self.w = self.body.w
        self.lead = self.program.stores[0].operand
        self.loads = self.body.varying_loads()
        self.kinds = {n: alignment.access(self.program.loads[n], self.lead, schedule.vector) for n in self.loads}
        self.skewed = alignment.is_skewed(self.lead, schedule.vector)
        #: element ``e`` of the vector that has been placed
        self._element: Point
        #: whether all vectors are inside of their rows
        self.whole = not self.skewed and self.shape[-1] % schedule.vector == 0
        over = alignment.period(self.lead, schedule.vector) - 1 if self.skewed else 0
        self.vectors = -(-(self.shape[-1] + over) // schedule.vector)  # of a row
        self.words = {
            n: self.body.names.unique(self.program.loads[n].name, "_w" if kind == "unaligned" else "_v")
            for n, kind in self.kinds.items()
        }

    # ---- structure

    def render(self) -> KernelSource:
        s, w = self.s, self.w
        dims = " x ".join(str(size) for size in self.shape)
        plural = "vectors" if s.unroll > 1 else "vector"
        details = [
            f"{dims} elements, {s.vector} a vector, {s.unroll} {plural} in flight a thread",
            f"rows begin anywhere: vectors are aligned in {self.lead.name}",
        ]
        total = prod(self.shape[:-1]) * self.vectors
        vectors = Edge(total, THREADS * s.unroll)
        if s.unroll == 1:
            thread_number(w, s.itype, "v", vectors)
            self.body.scalars()
            place = self._place()
            self._load(place)
            self._compute(place)
        else:
            w.line(f"const {s.itype} first = {block_number(s.itype)} * {vectors.size} + threadIdx.x;")
            self.body.scalars()
            for n in self.loads:
                w.line(f"{self._type(n)} {self.words[n]}[{s.unroll}];")
            at = Position(s.itype, "v", f"first + u * {THREADS}", s.unroll, vectors.inside("v"), total - 1)
            self.body.in_flight(at, self._place, self._load, self._compute)
        return w.source(self.program, details, blocks=vectors.tiles if prod(self.shape) else 0, threads=THREADS)

    def _place(self) -> Point:
        """Writes where vector ``v`` is: in column ``col``, which wraps around before a row, as offsets from it do."""
        s, w, outer = self.s, self.w, self.shape[:-1]
        column, coordinates = "v", Coordinates(w, "row", outer, s.itype, "row")
        if outer:
            w.line(f"const {s.itype} row = v / {self.vectors};")
            column = f"v % {self.vectors}"
        rows = [coordinates[d] for d in range(len(outer))]
        place, self._element = (Point(w, s.itype, rows, [(at, at, self.shape[-1:])]) for at in ("col", "col + e"))
        if self.skewed:
            text = alignment.skew(self.lead, self.body.pointers.stores[0], place, s.vector)
            w.line(f"const {s.itype} skew = {text};  // elements of the row's first vector before the row")
        w.line(f"const {s.itype} col = {column} * {s.vector}{' - skew' if self.skewed else ''};")
        return place

    # ---- operands

    def _type(self, n: int) -> str:
        """Returns the C type of the registers that a load fills."""
        operand, kind, vector = self.program.loads[n], self.kinds[n], self.s.vector
        if kind == "unaligned":
            return f"Unaligned<{operand.dtype.ctype}, {vector}>"
        if kind == "vector" and not self.whole:
            return f"Packed<{operand.dtype.ctype}, {vector}>"
        return vector_type(operand, vector if kind == "vector" else 1)

    def _load(self, place: Point) -> None:
        w, s = self.w, self.s
        for n in self.loads:
            operand, pointer, kind = self.program.loads[n], self.body.pointers.loads[n], self.kinds[n]
            target = f"{self.words[n]}[u]" if s.unroll > 1 else f"const {self._type(n)} {self.words[n]}"
            at = place.offset(operand.strides)
            if kind == "uniform":
                w.line(f"{target} = {pointer}[{alignment.row(place, operand)}];")
            elif kind == "vector" and self.whole:
                read(w, target, pointer, at, s.vector)
            else:
                load = "load_unaligned" if kind == "unaligned" else "load_within"
                w.line(f"{target} = {load}<{s.vector}>({pointer}, {at}, {extent(self.shape, operand.strides)});")

    # ---- arithmetic

    def _compute(self, place: Point) -> None:
        """Writes the program for one vector, and its stores."""
        w, s, program = self.w, self.s, self.program
        loaded = {}
        for n in self.loads:
            name, kind = f"{self.words[n]}{'[u]' if s.unroll > 1 else ''}", self.kinds[n]
            if kind == "unaligned":
                elements = self.body.register(n)
                w.line(f"const {vector_type(program.loads[n], s.vector)} {elements} = {name}.elements();")
                name = elements
            loaded[n] = name if kind == "uniform" else f"{name}[e]"
        results = self.body.elements(s.vector, loaded, lambda: [*map(self._element.offset, program.indices)])
        for store, name, pointer in zip(program.stores, results, self.body.pointers.stores):
            strides = store.operand.strides
            if self.whole:
                w.line(f"store({plus(pointer, place.offset(strides))}, {name});")
            else:
                row = plus(pointer, alignment.row(place, store.operand))
                w.line(f"store_within({row}, col, {self.shape[-1]}, {name});")

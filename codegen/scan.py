"""The scan family: running sums, products or extremes along one dimension, with pointwise work before and after.

The threads of a row are neighbours: each adds up a vector of it, then they add what comes before their vectors, tile
after tile.  Where neighbours in memory belong to different rows, each row has one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from codegen.buffers import Buffer, Edge
from codegen.expr import Emitter, Index, Load, Program, Reduced, Result, Value
from codegen.family import Family, Form, Schedule
from codegen.iteration import Coordinates, aligned, bounds, index_type, merge_outer, widest_vector
from codegen.kernel import Kernel, Pointers, converted, row_number, thread_number
from codegen.pointwise.body import read, registers, write
from codegen.spec import KernelSource, KernelSpec
from codegen.target import Target

#: Threads of a block, and most threads of a row.
THREADS = 256


@dataclass(frozen=True)
class ScanSpec(KernelSpec):
    """A program with a running sum along a dimension, its only reduction: each sum includes its own element.

    outer, length  sizes of the other dimensions, and of this one, which is the last of the program's space.
    reverse        whether elements are added up from the last one on.
    """

    outer: tuple[int, ...]
    length: int
    program: Program
    reverse: bool = False


@dataclass(frozen=True)
class ScanSchedule(Schedule):
    """How a scan is mapped to threads.

    vector  neighbouring elements of a row that a thread adds up by itself.
    lanes   threads of a row, a power of two; 1: each row has one thread.
    itype   C type of positions and offsets.
    """

    vector: int
    lanes: int
    itype: str

    @property
    def rows(self) -> int:
        """Rows of a block: one where its threads are those of several warps."""
        return 1 if self.lanes > 32 else THREADS // self.lanes


def normalize(spec: ScanSpec) -> ScanSpec:
    """Returns the spec with neighbouring outer dimensions merged, in memory order."""
    outer, program, _ = merge_outer(spec.program, spec.outer)
    return replace(spec, outer=outer, program=program)


def _vector(spec: ScanSpec) -> int:
    """Returns the widest vector of neighbours along a row that suits all operands that are contiguous there."""
    contiguous = [op for op in spec.program.operands if op.strides[-1] == 1]
    most = 16 // min((op.dtype.itemsize for op in contiguous), default=16)
    n = len(spec.outer)
    return widest_vector(most, lambda v: spec.length % v == 0 and all(aligned(op, v, n) for op in contiguous))


def schedules(spec: ScanSpec, target: Target) -> Iterator[ScanSchedule]:
    """Yields schedules worth trying, best guess first."""
    space = normalize(spec)
    itype = index_type(*bounds(space.program.operands, (*space.outer, space.length)))
    along = sum(op.dtype.itemsize for op in space.program.operands if op.strides[-1] == 1)
    beside = sum(op.dtype.itemsize for op in space.program.operands if op.strides[-2] == 1)
    alone = ScanSchedule(1, 1, itype)
    if beside > along and prod(space.outer) >= 32:
        yield alone
        return
    vector = _vector(space)
    needed = max(1, -(-space.length // vector))
    lanes = min(THREADS, 1 << (needed - 1).bit_length())
    yield ScanSchedule(vector, lanes, itype) if lanes > 1 else alone
    if lanes > 32:
        yield ScanSchedule(vector, 32, itype)


class _Renderer:
    def __init__(self, spec: ScanSpec, schedule: ScanSchedule) -> None:
        self.spec, self.s = normalize(spec), schedule
        self.program = self.spec.program
        (self.sum,) = self.program.reductions
        self.w = Kernel(spec.name)
        self.names = self.w.names
        self.pointers = Pointers(self.program, self.names)
        self.emitter = Emitter(self.program, self.names)
        self.terms: dict[Value, str] = {}
        self.before = self.program.needed([self.sum.value])
        self.after = self.program.needed([store.value for store in self.program.stores])
        self.rows = Edge(prod(self.spec.outer), schedule.rows)
        #: the elements of a row in tiles of its threads' vectors
        self.cols = Edge(self.spec.length, schedule.lanes * schedule.vector)

    def render(self) -> KernelSource:
        w, s, spec, program = self.w, self.s, self.spec, self.program
        threads = "threads" if s.lanes > 1 else "thread"
        backwards = " from their ends" if spec.reverse else ""
        details = [f"{self.rows.total} rows of {spec.length} elements{backwards}; {s.lanes} {threads} a row"]
        w.parameters += self.pointers.parameters()
        if s.lanes > 1:
            row_number(w, s.itype, "row", self.rows, s.lanes)
        else:
            thread_number(w, s.itype, "row", self.rows)
        self._row_values()
        if s.lanes == 1:
            self._alone()
        else:
            self._together()
        return w.source(program, details, blocks=self.rows.tiles, threads=s.lanes * s.rows, barriers=s.lanes > 1)

    def _row_values(self) -> None:
        """Writes coordinates of the row, and what has one value for each row."""
        row = Coordinates(self.w, "row", self.spec.outer, self.s.itype, "row")
        self.row = row.write(self.program.strides)
        same = {Load(k) for k, operand in enumerate(self.program.loads) if operand.strides[-1] == 0}
        self.terms = self.pointers.read(self.w, same, lambda strides: self.row.along(strides, "0"), "_r")

    # ---- a thread for each row

    def _alone(self) -> None:
        w, spec = self.w, self.spec
        total = self.names.unique(self.sum.name)
        w.line(f"{self.sum.ctype} {total} = {self.sum.start};")
        w.line("#pragma unroll 4")
        with w.block(f"for ({self.s.itype} col = 0; col < {spec.length}; ++col)"):
            position = "col"
            if spec.reverse:
                w.line(f"const {self.s.itype} at = {spec.length - 1} - col;")
                position = "at"
            needed = self.before | self.after
            terms = self.pointers.read(w, needed, lambda strides: self.row.along(strides, position), "_e", self.terms)
            self.emitter.statements(w, terms, lambda k: Result(k) in self.before)
            w.line(self.sum.into(total, self.emitter.term(self.sum.value, terms)))
            terms[Reduced(0)] = total
            self.emitter.statements(w, terms, lambda k: Result(k) in self.after - self.before)
            for store, pointer in zip(self.program.stores, self.pointers.stores):
                text = self.emitter.stored(store, terms)
                w.line(f"{pointer}[{self.row.along(store.operand.strides, position)}] = {text};")

    # ---- several threads for each row

    def _together(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        ctype, vector = self.sum.ctype, s.vector
        if s.lanes > 32:
            w.line(Buffer("parts", ctype, (s.lanes // 32,)).static)
        w.line(f"{ctype} carry = {self.sum.start};")
        with w.block(f"for ({s.itype} first = 0; first < {spec.length}; first += {s.lanes * vector})"):
            own = "lane" if vector == 1 else f"lane * {vector}"
            w.line(f"const {s.itype} col = first + {own};")
            position = "col"
            if spec.reverse:
                w.line(f"const {s.itype} at = {spec.length - vector} - col;")
                position = "at"
            held = self._vectors(position)
            sums, total = self.names.unique(self.sum.name, "_sums"), self.names.unique(self.sum.name, "_total")
            w.line(f"{ctype} {sums}[{vector}];")
            w.line(f"{ctype} {total} = {self.sum.start};")
            with w.guarded(self.cols.inside("col")), w.unrolled(f"for (int e = 0; e < {vector}; ++e)"):
                terms = self._terms(held, position)
                self.emitter.statements(w, terms, lambda k: Result(k) in self.before)
                w.line(self.sum.into(total, self.emitter.term(self.sum.value, terms)))
                w.line(f"{sums}[e] = {total};")
            op, warps = self.sum.combiner.functor, s.lanes // 32
            how = f"scan::lanes<{op}, {s.lanes}>({total}, carry)"
            if warps > 1:
                how = f"scan::block<{op}, {warps}>({total}, carry, {self.sum.start}, parts)"
            w.line(f"const {ctype} before = {how};")
            self._stores(held, sums, position)

    @property
    def _place_of(self) -> str:
        """C expression of where the e-th element that is added lies in its vector."""
        return f"{self.s.vector - 1} - e" if self.spec.reverse else "e"

    def _vectors(self, position: str) -> dict[int, str]:
        """Writes the reads of the thread's vector of every load; returns their C names."""
        w, vector = self.w, self.s.vector
        needed = (self.before | self.after) - self.terms.keys()
        held = {k: registers(w, op, vector) for k, op in enumerate(self.program.loads) if Load(k) in needed}
        with w.guarded(self.cols.inside("col") if held else ""):
            for k, name in held.items():
                strides = self.program.loads[k].strides
                read(w, name, self.pointers.loads[k], self.row.along(strides, position), vector, strides[-1])
        return held

    def _terms(self, held: dict[int, str], position: str) -> dict[Value, str]:
        """Returns the C expressions of the e-th element that is added."""
        vector, place = self.s.vector, self._place_of
        terms = dict(self.terms)
        for k, name in held.items():
            text = name if vector == 1 else f"{name}[{place}]"
            terms[Load(k)] = converted(self.program.loads[k], text, self.program.real)
        for k, strides in enumerate(self.program.indices):
            own = position if vector == 1 or not strides[-1] else f"({position} + {place})"
            terms[Index(k)] = f"int32({self.row.along(strides, own)})"
        return terms

    def _stores(self, held: dict[int, str], sums: str, position: str) -> None:
        w, vector, program = self.w, self.s.vector, self.program
        names = [registers(w, store.operand, vector) for store in program.stores]
        with w.guarded(self.cols.inside("col")), w.unrolled(f"for (int e = 0; e < {vector}; ++e)"):
            terms = self._terms(held, position)
            total = self.names.unique(self.sum.name)
            sign = self.sum.operator
            both = f"before {sign} {sums}[e]" if sign else f"{self.sum.combiner.functor}::of(before, {sums}[e])"
            w.line(f"const {self.sum.ctype} {total} = {both};")
            terms[Reduced(0)] = total
            self.emitter.statements(w, terms, lambda k: Result(k) in self.after)
            for store, name in zip(program.stores, names):
                text = self.emitter.stored(store, terms)
                w.line(f"{name} = {text};" if vector == 1 else f"{name}[{self._place_of}] = {text};")
        with w.guarded(self.cols.inside("col"), "inside" if self.rows.ragged else ""):
            for store, name, pointer in zip(program.stores, names, self.pointers.stores):
                strides = store.operand.strides
                write(w, pointer, self.row.along(strides, position), name, vector, strides[-1])


FAMILY = Family("scan", ScanSpec, (Form("scan", ScanSchedule, schedules, lambda spec, s: _Renderer(spec, s).render()),))

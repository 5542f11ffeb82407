"""What all forms of a rows kernel have in common: its stages, and the statements for the elements of a vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from math import prod

from codegen.buffers import Edge
from codegen.expr import Emitter, Index, Load, Reduction, Result, Value
from codegen.iteration import Coordinates, at_most, linear
from codegen.kernel import Kernel, Pointers, constant, converted
from codegen.l2_policy import streams
from codegen.pointwise.body import read, registers, vector_type, write
from codegen.rows.schedule import RowsSchedule
from codegen.rows.space import normalize
from codegen.rows.stages import Running, Stages, stages_along
from codegen.spec import KernelSource, RowsSpec


class RowsRenderer(ABC):
    """Writes a rows kernel.

    A stage is a loop over the row that combines the values of its reductions and stores the values that are known by
    then.  After it every thread of the row has the results, and what follows from them alone is computed once.

    dim         the dimension of the space along which the elements of a vector lie.
    neighbours  rows of a thread, which are next to each other.
    """

    dim: int
    neighbours = 1

    def __init__(self, spec: RowsSpec, schedule: RowsSchedule) -> None:
        self.s = schedule
        self.space = normalize(spec)
        self.program = self.space.program
        across = schedule.across
        self.stages = Stages(self.space) if across else stages_along(self.space, schedule.form, schedule.vector)
        self.count, self.length = prod(self.space.outer), self.space.length
        self.w = Kernel(spec.name)
        self.names = self.w.names
        self.pointers = Pointers(self.program, self.names)
        self.emitter = Emitter(self.program, self.names)
        #: the C expressions of values with one value a row
        self.terms: dict[Value, str] = {}
        self.kept = self.stages.kept(schedule.form) if schedule.form != "memory" else []
        self.kept_names: dict[int, str] = {}
        self.edge = Edge(self.count, schedule.rows)
        #: loads that are read once, and those of them that the L2 cache is to evict last
        streamed = streams(self.program, (*self.space.outer, *self.space.row))
        self.once = streamed if schedule.form != "memory" else streamed.difference(self.stages.kept())
        self.evict_last = streamed if schedule.evict_last else frozenset()
        #: for reductions of columns or segments: a thread's values in C, for an element; and those of this stage
        self.columns: dict[int, str] = {}
        self.beside: dict[int, str] = {}
        self._vectors: dict[int, str] = {}
        #: C names of the shared memory for what threads exchange, by C type
        self._exchanges: dict[str, str] = {}

    # ---- structure

    def render(self) -> KernelSource:
        w, s, program = self.w, self.s, self.program
        w.parameters += self.pointers.parameters()
        self._body()
        return w.source(
            program,
            self._details(),
            blocks=self._blocks() * s.cluster,
            threads=s.threads,
            barriers=s.threads > 1 if self.space.walk is not None else s.lanes * s.cluster > 1,
            blocks_per_sm=s.resident or None,
            cluster=s.cluster,
        )

    def _body(self) -> None:
        """Writes the statements of the kernel."""
        self._place()
        self._row_values()
        self._keep()
        self._stages()

    def _blocks(self) -> int:
        """Returns the number of blocks, or of clusters of blocks."""
        return self.edge.tiles

    def _stages(self) -> None:
        for stage in range(self.stages.last + 1):
            self._scalars(stage)
            self._stage(stage)
            self._row_stores(stage)

    def _details(self) -> list[str]:
        s = self.s
        stays = {"registers": "kept in registers", "shared": "kept in shared memory", "memory": "read once a stage"}
        rows = "parts" if self.space.chunk is not None else "rows"
        one = "threads" if s.lanes > 1 else "thread"
        threads = f"{s.lanes} {one} a {rows[:-1]}"
        if s.cluster > 1:
            threads += f" in each of {s.cluster} blocks"
        return [f"{self.count} {rows} of {self.length} elements, {stays[s.form]}; {threads}"]

    @abstractmethod
    def _place(self) -> None:
        """Writes ``row``, the first of the thread's rows, and ``lane``, its number among the row's threads."""

    def _keep(self) -> None:
        """Writes the reads of what several stages need."""
        if self.kept:
            self.kept_names = self._hold(self.kept)

    @abstractmethod
    def _scalars(self, stage: int) -> None:
        """Writes what follows from the reductions of the stage before, once for each row."""

    @abstractmethod
    def _part(self, reduction: Reduction) -> str:
        """Declares the variable in which a thread combines its elements; returns that of an element's row in C."""

    @abstractmethod
    def _combined(self, parts: dict[int, str]) -> None:
        """Writes the combination of the parts of each row's threads, and sets the terms of the reductions' results."""

    @abstractmethod
    def _over_row(self, *, loading: bool = False) -> AbstractContextManager[None]:
        """Writes the loop over the thread's vectors of the row: ``col`` is where one begins."""

    def _stage(self, stage: int) -> None:
        """Writes the loop over the row, and the reductions that it makes."""
        if not self.stages.ends(stage):
            return
        reductions = [k for k in range(len(self.program.reductions)) if self.stages.made(k) == stage]
        parts = {k: self._part(self.program.reductions[k]) for k in reductions if k not in self.columns}
        self.beside = {k: self.columns[k] for k in reductions if k in self.columns}
        self._each(stage, {**parts, **self.beside})
        self.beside = {}
        if parts:
            self._combined(parts)

    def _each(self, stage: int, parts: dict[int, str]) -> None:
        """Writes what a stage does with all elements of a row."""
        with self._over_row():
            self._elements(stage, self.stages.needed[stage], parts)

    def _row_values(self) -> None:
        """Writes the operands and indices with one value for each row."""
        self.rows = self._coordinates()
        n = len(self.space.outer)
        for k, operand in enumerate(self.program.loads):
            if self.space.varies(operand):
                continue
            count, offset = self._count(k), self.rows.offset(operand.strides[:n])
            if count == 1:
                text = f"{self.pointers.loads[k]}[{offset}]"
                self.terms[Load(k)] = constant(self.w, self.names, self.program, k, text, "_r")
            else:
                name = self.names.unique(operand.name, "_r")
                self._read(k, f"const {vector_type(operand, count)} {name}", offset)
                self.terms[Load(k)] = converted(operand, f"{name}[e]", self.program.real)
        for k, strides in enumerate(self.program.indices):
            if not any(strides[n:]):
                self.terms[Index(k)] = self._index(k, self.rows.offset(strides[:n]))

    def _coordinates(self) -> Coordinates:
        """Returns the coordinates of ``row``, with those that are needed written, and where a part begins and ends."""
        w, itype, chunk, total = self.w, self.s.itype, self.space.chunk, self.space.total
        rows = Coordinates(w, "row", self.space.outer, itype, "row")
        if chunk is not None:
            _ = rows[0]
        rows.write(self.program.strides)
        if chunk is not None:
            w.line(f"const {itype} begin = {rows[0]} * {chunk};")
            end = f"begin + {chunk}" if total % chunk == 0 else at_most(f"begin + {chunk}", total, itype)
            w.line(f"const {itype} end = {end};")
        return rows

    @property
    def begin(self) -> str:
        """The C expression of the first element of a row."""
        return "0" if self.space.chunk is None else "begin"

    @property
    def end(self) -> str:
        """The C expression of the end of a row."""
        return str(self.length) if self.space.chunk is None else "end"

    def _exchanging(self, reduction: Reduction, values: str, side: int, count: int, word: str) -> str:
        """Returns the statement by which threads, ``side`` apart, combine values; declares what they exchange."""
        ctype = reduction.ctype
        if ctype not in self._exchanges:
            self._exchanges[ctype] = self.w.exchange(f"{ctype} {word}", "", ctype, self.s.exchanged)
        return f"reduce::across<{reduction.combiner.functor}, {side}, {count}>({values}, {self._exchanges[ctype]});"

    def _sum(self, store: int, value: str) -> str:
        """Returns the C expression to store for a reduction of columns or segments."""
        target = self.program.stores[store].operand.dtype.ctype
        same = target == self.program.reductions[self.space.sums[store]].ctype
        return value if same else f"convert<{target}>({value})"

    def _row_stores(self, stage: int) -> None:
        """Writes the stores with one value for each row, by one of its threads."""
        w, n, program = self.w, len(self.space.outer), self.program
        every, sums = enumerate(program.stores), self.space.sums
        once = [(k, store) for k, store in every if k not in sums and not self.space.varies(store.operand)]
        stores = {k: store for k, store in once if self.stages.stage(store.value) == stage}
        if not stores:
            return
        first = "lane == 0" if self.s.lanes * self.s.cluster > 1 else ""
        with w.guarded(first, "inside" if self._has_inside else ""):
            offsets = {k: self.rows.offset(store.operand.strides[:n]) for k, store in stores.items()}
            results = {
                k: registers(w, store.operand, self.neighbours) for k, store in stores.items() if self.neighbours > 1
            }
            with w.repeated("e", self.neighbours):
                for k, store in stores.items():
                    target = f"{results[k]}[e]" if k in results else f"{self.pointers.stores[k]}[{offsets[k]}]"
                    w.line(f"{target} = {self.emitter.stored(store, self.terms)};")
            for k, name in results.items():
                self._write(k, name, offsets[k])

    @property
    def _has_inside(self) -> bool:
        """Whether some threads have no row."""
        return self.edge.ragged

    # ---- the vectors of a thread

    def _kind(self, strides: tuple[int, ...]) -> str:
        """Returns how a vector's elements lie: "vector" (contiguous), "uniform" (all the same one), or "element"."""
        step = strides[self.dim]
        return "uniform" if step == 0 and self.s.vector > 1 else "vector" if step == 1 else "element"

    def _count(self, n: int) -> int:
        """Returns how many elements of a load a thread holds for a vector."""
        return 1 if self._kind(self.program.loads[n].strides) == "uniform" else self.s.vector

    def _offset(self, strides: tuple[int, ...]) -> str:
        """Returns the C expression of the offset of a vector's first element."""
        n = len(self.space.outer)
        return linear([*self.rows.terms(strides[:n]), *self.cols.terms(strides[n:])])

    def _load_offset(self, n: int) -> str:
        """Returns the C expression of the offset of a vector's first element in a load."""
        operand, own = self.program.loads[n], len(self.space.outer)
        begin = [] if operand.begin is None else [(self.emitter.term(operand.begin.value, self.terms), 1)]
        return linear([*begin, *self.rows.terms(operand.strides[:own]), *self.cols.terms(operand.strides[own:])])

    rows: Coordinates
    cols: Coordinates
    #: dimension and subscript of what a thread has of each of its vectors of a row
    array, u = "", ""

    def _read(self, n: int, target: str, offset: str, *, every: bool = False) -> None:
        """Writes the read of a vector of a load; with ``every``, also where all its elements are the same."""
        count, step = self.s.vector if every else self._count(n), self.program.loads[n].strides[self.dim]
        load = "load_evict_last" if n in self.evict_last else "load_once" if n in self.once else "load"
        read(self.w, target, self.pointers.loads[n], offset, count, step, load)

    def _hold(self, loads: Iterable[int]) -> dict[int, str]:
        """Writes the reads of all of a thread's elements of some loads into registers; returns their C names."""
        held = {n: registers(self.w, self.program.loads[n], self._count(n), self.array) for n in loads}
        with self._over_row(loading=True):
            for n, name in held.items():
                self._read(n, f"{name}{self.u}", self._load_offset(n))
        return held

    def _copy(self, n: int, nbytes: int) -> str:
        """Returns the C function that copies ``nbytes`` bytes of a load to shared memory."""
        return "copy_async_evict_last" if n in self.evict_last and nbytes == 16 else f"copy_async<{nbytes}>"

    def _write(self, k: int, values: str, offset: str, guard: str = "") -> None:
        """Writes the store of a vector of results."""
        step = self.program.stores[k].operand.strides[self.dim]
        write(self.w, self.pointers.stores[k], offset, values, self.s.vector, step, guard=guard)

    # ---- the elements of a vector

    def _elements(self, stage: int, needed: set[Value], parts: dict[int, str]) -> None:
        """Writes the statements for each element of a vector, and the stores of the stage."""
        w, s, program = self.w, self.s, self.program
        held = {n: self._held(n) for n in range(len(program.loads)) if Load(n) in needed}
        stores = [(k, program.stores[k]) for k in self.stages.stored(stage)]
        running = {k: self.stages.running[k] for k in parts if k in self.stages.running}
        results = {k: registers(w, store.operand, s.vector) for k, store in stores if s.vector > 1}
        # Offsets are the same for all elements of a vector.
        places = {k: self._offset(store.operand.strides) for k, store in stores}
        indices = {k: self._offset(strides) for k, strides in enumerate(program.indices) if Index(k) in needed}
        before = {}
        for k, one in running.items():
            before[k] = self.names.unique(program.reductions[one.most].name, "_before")
            w.line(f"const {program.reductions[k].ctype} {before[k]} = {parts[one.most]};")
        guard = "if (inside) " if self._has_inside else ""
        with w.repeated("e", self.s.vector):
            terms = self._element_terms(held, indices, needed)
            self._computed(terms, needed)
            for k, part in parts.items():
                if k not in running:
                    reduction = program.reductions[k]
                    statement = reduction.into(part, self.emitter.term(reduction.value, terms))
                    w.line(f"{guard}{statement}" if k in self.columns else statement)
            for k, store in stores:
                text = self.emitter.stored(store, terms)
                target = f"{results[k]}[e]" if s.vector > 1 else f"{guard}{self.pointers.stores[k]}[{places[k]}]"
                w.line(f"{target} = {text};")
        for k, name in results.items():
            self._write(k, name, places[k], guard)
        for k, one in running.items():
            self._run(one, parts[k], parts[one.most], before[k], held, indices)

    def _computed(self, terms: dict[Value, str], needed: set[Value]) -> None:
        """Writes the instructions of a loop for an element."""
        mine = {value.instruction for value in needed if isinstance(value, Result)}
        self.emitter.statements(self.w, terms, mine.__contains__)

    def _run(
        self, running: Running, part: str, most: str, before: str, held: dict[int, str], indices: dict[int, str]
    ) -> None:
        """Writes the addition of a vector's elements to a running sum whose greatest element was ``before``."""
        w, reduction = self.w, self.program.reductions[running.most]
        needed = self.stages.behind([running.value])
        shift = self.names.unique(reduction.name, "_shift")
        w.line(f"const {reduction.ctype} {shift} = reduce::shift({most});")
        w.line(f"{part} *= math::exp({before} - {shift});")
        with w.repeated("e", self.s.vector), w.block("", when=self.s.vector == 1):
            terms = {**self._element_terms(held, indices, needed), running.shift: shift}
            self._computed(terms, needed)
            w.line(f"{part} += {self.emitter.term(running.value, terms)};")

    def _held(self, n: int) -> str:
        """Writes the read of a vector of a load, unless it is in registers; returns the C expression of its element."""
        if n in self.kept_names:
            name = f"{self.kept_names[n]}{self.u}"
        else:
            operand, name = self.program.loads[n], self._vector(n)
            self._read(n, f"const {vector_type(operand, self._count(n))} {name}", self._load_offset(n))
        return name + ("[e]" if self._count(n) > 1 else "")

    def _vector(self, n: int) -> str:
        """Returns the C name of the registers that hold a vector of a load within one loop."""
        if n not in self._vectors:
            self._vectors[n] = self.names.unique(self.program.loads[n].name, "_v")
        return self._vectors[n]

    def _element_terms(self, held: dict[int, str], indices: dict[int, str], needed: set[Value]) -> dict[Value, str]:
        """Returns an element's loads and indices in C; writes conversions that are used twice as constants."""
        program, terms = self.program, dict(self.terms)
        for n, text in held.items():
            operand = program.loads[n]
            value = converted(operand, text, program.real)
            if value != text and self._used(Load(n), needed) > 1:
                value = constant(self.w, self.names, program, n, text, "_e")
            terms[Load(n)] = value
        for k, text in indices.items():
            terms[Index(k)] = self._index(k, text)
        return terms

    def _index(self, k: int, offset: str) -> str:
        """Returns the C expression of an index for an element of a vector."""
        step = self.program.indices[k][self.dim] if self.s.vector > 1 else 0
        return f"int32({f'{offset} + ' if step else offset}{linear([('e', step)]) if step else ''})"

    def _used(self, value: Value, needed: set[Value]) -> int:
        """Returns how often a value is used by the instructions of a loop."""
        every = enumerate(self.program.instructions)
        return sum(i.args.count(value) for k, i in every if value in i.args and Result(k) in needed)

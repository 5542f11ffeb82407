"""The rows family: reductions over rows, with pointwise work before, between and after them.

The program runs in stages.  A stage is a loop over the row that combines what its reductions are of and stores what is
known by then; after it every thread of the row has the results, and what follows from them alone is computed once.
Between stages a row stays in registers or in shared memory, or is read again where it is too long for either.

Threads of a row are neighbours and read vectors, or, across, where neighbouring elements are those of neighbouring
rows (column sums), threads side by side are in different rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

from codegen.expr import Emitter, Index, Load, Reduced, Reduction, Result, Value, ctype_of, literal
from codegen.iteration import Coordinates, at_most, linear
from codegen.kernel import Pointers, converted, headers, heading, signature
from codegen.naming import Names, Writer
from codegen.pointwise_body import plus, vector_type
from codegen.rows_schedule import RowsSchedule, Stages, normalize
from codegen.spec import KernelSource, RowsSpec

_TAKEN = ("row", "col", "lane", "u", "e", "at", "inside", "shared", "reduce", "begin", "end")


def render(spec: RowsSpec, schedule: RowsSchedule) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    return _Renderer(spec, schedule).render()


class _Renderer:
    def __init__(self, spec: RowsSpec, schedule: RowsSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.space = normalize(spec)
        self.program = self.space.program
        self.stages = Stages(self.space)
        self.count, self.length = prod(self.space.outer), self.space.length
        dims = range(max(len(self.space.outer), len(self.space.row)))
        self.names = Names({spec.name, *_TAKEN, *(f"{p}{d}" for p in ("row", "col", "at") for d in dims)})
        self.pointers = Pointers(self.program, self.names)
        self.emitter = Emitter(self.program, self.names)
        self.w = Writer()
        self.terms: dict[Value, str] = {}
        #: the row's vectors that a thread has, and whether some are past its end
        self.unroll = -(-self.length // (schedule.lanes * schedule.vector))
        self.ragged = self.space.total % (schedule.lanes * schedule.vector) != 0
        if self.space.chunk is not None:
            self.ragged |= self.length % (schedule.lanes * schedule.vector) != 0 or self.space.total % self.length != 0
        self.kept = self.stages.kept() if schedule.form != "memory" else []
        self.kept_names: dict[int, str] = {}
        self._vectors: dict[int, str] = {}

    # ---- structure

    def render(self) -> KernelSource:
        w, s, program = self.w, self.s, self.program
        notes = program.notes
        title = f"{self.spec.name}: {len(notes)} {'nodes in one kernel' if len(notes) != 1 else 'node'}"
        more = ["memory.cuh", "reduce.cuh", *(["shared.cuh"] if s.form == "shared" else [])]
        heading(w, title, program, headers(program, *more), [self._details()])
        signature(w, self.spec.name, s.threads, self.pointers.parameters())
        self._place()
        self._row_values()
        shared = self._keep()
        for stage in range(self.stages.last + 1):
            self._scalars(stage)
            self._stage(stage)
            self._row_stores(stage)
        w.close()
        blocks = -(-self.count // s.rows)
        barriers = s.lanes > 1
        return KernelSource(self.spec.name, w.text(), (blocks, 1, 1), (s.threads, 1, 1), shared, barriers)

    def _details(self) -> str:
        s = self.s
        stays = {"registers": "kept in registers", "shared": "kept in shared memory", "memory": "read once a stage"}
        threads = "thread" if s.lanes == 1 else "threads"
        rows = "parts" if self.space.chunk is not None else "rows"
        return f"{self.count} {rows} of {self.length} elements, {stays[s.form]}; {s.lanes} {threads} a {rows[:-1]}"

    def _place(self) -> None:
        """``row``, and ``lane``: which of the row's threads this one is."""
        w, s = self.w, self.s
        block = "blockIdx.x" if s.itype == "uint32" else "uint64(blockIdx.x)"
        if s.rows == 1:
            w.line(f"const {s.itype} row = blockIdx.x;")
            w.line("const uint32 lane = threadIdx.x;")
            return
        mine = f"threadIdx.x % {s.rows}" if s.across else f"threadIdx.x / {s.lanes}" if s.lanes > 1 else "threadIdx.x"
        row = f"{block} * {s.rows} + {mine}"
        if self.count % s.rows:
            # A thread without a row goes along with the last one, for the others wait for it.
            w.line(f"const bool inside = {row} < {self.count};")
            row = f"inside ? {row} : {self.count - 1}"
        w.line(f"const {s.itype} row = {row};")
        if s.lanes > 1:
            w.line(f"const uint32 lane = threadIdx.x {'/' if s.across else '%'} {s.rows if s.across else s.lanes};")

    @property
    def _lane(self) -> str:
        return "lane" if self.s.lanes > 1 else "0"

    def _row_values(self) -> None:
        """The operands and indices with one value a row."""
        self.rows = Coordinates(self.w, "row", self.space.outer, self.s.itype, "row")
        n = len(self.space.outer)
        every = [op.strides for op in self.program.operands] + list(self.program.indices)
        for d in range(n):  # here, and not where one is first needed: that may be within a loop
            if any(strides[d] for strides in every) or (d == 0 and self.space.chunk is not None):
                _ = self.rows[d]
        self._part()
        for k, operand in enumerate(self.program.loads):
            if not self.space.varies(operand):
                name = self.names.unique(operand.name, "_r")
                text = f"{self.pointers.loads[k]}[{self.rows.offset(operand.strides[:n])}]"
                ctype = ctype_of(self.program, Load(k))
                self.w.line(f"const {ctype} {name} = {converted(operand, text, self.program.real)};")
                self.terms[Load(k)] = name
        for k, strides in enumerate(self.program.indices):
            if not any(strides[n:]):
                self.terms[Index(k)] = f"int32({self.rows.offset(strides[:n])})"

    def _part(self) -> None:
        """``begin`` and ``end``: which of the elements are the part's."""
        chunk, total, itype = self.space.chunk, self.space.total, self.s.itype
        if chunk is not None:
            self.w.line(f"const {itype} begin = {self.rows[0]} * {chunk};")
            end = f"begin + {chunk}" if total % chunk == 0 else at_most(f"begin + {chunk}", total, itype)
            self.w.line(f"const {itype} end = {end};")

    def _keep(self) -> int:
        """Reads what several stages need.  Returns the bytes of dynamic shared memory for it."""
        w, s = self.w, self.s
        if not self.kept:
            return 0
        if s.form == "registers":
            for n in self.kept:
                name = self.kept_names[n] = self.names.unique(self.program.loads[n].name, "_v")
                many = f"[{self.unroll}]" if self.unroll > 1 else ""
                w.line(f"{vector_type(self.program.loads[n], self._count(n))} {name}{many};")
            self._open_vectors(loading=True)
            for n in self.kept:
                self._read(n, f"{self.kept_names[n]}{'[u]' if self.unroll > 1 else ''}")
            self._close_vectors()
            return 0
        w.line("FUSEGRAPH_DYNAMIC_SHARED(shared);")
        used = 0
        for n in self.kept:
            operand = self.program.loads[n]
            name = self.kept_names[n] = self.names.unique(operand.name, "_s")
            start = f"shared + {used}" if used else "shared"
            w.line(f"{operand.dtype.ctype}* const {name} = reinterpret_cast<{operand.dtype.ctype}*>({start});")
            used += -(-self.length * operand.dtype.itemsize // 16) * 16
        w.line("// A thread reads back what it wrote itself.")
        self._open_vectors(loading=True)
        for n in self.kept:
            held = self._vector(n)
            w.line(f"{vector_type(self.program.loads[n], s.vector)} {held};")
            self._read(n, held, every=True)
            target = f"{self.kept_names[n]} + col"
            w.line(f"store_shared({target}, {held});" if s.vector > 1 else f"{self.kept_names[n]}[col] = {held};")
        self._close_vectors()
        return used

    def _scalars(self, stage: int) -> None:
        """What follows from the reductions of the stage before, once a row."""
        program = self.program

        def chosen(k: int) -> bool:
            return self.stages.stage(Result(k)) == stage and not self.stages.varies(Result(k))

        if any(chosen(k) for k in range(len(program.instructions))):
            self.emitter.statements(self.w, self.terms, chosen)

    def _stage(self, stage: int) -> None:
        """The loop over the row, and the reductions it makes."""
        w = self.w
        if not self.stages.ends(stage):
            return
        reductions = [k for k, r in enumerate(self.program.reductions) if self.stages.stage(r.value) == stage]
        parts = {}
        for k in reductions:
            reduction = self.program.reductions[k]
            parts[k] = self.names.unique(reduction.name, "_part")
            w.line(f"{reduction.ctype} {parts[k]} = {identity(reduction)};")
        needed = self.stages.needed(stage)
        self._open_vectors()
        self._elements(stage, needed, parts)
        self._close_vectors()
        for k in reductions:
            self.terms[Reduced(k)] = self._combined(self.program.reductions[k], parts[k])

    def _combined(self, reduction: Reduction, part: str) -> str:
        """A reduction's result from the parts of the row's threads."""
        w, s = self.w, self.s
        name = self.names.unique(reduction.name)
        op = f"reduce::{reduction.combine.capitalize()}"
        if s.lanes == 1:
            return part
        if s.lanes <= 32 and not s.across:
            w.line(f"const {reduction.ctype} {name} = reduce::lanes<{op}, {s.lanes}>({part});")
            return name
        parts = self.names.unique(reduction.name, "_parts")
        size = s.threads if s.across else s.lanes // 32
        w.line(f"__shared__ {reduction.ctype} {parts}[{size}];")
        how = f"reduce::across<{op}, {s.rows}, {s.lanes}>" if s.across else f"reduce::block<{op}, {size}>"
        w.line(f"const {reduction.ctype} {name} = {how}({part}, {parts});")
        return name

    def _row_stores(self, stage: int) -> None:
        """Writes what has one value a row, by one of its threads."""
        n = len(self.space.outer)
        stores = [
            (store, pointer)
            for store, pointer in zip(self.program.stores, self.pointers.stores)
            if not self.space.varies(store.operand) and self.stages.stage(store.value) == stage
        ]
        if not stores:
            return
        conditions = ["lane == 0"] if self.s.lanes > 1 else []
        conditions += ["inside"] if self._has_inside else []
        if conditions:
            self.w.open(f"if ({' && '.join(conditions)})")
        for store, pointer in stores:
            text = self.emitter.stored(store, self.terms, lambda v: ctype_of(self.program, v))
            self.w.line(f"{pointer}[{self.rows.offset(store.operand.strides[:n])}] = {text};")
        if conditions:
            self.w.close()

    @property
    def _has_inside(self) -> bool:
        return self.s.rows > 1 and self.count % self.s.rows != 0

    # ---- the vectors of a thread

    def _open_vectors(self, *, loading: bool = False) -> None:
        """A loop over the thread's vectors of the row: ``col`` is where one begins.

        In registers its passes are spelled out; those past the end are left out, or, when loading, read the last
        vector, so that no load waits for a condition.
        """
        w, s = self.w, self.s
        step = s.lanes * s.vector
        start = self._lane if s.vector == 1 else f"{self._lane} * {s.vector}" if self._lane != "0" else "0"
        whole = self.space.chunk is None
        end = str(self.length) if whole else "end"
        if s.form != "registers":
            if self.length // step >= 4:
                w.line("#pragma unroll 4")
            start = start if whole else f"begin + {start}" if start != "0" else "begin"
            w.open(f"for ({s.itype} col = {start}; col < {end}; col += {step})")
            self.cols = Coordinates(w, "col", self.space.row, s.itype, "col")
            return
        if self.unroll > 1:
            w.line("#pragma unroll")
            w.open(f"for (int u = 0; u < {self.unroll}; ++u)")
            inner = f"u * {s.lanes} + {self._lane}" if s.lanes > 1 else "u"
            start = inner if s.vector == 1 else f"({inner}) * {s.vector}" if s.lanes > 1 else f"u * {s.vector}"
        else:
            w.open("")
        start = start if whole else f"begin + {start}" if start != "0" else "begin"
        if self.ragged and loading:
            start = at_most(start, self.space.total - s.vector, s.itype)
        self._col = len(w.lines)
        w.line(f"const {s.itype} col = {start};")
        self.cols = Coordinates(w, "col", self.space.row, s.itype, "col")
        self._guarded = self.ragged and not loading
        if self._guarded:
            w.open(f"if (col < {end})")

    def _close_vectors(self) -> None:
        if self.s.form == "registers":
            if self._guarded:
                self.w.close()
            if not any(re.search(r"\bcol\b", line) for line in self.w.lines[self._col + 1 :]):
                del self.w.lines[self._col]
        self.w.close()

    def _kind(self, strides: tuple[int, ...]) -> str:
        """How the elements of a vector lie: "vector" (side by side), "uniform" (all the same one), or "element"."""
        last = strides[-1]
        return "uniform" if last == 0 and self.s.vector > 1 else "vector" if last == 1 else "element"

    def _count(self, n: int) -> int:
        """The elements of a load that a thread holds for a vector."""
        return 1 if self._kind(self.program.loads[n].strides) == "uniform" else self.s.vector

    def _offset(self, strides: tuple[int, ...]) -> str:
        """The C expression of the offset of a vector's first element."""
        n = len(self.space.outer)
        terms = [(self.rows[d], stride) for d, stride in enumerate(strides[:n]) if stride]
        return linear([*terms, *((self.cols[d], stride) for d, stride in enumerate(strides[n:]) if stride)])

    def _read(self, n: int, target: str, *, every: bool = False) -> None:
        """Reads a vector of a load; every: also where all its elements are the same."""
        w, operand, pointer = self.w, self.program.loads[n], self.pointers.loads[n]
        offset, vector = self._offset(operand.strides), self.s.vector
        kind = self._kind(operand.strides)
        if vector == 1 or (kind == "uniform" and not every):
            w.line(f"{target} = {pointer}[{offset}];")
        elif kind == "vector":
            w.line(f"{target} = load<{vector}>({plus(pointer, offset)});")
        else:
            w.line("#pragma unroll")
            step = linear([("e", operand.strides[-1])])
            at = step if offset == "0" else offset if kind == "uniform" else f"{offset} + {step}"
            w.line(f"for (int e = 0; e < {vector}; ++e) {target}[e] = {pointer}[{at}];")

    # ---- the elements of a vector

    def _elements(self, stage: int, needed: set[Value], parts: dict[int, str]) -> None:
        """The statements for each element of a vector, and the stores of the stage."""
        w, s, program = self.w, self.s, self.program
        held: dict[int, str] = {}
        for n in range(len(program.loads)):
            if Load(n) not in needed:
                continue
            operand = program.loads[n]
            each = "[e]" if self._count(n) > 1 else ""
            if n in self.kept_names and s.form == "registers":
                held[n] = f"{self.kept_names[n]}{'[u]' if self.unroll > 1 else ''}{each}"
                continue
            if n in self.kept_names and s.vector == 1:
                held[n] = f"{self.kept_names[n]}[col]"
                continue
            name = self._vector(n)
            if n in self.kept_names:
                source = f"load_shared<{s.vector}>({self.kept_names[n]} + col)"
                w.line(f"const {vector_type(operand, s.vector)} {name} = {source};")
                held[n] = f"{name}[e]"
                continue
            if self._kind(operand.strides) == "element" and s.vector > 1:
                w.line(f"{vector_type(operand, s.vector)} {name};")
                self._read(n, name)
            else:
                self._read(n, f"const {vector_type(operand, self._count(n))} {name}")
            held[n] = f"{name}{each}"
        stores = [
            (k, store)
            for k, store in enumerate(program.stores)
            if self.space.varies(store.operand) and self.stages.stage(store.value) == stage
        ]
        results = {k: self.names.unique(store.operand.name, "_v") for k, store in stores} if s.vector > 1 else {}
        for k, name in results.items():
            w.line(f"{vector_type(program.stores[k].operand, s.vector)} {name};")
        # Offsets are the same for all elements of a vector.
        places = {k: self._offset(store.operand.strides) for k, store in stores}
        indices = {k: self._offset(strides) for k, strides in enumerate(program.indices) if Index(k) in needed}
        if s.vector > 1:
            w.line("#pragma unroll")
            w.open(f"for (int e = 0; e < {s.vector}; ++e)")
        terms = self._element_terms(held, indices, needed)
        self.emitter.statements(w, terms, lambda k: Result(k) in needed)
        for k, part in parts.items():
            reduction = program.reductions[k]
            w.line(accumulate(reduction, part, self.emitter.term(reduction.value, terms)))
        guard = "if (inside) " if self._has_inside else ""
        for k, store in stores:
            text = self.emitter.stored(store, terms, lambda v: ctype_of(program, v))
            if s.vector > 1:
                w.line(f"{results[k]}[e] = {text};")
            else:
                w.line(f"{guard}{self.pointers.stores[k]}[{places[k]}] = {text};")
        if s.vector == 1:
            return
        w.close()
        for k, store in stores:
            pointer, kind = self.pointers.stores[k], self._kind(store.operand.strides)
            if kind == "vector":
                w.line(f"{guard}store({plus(pointer, places[k])}, {results[k]});")
            else:
                w.line("#pragma unroll")
                at = linear([("e", store.operand.strides[-1])])
                at = at if places[k] == "0" else f"{places[k]} + {at}"
                w.line(f"for (int e = 0; e < {s.vector}; ++e) {guard}{pointer}[{at}] = {results[k]}[e];")

    def _vector(self, n: int) -> str:
        """The name of the registers that hold a vector of a load within one loop."""
        if n not in self._vectors:
            self._vectors[n] = self.names.unique(self.program.loads[n].name, "_v")
        return self._vectors[n]

    def _element_terms(self, held: dict[int, str], indices: dict[int, str], needed: set[Value]) -> dict[Value, str]:
        """The C expressions of an element's loads and indices; a conversion that is used twice is done once."""
        program, terms = self.program, dict(self.terms)
        used = self._used(needed)
        for n, text in held.items():
            operand = program.loads[n]
            value = converted(operand, text, program.real)
            if value != text and used.get(Load(n), 0) > 1:
                name = self.names.unique(operand.name, "_e")
                self.w.line(f"const {ctype_of(program, Load(n))} {name} = {value};")
                value = name
            terms[Load(n)] = value
        for k, text in indices.items():
            step = program.indices[k][-1] if self.s.vector > 1 else 0
            position = f"{text} + {linear([('e', step)])}" if step else text
            terms[Index(k)] = f"int32({position})"
        return terms

    def _used(self, needed: set[Value]) -> dict[Value, int]:
        """How often each value is used by the instructions of a loop."""
        count: dict[Value, int] = {}
        values: Iterable[Value] = (
            v for k, i in enumerate(self.program.instructions) if Result(k) in needed for v in i.args
        )
        for value in values:
            count[value] = count.get(value, 0) + 1
        return count


def identity(reduction: Reduction) -> str:
    """The C literal that changes nothing when it is combined."""
    real = reduction.ctype in ("float", "double")
    if reduction.combine in ("add", "mul"):
        return literal(0 if reduction.combine == "add" else 1, reduction.ctype)
    sign = -1 if reduction.combine == "max" else 1
    if real:
        return literal(sign * float("inf"), reduction.ctype)
    signed = not reduction.ctype.startswith("u")
    bits = int(reduction.ctype.removeprefix("u").removeprefix("int"))
    highest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    lowest = -(2 ** (bits - 1)) if signed else 0
    return literal(highest if sign > 0 else lowest, reduction.ctype)


def accumulate(reduction: Reduction, part: str, text: str) -> str:
    """The C statement that combines one element with a thread's part."""
    function = {"max": "maximum", "min": "minimum"}.get(reduction.combine)
    if function is not None:
        return f"{part} = math::{function}({part}, {text});"
    if reduction.ctype in ("float", "double"):
        return f"{part} {'+' if reduction.combine == 'add' else '*'}= {text};"
    return f"{part} = math::wrapping_{reduction.combine}({part}, {reduction.ctype}({text}));"

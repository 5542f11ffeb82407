"""The pointwise family: a DAG of pointwise ops over one space, one element read and written once.

Every thread handles vectors of consecutive elements (16-byte accesses) and issues the loads of several of them before
the first is used.  The space is walked in the memory order of the first output, with neighbouring dimensions merged.
Two forms:

flat    a thread's vectors are a block's width apart along the merged space;
rows    when an operand repeats along the second-fastest dimension (a bias), a thread takes the same columns of
        several rows, so that the operand stays in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from codegen.expr import Anchor, Emitter, Index, Literal, Load, Operand, Program, Result, Value, ctype_of, varying
from codegen.iteration import Coordinates, bounds, index_type, linear, memory_order, packed, rebase
from codegen.kernel import Pointers, converted, headers, heading, signature, uses
from codegen.naming import Names, Writer
from codegen.spec import KernelSource, PointwiseSpec

THREADS = 256
#: Blocks that keep a large GPU busy; smaller problems take shorter unrolling and vectors instead.
ENOUGH_BLOCKS = 264
MAX_VECTOR_BYTES = 64


@dataclass(frozen=True)
class PointwiseSchedule:
    """vector: elements of one access; unroll: vectors in flight a thread; form: "flat" or "rows"."""

    vector: int
    unroll: int
    form: str
    itype: str


def normalize(spec: PointwiseSpec) -> tuple[tuple[int, ...], Program]:
    """The space in memory order with merged dimensions, and the program over it."""
    strides = spec.program.stores[0].operand.strides
    shape, program, _ = rebase(spec.program, spec.shape, memory_order(spec.shape, strides))
    return shape, program


def access(operand_strides: tuple[int, ...], shape: tuple[int, ...], vector: int, operand: Operand | None) -> str:
    """How a thread reads or writes ``vector`` consecutive elements of the space.

    "scalar" (one value for the whole kernel), "vector" (one wide access), "uniform" (one value for the vector) or
    "element" (one access an element).
    """
    if not any(operand_strides):
        return "scalar"
    if vector == 1:
        return "element"
    whole = shape[-1] % vector == 0
    if operand_strides[-1] == 0 and whole:
        return "uniform"
    if operand is None:
        return "element"
    width = min(16, vector * operand.dtype.itemsize)
    if operand.alignment % width:
        return "element"
    if operand_strides == packed(shape):
        return "vector"
    rows_aligned = all(s * operand.dtype.itemsize % width == 0 for s in operand_strides[:-1])
    return "vector" if whole and operand_strides[-1] == 1 and rows_aligned else "element"


def best_schedule(spec: PointwiseSpec) -> PointwiseSchedule:
    """The schedule used when nothing was tuned."""
    shape, program = normalize(spec)
    operands = program.operands
    itype = index_type(*bounds(operands, shape))
    total = prod(shape)
    full = [op for op in operands if any(op.strides)]
    vector = 16 // min(op.dtype.itemsize for op in operands)
    while vector > 1:
        wide = [op for op in full if access(op.strides, shape, vector, op) in ("vector", "uniform")]
        narrow = [op for op in full if access(op.strides, shape, vector, op) == "element"]
        if (
            vector * max(op.dtype.itemsize for op in operands) <= MAX_VECTOR_BYTES
            and sum(_traffic(op, shape) for op in wide) > sum(_traffic(op, shape) for op in narrow)
            and total >= vector * THREADS
        ):
            break
        vector //= 2
    loaded = sum(op.dtype.itemsize * vector for op in program.loads if any(op.strides)) or vector
    unroll = 4 if loaded <= 32 else 2 if loaded <= 96 else 1
    form = "flat"
    if len(shape) > 1 and shape[-1] % vector == 0:
        repeated = [
            op
            for op in program.loads
            if op.strides[-2] == 0 and op.strides[-1] and access(op.strides, shape, vector, op) == "vector"
        ]
        if repeated:
            form = "rows"
            unroll = min(max(unroll, 4), shape[-2])
    while unroll > 1 and total < ENOUGH_BLOCKS * THREADS * vector * unroll:
        unroll //= 2
    return PointwiseSchedule(vector, unroll, form, itype)


def _traffic(operand: Operand, shape: tuple[int, ...]) -> int:
    return operand.dtype.itemsize * prod(size for size, stride in zip(shape, operand.strides) if stride)


def render(spec: PointwiseSpec, schedule: PointwiseSchedule | None = None) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    return _Renderer(spec, schedule or best_schedule(spec)).render()


class _Renderer:
    def __init__(self, spec: PointwiseSpec, schedule: PointwiseSchedule) -> None:
        self.spec, self.schedule = spec, schedule
        self.shape, self.program = normalize(spec)
        self.total = prod(self.shape)
        self.names = Names(
            {spec.name, "size", "first", "i", "o", "u", "e", "col", "row", "row0", "outer", "v"}
            | {f"{letter}{d}" for letter in "io" for d in range(len(self.shape))}
        )
        self.pointers = Pointers(self.program, self.names)
        self.emitter = Emitter(self.program, self.names)
        self.uses = uses(self.program)
        self.w = Writer()
        self.terms: dict[Value, str] = {}

    # ---- structure

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.schedule, self.spec
        dims = " x ".join(str(size) for size in self.shape)
        detail = (
            f"{dims} elements, {s.vector} a vector, {s.unroll} vector{'s' if s.unroll > 1 else ''} in flight a thread"
        )
        plural = "nodes in one kernel" if len(self.program.notes) != 1 else "node"
        heading(
            w,
            f"{spec.name}: {len(self.program.notes)} {plural}",
            self.program,
            headers(self.program, "memory.cuh"),
            [detail],
        )
        signature(w, spec.name, THREADS, self.pointers.parameters())
        if s.form == "rows":
            blocks = self._rows()
        else:
            blocks = self._flat()
        w.close()
        grid = (blocks, 1, 1) if self.total else (0, 1, 1)
        return KernelSource(spec.name, w.text(), grid, (THREADS, 1, 1))

    def _flat(self) -> int:
        w, s = self.w, self.schedule
        tile = THREADS * s.vector
        exact = self.total % (tile * s.unroll) == 0
        ragged = self.total % s.vector != 0
        if not exact:
            w.line(f"constexpr {s.itype} size = {self.total};")
        block = "blockIdx.x" if s.itype == "uint32" else "uint64(blockIdx.x)"
        thread = f"{block} * {THREADS * s.unroll} + threadIdx.x"
        position = thread if s.vector == 1 else f"({thread}) * {s.vector}"
        count = "size - i" if ragged else ""
        if s.unroll == 1:
            w.line(f"const {s.itype} i = {position};")
            if not exact:
                w.line("if (i >= size) return;")
            self._scalars()
            space = Coordinates(w, "i", self.shape, s.itype, "i")
            self._load_phase(space, count)
            self._compute_phase(space, count)
            return self._blocks(tile)
        w.line(f"const {s.itype} first = {position};")
        self._scalars()
        self._declare_vectors()
        phases: list[Callable[[Coordinates, str], None]] = [self._load_phase] if self._vector_loads() else []
        for phase in (*phases, self._compute_phase):
            w.line("#pragma unroll")
            w.open(f"for (int u = 0; u < {s.unroll}; ++u)")
            w.line(f"const {s.itype} i = first + u * {tile};")
            if not exact:
                w.open("if (i < size)")
            phase(Coordinates(w, "i", self.shape, s.itype, "i"), count)
            if not exact:
                w.close()
            w.close()
        return self._blocks(tile * s.unroll)

    def _rows(self) -> int:
        w, s = self.w, self.schedule
        rows, cols = self.shape[-2:]
        outer = self.shape[:-2]
        vectors, groups = cols // s.vector, -(-rows // s.unroll)
        threads = prod(outer) * groups * vectors
        block = "blockIdx.x" if s.itype == "uint32" else "uint64(blockIdx.x)"
        w.line(f"const {s.itype} v = {block} * {THREADS} + threadIdx.x;")
        if threads % THREADS:
            w.line(f"if (v >= {threads}) return;")
        times = f" * {s.vector}" if s.vector > 1 else ""
        w.line(f"const {s.itype} col = v % {vectors}{times};")
        last = f" % {groups}" if outer else ""
        row = "row0" if s.unroll > 1 else "row"
        w.line(f"const {s.itype} {row} = v / {vectors}{last}{f' * {s.unroll}' if s.unroll > 1 else ''};")
        if outer:
            w.line(f"const {s.itype} outer = v / {vectors * groups};")
        self._scalars()
        space = _RowSpace(w, self.shape, s.itype, row)
        repeated = [n for n in self._vector_loads() if self.program.loads[n].strides[-2] == 0]
        self._load_phase(space, "", only=repeated, suffix="")
        if s.unroll > 1:
            self._declare_vectors(except_=repeated)
        others = [n for n in self._vector_loads() if n not in repeated]
        if s.unroll == 1:
            self._load_phase(space, "", only=others)
            self._compute_phase(space, "", invariant=repeated)
            return -(-threads // THREADS)
        exact = rows % s.unroll == 0
        for loading in (True, False) if others else (False,):
            w.line("#pragma unroll")
            w.open(f"for (int u = 0; u < {s.unroll}; ++u)")
            w.line(f"const {s.itype} row = row0 + u;")
            if not exact:
                w.open(f"if (row < {rows})")
            if loading:
                self._load_phase(space.at_row(), "", only=others)
            else:
                self._compute_phase(space.at_row(), "", invariant=repeated)
            if not exact:
                w.close()
            w.close()
        return -(-threads // THREADS)

    def _blocks(self, per_block: int) -> int:
        return -(-self.total // per_block)

    # ---- operands

    def _kind(self, n: int) -> str:
        operand = self.program.loads[n]
        return access(operand.strides, self.shape, self.schedule.vector, operand)

    def _vector_loads(self) -> list[int]:
        return [n for n in range(len(self.program.loads)) if self._kind(n) != "scalar"]

    def _scalars(self) -> None:
        """Operands with one value, and what can be computed from them alone, before any loop."""
        for n, operand in enumerate(self.program.loads):
            if self._kind(n) == "scalar":
                name = self.names.unique(operand.name, "_s")
                ctype = ctype_of(self.program, Load(n))
                self.w.line(
                    f"const {ctype} {name} = {converted(operand, f'{self.pointers.loads[n]}[0]', self.program.real)};"
                )
                self.terms[Load(n)] = name
        self.varies = varying(self.program, lambda v: v not in self.terms)
        fixed = [not v for v in self.varies]
        self.emitter.statements(self.w, self.terms, lambda k: fixed[k])

    def _register_type(self, n: int) -> str:
        ctype = self.program.loads[n].dtype.ctype
        return (
            ctype
            if self.schedule.vector == 1 or self._kind(n) == "uniform"
            else f"Vector<{ctype}, {self.schedule.vector}>"
        )

    def _register(self, n: int) -> str:
        if not hasattr(self, "_registers"):
            self._registers: dict[int, str] = {}
        if n not in self._registers:
            self._registers[n] = self.names.unique(self.program.loads[n].name, "_v")
        return self._registers[n]

    def _declare_vectors(self, except_: list[int] | None = None) -> None:
        for n in self._vector_loads():
            if n not in (except_ or []):
                self.w.line(f"{self._register_type(n)} {self._register(n)}[{self.schedule.unroll}];")

    def _load_phase(
        self, space: Coordinates | _RowSpace, count: str, only: list[int] | None = None, suffix: str | None = None
    ) -> None:
        """Issues the loads of one vector of every operand."""
        w, vector = self.w, self.schedule.vector
        at = ("[u]" if self.schedule.unroll > 1 else "") if suffix is None else suffix
        for n in self._vector_loads() if only is None else only:
            operand, pointer, register = self.program.loads[n], self.pointers.loads[n], self._register(n)
            kind = self._kind(n)
            target = f"{register}{at}" if at else f"{self._register_type(n)} {register}"
            const = "" if at else "const "
            if kind == "vector":
                text = _add(pointer, space.offset(operand.strides))
                w.line(f"{const}{target} = load<{vector}>({text}{', ' + count if count else ''});")
            elif vector == 1 or kind == "uniform":
                w.line(f"{const}{target} = {pointer}[{space.offset(operand.strides)}];")
            else:
                if not at:
                    w.line(f"{target};")
                self._per_element(space, operand.strides, count, f"{register}{at}[e] = {pointer}[{{}}];")

    def _per_element(self, space: Coordinates | _RowSpace, strides: tuple[int, ...], count: str, line: str) -> None:
        """A loop over a vector's elements with one access each: ``line``, with the offset in place of ``{}``."""
        w, s = self.w, self.schedule
        if self.shape[-1] % s.vector == 0:
            base = space.offset((*strides[:-1], 0)) if any(strides[:-1]) else ""
            col = space[len(self.shape) - 1] if strides[-1] else ""
            terms = [(f"({col} + e)", strides[-1])] if strides[-1] else []
            offset = " + ".join(t for t in (base, linear(terms) if terms else "") if t)
            w.line("#pragma unroll")
            w.line(f"for (int e = 0; e < {s.vector}; ++e) {line.format(offset)}")
            return
        # Vectors run over the ends of rows: every element finds its own coordinates.
        w.line("#pragma unroll")
        w.open(f"for (int e = 0; e < {s.vector}; ++e)")
        w.line(f"const {s.itype} o = {space.position} + e;")
        if count:
            w.open("if (o < size)")
        inner = Coordinates(w, "o", self.shape, s.itype, "o")
        w.line(line.format(inner.offset(strides)))
        if count:
            w.close()
        w.close()

    # ---- arithmetic

    def _compute_phase(self, space: Coordinates | _RowSpace, count: str, invariant: list[int] | None = None) -> None:
        """Evaluates the program for one vector and writes it."""
        w, s = self.w, self.schedule
        offsets = []
        for store in self.program.stores:
            kind = access(store.operand.strides, self.shape, s.vector, store.operand)
            kind = "element" if kind in ("scalar", "uniform") else kind
            offsets.append((kind, space.offset(store.operand.strides) if kind == "vector" or s.vector == 1 else ""))
        split = s.vector > 1 and self.shape[-1] % s.vector != 0
        indices = [] if split else [space.offset(strides) for strides in self.program.indices]
        results = [self.names.unique(store.operand.name, "_v") if s.vector > 1 else "" for store in self.program.stores]
        for store, name in zip(self.program.stores, results):
            if s.vector > 1:
                w.line(f"Vector<{store.operand.dtype.ctype}, {s.vector}> {name};")
        if s.vector > 1:
            w.line("#pragma unroll")
            w.open(f"for (int e = 0; e < {s.vector}; ++e)")
        terms = dict(self.terms)
        for n in self._vector_loads():
            at = "" if s.unroll == 1 or n in (invariant or []) else "[u]"
            element = "" if s.vector == 1 or self._kind(n) == "uniform" else "[e]"
            text = converted(self.program.loads[n], f"{self._register(n)}{at}{element}", self.program.real)
            terms[Load(n)] = self._name_if_shared(Load(n), text, self.program.loads[n].name)
        inner = Coordinates(w, f"({space.position} + e)", self.shape, s.itype, "o") if split else None
        for n, strides in enumerate(self.program.indices):
            if inner is not None:
                text = inner.offset(strides)
            else:
                step = strides[-1] if s.vector > 1 else 0
                text = indices[n] + (f" + e * {step}" if step > 1 else " + e" if step else "")
            terms[Index(n)] = self._name_if_shared(Index(n), f"int32({text})", "index")
        self.emitter.statements(w, terms, lambda k: self.varies[k])
        for store, name, (_, offset) in zip(self.program.stores, results, offsets):
            text = self.emitter.stored(store, terms, lambda v: ctype_of(self.program, v))
            if s.vector > 1:
                w.line(f"{name}[e] = {text};")
            else:
                pointer = self.pointers.stores[self.program.stores.index(store)]
                w.line(f"{pointer}[{offset}] = {text};")
        if s.vector == 1:
            return
        w.close()
        for store, name, pointer, (kind, offset) in zip(self.program.stores, results, self.pointers.stores, offsets):
            if kind == "vector":
                w.line(f"store({_add(pointer, offset)}, {name}{', ' + count if count else ''});")
            else:
                self._per_element(space, store.operand.strides, count, f"{pointer}[{{}}] = {name}[e];")

    def _name_if_shared(self, value: Value, text: str, stem: str) -> str:
        """A constant for a converted value that is used more than once; the expression itself otherwise."""
        if isinstance(value, (Literal, Result, Anchor)) or self.uses.get(value, 0) < 2 or "(" not in text:
            return text
        name = self.names.unique(stem, "_e")
        self.w.line(f"const {ctype_of(self.program, value)} {name} = {text};")
        return name


class _RowSpace:
    """Offsets in the rows form: columns ``col``, rows ``row``, and ``outer`` for all dimensions before them."""

    def __init__(self, w: Writer, shape: tuple[int, ...], itype: str, row: str) -> None:
        self.w, self.shape, self.itype, self.row = w, shape, itype, row
        self.position = ""
        self._outer = Coordinates(w, "outer", shape[:-2], itype, "i") if len(shape) > 2 else None
        if self._outer is not None:
            for d in range(len(shape) - 2):
                _ = self._outer[d]

    def at_row(self) -> _RowSpace:
        """The same columns in the row of the unrolled loop."""
        copy = object.__new__(_RowSpace)
        copy.__dict__.update(self.__dict__, row="row")
        return copy

    def __getitem__(self, dim: int) -> str:
        if dim == len(self.shape) - 1:
            return "col"
        if dim == len(self.shape) - 2:
            return self.row
        assert self._outer is not None
        return self._outer[dim]

    def offset(self, strides: tuple[int, ...]) -> str:
        return linear([(self[d], stride) for d, stride in enumerate(strides) if stride])


def _add(pointer: str, offset: str) -> str:
    return pointer if offset == "0" else f"{pointer} + {offset}"

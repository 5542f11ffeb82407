"""The contraction family, SIMT form: a tiled implicit GEMM for every matmul and convolution, any dtype.

A block computes a tile of rows x columns.  Tiles of both factors go through shared memory in the accumulator's type, two
stages deep: while a tile is multiplied the next one is on its way in registers.  Every thread keeps a small tile of sums in
registers and runs the program (the epilogue) on each.  Convolutions gather their input by coordinates: no im2col in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from codegen.expr import Anchor, Emitter, Index, Load, Operand, Program, Store, Value, ctype_of, varying
from codegen.iteration import Strides, collapse, coordinate, extent, index_type, linear
from codegen.kernel import Pointers, converted, heading, headers, parameter, signature
from codegen.naming import Names, Writer
from codegen.spec import ContractionSpec, Gather, KernelSource

CHUNK = 4  # sums of a thread lie in chunks of 4 neighbouring rows and columns: one shared-memory access loads four


@dataclass(frozen=True)
class ContractionSchedule:
    """Tile of a block (rows, cols, inner) and sums of a thread (thread_rows x thread_cols)."""

    rows: int
    cols: int
    inner: int
    thread_rows: int
    thread_cols: int
    itype: str

    @property
    def threads(self) -> int:
        return (self.rows // self.thread_rows) * (self.cols // self.thread_cols)


#: (rows, cols, inner, thread_rows, thread_cols), largest first.
TILES = (
    (128, 128, 8, 8, 8),
    (128, 64, 8, 8, 4),
    (64, 128, 8, 4, 8),
    (64, 64, 16, 4, 4),
    (128, 32, 16, 4, 4),
    (32, 128, 16, 4, 4),
    (32, 32, 16, 4, 4),
)
WAVE = 132


def best_schedule(spec: ContractionSpec) -> ContractionSchedule:
    """The tile with the least estimated time: padded work over the share of the multiprocessors that it keeps busy.

    Larger thread tiles read less shared memory for each product (their rate is higher), smaller ones waste less at the
    edges and fill the machine sooner.
    """
    batch, m, n = prod(spec.batch), prod(spec.rows), prod(spec.cols)
    wide = spec.accumulate in ("double", "uint64")

    def cost(tile: tuple[int, int, int, int, int]) -> float:
        rows, cols, _, tr, tc = tile
        blocks = batch * -(-m // rows) * -(-n // cols)
        waves = -(-blocks // WAVE)
        rate = tr * tc / (tr * tc + 2.0 * (tr + tc))
        return waves * rows * cols / rate

    candidates = [t for t in TILES if not (wide and t[3] * t[4] > 32)]
    rows, cols, inner, tr, tc = min(candidates, key=cost)
    return ContractionSchedule(rows, cols, inner, tr, tc, _itype(spec))


def _itype(spec: ContractionSpec) -> str:
    """int32 when every offset fits with room for padding, else int64 (gathers may start before the tensor)."""
    m, n = prod(spec.rows), prod(spec.cols)
    reach = [prod(spec.batch) * m * n, prod(spec.inner)]
    for gather, outer in ((spec.a, spec.rows), (spec.b, spec.cols)):
        reach.append(
            extent((*spec.batch, *outer, *spec.inner), (*gather.batch, *gather.outer, *gather.inner))
            + abs(gather.start)
        )
    space = (*spec.batch, *spec.rows, *spec.cols)
    reach += [extent(space, op.strides) for op in spec.program.operands]
    return "int32" if index_type(*(2 * r for r in reach)) == "uint32" else "int64"


def render(spec: ContractionSpec, schedule: ContractionSchedule | None = None) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    return _Renderer(spec, schedule or best_schedule(spec)).render()


@dataclass(frozen=True)
class _Side:
    """One factor with its outer dimensions and what the renderer calls things."""

    gather: Gather
    outer: tuple[int, ...]
    pointer: str
    label: str  # "a" or "b"
    tile: int  # rows or columns of the block's tile
    axis: str  # "m" or "n"


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: ContractionSchedule) -> None:
        self.spec, self.s = _merged(spec), schedule
        self.t = schedule.itype
        self.names = Names(
            {
                spec.name,
                "tile",
                "batch",
                "row0",
                "col0",
                "k",
                "k0",
                "kk",
                "i",
                "j",
                "m",
                "n",
                "mm",
                "nn",
                "sum",
                "stage",
                "inside",
                "fetch",
            }
            | {"a_tile", "b_tile", "a_next", "b_next", "a_part", "b_part", "tx", "ty", "t", "a_at", "b_at", "next"}
            | {f"{p}{d}" for p in "bmnkpq" for d in range(8)}
            | {f"{side}_{axis}{d}" for side in "ab" for axis in "mnk" for d in range(8)}
        )
        self.w = Writer()
        program = self.spec.program
        a, b = self.names.unique(spec.a.operand.name), self.names.unique(spec.b.operand.name)
        self.pointers = Pointers(program, self.names)
        self.a = _Side(self.spec.a, self.spec.rows, a, "a", schedule.rows, "m")
        self.b = _Side(self.spec.b, self.spec.cols, b, "b", schedule.cols, "n")
        self.emitter = Emitter(program, self.names)
        self.batch, self.m, self.n = prod(self.spec.batch), prod(self.spec.rows), prod(self.spec.cols)
        self.k = prod(self.spec.inner)
        self.tiles_m, self.tiles_n = -(-self.m // schedule.rows), -(-self.n // schedule.cols)
        self.terms: dict[Value, str] = {}
        # Neighbouring threads take neighbouring chunks of what is contiguous in the first output.
        first = program.stores[0].operand.strides
        base = len(self.spec.batch) + len(self.spec.rows)
        self.rows_fast = bool(first[base - 1] == 1 and self.spec.rows[-1] > 1 and first[-1] != 1)

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        program = spec.program
        plural = "nodes in one kernel" if len(program.notes) != 1 else "node"
        sizes = f"{self.batch} x " if self.batch > 1 else ""
        details = [
            f"{sizes}{self.m} x {self.n} sums of {self.k} products in {spec.accumulate}; "
            f"tile {s.rows} x {s.cols} x {s.inner} a block, {s.thread_rows} x {s.thread_cols} a thread"
        ]
        heading(w, f"{spec.name}: {len(program.notes)} {plural}", program, headers(program, "memory.cuh"), details)
        parameters = [parameter(spec.a.operand, self.a.pointer), parameter(spec.b.operand, self.b.pointer)]
        signature(w, spec.name, s.threads, parameters + self.pointers.parameters())
        self._position()
        self._shared()
        self._prepare(self.a)
        self._prepare(self.b)
        self._mainloop()
        self._epilogue()
        w.close()
        blocks = self.batch * self.tiles_m * self.tiles_n
        return KernelSource(spec.name, w.text(), (blocks, 1, 1), (s.threads, 1, 1), uses_barriers=True)

    # ---- where the block is

    def _position(self) -> None:
        w, s = self.w, self.s
        many = self.tiles_m * self.tiles_n
        position = f"{self.t}(blockIdx.x)"
        if self.batch > 1:
            w.line(f"const {self.t} batch = {position}{f' / {many}' if many > 1 else ''};")
            w.line(f"const {self.t} tile = {f'{position} % {many}' if many > 1 else '0'};")
        else:
            w.line(f"const {self.t} tile = {position};")
        w.line(
            f"const {self.t} row0 = tile % {self.tiles_m} * {s.rows};"
            if self.tiles_n > 1
            else f"const {self.t} row0 = tile * {s.rows};"
        )
        w.line(
            f"const {self.t} col0 = tile / {self.tiles_m} * {s.cols};"
            if self.tiles_n > 1
            else f"const {self.t} col0 = 0;"
        )
        w.line("const int t = threadIdx.x;")
        if self.batch > 1:
            for d in range(len(self.spec.batch) if len(self.spec.batch) > 1 else 0):
                w.line(f"const {self.t} b{d} = {coordinate('batch', self.spec.batch, d)};")

    def _batch_offset(self, strides: Sequence[int]) -> list[tuple[str, int]]:
        if self.batch == 1:
            return []
        names = ["batch"] if len(strides) == 1 else [f"b{d}" for d in range(len(strides))]
        return [(name, stride) for name, stride in zip(names, strides) if stride]

    def _shared(self) -> None:
        w, s, c = self.w, self.s, self.spec.accumulate
        w.line()
        # The pad keeps the rows of a tile 16-byte aligned and spreads the writes of one column over the banks.
        w.line(f"__shared__ __align__(16) {c} a_tile[2][{s.inner}][{s.rows + CHUNK}];")
        w.line(f"__shared__ __align__(16) {c} b_tile[2][{s.inner}][{s.cols + CHUNK}];")

    # ---- global memory -> registers -> shared memory

    def _plan(self, side: _Side) -> tuple[bool, int]:
        """(whether neighbouring threads walk the reduction, elements a thread fetches of each tile)."""
        gather = side.gather
        along_k = gather.inner[-1] == 1 and self.spec.inner[-1] > 1 or (gather.outer[-1] != 1 and gather.inner[-1] == 1)
        if not along_k and gather.outer[-1] != 1 and abs(gather.inner[-1]) < abs(gather.outer[-1]):
            along_k = True
        return along_k, side.tile * self.s.inner // self.s.threads

    def _prepare(self, side: _Side) -> None:
        """What stays the same over the reduction: which elements of a tile this thread fetches, and their outer offsets."""
        w, s = self.w, self.s
        along_k, count = self._plan(side)
        p, tile = side.label, side.tile
        w.line()
        step_outer = s.threads // s.inner if along_k else s.threads // tile
        if along_k:
            w.line(
                f"const int {p}_k = t % {s.inner}, {p}_{side.axis} = t / {s.inner};  // this thread's part of a tile of {side.pointer}"
            )
        elif s.threads >= tile:
            w.line(
                f"const int {p}_k = t / {tile}, {p}_{side.axis} = t % {tile};  // this thread's part of a tile of {side.pointer}"
            )
        rows = count if along_k else 1
        size = prod(side.outer)
        origin = "row0" if side.axis == "m" else "col0"
        gather = side.gather
        start = self._batch_offset(gather.batch)
        limits = gather.limits
        names = [f"{p}_base"] + [f"{p}_start{n}" for n in range(len(limits))]
        exact = size % tile == 0
        array = f"[{rows}]" if rows > 1 else ""
        w.line(f"{self.t} {', '.join(n + array for n in names)};")
        if not exact:
            w.line(f"bool {p}_inside{array};")
        if rows > 1:
            w.line("#pragma unroll")
            w.open(f"for (int i = 0; i < {rows}; ++i)")
        else:
            w.open("")
        at = "[i]" if rows > 1 else ""
        extra = f" + i * {step_outer}" if rows > 1 else ""
        position = f"{origin} + {p}_{side.axis}{extra}"
        w.line(f"const {self.t} {side.axis} = {position};")
        coords = [side.axis] if len(side.outer) == 1 else [f"{side.axis}{d}" for d in range(len(side.outer))]
        used = {d for d in range(len(side.outer)) if gather.outer[d]} | {x.outer_dim for x in limits}
        if len(side.outer) > 1:
            for d in sorted(used):
                w.line(f"const {self.t} {coords[d]} = {coordinate(side.axis, side.outer, d)};")
        terms = start + [(coords[d], gather.outer[d]) for d in range(len(side.outer))]
        w.line(f"{p}_base{at} = {linear(terms, gather.start)};")
        for number, x in enumerate(limits):
            w.line(f"{p}_start{number}{at} = {linear([(coords[x.outer_dim], x.outer_step)], x.start)};")
        if not exact:
            w.line(f"{p}_inside{at} = {side.axis} < {size};")
        w.close()

    def _fetch(self, side: _Side) -> None:
        """Reads this thread's elements of the tile at k0 into registers, zero outside."""
        w, s, c = self.w, self.s, self.spec.accumulate
        along_k, count = self._plan(side)
        p = side.label
        gather = side.gather
        inner = self.spec.inner
        exact_k = self.k % s.inner == 0
        exact = prod(side.outer) % side.tile == 0
        single = along_k  # one reduction position for all of the thread's elements
        step_k = s.threads // side.tile

        def position() -> str:
            return f"k0 + {p}_k" if single else f"k0 + {p}_k + i * {step_k}"

        def decode() -> list[str]:
            if len(inner) == 1:
                return ["k"]
            used = {d for d in range(len(inner)) if gather.inner[d]} | {x.inner_dim for x in gather.limits}
            for d in sorted(used):
                w.line(f"const {self.t} k{d} = {coordinate('k', inner, d)};")
            return [f"k{d}" for d in range(len(inner))]

        w.open("")
        if single:
            w.line(f"const {self.t} k = {position()};")
            coords = decode()
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {count}; ++i)")
        if not single:
            w.line(f"const {self.t} k = {position()};")
            coords = decode()
        at = "[i]" if along_k and count > 1 else ""
        conditions = [] if exact_k else [f"k < {self.k}"]
        if not exact:
            conditions.append(f"{p}_inside{at}")
        for number, x in enumerate(gather.limits):
            unsigned = "uint32" if self.t == "int32" else "uint64"
            conditions.append(
                f"{unsigned}({linear([(f'{p}_start{number}{at}', 1), (coords[x.inner_dim], x.inner_step)])}) < {x.size}"
            )
        terms = [(f"{p}_base{at}", 1), *((coords[d], gather.inner[d]) for d in range(len(inner)))]
        value = f"{side.pointer}[{linear(terms)}]"
        if gather.operand.dtype.ctype != c:
            value = f"{c}({value})" if c.startswith("uint") else f"convert<{c}>({value})"
        if len(conditions) > 1:
            w.line(f"const bool inside = {' && '.join(conditions)};")
            conditions = ["inside"]
        w.line(f"{p}_next[i] = {f'{conditions[0]} ? {value} : {c}(0)' if conditions else value};")
        w.close()
        w.close()

    def _stash(self, side: _Side, stage: str) -> None:
        """Writes the fetched elements to shared memory."""
        w, s = self.w, self.s
        along_k, count = self._plan(side)
        p = side.label
        step_outer, step_k = s.threads // s.inner, s.threads // side.tile
        at = f"[{p}_k][{p}_{side.axis} + i * {step_outer}]" if along_k else f"[{p}_k + i * {step_k}][{p}_{side.axis}]"
        w.line("#pragma unroll")
        w.line(f"for (int i = 0; i < {count}; ++i) {p}_tile[{stage}]{at} = {p}_next[i];")

    # ---- multiply

    def _mainloop(self) -> None:
        w, s, c = self.w, self.s, self.spec.accumulate
        counts = {side.label: self._plan(side)[1] for side in (self.a, self.b)}
        w.line()
        w.line(f"{c} a_next[{counts['a']}], b_next[{counts['b']}];")
        w.line(f"{c} sum[{s.thread_rows}][{s.thread_cols}] = {{}};")
        across, down = s.cols // s.thread_cols, s.rows // s.thread_rows
        if self.rows_fast:
            w.line(f"const int ty = t % {down}, tx = t / {down};  // threads side by side take neighbouring rows")
        else:
            w.line(
                f"const int tx = t % {across}, ty = t / {across};  // threads side by side take neighbouring columns"
            )
        steps = -(-self.k // s.inner)
        if steps == 0:
            return
        w.line()
        w.open(f"const auto fetch = [&]({self.t} k0)")
        self._fetch(self.a)
        self._fetch(self.b)
        w.close("};")
        w.line("fetch(0);")
        w.line("int stage = 0;")
        w.open(f"for ({self.t} k0 = 0; k0 < {steps * s.inner}; k0 += {s.inner}, stage ^= 1)")
        self._stash(self.a, "stage")
        self._stash(self.b, "stage")
        w.line("__syncthreads();  // one a tile is enough: the other stage was last read before the previous one")
        if steps > 1:
            w.line(f"if (k0 < {(steps - 1) * s.inner}) fetch(k0 + {s.inner});")
        w.line("#pragma unroll")
        w.open(f"for (int kk = 0; kk < {s.inner}; ++kk)")
        for side, tile, thread, which in (
            (self.a, s.thread_rows, "ty", "down"),
            (self.b, s.thread_cols, "tx", "across"),
        ):
            span = (down if which == "down" else across) * CHUNK
            p = side.label
            w.line(f"Vector<{c}, {CHUNK}> {p}_part[{tile // CHUNK}];")
            for chunk in range(tile // CHUNK):
                offset = f" + {chunk * span}" if chunk else ""
                w.line(f"{p}_part[{chunk}] = load_shared<{CHUNK}>(&{p}_tile[stage][kk][{thread} * {CHUNK}{offset}]);")
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {s.thread_rows}; ++i)")
        w.line("#pragma unroll")
        w.line(
            f"for (int j = 0; j < {s.thread_cols}; ++j) sum[i][j] += "
            f"a_part[i / {CHUNK}][i % {CHUNK}] * b_part[j / {CHUNK}][j % {CHUNK}];"
        )
        w.close()
        w.close()
        w.close()

    # ---- epilogue

    def _epilogue(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        program = spec.program
        nb, nr = len(spec.batch), len(spec.rows)
        down, across = s.rows // s.thread_rows * CHUNK, s.cols // s.thread_cols * CHUNK
        w.line()
        self._scalars(program)
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {s.thread_rows}; ++i)")
        w.line(f"const {self.t} m = row0 + ty * {CHUNK} + i / {CHUNK} * {down} + i % {CHUNK};")
        if self.m % s.rows:
            w.line(f"if (m >= {self.m}) continue;")
        every: list[tuple[str, Strides]] = [
            *((p, op.strides) for p, op in zip(self.pointers.loads, program.loads)),
            *((p, st.operand.strides) for p, st in zip(self.pointers.stores, program.stores)),
            *((f"index{n}", strides) for n, strides in enumerate(program.indices)),
        ]
        rows = ["m"] if nr == 1 else [f"m{d}" for d in range(nr)]
        used_rows = {d for _, strides in every for d in range(nr) if strides[nb + d]}
        if nr > 1:
            for d in sorted(used_rows):
                w.line(f"const {self.t} {rows[d]} = {coordinate('m', spec.rows, d)};")
        bases = {}
        for label, strides in every:
            terms = self._batch_offset(strides[:nb]) + [(rows[d], strides[nb + d]) for d in range(nr)]
            terms = [x for x in terms if x[1]]
            if len(terms) == 1 and terms[0][1] == 1:
                bases[label] = terms[0][0]
            elif terms:
                bases[label] = self.names.unique(label, "_row")
                w.line(f"const {self.t} {bases[label]} = {linear(terms)};")
            else:
                bases[label] = ""
        w.line("#pragma unroll")
        w.open(f"for (int j = 0; j < {s.thread_cols}; ++j)")
        w.line(f"const {self.t} n = col0 + tx * {CHUNK} + j / {CHUNK} * {across} + j % {CHUNK};")
        if self.n % s.cols:
            w.line(f"if (n >= {self.n}) continue;")

        def at(label: str, strides: Strides) -> str:
            terms = [(bases[label], 1)] if bases[label] else []
            return linear(terms + [("n", strides[-1])])

        terms = dict(self.terms)
        for n, (pointer, operand) in enumerate(zip(self.pointers.loads, program.loads)):
            if Load(n) not in terms:
                terms[Load(n)] = self._element(program, n, operand, f"{pointer}[{at(pointer, operand.strides)}]")
        for n, strides in enumerate(program.indices):
            terms[Index(n)] = f"int32({at(f'index{n}', strides)})"
        terms[Anchor()] = self._anchor()
        self.emitter.statements(w, terms, lambda k: self.varies[k])
        for store, pointer in zip(program.stores, self.pointers.stores):
            text = self.emitter.stored(store, terms, lambda v: ctype_of(program, v, spec.result))
            w.line(f"{pointer}[{at(pointer, store.operand.strides)}] = {text};")
        w.close()
        w.close()

    def _scalars(self, program: Program) -> None:
        for n, operand in enumerate(program.loads):
            if not any(operand.strides):
                name = self.names.unique(operand.name, "_s")
                text = converted(operand, f"{self.pointers.loads[n]}[0]", program.real)
                self.w.line(f"const {ctype_of(program, Load(n))} {name} = {text};")
                self.terms[Load(n)] = name
        self.varies = varying(program, lambda v: v not in self.terms)
        self.emitter.statements(self.w, self.terms, lambda k: not self.varies[k])

    def _element(self, program: Program, n: int, operand: Operand, text: str) -> str:
        name = self.names.unique(operand.name, "_e")
        self.w.line(f"const {ctype_of(program, Load(n))} {name} = {converted(operand, text, program.real)};")
        return name

    def _anchor(self) -> str:
        accumulate, result = self.spec.accumulate, self.spec.result
        if accumulate == result:
            return "sum[i][j]"
        if accumulate.startswith("uint"):  # modulo 2^32 or 2^64: the signed type of that size is the sum
            signed = accumulate.removeprefix("u")
            return f"{signed}(sum[i][j])" if signed == result else f"convert<{result}>({signed}(sum[i][j]))"
        return f"convert<{result}>(sum[i][j])"


def _merged(spec: ContractionSpec) -> ContractionSpec:
    """The spec with neighbouring batch and row dimensions merged wherever all operands allow it."""
    nb, nr = len(spec.batch), len(spec.rows)
    program = spec.program
    every = [op.strides for op in program.operands] + list(program.indices)
    batch, moved = collapse(spec.batch, [s[:nb] for s in every] + [spec.a.batch, spec.b.batch], range(nb))
    limited = {x.outer_dim for x in spec.a.limits}
    if limited:
        rows, over_rows = spec.rows, [s[nb : nb + nr] for s in every] + [spec.a.outer]
    else:
        rows, over_rows = collapse(spec.rows, [s[nb : nb + nr] for s in every] + [spec.a.outer], range(nr))
    new = [b + r + (s[-1],) for b, r, s in zip(moved, over_rows, every)]
    # The reduction runs in the memory order of the first factor, so that neighbouring threads read neighbouring elements.
    order = sorted(range(len(spec.inner)), key=lambda d: (-abs(spec.a.inner[d]), d))
    limits = spec.a.limits
    if limits:
        inner = tuple(spec.inner[d] for d in order)
        inner_a, inner_b = (tuple(g.inner[d] for d in order) for g in (spec.a, spec.b))
        limits = tuple(replace(x, inner_dim=order.index(x.inner_dim)) for x in limits)
    else:
        inner, (inner_a, inner_b) = collapse(spec.inner, [spec.a.inner, spec.b.inner], order)
    n, m = len(program.loads), len(program.stores)
    return replace(
        spec,
        batch=batch,
        rows=rows,
        inner=inner,
        a=replace(spec.a, batch=moved[-2], outer=over_rows[-1], inner=inner_a, limits=limits),
        b=replace(spec.b, batch=moved[-1], inner=inner_b),
        program=replace(
            program,
            loads=tuple(replace(op, strides=s) for op, s in zip(program.loads, new)),
            stores=tuple(Store(replace(st.operand, strides=s), st.value) for st, s in zip(program.stores, new[n:])),
            indices=tuple(new[n + m :]),
        ),
    )

"""The contraction family, SIMT form: a tiled implicit GEMM for every matmul and convolution, any dtype.

A block computes a tile of rows x columns.  Tiles of both operands go through shared memory in the accumulator's type,
two stages deep: while a tile is multiplied, the next one is in flight to registers (see
`codegen.contraction.simt_operands`).  Every thread keeps a small tile of sums in registers and runs the program (the
epilogue) on each.  Convolutions gather their input by coordinates: there is no im2col in memory.
"""

from __future__ import annotations

from codegen.contraction.merge import merged
from codegen.contraction.simt_operands import SimtOperand, SimtOperands, used
from codegen.contraction.simt_partials import SimtPartials
from codegen.contraction.simt_schedule import CHUNK, SimtSchedule, schedules
from codegen.epilogue import Epilogue, Run, placed
from codegen.iteration import coordinates, linear
from codegen.kernel import Kernel, locate
from codegen.prologue import Prologue
from codegen.spec import ContractionSpec, KernelSource


def render(spec: ContractionSpec, schedule: SimtSchedule | None = None) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(spec, schedule or schedules(spec)[0]).render()


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: SimtSchedule) -> None:
        self.spec, self.s, self.t = merged(spec), schedule, schedule.itype
        given, spec = spec, self.spec
        self.w = Kernel(spec.name)
        self.names = self.w.names
        a = Prologue(self.w, spec.a, self.names, "a")
        b = Prologue(self.w, spec.b, self.names, "b", spec.others)
        self.epilogue = Epilogue(self.w, spec.program, self.names, spec.space, spec.accumulate, spec.result)
        self.f = SimtOperands(self.w, spec, schedule, a, b)
        self.a, self.b = self.f.a, self.f.b
        self.batch, self.m, self.n, self.k = self.f.batch, self.f.m, self.f.n, self.f.k
        # Neighbouring threads take neighbouring chunks of what is contiguous in the first output.
        outputs = [store.operand.strides for store in spec.program.stores]
        fast = bool(outputs) and outputs[0][-2] == 1 and outputs[0][-1] != 1
        self.rows_fast = fast and spec.m[-1] > 1 and _in_order(spec)
        self.partials = SimtPartials(self.w, given, schedule, self.names, "batch" if self.batch > 1 else "0")

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        program = spec.program
        sizes = f"{self.batch} x " if self.batch > 1 else ""
        sizes = f"{spec.products} times {sizes}" if spec.products > 1 else sizes
        details = [
            f"{sizes}{self.m} x {self.n} sums of {self.k} products in {spec.accumulate}; "
            f"tile {s.tile_m} x {s.tile_n} x {s.tile_k} a block, {s.thread_rows} x {s.thread_cols} a thread"
        ]
        w.parameters += [text for side in (self.a, self.b) for text in side.prologue.parameters()]
        w.parameters += self.epilogue.pointers.parameters() + self.partials.parameters()
        blocks = locate(
            w,
            self.t,
            [("batch", self.batch, 1), ("col0", self.f.tiles_n, s.tile_n), ("row0", self.f.tiles_m, s.tile_m)],
        )
        if self.batch > 1 and len(spec.batch) > 1:
            coordinates(w, self.t, "b", "batch", spec.batch)
        w.line("const int t = threadIdx.x;")
        if self.k:
            self.f.shared()
            for side in (self.a, self.b):
                side.prologue.scalars()
            self.f.prepare(self.a)
            self.f.prepare(self.b)
        self._sums()
        if self.k:
            conditions = [self.f.within(x, ()) for x in spec.terms if not any(x.inner)]
            if conditions:
                w.line()
            with w.block(f"if ({' && '.join(conditions)})", when=bool(conditions)):
                self._mainloop()
        self._results()
        barriers = self.k > 0 or bool(self.partials)
        return w.source(program, details, blocks=blocks, threads=s.threads, barriers=barriers, blocks_per_sm=s.blocks)

    # ---- multiply

    def _sums(self) -> None:
        w, s = self.w, self.s
        across, down = s.tile_n // s.thread_cols, s.tile_m // s.thread_rows
        w.line()
        of = self.b.of(self.spec.products)
        w.line(f"{self.spec.accumulate} sum{of}[{s.thread_rows}][{s.thread_cols}] = {{}};")
        fast, slow, length = ("ty", "tx", down) if self.rows_fast else ("tx", "ty", across)
        neighbours = "rows" if self.rows_fast else "columns"
        w.line("const int warp = t / 32, lane = t % 32;")
        # Lanes n and n + 1, or n and n + 2, read the same address: then shared memory serves half a warp at a time.
        wide = [(f"(warp % {length // 8})", 8)] if length > 8 else []
        place = linear([*wide, ("lane / 2 % 8", 1)])
        w.line(f"const int {fast} = {place};  // pairs of threads side by side take neighbouring {neighbours}")
        place = linear([(f"warp / {length // 8}" if length > 8 else "warp", 4), ("lane / 16", 2), ("lane % 2", 1)])
        w.line(f"const int {slow} = {place};")

    def _mainloop(self) -> None:
        w, s, f = self.w, self.s, self.f
        last = (-(-self.k // s.tile_k) - 1) * s.tile_k
        w.line()
        f.declare()
        loop = f"for ({self.t} k0 = 0; k0 < {last + s.tile_k}; k0 += {s.tile_k}, stage ^= 1)"
        if s.apart:
            self._apart(loop, last)
            return
        with w.block(f"const auto fetch = [&]({self.t} k0)", "};"):
            f.fetch(self.a)
            f.fetch(self.b)
        w.line("fetch(0);")
        w.line("int stage = 0;")
        with w.block(loop):
            f.stash(self.a)
            f.stash(self.b)
            w.line("__syncthreads();  // one a tile is enough: the other stage was last read before the previous one")
            if last:
                w.line(f"if (k0 < {last}) fetch(k0 + {s.tile_k});")
            self._multiply("0", s.tile_k)

    def _apart(self, loop: str, last: int) -> None:
        """Writes the loop in two halves: in each, the next tile of one operand is in flight."""
        w, s, f = self.w, self.s, self.f
        for side in (self.a, self.b):
            with w.block(f"const auto fetch_{side.label} = [&]({self.t} k0)", "};"):
                f.fetch(side)
            with w.block(f"const auto write_{side.label} = [&](int stage)", "};"):
                f.stash(side)
        with w.block("const auto multiply = [&](int stage, int first)", "};"):
            self._multiply("first", s.tile_k // 2)
        for label in "ab":
            w.line(f"fetch_{label}(0);")
            w.line(f"write_{label}(0);")
        w.line("int stage = 0;")
        with w.block(loop):
            w.line("__syncthreads();  // one a tile is enough: the other stage was last read before it")
            w.line(f"const bool more = k0 < {last};")
            w.line(f"if (more) fetch_a(k0 + {s.tile_k});")
            w.line("multiply(stage, 0);")
            with w.block("if (more)"):
                w.line("write_a(stage ^ 1);")
                w.line(f"fetch_b(k0 + {s.tile_k});")
            w.line(f"multiply(stage, {s.tile_k // 2});")
            w.line("if (more) write_b(stage ^ 1);")

    def _multiply(self, first: str, count: int) -> None:
        """Writes the products of some terms of the tiles, added to the sums."""
        w, s = self.w, self.s
        end = str(count) if first == "0" else f"{first} + {count}"
        with w.unrolled(f"for (int kk = {first}; kk < {end}; ++kk)"):
            self._part(self.a, "", s.thread_rows, "ty")
            with w.unrolled(f"for (int p = 0; p < {self.spec.products}; ++p)", when=self.spec.products > 1):
                self._part(self.b, self.b.of("p"), s.thread_cols, "tx")
                with w.unrolled(f"for (int i = 0; i < {s.thread_rows}; ++i)"):
                    product = " * ".join(
                        f"{p}_part[{v} / {CHUNK}][{v} % {CHUNK}]" if mine > CHUNK else f"{p}_part[{v}]"
                        for p, v, mine in (("a", "i", s.thread_rows), ("b", "j", s.thread_cols))
                    )
                    sums = f"sum{self.b.of('p')}[i][j]"
                    w.unrolled_line(f"for (int j = 0; j < {s.thread_cols}; ++j) {sums} += {product};")

    def _part(self, side: SimtOperand, of: str, mine: int, thread: str) -> None:
        """Writes the loads of a thread's rows or columns of term ``kk`` from shared memory."""
        w, p = self.w, side.label
        at, first = ("kk", []) if not side.in_chunks else (f"kk / {CHUNK}", [(f"kk % {CHUNK}", side.tile)])
        spans = range(0, side.tile // mine * mine, side.tile // mine * CHUNK)
        places = [linear([*first, (thread, CHUNK)], span) for span in spans]
        loads = [f"load_shared<{CHUNK}>(&{p}_tile{of}[stage][{at}][{place}])" for place in places]
        if len(loads) == 1:
            w.line(f"const auto {p}_part = {loads[0]};")
            return
        w.line(f"const Vector<{self.spec.accumulate}, {CHUNK}> {p}_part[{len(loads)}] = {{")
        for load in loads:
            w.line(f"    {load},")
        w.line("};")

    # ---- epilogue

    def _results(self) -> None:
        """Writes the program on every sum: on chunks of neighbours where this makes an access wide, else one by one."""
        w, spec, program = self.w, self.spec, self.spec.program
        nb, nr = len(spec.batch), len(spec.m)
        w.line()
        self.epilogue.scalars()
        along = nb + nr - 1 if self.rows_fast else nb + nr
        fast = spec.m[-1] if self.rows_fast else self.n
        run = None
        if fast % CHUNK == 0 and any(self.epilogue.wide(op, CHUNK, along) for op in program.operands):
            run = Run(CHUNK, along, "e")
        depth = w.depth
        self.partials.begin_all()
        i = self._each("m", run if self.rows_fast else None)
        rows = ["m"]
        if nr > 1:
            every = [s[nb : nb + nr] for s in (*(op.strides for op in program.operands), *program.indices)]
            rows = coordinates(w, self.t, "m", "m", spec.m, used([x.outer for x in spec.results] or every))
        if spec.results:
            rows = self._placed(rows, leave="continue" if w.depth > depth else "return")
        j = self._each("n", None if self.rows_fast else run)
        sums = [f"sum{self.b.of(number)}[{i}][{j}]" for number in range(spec.products)]
        self.epilogue.results([*self.f.batches(), *rows, "n"], sums, run, sinks=self.partials.sinks(i, j))
        while w.depth > depth:
            w.close()
        self.partials.finish((self.a.origin, self.b.origin), (self.m, self.n))

    def _placed(self, rows: list[str], leave: str) -> list[str]:
        """Writes the program's row coordinates, given those of the sum, and skips places that have no result."""
        w, spec = self.w, self.spec
        batch = [*zip(self.f.batches(), spec.batch)]
        found, outside = placed(w, self.t, spec.results, batch, [*zip(rows, spec.m)])
        if outside:
            w.line(f"if ({' || '.join(outside)}) {leave};")
        return found

    def _each(self, axis: str, run: Run | None) -> str:
        """Opens the loop over a thread's rows or columns, or over chunks of them, and writes its position m or n.

        Returns the subscript of the sum.
        """
        w, s = self.w, self.s
        size, tile, mine, thread, side, each = (
            (self.m, s.tile_m, s.thread_rows, "ty", self.a, "i")
            if axis == "m"
            else (self.n, s.tile_n, s.thread_cols, "tx", self.b, "j")
        )
        chunks, span = mine // CHUNK, tile // mine * CHUNK
        count = chunks if run else mine
        variable = "c" if run else each
        if count > 1 or (self.partials and axis == "m"):
            w.line("#pragma unroll")
            w.open(f"for (int {variable} = 0; {variable} < {count}; ++{variable})")
        terms = [(side.origin, 1), (thread, CHUNK)]
        if run:
            terms += [(variable, span)] if chunks > 1 else []
        elif chunks == 1:
            terms += [(variable, 1)]
        else:
            terms += [(f"{variable} / {CHUNK} * {span}", 1), (f"{variable} % {CHUNK}", 1)]
        w.line(f"const {self.t} {axis} = {linear(terms)};")
        if size % tile:
            # Outside of any loop, these are the thread's only rows; columns are always inside the loop over rows.
            leave = "return" if count == 1 and axis == "m" and not self.partials else "continue"
            w.line(f"if ({axis} >= {size}) {leave};")
        if not run:
            return variable
        return run.element if chunks == 1 else f"{variable} * {CHUNK} + {run.element}"


def _in_order(spec: ContractionSpec) -> bool:
    """Tells whether neighbouring rows are neighbours in the program's space, too."""
    if not spec.results:
        return True
    last = spec.results[-1]
    return not any(last.batch) and last.start == 0 and last.outer == (0,) * (len(spec.m) - 1) + (1,)

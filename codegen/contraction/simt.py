"""The contraction family, SIMT form: a tiled implicit GEMM for every matmul and convolution, any dtype.

A block computes a tile of rows x columns.  Tiles of both operands go through shared memory in the accumulator's type,
two stages deep: while a tile is multiplied, the next one is in flight to registers (see
`codegen.contraction.simt_operands`).  Every thread keeps a small tile of sums in registers and runs the program (the
epilogue) on each.  Convolutions gather their input by coordinates: there is no im2col in memory.
"""

from __future__ import annotations

from math import prod

from codegen.buffers import Edge
from codegen.contraction.merge import merged
from codegen.contraction.simt_operands import SimtOperand
from codegen.contraction.simt_partials import SimtPartials
from codegen.contraction.simt_schedule import CHUNK, SimtSchedule, buffers, passes, passing, schedules
from codegen.epilogue import Epilogue, Run, batches, in_order, placed
from codegen.iteration import coordinates, linear, used
from codegen.kernel import Kernel, locate
from codegen.phases import condition, idle
from codegen.prologue import Prologue
from codegen.sizes import most
from codegen.spec import ContractionSpec, KernelSource

#: Most sums of a thread beside which it has room for operands of several results.
MOST_BESIDE = 64


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
        self.a = SimtOperand(self.w, spec, schedule, a, spec.m, "m", schedule.tile_m)
        self.b = SimtOperand(self.w, spec, schedule, b, spec.n, "n", schedule.tile_n)
        self.sides = (self.a, self.b)
        self.batch, self.k = prod(spec.batch), prod(spec.k)
        # Neighbouring threads take neighbouring chunks of what is contiguous in the first output.
        outputs = [store.operand.strides for store in spec.program.stores]
        fast = bool(outputs) and outputs[0][-2] == 1 and outputs[0][-1] != 1
        self.rows_fast = fast and spec.m[-1] > 1 and in_order(spec.results, len(spec.m))
        self.partials = SimtPartials(self.w, given, schedule, self.sides)

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        program = spec.program
        details = [
            f"{spec.sums} in {spec.accumulate}; "
            f"tile {s.tile_m} x {s.tile_n} x {s.tile_k} a block, {s.thread_rows} x {s.thread_cols} a thread"
            + (f"; {s.stages} stages filled by asynchronous copies" if s.copied else "")
        ]
        w.parameters += [text for side in self.sides for text in side.prologue.parameters()]
        w.parameters += self.epilogue.pointers.parameters() + self.partials.parameters()
        axes = [("col0", self.b.edge.tiles, s.tile_n), ("row0", self.a.edge.tiles, s.tile_m)]
        blocks = locate(w, self.t, [("batch", self.batch, 1), *axes])
        if self.batch > 1 and len(spec.batch) > 1:
            coordinates(w, self.t, "b", "batch", spec.batch)
        w.line("const int t = threadIdx.x;")
        if most(self.k):
            w.line()
            in_chunks = [side.in_chunks for side in self.sides]
            tiles = buffers(s.tile, spec.accumulate, spec.products, in_chunks, s.stages)
            if s.copied:
                w.share(tiles)
            else:
                for tile in tiles:
                    w.line(tile.static)
            for side in self.sides:
                side.prologue.scalars()
            for side in self.sides:
                side.prepare()
        self._sums()
        if most(self.k):
            nothing = condition(idle(spec), batches(spec.batch))
            if nothing:
                w.line()
            with w.guarded(f"!({nothing})" if nothing else ""):
                self._mainloop()
        self._results()
        barriers = most(self.k) > 0 or bool(self.partials)
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
        w, s = self.w, self.s
        last = (Edge(self.k, s.tile_k).tiles - 1) * s.tile_k
        w.line()
        if s.copied:
            self._ring(last)
            return
        self._declare()
        with w.block(f"const auto fetch = [&]({self.t} k0)", "};"):
            for side in self.sides:
                side.fetch()
        w.line("fetch(0);")
        w.line("int stage = 0;")
        with w.block(f"for ({self.t} k0 = 0; k0 < {last + s.tile_k}; k0 += {s.tile_k}, stage ^= 1)"):
            for side in self.sides:
                side.stash()
            w.line("__syncthreads();  // one a tile is enough: the other stage was last read before the previous one")
            if last:
                w.line(f"if (k0 < {last}) fetch(k0 + {s.tile_k});")
            with w.unrolled(f"for (int kk = 0; kk < {s.tile_k}; ++kk)"):
                self._multiply()

    def _declare(self) -> None:
        """Declares the registers for what a thread has fetched of the next tiles."""
        a, b = self.sides
        if all(side.prologue.program is None and side.width == 1 for side in self.sides):
            of = b.of(self.spec.products)
            self.w.line(f"{self.spec.accumulate} a_next[{a.count}], b_next{of}[{b.count}];")
            return
        for side in self.sides:
            side.declare()

    def _ring(self, last: int) -> None:
        """Writes the loop over a ring of stages that asynchronous copies fill.

        What a thread multiplies next is on its way from shared memory, and from a stage that has just landed while the
        last terms of the one before are multiplied.
        """
        w, s, ahead = self.w, self.s, self.s.stages - 1
        with w.block(f"const auto copy = [&]({self.t} k0, int stage)", "};"):
            for side in self.sides:
                side.fetch()
        for side in self.sides:
            w.line(f"Vector<float, {CHUNK}> {side.label}_parts[2][{side.chunks}];  // of two terms in turn")
        with w.block("const auto load_parts = [&](int stage, int kk)", "};"):
            for side in self.sides:
                place = linear([(side.thread, CHUNK), ("c", side.span)])
                load = f"load_shared<{CHUNK}>(&shared.{side.label}_tile[stage][kk][{place}])"
                w.unrolled_line(f"for (int c = 0; c < {side.chunks}; ++c) {side.label}_parts[kk % 2][c] = {load};")
        with w.unrolled(f"for (int n = 0; n < {ahead}; ++n)"):
            w.line(f"if (n * {s.tile_k} <= {last}) copy(n * {s.tile_k}, n);")
            w.line("copy_async_commit();")
        w.line(f"copy_async_wait<{ahead - 1}>();")
        w.line("__syncthreads();")
        w.line("load_parts(0, 0);")
        w.line(f"int stage = 0, filling = {ahead};")
        loop, terms = (
            f"for ({self.t} k0 = 0; k0 <= {last}; k0 += {s.tile_k})",
            f"for (int kk = 0; kk < {s.tile_k}; ++kk)",
        )
        with w.block(loop), w.unrolled(terms):
            with w.block(f"if (kk == {s.tile_k - 1})"):
                w.line(f"copy_async_wait<{ahead - 1}>();")
                w.line("__syncthreads();  // the next stage has landed, and the one before has been read")
                w.line(f"stage = stage == {ahead} ? 0 : stage + 1;")
            w.line(f"load_parts(stage, (kk + 1) % {s.tile_k});")
            with w.block("if (kk == 0)"):
                w.line(f"if (k0 + {ahead * s.tile_k} <= {last}) copy(k0 + {ahead * s.tile_k}, filling);")
                w.line("copy_async_commit();")
                w.line(f"filling = filling == {ahead} ? 0 : filling + 1;")
            for side in self.sides:
                w.line(f"const auto& {side.label}_part = {side.label}_parts[kk % 2];")
            self._products(in_chunks=True)

    def _multiply(self) -> None:
        """Writes the products of term ``kk`` of the tiles, added to the sums."""
        w, spec = self.w, self.spec
        self._part(self.a, "")
        with w.unrolled(f"for (int p = 0; p < {spec.products}; ++p)", when=spec.products > 1):
            self._part(self.b, self.b.of("p"))
            self._products()

    def _products(self, *, in_chunks: bool = False) -> None:
        """Writes the products of a thread's rows and columns; ``in_chunks``, these are arrays even of one chunk."""
        w, s = self.w, self.s
        with w.unrolled(f"for (int i = 0; i < {s.thread_rows}; ++i)"):
            product = ", ".join(
                f"{side.label}_part[{v} / {CHUNK}][{v} % {CHUNK}]"
                if side.chunks > 1 or in_chunks
                else f"{side.label}_part[{v}]"
                for side, v in zip(self.sides, "ij")
            )
            sums = f"sum{self.b.of('p')}[i][j]"
            total = f"multiply_add({product}, {sums})"
            w.unrolled_line(f"for (int j = 0; j < {s.thread_cols}; ++j) {sums} = {total};")

    def _part(self, side: SimtOperand, of: str) -> None:
        """Writes the loads of a thread's rows or columns of term ``kk`` from shared memory."""
        w, p = self.w, side.label
        at, first = ("kk", []) if not side.in_chunks else (f"kk / {CHUNK}", [(f"kk % {CHUNK}", side.tile)])
        places = [linear([*first, (side.thread, CHUNK)], n * side.span) for n in range(side.chunks)]
        loads = [f"load_shared<{CHUNK}>(&{p}_tile{of}[stage][{at}][{place}])" for place in places]
        if len(loads) == 1:
            w.line(f"const auto {p}_part = {loads[0]};")
            return
        with w.block(f"const Vector<{self.spec.accumulate}, {CHUNK}> {p}_part[{len(loads)}] =", "};"):
            for load in loads:
                w.line(f"{load},")

    # ---- epilogue

    def _results(self) -> None:
        """Writes the program on every sum: on chunks of neighbours where this makes an access wide, else one by one."""
        w, spec, operands = self.w, self.spec, self.spec.program.operands
        nb, nr = len(spec.batch), len(spec.m)
        w.line()
        self.epilogue.scalars()
        along, fast = (nb + nr - 1, spec.m[-1]) if self.rows_fast else (nb + nr, self.b.edge.total)
        run = None
        if fast % CHUNK == 0 and any(self.epilogue.wide(op, CHUNK, along) for op in operands):
            run = Run(CHUNK, along, "e")
        elif most(self.k) and fast > CHUNK and passes(spec, self.rows_fast):
            self._passed()
            return
        self.partials.begin_all()
        depth = w.depth
        with w.scope():
            i = self._each(self.a, run if self.rows_fast else None)
            place, outside = self._row()
            w.leave(*outside, how="continue" if w.depth > depth else "return")
            j = self._each(self.b, None if self.rows_fast else run)
            sums = [f"sum{self.b.of(number)}[{i}][{j}]" for number in range(spec.products)]
            self.epilogue.results([*place, "n"], sums, run, sinks=self.partials.sinks(i, j))
        self.partials.finish()

    def _row(self) -> tuple[list[str], list[str]]:
        """Writes the coordinates of row m; returns those of batch and row, and the conditions under which it has no
        results.
        """
        w, spec, rows, outside = self.w, self.spec, ["m"], list[str]()
        nb, nr = len(spec.batch), len(spec.m)
        if nr > 1:
            every = [s[nb : nb + nr] for s in spec.program.strides]
            rows = coordinates(w, self.t, "m", "m", spec.m, used([x.outer for x in spec.results] or every))
        if spec.results:
            batch = [*zip(batches(spec.batch), spec.batch)]
            rows, outside = placed(w, self.t, spec.results, batch, [*zip(rows, spec.m)])
        return [*batches(spec.batch), *rows], outside

    def _passed(self) -> None:
        """Writes the program on sums that the lanes of a warp pass to each other, so that they have neighbours.

        A warp's chunks of a row (or column) are 4 rows of 32 sums, one of each for a lane.
        """
        w, spec, s = self.w, self.spec, self.s
        fast, slow = self.sides if self.rows_fast else self.sides[::-1]
        tile, wide = passing(spec, s.threads), fast.tile // fast.mine // 8
        w.line(tile.static)
        w.line(
            "const int own = anew(t), own_warp = own / 32, own_lane = own % 32;  // not kept while products are made"
        )
        names = [f"{tile.name}{f'[{p}]' if spec.products > 1 else ''}[own_warp]" for p in range(spec.products)]
        with w.scope():
            i, c = w.each("i", slow.mine), w.each("c", fast.chunks)
            for p, name in enumerate(names):
                own = linear([(c, CHUNK), ("e", 1)])
                sum_ = f"sum{self.b.of(p)}[{own}][{i}]" if self.rows_fast else f"sum{self.b.of(p)}[{i}][{own}]"
                with w.block(""):
                    w.line(f"Vector<{spec.accumulate}, {CHUNK}> v;")
                    w.each_element(CHUNK, f"v[e] = {sum_};")
                    w.line(f"store_shared(&{name}[own_lane / 16 * 2 + own_lane % 2][own_lane / 2 % 8 * {CHUNK}], v);")
            w.line("__syncwarp();")
            chunk = [(f"{i} / {CHUNK}", slow.span), (f"{i} % {CHUNK}", 1)] if slow.chunks > 1 else [(i, 1)]
            across = linear(
                [
                    (slow.origin, 1),
                    (f"own_warp / {wide}" if wide > 1 else "own_warp", CHUNK * CHUNK),
                    ("r", CHUNK),
                    *chunk,
                ]
            )
            along = linear(
                [
                    (fast.origin, 1),
                    (f"own_warp % {wide}" if wide > 1 else "0", 8 * CHUNK),
                    ("own_lane", 1),
                    (c, fast.span),
                ]
            )
            places = {slow.axis: across, fast.axis: along}
            lines = f"for (int r = 0; r < {CHUNK}; ++r)"

            def place() -> tuple[list[str], list[str]]:
                """Writes the place of sum r; returns its coordinates, and the conditions under which there is none."""
                w.line(f"const {self.t} m = {places['m']}, n = {places['n']};")
                found, outside = self._row()
                return [*found, "n"], [self.a.edge.outside("m"), self.b.edge.outside("n"), *outside]

            run, vectors = Run(1, 0, "e"), dict[int, str]()
            # The operands of all first, if there are registers for them: no load waits for another's result.
            if self.epilogue.differing and s.thread_rows * s.thread_cols * spec.products <= MOST_BESIDE:
                vectors = {n: f"{name}[r]" for n, name in self.epilogue.declare(run, CHUNK).items()}
                with w.unrolled(lines):
                    at, conditions = place()
                    self.epilogue.bring(at, run, vectors, w.inside(*(f"!({x})" for x in conditions if x)))
            with w.unrolled(lines):
                at, conditions = place()
                w.leave(*conditions)
                self.epilogue.results(at, [f"{name}[r][own_lane]" for name in names], given=vectors)
            w.line("__syncwarp();")

    def _each(self, side: SimtOperand, run: Run | None) -> str:
        """Opens the loop over a thread's rows or columns, or over chunks of them, and writes its position m or n.

        Returns the subscript of the sum.
        """
        w, axis = self.w, side.axis
        count = side.chunks if run else side.mine
        variable = "c" if run else "i" if axis == "m" else "j"
        if count > 1 or (self.partials and axis == "m"):
            w.line("#pragma unroll")
            w.open(f"for (int {variable} = 0; {variable} < {count}; ++{variable})")
        own = [(variable, side.span if run else 1)]
        if side.chunks > 1 and not run:
            own = [(f"{variable} / {CHUNK} * {side.span}", 1), (f"{variable} % {CHUNK}", 1)]
        elif side.chunks == 1 and run:
            own = []
        w.line(f"const {self.t} {axis} = {linear([(side.origin, 1), (side.thread, CHUNK), *own])};")
        # Outside of any loop, these are the thread's only rows; columns are always inside the loop over rows.
        only = count == 1 and axis == "m" and not self.partials
        w.leave(side.edge.outside(axis), how="return" if only else "continue")
        if not run:
            return variable
        return run.element if side.chunks == 1 else f"{variable} * {CHUNK} + {run.element}"

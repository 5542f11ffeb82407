"""The contraction family's form for a large operand and few rows of the other one, by multiply-adds of single threads.

Neighbouring threads have neighbouring rows (or columns) of the large operand, as these lie in memory, and read its
elements once, straight to registers: such products wait for memory, whatever multiplies.  The few rows are in shared
memory.  The warps of a block may share the reduction; they add up their sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd, prod

from codegen.buffers import VECTORS, Edge, every, where
from codegen.contraction.stream_schedule import TOGETHER, StreamSchedule, buffers, fits, run, streams
from codegen.declined import Declined
from codegen.dtypes import SIZE_OF
from codegen.epilogue import Epilogue, Run, batches, operand_value
from codegen.iteration import bounds, coordinates, far, linear, signed_index_type, used
from codegen.kernel import Kernel, locate
from codegen.prologue import Prologue, Source
from codegen.sizes import most
from codegen.spec import ContractionSpec, KernelSource

#: How arrays are called of what comes while what is in the others is multiplied.  Of reads just in front of their use
#: the compiler has few on their way.
AHEAD = "_ahead"
#: Results of neighbouring few rows that a thread writes together.
BESIDE = 4


def render(spec: ContractionSpec, schedule: StreamSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Renderer(spec, schedule).render()


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: StreamSchedule) -> None:
        self.streams = found = streams(spec)
        self.spec, self.s = found.spec, schedule
        if not fits(found, schedule):
            raise Declined(f"{schedule} is none for these operands")
        spec = self.spec
        self.w = Kernel(spec.name)
        names = self.w.names
        self.sides = Prologue(self.w, spec.a, names, "a"), Prologue(self.w, spec.b, names, "b")
        self.large, self.few = self.sides if found.first else self.sides[::-1]
        self.epilogue = Epilogue(self.w, spec.program, names, spec.space, spec.accumulate, spec.result)
        self.rows, self.columns = Edge(found.few, schedule.rows), Edge(found.size, schedule.columns)
        self.row0, self.col0 = (
            name if most(e.tiles) > 1 else "0" for name, e in (("row0", self.rows), ("col0", self.columns))
        )
        self.run = min(run(found), schedule.terms) if schedule.vector == 1 else 1  # both are powers of two
        reach = [*spec.a.reaches(spec.batch, spec.m, spec.k), *spec.b.reaches(spec.batch, spec.n, spec.k)]
        self.t = signed_index_type(*reach, *bounds(spec.program.operands, spec.space), *far(spec.program))

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        what = "rows" if self.streams.first else "columns"
        shared = f"; {s.split} warps share the reduction" if s.split > 1 else ""
        details = [
            f"{spec.sums} in {spec.accumulate}",
            f"a thread has {s.vector} {what} of the large operand, and {s.rows} of the other one{shared}",
        ]
        w.parameters += [text for side in self.sides for text in side.parameters()]
        w.parameters += self.epilogue.pointers.parameters()
        batch = prod(spec.batch)
        axes = [("batch", batch, 1), ("col0", self.columns.tiles, s.columns), ("row0", self.rows.tiles, s.rows)]
        blocks = locate(w, self.t, axes)
        if len(spec.batch) > 1 and most(batch) > 1:
            coordinates(w, self.t, "b", "batch", spec.batch)
        w.line("const int t = threadIdx.x, lane = t % 32, warp = t / 32;")
        w.share(buffers(self.streams, s))
        for side in self.sides:
            side.scalars()
        self._fill()
        w.line()
        groups = f"warp / {s.split}" if s.split > 1 else "warp"
        mine = [(groups, 32 * s.vector)] if s.warps > s.split else []
        w.line(f"const {self.t} col = {linear([(self.col0, 1), *mine, ('lane', s.vector)])};")
        if self.columns.ragged:
            w.line(f"const bool inside = {self.columns.inside('col')};")
        self.large.begin(self.t, "", batches(spec.batch), ["col"])
        self._multiply()
        self._results()
        return w.source(spec.program, details, blocks=blocks, threads=s.threads, barriers=True)

    # ---- the few rows

    def _fill(self) -> None:
        """Writes how a block brings its few rows to shared memory, and zeros for terms that do not exist."""
        w, s, spec, few = self.w, self.s, self.spec, self.few
        sizes = spec.n if self.streams.first else spec.m
        depth, c = Edge(self.streams.depth, s.terms), spec.accumulate
        steps = few.gather.outer[-1], few.gather.inner[-1]
        by_terms = abs(steps[1]) < abs(steps[0])  # neighbouring threads read neighbours in memory
        w.line()
        w.line(f"#pragma unroll {TOGETHER}")
        with w.block(f"for (int i = t; i < {depth.padded * s.rows}; i += {s.threads})"):
            k, r = (f"i % {depth.padded}", f"i / {depth.padded}") if by_terms else (f"i / {s.rows}", f"i % {s.rows}")
            w.line(f"const {self.t} k = {k}, r = {r};" if s.rows > 1 else f"const {self.t} k = i, r = 0;")
            row = linear([(self.row0, 1), ("r", 1)])
            kept = every(depth.inside("k"), self.rows.inside(row))
            w.line(f"{c} value = 0;")
            with w.guarded(kept):
                place = [row]
                if len(sizes) > 1:
                    w.line(f"const {self.t} row = {row};")
                    place = coordinates(w, self.t, "r", "row", sizes)
                few.begin(self.t, "", batches(spec.batch), place)
                read = {source.value: self._element(few, source, "k") for source in few.sources}
                w.line(f"value = {operand_value(few.gather.operand, few.element(read), c)};")
            w.line("shared.few[k][r] = value;")
        w.line("__syncthreads();")

    def _element(self, side: Prologue, source: Source, k: str) -> str:
        """Returns the C expression of a source's element at this term."""
        at = self._at(side, source, k)
        return f"{source.pointer}[{at}]" if source.pointer else f"int32({at})"

    def _at(self, side: Prologue, source: Source, k: str) -> str:
        """Returns the C expression of where it lies."""
        return linear([side.start(source, ""), (k, side.place(source).inner[-1])])

    # ---- the large operand

    def _multiply(self) -> None:
        w, s, c = self.w, self.s, self.spec.accumulate
        depth = Edge(self.streams.depth, s.terms)
        step = s.terms * s.split
        w.line(f"{c} sum[{s.rows}][{s.vector}] = {{}};")
        begin = linear([(f"warp % {s.split}", s.terms)]) if s.split > 1 else "0"
        if s.split == 1 and most(depth.tiles) <= 1:
            w.line(f"constexpr {self.t} k0 = 0;")
            self._declare("")
            self._fetch("k0", "")
            self._terms(depth)
            return
        self._declare(AHEAD)
        with w.block(f"const auto fetch = [&]({self.t} first)", "};"):
            self._fetch("first", AHEAD)
        w.line(f"if ({begin} < {depth.padded}) fetch({begin});")
        with w.block(f"for ({self.t} k0 = {begin}; k0 < {depth.padded}; k0 += {step})"):
            for source, count, each in self._vectors():
                w.line(f"Vector<{source.ctype}, {count}> {source.next}[{each}];")
                w.unrolled_line(f"for (int u = 0; u < {each}; ++u) {source.next}[u] = {source.next}{AHEAD}[u];")
            w.line(f"if (k0 + {step} < {depth.padded}) fetch(k0 + {step});  // on its way while these are multiplied")
            self._terms(depth)

    def _terms(self, depth: Edge) -> None:
        """Writes the products of the terms that a thread has read."""
        w, s, c = self.w, self.s, self.spec.accumulate
        with w.scope():
            u = w.each("u", s.terms)
            w.line(f"const {self.t} k = {linear([('k0', 1), (u, 1)])};")
            self._few()
            v = w.each("v", s.vector)
            read = {x.value: self._next(x, u, v) for x in self.large.sources}
            value = operand_value(self.large.gather.operand, self.large.element(read), c)
            # What is computed of nothing may be no number: only what is read is zero where there is no term.
            kept = depth.inside("k") if self.large.program is not None else ""
            w.line(f"const {c} value = {where(kept, value, f'{c}(0)')};")
            total = f"sum[r][{v}]"
            w.unrolled_line(f"for (int r = 0; r < {s.rows}; ++r) {total} = multiply_add(few[r], value, {total});")

    def _few(self) -> None:
        """Writes the loads of term k of the few rows."""
        w, s, c = self.w, self.s, self.spec.accumulate
        chunk = min(s.rows, VECTORS // SIZE_OF[c])
        w.line(f"{c} few[{s.rows}];")
        with w.scope():
            n = w.each("n", s.rows // chunk)
            w.line(f"const auto chunk = load_shared<{chunk}>(&shared.few[k][{linear([(n, chunk)])}]);")
            w.each_element(chunk, f"few[{linear([(n, chunk), ('e', 1)])}] = chunk[e];")

    def _vectors(self) -> Iterator[tuple[Source, int, int]]:
        """Yields the sources that a thread reads, with the elements of a read, and how many of these it needs next."""
        for source in self.large.sources:
            if source.pointer:
                step = self.large.place(source).outer[-1]
                count = self.run if self.run > 1 else self.s.vector if step == 1 else 1
                yield source, count, self.s.terms // self.run

    def _declare(self, suffix: str) -> None:
        """Writes the arrays for what a thread reads at a time, vectors of rows, or of terms: zeros at first."""
        for source, count, each in self._vectors():
            self.w.line(f"Vector<{source.ctype}, {count}> {source.next}{suffix}[{each}] = {{}};")

    def _fetch(self, first: str, suffix: str) -> None:
        """Writes the reads of the terms from ``first`` on."""
        w, depth = self.w, Edge(self.streams.depth, self.s.terms)
        with w.guarded("inside" if self.columns.ragged else ""):
            for source, count, each in self._vectors():
                with w.scope():
                    u = w.each("u", each)
                    k = linear([(first, 1), (u, self.run)])
                    text = f"load<{count}>({source.pointer} + {self._at(self.large, source, k)})"
                    text = where(depth.inside(k), text, f"Vector<{source.ctype}, {count}>{{}}")
                    w.line(f"{source.next}{suffix}[{u}] = {text};")

    def _next(self, source: Source, u: str, v: str) -> str:
        """Returns the C expression of an element that has been read."""
        step = self.large.place(source).outer[-1]
        if not source.pointer:
            return f"int32({linear([(self._at(self.large, source, f'k0 + {u}'), 1), (v, step)])})"
        if self.run > 1:
            return f"{source.next}[{u} / {self.run}][{u} % {self.run}]"
        return f"{source.next}[{u}][{v if step == 1 else 0}]"

    # ---- results

    def _results(self) -> None:
        w, s = self.w, self.s
        w.line()
        self.epilogue.scalars()
        run, e = Run(s.vector, self.streams.along, "e"), "e" if s.vector > 1 else "0"
        if s.split > 1:
            self._combined(run)
            return
        w.leave("!inside" if self.columns.ragged else "", how="return")
        if self._beside():
            with w.scope():
                n = w.each("n", s.rows // BESIDE)
                row = linear([(n, BESIDE)])
                self._rows(row, lambda v: f"sum[{linear([(n, BESIDE), ('e', 1)])}][{v}]")
            return
        differ = self.epilogue.differing
        together = gcd(s.rows, self.epilogue.together(run)) if differ else 1
        with w.scope():
            row = linear([(w.each("n", s.rows // together), together), ("i" if together > 1 else "0", 1)])
            given = {}
            if together > 1:
                given = {n: f"{name}[i]" for n, name in self.epilogue.declare(run, together).items()}
                with w.repeated("i", together):
                    self.epilogue.bring(self._position(row), run, given)
            w.each("i", together)
            self.epilogue.results(self._position(row), [f"sum[{row}][{e}]"], run, given=given)

    def _combined(self, run: Run) -> None:
        """Writes the results of warps that share the reduction: each has some of the rows."""
        w, s, c = self.w, self.s, self.spec.accumulate
        with w.unrolled(f"for (int r = 0; r < {s.rows}; ++r)", f"for (int v = 0; v < {s.vector}; ++v)"):
            w.line("shared.parts[warp][r][v][lane] = sum[r][v];")
        w.line("__syncthreads();")
        w.leave("!inside" if self.columns.ragged else "", how="return")
        first = f"warp / {s.split} * {s.split}" if s.warps > s.split else "0"
        if self._beside():
            each = linear([(f"warp % {s.split}", BESIDE)])
            with w.block(f"for (int r = {each}; r < {s.rows}; r += {s.split * BESIDE})"):
                w.line(f"{c} whole[{BESIDE}][{s.vector}] = {{}};")
                loops = (("n", s.split), ("i", BESIDE), ("v", s.vector))
                with w.unrolled(*(f"for (int {x} = 0; {x} < {size}; ++{x})" for x, size in loops)):
                    w.line(f"whole[i][v] += shared.parts[{linear([(first, 1), ('n', 1)])}][r + i][v][lane];")
                self._rows("r", lambda v: f"whole[e][{v}]")
            return
        with w.block(f"for (int r = warp % {s.split}; r < {s.rows}; r += {s.split})"):
            position = self._position("r")
            w.line(f"{c} whole[{s.vector}] = {{}};")
            with w.unrolled(f"for (int n = 0; n < {s.split}; ++n)"):
                part = f"shared.parts[{linear([(first, 1), ('n', 1)])}][r][v][lane]"
                w.unrolled_line(f"for (int v = 0; v < {s.vector}; ++v) whole[v] += {part};")
            self.epilogue.results(position, [f"whole[{'e' if s.vector > 1 else '0'}]"], run)

    def _beside(self) -> bool:
        """Tells whether results of neighbouring few rows lie beside each other, and are written together."""
        stores, last = [store.operand for store in self.spec.program.stores], len(self.spec.space) - 1
        whole = self.s.rows % BESIDE == 0 and self.rows.total % BESIDE == 0
        return self.streams.first and whole and all(self.epilogue.wide(op, BESIDE, last) for op in stores)

    def _rows(self, row: str, sums: Callable[[str], str]) -> None:
        """Writes results of neighbouring few rows together, for each of a thread's columns v with its sums ``e``."""
        w = self.w
        with w.scope():
            v = w.each("v", self.s.vector)
            *lead, _, at = self._position(row)
            position = [*lead, linear([("col", 1), (v, 1)]), at]
            self.epilogue.results(position, [sums(v)], Run(BESIDE, len(self.spec.space) - 1, "e"))

    def _position(self, row: str) -> list[str]:
        """Writes where a thread's results of one of its few rows lie; leaves the loop if there is no such row."""
        w, spec = self.w, self.spec
        at = linear([(self.row0, 1), (row, 1)])
        w.leave(self.rows.outside(at))
        if self.streams.first:
            return [*batches(spec.batch), "col", at]
        rows = [at]
        if len(spec.m) > 1:
            w.line(f"const {self.t} m = {at};")
            nb, nr = len(spec.batch), len(spec.m)
            operands = [*(op.strides for op in spec.program.operands), *spec.program.indices]
            rows = coordinates(w, self.t, "m", "m", spec.m, used([x[nb : nb + nr] for x in operands]))
        return [*batches(spec.batch), *rows, "col"]

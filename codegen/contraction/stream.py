"""The contraction family's form for a large operand and few rows of the other one, by multiply-adds of single threads.

Neighbouring threads have neighbouring rows (or columns) of the large operand, as these lie in memory, and read its
elements once, straight to registers: such products wait for memory, whatever multiplies.  Where it lies along the
reduction, neighbouring lanes share a row instead.  The few rows are in shared memory, and come while the first elements
of the large operand are on their way.  The warps of a block may share the reduction; lanes and warps add up their sums
in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd, prod

from codegen.buffers import VECTORS, Edge, every, guard, where
from codegen.contraction.stream_schedule import TOGETHER, StreamSchedule, buffers, chunk, fits, streams, whole
from codegen.declined import Declined
from codegen.epilogue import Epilogue, Run, batches, operand_value
from codegen.iteration import bounds, coordinates, far, linear, signed_index_type, used, widest_vector
from codegen.kernel import Kernel, locate
from codegen.prologue import Prologue, Source
from codegen.sizes import most
from codegen.spec import ContractionSpec, KernelSource

#: How arrays are called of what comes while what is in the others is multiplied.  Of reads just in front of their use
#: the compiler has few on their way.
AHEAD = "_ahead"
#: Results of neighbouring few rows that a thread writes together.
BESIDE = 4


def _read(source: Source, suffix: str = "") -> str:
    """Returns the name of the array of what a thread has read of a source."""
    return f"{source.name}{f'_{source.product}' if source.of else ''}_next{suffix}"


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
        self.sides = Prologue(self.w, spec.a, names, "a"), Prologue(self.w, spec.b, names, "b", spec.others)
        self.large, self.few = self.sides if found.first else self.sides[::-1]
        self.epilogue = Epilogue(self.w, spec.program, names, spec.space, spec.accumulate, spec.result)
        self.rows, self.columns = Edge(found.few, schedule.rows), Edge(found.size, schedule.columns)
        self.row0, self.col0 = (
            name if most(e.tiles) > 1 else "0" for name, e in (("row0", self.rows), ("col0", self.columns))
        )
        self.depth = Edge(found.depth, schedule.step)
        self.sums = spec.products * schedule.rows  # of a column: all rows of one product, and then of the next
        one = schedule.vector == 1 or schedule.lanes > 1
        self.run = min(found.run, schedule.terms) if one else 1  # both are powers of two
        reach = [*spec.a.reaches(spec.batch, spec.m, spec.k), *spec.b.reaches(spec.batch, spec.n, spec.k)]
        self.t = signed_index_type(*reach, *bounds(spec.program.operands, spec.space), *far(spec.program))

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        what = "rows" if self.streams.first else "columns"
        sharing = [f"{n} {who}" for n, who in ((s.split, "warps"), (s.lanes, "lanes of each")) if n > 1]
        shared = f"; {' and '.join(sharing)} share the reduction" if sharing else ""
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
        groups = f"warp / {s.split}" if s.split > 1 else "warp"
        mine = [(groups, 32 // s.lanes * s.vector)] if s.warps > s.split else []
        if s.lanes > 1:
            w.line(f"const int own = lane % {s.lanes};  // among the lanes that share a sum")
        lane = f"lane / {s.lanes}" if s.lanes > 1 else "lane"
        w.line(f"const {self.t} col = {linear([(self.col0, 1), *mine, (lane, s.vector)])};")
        if self.columns.ragged:
            w.line(f"const bool inside = {self.columns.inside('col')};")
        self.large.begin(self.t, "", batches(spec.batch), ["col"])
        self._begin()
        self._fill()
        self._multiply()
        self._results()
        return w.source(spec.program, details, blocks=blocks, threads=s.threads, barriers=True)

    # ---- the few rows

    def _fill(self) -> None:
        """Writes how a block brings its few rows to shared memory, and zeros for terms that do not exist."""
        w, s, spec, few = self.w, self.s, self.spec, self.few
        sizes = spec.n if self.streams.first else spec.m
        depth, c = self.depth, spec.accumulate
        steps = few.gather.outer[-1], few.gather.inner[-1]
        by_terms = abs(steps[1]) < abs(steps[0])  # neighbouring threads read neighbours in memory
        wide = self._width()
        terms, rows = (depth.padded // wide, s.rows) if by_terms else (depth.padded, s.rows // wide)
        w.line()
        w.line(f"#pragma unroll {TOGETHER}")
        with w.block(f"for (int i = t; i < {terms * rows}; i += {s.threads})"):
            k, r = (f"i % {terms}", f"i / {terms}") if by_terms else (f"i / {rows}", f"i % {rows}")
            k, r = linear([(k, wide if by_terms else 1)]), linear([(r, 1 if by_terms else wide)])
            w.line(f"const {self.t} k = {k}, r = {r};" if s.rows > 1 else f"const {self.t} k = {k}, r = 0;")
            row = linear([(self.row0, 1), ("r", 1)])
            kept = every(depth.inside("k"), self.rows.inside(row))
            w.line(f"Vector<{few.sources[0].ctype}, {wide}> piece = {{}};" if wide > 1 else f"{c} value = 0;")
            with w.guarded(kept):
                place = [row]
                if len(sizes) > 1:
                    w.line(f"const {self.t} row = {row};")
                    place = coordinates(w, self.t, "r", "row", sizes)
                few.begin(self.t, "", batches(spec.batch), place)
                if wide > 1:
                    (only,) = few.sources
                    w.line(f"piece = load<{wide}>({only.pointer} + {self._at(few, only, 'k')});")
                else:
                    read = {source.value: self._element(few, source, "k") for source in few.sources}
                    w.line(f"value = {operand_value(few.gather.operand, few.element(read), c)};")
            if wide == 1:
                w.line(f"shared.few[{self._held('k', 'r')}] = value;")
            else:
                k, r = ("(k + e)", "r") if by_terms else ("k", "(r + e)")
                value = operand_value(few.gather.operand, "piece[e]", c)
                w.each_element(wide, f"shared.few[{self._held(k, r)}] = {value};")
        w.line("__syncthreads();")

    def _width(self) -> int:
        """Returns how many neighbours of the few rows one access brings, along the sum or along a column."""
        s, few = self.s, self.few.gather
        (batch, *_), (outer, *_), (inner, *_) = few.steps()
        by_terms = abs(inner[-1]) < abs(outer[-1])
        if few.program is not None or (inner[-1] if by_terms else outer[-1]) != 1:
            return 1
        lengths = (self.depth.total, self.depth.padded) if by_terms else (self.rows.total, s.rows)
        others = (*batch, *outer, few.start) if by_terms else (*batch, *outer[:-1], *inner, few.start)

        def suits(count: int) -> bool:
            return all(n % count == 0 for n in lengths) and whole(few.operand, count, others)

        return widest_vector(VECTORS // few.operand.dtype.itemsize, suits)

    def _held(self, k: str, r: str) -> str:
        """Returns the C subscripts of an element of the few rows in shared memory.

        For lanes that have ``run`` terms side by side all first terms lie one behind another, then all second ones:
        they read neighbours.
        """
        if self.s.lanes == 1:
            return f"{k}][{r}"
        each = chunk(self.spec.accumulate, self.s.rows)
        if self.run > 1:
            k = linear([(f"{k} % {self.run}", self.depth.padded // self.run), (f"{k} / {self.run}", 1)])
        return f"{f'{r} / {each}' if self.s.rows > each else '0'}][{k}][{f'{r} % {each}' if each > 1 else '0'}"

    def _element(self, side: Prologue, source: Source, k: str) -> str:
        """Returns the C expression of a source's element at this term."""
        at = self._at(side, source, k)
        return f"{source.pointer}[{at}]" if source.pointer else f"int32({at})"

    def _at(self, side: Prologue, source: Source, k: str) -> str:
        """Returns the C expression of where it lies."""
        return linear([side.start(source, ""), (k, side.place(source).inner[-1])])

    # ---- the large operand

    def _begin(self) -> None:
        """Writes the first reads: they are on their way while the few rows come."""
        w, s, depth = self.w, self.s, self.depth
        begin = linear([(f"warp % {s.split}", s.step if s.split > 1 else 0), ("own", self.run if s.lanes > 1 else 0)])
        w.line(f"const {self.t} begin = {begin};")
        if self.once:
            self._declare("")
            self._fetch("begin", "")
            return
        self._declare(AHEAD)
        with w.block(f"const auto fetch = [&]({self.t} first)", "};"):
            self._fetch("first", AHEAD)
        w.line(f"if (begin < {depth.padded}) fetch(begin);")

    @property
    def once(self) -> bool:
        """Whether all terms of a sum are read at once."""
        return self.s.split == 1 and most(self.depth.tiles) <= 1

    def _multiply(self) -> None:
        w, s, c = self.w, self.s, self.spec.accumulate
        depth, step = self.depth, s.step * s.split
        w.line()
        w.line(f"{c} sum[{self.sums}][{s.vector}] = {{}};")
        if self.once:
            self._terms("begin")
            return
        with w.block(f"for ({self.t} k0 = begin; k0 < {depth.padded}; k0 += {step})"):
            for source, count, each in self._vectors():
                w.line(f"Vector<{source.ctype}, {count}> {_read(source)}[{each}];")
                w.unrolled_line(f"for (int u = 0; u < {each}; ++u) {_read(source)}[u] = {_read(source, AHEAD)}[u];")
            w.line(f"if (k0 + {step} < {depth.padded}) fetch(k0 + {step});  // on its way while these are multiplied")
            self._terms("k0")

    def _terms(self, first: str) -> None:
        """Writes the products of the terms that a thread has read, from ``first`` on."""
        w, s, c = self.w, self.s, self.spec.accumulate
        with w.scope():
            u = w.each("u", s.terms)
            w.line(f"const {self.t} k = {self._term(first, u)};")
            self._few()
            v = w.each("v", s.vector)
            # What is computed of nothing may be no number: only what is read is zero where there is no term.
            kept = self.depth.inside("k") if self.large.program is not None else ""
            for product in range(self.spec.products):
                read = {x.value: self._next(x, "k", u, v) for x in self.large.sources_of(product)}
                value = operand_value(self.large.gather.operand, self.large.element(read, product), c)
                name = f"value{product or ''}"
                w.line(f"const {c} {name} = {where(kept, value, f'{c}(0)')};")
                total = f"sum[{linear([('r', 1)], product * s.rows)}][{v}]"
                w.unrolled_line(f"for (int r = 0; r < {s.rows}; ++r) {total} = multiply_add(few[r], {name}, {total});")

    def _term(self, first: str, u: str) -> str:
        """Returns the C expression of a thread's u-th term from ``first`` on."""
        if self.s.lanes == 1 or self.run == self.s.terms:
            return linear([(first, 1), (u, 1)])
        if self.run == 1:
            return linear([(first, 1), (u, self.s.lanes)])
        return linear([(first, 1), (f"{u} / {self.run}", self.s.lanes * self.run), (f"{u} % {self.run}", 1)])

    def _few(self) -> None:
        """Writes the loads of term k of the few rows."""
        w, s, c = self.w, self.s, self.spec.accumulate
        each = chunk(c, s.rows)
        w.line(f"{c} few[{s.rows}];")
        with w.scope():
            n = w.each("n", s.rows // each)
            at = self._held("k", linear([(n, each)]))
            w.line(f"const auto chunk = load_shared<{each}>(&shared.few[{at}]);")
            w.each_element(each, f"few[{linear([(n, each), ('e', 1)])}] = chunk[e];")

    def _vectors(self) -> Iterator[tuple[Source, int, int]]:
        """Yields the sources that a thread reads, with the elements of a read, and how many of these it needs next.

        Lanes that share a sum need these for each of their columns, one column behind another.
        """
        for source in self.large.sources:
            if source.pointer:
                step, apart = self.large.place(source).outer[-1], self.s.lanes > 1
                count = self.run if apart or self.run > 1 else self.s.vector if step == 1 else 1
                yield source, count, self.s.terms // self.run * (self.s.vector if apart else 1)

    def _declare(self, suffix: str) -> None:
        """Writes the arrays for what a thread reads at a time, vectors of rows, or of terms: zeros at first."""
        for source, count, each in self._vectors():
            self.w.line(f"Vector<{source.ctype}, {count}> {_read(source, suffix)}[{each}] = {{}};")

    def _fetch(self, first: str, suffix: str) -> None:
        """Writes the reads of the terms from ``first`` on."""
        w, depth = self.w, self.depth
        with w.guarded("inside" if self.columns.ragged else ""):
            for source, count, each in self._vectors():
                with w.scope():
                    v, of_column = "0", each
                    if self.s.lanes > 1:
                        v, of_column = w.each("v", self.s.vector), each // self.s.vector
                    u = w.each("u", of_column)
                    k = linear([(first, 1), (u, self.run * self.s.lanes)])
                    step = self.large.place(source).outer[-1]
                    at = linear([(self._at(self.large, source, k), 1), (v, step)])
                    text = f"load<{count}>({source.pointer} + {at})"
                    text = where(depth.inside(k), text, f"Vector<{source.ctype}, {count}>{{}}")
                    w.line(f"{_read(source, suffix)}[{linear([(v, of_column), (u, 1)])}] = {text};")

    def _next(self, source: Source, k: str, u: str, v: str) -> str:
        """Returns the C expression of an element that has been read."""
        step = self.large.place(source).outer[-1]
        if not source.pointer:
            return f"int32({linear([(self._at(self.large, source, k), 1), (v, step)])})"
        of_column = self.s.terms // self.run if self.s.lanes > 1 else 0
        if self.run > 1:
            return f"{_read(source)}[{linear([(v, of_column), (f'{u} / {self.run}', 1)])}][{u} % {self.run}]"
        if of_column:
            return f"{_read(source)}[{linear([(v, of_column), (u, 1)])}][0]"
        return f"{_read(source)}[{u}][{v if step == 1 else 0}]"

    # ---- results

    def _results(self) -> None:
        w, s = self.w, self.s
        w.line()
        self.epilogue.scalars()
        run, e = Run(s.vector, self.streams.along, "e"), "e" if s.vector > 1 else "0"
        if s.split * s.lanes > 1:
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
            sums = [f"sum[{linear([(row, 1)], p * s.rows)}][{e}]" for p in range(self.spec.products)]
            self.epilogue.results(self._position(row), sums, run, given=given)

    def _combined(self, run: Run) -> None:
        """Writes the results of warps and lanes that share the reduction: each has some of the rows."""
        w, s, spec, c = self.w, self.s, self.spec, self.spec.accumulate
        e, place = ("e" if s.vector > 1 else "0"), f"lane / {s.lanes}" if s.lanes > 1 else "lane"
        with w.unrolled(f"for (int r = 0; r < {self.sums}; ++r)", f"for (int v = 0; v < {s.vector}; ++v)"):
            if s.lanes > 1:
                w.line(f"sum[r][v] = reduce::lanes<reduce::Add, {s.lanes}>(sum[r][v]);")
            w.line(f"{guard('own == 0' if s.lanes > 1 else '')}shared.parts[warp][r][v][{place}] = sum[r][v];")
        w.line("__syncthreads();")
        w.leave("!inside" if self.columns.ragged else "", how="return")
        first = f"warp / {s.split} * {s.split}" if s.warps > s.split else "0"
        parts = linear([(first, 1), ("n" if s.split > 1 else "0", 1)])
        own = [(f"warp % {s.split}", s.lanes if s.split > 1 else 0), ("own", 1 if s.lanes > 1 else 0)]
        step = s.split * s.lanes
        of_parts = (("n", s.split if s.split > 1 else 0),)
        if self._beside():
            each = linear([(x, BESIDE * count) for x, count in own])
            with w.block(f"for (int r = {each}; r < {s.rows}; r += {step * BESIDE})"):
                w.line(f"{c} whole[{BESIDE}][{s.vector}] = {{}};")
                self._added((*of_parts, ("i", BESIDE), ("v", s.vector)), "whole[i][v]", f"{parts}][r + i", place)
                self._rows("r", lambda v: f"whole[e][{v}]")
            return
        with w.block(f"for (int r = {linear(own)}; r < {s.rows}; r += {step})"):
            position, products = self._position("r"), spec.products
            of, p = ("[p]", "p") if products > 1 else ("", "0")
            w.line(f"{c} whole{of.replace('p', str(products))}[{s.vector}] = {{}};")
            loops = (*of_parts, ("p", products if of else 0), ("v", s.vector))
            self._added(loops, f"whole{of}[v]", f"{parts}][{linear([(p, s.rows), ('r', 1)])}", place)
            self.epilogue.results(position, [f"whole{of.replace('p', str(p))}[{e}]" for p in range(products)], run)

    def _added(self, loops: Sequence[tuple[str, int]], whole: str, part: str, place: str) -> None:
        """Writes that parts of sums are added up, in nested loops, of which those that run 0 times are left out."""
        *heads, last = (f"for (int {x} = 0; {x} < {size}; ++{x})" for x, size in loops if size)
        with self.w.unrolled(*heads) if heads else self.w.scope():
            self.w.unrolled_line(f"{last} {whole} += shared.parts[{part}][v][{place}];")

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

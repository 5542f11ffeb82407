"""The contraction family, SIMT form: a tiled implicit GEMM for every matmul and convolution, any dtype.

A block computes a tile of rows x columns.  Tiles of both factors go through shared memory in the accumulator's type,
two stages deep: while a tile is multiplied the next one is on its way in registers.  Every thread keeps a small tile of
sums in registers and runs the program (the epilogue) on each.  Convolutions gather their input by coordinates: there is
no im2col in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from codegen.contraction_merge import merged
from codegen.contraction_simt_partials import SimtPartials
from codegen.contraction_simt_schedule import CHUNK, SimtSchedule, along_reduction, schedules
from codegen.epilogue import Epilogue, Run, factor, placed
from codegen.iteration import coordinate, linear, packed, unsigned
from codegen.kernel import headers, heading, locate, signature
from codegen.naming import Names, Writer
from codegen.prologue import Prologue
from codegen.spec import ContractionSpec, Gather, KernelSource, Limit


def render(spec: ContractionSpec, schedule: SimtSchedule | None = None) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    return _Renderer(spec, schedule or schedules(spec)[0]).render()


@dataclass(frozen=True)
class _Side:
    """One factor, and how a thread fetches its part of a tile.

    pointers C variables of the tensors: of all second factors, which are fetched from the same places of each.
    outer    sizes of the rows' or columns' dimensions; axis "m" or "n"; origin: C variable of the tile's first one.
    along_k  whether threads side by side fetch neighbours along the reduction (else along the outer dimension).
    count    elements a thread fetches of each tile, ``step`` apart along the other dimension.
    exact    whether tiles never reach past the last row or column.
    """

    gather: Gather
    outer: tuple[int, ...]
    prologue: Prologue
    label: str  # "a" or "b"
    axis: str
    origin: str
    tile: int
    along_k: bool
    count: int
    step: int
    exact: bool

    @property
    def at(self) -> str:
        """The subscript of what a thread keeps for each of its rows or columns."""
        return "[i]" if self.along_k and self.count > 1 else ""

    def of(self, number: int | str) -> str:
        """The subscript of a product, where there are several."""
        return f"[{number}]" if self.prologue.products > 1 else ""

    def base(self, place: int) -> str:
        """The C variable of where its rows or columns start in a place."""
        return f"{self.label}_base{place or ''}" if place == 0 or self.prologue.places[place].moves else "0"


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: SimtSchedule) -> None:
        self.spec, self.s, self.t = merged(spec), schedule, schedule.itype
        given, spec = spec, self.spec
        taken = [
            "block",
            "batch",
            "row0",
            "col0",
            "t",
            "tx",
            "ty",
            "sum",
            "stage",
            "inside",
            "term",
            "fetch",
            *("at", "parts", "place", "reduce", "total"),
            *"qmnkijcep",
            "k0",
            "kk",
        ]
        parts = ("tile", "next", "kept", "part", "base", "inside", "at", "k", "m", "n")
        sizes = (spec.batch, spec.rows, spec.inner, spec.a.limits, spec.b.limits, spec.a.starts, spec.b.starts)
        dims = range(1 + max(len(x) for x in sizes))
        taken += [f"{side}_{part}" for side in "ab" for part in parts]
        taken += [f"{side}_{part}{d}" for side in "ab" for part in ("start", "m", "n", "base") for d in dims]
        taken += [f"{axis}{d}" for axis in "bhmr" for d in dims]
        self.names, self.w = Names([spec.name, *taken]), Writer()
        a = Prologue(self.w, spec.a, self.names, "a")
        b = Prologue(self.w, spec.b, self.names, "b", spec.others)
        self.epilogue = Epilogue(self.w, spec.program, self.names, spec.space, spec.accumulate, spec.result)
        self.batch, self.m, self.n = prod(spec.batch), prod(spec.rows), prod(spec.cols)
        self.k = prod(spec.inner)
        self.tiles_m, self.tiles_n = -(-self.m // schedule.rows), -(-self.n // schedule.cols)
        row0, col0 = "row0" if self.tiles_m > 1 else "0", "col0" if self.tiles_n > 1 else "0"
        self.a = self._side(spec.a, spec.rows, a, "a", "m", row0, schedule.rows)
        self.b = self._side(spec.b, spec.cols, b, "b", "n", col0, schedule.cols)
        # Neighbouring threads take neighbouring chunks of what is contiguous in the first output.
        outputs = [store.operand.strides for store in spec.program.stores]
        fast = bool(outputs) and outputs[0][-2] == 1 and outputs[0][-1] != 1
        self.rows_fast = fast and spec.rows[-1] > 1 and _in_order(spec)
        self.partials = SimtPartials(self.w, given, schedule, self.names, "batch" if self.batch > 1 else "0")

    def _side(
        self, gather: Gather, outer: tuple[int, ...], prologue: Prologue, label: str, axis: str, origin: str, tile: int
    ) -> _Side:
        s = self.s
        along_k = along_reduction(self.spec, gather)
        step = s.threads // s.inner if along_k else s.threads // tile
        exact = prod(outer) % tile == 0
        count = tile * s.inner // s.threads
        return _Side(gather, outer, prologue, label, axis, origin, tile, along_k, count, step, exact)

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        program = spec.program
        plural = "nodes in one kernel" if len(program.notes) != 1 else "node"
        sizes = f"{self.batch} x " if self.batch > 1 else ""
        sizes = f"{spec.products} times {sizes}" if spec.products > 1 else sizes
        details = [
            f"{sizes}{self.m} x {self.n} sums of {self.k} products in {spec.accumulate}; "
            f"tile {s.rows} x {s.cols} x {s.inner} a block, {s.thread_rows} x {s.thread_cols} a thread"
        ]
        more = ["memory.cuh", *(["reduce.cuh"] if self.partials else [])]
        heading(
            w,
            f"{spec.name}: {len(program.notes)} {plural}",
            program,
            headers(program, *more, programs=(spec.a.program, spec.b.program)),
            details,
        )
        parameters = [text for side in (self.a, self.b) for text in side.prologue.parameters()]
        # Told that one block a multiprocessor is enough, ptxas does not spill to fit more of them.
        parameters += self.epilogue.pointers.parameters() + self.partials.parameters()
        signature(w, spec.name, s.threads, parameters, 1)
        blocks = locate(
            w, self.t, [("batch", self.batch, 1), ("col0", self.tiles_n, s.cols), ("row0", self.tiles_m, s.rows)]
        )
        if self.batch > 1 and len(spec.batch) > 1:
            for d in range(len(spec.batch)):
                w.line(f"const {self.t} b{d} = {coordinate('batch', spec.batch, d)};")
        w.line("const int t = threadIdx.x;")
        if self.k:
            self._shared()
            for side in (self.a, self.b):
                side.prologue.scalars()
            self._prepare(self.a)
            self._prepare(self.b)
        self._sums()
        if self.k:
            depth = w.depth
            conditions = [self._within(x, ()) for x in spec.terms if not any(x.inner)]
            if conditions:
                w.line()
                w.open(f"if ({' && '.join(conditions)})")
            self._mainloop()
            while w.depth > depth:
                w.close()
        self._results()
        w.close()
        barriers = self.k > 0 or bool(self.partials)
        return KernelSource(spec.name, w.text(), (blocks, 1, 1), (s.threads, 1, 1), uses_barriers=barriers)

    def _batch(self) -> list[str]:
        """C variables of the batch coordinates."""
        if self.batch <= 1:
            return ["0"] * len(self.spec.batch)
        return ["batch"] if len(self.spec.batch) == 1 else [f"b{d}" for d in range(len(self.spec.batch))]

    def _within(self, x: Limit, outer: Sequence[str], inner: Sequence[str] = ()) -> str:
        """The condition that a limit is kept."""
        number = linear([*zip(self._batch(), x.batch), *zip(outer, x.outer), *zip(inner, x.inner)], x.start)
        return f"{unsigned(self.t)}({number}) < {x.size}"

    # ---- global memory -> registers -> shared memory

    def _shared(self) -> None:
        w, s, c = self.w, self.s, self.spec.accumulate
        w.line()
        # The pad keeps the rows of a tile 16-byte aligned and spreads the writes of one column over the banks.
        w.line(f"__shared__ __align__(16) {c} a_tile[2][{s.inner}][{s.rows + CHUNK}];")
        w.line(f"__shared__ __align__(16) {c} b_tile{self.b.of(self.spec.products)}[2][{s.inner}][{s.cols + CHUNK}];")

    def _prepare(self, side: _Side) -> None:
        """What stays the same over the reduction: which elements of a tile a thread fetches, their outer offsets."""
        w, gather, p, axis = self.w, side.gather, side.label, side.axis
        w.line()
        fast, slow = (f"{p}_k", f"{p}_{axis}") if side.along_k else (f"{p}_{axis}", f"{p}_k")
        length = self.s.inner if side.along_k else side.tile
        part = f"// this thread's part of a tile of {side.prologue.name}"
        w.line(f"const int {fast} = t % {length}, {slow} = t / {length};  {part}")
        many = bool(side.at)
        position = linear([(side.origin, 1), (f"{p}_{axis}", 1), ("i" if many else "0", side.step)])
        places = side.prologue.places
        bases = [(n, place) for n, place in enumerate(places) if n == 0 or place.moves]
        offsets = [side.base(n) for n, _ in bases] + [f"{p}_start{n}" for n in range(len(gather.limits))]
        if many:
            w.line(f"{self.t} {', '.join(f'{name}[{side.count}]' for name in offsets)};")
            if not side.exact:
                w.line(f"bool {p}_inside[{side.count}];")
            w.line("#pragma unroll")
            w.open(f"for (int i = 0; i < {side.count}; ++i)")
            place, prefix = axis, axis
            w.line(f"const {self.t} {place} = {position};")
        else:
            place, prefix = position, f"{p}_{axis}"
            if "+" in position and (len(side.outer) > 1 or gather.limits or not side.exact):
                place = f"{p}_at"
                w.line(f"const {self.t} {place} = {position};")
        coords = [place]
        if len(side.outer) > 1:
            coords = [f"{prefix}{d}" for d in range(len(side.outer))]
            every = [*(x.outer for x in places), *(x.outer for x in gather.limits)]
            for d in _used(every):
                w.line(f"const {self.t} {coords[d]} = {coordinate(place, side.outer, d)};")
        declared = "" if many else f"const {self.t} "
        for number, at in bases:
            terms = [*zip(self._batch(), at.batch), *zip(coords, at.outer)]
            w.line(f"{declared}{side.base(number)}{side.at} = {linear(terms, at.start)};")
        for number, x in enumerate(gather.limits):
            start = linear([*zip(self._batch(), x.batch), *zip(coords, x.outer)], x.start)
            w.line(f"{declared}{p}_start{number}{side.at} = {start};")
        if not side.exact:
            w.line(f"{'' if many else 'const bool '}{p}_inside{side.at} = {place} < {prod(side.outer)};")
        if many:
            w.close()

    def _fetch(self, side: _Side) -> None:
        """Reads this thread's elements of the tile at k0 into registers, zero outside."""
        w, gather, p = self.w, side.gather, side.label
        w.open("")
        terms = [x for x in self.spec.terms if any(x.inner)]

        def reduction(position: str) -> list[str]:
            coords = self._reduction(side, position)
            if terms:
                kept = [self._within(x, (), coords) for x in terms]
                w.line(f"const bool term = {' && '.join(kept)};  // whether there is a product")
            return coords

        if side.along_k:
            coords = reduction(f"k0 + {p}_k")
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {side.count}; ++i)")
        if not side.along_k:
            coords = reduction(f"k0 + {p}_k + i * {side.step}")
        conditions = [] if self.k % self.s.inner == 0 else [f"k < {self.k}"]
        if not side.exact:
            conditions.append(f"{p}_inside{side.at}")
        for number, x in enumerate(gather.limits):
            place = linear([(f"{p}_start{number}{side.at}", 1), *zip(coords, x.inner)])
            conditions.append(f"{unsigned(self.t)}({place}) < {x.size}")
        if terms:
            conditions.append("term")
        if len(conditions) > 1:
            w.line(f"const bool inside = {' && '.join(conditions)};")
            conditions = ["inside"]
        for source in side.prologue.sources:
            at = side.prologue.place(source)
            base = side.base(source.place)
            text = linear([(base + side.at if base != "0" else base, 1), *zip(coords, at.inner)]).replace(" + -", " - ")
            if not source.pointer:
                w.line(f"{source.name}_next[i] = int32({text});")
                continue
            if gather.program is not None:
                value = f"{source.pointer}[{text}]"
                value = f"{conditions[0]} ? {value} : {source.ctype}{{}}" if conditions else value
                w.line(f"{source.name}_next[i] = {value};")
                continue
            for number, pointer in enumerate(side.prologue.pointers):
                value = factor(gather.operand, f"{pointer}[{text}]", self.spec.accumulate)
                value = f"{conditions[0]} ? {value} : {self.spec.accumulate}(0)" if conditions else value
                w.line(f"{p}_next{side.of(number)}[i] = {value};")
        if self._guarded(side):
            w.line(f"{p}_kept[i] = {conditions[0]};")
        w.close()
        w.close()

    def _guarded(self, side: _Side) -> bool:
        """Whether some elements of a factor that is computed are zero whatever the program says."""
        ragged = bool(self.k % self.s.inner) or not side.exact
        terms = any(any(x.inner) for x in self.spec.terms)
        return side.gather.program is not None and (ragged or terms or bool(side.gather.limits))

    def _reduction(self, side: _Side, position: str) -> list[str]:
        """Writes a position of the reduction; returns the C variables of its coordinates, "k" for the last if the
        factor needs no others.
        """
        w, inner = self.w, self.spec.inner
        w.line(f"const {self.t} k = {position};")
        limits = [x.inner for x in (*side.gather.limits, *self.spec.terms)]
        steps = [at.inner for at in side.prologue.places]
        if len(inner) == 1:
            return ["k"]
        if all(x == tuple(s * x[-1] for s in packed(inner)) for x in steps) and not _used(limits):
            return [*("0" for _ in inner[1:]), "k"]
        coords = [f"r{d}" for d in range(len(inner))]
        for d in _used([*steps, *limits]):
            w.line(f"const {self.t} {coords[d]} = {coordinate('k', inner, d)};")
        return coords

    def _stash(self, side: _Side) -> None:
        """Writes the fetched elements to shared memory."""
        w, p, step = self.w, side.label, f"i * {side.step}"
        k, outer = f"{p}_k", f"{p}_{side.axis}"
        at = f"[{k}][{outer} + {step}]" if side.along_k else f"[{k} + {step}][{outer}]"
        w.line("#pragma unroll")
        if side.gather.program is None and side.prologue.products == 1:
            w.line(f"for (int i = 0; i < {side.count}; ++i) {p}_tile[stage]{at} = {p}_next[i];")
            return
        w.open(f"for (int i = 0; i < {side.count}; ++i)")
        if side.gather.program is None:
            for number in range(side.prologue.products):
                w.line(f"{p}_tile[{number}][stage]{at} = {p}_next[{number}][i];")
            w.close()
            return
        text = side.prologue.element({x.value: f"{x.name}_next[i]" for x in side.prologue.sources})
        text = factor(side.gather.operand, text, self.spec.accumulate)
        if self._guarded(side):
            text = f"{p}_kept[i] ? {text} : {self.spec.accumulate}(0)"
        w.line(f"{p}_tile[stage]{at} = {text};")
        w.close()

    # ---- multiply

    def _sums(self) -> None:
        w, s = self.w, self.s
        across, down = s.cols // s.thread_cols, s.rows // s.thread_rows
        w.line()
        of = self.b.of(self.spec.products)
        w.line(f"{self.spec.accumulate} sum{of}[{s.thread_rows}][{s.thread_cols}] = {{}};")
        if self.rows_fast:
            w.line(f"const int ty = t % {down}, tx = t / {down};  // threads side by side take neighbouring rows")
        else:
            w.line(
                f"const int tx = t % {across}, ty = t / {across};  // threads side by side take neighbouring columns"
            )

    def _mainloop(self) -> None:
        w, s, c = self.w, self.s, self.spec.accumulate
        steps = -(-self.k // s.inner)
        w.line()
        if self.a.gather.program is None and self.b.gather.program is None:
            w.line(f"{c} a_next[{self.a.count}], b_next{self.b.of(self.spec.products)}[{self.b.count}];")
        else:
            for side in (self.a, self.b):
                for source in side.prologue.sources:
                    ctype = c if side.gather.program is None else source.ctype
                    w.line(f"{ctype} {source.name}_next{side.of(side.prologue.products)}[{side.count}];")
                if self._guarded(side):
                    w.line(f"bool {side.label}_kept[{side.count}];  // whether there is an element")
        w.open(f"const auto fetch = [&]({self.t} k0)")
        self._fetch(self.a)
        self._fetch(self.b)
        w.close("};")
        w.line("fetch(0);")
        w.line("int stage = 0;")
        w.open(f"for ({self.t} k0 = 0; k0 < {steps * s.inner}; k0 += {s.inner}, stage ^= 1)")
        self._stash(self.a)
        self._stash(self.b)
        w.line("__syncthreads();  // one a tile is enough: the other stage was last read before the previous one")
        if steps > 1:
            w.line(f"if (k0 < {(steps - 1) * s.inner}) fetch(k0 + {s.inner});")
        w.line("#pragma unroll")
        w.open(f"for (int kk = 0; kk < {s.inner}; ++kk)")
        self._part(self.a, "", s.thread_rows, "ty")
        if self.spec.products > 1:
            w.line("#pragma unroll")
            w.open(f"for (int p = 0; p < {self.spec.products}; ++p)")
        self._part(self.b, self.b.of("p"), s.thread_cols, "tx")
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {s.thread_rows}; ++i)")
        w.line("#pragma unroll")
        product = " * ".join(
            f"{p}_part[{v} / {CHUNK}][{v} % {CHUNK}]" if mine > CHUNK else f"{p}_part[{v}]"
            for p, v, mine in (("a", "i", s.thread_rows), ("b", "j", s.thread_cols))
        )
        w.line(f"for (int j = 0; j < {s.thread_cols}; ++j) sum{self.b.of('p')}[i][j] += {product};")
        w.close()
        if self.spec.products > 1:
            w.close()
        w.close()
        w.close()

    def _part(self, side: _Side, of: str, mine: int, thread: str) -> None:
        """Reads a thread's rows or columns of term ``kk`` from shared memory."""
        w, p = self.w, side.label
        places = [linear([(thread, CHUNK)], chunk * (side.tile // mine) * CHUNK) for chunk in range(mine // CHUNK)]
        loads = [f"load_shared<{CHUNK}>(&{p}_tile{of}[stage][kk][{place}])" for place in places]
        if len(loads) == 1:
            w.line(f"const auto {p}_part = {loads[0]};")
            return
        w.line(f"const Vector<{self.spec.accumulate}, {CHUNK}> {p}_part[{len(loads)}] = {{")
        for load in loads:
            w.line(f"    {load},")
        w.line("};")

    # ---- epilogue

    def _results(self) -> None:
        """The program on every sum: in chunks of neighbours where that makes an access wide, else one by one."""
        w, spec, program = self.w, self.spec, self.spec.program
        nb, nr = len(spec.batch), len(spec.rows)
        w.line()
        self.epilogue.scalars()
        along = nb + nr - 1 if self.rows_fast else nb + nr
        fast = spec.rows[-1] if self.rows_fast else self.n
        run = None
        if fast % CHUNK == 0 and any(self.epilogue.wide(op, CHUNK, along) for op in program.operands):
            run = Run(CHUNK, along, "e")
        depth = w.depth
        self.partials.begin_all()
        i = self._each("m", run if self.rows_fast else None)
        rows = ["m"]
        if nr > 1:
            rows = [f"m{d}" for d in range(nr)]
            every = [s[nb : nb + nr] for s in (*(op.strides for op in program.operands), *program.indices)]
            for d in _used([x.outer for x in spec.results] or every):
                w.line(f"const {self.t} {rows[d]} = {coordinate('m', spec.rows, d)};")
        if spec.results:
            rows = self._placed(rows, leave="continue" if w.depth > depth else "return")
        j = self._each("n", None if self.rows_fast else run)
        sums = [f"sum{self.b.of(number)}[{i}][{j}]" for number in range(spec.products)]
        self.epilogue.results([*self._batch(), *rows, "n"], sums, run, sinks=self.partials.sinks(i, j))
        while w.depth > depth:
            w.close()
        self.partials.finish((self.a.origin, self.b.origin), (self.m, self.n))

    def _placed(self, rows: list[str], leave: str) -> list[str]:
        """Writes the program's row coordinates, given the rows', and leaves where there is no result."""
        w, spec = self.w, self.spec
        batch = [*zip(self._batch(), spec.batch)]
        found, outside = placed(w, self.t, spec.results, batch, [*zip(rows, spec.rows)])
        if outside:
            w.line(f"if ({' || '.join(outside)}) {leave};")
        return found

    def _each(self, axis: str, run: Run | None) -> str:
        """Opens the loop over a thread's rows or columns, or over chunks of them, and writes its position m or n.

        Returns the subscript of the sum.
        """
        w, s = self.w, self.s
        size, tile, mine, thread, side, each = (
            (self.m, s.rows, s.thread_rows, "ty", self.a, "i")
            if axis == "m"
            else (self.n, s.cols, s.thread_cols, "tx", self.b, "j")
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
            # Outside of any loop these are the thread's only rows; columns are always inside the loop over rows.
            leave = "return" if count == 1 and axis == "m" and not self.partials else "continue"
            w.line(f"if ({axis} >= {size}) {leave};")
        if not run:
            return variable
        return run.element if chunks == 1 else f"{variable} * {CHUNK} + {run.element}"


def _used(every: Sequence[Sequence[int]]) -> list[int]:
    """The dimensions in which some of these take steps."""
    return sorted({d for steps in every for d, step in enumerate(steps) if step})


def _in_order(spec: ContractionSpec) -> bool:
    """Whether rows that are neighbours are neighbours in the program's space too."""
    if not spec.results:
        return True
    last = spec.results[-1]
    return not any(last.batch) and last.start == 0 and last.outer == (0,) * (len(spec.rows) - 1) + (1,)

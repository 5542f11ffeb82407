"""The contraction family on tensor cores of every architecture since Ampere: mma.sync on tiles that cp.async brings.

A block has one tile of results.  Its threads fill a ring of stages with tiles of both operands, some stages ahead of
the one that is multiplied.  What cp.async cannot copy as it lies (other types, elements apart, odd addresses) goes
through registers.  Each warp multiplies a part of the tile: fragments come by ldmatrix, one step of the reduction ahead
of the products.  With split-K, the blocks of a cluster share one tile, each with part of the reduction, and add up
their sums through distributed shared memory in a fixed order.
"""

from __future__ import annotations

from codegen.contraction.mma_schedule import MmaSchedule, ring_bytes, shared_bytes
from codegen.declined import Declined
from codegen.fragments import ResultFragments, Staging, space, staging
from codegen.iteration import linear, signed_index_type
from codegen.kernel import Kernel, shared_memory
from codegen.partials import PartialNames, Partials, Sink
from codegen.prologue import Prologue
from codegen.spec import ContractionSpec, KernelSource
from codegen.tile_loader import STEP, TileLoader
from codegen.tile_path import tile_paths

DIRECT = 2  # most fragments of a warp that are written straight from registers


def render(spec: ContractionSpec, schedule: MmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Renderer(spec, schedule).render()


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: MmaSchedule) -> None:
        self.spec, self.s = spec, schedule
        s, self.parts = schedule, tile_paths(spec, schedule.widen)
        parts = self.parts
        if not all(way.fills(size, s.tile_k, s.threads) for way, size in ((parts.a, s.tile_m), (parts.b, s.tile_n))):
            raise Declined(f"{s.threads} threads cannot fill tiles of {s.tile_m} rows and {s.tile_n} columns")
        self.w, self.t = Kernel(spec.name), self._index_type()
        self.names = self.w.names
        common = (parts.depth, s.tile_k, s.threads)
        a = (parts.a, "a", Prologue(self.w, parts.a.gather, self.names, "a"))
        b = (parts.b, "b", Prologue(self.w, parts.b.gather, self.names, "b", spec.others))
        self.a = TileLoader(self.w, self.t, *a, s.tile_m, s.warp_rows, parts.rows, *common, "shared.a[stage]")
        self.b = TileLoader(self.w, self.t, *b, s.tile_n, s.warp_cols, parts.cols, *common, "shared.b[stage]")
        self.sides = (self.a, self.b)
        self.copied = any(side.way.copied for side in self.sides)
        self.stashed = not all(side.way.copied for side in self.sides)
        self.at = space(spec)
        self.fragments = ResultFragments(self.w, self.at, self.names, spec)
        self.fragments_m, self.fragments_n = self.a.fragments, self.b.fragments
        #: blocks of 8 columns of a warp's sums, those of all operands B one after another
        self.columns = 2 * self.fragments_n * spec.products
        self.tiles_m, self.tiles_n = -(-parts.rows // s.tile_m), -(-parts.cols // s.tile_n)
        self.blocks = parts.batch * self.tiles_m * self.tiles_n
        if self.blocks * s.split_k >= 2**31:
            raise Declined(f"{self.blocks} tiles are more than a grid has blocks")
        self.depth = parts.stages(s.tile_k)
        self.steps = s.tile_k * parts.a.itemsize // STEP
        batches = "batch" if parts.batch > 1 else "0"
        self.partials = Partials(self.w, spec, self.names, self.fragments.t, batches)
        # Partial reductions need the sums where the main loop left them.
        direct = self.fragments_m * self.fragments_n // s.split_k <= DIRECT or bool(self.partials)
        self.staging: Staging | None = (
            None if direct else staging(self.at, s.tile_m // s.split_k, s.tile_n, spec.products)
        )

    def _index_type(self) -> str:
        """Returns the C type of offsets in both operands: int32 if all fit with room for padding, else int64.

        Gathers may start before the tensor.
        """
        reach = [self.parts.rows, self.parts.cols, self.parts.depth, self.parts.a.reach, self.parts.b.reach]
        return signed_index_type(*reach)

    # ---- the whole

    def render(self) -> KernelSource:
        w, s, spec, program = self.w, self.s, self.spec, self.at.program
        sizes = f"{self.parts.batch} x " if self.parts.batch > 1 else ""
        types = " and ".join(dict.fromkeys((self.a.way.product, self.b.way.product)))
        sizes = f"{spec.products} times {sizes}" if spec.products > 1 else sizes
        details = [
            f"{sizes}{self.parts.rows} x {self.parts.cols} sums of {self.parts.depth} products of {types}",
            f"tile {s.tile_m} x {s.tile_n} x {s.tile_k} a block, {s.stages} stages; "
            f"{s.warps_m} x {s.warps_n} warps, each {s.warp_rows} x {s.warp_cols}",
        ]
        if s.split_k > 1:
            details.append(f"the {s.split_k} blocks of a cluster share the reduction of a tile")
        w.parameters += [text for side in self.sides for text in side.prologue.parameters()]
        w.parameters += self.fragments.epilogue.pointers.parameters() + self.partials.parameters()
        self._shared()
        self._place()
        for side in self.sides:
            side.prologue.scalars()
            side.prepare()
        self._fetch()
        self._parts()
        self._mainloop()
        if s.split_k > 1:
            self._exchange()
        self._results()
        return w.source(
            program,
            details,
            blocks=self.blocks * s.split_k,
            threads=s.threads,
            barriers=True,
            blocks_per_sm=1,
            shared_bytes=(shared_bytes if self.staging or s.split_k > 1 else ring_bytes)(self.parts, s),
            cluster=s.split_k,
        )

    def _shared(self) -> None:
        w = self.w
        with shared_memory(w):
            for side in self.sides:
                w.line(side.member(self.s.stages))

    def _place(self) -> None:
        """Writes where the block's tile and the warp's part of it are."""
        w, s = self.w, self.s
        w.line("const int t = threadIdx.x, lane = t % 32;")
        warp = "t / 32"
        rows = f"{warp} / {s.warps_n}" if s.warps_n > 1 else warp
        cols = f"{warp} % {s.warps_n}" if s.warps_m > 1 else warp
        warp_row = f"{rows} * {s.warp_rows}" if s.warps_m > 1 else "0"
        warp_col = f"{cols} * {s.warp_cols}" if s.warps_n > 1 else "0"
        w.line(f"const int warp_row = {warp_row}, warp_col = {warp_col};  // of the warp's part of the tile")
        tile = f"blockIdx.x / {s.split_k}" if s.split_k > 1 else "blockIdx.x"
        w.line(f"const Tile tile = tile_at<{self.tiles_m}, {self.tiles_n}, {s.raster_group}>({tile});")
        w.line(f"const {self.t} m0 = {self.t}(tile.row) * {s.tile_m}, n0 = {self.t}(tile.col) * {s.tile_n};")
        if self.parts.batch > 1:
            t = "int64" if "int64" in (self.t, self.fragments.t) else "int32"
            w.line(f"const {t} batch = tile.batch;")
        if s.split_k > 1:
            w.line("const int rank = cluster_rank();")
            split_k = f"{self.depth} / {s.split_k}"
            w.line(f"const {self.t} first = rank * {split_k}, last = (rank + 1) * {split_k};")

    # ---- global memory -> shared memory

    def _fetch(self) -> None:
        """Writes the function that brings stage k: to shared memory by asynchronous copies, or to registers on the way
        there.
        """
        w = self.w
        w.line()
        for side in self.sides:
            side.registers()
        with w.block(f"const auto fetch = [&]({self.t} k, int stage)", "};"):
            for side in self.sides:
                side.fetch()
        if self.stashed:
            with w.block("const auto stash = [&](int stage)", "};"):
                for side in self.sides:
                    side.stash()

    # ---- multiply

    def _parts(self) -> None:
        """Writes the loads of the fragments of one step of the reduction, from shared memory to registers."""
        w = self.w
        w.line()
        for side in self.sides:
            side.lane()
        w.line(
            f"uint32 a_part[2][{self.fragments_m}][4], b_part[2][{self.columns // 2}][2][2];  // of two steps in turn"
        )
        with w.block("const auto load_parts = [&](int stage, int kk)", "};"):
            for side in self.sides:
                side.parts()

    def _mainloop(self) -> None:
        w, s = self.w, self.s
        first, last = ("first", "last") if s.split_k > 1 else ("0", str(self.depth))
        ahead = s.stages - 1
        w.line()
        w.line(f"// While a stage is multiplied the next {f'{ahead} are' if ahead > 1 else 'is'} on the way.")
        w.line(f"{self.fragments.total} sum[{self.fragments_m}][{self.columns}][4] = {{}};")
        number = "i" if ahead > 1 else "0"
        where = linear([(first, 1), (number, 1)])
        if ahead > 1:
            # What goes through registers takes many instructions: one copy of them in front of the loop is enough.
            w.line("#pragma unroll 1" if self.stashed else "#pragma unroll")
        with w.block(f"for (int i = 0; i < {ahead}; ++i)", when=ahead > 1):
            with w.block(f"if ({where} < {last})", when=s.split_k > 1 or self.depth < ahead):
                w.line(f"fetch({where}, {number});")
                if self.stashed:
                    w.line(f"stash({number});")
            if self.copied:
                w.line("copy_async_commit();")
        self._landed()
        w.line("load_parts(0, 0);")
        w.line(f"int stage = 0, filling = {ahead};")
        with w.block(f"for ({self.t} k = {first}; k < {last}; ++k)"):
            w.line(f"const int next = stage + 1 < {s.stages} ? stage + 1 : 0;")
            with w.unrolled(f"for (int kk = 0; kk < {self.steps}; ++kk)"):
                w.open(f"if (kk + 1 < {self.steps})")
                w.line("load_parts(stage, kk + 1);")
                w.otherwise(f"else if (k + 1 < {last})")
                if self.stashed:
                    w.line(f"if (k + {ahead} < {last}) stash(filling);" if ahead > 1 else "stash(filling);")
                self._landed()
                w.line("load_parts(next, 0);")
                w.close()
                with w.block("if (kk == 0)"):
                    w.line(f"if (k + {ahead} < {last}) fetch(k + {ahead}, filling);")
                    if self.copied:
                        w.line("copy_async_commit();")
                for side in self.sides:
                    side.round()
                w.unrolled_line(f"for (int i = 0; i < {self.fragments_m}; ++i)")
                w.depth += 1
                w.unrolled_line(f"for (int j = 0; j < {self.columns}; ++j)")
                a, b = self.a.way.product, self.b.way.product
                w.line(f"    mma<{a}, {b}>(sum[i][j], a_part[kk % 2][i], b_part[kk % 2][j / 2][j % 2]);")
                w.depth -= 1
            w.line("filling = stage;")
            w.line("stage = next;")
        if self.staging is not None or s.split_k > 1:
            w.line("__syncthreads();  // the ring is free for the sums")

    def _landed(self) -> None:
        """Writes the wait for the next stage: all threads of the block have brought it, and are done with the one
        before.
        """
        if self.copied:
            self.w.line(f"copy_async_wait<{self.s.stages - 2}>();")
        self.w.line("__syncthreads();")

    def _exchange(self) -> None:
        """Writes how the blocks of a cluster add up their sums: each gets part of every warp's rows, in a
        fixed order.
        """
        w, s, total = self.w, self.s, self.fragments.total
        each, cols = self.fragments_m // s.split_k, self.columns
        part = each * cols * 4
        w.line()
        w.line("// Every block adds up a part of each warp's rows.")
        at = f"[i / {cols * 4}][i / 4 % {cols}][i % 4]"
        w.line(f"{total}* const exchange = reinterpret_cast<{total}*>(memory) + t;")
        w.unrolled_line(f"for (int i = 0; i < {part * s.split_k}; ++i) exchange[i * {s.threads}] = sum{at};")
        w.line("cluster_sync();")
        w.line(f"{total} total[{each}][{cols}][4] = {{}};")
        with w.unrolled(f"for (int q = 0; q < {s.split_k}; ++q)"):
            w.line(f"const {total}* const theirs = cluster_map(exchange, q) + rank * {part * s.threads};")
            w.unrolled_line(f"for (int i = 0; i < {part}; ++i) total{at} += theirs[i * {s.threads}];")
        w.line("cluster_sync();  // all have read what is in this block's shared memory")

    # ---- results

    def _results(self) -> None:
        w, s, fragments = self.w, self.s, self.fragments
        sums = "total" if s.split_k > 1 else "sum"
        each = self.fragments_m // s.split_k
        exact_m, exact_n = not self.a.ragged, not self.b.ragged
        rank = f" + rank * {each * 16}" if s.split_k > 1 else ""
        w.line()
        fragments.batch()
        fragments.epilogue.scalars()
        staged = self.staging
        if staged is not None:
            w.line(f"auto& staged = *reinterpret_cast<{fragments.total} (*){staged.dims}>(memory);")
            for number in range(1, staged.products):
                w.line(f"auto& {staged.name(number)} = (&staged)[{number}];  // those of the next operand")
        for part in self.partials.parts:
            if part.partial.rows:
                self.partials.begin(part, self.fragments_n, 4)
            else:
                self.partials.begin(part, 2 * each, s.warp_cols // part.partial.chunk)
        i, j = ("i" if each > 1 else "0"), ("j" if self.fragments_n > 1 else "0")
        row = linear([(i, 16)]) + " + " if i != "0" else ""
        row = f"{row}lane / 4 + f % 2 * 8"
        col = f"warp_col + {'j * 16 + ' if j != '0' else ''}lane % 4 * 2 + f / 2 * 8"

        def total(e: str, product: int) -> str:
            column = linear([(j, 2), ("f / 2", 1)], 2 * product * self.fragments_n)
            return f"{sums}[{i}][{column}][f % 2 * 2{f' + {e}' if e != '0' else ''}]"

        with (
            w.unrolled(f"for (int i = 0; i < {each}; ++i)", when=each > 1),
            w.unrolled(f"for (int j = 0; j < {self.fragments_n}; ++j)", when=self.fragments_n > 1),
            w.unrolled("for (int f = 0; f < 4; ++f)"),
        ):
            if staged is None:
                sinks = [Sink(x.reduction, x.own + self._own(x, i, j)) for x in self.partials.parts]
                fragments.direct(f"m0 + warp_row{rank} + {row}", f"n0 + {col}", total, exact_m, exact_n, sinks)
            else:
                own = f"warp_row / {s.split_k}" if s.split_k > 1 else "warp_row"
                fragments.put(staged, f"{own} + {row}", col, total)
        if staged is None:
            self._finish_partials(each, f"m0 + warp_row{rank}")
            return
        w.line("__syncthreads();")
        m = "m0 + {r}"
        if s.split_k > 1:
            mine = s.warp_rows // s.split_k
            m = f"m0 + {{r}} / {mine} * {s.warp_rows}{rank} + {{r}} % {mine}" if s.warps_m > 1 else f"m0{rank} + {{r}}"
        fragments.take(staged, s.threads, m, "n0 + {c}", exact_m, exact_n)

    def _own(self, part: PartialNames, i: str, j: str) -> str:
        """Returns the subscripts of a thread's values of a partial reduction, for element ``e`` of pair ``f`` of a
        fragment.
        """
        if part.partial.rows:
            return f"[{j}][f / 2 * 2 + e]"
        row = linear([(i, 2), ("f % 2", 1)])
        each = part.partial.chunk // 16
        return f"[{row}][{'0' if self.s.warp_cols == part.partial.chunk else j if each == 1 else f'{j} / {each}'}]"

    def _finish_partials(self, each: int, m: str) -> None:
        """Writes how the lanes of a warp combine their values of the partial reductions, and store them."""
        w, s, parts = self.w, self.s, self.parts
        for part in self.partials.parts:
            w.line()
            if not part.partial.rows:
                chunks = s.warp_cols // part.partial.chunk
                self.partials.finish_cols(
                    part, 2 * each, chunks, f"{m} + lane / 4", "n0 + warp_col", (parts.rows, parts.cols)
                )
                continue
            with w.unrolled(f"for (int j = 0; j < {self.fragments_n}; ++j)"):
                reduction = part.reduction
                w.line(f"const {reduction.ctype} total = reduce::columns<{reduction.combiner.functor}>({part.own}[j]);")
                w.line(f"const {self.fragments.t} col = n0 + warp_col + j * 16 + reduce::column_of_lane(lane);")
                outside = ["lane % 8 >= 4", *([f"{m} >= {parts.rows}"] if self.a.ragged else [])]
                outside += [f"col >= {parts.cols}"] if self.b.ragged else []
                w.line(f"if ({' || '.join(outside)}) continue;")
                w.line(f"const {self.fragments.t} place = ({m}) / {part.partial.chunk};")
                self.partials.store(part, "place", "col", "total")

"""The contraction family on tensor cores of every architecture since Ampere: mma.sync on tiles that cp.async brings.

A block has one tile of results.  Its threads fill a ring of stages with tiles of both operands, some stages ahead of
the one that is multiplied.  What cp.async cannot copy as it lies (other types, elements apart, odd addresses) goes
through registers.  Each warp multiplies a part of the tile: fragments come by ldmatrix, one step of the reduction ahead
of the products.  With split-K, the blocks of a cluster share one tile, each with part of the reduction, and add up
their sums through distributed shared memory in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codegen.contraction.mma_schedule import MmaSchedule, buffers, staged_bytes
from codegen.declined import Declined
from codegen.fragments import ResultFragments, Sum, space, staging
from codegen.iteration import coordinate, linear, signed_index_type
from codegen.kernel import Kernel, tile_at
from codegen.partials import PartialNames, Partials, Sink
from codegen.phases import condition, idle
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
        self.w = Kernel(spec.name)
        self.names = self.w.names
        #: C type of offsets in both operands, signed as gathers may start before the tensor
        self.t = signed_index_type(parts.rows, parts.cols, parts.depth, parts.a.reach, parts.b.reach)
        common = (parts.depth, s.tile_k, s.threads)
        a = (parts.a, "a", Prologue(self.w, parts.a.gather, self.names, "a"))
        b = (parts.b, "b", Prologue(self.w, parts.b.gather, self.names, "b", spec.others))
        self.a = TileLoader(self.w, self.t, *a, s.tile_m, s.warp_rows, parts.rows, *common, "shared.a[stage]")
        self.b = TileLoader(self.w, self.t, *b, s.tile_n, s.warp_cols, parts.cols, *common, "shared.b[stage]")
        self.sides, self.edges = (self.a, self.b), (self.a.edge, self.b.edge)
        self.copied = any(side.way.copied for side in self.sides)
        self.stashed = not all(side.way.copied for side in self.sides)
        self.at = space(spec)
        self.fragments = ResultFragments(self.w, self.at, self.names, spec, self.edges)
        self.fragments_m, self.fragments_n = self.a.fragments, self.b.fragments
        #: blocks of 8 columns of a warp's sums, those of all operands B one after another
        self.columns = 2 * self.fragments_n * spec.products
        #: fragments below each other of which a block has the results
        self.own_m = self.fragments_m // s.split_k
        self.blocks = s.tiles(parts) * s.split_k
        if self.blocks >= 2**31:
            raise Declined(f"{s.tiles(parts)} tiles are more than a grid has blocks")
        self.depth, self.ahead = parts.stages(s.tile_k), s.stages - 1
        self.steps = s.tile_k * parts.a.itemsize // STEP
        #: whether what goes through registers stays there while the next stage is multiplied, too
        self.late = self.stashed and self.ahead > 1
        batches = "batch" if parts.batch > 1 else "0"
        self.partials = Partials(self.w, spec, self.names, self.fragments.t, batches)
        # Partial reductions need the sums where the main loop left them.
        direct = self.own_m * self.fragments_n <= DIRECT or bool(self.partials)
        self.staging = None if direct else staging(self.at, s.tile_m // s.split_k, s.tile_n, spec.products)
        self.sums_in_ring = self.staging is not None or s.split_k > 1

    # ---- the whole

    def render(self) -> KernelSource:
        w, s, spec, program = self.w, self.s, self.spec, self.at.program
        types = " and ".join(dict.fromkeys((self.a.way.product, self.b.way.product)))
        details = [
            f"{spec.sums} of {types}",
            f"tile {s.tile_m} x {s.tile_n} x {s.tile_k} a block, {s.stages} stages; "
            f"{s.warps_m} x {s.warps_n} warps, each {s.warp_rows} x {s.warp_cols}",
        ]
        if s.split_k > 1:
            details.append(f"the {s.split_k} blocks of a cluster share the reduction of a tile")
        w.parameters += [text for side in self.sides for text in side.prologue.parameters()]
        w.parameters += self.fragments.epilogue.pointers.parameters() + self.partials.parameters()
        w.share(buffers(self.parts, s))
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
            blocks=self.blocks,
            threads=s.threads,
            barriers=True,
            blocks_per_sm=1,
            shared_bytes=staged_bytes(self.parts, s) if self.sums_in_ring else None,
            cluster=s.split_k,
        )

    def _place(self) -> None:
        """Writes where the block's tile and the warp's part of it are."""
        w, s = self.w, self.s
        w.line("const int t = threadIdx.x, lane = t % 32;")
        warps = (s.warps_m, s.warps_n)
        warp_row, warp_col = (
            f"{coordinate('t / 32', warps, d)} * {size}" if warps[d] > 1 else "0"
            for d, size in enumerate((s.warp_rows, s.warp_cols))
        )
        w.line(f"const int warp_row = {warp_row}, warp_col = {warp_col};  // of the warp's part of the tile")
        tile = f"blockIdx.x / {s.split_k}" if s.split_k > 1 else "blockIdx.x"
        w.line(f"const Tile tile = {tile_at(tile, self.edges[0].tiles, self.edges[1].tiles, s.raster_group)};")
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
        """Writes the function that brings stage k to shared memory, or to registers on the way there."""
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
        w, s, ahead = self.w, self.s, self.ahead
        first, last = self._stages()
        w.line()
        w.line(f"// While a stage is multiplied the next {f'{ahead} are' if ahead > 1 else 'is'} on the way.")
        w.line(f"{self.fragments.total} sum[{self.fragments_m}][{self.columns}][4] = {{}};")
        self._first_stages(first, last)
        self._await()
        w.line("load_parts(0, 0);")
        w.line(f"int stage = 0, filling = {ahead}{', held = 0' if self.late else ''};")
        with w.block(f"for ({self.t} k = {first}; k < {last}; ++k)"):
            w.line(f"const int next = stage + 1 < {s.stages} ? stage + 1 : 0;")
            with w.unrolled(f"for (int kk = 0; kk < {self.steps}; ++kk)"):
                with w.block(f"if (kk + 1 < {self.steps})"):
                    w.line("load_parts(stage, kk + 1);")
                    w.otherwise(f"else if (k + 1 < {last})")
                    if self.stashed and not self.late:
                        w.line("stash(filling);")
                    self._await()
                    w.line("load_parts(next, 0);")
                with w.block("if (kk == 0)"):
                    if self.late:
                        w.line(f"if (k > {first} && k + {ahead - 1} < {last}) stash(held);  // of the stage before")
                    w.line(f"if (k + {ahead} < {last}) fetch(k + {ahead}, filling);")
                    self._commit()
                self._multiply()
            if self.late:
                w.line("held = filling;")
            w.line("filling = stage;")
            w.line("stage = next;")
        if self.sums_in_ring:
            w.line("__syncthreads();  // the ring is free for the sums")

    def _stages(self) -> tuple[str, str]:
        """Returns the first stage of the block's reduction and the one behind the last: none where no term has
        elements.
        """
        first, last = ("first", "last") if self.s.split_k > 1 else ("0", str(self.depth))
        batch, several = self.spec.batch, self.parts.batch > 1
        places = [f"({coordinate('batch', batch, d)})" if several else "0" for d in range(len(batch))]
        nothing = condition(idle(self.spec), places)
        if not nothing:
            return first, last
        self.w.line(f"const {self.t} end = {nothing} ? {first} : {last};  // the taps of some phases do not exist")
        return first, "end"

    def _first_stages(self, first: str, last: str) -> None:
        """Writes the copies of the stages that are on the way before any is multiplied."""
        w, ahead = self.w, self.ahead
        with w.scope():
            # What goes through registers takes many instructions: one copy of them in front of the loop is enough.
            number = w.each("i", ahead, unroll=not self.stashed)
            where = linear([(first, 1), (number, 1)])
            with w.block(f"if ({where} < {last})", when=not last.isdecimal() or self.depth < ahead):
                w.line(f"fetch({where}, {number});")
                if self.stashed:
                    w.line(f"stash({number});")
            self._commit()

    def _commit(self) -> None:
        """Writes the end of a stage's copies: they are awaited together."""
        if self.copied:
            self.w.line("copy_async_commit();")

    def _await(self) -> None:
        """Writes the wait for the next stage: all have brought it, and are done with the one before."""
        if self.copied:
            self.w.line(f"copy_async_wait<{self.s.stages - 2}>();")
        self.w.line("__syncthreads();")

    def _multiply(self) -> None:
        """Writes the products of step ``kk``."""
        w, a, b = self.w, self.a.way.product, self.b.way.product
        for side in self.sides:
            side.round()
        w.unrolled_line(f"for (int i = 0; i < {self.fragments_m}; ++i)")
        w.depth += 1
        w.unrolled_line(f"for (int j = 0; j < {self.columns}; ++j)")
        w.line(f"    mma<{a}, {b}>(sum[i][j], a_part[kk % 2][i], b_part[kk % 2][j / 2][j % 2]);")
        w.depth -= 1

    def _exchange(self) -> None:
        """Writes how the blocks of a cluster add up their sums, in a fixed order."""
        w, s, total, each, cols = self.w, self.s, self.fragments.total, self.own_m, self.columns
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
        w, s, fragments, staged = self.w, self.s, self.fragments, self.staging
        rank = f" + rank * {self.own_m * 16}" if s.split_k > 1 else ""
        w.line()
        fragments.batch()
        fragments.epilogue.scalars()
        if staged is None:
            self._direct(f"m0 + warp_row{rank}")
            return
        w.line(f"auto& staged = *reinterpret_cast<{fragments.total} (*){staged.dims}>(memory);")
        for number in range(1, staged.products):
            w.line(f"auto& {staged.name(number)} = (&staged)[{number}];  // those of the next operand")
        with self._pairs() as (row, col, total):
            fragments.put(staged, f"warp_row{f' / {s.split_k}' if s.split_k > 1 else ''} + {row}", col, total)
        w.line("__syncthreads();")
        m = f"m0{rank} + {{r}}"
        if s.split_k > 1 and s.warps_m > 1:
            mine = s.warp_rows // s.split_k
            m = f"m0 + {{r}} / {mine} * {s.warp_rows}{rank} + {{r}} % {mine}"
        fragments.take(staged, s.threads, m, "n0 + {c}")

    @contextmanager
    def _pairs(self) -> Iterator[tuple[str, str, Sum]]:
        """Writes the loops over a thread's pairs of sums; yields the row and column of pair ``f``, and its sums."""
        w, n = self.w, self.fragments_n
        sums = "total" if self.s.split_k > 1 else "sum"
        with w.scope():
            i, j = w.each("i", self.own_m), w.each("j", n)
            w.each("f", 4)

            def total(e: str, product: int) -> str:
                column = linear([(j, 2), ("f / 2", 1)], 2 * product * n)
                return f"{sums}[{i}][{column}][f % 2 * 2{f' + {e}' if e != '0' else ''}]"

            row = linear([(i, 16), ("lane / 4", 1)])
            yield f"{row} + f % 2 * 8", f"{linear([('warp_col', 1), (j, 16)])} + lane % 4 * 2 + f / 2 * 8", total

    def _direct(self, m: str) -> None:
        """Writes the program on the sums where they are; the warp's first row is ``m``."""
        s, partials, rows = self.s, self.partials, 2 * self.own_m
        for part in partials.parts:
            chunks = s.warp_cols // part.partial.chunk
            partials.begin(part, *((self.fragments_n, 4) if part.partial.rows else (rows, chunks)))
        with self._pairs() as (row, col, total):
            sinks = [Sink(x.reduction, x.own + self._own(x)) for x in partials.parts]
            self.fragments.direct(f"{m} + {row}", f"n0 + {col}", total, sinks)
        for part in partials.parts:
            self.w.line()
            if part.partial.rows:
                partials.finish_rows(part, self.fragments_n, m, "n0 + warp_col", self.edges)
                continue
            sizes, chunks = (self.parts.rows, self.parts.cols), s.warp_cols // part.partial.chunk
            partials.finish_cols(part, rows, chunks, f"{m} + lane / 4", "n0 + warp_col", sizes)

    def _own(self, part: PartialNames) -> str:
        """Returns the subscripts of a thread's values of a partial reduction, for element ``e`` of pair ``f``."""
        i, j = "i" if self.own_m > 1 else "0", "j" if self.fragments_n > 1 else "0"
        if part.partial.rows:
            return f"[{j}][f / 2 * 2 + e]"
        each = part.partial.chunk // 16
        chunk = "0" if self.s.warp_cols == part.partial.chunk else j if each == 1 else f"{j} / {each}"
        return f"[{linear([(i, 2), ('f % 2', 1)])}][{chunk}]"

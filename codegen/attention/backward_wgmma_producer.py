"""Attention's gradients on Hopper: what a block has in shared memory, and the threads that bring it there.

One thread has TMA bring tiles.  The numbers of queries, lse and row_dot, may have any strides: other warps bring them
by ordinary loads.
"""

from __future__ import annotations

from codegen.attention.backward_fragments import BackwardFragments
from codegen.attention.backward_scores import INTERVALS
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma_schedule import AttentionBackwardWgmmaSchedule
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_schedule import GROUP, PANEL, coordinates
from codegen.kernel import Kernel, shared_memory

NUMBERS = 4  #: First named barrier between consumers and the warps that bring numbers of queries; others begin at 1.


class Producer:
    """Writes what lies in shared memory, and what brings it there; the rest is `codegen.attention.backward_wgmma`'s.

    held, brought   names of the tiles that a block keeps and of those of the ring, with the argument number of each.
    maps_of     C names of the arguments' tensor maps; lse and row_dot those of the numbers of queries.
    element     C type of the tiles.
    deep, wide  panels of rows of queries and keys, and of values and losses.
    tiles       of rows of a batch; batches their number.
    registers   of a thread of the producer and of a consumer.
    with_loss   whether products with the loss are needed.
    each        whether every warpgroup of consumers keeps the numbers of queries for itself.
    head        the batch dimension over which results of keys are summed up; or empty.
    """

    w: Kernel
    spec: AttentionBackwardSpec
    s: AttentionBackwardWgmmaSchedule
    a: AttentionSpec
    scores: BackwardFragments
    held: list[tuple[str, int]]
    brought: list[tuple[str, int]]
    maps_of: list[str]
    lse: str
    row_dot: str
    element: str
    deep: int
    wide: int
    tiles: int
    batches: int
    registers: tuple[int, int]
    with_loss: bool
    each: bool
    head: str

    # ---- for a kernel that does more (`codegen.attention.backward_fused`)

    def _more_shared(self) -> None:
        pass

    def _more_barriers(self) -> None:
        pass

    def _more_warps(self) -> None:
        pass

    # ---- the block

    def _shared(self) -> None:
        w, s, spec, t = self.w, self.s, self.spec, self.element
        panel = (self.deep, self.wide)
        with shared_memory(w):
            for (name, _), count in zip(self.held, panel):
                dims = f"[{s.ahead}][{count}][{s.height}][{PANEL}]"
                w.line(f"alignas(1024) {t} {name}{dims};  // panels of 128 bytes, swizzled")
            for (name, _), count in zip(self.brought, panel):
                w.line(f"alignas(1024) {t} {name}[{s.stages}][{count}][{s.cols}][{PANEL}];")
            self._more_shared()
            if not spec.queries:
                places = f"{f'[{s.groups}]' if self.each else ''}[2][{1 + self.with_loss}][{s.cols}]"
                what = "lse and row_dot" if self.with_loss else "lse"
                w.line(f"alignas(16) float numbers{places};  // {what} of a tile's queries, and of the next one's")
            if self.scores.ranged:
                w.line(f"int met[{s.ahead}][{len(INTERVALS)}];  // {', '.join(INTERVALS)} of the rows")
            w.line(f"Barrier held_full[{s.ahead}], held_empty[{s.ahead}], full[{s.stages}], empty[{s.stages}];")
        w.line(f"const int group = int(threadIdx.x / {GROUP}) - 1;  // a warpgroup: consumers count from 0")
        with w.block("if (threadIdx.x == 0)"):
            with w.block(f"for (int i = 0; i < {s.ahead}; ++i)"):
                w.line("barrier_init(shared.held_full[i], 1);")
                w.line(f"barrier_init(shared.held_empty[i], {s.groups});")
            with w.block(f"for (int i = 0; i < {s.stages}; ++i)"):
                w.line("barrier_init(shared.full[i], 1);")
                w.line(f"barrier_init(shared.empty[i], {s.groups});")
            self._more_barriers()
            w.line("barrier_fence_init();")
        w.line("__syncthreads();")
        w.line()

    def _work(self) -> None:
        """Opens the loop over the block's tiles of rows."""
        w, s, spec = self.w, self.s, self.spec
        w.open(f"for (int work = blockIdx.x; work < {self.tiles * self.batches}; work += gridDim.x, ++held)")
        heads = min(s.heads, self.batches)
        w.line(f"const Tile at = tile_at<{self.batches}, {self.tiles}, {heads}>(work);")
        # The last queries of a causal mask meet the most keys: they begin first.
        growing = spec.queries and any(b.key < 0 and b.row > 0 for b in self.a.bounds)
        w.line(f"const int r0 = {f'({self.tiles - 1} - at.col)' if growing else 'at.col'} * {s.height};")
        self.scores.coordinates("at.row", spec.batch)

    def _end_work(self) -> None:
        self.w.close()

    def _tiles(self) -> None:
        """Opens the loop over the heads that share keys, and writes the range of tiles that are met."""
        if self.head:
            head = self.head
            self.w.open(f"for ({self.scores.t} {head} = 0; {head} < {self.spec.summed}; ++{head})")
        self.scores.bound_numbers()
        self.scores.met()

    def _end_tiles(self) -> None:
        if self.head:
            self.w.close()

    # ---- the producer

    def _load(self, name: str, number: int, count: int, barrier: str, first: str) -> None:
        w = self.w
        at = coordinates(self.a, self.spec.arguments[number], first)
        if count > 1:
            w.line("#pragma unroll 1  // the producer has few registers")
        with w.block(f"for (int i = 0; i < {count}; ++i)", when=count > 1):
            i, x = ("i", f"i * {PANEL}") if count > 1 else ("0", "0")
            w.line(f"tma_load({name}[{i}], {self.maps_of[number]}, {barrier}, {x}, {at});")

    def _producer(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        row = 2 * PANEL * (self.deep + self.wide)
        w.line(f"registers_decrease<{self.registers[0]}>();")
        w.line(f"Ring<{s.stages}> stage;")
        w.line(f"Ring<{s.ahead}> held;")
        ranged = self.scores.ranged
        if ranged:  # all lanes of a warp look at rows; one of them brings tiles
            w.line("const int lane = threadIdx.x % 32;")
        with w.block(f"if (threadIdx.x {'< 32' if ranged else '== 0'})"):
            self._work()
            self.scores.intervals()
            w.line("barrier_wait(shared.held_empty[held.index], held.parity ^ 1);")
            full = "shared.held_full[held.index]"
            if ranged:
                w.open("if (lane == 0)")
                for n, name in enumerate(INTERVALS):
                    w.line(f"shared.met[held.index][{n}] = {name};")
            w.line(f"barrier_expect({full}, {s.height * row});")
            for (name, number), count in zip(self.held, (self.deep, self.wide)):
                self._load(f"shared.{name}[held.index]", number, count, full, "r0")
            if ranged:
                w.close()
            self._tiles()
            with w.block("for (int tile = first; tile < last; ++tile, ++stage)"):
                w.line("barrier_wait(shared.empty[stage.index], stage.parity ^ 1);")
                if ranged:
                    w.line("if (lane != 0) continue;")
                w.line(f"barrier_expect(shared.full[stage.index], {s.cols * row});")
                for (name, number), count in zip(self.brought, (self.deep, self.wide)):
                    place = f"tile * {s.cols}"
                    self._load(f"shared.{name}[stage.index]", number, count, "shared.full[stage.index]", place)
            self._end_tiles()
            self._end_work()
            if not spec.queries:
                self._numbers()
            self._more_warps()

    def _numbers(self) -> None:
        """Writes the warps that bring the numbers of queries by ordinary loads, each for one warpgroup of consumers.

        There is room for the numbers of two tiles, in turn.  Writer and readers of a tile's numbers meet at a barrier
        when they are there: by then the tile before has been read.
        """
        w, s = self.w, self.s
        w.otherwise(f"else if (threadIdx.x >= 32 && threadIdx.x < {32 + 32 * s.groups})")
        w.line("const int reader = threadIdx.x / 32 - 1;  // the warpgroup that they are for")
        w.line("int place = 0;")
        self._work()
        self.scores.intervals()
        self._tiles()
        with w.block("for (int tile = first; tile < last; ++tile, place ^= 1)"):
            self._bring("[reader][place]")
            w.line(f"named_barrier_sync({NUMBERS} + reader, {GROUP + 32});")
        self._end_tiles()
        self._end_work()

    def _bring(self, place: str) -> None:
        """Writes how a warp brings the numbers of a tile."""
        w, s, spec = self.w, self.s, self.spec
        exists = f"x < {spec.cols}" if spec.cols % s.cols else ""
        text, i = self.scores.lse_of(self.lse, "x", exists), "i"
        if self.with_loss:
            i = f"i % {s.cols}"
            first = f"({text})" if exists else text
            text = f"i < {s.cols} ? {first} : {self.scores.row_dot_of(self.row_dot, 'x', exists)}"
        count = s.cols * (1 + self.with_loss)
        # Loads one after the other may take longer than a tile; there are registers for three or four of one kind.
        few, of_one_kind = self.registers[0] < 40, s.cols % 32 == 0
        if of_one_kind and s.cols <= 64:
            at_once = count // 32
        elif few:
            at_once = 1
        else:
            at_once = s.cols // 32 if of_one_kind else 2
        w.line(f"#pragma unroll {at_once}")
        with w.block(f"for (int i = threadIdx.x % 32; i < {count}; i += 32)"):
            w.line(f"const {self.scores.t} x = tile * {s.cols} + {i};")
            w.line(f"shared.numbers{place}[{f'i / {s.cols}' if self.with_loss else '0'}][{i}] = {text};")

"""Attention on Hopper: what a block has in shared memory, and the thread, or warp, that has TMA fill it.

Where masks leave each query an interval of keys that depends on data (packed sequences), a second warp looks ahead at
the queries of tiles to come and finds the tiles of keys that they meet, so that nothing waits for this.
"""

from __future__ import annotations

from codegen.attention.computed import RowsPrologue
from codegen.attention.fragments import ScoreFragments
from codegen.attention.listing import Listing
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_schedule import GROUP, PANEL, AttentionWgmmaSchedule, box, coordinates, panels
from codegen.expr import Operand
from codegen.kernel import Kernel, shared_memory
from codegen.spec import TensorMap

#: A tile of queries that meets so many tiles of keys, or fewer, takes less time than looking at further queries.
FEW_TILES = 8


class Producer:
    """Writes what lies in shared memory, and what brings it there; the rest is `codegen.attention.wgmma`'s.

    q, k, v     C names of the tensor maps; pointers those of the arguments behind them.
    element     C type of queries and keys.
    tiles       of queries of a batch; batches their number.
    listing     how the tiles of keys that are met are found, where that depends on data.
    registers   of a thread of the producer and of a consumer.
    panel, size  elements of queries and keys in a row of 128 bytes, and their bytes.
    width       columns of the products with values.
    narrow      whether these are of 8-bit floats.
    quads       whether, of each four keys, two lie in the first half of a tile.
    joined      whether the first product of a tile of queries begins while the one before ends.
    spread      whether lanes of a warp bring the pages of a tile side by side.
    order       the counter of tiles of queries that are taken as blocks come to them; or empty.
    prologue       the code that computes queries, which the consumers run then; or None.
    """

    w: Kernel
    spec: AttentionSpec
    s: AttentionWgmmaSchedule
    scores: ScoreFragments
    listing: Listing | None
    q: str
    k: str
    v: str
    pointers: list[str]
    element: str
    registers: tuple[int, int]
    tiles: int
    batches: int
    panel: int
    size: int
    width: int
    narrow: bool
    quads: bool
    joined: bool
    spread: bool
    prologue: RowsPrologue | None
    order: str

    def _shared(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        deep, wide = panels(spec.depth, self.size), panels(spec.width)
        t = self.element
        with shared_memory(w):
            rows = f"[{s.ahead}][{max(deep, wide)}][{s.rows}][{self.panel}]"
            w.line(f"alignas(1024) {t} queries{rows};  // panels of 128 bytes, swizzled")
            w.line(f"alignas(1024) {t} keys[{s.stages}][{deep}][{s.keys}][{self.panel}];")
            values = f"[1][{self.width}][{s.keys}]" if self.narrow else f"[{wide}][{s.keys}][{PANEL}]"
            w.line(f"alignas(1024) {t} values[{s.stages}]{values};{'  // along the keys' if self.narrow else ''}")
            if self.prologue is None:
                w.line(f"Barrier queries_full[{s.ahead}], queries_empty[{s.ahead}];")
            every = (f"{name}[{s.stages}]" for name in ("keys_full", "keys_empty", "values_full", "values_empty"))
            w.line(f"Barrier {', '.join(every)};")
            if self.scores.spanned:
                w.line(f"Barrier spans_full[{s.ahead}], spans_empty[{s.ahead}];")
                w.line(f"attention::Span spans[{s.ahead}];  // of queries to come, and the end")
            if self.listing:
                note = "of keys: twice the number, and whether no range is broken; -1 is the end"
                w.line(f"int tiles[{s.stages}];  // {note}")
        w.line(f"const int group = int(threadIdx.x / {GROUP}) - 1;  // a warpgroup: consumers count from 0")

    def _barriers(self) -> None:
        w, s = self.w, self.s
        with w.block("if (threadIdx.x == 0)"):
            if self.prologue is None:
                with w.block(f"for (int i = 0; i < {s.ahead}; ++i)"):
                    w.line("barrier_init(shared.queries_full[i], 1);")
                    w.line(f"barrier_init(shared.queries_empty[i], {s.groups});")
                    if self.scores.spanned:
                        w.line("barrier_init(shared.spans_full[i], 1);")
                        w.line(
                            f"barrier_init(shared.spans_empty[i], {s.groups * GROUP + 1});  // whoever reads says so"
                        )
            with w.block(f"for (int i = 0; i < {s.stages}; ++i)"):
                for name in ("keys", "values"):
                    w.line(f"barrier_init(shared.{name}_full[i], 1);")
                    w.line(f"barrier_init(shared.{name}_empty[i], {s.groups});")
            w.line("barrier_fence_init();")
        w.line("__syncthreads();")
        w.line()

    def _work(self, *, keys: bool = True) -> None:
        """Opens the loop over tiles of queries; with ``keys``, writes which tiles of keys they may meet."""
        w, s = self.w, self.s
        work = self.tiles * self.batches
        step = f"work = {self._following()}" if s.alternate else "work += gridDim.x"
        w.open(f"for (int work = blockIdx.x; work < {work}; {step})")
        self._tile_at("work", keys=keys)

    def _next_span(self) -> None:
        """Opens the loop over tiles of queries that the scout has found."""
        w = self.w
        w.open("while (true)")
        self._read_span("const attention::Span span", "query")
        w.line(f"if (span.work >= {self.tiles * self.batches}) break;")
        self._tile_at("span.work")

    def _read_span(self, span: str, ring: str) -> None:
        """Writes the variable ``span``: what the scout has found of the queries at a place of ``ring``."""
        w = self.w
        w.line(f"barrier_wait(shared.spans_full[{ring}.index], {ring}.parity);")
        w.line(f"{span} = shared.spans[{ring}.index];")
        w.line(f"barrier_arrive(shared.spans_empty[{ring}.index]);")

    @property
    def first(self) -> str:
        """The first tile of keys that queries may meet."""
        return "0" if self.scores.spanned else "first"

    @property
    def last(self) -> str:
        """The tile of keys behind the last."""
        return "span.tiles" if self.scores.spanned else "last"

    def _tile_at(self, work: str, *, keys: bool = False) -> None:
        heads = min(self.s.heads, self.batches)
        self.w.line(f"const Tile at = tile_at<{self.batches}, {self.tiles}, {heads}>({work});")
        self.scores.place("at.row", "at.col", keys=keys, some=self.joined)

    def _following(self) -> str:
        """Returns the number of the block's next tile of queries."""
        return "back_and_forth(work)" if self.s.alternate else "work + gridDim.x"

    def _box(self, op: Operand, number: int, elements: int) -> TensorMap:
        """Returns the tensor map of keys or values, whose box is a tile or what of it lies in one page."""
        spec, keys = self.spec, self.s.keys
        if spec.pages is None:
            return box(spec, op, number, spec.keys, elements, keys)
        pages = spec.pages[number - 1]
        return box(spec, op, number, pages.size, elements, min(keys, pages.size), pages)

    def _load_rows(self, name: str, number: int, elements: int) -> None:
        """Writes the loads of a tile of keys or values."""
        spec, keys, w = self.spec, self.s.keys, self.w
        op, map_ = ((spec.k, self.k), (spec.v, self.v))[number]
        full, tile = f"shared.{name}_full[stage.index]", f"shared.{name}[stage.index]"
        count = panels(elements, self.size)
        if self.narrow and number == 1:
            w.line(f"barrier_expect({full}, {self.width * 2 * PANEL});")
            w.line(f"tma_load({tile}[0], {map_}, {full}, n0, {coordinates(self.spec, op, '0')});")
            return
        if self.quads and number == 0:
            w.line(f"barrier_expect({full}, {count * keys * PANEL * 2});")
            w.line("// Of each four keys the first two go to the first half of the tile, the others to the second.")
            with w.unrolled(f"for (int i = 0; i < {2 * count}; ++i)"):
                at = f"i / 2 * {self.panel}, i % 2 * 2, {coordinates(self.spec, op, 'n0 / 4')}"
                w.line(f"tma_load({tile}[i / 2][i % 2 * {keys // 2}], {map_}, {full}, {at});")
            return
        if spec.pages is None:
            self._load(name, tile, keys, count, op, map_, full, "n0")
            return
        pages = spec.pages[number]
        height = min(keys, pages.size)
        bytes_ = count * keys * PANEL * 2
        if self.spread:
            w.line(f"if (lane == 0) barrier_expect({full}, {bytes_});")
            w.line("__syncwarp();  // a lane brings a page")
            w.open(f"for (int r = lane * {height}; r < {keys}; r += {32 * height})")
        else:
            w.line(f"barrier_expect({full}, {bytes_});")
            if height < keys:
                w.open(f"for (int r = 0; r < {keys}; r += {height})")
        row, page = "(n0 + r)" if height < keys else "n0", f"{name}_page"
        block = self.scores.page(pages, self.pointers[number], f"{row} / {pages.size}")
        # Rows behind the last page get a block outside of the container, which TMA fills with zeros.
        w.line(f"const int {page} = {row} < {pages.pages * pages.size} ? {block} : {pages.blocks};")
        first = f"{row} % {pages.size}" if height < pages.size else "0"
        with w.unrolled(f"for (int i = 0; i < {count}; ++i)"):
            at = f"{coordinates(self.spec, op, first)}, {page}"
            part = "[r]" if height < keys else ""
            w.line(f"tma_load({tile}[i]{part}, {map_}, {full}, i * {PANEL}, {at});")
        if height < keys:
            w.close()

    def _load(
        self, name: str, tile: str, rows: int, count: int, op: Operand, map_: str, barrier: str, first: str
    ) -> None:
        w = self.w
        w.line(f"barrier_expect({barrier}, {count * rows * PANEL * 2});")
        at = coordinates(self.spec, op, first)
        if count == 1:
            w.line(f"tma_load({tile}[0], {map_}, {barrier}, 0, {at});")
            return
        with w.unrolled(f"for (int i = 0; i < {count}; ++i)"):
            w.line(f"tma_load({tile}[i], {map_}, {barrier}, i * {self.panel}, {at});")

    def _producer(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        w.line(f"registers_decrease<{self.registers[0]}>();")
        with w.block(f"if (threadIdx.x {'< 32' if self.listing or self.spread else '== 0'})"):
            if self.listing or self.spread:
                w.line("const int lane = threadIdx.x;")
            w.line(f"Ring<{s.stages}> stage;")
            if self.prologue is None:
                w.line(f"Ring<{s.ahead}> query;")
            if self.scores.spanned:
                self._next_span()
            else:
                self._work()
            if self.listing:
                self._load_queries("lane == 0")
                self.listing.rows()
                self.listing.open()
                self._load_tile()
                self.listing.close()
                with w.block("if (lane == 0)"):
                    self._end_list()
            else:
                with w.block(f"for (int tile = {self.last} - 1; tile >= {self.first}; --tile, ++stage)"):
                    self._load_tile()
                if spec.some_meet_none and not self.joined:
                    self._load_queries(f"{self.first} >= {self.last}{' && lane == 0' if self.spread else ''}")
            if self.prologue is None:
                w.line("++query;")
        if self.scores.spanned:
            self._scout()
        w.close()

    def _scout(self) -> None:
        """Writes the warp that looks ahead at queries, while those before them are worked on."""
        w, s = self.w, self.s
        w.otherwise("else if (threadIdx.x / 32 == 1)")
        w.line("const int lane = threadIdx.x % 32;")
        w.line(f"Ring<{s.ahead}> query;")
        w.line("int work = blockIdx.x;")
        with w.block(f"while (work < {self.tiles * self.batches})"):
            self._tile_at("work")
            self.scores.span("m0", s.rows, some=self.joined)
            self._tell("{work, base, tiles}")
            w.line("++query;")
            if self.order:
                w.line("// Who is behind takes no more; of those that are done soon the next one is looked at early.")
                w.line(f"if (tiles > {FEW_TILES}) {self._told}")
                w.line(f"if (lane == 0) work = gridDim.x + take_number({self.order});")
                w.line("work = __shfl_sync(0xffffffffu, work, 0);")
            else:
                w.line(f"work = {self._following()};")
        self._tell("{work, 0, 0}")

    @property
    def _told(self) -> str:
        """The wait for a free place for a span."""
        return "barrier_wait(shared.queries_empty[query.index], query.parity ^ 1);"

    def _tell(self, span: str) -> None:
        w = self.w
        w.line(self._told)
        w.line("barrier_wait(shared.spans_empty[query.index], query.parity ^ 1);")
        with w.block("if (lane == 0)"):
            w.line(f"shared.spans[query.index] = {span};")
            w.line("barrier_arrive(shared.spans_full[query.index]);")

    def _load_tile(self) -> None:
        """Writes the loads of a tile of keys and of values; in front of the first, that of the queries."""
        w, spec = self.w, self.spec
        w.line(f"const int n0 = {self.scores.first_key};")
        w.line("barrier_wait(shared.keys_empty[stage.index], stage.parity ^ 1);")
        if self.listing:
            w.line("shared.tiles[stage.index] = tile * 2 + whole;")
        self._load_rows("keys", 0, spec.depth)
        if not self.listing:
            self._load_queries(f"tile == {self.last} - 1{' && lane == 0' if self.spread else ''}")
        w.line("barrier_wait(shared.values_empty[stage.index], stage.parity ^ 1);")
        self._load_rows("values", 1, spec.width)

    def _end_list(self) -> None:
        """Writes how the consumers are told that there is no further tile."""
        w = self.w
        w.line("barrier_wait(shared.keys_empty[stage.index], stage.parity ^ 1);")
        w.line("shared.tiles[stage.index] = -1;")
        w.line("barrier_arrive(shared.keys_full[stage.index]);")
        w.line("barrier_wait(shared.values_empty[stage.index], stage.parity ^ 1);")
        w.line("barrier_arrive(shared.values_full[stage.index]);")
        w.line("++stage;")

    def _load_queries(self, condition: str) -> None:
        """Writes the load of the queries, under a condition; writes none where they are computed."""
        w, s, spec = self.w, self.s, self.spec
        if self.prologue is not None:
            return
        with w.block(f"if ({condition})"):
            w.line("barrier_wait(shared.queries_empty[query.index], query.parity ^ 1);")
            deep = panels(spec.depth, self.size)
            full = "shared.queries_full[query.index]"
            self._load("queries", "shared.queries[query.index]", s.rows, deep, spec.q, self.q, full, "m0")

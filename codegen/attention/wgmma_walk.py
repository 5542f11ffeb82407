"""Attention on Hopper: the tiles of queries that a block works on, and the tiles of keys that each of them meets.

They are `Intervals` that follow from the number of the tile of queries.  Where masks leave each query an interval that
depends on data (packed sequences), a warp looks ahead at the queries of tiles to come and finds their `Spans`, so that
nothing waits for this.  Where other masks depend on data, the producer finds `Lists` before it loads the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from codegen.attention.ranges import LANES, Ranges
from codegen.attention.wgmma_block import Block
from codegen.buffers import every
from codegen.pipeline import GROUP, Pipeline

#: A tile of queries that meets so many tiles of keys, or fewer, takes less time than looking at further queries.
FEW_TILES = 8


class Intervals:
    """Tiles of keys from the last that may be met down to the first.

    number       C expression of the number of a tile of queries.
    first, last  those of the first tile of keys, and of that behind the last; begin that of the one met first.
    latest       the stage of the tile that was met last.
    lanes        whether the producer is a warp.
    skips        whether a tile of queries may find no keys.
    """

    number, first, last, begin, latest, lanes = "work", "first", "last", "last - 1", "stage", False

    def __init__(self, b: Block) -> None:
        self.b, self.w, self.skips = b, b.w, b.spec.some_meet_none and not b.joined
        #: the number of the block's next tile of queries
        self.following = "back_and_forth(work)" if b.s.alternate else "work + gridDim.x"

    @contextmanager
    def tiles(self) -> Iterator[None]:
        """Writes the loop over a block's tiles of queries, and the interval of tiles of keys for who looks at them."""
        step = f"work = {self.following}" if self.b.s.alternate else "work += gridDim.x"
        with self.w.loop(f"for (int work = blockIdx.x; work < {self.b.work}; {step})"):
            self.place("work", keys=not self.lanes or self.w.trace.role == "producer")
            yield

    def place(self, work: str, *, keys: bool = False) -> None:
        """Writes where the tile of queries of this number is."""
        self.b.scores.place(work, keys=keys, some=self.b.joined)

    def fill(self, load: Callable[..., None], load_queries: Callable[[str], None]) -> None:
        """Writes the producer's loads: of a tile of keys and values, and of the queries, under a condition."""
        lane = " && lane == 0" if self.b.spread else ""
        with self.w.block(f"for (int tile = {self.begin}; tile >= {self.first}; --tile, ++stage)"):
            load(f"tile == {self.begin}{lane}")
        if self.skips:
            load_queries(f"{self.first} >= {self.last}{lane}")

    def scout(self) -> None:
        """Writes the warp beside the producer."""

    # ---- the consumers

    def look(self, variable: str, query: str) -> str:
        """Writes a variable, what is known of a tile of queries at a place, and returns the next tile's number."""
        return self.following

    @contextmanager
    def met(self) -> Iterator[None]:
        """Writes what is done if there is a tile of keys, around what is written inside."""
        with self.w.block(f"if ({self.first} < {self.last})", when=self.skips):
            yield
            self.w.line("++stage;")

    def await_first(self) -> None:
        """Writes what waits for the first tile of keys."""
        self.b.keys.wait()

    @contextmanager
    def further(self) -> Iterator[None]:
        """Writes the loop over all tiles of keys but the first; the stage of the one before is ``previous``."""
        with self.w.loop(f"for (int tile = {self.last} - 2; tile >= {self.first}; --tile)"):
            self.w.line(f"const Ring<{self.b.s.stages}> previous = stage;")
            self.next_stage()
            yield

    def next_stage(self) -> None:
        """Writes that the stage is ``previous``, and what waits for the keys of the next one."""
        self.w.moved("stage", "previous")
        self.w.line("++stage;")
        self.b.keys.wait()


class Spans(Intervals):
    """Intervals that a warp beside the producer, the scout, has found."""

    number, first, last, begin = "span.work", "0", "span.tiles", "span.tiles - 1"

    def __init__(self, b: Block) -> None:
        super().__init__(b)
        self.spans = Pipeline(b.w, "spans", b.s.ahead, releases=b.s.groups * GROUP + 1)

    def look(self, variable: str, query: str) -> str:
        self.spans.wait(query)
        self.w.line(f"{variable} = shared.spans[{query}.index];")
        threads = 1 if self.w.trace.role == "producer" else self.b.s.groups * GROUP
        self.spans.release(query, condition="", count=threads)
        return f"{variable.rpartition(' ')[2]}.work"

    @contextmanager
    def tiles(self) -> Iterator[None]:
        begun = self.b.joined and self.w.trace.role != "producer"
        with self.w.loop(f"while ({f'span.work < {self.b.work}' if begun else 'true'})"):
            if not begun:
                self.look("const attention::Span span", "query")
                self.w.line(f"if (span.work >= {self.b.work}) break;")
            self.place("span.work")
            yield
            if begun:
                self.w.line("span = following;")

    def scout(self) -> None:
        b, w = self.b, self.w
        assert b.queries is not None
        with w.role("scout", "threadIdx.x / 32 == 1", otherwise=True):
            w.line("const int lane = threadIdx.x % 32;")
            w.line(f"Ring<{b.s.ahead}> query;")
            w.line("int work = blockIdx.x;")
            with w.loop(f"while (work < {b.work})"):
                self.place("work")
                b.scores.span("m0", b.s.rows, some=b.joined)
                self._tell(b.queries, "{work, base, tiles}")
                w.line("++query;")
                if b.order:
                    note = "Who is behind takes no more; of those that are done soon the next one is looked at early."
                    w.line(f"// {note}")
                    b.queries.await_empty("query", condition=f"tiles > {FEW_TILES}")
                    w.line(f"if (lane == 0) work = gridDim.x + take_number({b.order});")
                    w.line("work = __shfl_sync(0xffffffffu, work, 0);")
                else:
                    w.line(f"work = {self.following};")
            self._tell(b.queries, "{work, 0, 0}")

    def _tell(self, queries: Pipeline, span: str) -> None:
        """Writes that a span is handed on, once there is a place for its queries."""
        queries.await_empty("query")
        self.spans.acquire("query")
        with self.w.block("if (lane == 0)"):
            self.w.line(f"shared.spans[query.index] = {span};")
            self.spans.arrive("query")


class Lists(Intervals):
    """Tiles that the producer lists, up to the end of the list: the number of each lies beside its keys.

    A range compares integers that depend on the query with integers that depend on the key, such as the documents of a
    sequence.  Of a tile, only the least and the largest of each matter: where no query can meet a key the tile is
    skipped, and where every query meets every key no mask is evaluated.  A lane looks at one tile, the warp at 32.
    """

    begin, latest, lanes = "tile", "previous", True

    def fill(self, load: Callable[..., None], load_queries: Callable[[str], None]) -> None:
        w, b = self.w, self.b
        load_queries("lane == 0")
        ranges = b.scores.ranges()
        ranges.tile("m0", b.s.rows)
        with w.block(f"for (int end = last; end > first; end -= {LANES})"):
            self._look_at_tiles(ranges)
            w.line("if (lane != 0) continue;")
            with w.block("for (uint32 left = met_tiles; left != 0; left &= left - 1, ++stage)"):
                w.line("const int number = __ffs(left) - 1, tile = end - 1 - number;")
                w.line("const int whole = inside_tiles >> number & 1;")
                load("", "tile * 2 + whole")
        with w.block("if (lane == 0)"):
            b.keys.acquire()
            w.line("shared.tiles[stage.index] = -1;")
            b.keys.arrive()
            b.values.acquire()
            b.values.arrive()
            w.line("++stage;")

    def _look_at_tiles(self, ranges: Ranges) -> None:
        """Writes which of 32 tiles are met, and in which no range is broken."""
        w, spec, keys = self.w, self.b.spec, self.b.s.keys
        w.line("const int mine = end - 1 - lane;  // a lane looks at a tile")
        w.line("bool met = false, inside = false;")
        with w.block("if (mine >= first)"):
            stop = f"(mine + 1) * {keys}"
            stop = f"min({stop}, {spec.keys})" if self.b.scores.ragged else stop
            ranges.extents(f"mine * {keys}", stop, of_keys=True)
            for name, most in (("met", True), ("inside", False)):
                sums = (ranges.sum(n, most=most) for n in range(len(spec.ranges)))
                w.line(f"{name} = {every(*(f'{x} >= 0' for x in sums))};")
        for name in ("met", "inside"):
            w.line(f"const uint32 {name}_tiles = __ballot_sync(0xffffffffu, {name});")

    @contextmanager
    def met(self) -> Iterator[None]:
        b, w = self.b, self.w
        b.keys.wait()
        w.line("int tile = shared.tiles[stage.index];")
        with w.block("if (tile >= 0)"):
            yield
        b.values.wait(note="the end of the list")
        b.warps.sync("group", note="all warps have been here")
        with w.block("if (t == 0)"):
            b.keys.release(condition="")
            b.values.release(condition="")
        w.line("++stage;")

    def await_first(self) -> None: ...

    @contextmanager
    def further(self) -> Iterator[None]:
        w = self.w
        w.line(f"Ring<{self.b.s.stages}> previous = stage;")
        with w.loop("while (true)"):
            w.line("previous = stage;")
            self.next_stage()
            w.line("tile = shared.tiles[stage.index];")
            w.line("if (tile < 0) break;")
            yield

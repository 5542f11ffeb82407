"""Attention on Hopper: the thread, or warp, that has TMA bring tiles of queries, keys and values."""

from __future__ import annotations

from codegen.attention.spec import Pages
from codegen.attention.wgmma_block import Block
from codegen.attention.wgmma_schedule import coordinates, panels
from codegen.attention.wgmma_walk import Intervals
from codegen.kernel import FROM_HERE
from codegen.pipeline import Pipeline
from codegen.tensor_map import box_bytes


def produce(b: Block, walk: Intervals) -> None:
    """Writes the producer's warpgroup."""
    w, warp = b.w, walk.lanes or b.spread
    queries = Copies(b, 0, b.queries, "query") if b.queries else None
    keys, values = Copies(b, 1, b.keys), Copies(b, 2, b.values)

    def load_queries(condition: str) -> None:
        if queries:
            with w.block(f"if ({condition})"):
                queries.write("m0")

    def load(first: str, told: str = "") -> None:
        w.line(f"const int n0 = {b.scores.first_key};")
        keys.write("n0", told)
        if first:
            load_queries(first)
        values.write("n0")

    w.line(f"registers_decrease<{b.s.registers(b.spec)[0]}>();")
    with w.role("producer", f"threadIdx.x {'< 32' if warp else '== 0'}"):
        if warp:
            w.line("const int lane = threadIdx.x;")
        w.line(f"Ring<{b.s.stages}> stage;")
        if queries:
            w.line(f"Ring<{b.s.ahead}> query;")
        with walk.tiles():
            walk.fill(load, load_queries)
            if queries:
                w.line("++query;")
        w.line(FROM_HERE)
    walk.scout()


class Copies:
    """Copies of a tile of queries (operand 0), keys (1) or values (2) to a stage of their pipeline."""

    def __init__(self, b: Block, number: int, pipeline: Pipeline, stage: str = "stage") -> None:
        self.b, self.number, self.pipeline, self.stage = b, number, pipeline, stage
        self.op, buffer = b.spec.arguments[number], b.w.buffers[pipeline.name]
        self.name, self.map = b.maps[number]
        self.along_keys = b.narrow and number == 2
        elements = b.spec.width if number == 2 else b.spec.depth
        #: so many rows of 128 bytes, and what they take
        self.panels = 1 if self.along_keys else panels(elements, self.op.dtype.itemsize)
        self.bytes = buffer.stage_bytes // buffer.shape[0] * self.panels

    def write(self, first: str, told: str = "") -> None:
        """Writes what fills a stage once it is empty, from a first row on; consumers are ``told`` something of it."""
        b = self.b
        self.pipeline.acquire(self.stage)
        if told:
            b.w.line(f"shared.tiles[stage.index] = {told};")
        self.pipeline.expect(self.bytes, self.stage, condition="lane == 0" if b.spread and self.number else "")
        if self.along_keys:
            self._box("[0]", f"{first}, {coordinates(b.spec, self.op, '0')}")
        elif b.scores.quads and self.number == 1:
            b.w.line("// Of each four keys the first two go to the first half of the tile, the others to the second.")
            with b.w.unrolled(f"for (int i = 0; i < {2 * self.panels}; ++i)"):
                at = f"i / 2 * {b.panel}, i % 2 * 2, {coordinates(b.spec, self.op, f'{first} / 4')}"
                self._box(f"[i / 2][i % 2 * {b.s.keys // 2}]", at, 2 * self.panels)
        elif b.spec.pages is not None and self.number:
            self._pages(b.spec.pages[self.number - 1], first)
        else:
            self._panels(coordinates(b.spec, self.op, first))

    def _box(self, place: str, at: str, times: int = 1) -> None:
        """Writes the copy of a box, which is made so many times."""
        to, full = f"shared.{self.pipeline.name}[{self.stage}.index]{place}", self.pipeline.full(self.stage)
        self.b.w.line(f"tma_load({to}, {self.name}, {full}, {at});")
        self.pipeline.copied(times * box_bytes(self.map), self.stage)

    def _panels(self, at: str, rows: str = "", times: int = 1) -> None:
        """Writes copies of the panels of some rows."""
        count = self.panels
        with self.b.w.unrolled(f"for (int i = 0; i < {count}; ++i)", when=count > 1):
            panel, element = ("i", f"i * {self.b.panel}") if count > 1 else ("0", "0")
            self._box(f"[{panel}]{rows}", f"{element}, {at}", times * count)

    def _pages(self, pages: Pages, first: str) -> None:
        """Writes copies of rows that lie in pages."""
        b, w, keys = self.b, self.b.w, self.b.s.keys
        height, table = min(keys, pages.size), b.arguments[self.number + 2]
        begin, step = (f"lane * {height}", 32 * height) if b.spread else ("0", height)
        if b.spread:
            w.line("__syncwarp();  // a lane brings a page")
        with w.block(f"for (int r = {begin}; r < {keys}; r += {step})", when=b.spread or height < keys):
            row, place = (f"({first} + r)", "[r]") if height < keys else (first, "")
            block, page = b.scores.page(pages, table, f"{row} / {pages.size}"), f"{self.pipeline.name}_page"
            # Rows behind the last page get a block outside of the container, which TMA fills with zeros.
            w.line(f"const int {page} = {row} < {pages.pages * pages.size} ? {block} : {pages.blocks};")
            within = f"{row} % {pages.size}" if height < pages.size else "0"
            self._panels(f"{coordinates(b.spec, self.op, within)}, {page}", place, keys // height)

"""Attention on Hopper: a consumer's queries, which TMA brings or which it computes, and its results, which may leave
from where the queries lay.
"""

from __future__ import annotations

from codegen.attention.computed import Rows
from codegen.attention.wgmma_block import Block
from codegen.attention.wgmma_schedule import GROUP, PANEL, ROWS, coordinates, panels
from codegen.attention.wgmma_walk import Intervals


class Queries:
    """Queries that the producer brings."""

    def __init__(self, b: Block) -> None:
        self.b, self.w = b, b.w

    def define(self) -> None:
        """Writes functions that the consumers call."""

    def prefetch(self, work: str) -> None:
        """Writes the prefetch of what queries are computed from, of the tile of this number."""

    def wait(self, query: str, work: str) -> None:
        """Writes what waits for a tile of queries, or computes the consumer's rows of it; ``work`` is its number."""
        assert self.b.queries is not None
        self.b.queries.wait(query)


class ComputedQueries(Queries):
    """Queries of which each consumer computes its own rows."""

    def __init__(self, b: Block) -> None:
        super().__init__(b)
        prologue, spec = b.scores.computed[0], b.spec
        assert prologue is not None
        last = spec.rows - 1 if spec.rows % b.s.rows else None
        padded = -(-spec.depth // b.step) * b.step
        self.rows = Rows(b.top, last, ROWS, padded, "t", GROUP, b.scores.batch, b.scores.t, b.element)
        self.prologue, self.several = prologue, b.work > b.s.blocks  # tiles of queries of a block

    def define(self) -> None:
        b, w = self.b, self.w
        with w.block("const auto compute_queries = [&](int work, int index)", "};"):
            self._place()
            held = self.prologue.hold(self.rows)
            if b.out_map is not None:
                # The results stored last may lie in the other place.
                w.line(f"if (t == 0) tma_wait_read<{0 if b.joined else b.s.ahead - 1}>();  // what lay there has left")
            b.warps.sync("group", note="and has been multiplied by all warps")
            if held is None:
                self.prologue.fill(self.rows, self._store)
            else:
                self.prologue.put(self.rows, held, self._store)
            w.line("fence_async_shared();")
            b.warps.sync("group", note="the consumer's rows are there")
        if self.several:
            with w.block("const auto prefetch_queries = [&](int work)", "};"):
                w.line(f"if (work >= {b.work}) return;")
                self._place()
                self.prologue.prefetch(self.rows)

    def _place(self) -> None:
        self.b.tile_at("work")
        self.b.scores.begin("at.row", "at.col")

    def _store(self, name: str) -> None:
        panel = self.b.panel
        place = f"&shared.queries[index][d / {panel}][{self.b.part}][0], r, d % {panel}"
        self.w.line(f"store_row<{panel}>({place}, {name});")

    def prefetch(self, work: str) -> None:
        if self.several:
            self.w.line(f"prefetch_queries({work});")

    def wait(self, query: str, work: str) -> None:
        self.w.line(f"compute_queries({work}, {query}.index);")


class Results:
    """Results that threads store from registers."""

    def __init__(self, b: Block, walk: Intervals) -> None:
        self.b, self.w, self.walk = b, b.w, walk

    def free(self) -> None:
        """Writes, in the first tile of keys, that queries may be brought to where the results before lay."""

    def store(self) -> None:
        if self.b.queries:
            if self.walk.skips:
                # Without products, which warps run together, a warp might come too late, to the next queries.
                self.b.warps.sync("group", note="all warps have been here")
            self.b.queries.release("query")
        self.b.scores.store(self.b.written[0], self.b.width)

    def end(self) -> None:
        """Writes what waits for the last results, behind all tiles of queries."""


class StoredByTma(Results):
    """Results that TMA stores from where the queries lay in shared memory."""

    def _free(self, stage: str, condition: str = "", at: str = "", note: str = "") -> None:
        """Writes, under a condition, that queries may be brought to a place from which the results have left."""
        if self.b.queries:
            with self.w.block(f"if ({condition})", when=bool(condition)):
                self.w.line(f"tma_wait_read<0>();{note}")
                self.b.queries.release(stage, condition="", at=at)

    def free(self) -> None:
        if self.b.joined:
            self._free("other", f"t == 0 && {self.walk.number} != blockIdx.x", "query.index ^ 1")

    def store(self) -> None:
        b, w, out = self.b, self.w, self.b.spec.out
        w.line("// The results take the place of the queries, of which nothing is left to multiply.")
        with w.unrolled(f"for (int j = 0; j < {b.width}; j += 16)"):
            w.line(f"Vector<{out.dtype.ctype}, 2> v[4];")
            with w.unrolled("for (int i = 0; i < 8; ++i)"):
                w.line(f"v[i / 2][i % 2] = convert<{out.dtype.ctype}>(o[j / 2 + i] * inverse[i / 2 % 2]);")
            pointer = f"&shared.queries[query.index][j / {PANEL}][{b.part}][0]"
            if out.dtype.ctype != b.element:
                pointer = f"reinterpret_cast<{out.dtype.ctype}*>({pointer})"
            w.line(f"store_fragments<{PANEL}>({pointer}, t / 32 * 16, j % {PANEL}, v);")
        w.line("fence_async_shared();")
        b.warps.sync("group")
        with w.block("if (t == 0)"):
            if b.s.ahead > 1 and not b.joined:
                note = "  // the results before have left, where there are queries to come"
                self._free("other", f"{self.walk.number} != blockIdx.x", "query.index ^ 1", note)
            with w.unrolled(f"for (int i = 0; i < {panels(b.spec.width)}; ++i)"):
                at = f"i * {PANEL}, {coordinates(b.spec, out, b.top)}"
                w.line(f"tma_store({b.out}, shared.queries[query.index][i][{b.part}], {at});")
            w.line("tma_commit();")
            if b.s.ahead == 1:
                self._free("query")

    def end(self) -> None:
        self.w.line("if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it")

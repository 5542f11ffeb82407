"""Attention on Hopper: queries that consumers compute, and results, which may leave from where queries lay."""

from __future__ import annotations

from codegen.attention.computed import Rows, RowsPrologue
from codegen.attention.wgmma_block import Block
from codegen.attention.wgmma_schedule import PANEL, ROWS, coordinates, panels
from codegen.attention.wgmma_walk import Intervals
from codegen.pipeline import GROUP, Pipeline
from codegen.sizes import most


def await_queries(b: Block, query: str, work: str) -> None:
    """Writes what waits for a tile of queries, or computes the consumer's rows of it; ``work`` is its number."""
    if b.queries:
        b.queries.wait(query)
    else:
        b.w.line(f"compute_queries({work}, {query}.index);")


def define_queries(b: Block, prologue: RowsPrologue) -> None:
    """Writes the functions that compute a consumer's rows of a tile of queries, and prefetch what this reads."""
    w, spec, part, panel = b.w, b.spec, b.part, b.panel
    last = spec.rows - 1 if spec.rows % b.s.rows else None
    padded = -(-spec.depth // b.step) * b.step
    rows = Rows(b.top, last, ROWS, padded, "t", GROUP, b.scores.batch, b.scores.t, b.element)

    def store(name: str) -> None:
        w.line(f"store_row<{panel}>(&shared.queries[index][d / {panel}][{part}][0], r, d % {panel}, {name});")

    with w.block("const auto compute_queries = [&](int work, int index)", "};"):
        b.scores.begin("work")
        held = prologue.hold(rows)
        if b.out_map:
            # The results stored last may lie in the other place.
            w.line(f"if (t == 0) tma_wait_read<{0 if b.joined else b.s.ahead - 1}>();  // what lay there has left")
        b.warps.sync("group", note="and has been multiplied by all warps")
        if held is None:
            prologue.fill(rows, store)
        else:
            prologue.put(rows, held, store)
        w.line("fence_async_shared();")
        b.warps.sync("group", note="the consumer's rows are there")
    if most(b.work) > b.s.blocks:
        with w.block("const auto prefetch_queries = [&](int work)", "};"):
            w.line(f"if (work >= {b.work}) return;")
            b.scores.begin("work")
            prologue.prefetch(rows)


def store_results(b: Block, walk: Intervals) -> None:
    """Writes what becomes of the results of a tile of queries."""
    b.w.reads("o")
    b.scores.finish(b.stats)
    if b.out_map:
        _store_by_tma(b, walk)
    else:
        if b.queries and walk.skips:
            # Without products, which warps run together, a warp might come so late that it finds the next queries.
            b.warps.sync("group", note="all warps have been here")
        if b.queries:
            b.queries.release("query")
        b.scores.store(b.written[0], b.width)


def _store_by_tma(b: Block, walk: Intervals) -> None:
    w, out = b.w, b.spec.out
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
        if b.queries and b.s.ahead > 1 and not b.joined:
            _free_other(b, b.queries, walk, note="  // the results before have left, where there are queries to come")
        with w.unrolled(f"for (int i = 0; i < {panels(b.spec.width)}; ++i)"):
            at = f"i * {PANEL}, {coordinates(b.spec, out, b.top)}"
            w.line(f"tma_store({b.out}, shared.queries[query.index][i][{b.part}], {at});")
        w.line("tma_commit();")
        if b.queries and b.s.ahead == 1:
            w.line("tma_wait_read<0>();")
            b.queries.release("query", condition="")


def free_results(b: Block, walk: Intervals) -> None:
    """Writes, in the first tile of keys, that queries may be brought to where the results before were stored from."""
    if b.out_map and b.queries and b.joined:
        _free_other(b, b.queries, walk, thread="t == 0 && ")


def _free_other(b: Block, queries: Pipeline, walk: Intervals, *, thread: str = "", note: str = "") -> None:
    with b.w.block(f"if ({thread}{walk.number} != blockIdx.x)"):
        b.w.line(f"tma_wait_read<0>();{note}")
        queries.release("other", condition="", at="query.index ^ 1")

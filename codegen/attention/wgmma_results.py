"""Attention on Hopper: the results of a tile of queries, which are stored from where these queries lay in shared
memory.
"""

from __future__ import annotations

from codegen.attention.wgmma_producer import Producer
from codegen.attention.wgmma_schedule import GROUP, PANEL, ROWS, coordinates, panels
from codegen.iteration import linear
from codegen.spec import TensorMap


class AttentionResults(Producer):
    """Writes how results leave, and when the place of queries is free again; the rest is `codegen.attention.wgmma`'s.

    out_map   the tensor map by which TMA stores them, if it does; out its C name.
    written   C names of the results that threads store.
    stats     C name of the log-sum-exp; or empty.
    """

    out_map: TensorMap | None
    out: str
    written: list[str]
    stats: str

    @property
    def _number(self) -> str:
        """The number of the tile of queries."""
        return "span.work" if self.scores.spanned else "work"

    def _free_queries(self) -> None:
        """Writes how the producer may bring queries again to where the results before were stored from."""
        w = self.w
        with w.block(f"if (t == 0 && {self._number} != blockIdx.x)"):
            w.line("tma_wait_read<0>();")
            w.line("barrier_arrive(shared.queries_empty[query.index ^ 1]);")

    def _meet(self) -> None:
        """Writes a barrier of a consumer's warps, before one thread releases what all of them waited for.

        Warps multiply in step.  Where nothing is multiplied, one may be so late that its data have been overwritten.
        """
        self.w.line(f"named_barrier_sync({self.s.groups + 1} + group, {GROUP});  // all warps have been here")

    def _results(self) -> None:
        self.scores.finish(self.stats)
        if self.out_map is not None:
            self._store_tiles()
        else:
            if self.prologue is None:
                if self.spec.some_meet_none and not (self.joined or self.listing):
                    self._meet()
                self.w.line("if (t == 0) barrier_arrive(shared.queries_empty[query.index]);")
            self.scores.store(self.written[0], self.width)

    def _store_tiles(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        out = spec.out.dtype.ctype
        part = f"group * {ROWS}" if s.groups > 1 else "0"
        w.line("// The results take the place of the queries, of which nothing is left to multiply.")
        with w.unrolled(f"for (int j = 0; j < {self.width}; j += 16)"):
            w.line(f"Vector<{out}, 2> v[4];")
            with w.unrolled("for (int i = 0; i < 8; ++i)"):
                w.line(f"v[i / 2][i % 2] = convert<{out}>(o[j / 2 + i] * inverse[i / 2 % 2]);")
            pointer = f"&shared.queries[query.index][j / {PANEL}][{part}][0]"
            if out != self.element:
                pointer = f"reinterpret_cast<{out}*>({pointer})"
            w.line(f"store_fragments<{PANEL}>({pointer}, t / 32 * 16, j % {PANEL}, v);")
        w.line("fence_async_shared();")
        w.line(f"named_barrier_sync({s.groups + 1} + group, {GROUP});")
        with w.block("if (t == 0)"):
            if s.ahead > 1 and not self.joined and self.prologue is None:
                with w.block(f"if ({self._number} != blockIdx.x)"):
                    w.line("tma_wait_read<0>();  // the results before have left, where there are queries to come")
                    w.line("barrier_arrive(shared.queries_empty[query.index ^ 1]);")
            with w.unrolled(f"for (int i = 0; i < {panels(spec.width)}; ++i)"):
                first = linear([("m0", 1), ("group", ROWS if s.groups > 1 else 0)])
                at = f"i * {PANEL}, {coordinates(spec, spec.out, first)}"
                w.line(f"tma_store({self.out}, shared.queries[query.index][i][{part}], {at});")
            w.line("tma_commit();")
            if s.ahead == 1 and self.prologue is None:
                w.line("tma_wait_read<0>();")
                w.line("barrier_arrive(shared.queries_empty[query.index]);")

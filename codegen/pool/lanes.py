"""Pool kernels whose threads share windows: each takes some of the elements, and a block combines what they have.

Where no window lies along the innermost dimension, neighbouring threads have neighbours in memory, as threads that fold
alone do, and those of a window are further apart; else the threads of a window are neighbours.
"""

from __future__ import annotations

from codegen.buffers import Edge
from codegen.iteration import unsigned
from codegen.kernel import block_number, held_row, row_number
from codegen.pool.renderer import PoolRenderer
from codegen.pool.steps import THREADS
from codegen.spec import KernelSource


class LanesRenderer(PoolRenderer):
    """Writes kernels whose threads share windows."""

    holds = False

    @property
    def side(self) -> int:
        """Windows, or vectors of them, of a block."""
        return THREADS // self.s.lanes

    def render(self) -> KernelSource:
        windows = self.body()
        details = f"{self._details()}, which {self.s.lanes} threads share"
        return self.source(details, Edge(windows, self.side).tiles, barriers=True)

    def _spelled(self) -> int:
        return len(self.windows)

    def _number(self, total: int) -> None:
        w, t, edge = self.w, unsigned(self.t), Edge(total, self.side)
        self._inside = "inside" if edge.ragged else ""
        if not self.space.inner:
            row_number(w, t, "at", edge, self.s.lanes)
            return
        held_row(w, t, "at", edge, f"{block_number(t)} * {self.side} + threadIdx.x % {self.side}")
        w.line(f"const uint32 lane = threadIdx.x / {self.side};")

    def _results(self) -> None:
        self._combine()
        with self.w.guarded(self._inside, "lane == 0"):
            super()._results()

    def _combine(self) -> None:
        """Writes the combination of the folds of a window's threads."""
        w, lanes, vector = self.w, self.s.lanes, self.s.vector
        exchanged: dict[str, str] = {}
        for k, reduction in enumerate(self.program.reductions):
            part, functor = self.parts[k], reduction.combiner.functor
            if not self.space.inner:
                w.line(f"{part} = reduce::lanes<{functor}, {lanes}>({part});")
                continue
            if reduction.ctype not in exchanged:
                size = THREADS // max(32, self.side) * self.side * vector
                exchanged[reduction.ctype] = w.exchange(f"{reduction.ctype} parts", "", reduction.ctype, size)
            values = part
            if vector == 1:
                values = self.names.unique(reduction.name, "_all")
                w.line(f"{reduction.ctype} {values}[1] = {{{part}}};")
            w.line(f"reduce::across<{functor}, {self.side}, {lanes}>({values}, {exchanged[reduction.ctype]});")
            if vector == 1:
                w.line(f"{part} = {values}[0];")

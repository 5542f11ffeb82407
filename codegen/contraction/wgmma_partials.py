"""Reductions of parts of the results in the Hopper form: the 64 rows of a consumer are one part of every column."""

from __future__ import annotations

from codegen.buffers import Edge, every
from codegen.contraction.wgmma_block import Block
from codegen.contraction.wgmma_layout import GROUP, GROUP_ROWS
from codegen.iteration import linear
from codegen.partials import Partials, Sink


class WgmmaPartials(Partials):
    """Partial reductions of the sums of a consumer.

    Columns: when a chunk of columns is complete, the lanes of a warp combine its 16 rows, 16 columns at a time, without
    waiting in between, and leave the values in shared memory.  Then one thread per column combines the values of the
    four warps.  Rows: the four lanes that have columns of a row combine their values at the end of the tile.
    """

    def __init__(self, block: Block) -> None:
        names = block.w.names
        super().__init__(block.w, block.spec, names, block.t, block.at_batch if block.batch > 1 else "0")
        self.block, self.s = block, block.s
        #: C names of what the warps leave in shared memory
        self.left = [names.unique(x.pointer, "_of_warps") for x in self.rows]

    @property
    def _row(self) -> str:
        """A thread's first row."""
        return f"m0 + {self.block.rows} + row" if self.s.pieces > 1 else "m0 + row"

    def begin_tile(self) -> None:
        """Declares a thread's values of its two rows."""
        for part in self.cols:
            self.begin(part, 2, self.s.part // part.partial.chunk)

    def begin_columns(self) -> None:
        """Declares a thread's values of its columns of a chunk, 4 of every 16."""
        for part in self.rows:
            self.begin(part, self.block.layout.chunk // 16, 4)

    def sinks(self, column: str, *, outside: bool, row: str = "f % 2", chunk: str = "") -> list[Sink]:
        """Returns where element ``e`` of a pair of columns, ``column`` of the tile the first, is combined.

        ``outside`` says whether some may be outside of the result; ``row`` is the pair's of the thread's two rows,
        ``chunk`` a column of the tile in the same chunk.
        """
        n = f"{self.block.n0} + {column} + e"
        inside_m = self.block.m.inside(f"{self._row} + f % 2 * 8") if outside else ""
        inside_n = self.block.n.inside(n) if outside else ""
        sinks = [Sink(x.reduction, f"{x.own}[j / 16][f / 2 * 2 + e]", inside_m) for x in self.rows]
        for x in self.cols:
            at = "0"
            if self.s.part > x.partial.chunk:
                at = f"{chunk if chunk.isidentifier() else f'({chunk})'} / {x.partial.chunk}"
            sinks.append(Sink(x.reduction, f"{x.own}[{row}][{at}]", inside_n))
        return sinks

    def leave_columns(self) -> None:
        """Writes how the lanes combine their columns of a chunk, and leave the values in shared memory."""
        if not self.rows:
            return
        with self.w.unrolled(f"for (int j = 0; j < {self.block.layout.chunk}; j += 16)"):
            for name, part in zip(self.left, self.rows):
                value = f"reduce::columns<{part.reduction.combiner.functor}>({part.own}[j / 16])"
                self.w.line(f"const {part.reduction.ctype} {name} = {value};")
            with self.w.block("if (lane % 8 < 4)"):
                for name in self.left:
                    at = "[t / 32][j + reduce::column_of_lane(lane)]"
                    self.w.line(f"shared.{name}[{self.block.group}]{at} = {name};")

    def finish_columns(self) -> None:
        """Writes how the values that the warps left of this chunk of columns are combined and stored."""
        w, m, chunk = self.w, self.block.m, self.block.layout.chunk
        if not self.rows:
            return
        place = linear([(f"m0 / {GROUP_ROWS}", 1), ("p" if self.s.pingpong else self.block.group, 1)])
        with w.block(f"if (t < {chunk})" if chunk < GROUP else ""):
            w.line(f"const {self.t} col = {self.block.n0} + chunk * {chunk} + t, place = {place};")
            places = Edge(Edge(m.total, GROUP_ROWS).tiles, m.size // GROUP_ROWS)
            inside = every(self.block.n.inside("col"), places.inside("place"))
            with w.guarded(inside):
                for name, part in zip(self.left, self.rows):
                    total, op = part.own, part.reduction.combiner.functor
                    left = f"shared.{name}[{self.block.group}]"
                    w.line(f"{part.reduction.ctype} {total} = {left}[0][t];")
                    w.unrolled_line(f"for (int q = 1; q < 4; ++q) reduce::into<{op}>({total}, {left}[q][t]);")
                    self.store(part, "place", "col", total)

    def finish_tile(self) -> None:
        """Writes how the lanes combine the values of their rows, and store them."""
        for part in self.cols:
            sizes = self.block.m.total, self.block.n.total
            self.finish_cols(part, 2, self.s.part // part.partial.chunk, self._row, self.block.n0, sizes)

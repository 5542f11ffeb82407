"""Reductions of parts of the results in the Hopper form: the 64 rows of a consumer are one part of every column."""

from __future__ import annotations

from math import prod

from codegen.contraction.wgmma_layout import GROUP, GROUP_ROWS, WgmmaSchedule
from codegen.iteration import linear
from codegen.naming import Names, Writer
from codegen.operands import OperandTiles
from codegen.partials import Partials, Sink
from codegen.spec import ContractionSpec


class WgmmaPartials(Partials):
    """Partial reductions of the sums of a consumer.

    Columns: the lanes of a warp combine its 16 rows, 16 columns at a time, and leave the values in shared memory.  When
    a chunk of columns is complete, one thread per column combines the values of the four warps.  Rows: the four lanes
    that have columns of a row combine their values at the end of the tile.
    """

    def __init__(
        self,
        w: Writer,
        spec: ContractionSpec,
        schedule: WgmmaSchedule,
        operand_tiles: OperandTiles,
        names: Names,
        t: str,
    ) -> None:
        super().__init__(w, spec, names, t, "at.batch" if prod(operand_tiles.batch) > 1 else "0")
        self.s, self.sizes = schedule, (operand_tiles.rows, operand_tiles.cols)
        self._left = [names.unique(x.pointer, "_of_warps") for x in self.rows]

    @property
    def _group(self) -> str:
        return "group" if self.s.groups > 1 else "0"

    @property
    def _piece(self) -> str:
        """The number of a consumer's 64 rows in the tile."""
        return "p" if self.s.pingpong else self._group

    @property
    def _row(self) -> str:
        """A thread's first row."""
        return f"m0 + p * {GROUP_ROWS} + row" if self.s.pingpong else "m0 + row"

    def members(self, chunk: int) -> None:
        """Declares the shared memory for the warps' values of ``chunk`` columns."""
        for name, part in zip(self._left, self.rows):
            dims = f"[{self.s.groups}][4][{chunk}]"
            self.w.line(f"{part.reduction.ctype} {name}{dims};  // what each warp has of a chunk of columns")

    def begin_tile(self) -> None:
        """Declares a thread's values of its two rows."""
        for part in self.cols:
            self.begin(part, 2, self.s.part // part.partial.chunk)

    def begin_columns(self) -> None:
        """Declares a thread's values of its 4 of 16 columns."""
        for part in self.rows:
            self.begin(part, 4)

    def sinks(self, column: str, n0: str, ragged_m: bool, ragged_n: bool, row: str = "f % 2") -> list[Sink]:
        """Returns where element ``e`` of pair ``f`` of the 16 columns from n0 + column on is combined.

        ``ragged_m`` and ``ragged_n`` say whether some rows and columns may be outside of the result.
        """
        n = f"{n0} + {column} + f / 2 * 8 + lane % 4 * 2 + e"
        inside_m = f"{self._row} + f % 2 * 8 < {self.sizes[0]}" if ragged_m else ""
        inside_n = f"{n} < {self.sizes[1]}" if ragged_n else ""
        sinks = [Sink(x.reduction, f"{x.own}[f / 2 * 2 + e]", inside_m) for x in self.rows]
        for x in self.cols:
            chunk = "0"
            if self.s.part > x.partial.chunk:
                chunk = f"{column if column.isidentifier() else f'({column})'} / {x.partial.chunk}"
            sinks.append(Sink(x.reduction, f"{x.own}[{row}][{chunk}]", inside_n))
        return sinks

    def leave_columns(self) -> None:
        """Writes how the lanes combine their columns, 16 from ``j`` on, and leave the values in shared memory."""
        if not self.rows:
            return
        for name, part in zip(self._left, self.rows):
            value = f"reduce::columns<{part.reduction.combiner.functor}>({part.own})"
            self.w.line(f"const {part.reduction.ctype} {name} = {value};")
        with self.w.block("if (lane % 8 < 4)"):
            for name in self._left:
                self.w.line(f"shared.{name}[{self._group}][t / 32][j + reduce::column_of_lane(lane)] = {name};")

    def finish_columns(self, n0: str, chunk: int) -> None:
        """Writes how the values that the warps left of this chunk of columns are combined and stored."""
        w = self.w
        if not self.rows:
            return
        place = linear([(f"m0 / {GROUP_ROWS}", 1), (self._piece, 1)])
        with w.block(f"if (t < {chunk})" if chunk < GROUP else ""):
            w.line(f"const {self.t} col = {n0} + chunk * {chunk} + t, place = {place};")
            inside = [f"col < {self.sizes[1]}"] if self.sizes[1] % self.s.tile_n else []
            places = -(-self.sizes[0] // GROUP_ROWS)
            inside += [f"place < {places}"] if places % (self.s.tile_m // GROUP_ROWS) else []
            with w.block(f"if ({' && '.join(inside)})", when=bool(inside)):
                for name, part in zip(self._left, self.rows):
                    total, op = part.own, part.reduction.combiner.functor
                    left = f"shared.{name}[{self._group}]"
                    w.line(f"{part.reduction.ctype} {total} = {left}[0][t];")
                    w.unrolled_line(f"for (int q = 1; q < 4; ++q) reduce::into<{op}>({total}, {left}[q][t]);")
                    self.store(part, "place", "col", total)

    def finish_tile(self, n0: str) -> None:
        """Writes how the lanes combine the values of their rows, and store them."""
        for part in self.cols:
            self.finish_cols(part, 2, self.s.part // part.partial.chunk, self._row, n0, self.sizes)

"""Tiles where rows and columns begin anywhere in memory (`pointwise.alignment`).

Elements that are read are shifted into place on their way to registers.  Stores are aligned: in every row, a block's
columns begin where a vector of the output does (`Tiling.frame`).
"""

from __future__ import annotations

from collections.abc import Callable

from codegen.iteration import Point, extent
from codegen.pointwise import alignment
from codegen.pointwise.body import plus, vector_type
from codegen.pointwise.tiles import TilesRenderer, array_at, times
from codegen.pointwise.tiling import Stage


class UnalignedTilesRenderer(TilesRenderer):
    """Writes a kernel in tiles whose rows and columns begin anywhere."""

    def _notes(self) -> list[str]:
        return [*super()._notes(), f"rows begin anywhere: vectors are aligned in {self.t.lead.name}"]

    # ---- along the rows

    def _kept(self, n: int, stage: Stage) -> str:
        operand = self.program.loads[n]
        return f"Unaligned<{operand.dtype.ctype}, {stage.vector}>" if stage.shifted else super()._kept(n, stage)

    def _fetch(self, n: int, stage: Stage, point: Point, at: str) -> None:
        if not stage.shifted:
            super()._fetch(n, stage, point, at)
            return
        operand, pointer = self.program.loads[n], self.body.pointers.loads[n]
        text = f"{pointer}, {point.offset(operand.strides)}, {extent(self.t.shape, operand.strides)}"
        self.w.line(f"{self.body.register(n)}{at} = load_unaligned<{stage.vector}>({text});")

    def _scatter(self, n: int, stage: Stage, point: Point, at: str) -> None:
        operand, tile, register = self.program.loads[n], self.load_tiles[n], f"{self.body.register(n)}{at}"
        w, t = self.w, self.t
        place = ["at"]
        if t.skewed:
            self._skew(point)
            step = t.lead.strides[self.s.turn]
            # Element e is in row `row + e`, and rows of the lead are `step` elements apart.
            moved = f"(skew + e{times(step)}) % {alignment.period(t.lead, self.s.vector)}"
            place.append(moved if stage.vector > 1 else "skew")
        if stage.vector == 1:
            w.line(f"{tile}[{' + '.join(place)}] = {register};")
            return
        if stage.shifted:
            elements = self.body.names.unique(operand.name, "_e")
            w.line(f"const {vector_type(operand, stage.vector)} {elements} = {register}.elements();")
            register = elements
        place.insert(1, f"e * {stage.width}")
        w.each_element(stage.vector, f"{tile}[{' + '.join(place)}] = {register}[e];")

    def _skew(self, point: Point) -> None:
        """Writes the skew of a point's row."""
        lead = self.t.lead
        text = alignment.skew(lead, self.body.pointers.stores[0], point, self.s.vector)
        self.w.line(f"const {self.s.itype} skew = {text};")

    # ---- along the columns

    def _left(self) -> str:
        return ""

    def _walk(self, body: Callable[[Point], None]) -> None:
        def skewed(point: Point) -> None:
            self._skew(point)
            body(point)

        super()._walk(skewed if self.t.skewed else body)

    def _point(self) -> Point:
        return self._at(f"{self.row0}row", self._column)

    @property
    def _column(self) -> str:
        """The column of the space where a vector begins; if it is before column 0, it has wrapped around."""
        return f"{self.col0}col{' - skew' if self.t.skewed else ''}"

    def _register_type(self, n: int) -> str:
        operand, vector, kind = self.program.loads[n], self.s.vector, self.kinds[n]
        if kind == "uniform":
            return operand.dtype.ctype
        return f"{'Packed' if kind == 'vector' else 'Unaligned'}<{operand.dtype.ctype}, {vector}>"

    def _load(self, point: Point) -> None:
        for n in self.direct_loads:
            operand, pointer, kind = self.program.loads[n], self.body.pointers.loads[n], self.kinds[n]
            register = f"{self.body.register(n)}{array_at(self.vectors.tiles)}"
            offset = point.offset(operand.strides)
            if kind == "uniform":
                self.w.line(f"{register} = {pointer}[{offset}];")
            else:
                load = "load_within" if kind == "vector" else "load_unaligned"
                text = f"{pointer}, {offset}, {extent(self.t.shape, operand.strides)}"
                self.w.line(f"{register} = {load}<{self.s.vector}>({text});")

    def _loaded(self, n: int) -> str:
        register = f"{self.body.register(n)}{array_at(self.vectors.tiles)}"
        if self.kinds[n] == "uniform":
            return register
        if self.kinds[n] == "unaligned":
            operand = self.program.loads[n]
            elements = self.body.names.unique(operand.name, "_e")
            self.w.line(f"const {vector_type(operand, self.s.vector)} {elements} = {register}.elements();")
            register = elements
        return f"{register}[e]"

    def _store(self, n: int, name: str, point: Point) -> None:
        row = plus(self.body.pointers.stores[n], alignment.row(point, self.program.stores[n].operand))
        self.w.line(f"store_within({row}, {self._column}, {self.t.width}, {name});")

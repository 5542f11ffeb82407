"""Rows kernels that reduce segments of rows as well: the groups of a norm's gradient, and the channels of each group.

A warp reduces whole segments, one after the other: their reductions need no barrier.
"""

from __future__ import annotations

from math import prod

from codegen.iteration import Coordinates, linear
from codegen.naming import Writer
from codegen.rows.along import AlongRenderer
from codegen.rows.schedule import RowsSchedule
from codegen.rows.space import segments_of_block
from codegen.spec import RowsSpec


class SegmentRenderer(AlongRenderer):
    """Writes kernels whose warps each reduce segments of a row."""

    positions = (*AlongRenderer.positions, "segment")

    def __init__(self, spec: RowsSpec, schedule: RowsSchedule) -> None:
        super().__init__(spec, schedule)
        segments = self.space.segments
        assert segments is not None
        self.lead = len(self.space.row) - segments.dims
        self.segments, self.size = prod(self.space.row[: self.lead]), prod(self.space.row[self.lead :])
        self.columns = {
            k: self.names.unique(self.program.reductions[k].name, "_own") for k in sorted(set(self.space.sums.values()))
        }

    def _details(self) -> list[str]:
        return [*super()._details(), f"Each of the {self.segments} segments of a row is reduced by a warp."]

    def _kept_elements(self) -> int:
        return segments_of_block(self.segments, self.s.lanes, self.s.cluster) * self.size

    @property
    def _at(self) -> str:
        return "place + col"

    def _open_vectors(self, *, loading: bool = False) -> None:
        w, s = self.w, self.s
        w.open(f"for (uint32 segment = lane / 32; segment < {self.segments}; segment += {s.lanes * s.cluster // 32})")
        for k, name in self.beside.items():
            reduction = self.program.reductions[k]
            w.line(f"{reduction.ctype} {name} = {reduction.start};")
        if s.form == "shared":
            own = "segment"
            if s.cluster > 1:
                warps = s.lanes // 32
                own = f"(segment / {warps * s.cluster} * {warps} + threadIdx.x / 32)"
            w.line(f"const uint32 place = {own} * {self.size};")
        if self.size // (32 * s.vector) >= 4:
            w.line("#pragma unroll 4")
        start = f"lane % 32{f' * {s.vector}' if s.vector > 1 else ''}"
        self.cols = _Columns(w, self.space.row, self.lead, s.itype)
        for d in range(self.lead):
            _ = self.cols[d]
        w.open(f"for ({s.itype} col = {start}; col < {self.size}; col += {32 * s.vector})")

    def _close_vectors(self) -> None:
        w, n = self.w, len(self.space.outer)
        w.close()
        for k, name in self.beside.items():
            w.line(f"{name} = reduce::lanes<{self.program.reductions[k].combiner.functor}, 32>({name});")
        stores = [(store, k) for store, k in self.space.sums.items() if k in self.beside]
        if stores:
            with w.block("if (lane % 32 == 0)"):
                for store, k in stores:
                    operand = self.program.stores[store].operand
                    over, within = self.rows.terms(operand.strides[:n]), operand.strides[n : n + self.lead]
                    offset = linear([*over, *self.cols.terms(within)])
                    same = operand.dtype.ctype == self.program.reductions[k].ctype
                    value = self.columns[k] if same else f"convert<{operand.dtype.ctype}>({self.columns[k]})"
                    w.line(f"{self.pointers.stores[store]}[{offset}] = {value};")
        w.close()


class _Columns(Coordinates):
    """Coordinates within a row: those of the segment, from ``segment``, then those within it, from ``col``."""

    def __init__(self, w: Writer, row: tuple[int, ...], lead: int, itype: str) -> None:
        super().__init__(w, "col", row[lead:], itype, "col")
        self._lead, self._segment = lead, Coordinates(w, "segment", row[:lead], itype, "segment")

    def __getitem__(self, dim: int) -> str:
        return self._segment[dim] if dim < self._lead else super().__getitem__(dim - self._lead)

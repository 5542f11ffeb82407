"""Rows kernels that reduce segments of rows as well: the groups of a norm's gradient, and the channels of each group.

A warp reduces whole segments, one after the other: their reductions need no barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from codegen.iteration import Coordinates, linear
from codegen.naming import Writer
from codegen.rows.along import AlongRenderer
from codegen.rows.schedule import RowsSchedule
from codegen.rows.space import segments_of_block
from codegen.spec import RowsSpec


class SegmentRenderer(AlongRenderer):
    """Writes kernels whose warps each reduce segments of a row."""

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

    @contextmanager
    def _over_row(self, *, loading: bool = False) -> Iterator[None]:
        w, s = self.w, self.s
        loop = f"for (uint32 segment = lane / 32; segment < {self.segments}; segment += {s.lanes * s.cluster // 32})"
        with w.block(loop):
            for k, name in self.beside.items():
                w.line(f"{self.program.reductions[k].ctype} {name} = {self.program.reductions[k].start};")
            if s.form == "shared":
                warps = s.lanes // 32
                own = f"(segment / {warps * s.cluster} * {warps} + threadIdx.x / 32)" if s.cluster > 1 else "segment"
                w.line(f"const uint32 place = {own} * {self.size};")
            if self.size // (32 * s.vector) >= 4:
                w.line("#pragma unroll 4")
            start = f"lane % 32{f' * {s.vector}' if s.vector > 1 else ''}"
            self.cols = _Columns(w, self.space.row, self.lead, s.itype)
            for d in range(self.lead):
                _ = self.cols[d]
            with w.block(f"for ({s.itype} col = {start}; col < {self.size}; col += {32 * s.vector})"):
                yield
            self._stored_segment()

    def _stored_segment(self) -> None:
        """Writes the reductions of a segment, and their stores."""
        w, n = self.w, len(self.space.outer)
        for k, name in self.beside.items():
            w.line(f"{name} = reduce::lanes<{self.program.reductions[k].combiner.functor}, 32>({name});")
        stores = [(store, k) for store, k in self.space.sums.items() if k in self.beside]
        with w.block("if (lane % 32 == 0)", when=bool(stores)):
            for store, k in stores:
                strides = self.program.stores[store].operand.strides
                over, within = self.rows.terms(strides[:n]), self.cols.terms(strides[n : n + self.lead])
                value = self._sum(store, self.columns[k])
                w.line(f"{self.pointers.stores[store]}[{linear([*over, *within])}] = {value};")


class _Columns(Coordinates):
    """Coordinates within a row: those of the segment, from ``segment``, then those within it, from ``col``."""

    def __init__(self, w: Writer, row: tuple[int, ...], lead: int, itype: str) -> None:
        super().__init__(w, "col", row[lead:], itype, "col")
        self._lead, self._segment = lead, Coordinates(w, "segment", row[:lead], itype, "segment")

    def __getitem__(self, dim: int) -> str:
        return self._segment[dim] if dim < self._lead else super().__getitem__(dim - self._lead)

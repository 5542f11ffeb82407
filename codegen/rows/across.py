"""Rows kernels whose neighbours in memory belong to neighbouring rows: column sums, statistics of channels.

A thread has ``vector`` neighbouring rows and reads an element of each in one access.  Neighbouring threads have the
next rows, and the threads that share a row, of a block or a cluster, read its elements in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codegen.expr import Reduced, Reduction, Result, Value
from codegen.iteration import Coordinates, at_most
from codegen.kernel import block_number, held_row
from codegen.rows.renderer import RowsRenderer
from codegen.rows.schedule import RowsSchedule
from codegen.sizes import least, most
from codegen.spec import RowsSpec

#: Passes of a loop that reads rows again which are all in flight at once.
PASSES = 4


class AcrossRenderer(RowsRenderer):
    """Writes kernels whose neighbouring threads are in neighbouring rows."""

    def __init__(self, spec: RowsSpec, schedule: RowsSchedule) -> None:
        super().__init__(spec, schedule)
        if schedule.form == "registers":  # no load waits for a reduction
            self.kept = self.stages.kept(early=True)
        self.dim, self.neighbours = len(self.space.outer) - 1, schedule.vector
        #: neighbouring threads with rows of their own
        self.side = schedule.rows // schedule.vector
        #: elements of a row that its threads take in one pass
        self.step = schedule.lanes * schedule.cluster
        self.unroll = most(-(-self.length // self.step))
        self.ragged = self.unroll * self.step != self.length or self.space.total % max(self.length, 1) != 0
        self._waits = schedule.cluster > 1
        self.array, self.u = f"[{self.unroll}]", "[u]"

    def _place(self) -> None:
        s = self.s
        mine = f"threadIdx.x % {self.side}" if s.lanes > 1 else "threadIdx.x"
        block, lane = block_number(s.itype), f"threadIdx.x / {self.side}"
        if s.cluster > 1:
            self.w.line("cluster_arrive();")
            block, lane = f"{block} / {s.cluster}", f"cluster_rank() * {s.lanes} + {lane}"
        row = f"{block} * {s.rows} + {mine}{f' * {s.vector}' if s.vector > 1 else ''}"
        held_row(self.w, s.itype, "row", self.edge, row, s.vector)
        self.w.line(f"const uint32 lane = {lane};")

    # ---- once a row

    def _scalars(self, stage: int) -> None:
        w, inlined = self.w, self.emitter.inlined  # the latter are written where they are stored
        chosen = [k for k in self.stages.of_row(stage) if k not in inlined]
        arrays = {}
        for k in self._read_again(chosen) if self.s.vector > 1 else ():
            instruction = self.program.instructions[k]
            arrays[k] = self.names.unique(instruction.name, "_r")
            w.line(f"{instruction.ctype} {arrays[k]}[{self.s.vector}];")
        with self.w.repeated("e", self.s.vector if chosen else 1):
            for k in chosen:
                if k in arrays:
                    w.line(f"{arrays[k]}[e] = {self.emitter.expression(k, self.terms)};")
                    self.terms[Result(k)] = f"{arrays[k]}[e]"
                else:
                    self.emitter.statements(w, self.terms, lambda n, k=k: n == k)  # type: ignore[misc]

    def _read_again(self, chosen: list[int]) -> list[int]:
        """Returns those of some instructions whose results others need, too."""
        program = self.program
        used: set[Value] = {v for k, i in enumerate(program.instructions) if k not in chosen for v in i.args}
        used |= {r.value for r in program.reductions} | {s.value for s in program.stores}
        return [k for k in chosen if Result(k) in used]

    def _part(self, reduction: Reduction) -> str:
        name = self.names.unique(reduction.name, "_part")
        if self.s.vector == 1:
            self.w.line(f"{reduction.ctype} {name}[1] = {{{reduction.start}}};")
            return f"{name}[0]"
        self.w.line(f"{reduction.ctype} {name}[{self.s.vector}];")
        self.w.each_element(self.s.vector, f"{name}[e] = {reduction.start};")
        return f"{name}[e]"

    def _combined(self, parts: dict[int, str]) -> None:
        w, s = self.w, self.s
        if self._waits:
            w.line("cluster_wait();  // all blocks have begun: their shared memory can be written")
            self._waits = False
        for k, part in parts.items():
            reduction, values = self.program.reductions[k], part[: part.index("[")]
            self.terms[Reduced(k)] = part
            if self.step > 1:
                w.line(self._exchanging(reduction, values, self.side, s.lanes, "parts"))
            if s.cluster > 1:
                blocks = w.exchange(reduction.name, "_of_blocks", reduction.ctype, s.cluster * s.rows)
                how = f"{reduction.combiner.functor}, {self.side}, {s.lanes}, {s.cluster}"
                w.line(f"reduce::across_cluster<{how}>({values}, {self._exchanges[reduction.ctype]}, {blocks});")

    # ---- the elements of a row

    @contextmanager
    def _over_row(self, *, loading: bool = False) -> Iterator[None]:
        # Where rows stay in registers, passes are spelled out, as are a few that read again: all loads are in flight
        # at once.  Those past the end are left out, or, when loading, read the last element: no load waits.
        w, s = self.w, self.s
        lane = "lane" if self.step > 1 else "0"
        begin = "" if self.begin == "0" else f"{self.begin} + "
        if s.form == "memory" and self.unroll > PASSES:
            w.line(f"#pragma unroll {PASSES}")
            with w.block(f"for ({s.itype} col = {begin}{lane}; col < {self.end}; col += {self.step})"):
                self.cols = Coordinates(w, "col", self.space.row, s.itype, "col")
                yield
            return
        with w.unrolled(f"for (int u = 0; u < {self.unroll}; ++u)"):
            start = f"{begin}u * {self.step} + lane" if self.step > 1 else f"{begin}u"
            if self.ragged and loading:
                start = at_most(start, self.space.total - 1, s.itype)
            w.line(f"const {s.itype} col = {start};")
            self.cols = Coordinates(w, "col", self.space.row, s.itype, "col")
            full = least(self.length // self.step) if self.space.total % max(self.length, 1) == 0 else 0
            inside = f"u < {full} || col < {self.end}" if full else f"col < {self.end}"
            with w.guarded(inside if self.ragged and not loading and full < self.unroll else ""):
                yield

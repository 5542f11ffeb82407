"""Rows kernels that combine columns as well: a norm's gradient and those of its weights, reading everything once.

A block walks the rows of a part one after the other, or some of them side by side.  What its threads combine for each
column stays in registers all the while, and is stored once, at the end: a row for each part.  Meanwhile the next rows
are in flight to shared memory, so that their latency is hidden while a block waits for a row's reductions.  Where a row
is moved on to registers, the next one follows it piece by piece into the same place.

Which rows belong to a part is up to the kernel, as the parts are combined in the end.  Neighbouring parts have
neighbouring rows, so that what all blocks read and write at one time lies together in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from codegen.expr import Index, Load, Reduced
from codegen.iteration import Coordinates, linear
from codegen.kernel import constant
from codegen.pointwise.body import plus, read, registers
from codegen.rows.along import AlongRenderer
from codegen.rows.schedule import RowsSchedule
from codegen.rows.space import repeated, streamed
from codegen.spec import RowsSpec


class WalkRenderer(AlongRenderer):
    """Writes kernels whose blocks walk many rows and combine their columns."""

    def __init__(self, spec: RowsSpec, schedule: RowsSchedule) -> None:
        super().__init__(spec, schedule)
        walk = self.space.walk
        assert walk is not None
        self.walk = walk
        self.unrolled = True
        #: rows of which columns are combined, and the number of parts they are in
        self.walked = prod(self.space.outer[-walk.dims :])
        self.parts = -(-self.walked // walk.chunk)
        #: rows of each part, None where some parts have one more than others
        self.each = self.walked // self.parts if self.parts and self.walked % self.parts == 0 else None
        self._begins = "part" if self.count == self.walked else "begin"
        self._last = "count - 1" if self.each is None else f"uint32({self.each - 1})"
        #: rows that are in flight while one is worked on
        self.ahead = schedule.stages - 1
        #: whether the next row takes the place of one that has moved on to registers
        self.follows = schedule.form == "registers" and self.ahead > 0
        #: elements of a row, of one tensor, in shared memory
        self.room = self._kept_elements() if self.follows else self.length
        if self.ahead:
            self.kept = streamed(self.space)
        self.kept = [n for n in self.kept if n not in repeated(self.space)]
        #: by load: C name of the registers that hold it for all rows
        self._repeats: dict[int, str] = {}
        self._own: dict[int, str] = {}
        for k in sorted(set(self.space.sums.values())):
            self._own[k] = self.names.unique(self.program.reductions[k].name, "_own")
            self.columns[k] = f"{self._own[k]}[{self._u}][{'e' if schedule.vector > 1 else '0'}]"
        self._exchanged: dict[int, str] = {}
        #: by load: C name of the shared memory in which it arrives
        self._arriving: dict[int, str] = {}
        #: by operand with one value for each row: C name of the next row's value
        self._next: dict[int, str] = {}

    @property
    def _u(self) -> str:
        return "u" if self.unroll > 1 else "0"

    def _blocks(self) -> int:
        return self.count // max(self.walked, 1) * self.parts

    def _details(self) -> list[str]:
        most = -(-self.walked // max(1, self.parts))
        walked = f"A block walks {most} rows, {self.parts} apart, combining their columns meanwhile"
        beside = f", {self.s.rows} side by side" if self.s.rows > 1 else ""
        ahead = f", {self.ahead * self.s.rows} of them on their way" if self.ahead else ""
        return [*super()._details(), walked + beside + ahead + "."]

    @property
    def _has_inside(self) -> bool:
        rows = self.s.rows
        return rows > 1 and (self.each is None or self.each % rows != 0)

    def _body(self) -> None:
        w, s = self.w, self.s
        self._place()
        self._before()
        if self.ahead:
            self._arriving = self._carve((self.ahead if self.follows else s.stages) * s.rows * self.room)
        rows = self._turns()
        if self.follows:
            self._first_rows(rows)
        late = self.ahead if not self.follows else 0  # a row is worked on so many steps after its copies began
        w.line("#pragma unroll 1")
        with w.block(f"for (uint32 step = 0; step < {rows}{f' + {late}' if late else ''}; ++step)"):
            if late:
                self._fetch(rows)
            self._position("row", self._number(-late))
            if late:
                w.line(f"const uint32 at = {self._slot('(step + 1)', s.stages)};")
            if s.lanes > 32:
                w.line("const uint32 turn = step % 2;")
            self._after = self._number(1 - late)
            self._row_values()
            if self.follows:
                self._take_over(rows)
            elif s.form == "registers":
                self.kept_names = self._hold(self.kept)
            self._stages()
        self._finish()

    def _turns(self) -> str:
        """Returns the C expression of how many steps a block takes through its rows."""
        w, s = self.w, self.s
        if self.each is not None:
            return str(-(-self.each // s.rows))
        if s.rows == 1:
            return "count"
        w.line(f"const uint32 steps = (count + {s.rows - 1}) / {s.rows};")
        return "steps"

    def _number(self, later: int) -> str:
        """Returns the C expression of the number of the thread's row in its part, ``later`` steps from now."""
        rows = self.s.rows
        step = f"step {'+' if later > 0 else '-'} {abs(later)}" if later else "step"
        return step if rows == 1 else f"{f'({step})' if later else step} * {rows} + sub"

    def _position(self, name: str, number: str) -> None:
        """Declares the row with a number; a thread without a row computes the last one again."""
        w, itype = self.w, self.s.itype
        if self._has_inside and name == "row":
            w.line(f"const bool inside = {number} < {'count' if self.each is None else self.each};")
            number = f"inside ? {number} : {self._last}"
        elif self._has_inside or name == "after":
            number = f"min({number}, {self._last})"
        if number == "0":
            w.line(f"const {itype} {name} = {self._begins};")
            return
        if itype != "uint32":
            number = f"{itype}({number})"
        elif " " in number and not number.startswith("min("):
            number = f"({number})"
        apart = f" * {self.parts}" if self.parts > 1 else ""
        w.line(f"const {itype} {name} = {self._begins} + {number}{apart};")

    def _place(self) -> None:
        w, s = self.w, self.s
        if s.rows == 1:
            w.line("const uint32 lane = threadIdx.x;")
        else:
            w.line(f"const uint32 lane = threadIdx.x % {s.lanes}, sub = threadIdx.x / {s.lanes};")
        if self._begins == "part":
            w.line(f"const {s.itype} part = blockIdx.x;")
        else:
            w.line(f"const {s.itype} part = blockIdx.x % {self.parts};")
            w.line(f"const {s.itype} begin = blockIdx.x / {self.parts} * {s.itype}({self.walked}) + part;")
        if self.each is None:
            w.line(f"const uint32 count = ({s.itype}({self.walked + self.parts - 1}) - part) / {self.parts};")

    # ---- before the first row

    def _before(self) -> None:
        """Writes what is the same for all rows, the columns' reductions, and memory for what threads exchange."""
        w, s, n = self.w, self.s, len(self.space.outer)
        sums = [self.program.stores[store].operand for store, _ in self.walk.sums]
        same = [op for op in self.program.loads if not any(op.strides[n - self.walk.dims : n])]
        self._begin = self.rows = self._numbered("begin", [op.strides for op in (*same, *sums)])
        for k, operand in enumerate(self.program.loads):
            if self.space.varies(operand):
                continue
            if operand not in same:
                self._next[k] = self.names.unique(operand.name, "_next")
                continue
            text = self._row_value(k, self.rows)
            self.terms[Load(k)] = constant(w, self.names, self.program, k, text, "_r")
        if self._next:
            w.line("// A row's own values are read while the row before is worked on.")
            self._position("first", "0" if s.rows == 1 else "sub")
            rows = self._numbered("first", [self.program.loads[k].strides for k in self._next])
            for k, name in self._next.items():
                w.line(f"{self.program.loads[k].dtype.ctype} {name} = {self._row_value(k, rows)};")
        if repeats := repeated(self.space):
            self._repeats = self._hold(repeats)
        for k, name in self._own.items():
            reduction = self.program.reductions[k]
            start = " = {}" if reduction.combiner.neutral == 0 else ""
            w.line(f"{reduction.ctype} {name}[{self.unroll}][{s.vector}]{start};")
            if not start:
                w.line(f"reduce::fill({name}, {reduction.start});")
        if s.lanes > 32:
            for k, reduction in enumerate(self.program.reductions):
                if k not in self._own:
                    self._exchanged[k] = w.exchange(reduction.name, "_parts", reduction.ctype, 2, s.threads // 32)

    def _numbered(self, position: str, every: Sequence[tuple[int, ...]]) -> Coordinates:
        """Writes those coordinates of a row that some strides need; returns the coordinates."""
        return Coordinates(self.w, position, self.space.outer, self.s.itype, position).write(every)

    def _row_value(self, k: int, rows: Coordinates) -> str:
        """Returns the C expression of an operand's value for a row."""
        return f"{self.pointers.loads[k]}[{rows.offset(self.program.loads[k].strides[: len(self.space.outer)])}]"

    # ---- rows in flight

    def _slot(self, step: str, slots: int) -> str:
        """Returns the C expression of where the row of a step begins in shared memory, in elements."""
        rows = self.s.rows
        slot = f"{step} % {slots}" if slots > 1 else "0"
        if rows > 1:
            slot = f"({slot} * {rows} + sub)" if slots > 1 else "sub"
        return f"{slot} * {self.room}" if slot != "0" else "0"

    def _copies(self, into: str) -> None:
        """Writes the start of the copies of a vector of each tensor."""
        for n in self.kept:
            operand, name, pointer = self.program.loads[n], self._arriving[n], self.pointers.loads[n]
            offset = self._offset(operand.strides)
            nbytes = self.s.vector * operand.dtype.itemsize
            for start in range(0, nbytes, 16):
                more = f" + {start // operand.dtype.itemsize}" if start else ""
                self.w.line(f"copy_async<{min(nbytes, 16)}>({name} + {into}{more}, {plus(pointer, offset)}{more});")

    def _fetched(self, number: str) -> None:
        """Declares the row whose copies begin."""
        self._position("fetched", number)
        self.rows = self._numbered("fetched", [self.program.loads[n].strides for n in self.kept])

    @property
    def _mine(self) -> str:
        """C expression of where a thread's vector lies in a row in shared memory."""
        s = self.s
        if not (self.follows and self.ragged):
            return "col"
        lane = "lane" if s.lanes > 1 else "0"
        vector = lane if self.unroll == 1 else f"(u * {s.lanes} + {lane})" if s.lanes > 1 else "u"
        return vector if s.vector == 1 else f"{vector} * {s.vector}"

    def _first_rows(self, rows: str) -> None:
        """Writes the start of the copies of the first rows."""
        w, several = self.w, self.ahead > 1
        w.line("// A thread reads back what it copied itself.")
        with w.block(f"for (uint32 step = 0; step < {self.ahead}; ++step)" if several else ""):
            at = self._slot("step", self.ahead)
            self._fetched(self._number(0) if several else "0" if self.s.rows == 1 else "sub")
            with self._over_row(loading=True):
                with w.guarded(f"step < {rows}" if several else ""):
                    self._copies(f"{at} + {self._mine}" if at != "0" else self._mine)
                w.line("copy_async_commit();")

    def _take_over(self, rows: str) -> None:
        """Writes how an arrived row moves on to registers, and the start of a later row's copies into its place."""
        w, own = self.w, self.rows
        self.kept_names = {n: registers(w, self.program.loads[n], self.s.vector, self.array) for n in self.kept}
        at = self._slot("step", self.ahead)
        if at != "0":
            w.line(f"const uint32 at = {at};")
        place = self._mine if at == "0" else f"at + {self._mine}"
        self._fetched(self._number(self.ahead))
        with self._over_row(loading=True):
            w.line(f"copy_async_wait<{self.ahead * self.unroll - 1}>();")
            for n, name in self.kept_names.items():
                read(w, f"{name}{self.u}", self._arriving[n], place, self.s.vector, load="load_shared")
            with w.block(f"if (step + {self.ahead} < {rows})"):
                self._copies(place)
            w.line("copy_async_commit();")
        self.rows = own

    def _fetch(self, rows: str) -> None:
        """Writes the start of the copies of a later step's rows."""
        w, s = self.w, self.s
        w.line("// A thread reads back what it copied itself.")
        with w.block(f"if (step < {rows})"):
            w.line(f"const uint32 into = {self._slot('step', s.stages)};")
            self._fetched(self._number(0))
            with self._over_row():
                self._copies(f"into + {self._mine}")
        w.line("copy_async_commit();")
        w.line(f"if (step < {self.ahead}) continue;")
        w.line(f"copy_async_wait<{self.ahead}>();")

    def _held(self, n: int) -> str:
        if n in self._repeats:
            return f"{self._repeats[n]}{self.u}{'[e]' if self._count(n) > 1 else ''}"
        if n in self._arriving and n not in self.kept_names:
            return self._picked_up(n, self._arriving[n], f"at + {self._mine}")
        return super()._held(n)

    # ---- a row

    def _row_values(self) -> None:
        w, n = self.w, len(self.space.outer)
        self.rows = self._coordinates()
        for k, name in self._next.items():
            self.terms[Load(k)] = constant(w, self.names, self.program, k, name, "_r")
        if self._next:
            self._position("after", self._after)
            rows = self._numbered("after", [self.program.loads[k].strides for k in self._next])
            for k, name in self._next.items():
                w.line(f"{name} = {self._row_value(k, rows)};")
        for k, strides in enumerate(self.program.indices):
            if not any(strides[n:]):
                self.terms[Index(k)] = f"int32({self.rows.offset(strides[:n])})"

    def _combined(self, parts: dict[int, str]) -> None:
        if self.s.lanes <= 32:
            super()._combined(parts)
            return
        w, s, warps = self.w, self.s, self.s.lanes // 32
        for k, part in parts.items():
            w.line(f"reduce::give<{self.program.reductions[k].combiner.functor}>({part}, {self._exchanged[k]}[turn]);")
        w.line("__syncthreads();" if s.rows == 1 else f"named_barrier_sync(1 + sub, {s.lanes});")
        own = "" if s.rows == 1 else f" + sub * {warps}"
        for k in parts:
            reduction = self.program.reductions[k]
            name = self.names.unique(reduction.name)
            text = f"reduce::take<{reduction.combiner.functor}, {warps}>({self._exchanged[k]}[turn]{own})"
            w.line(f"const {reduction.ctype} {name} = {text};")
            self.terms[Reduced(k)] = name

    # ---- after the last row

    def _finish(self) -> None:
        """Writes how threads with neighbouring rows combine their columns' values, and the stores of the results."""
        w, s, n = self.w, self.s, len(self.space.outer)
        if s.rows > 1:
            w.line("// What the rows side by side have of each column.")
            for k, name in self._own.items():
                reduction, values = self.program.reductions[k], f"{name}[{self._u}]"
                statement = self._exchanging(reduction, values, s.lanes, s.rows, "columns")
                if self.unroll > 1:
                    w.unrolled_line(f"for (int u = 0; u < {self.unroll}; ++u) {statement}")
                else:
                    w.line(statement)
            w.line("if (sub > 0) return;")
        self.rows = self._begin
        with self._over_row():
            for store, step in self.walk.sums:
                operand, name = self.program.stores[store].operand, self._own[self.space.sums[store]]
                kept, cols = self.rows.terms(operand.strides[:n]), self.cols.terms(operand.strides[n:])
                offset = linear([("part", step), *kept, *cols])
                if s.vector == 1:
                    w.line(f"{self.pointers.stores[store]}[{offset}] = {self._sum(store, f'{name}[{self._u}][0]')};")
                    continue
                results = registers(w, operand, s.vector)
                w.each_element(s.vector, f"{results}[e] = {self._sum(store, f'{name}[{self._u}][e]')};")
                self._write(store, results, offset)

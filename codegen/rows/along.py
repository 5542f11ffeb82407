"""Rows kernels whose neighbouring threads, of a block or a cluster, read neighbouring vectors of a row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from codegen.buffers import VECTORS, Buffer
from codegen.expr import Load, Reduced, Reduction, Result, Value
from codegen.iteration import Coordinates, at_most
from codegen.kernel import row_number
from codegen.pointwise.body import plus, read, vector_type, write
from codegen.rows.renderer import RowsRenderer
from codegen.rows.schedule import RowsSchedule
from codegen.rows.stages import Running
from codegen.sizes import Size, least, most
from codegen.spec import RowsSpec

#: Narrow elements of a row in one thread from which on the registers for converted copies matter.
MANY_ELEMENTS = 32
#: Passes of a loop that is not spelled out which are unrolled, and a thread's copies to shared memory that are.
PASSES, MOST_COPIES = 4, 16
#: Passes that are left out together where rows are shorter than the longest.
TOGETHER = 4


class AlongRenderer(RowsRenderer):
    """Writes kernels whose neighbouring threads are at neighbouring elements of a row."""

    dim = -1

    def __init__(self, spec: RowsSpec, schedule: RowsSchedule) -> None:
        super().__init__(spec, schedule)
        #: elements that the row's threads take in one pass, and passes for the whole row
        self.step = schedule.lanes * schedule.cluster * schedule.vector
        self.unroll = most(-(-self.length // self.step))
        self.array, self.u = (f"[{self.unroll}]", "[u]") if self.unroll > 1 else ("", "")
        #: whether a pass of some row is not whole: so where the size varies, as ``unroll`` is that of the largest
        self.ragged = self.unroll * self.step != self.length or self.space.total % max(self.length, 1) != 0
        #: whether a loop over the row is spelled out: a thread's elements are in registers
        self.unrolled = schedule.form == "registers"
        self._waits = schedule.cluster > 1
        #: instructions of rows that were written earlier than others of their stage
        self._early: set[int] = set()
        #: loads in registers that a loop has read
        self._converted: set[int] = set()

    def _place(self) -> None:
        w, s = self.w, self.s
        if s.cluster == 1:
            row_number(w, s.itype, "row", self.edge, s.lanes)
            return
        w.line("cluster_arrive();")
        w.line(f"const {s.itype} row = blockIdx.x / {s.cluster};")
        w.line(f"const uint32 lane = cluster_rank() * {s.lanes} + threadIdx.x;")

    def _row_values(self) -> None:
        super()._row_values()
        wanted = self.program.needed(self.program.begins)
        self._early.update(v.instruction for v in wanted if isinstance(v, Result))
        self.emitter.statements(self.w, self.terms, self._early.__contains__)

    # ---- what stays on the chip

    def _keep(self) -> None:
        w, s, kept = self.w, self.s, [self.program.loads[n] for n in self.kept]
        if not kept or s.form == "registers":
            super()._keep()
            return
        # Nothing passes through registers where all that is kept can be copied in vectors.
        asynchronous = all(
            self._kind(x.strides) == "vector" and s.vector * x.dtype.itemsize in (4, 8, 16) for x in kept
        )
        self.kept_names = self._carve(self._kept_elements())
        w.line("// A thread reads back what it wrote itself.")
        with self._over_row(loading=True):
            for n, name in self.kept_names.items():
                operand = self.program.loads[n]
                offset = self._load_offset(n)
                if asynchronous:
                    copy = self._copy(n, s.vector * operand.dtype.itemsize)
                    w.line(f"{copy}({name} + {self._at}, {plus(self.pointers.loads[n], offset)});")
                    continue
                held = self._vector(n)
                w.line(f"{vector_type(operand, s.vector)} {held};")
                self._read(n, held, offset, every=True)
                write(w, name, self._at, held, s.vector, store="store_shared")
        if asynchronous:
            w.line("copy_async_commit();")
            w.line("copy_async_wait<0>();")

    def _carve(self, elements: int) -> dict[int, str]:
        """Declares dynamic shared memory for so many elements of each load that is kept; returns the C names."""
        names = {n: self.names.unique(self.program.loads[n].name, "_s") for n in self.kept}
        kept = ((self.program.loads[n].dtype.ctype, name) for n, name in names.items())
        self.w.carve(Buffer(name, ctype, (elements,), align=VECTORS) for ctype, name in kept)
        return names

    def _kept_elements(self) -> int:
        """Returns how many elements of a row, of one tensor, a block keeps in shared memory."""
        return self.unroll * self.s.lanes * self.s.vector

    @property
    def _at(self) -> str:
        """C name of where a vector of the row lies in the block's shared memory."""
        return "at" if self.s.cluster > 1 else "col"

    def _elements(self, stage: int, needed: set[Value], parts: dict[int, str]) -> None:
        """Writes the statements for a vector's elements; narrow ones are converted again rather than kept as floats."""
        for n, name in self.kept_names.items() if self.s.form == "registers" else ():
            operand, count = self.program.loads[n], self._count(n)
            narrow = operand.dtype.itemsize < 4 and count * operand.dtype.itemsize % 4 == 0
            many = narrow and self.unroll * count >= MANY_ELEMENTS
            if many and n in self._converted and self._used(Load(n), needed) > 1:
                self.w.line(f"reread({name}{self.u});")
            if Load(n) in needed:
                self._converted.add(n)
        super()._elements(stage, needed, parts)

    def _held(self, n: int) -> str:
        if n in self.kept_names and self.s.form != "registers":
            return self._picked_up(n, self.kept_names[n], self._at)
        return super()._held(n)

    def _picked_up(self, n: int, source: str, place: str) -> str:
        """Writes the read of a load's vector from shared memory; returns the C expression of its element."""
        vector = self.s.vector
        if vector == 1:
            return f"{source}[{place}]"
        name = self._vector(n)
        kind = vector_type(self.program.loads[n], vector)
        read(self.w, f"const {kind} {name}", source, place, vector, load="load_shared")
        return f"{name}[e]"

    # ---- once a row

    def _scalars(self, stage: int) -> None:
        chosen = [k for k in self.stages.of_row(stage) if k not in self._early]
        if chosen:
            self.emitter.statements(self.w, self.terms, lambda k: k in chosen)

    def _part(self, reduction: Reduction) -> str:
        name = self.names.unique(reduction.name, "_part")
        self.w.line(f"{reduction.ctype} {name} = {reduction.start};")
        return name

    def _combined(self, parts: dict[int, str]) -> None:
        w, s = self.w, self.s
        if self._waits:
            w.line("cluster_wait();  // all blocks have begun: their shared memory can be written")
            self._waits = False
        running = {k: self.stages.running[k] for k in parts if k in self.stages.running}
        together = {*running, *(one.most for one in running.values())}
        for k, part in parts.items():
            if k in together:
                continue
            reduction = self.program.reductions[k]
            op, ctype = reduction.combiner.functor, reduction.ctype
            if s.lanes == 1 and s.cluster == 1:
                self.terms[Reduced(k)] = part
                continue
            name = self.names.unique(reduction.name)
            if s.lanes <= 32 and s.cluster == 1:
                w.line(f"const {ctype} {name} = reduce::lanes<{op}, {s.lanes}>({part});")
            else:
                warps = s.lanes // 32
                shared = w.exchange(reduction.name, "_parts", ctype, warps * s.cluster)
                how = f"block<{op}, {warps}>" if s.cluster == 1 else f"cluster<{op}, {warps}, {s.cluster}>"
                w.line(f"const {ctype} {name} = reduce::{how}({part}, {shared});")
            self.terms[Reduced(k)] = name

        for k, one in running.items():
            self._run_together(k, one, parts[k], parts[one.most])
        for k, one in running.items():
            self._run_out(k, one, parts[k])

    def _run_together(self, k: int, running: Running, part: str, most: str) -> None:
        """Writes the combination of a running sum, and of its maximum, over all threads of a row."""
        w, s = self.w, self.s
        reduction = self.program.reductions[k]
        warps = s.lanes // 32
        if s.lanes <= 32 and s.cluster == 1:
            if s.lanes > 1:
                w.line(f"reduce::exp_lanes<{s.lanes}>({most}, {part});")
        else:
            names = [self.names.unique(self.program.reductions[n].name, "_parts") for n in (running.most, k)]
            size = warps * s.cluster
            w.line(f"__shared__ {reduction.ctype} {names[0]}[{size}], {names[1]}[{size}];")
            how = f"exp_block<{warps}>" if s.cluster == 1 else f"exp_cluster<{warps}, {s.cluster}>"
            w.line(f"reduce::{how}({most}, {part}, {', '.join(names)});")
        name = self.names.unique(self.program.reductions[running.most].name)
        w.line(f"const {reduction.ctype} {name} = {most};")
        self.terms[Reduced(running.most)] = name

    def _run_out(self, k: int, running: Running, part: str) -> None:
        """Writes the factor that corrects a running sum for its elements' shift; right for infinite ones, too."""
        w, reduction = self.w, self.program.reductions[k]
        name = self.terms[Reduced(running.most)]
        wanted = self.program.needed([running.shift])
        known = self.stages.of_row(self.stages.stage(running.shift))
        early = [n for n in known if Result(n) in wanted and n not in self._early]
        self.emitter.statements(w, self.terms, lambda n: n in early)
        self._early.update(early)
        shift = self.emitter.term(running.shift, self.terms)
        total = self.names.unique(reduction.name)
        why = "  // NaN where the maximum is infinite" if shift == name else ""
        w.line(f"const {reduction.ctype} {total} = {part} * math::exp({name} - {shift});{why}")
        self.terms[Reduced(k)] = total

    # ---- the vectors of a thread

    @contextmanager
    def _over_row(self, *, loading: bool = False) -> Iterator[None]:
        # Where rows stay in registers, passes are spelled out, as are a few of other rows: a compiler does not know how
        # few they are, and the code of a short kernel takes longer to arrive than to run.  Those past the end are left
        # out, or, when loading registers, read the last vector, so that no load waits for a condition.
        w, s = self.w, self.s
        several = s.lanes * s.cluster > 1
        beside = s.form == "shared" and s.cluster > 1 and not self.unrolled
        many = f" * {s.vector}" if s.vector > 1 else ""
        start = f"lane{many}" if several else "0"
        clamped = self.ragged and loading and self.unrolled
        if not self.unrolled and (not self.unroll or (self.ragged and self.unroll > PASSES)):
            w.line(f"#pragma unroll {PASSES}")
            at, more = (f", at = threadIdx.x{many}", f", at += {s.lanes * s.vector}") if beside else ("", "")
            first = f"{s.itype} col = {self._from(start)}{at}"
            with w.block(f"for ({first}; col < {self.end}; col += {self.step}{more})"):
                self.cols = Coordinates(w, "col", self.space.row, s.itype, "col")
                yield
            return
        loop = ""
        if self.unroll > 1:
            spelled = self.unrolled or self.unroll <= (MOST_COPIES if loading else PASSES)
            w.line("#pragma unroll" if spelled else f"#pragma unroll {PASSES}")
            loop = f"for ({'int' if self.unrolled else s.itype} u = 0; u < {self.unroll}; ++u)"
            inner = f"u * {s.lanes * s.cluster} + lane" if several else "u"
            start = f"({inner}){many}" if several and many else f"{inner}{many}"
        start = self._from(start)
        if clamped:
            start = start if several else f"{s.itype}({start})"
            start = at_most(start, self.space.total - s.vector, s.itype)
        with w.block(loop):
            if self.unrolled and self.unroll > TOGETHER and isinstance(self.length, Size):
                w.line(f"if (u % {TOGETHER} == 0 && u * {self.step} >= {self.length}) break;  // for all threads")
            places = {"col": len(w.lines)}  # the lines that say where a vector is
            w.line(f"const {s.itype} col = {start};")
            if beside:
                places["at"] = len(w.lines)
                inner = f"(u * {s.lanes} + threadIdx.x)" if self.unroll > 1 else "threadIdx.x"
                w.line(f"const uint32 at = {inner}{many};")
            self.cols = Coordinates(w, "col", self.space.row, s.itype, "col")
            with w.guarded(self._inside(least(self.length // self.step)) if self.ragged and not clamped else ""):
                yield
            for name, line in reversed(places.items()):
                if not re.search(rf"\b{name}\b", "\n".join(w.lines[line + 1 :])):
                    del w.lines[line]

    def _inside(self, full: int) -> str:
        """Returns the C condition that a pass has an element; the first ``full`` ones of a whole row always do."""
        last = self.space.chunk is None or self.space.total % self.length == 0
        if last and full >= self.unroll:
            return ""
        return f"u < {full} || col < {self.end}" if full and last else f"col < {self.end}"

    def _from(self, start: str) -> str:
        """Returns the C expression of a position counted from the row's first element."""
        return start if self.begin == "0" else self.begin if start == "0" else f"{self.begin} + {start}"

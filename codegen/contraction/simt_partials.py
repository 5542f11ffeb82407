"""Reductions of parts of the results in the SIMT form: the threads of a block combine their values in shared memory."""

from __future__ import annotations

from math import prod

from codegen.buffers import Buffer, Edge
from codegen.contraction.simt_operands import SimtOperand
from codegen.contraction.simt_schedule import CHUNK, SimtSchedule, combined, part_buffers
from codegen.iteration import linear
from codegen.kernel import Kernel
from codegen.partials import PartialNames, Partials, Sink
from codegen.spec import ContractionSpec


class SimtPartials(Partials):
    """Partial reductions of sums that threads have in chunks of four neighbouring rows and columns.

    The rows (or columns) of a part are several such chunks, each of another thread.
    """

    def __init__(
        self, w: Kernel, spec: ContractionSpec, schedule: SimtSchedule, sides: tuple[SimtOperand, SimtOperand]
    ) -> None:
        super().__init__(w, spec, w.names, schedule.itype, "batch" if prod(spec.batch) > 1 else "0")
        self.s, self.sides = schedule, sides
        self._tiles = [w.names.unique(x.partial.operand.name, "_tile") for x in self.parts]

    def begin_all(self) -> None:
        """Declares a thread's values: of every chunk along each partial reduction, and of rows or columns across."""
        for part in self.parts:
            along, over = self._sides(part)
            self.begin(part, along.chunks, over.mine)

    def sinks(self, i: str, j: str) -> list[Sink]:
        """Returns where the result of the sum with these subscripts is combined."""
        found = []
        for part in self.parts:
            (along, _), (at, over) = self._sides(part), (i, j) if part.partial.rows else (j, i)
            chunk = f"{at if at.isidentifier() else f'({at})'} / {CHUNK}" if along.chunks > 1 else "0"
            found.append(Sink(part.reduction, f"{part.own}[{chunk}][{over}]"))
        return found

    def finish(self) -> None:
        """Writes how the threads combine their values, and the store of the results."""
        tiles = part_buffers(self.spec, self.s.tile)
        for number, (part, name, tile) in enumerate(zip(self.parts, self._tiles, tiles)):
            self.w.line()
            if number:
                self.w.line("__syncthreads();  // the parts before have been read")
            else:
                self.w.line(combined(self.spec, self.s.tile).static)
            self._combine(part, name, tile)

    def _sides(self, part: PartialNames) -> tuple[SimtOperand, SimtOperand]:
        """Returns the operand whose rows (or columns) are combined, and the other one."""
        return self.sides if part.partial.rows else self.sides[::-1]

    def _combine(self, part: PartialNames, name: str, tile: Buffer) -> None:
        w, c, ctype, (along, over) = self.w, part.partial.chunk, tile.ctype, self._sides(part)
        places, slots, length = tile.shape  # parts, threads that share one, and rows or columns of them
        dims = f"[{places}][{slots}][{length}]"
        w.line(f"{ctype} (&{name}){dims} = *reinterpret_cast<{ctype} (*){dims}>(parts);")
        with w.scope():
            i = w.each("i", along.chunks)
            place = linear([(i, along.span // c), (f"{along.thread} / {slots}" if along.span > c else "0", 1)])
            own = [("j / 4", over.span), ("j % 4", 1)] if over.chunks > 1 else [("j", 1)]
            to = f"{name}[{place}][{along.thread} % {slots}][{linear([(over.thread, CHUNK), *own])}]"
            w.unrolled_line(f"for (int j = 0; j < {over.mine}; ++j) {to} = {part.own}[{i}][j];")
        w.line("__syncthreads();")
        with w.block(f"for (int i = t; i < {places * length}; i += {self.s.threads})"):
            first = f"{along.origin} / {c}" if along.origin != "0" else "0"
            w.line(f"const {self.t} place = {linear([(first, 1), (f'i / {length}', 1)])};")
            w.line(f"const {self.t} at = {linear([(over.origin, 1), (f'i % {length}', 1)])};")
            w.leave(f"place >= {Edge(along.edge.total, c).tiles}", f"at >= {over.edge.total}")
            w.line(f"{ctype} total = {name}[i / {length}][0][i % {length}];")
            others, op = f"{name}[i / {length}][q][i % {length}]", part.reduction.combiner.functor
            w.unrolled_line(f"for (int q = 1; q < {slots}; ++q) reduce::into<{op}>(total, {others});")
            self.store(part, *(("place", "at") if part.partial.rows else ("at", "place")), "total")

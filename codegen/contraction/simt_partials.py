"""Reductions of parts of the results in the SIMT form: the threads of a block combine their values in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.contraction.simt_schedule import CHUNK, SimtSchedule, part_bytes
from codegen.iteration import linear
from codegen.naming import Names, Writer
from codegen.partials import PartialNames, Partials, Sink
from codegen.spec import ContractionSpec


class SimtPartials(Partials):
    """Partial reductions of sums that threads have in chunks of four neighbouring rows and columns.

    The rows (or columns) of a part are several such chunks, each of another thread.
    """

    def __init__(self, w: Writer, spec: ContractionSpec, schedule: SimtSchedule, names: Names, batch: str) -> None:
        super().__init__(w, spec, names, schedule.itype, batch)
        self.s = schedule
        self._tiles = [names.unique(x.partial.operand.name, "_tile") for x in self.parts]

    def begin_all(self) -> None:
        """Declares a thread's values of every partial reduction: one for each chunk along it and each row (or column)
        across.
        """
        for part in self.parts:
            mine = (self.s.thread_rows, self.s.thread_cols)
            along, over = mine if part.partial.rows else mine[::-1]
            self.begin(part, along // CHUNK, over)

    def sinks(self, i: str, j: str) -> list[Sink]:
        """Returns where the result of the sum with these subscripts is combined."""
        places = (_own(i, j, self.s.thread_rows), _own(j, i, self.s.thread_cols))
        return [Sink(x.reduction, x.own + places[0 if x.partial.rows else 1]) for x in self.parts]

    def finish(self, origins: Sequence[str], sizes: Sequence[int]) -> None:
        """Writes how the threads combine their values, and the store of the results.

        origins are the C expressions of the tile's first row and column, sizes those of the whole result.
        """
        for number, (part, tile) in enumerate(zip(self.parts, self._tiles)):
            self.w.line()
            if number == 0:
                size = part_bytes(self.spec, self.s.tile_m, self.s.tile_n)
                self.w.line(f"__shared__ __align__(16) unsigned char parts[{size}];")
            else:
                self.w.line("__syncthreads();  // the parts before have been read")
            self._combine(part, tile, origins, sizes)

    def _combine(self, part: PartialNames, tile: str, origins: Sequence[str], sizes: Sequence[int]) -> None:
        w, s, c, rows = self.w, self.s, part.partial.chunk, part.partial.rows
        sides = [
            ("ty", s.tile_m, s.thread_rows, origins[0], sizes[0]),
            ("tx", s.tile_n, s.thread_cols, origins[1], sizes[1]),
        ]
        (thread, along, mine, origin, total), (other, over, across, start, last) = sides if rows else sides[::-1]
        slots = c // CHUNK  # threads that share a part
        ctype, dims = part.reduction.ctype, f"[{along // c}][{slots}][{over}]"
        w.line(f"{ctype} (&{tile}){dims} = *reinterpret_cast<{ctype} (*){dims}>(parts);")
        chunks, span, far = mine // CHUNK, along // mine * CHUNK, over // across * CHUNK
        i = "i" if chunks > 1 else "0"
        place = linear([(i, span // c), (f"{thread} / {slots}" if span > c else "0", 1)])
        at = linear([(other, CHUNK), *([("j / 4", far), ("j % 4", 1)] if across > CHUNK else [("j", 1)])])
        with w.unrolled(f"for (int i = 0; i < {chunks}; ++i)", when=chunks > 1):
            to = f"{tile}[{place}][{thread} % {slots}][{at}]"
            w.unrolled_line(f"for (int j = 0; j < {across}; ++j) {to} = {part.own}[{i}][j];")
        w.line("__syncthreads();")
        with w.block(f"for (int i = t; i < {along // c * over}; i += {s.threads})"):
            first = f"{origin} / {c}" if origin != "0" else "0"
            w.line(f"const {self.t} place = {linear([(first, 1), (f'i / {over}', 1)])};")
            w.line(f"const {self.t} at = {linear([(start, 1), (f'i % {over}', 1)])};")
            w.line(f"if (place >= {-(-total // c)} || at >= {last}) continue;")
            w.line(f"{ctype} total = {tile}[i / {over}][0][i % {over}];")
            others, op = f"{tile}[i / {over}][q][i % {over}]", part.reduction.combiner.functor
            w.unrolled_line(f"for (int q = 1; q < {slots}; ++q) reduce::into<{op}>(total, {others});")
            self.store(part, *(("place", "at") if rows else ("at", "place")), "total")


def _own(along: str, over: str, mine: int) -> str:
    """Returns the subscripts of a thread's value of a partial reduction.

    Those of the sum along and across it are given; ``mine`` is the number of sums along it.
    """
    if mine == CHUNK:
        return f"[0][{over}]"
    return f"[{along if along.isidentifier() else f'({along})'} / {CHUNK}][{over}]"

"""Totals of a few rows: sums over the reduction of elements that are computed of each row of a product.

A block adds them up by itself while its operands are on the way: its threads share the elements of a row, and the sums
of warps wait in shared memory, to be added up in their order.  The program sees a row's totals beside its products.
"""

from __future__ import annotations

from math import prod

from codegen.buffers import Buffer
from codegen.declined import Declined
from codegen.expr import Value
from codegen.iteration import linear, signed_index_type, widest_vector
from codegen.kernel import Kernel
from codegen.prologue import Prologue, Source
from codegen.sizes import most
from codegen.spec import ContractionSpec
from codegen.tile_path import PIECE

#: Most rows that have totals, rows whose elements are on the way at a time, and elements that a thread reads together.
MOST_ROWS, TOGETHER, MOST_RUN = 16, 4, 8


def totals_of(spec: ContractionSpec, warps: int) -> list[Buffer]:
    """Returns what a block has in shared memory of totals that so many warps add up."""
    count = len(spec.totals), most(prod(spec.m))
    return [Buffer("total_parts", "float", (*count, warps)), Buffer("totals", "float", count)] if spec.totals else []


class Totals:
    """Writes the totals of a spec's rows, added up by so many ``threads``, whole warps of a block.

    Raises Declined for more rows than a block adds up.
    """

    def __init__(self, w: Kernel, spec: ContractionSpec, threads: int, within: str = "") -> None:
        """within: what begins the C names of its buffers, if something else declares these."""
        self.w, self.threads, self.warps, self._spec = w, threads, threads // 32, spec
        self._parts, self._totals = f"{within}total_parts", f"{within}totals"
        rows, depth = prod(spec.m), prod(spec.k)
        if spec.totals and (most(rows) > MOST_ROWS or prod(spec.batch) > 1):
            raise Declined(f"totals are of at most {MOST_ROWS} rows, without a batch")
        self._prologues = [Prologue(w, total, w.names, f"total{n}") for n, total in enumerate(spec.totals)]
        self.rows, self.depth = rows, depth

    def __bool__(self) -> bool:
        return bool(self._prologues)

    def parameters(self) -> list[str]:
        """Returns the declarations of the tensors that are read."""
        return [text for prologue in self._prologues for text in prologue.parameters()]

    @property
    def values(self) -> list[str]:
        """The C expressions of the totals of row ``m``."""
        return [f"{self._totals}[{n}][m]" for n in range(len(self._prologues))]

    def declare(self) -> None:
        """Declares the totals in shared memory, and the parts of them that warps have."""
        for buffer in totals_of(self._spec, self.warps):
            self.w.line(buffer.static)

    def add_up(self) -> None:
        """Writes how thread ``t`` adds up its elements of all rows, and leaves the sum of its warp."""
        for n, prologue in enumerate(self._prologues):
            prologue.scalars()
            reach = prologue.gather.reaches((), (most(self.rows),), (most(self.depth),))
            t = signed_index_type(*reach, 2 * self.depth)
            run = widest_vector(MOST_RUN, lambda count: self._suits(prologue, count))  # noqa: B023
            self.w.line(f"#pragma unroll {min(TOGETHER, most(self.rows))}")
            with self.w.block(f"for (int m = 0; m < {self.rows}; ++m)"):
                self.w.line("float total = 0;")
                step = self.threads * run
                first = f"t * {run}" if run > 1 else "t"
                with self.w.block(f"for ({t} k = {first}; k < {self.depth}; k += {step})"):
                    self._elements(prologue, t, run)
                self.w.line("total = reduce::lanes<reduce::Add, 32>(total);")
                self.w.line(f"if (lane == 0) {self._parts}[{n}][m][t / 32] = total;")

    def finish(self) -> None:
        """Writes how threads add up the sums of warps; between two barriers."""
        if not self:
            return
        count = len(self._prologues) * most(self.rows)
        with self.w.block(f"for (int i = t; i < {count}; i += {self.threads})"):
            self.w.line("float total = 0;")
            at = f"[i / {most(self.rows)}][i % {most(self.rows)}]"
            self.w.unrolled_line(f"for (int n = 0; n < {self.warps}; ++n) total += {self._parts}{at}[n];")
            self.w.line(f"{self._totals}{at} = total;")

    # ---- elements

    def _suits(self, prologue: Prologue, count: int) -> bool:
        """Tells whether so many neighbours of every tensor are whole accesses, or one element."""
        if most(self.depth) % count or not isinstance(self.depth, int):
            return count == 1
        return all(
            not source.pointer or not any(prologue.place(source).inner) or self._whole(prologue, source, count)
            for source in prologue.sources
        )

    def _whole(self, prologue: Prologue, source: Source, count: int) -> bool:
        place, width = prologue.place(source), min(PIECE, count * source.itemsize)
        starts = (*place.outer, place.start)
        aligned = all(step * source.itemsize % width == 0 for step in starts) and source.alignment % width == 0
        return prologue.place(source).inner == (1,) and (aligned or count == 1)

    def _elements(self, prologue: Prologue, t: str, run: int) -> None:
        """Writes how ``run`` elements of row m from k on are read, computed and added to the total."""
        w = self.w
        read: dict[Value, str] = {}
        for source in prologue.sources:
            place = prologue.place(source)
            (step,), row = place.inner, (f"{t}(m)", place.outer[0])
            if not source.pointer:
                at = linear([row, (f"({t}(k) + e)" if run > 1 else "k", step)], place.start)
                read[source.value] = f"int32({at})"
                continue
            at = linear([row, (f"{t}(k)", step)], place.start)
            if run > 1 and step:
                w.line(f"const auto {source.name} = load<{run}>({source.pointer} + ({at}));")
                read[source.value] = f"{source.name}[e]"
            else:
                read[source.value] = f"{source.pointer}[{at}]"
        with w.unrolled(f"for (int e = 0; e < {run}; ++e)", when=run > 1):
            dtype = prologue.gather.operand.dtype
            value = prologue.element(read)
            w.line(f"total += {value if dtype.ctype == 'float' else f'convert<float>({value})'};")

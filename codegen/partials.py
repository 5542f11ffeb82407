"""Reductions of a contraction's results in parts: what a thread keeps of them, and where the parts are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from codegen.buffers import Edge
from codegen.expr import Reduction
from codegen.iteration import collapse, coordinate, linear
from codegen.kernel import parameter
from codegen.naming import Names, Writer
from codegen.spec import ContractionSpec, Partial


@dataclass(frozen=True)
class Sink:
    """Where values of the program are combined: the C expression ``own``; only those ``within``, a condition if any.

    ``how`` is the device function: values of running reductions are looked at before they are taken, or go in at once.
    """

    reduction: Reduction
    own: str
    within: str = ""
    how: str = "into"


def in_steps(sinks: Sequence[Sink]) -> list[list[Sink]]:
    """Returns the sinks of one or two walks over the same values: the first looks at those of running reductions."""
    running = [x for x in sinks if x.reduction.combiner.running]
    if not running:
        return [[*sinks]]
    first = [replace(x, how="look") for x in running]
    return [first, [replace(x, how="take") if x in running else x for x in sinks]]


@dataclass(frozen=True)
class PartialNames:
    """A partial reduction in a kernel: C names of the tensor that takes it, and of a thread's values of it."""

    partial: Partial
    pointer: str
    own: str

    @property
    def reduction(self) -> Reduction:
        return self.partial.reduction


class Partials:
    """Writes the partial reductions of a spec.

    ``t`` is the C type of positions, ``batch`` the C expression of the batch's number.
    """

    def __init__(self, w: Writer, spec: ContractionSpec, names: Names, t: str, batch: str) -> None:
        self.w, self.spec, self.t, self.batch = w, spec, t, batch
        self.parts = [
            PartialNames(x, names.unique(x.operand.name), names.unique(x.operand.name, "_own")) for x in spec.partials
        ]
        self.rows = [x for x in self.parts if x.partial.rows]
        self.cols = [x for x in self.parts if not x.partial.rows]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def parameters(self) -> list[str]:
        return [parameter(x.partial.operand, x.pointer, written=True) for x in self.parts]

    def begin(self, part: PartialNames, *sizes: int) -> None:
        """Declares a thread's values of a partial reduction, as neutral values."""
        dims = "".join(f"[{size}]" for size in sizes)
        ctype, running = part.reduction.ctype, part.reduction.combiner.running
        if running:
            self.w.line(f"{running}<{ctype}> {part.own}{dims};")
            return
        if part.reduction.combiner.neutral == 0:
            self.w.line(f"{ctype} {part.own}{dims} = {{}};")
            return
        self.w.line(f"{ctype} {part.own}{dims};")
        self.w.line(f"reduce::fill({part.own}, {part.reduction.start});")

    def finish_rows(self, part: PartialNames, fragments: int, m: str, n: str, edges: tuple[Edge, Edge]) -> None:
        """Writes the store of the parts of rows, of which every lane has values of 4 columns of each fragment.

        The rows of a warp begin at row m, its columns at n.
        """
        w, reduction = self.w, part.reduction
        with w.unrolled(f"for (int j = 0; j < {fragments}; ++j)"):
            w.line(f"const {reduction.ctype} total = reduce::columns<{reduction.combiner.functor}>({part.own}[j]);")
            w.line(f"const {self.t} col = {n} + j * 16 + reduce::column_of_lane(lane);")
            w.leave("lane % 8 >= 4", edges[0].outside(m), edges[1].outside("col"))
            w.line(f"const {self.t} place = ({m}) / {part.partial.chunk};")
            self.store(part, "place", "col", "total")

    def finish_cols(self, part: PartialNames, rows: int, chunks: int, m: str, n: str, sizes: tuple[int, int]) -> None:
        """Writes the store of the parts of columns that the four lanes of a row of fragments have.

        Of a thread's ``rows`` rows, row i lies i / 2 * 16 + i % 2 * 8 below m; its ``chunks`` chunks begin at column n;
        sizes are those of the whole result.
        """
        w, c, reduction = self.w, part.partial.chunk, part.reduction
        combined = f"reduce::lanes<{reduction.combiner.functor}, 4>({part.own}[i][q])"
        step = "i * 8" if rows == 2 else "i / 2 * 16 + i % 2 * 8"
        with w.unrolled(f"for (int i = 0; i < {rows}; ++i)", f"for (int q = 0; q < {chunks}; ++q)"):
            w.line(f"const {reduction.ctype} total = {combined};")
            w.line(f"const {self.t} place = {m} + {step}, col = {n} + q * {c};")
            w.line(f"if (lane % 4 != 0 || place >= {sizes[0]} || col >= {sizes[1]}) continue;")
            self.store(part, "place", f"col / {c}", "total")

    def store(self, part: PartialNames, place: str, last: str, value: str) -> None:
        """Writes the store of a part: ``place`` is the number of its row or chunk of rows, ``last`` that of columns."""
        x, nb = part.partial, len(self.spec.batch)
        groups = ((self.spec.batch, x.operand.strides[:nb], self.batch), (x.places, x.operand.strides[nb:-1], place))
        terms = [term for sizes, strides, text in groups for term in _terms(sizes, strides, text)]
        dtype = x.operand.dtype.ctype
        text = value if dtype == part.reduction.ctype else f"convert<{dtype}>({value})"
        last = last if last.isidentifier() else f"({last})"
        self.w.line(f"{part.pointer}[{linear([*terms, (last, x.operand.strides[-1])])}] = {text};")


def _terms(sizes: Sequence[int], strides: Sequence[int], text: str) -> list[tuple[str, int]]:
    """Returns the coordinates of a position over dimensions, and their strides."""
    merged, (steps,) = collapse(sizes, [tuple(strides)], range(len(sizes)))
    if len(merged) == 1:
        return [(text, steps[0])]
    whole = text if text.isidentifier() else f"({text})"
    return [(f"({coordinate(whole, merged, d)})", step) for d, step in enumerate(steps)]

"""The two operands of the contraction family's SIMT form: how threads bring tiles of them to shared memory.

A tile is fetched into registers while the one before is multiplied, and then written to shared memory, the reduction
dimension first: each term of the sum is a row.  Where four neighbours in memory are always needed together, they are
fetched as one vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from codegen.buffers import Edge, where
from codegen.contraction.simt_schedule import CHUNK, SimtSchedule, along_reduction, copied_width, width
from codegen.epilogue import batches, operand_value
from codegen.iteration import coordinates, linear, packed, split, unsigned, used
from codegen.naming import Writer
from codegen.prologue import Prologue, Source
from codegen.records import once
from codegen.sizes import most
from codegen.spec import ContractionSpec, Limit


@dataclass(frozen=True)
class SimtOperand:
    """Writes how one operand of a spec, which is merged, comes to shared memory.

    outer  sizes of its rows' (or columns') dimensions; ``axis`` "m" or "n"; ``tile`` rows or columns of a tile.
    """

    w: Writer
    spec: ContractionSpec
    s: SimtSchedule
    prologue: Prologue
    outer: tuple[int, ...]
    axis: str
    tile: int

    @property
    def label(self) -> str:
        return self.prologue.label

    @once
    def edge(self) -> Edge:
        """The rows or columns in tiles."""
        return Edge(prod(self.outer), self.tile)

    @once
    def origin(self) -> str:
        """C variable of the tile's first row or column."""
        return "0" if most(self.edge.tiles) <= 1 else "row0" if self.axis == "m" else "col0"

    @property
    def thread(self) -> str:
        """C variable of where a thread's first chunk of sums lies."""
        return "ty" if self.axis == "m" else "tx"

    @once
    def mine(self) -> int:
        """Rows or columns of a thread's sums, in chunks of four."""
        return self.s.thread_rows if self.axis == "m" else self.s.thread_cols

    @once
    def chunks(self) -> int:
        return self.mine // CHUNK

    @once
    def span(self) -> int:
        """Rows or columns from one of these chunks to the next."""
        return self.tile // self.mine * CHUNK

    @once
    def along_k(self) -> bool:
        """Whether threads side by side fetch neighbours along the reduction (else along the outer dimension)."""
        return along_reduction(self.spec, self.prologue.gather)

    @once
    def width(self) -> int:
        """Neighbours that are fetched as one vector: 1 or 4."""
        of = copied_width if self.s.copied else width
        return of(self.spec, self.prologue.gather, self.outer, self.tile, self.s.tile)

    @property
    def in_chunks(self) -> bool:
        """Whether the tile in shared memory has a row for each chunk of four terms: see `simt_schedule.buffers`."""
        return self.along_k and self.width > 1

    @once
    def lanes(self) -> int:
        """Threads side by side."""
        return (self.s.tile_k if self.along_k else self.tile) // self.width

    @once
    def step(self) -> int:
        """The distance of what a thread fetches of a tile along the other dimension."""
        return self.s.threads // self.lanes

    @once
    def count(self) -> int:
        """Elements, or vectors, that a thread fetches of a tile."""
        return self.tile * self.s.tile_k // (self.s.threads * self.width)

    @once
    def at(self) -> str:
        """The subscript of what a thread keeps for each of its rows or columns."""
        return "[i]" if self.along_k and self.count > 1 and not self.apart else ""

    @once
    def apart(self) -> int:
        """Elements from one of a thread's rows or columns to the next, if these are copied and all at one distance.

        Only the first one's place is kept then, which saves an address for each of the others.
        """
        plain = self.s.copied and self.along_k and len(self.outer) == 1 and not self.prologue.gather.limits
        return self.step * self.prologue.gather.outer[0] if plain else 0

    @once
    def terms(self) -> list[Limit]:
        """Limits on the terms that change along the reduction."""
        return [x for x in self.spec.terms if any(x.inner)]

    @once
    def guarded(self) -> bool:
        """Whether some elements of a computed operand are zero whatever the program says."""
        some = self.prologue.gather.limits or self.terms or self.edge.ragged or prod(self.spec.k) % self.s.tile_k
        return self.prologue.program is not None and bool(some)

    def of(self, number: int | str) -> str:
        """Returns the subscript of a product, where there are several."""
        return f"[{number}]" if self.prologue.products > 1 else ""

    # ---- global memory -> registers -> shared memory

    def prepare(self) -> None:
        """Writes what stays the same over the reduction: which elements of a tile a thread fetches, and from where."""
        w, t, p, axis, many = self.w, self.s.itype, self.label, self.axis, bool(self.at)
        w.line()
        fast, slow = (f"{p}_k", f"{p}_{axis}") if self.along_k else (f"{p}_{axis}", f"{p}_k")
        part = f"// this thread's part of a tile of {self.prologue.name}"
        each = f" * {self.width}" if self.width > 1 else ""
        w.line(f"const int {fast} = t % {self.lanes}{each}, {slow} = t / {self.lanes};  {part}")
        with w.scope():
            if many:
                w.line(f"{t} {', '.join(f'{name}[{self.count}]' for name, _ in self.prologue.starts)};")
                if self.edge.ragged:
                    w.line(f"bool {p}_inside[{self.count}];")
            i = w.each("i", self.count if many else 1)
            place = self._row(i)
            every = [*(x.outer for x in self.prologue.places), *(x.outer for x in self.prologue.gather.limits)]
            ragged = self.edge.ragged and not self.apart
            if many or ("+" in place and (len(self.outer) > 1 or self.prologue.gather.limits or ragged)):
                name = axis if many else f"{p}_at"
                w.line(f"const {t} {name} = {place};")
                place = name
            coords = split(w, t, axis if many else f"{p}_{axis}", place, self.outer, every)
            self.prologue.begin(t, self.at, batches(self.spec.batch), coords)
            if ragged:
                w.line(f"{'' if many else 'const bool '}{p}_inside{self.at} = {self.edge.inside(place)};")

    def _row(self, i: str) -> str:
        """Returns the C expression of a row or column that a thread fetches."""
        return linear([(self.origin, 1), (f"{self.label}_{self.axis}", 1), (i, self.step)])

    def fetch(self) -> None:
        """Writes the reads of this thread's elements of the tile at k0, zero outside: into registers or its stage."""
        w, p, terms = self.w, self.label, Edge(prod(self.spec.k), self.s.tile_k)
        with w.block(""):
            if self.along_k:
                coords = self._reduction(f"k0 + {p}_k")
            with w.unrolled(f"for (int i = 0; i < {self.count}; ++i)"):
                if not self.along_k:
                    coords = self._reduction(f"k0 + {p}_k + i * {self.step}")
                exists = self.edge.inside(self._row("i")) if self.apart else f"{p}_inside{self.at}"
                inside = w.inside(
                    terms.inside("k"),
                    exists if self.edge.ragged else "",
                    *self.prologue.kept(self.s.itype, self.at, coords),
                    "term" if self.terms else "",
                )
                for source in self.prologue.sources:
                    if self.s.copied:
                        self._copy(source, coords, inside)
                    else:
                        self._read(source, coords, inside)
                if self.guarded:
                    w.line(f"{p}_kept[i] = {inside};")

    def _reduction(self, position: str) -> list[str]:
        """Writes a position of the reduction; returns its coordinates: "k" where only the last one matters."""
        w, inner, t = self.w, self.spec.k, self.s.itype
        w.line(f"const {t} k = {position};")
        limits = [x.inner for x in (*self.prologue.gather.limits, *self.spec.terms)]
        steps = [place.inner for place in self.prologue.places]
        coords = ["k"]
        if all(x == tuple(s * x[-1] for s in packed(inner)) for x in steps) and not used(limits):
            coords = [*("0" for _ in inner[1:]), "k"]
        elif len(inner) > 1:
            coords = coordinates(w, t, "r", "k", inner, used([*steps, *limits]))
        if self.terms:
            kept = [within(self.spec, t, x, coords) for x in self.terms]
            w.line(f"const bool term = {' && '.join(kept)};  // whether there is a product")
        return coords

    def _read(self, source: Source, coords: Sequence[str], inside: str) -> None:
        """Writes the read of an element, or a vector, from these coordinates of the reduction."""
        c, place = self.spec.accumulate, self._place(source, coords)
        element = f"{source.pointer}[{place}]"
        if not source.pointer:
            value = f"int32({place})"
        elif self.prologue.program is not None:
            value = where(inside, element, f"{source.ctype}{{}}")
        elif self.width > 1:
            value = f"load<{self.width}>({source.pointer} + {place})"
            value = where(inside, value, f"Vector<{source.ctype}, {self.width}>{{}}")
        else:
            value = where(inside, operand_value(self.prologue.gather.operand, element, c), f"{c}(0)")
        self.w.line(f"{source.next}[i] = {value};")

    def _place(self, source: Source, coords: Sequence[str]) -> str:
        """Returns the C expression of where an element lies in memory."""
        terms = zip(coords, self.prologue.place(source).inner)
        return linear([self.prologue.start(source, self.at), *terms]).replace(" + -", " - ")

    def _copy(self, source: Source, coords: Sequence[str], inside: str) -> None:
        """Writes the asynchronous copy of an element, or a vector, from these coordinates of the reduction."""
        size, p = 4 * self.width, self.label
        valid = f", {inside} ? {size} : 0" if inside else ""
        i = "i" if self.s.itype == "int32" else f"{self.s.itype}(i)"
        from_ = linear([(source.pointer, 1), (f"({self._place(source, coords)})", 1), (i, self.apart)])
        self.w.line(f"copy_async<{size}>(&shared.{p}_tile[stage]{self._in_tile()}, {from_}{valid});")

    def _in_tile(self) -> str:
        """Returns the subscript, in a stage, of what a thread brings."""
        step, k, outer = f"i * {self.step}", f"{self.label}_k", f"{self.label}_{self.axis}"
        return f"[{k}][{outer} + {step}]" if self.along_k else f"[{k} + {step}][{outer}]"

    def stash(self) -> None:
        """Writes the stores of the fetched elements to shared memory."""
        w, p, at = self.w, self.label, self._in_tile()
        loop = f"for (int i = 0; i < {self.count}; ++i)"
        if self.in_chunks:
            at = f"[{p}_k / {CHUNK}][e * {self.tile} + {p}_{self.axis} + i * {self.step}]"
            with w.unrolled(loop):
                w.unrolled_line(f"for (int e = 0; e < {self.width}; ++e) {p}_tile[stage]{at} = {p}_next[i][e];")
        elif self.width > 1:
            w.unrolled_line(f"{loop} store_shared(&{p}_tile[stage]{at}, {p}_next[i]);")
        elif self.prologue.program is not None:
            with w.unrolled(loop):
                text = self.prologue.element({x.value: f"{x.next}[i]" for x in self.prologue.sources})
                text = operand_value(self.prologue.gather.operand, text, self.spec.accumulate)
                kept = f"{p}_kept[i]" if self.guarded else ""
                w.line(f"{p}_tile[stage]{at} = {where(kept, text, f'{self.spec.accumulate}(0)')};")
        else:
            copies = [f"{p}_tile{source.of}[stage]{at} = {source.next}[i];" for source in self.prologue.sources]
            if len(copies) == 1:
                w.unrolled_line(f"{loop} {copies[0]}")
                return
            with w.unrolled(loop):
                for copy in copies:
                    w.line(copy)

    def declare(self) -> None:
        """Declares the registers for what a thread has fetched of the next tile."""
        for source in self.prologue.sources[: None if self.prologue.program is not None else 1]:
            ctype = source.ctype if self.prologue.program is not None else self.spec.accumulate
            ctype = f"Vector<{ctype}, {self.width}>" if self.width > 1 else ctype
            self.w.line(f"{ctype} {source.name}_next{self.of(self.prologue.products)}[{self.count}];")
        if self.guarded:
            self.w.line(f"bool {self.label}_kept[{self.count}];  // whether there is an element")


def within(spec: ContractionSpec, t: str, x: Limit, inner: Sequence[str] = ()) -> str:
    """Returns the C condition that a limit on the terms is kept."""
    number = linear([*zip(batches(spec.batch), x.batch), *zip(inner, x.inner)], x.start)
    return f"{unsigned(t)}({number}) < {x.size}"

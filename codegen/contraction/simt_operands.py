"""The two operands of the contraction family's SIMT form: how threads bring tiles of them to shared memory.

A tile is fetched into registers while the one before is multiplied, and then written to shared memory, the reduction
dimension first: each term of the sum is a row.  Where four neighbours in memory are always needed together, they are
fetched as one vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from codegen.contraction.simt_schedule import CHUNK, SimtSchedule, along_reduction, width
from codegen.epilogue import operand_value
from codegen.iteration import coordinates, linear, packed, unsigned
from codegen.naming import Writer
from codegen.prologue import Prologue
from codegen.spec import ContractionSpec, Gather, Limit


@dataclass(frozen=True)
class SimtOperand:
    """One operand, and how a thread fetches its part of a tile.

    pointers  C variables of the tensors: of all operands B, which are fetched from the same places of each.
    outer     sizes of the rows' or columns' dimensions; ``axis`` "m" or "n"; ``origin`` C variable of the tile's first.
    along_k   whether threads side by side fetch neighbours along the reduction (else along the outer dimension).
    width     neighbours that are fetched as one vector: 1 or 4.
    count     elements, or vectors, that a thread fetches of each tile, ``step`` apart along the other dimension.
    exact     whether tiles never reach past the last row or column.
    """

    gather: Gather
    outer: tuple[int, ...]
    prologue: Prologue
    label: str  # "a" or "b"
    axis: str
    origin: str
    tile: int
    along_k: bool
    width: int
    count: int
    step: int
    exact: bool

    @property
    def at(self) -> str:
        """The subscript of what a thread keeps for each of its rows or columns."""
        return "[i]" if self.along_k and self.count > 1 else ""

    @property
    def in_chunks(self) -> bool:
        """Whether the tile in shared memory has a row for each chunk of four terms: see `SimtOperands.shared`."""
        return self.along_k and self.width > 1

    def of(self, number: int | str) -> str:
        """Returns the subscript of a product, where there are several."""
        return f"[{number}]" if self.prologue.products > 1 else ""

    def base(self, place: int) -> str:
        """Returns the C variable that holds where its rows or columns start in a place."""
        return f"{self.label}_base{place or ''}" if place == 0 or self.prologue.places[place].moves else "0"


class SimtOperands:
    """Writes how both operands of a spec, which is merged, come to shared memory."""

    def __init__(self, w: Writer, spec: ContractionSpec, schedule: SimtSchedule, a: Prologue, b: Prologue) -> None:
        self.w, self.spec, self.s, self.t = w, spec, schedule, schedule.itype
        self.batch, self.m, self.n = prod(spec.batch), prod(spec.m), prod(spec.n)
        self.k = prod(spec.k)
        self.tiles_m, self.tiles_n = -(-self.m // schedule.tile_m), -(-self.n // schedule.tile_n)
        row0, col0 = "row0" if self.tiles_m > 1 else "0", "col0" if self.tiles_n > 1 else "0"
        self.a = self._side(spec.a, spec.m, a, "a", "m", row0, schedule.tile_m)
        self.b = self._side(spec.b, spec.n, b, "b", "n", col0, schedule.tile_n)

    def _side(
        self, gather: Gather, outer: tuple[int, ...], prologue: Prologue, label: str, axis: str, origin: str, tile: int
    ) -> SimtOperand:
        s = self.s
        along_k, wide = along_reduction(self.spec, gather), width(self.spec, gather, outer, tile, s)
        step = s.threads // ((s.tile_k if along_k else tile) // wide)
        exact = prod(outer) % tile == 0
        count = tile * s.tile_k // (s.threads * wide)
        return SimtOperand(gather, outer, prologue, label, axis, origin, tile, along_k, wide, count, step, exact)

    def batches(self) -> list[str]:
        """Returns the C variables of the batch coordinates."""
        if self.batch <= 1:
            return ["0"] * len(self.spec.batch)
        return ["batch"] if len(self.spec.batch) == 1 else [f"b{d}" for d in range(len(self.spec.batch))]

    def within(self, x: Limit, outer: Sequence[str], inner: Sequence[str] = ()) -> str:
        """Returns the C condition that a limit is kept."""
        number = linear([*zip(self.batches(), x.batch), *zip(outer, x.outer), *zip(inner, x.inner)], x.start)
        return f"{unsigned(self.t)}({number}) < {x.size}"

    # ---- global memory -> registers -> shared memory

    def shared(self) -> None:
        """Declares the tiles: a row for each term of the sum, or for each four terms, which then lie one behind the
        other.
        """
        w, s, c = self.w, self.s, self.spec.accumulate
        w.line()
        for side in (self.a, self.b):
            # The pad keeps the rows of a tile 16-byte aligned and spreads the writes of one column over the banks.
            # Where threads have a vector each, as many threads as fill 32 banks write the same terms of neighbouring
            # rows.
            dims = f"[{s.tile_k}][{side.tile + CHUNK}]"
            if side.in_chunks:
                dims = f"[{s.tile_k // CHUNK}][{CHUNK * side.tile + 32 * CHUNK // s.tile_k}]"
            w.line(f"__shared__ __align__(16) {c} {side.label}_tile{side.of(side.prologue.products)}[2]{dims};")

    def prepare(self, side: SimtOperand) -> None:
        """Writes what stays the same over the reduction: which elements of a tile a thread fetches, and their outer
        offsets.
        """
        w, gather, p, axis = self.w, side.gather, side.label, side.axis
        w.line()
        fast, slow = (f"{p}_k", f"{p}_{axis}") if side.along_k else (f"{p}_{axis}", f"{p}_k")
        length = (self.s.tile_k if side.along_k else side.tile) // side.width
        part = f"// this thread's part of a tile of {side.prologue.name}"
        each = f" * {side.width}" if side.width > 1 else ""
        w.line(f"const int {fast} = t % {length}{each}, {slow} = t / {length};  {part}")
        many = bool(side.at)
        position = linear([(side.origin, 1), (f"{p}_{axis}", 1), ("i" if many else "0", side.step)])
        places = side.prologue.places
        bases = [(n, place) for n, place in enumerate(places) if n == 0 or place.moves]
        offsets = [side.base(n) for n, _ in bases] + [f"{p}_start{n}" for n in range(len(gather.limits))]
        if many:
            w.line(f"{self.t} {', '.join(f'{name}[{side.count}]' for name in offsets)};")
            if not side.exact:
                w.line(f"bool {p}_inside[{side.count}];")
            w.line("#pragma unroll")
            w.open(f"for (int i = 0; i < {side.count}; ++i)")
            place, prefix = axis, axis
            w.line(f"const {self.t} {place} = {position};")
        else:
            place, prefix = position, f"{p}_{axis}"
            if "+" in position and (len(side.outer) > 1 or gather.limits or not side.exact):
                place = f"{p}_at"
                w.line(f"const {self.t} {place} = {position};")
        coords = [place]
        if len(side.outer) > 1:
            every = [*(x.outer for x in places), *(x.outer for x in gather.limits)]
            coords = coordinates(w, self.t, prefix, place, side.outer, used(every))
        declared = "" if many else f"const {self.t} "
        for number, at in bases:
            terms = [*zip(self.batches(), at.batch), *zip(coords, at.outer)]
            w.line(f"{declared}{side.base(number)}{side.at} = {linear(terms, at.start)};")
        for number, x in enumerate(gather.limits):
            start = linear([*zip(self.batches(), x.batch), *zip(coords, x.outer)], x.start)
            w.line(f"{declared}{p}_start{number}{side.at} = {start};")
        if not side.exact:
            w.line(f"{'' if many else 'const bool '}{p}_inside{side.at} = {place} < {prod(side.outer)};")
        if many:
            w.close()

    def fetch(self, side: SimtOperand) -> None:
        """Writes the reads of this thread's elements of the tile at k0 into registers, zero outside."""
        w, gather, p = self.w, side.gather, side.label
        w.open("")
        terms = [x for x in self.spec.terms if any(x.inner)]

        def reduction(position: str) -> list[str]:
            coords = self._reduction(side, position)
            if terms:
                kept = [self.within(x, (), coords) for x in terms]
                w.line(f"const bool term = {' && '.join(kept)};  // whether there is a product")
            return coords

        if side.along_k:
            coords = reduction(f"k0 + {p}_k")
        with w.unrolled(f"for (int i = 0; i < {side.count}; ++i)"):
            if not side.along_k:
                coords = reduction(f"k0 + {p}_k + i * {side.step}")
            conditions = [] if self.k % self.s.tile_k == 0 else [f"k < {self.k}"]
            if not side.exact:
                conditions.append(f"{p}_inside{side.at}")
            for number, x in enumerate(gather.limits):
                place = linear([(f"{p}_start{number}{side.at}", 1), *zip(coords, x.inner)])
                conditions.append(f"{unsigned(self.t)}({place}) < {x.size}")
            if terms:
                conditions.append("term")
            if len(conditions) > 1:
                w.line(f"const bool inside = {' && '.join(conditions)};")
                conditions = ["inside"]
            for source in side.prologue.sources:
                at = side.prologue.place(source)
                base = side.base(source.place)
                text = linear([(base + side.at if base != "0" else base, 1), *zip(coords, at.inner)]).replace(
                    " + -", " - "
                )
                if not source.pointer:
                    w.line(f"{source.name}_next[i] = int32({text});")
                    continue
                if gather.program is not None:
                    value = f"{source.pointer}[{text}]"
                    value = f"{conditions[0]} ? {value} : {source.ctype}{{}}" if conditions else value
                    w.line(f"{source.name}_next[i] = {value};")
                    continue
                if side.width > 1:
                    value = f"load<{side.width}>({side.prologue.pointers[0]} + {text})"
                    value = (
                        f"{conditions[0]} ? {value} : Vector<{source.ctype}, {side.width}>{{}}" if conditions else value
                    )
                    w.line(f"{p}_next[i] = {value};")
                    continue
                for number, pointer in enumerate(side.prologue.pointers):
                    value = operand_value(gather.operand, f"{pointer}[{text}]", self.spec.accumulate)
                    value = f"{conditions[0]} ? {value} : {self.spec.accumulate}(0)" if conditions else value
                    w.line(f"{p}_next{side.of(number)}[i] = {value};")
            if self._guarded(side):
                w.line(f"{p}_kept[i] = {conditions[0]};")
        w.close()

    def _guarded(self, side: SimtOperand) -> bool:
        """Tells whether some elements of a computed operand are zero whatever the program says."""
        ragged = bool(self.k % self.s.tile_k) or not side.exact
        terms = any(any(x.inner) for x in self.spec.terms)
        return side.gather.program is not None and (ragged or terms or bool(side.gather.limits))

    def _reduction(self, side: SimtOperand, position: str) -> list[str]:
        """Writes a position of the reduction, and returns the C variables of its coordinates.

        Where the operand needs only the last one, that is "k".
        """
        w, inner = self.w, self.spec.k
        w.line(f"const {self.t} k = {position};")
        limits = [x.inner for x in (*side.gather.limits, *self.spec.terms)]
        steps = [at.inner for at in side.prologue.places]
        if len(inner) == 1:
            return ["k"]
        if all(x == tuple(s * x[-1] for s in packed(inner)) for x in steps) and not used(limits):
            return [*("0" for _ in inner[1:]), "k"]
        return coordinates(w, self.t, "r", "k", inner, used([*steps, *limits]))

    def stash(self, side: SimtOperand) -> None:
        """Writes the stores of the fetched elements to shared memory."""
        w, p, step = self.w, side.label, f"i * {side.step}"
        k, outer = f"{p}_k", f"{p}_{side.axis}"
        at = f"[{k}][{outer} + {step}]" if side.along_k else f"[{k} + {step}][{outer}]"
        loop = f"for (int i = 0; i < {side.count}; ++i)"
        if side.in_chunks:
            with w.unrolled(loop):
                at = f"[{k} / {CHUNK}][e * {side.tile} + {outer} + {step}]"
                w.unrolled_line(f"for (int e = 0; e < {side.width}; ++e) {p}_tile[stage]{at} = {p}_next[i][e];")
        elif side.width > 1:
            w.unrolled_line(f"{loop} store_shared(&{p}_tile[stage]{at}, {p}_next[i]);")
        elif side.gather.program is not None:
            with w.unrolled(loop):
                text = side.prologue.element({x.value: f"{x.name}_next[i]" for x in side.prologue.sources})
                text = operand_value(side.gather.operand, text, self.spec.accumulate)
                if self._guarded(side):
                    text = f"{p}_kept[i] ? {text} : {self.spec.accumulate}(0)"
                w.line(f"{p}_tile[stage]{at} = {text};")
        elif side.prologue.products == 1:
            w.unrolled_line(f"{loop} {p}_tile[stage]{at} = {p}_next[i];")
        else:
            with w.unrolled(loop):
                for number in range(side.prologue.products):
                    w.line(f"{p}_tile[{number}][stage]{at} = {p}_next[{number}][i];")

    def declare(self) -> None:
        """Declares the registers for what a thread has fetched of the next tiles."""
        w, c = self.w, self.spec.accumulate
        sides = (self.a, self.b)
        if all(side.gather.program is None and side.width == 1 for side in sides):
            w.line(f"{c} a_next[{self.a.count}], b_next{self.b.of(self.spec.products)}[{self.b.count}];")
            return
        for side in sides:
            for source in side.prologue.sources:
                ctype = c if side.gather.program is None else source.ctype
                ctype = f"Vector<{ctype}, {side.width}>" if side.width > 1 else ctype
                w.line(f"{ctype} {source.name}_next{side.of(side.prologue.products)}[{side.count}];")
            if self._guarded(side):
                w.line(f"bool {side.label}_kept[{side.count}];  // whether there is an element")


def used(every: Sequence[Sequence[int]]) -> list[int]:
    """Returns the dimensions in which some of these strides are not 0."""
    return sorted({d for steps in every for d, step in enumerate(steps) if step})

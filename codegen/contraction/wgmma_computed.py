"""The Hopper kernels' operand A computed by consumers in registers: what they read, and the fragments they make.

A consumer computes the fragment of the next 16 terms of the sum while the tensor cores multiply the one before.  Two
sets of registers take turns: a product must be done before its registers are written again.
"""

from __future__ import annotations

from math import prod

from codegen.contraction.wgmma_layout import GROUP_ROWS, WgmmaSchedule
from codegen.contraction.wgmma_schedule import FUNCTION, instructions_of
from codegen.expr import Load, Value
from codegen.iteration import coordinate, coordinates, linear, long, unsigned
from codegen.kernel import parameter
from codegen.naming import Names, Writer
from codegen.operands import PANEL, ROW_BYTES, STEP, Brought, ComputedOperand, OperandTiles
from codegen.prologue import Prologue, Source
from codegen.spec import TensorMap

GRID_CONSTANT = "const __grid_constant__ TensorMap "


class OperandAWriter:
    """Writes how operand A is computed.

    w  the writer of the kernel.
    t  the C type of positions.
    """

    def __init__(
        self,
        w: Writer,
        operand: ComputedOperand,
        prologue: Prologue,
        names: Names,
        s: WgmmaSchedule,
        parts: OperandTiles,
        t: str,
    ) -> None:
        self.w, self.t, self.s, self.operand, self.prologue, self.parts = w, t, s, operand, prologue, parts
        self.names = names
        loads = {b.load: b for b in operand.brought}
        self.brought = [(b, self._stem(b, "_in"), self._stem(b, "_map")) for b in operand.brought]
        self._tiles: list[tuple[Source, Brought, str, str, str]] = []
        self._rows: list[tuple[Source, str]] = []
        self._positions: list[tuple[Source, str]] = []
        for source in prologue.sources:
            if not isinstance(source.value, Load):
                self._positions.append((source, names.unique(source.name, "_rows")))
                continue
            number = source.value.operand
            stem = operand.gather.operands[number].name
            if number in loads:
                member = next(name for b, name, _ in self.brought if b.load == number)
                self._tiles.append(
                    (source, loads[number], member, names.unique(stem, "_v"), names.unique(stem, "_place"))
                )
            else:
                self._rows.append((source, names.unique(stem, "_rows")))

        #: Where functions take long, all of a stage is read first: with swish on operand A this takes 14 % less time.
        long = instructions_of(operand.gather.program) >= FUNCTION
        self._first = long and sum(not b.row for b in operand.brought) == 1

    def _stem(self, b: Brought, suffix: str) -> str:
        return self.names.unique(self.operand.gather.operands[b.load].name, suffix)

    # ---- parameters and shared memory

    def parameters(self) -> list[str]:
        maps = {b.load: name for b, _, name in self.brought}
        operands = zip(self.prologue.operands, self.prologue.pointers)
        return [GRID_CONSTANT + maps[n] if n in maps else parameter(op, name) for n, (op, name) in enumerate(operands)]

    def arguments(self) -> list[int | TensorMap]:
        """Returns the arguments of these parameters, as the kernel's caller sees them."""
        maps: dict[int, TensorMap] = {b.load: b.boxed(self.s.tile_m) for b in self.operand.brought}
        return [maps.get(n, n) for n in range(len(self.prologue.operands))]

    def members(self, *, rows: bool) -> None:
        """Declares the stages of tiles, or of rows, in shared memory."""
        for b, name, _ in self.brought:
            op = self.operand.gather.operands[b.load]
            stages = f"{op.dtype.ctype} {name}[{self.s.stages}]"
            if b.row and rows:
                length = max(PANEL, ROW_BYTES // b.itemsize)
                self.w.line(f"alignas({ROW_BYTES}) {stages}[{length}];  // of {op.name}: one for all rows")
            elif not b.row and not rows:
                dims = f"[{self.s.tile_m}][{b.panel}]"
                if not b.side.along_k:
                    dims = f"[{self.s.tile_m // GROUP_ROWS}][{PANEL}][{GROUP_ROWS}]"
                elif b.panels > 1:
                    dims = f"[{b.panels}]{dims}"
                self.w.line(f"alignas(1024) {stages}{dims};  // tiles of {op.name}: stages first, rows swizzled")

    # ---- consumers

    @property
    def _first_row(self) -> str:
        """The warp's first row in the tile."""
        return f"group * {GROUP_ROWS} + t / 32 * 16" if self.s.groups > 1 else "t / 32 * 16"

    def begin(self) -> None:
        """Writes what stays the same for all tiles."""
        self.prologue.scalars()
        for _, b, _, _, at in self._tiles:
            ctype = self._ctype(b)
            if b.row:
                continue
            if b.side.along_k:
                self.w.line(f"const int {at} = fragment_at<{ctype}, {b.width}>({self._first_row});")
            else:
                self.w.line(f"const int {at} = fragment_at_across(t / 32 * 16);")
        self.w.line("uint32 part[2][4];  // fragments of operand A: one is multiplied, the next is made")

    def _ctype(self, b: Brought) -> str:
        return self.operand.gather.operands[b.load].dtype.ctype

    def begin_tile(self) -> None:
        """Writes a thread's values for its two rows of a tile: elements of tensors with one a row, and where windows
        begin.
        """
        w, operand = self.w, self.operand
        gather, rows, batch = operand.gather, operand.rows, operand.batch
        limits = gather.limits
        if not self._rows and not limits and not self._positions:
            return
        for source, name in (*self._rows, *self._positions):
            w.line(f"{source.ctype} {name}[2];")
        if limits:
            w.line(f"{self.t} {', '.join(f'start{d}[2]' for d in range(len(limits)))};  // of the windows of both rows")
        with w.unrolled("for (int i = 0; i < 2; ++i)"):
            position = "m0 + row + i * 8"
            if self.parts.rows % self.s.tile_m:
                position = f"min({position}, {self.parts.rows - 1})"
            w.line(f"const {self.t} m = {position};")
            outer = coordinates(w, self.t, "m_", "m", rows) if len(rows) > 1 else ["m"]
            at = [coordinate("at.batch", batch, d) if prod(batch) > 1 else "0" for d in range(len(batch))]
            for source, name in (*self._rows, *self._positions):
                place = self.prologue.place(source)
                text = linear([*zip(at, place.batch), *zip(outer, place.outer)], place.start)
                w.line(f"{name}[i] = {source.pointer}[{text}];" if source.pointer else f"{name}[i] = {text};")
            for d, x in enumerate(limits):
                w.line(f"start{d}[i] = {linear([*zip(at, x.batch), *zip(outer, x.outer)], x.start)};")

    def begin_stage(self) -> None:
        """Writes the reads of a stage where all is read first, and which rows have elements under the stage's tap."""
        if self._first:
            for source, b, member, name, at in self._tiles:
                if not b.row:
                    self.w.line(f"Fragment<{source.ctype}> {name}[4];")
                    self.w.unrolled_line(f"for (int kk = 0; kk < 4; ++kk) {name}[kk] = {self._load(b, member, at)};")
        if self.operand.gather.limits:
            self._inside()

    def _inside(self) -> None:
        w, k, limits = self.w, self.parts.reduction, self.operand.gather.limits
        sizes = (*k.taps, k.chunks)
        coordinates(w, "int", "t", "k", sizes, long(k.taps))
        taps = [f"t{d}" if size > 1 else "0" for d, size in enumerate(k.taps)]
        w.line("bool inside[2];  // of the image")
        conditions = []
        for d, x in enumerate(limits):
            place = linear([(f"start{d}[i]", 1), *zip(taps, x.inner[1:])])
            conditions.append(f"{unsigned(self.t)}({place}) < {x.size}")
        w.unrolled_line(f"for (int i = 0; i < 2; ++i) inside[i] = {' && '.join(conditions)};")

    def _load(self, b: Brought, member: str, at: str) -> str:
        """Returns the C expression of a thread's part of a tile for step kk."""
        ctype, stage = self._ctype(b), f"shared.{member}[stage.index]"
        if not b.side.along_k:
            panel = "group" if self.s.groups > 1 else "0"
            return f"load_fragment_across<{ctype}>({stage}[{panel}], {at} + kk * 2048)"
        if b.panels == 1:
            return f"load_fragment<{ctype}, {b.width}>({stage}, {at} ^ kk * {STEP * b.itemsize})"
        steps = b.panel // STEP
        place = f"{at} ^ kk % {steps} * {STEP * b.itemsize}"
        return f"load_fragment<{ctype}, {b.width}>({stage}[kk / {steps}], {place})"

    def fragment(self) -> None:
        """Writes the computation of the fragment of step kk of a stage."""
        w, k = self.w, self.parts.reduction
        read: dict[Value, str] = {}
        for source, b, member, name, at in self._tiles:
            pairs = self.operand.pairs
            if b.row:
                stage = f"shared.{member}[stage.index]"
                w.line(f"const auto {name} = load_column{'_pairs' if pairs else 's'}({stage} + kk * {STEP});")
                read[source.value] = f"{name}[r / 2]" if pairs else f"{name}[e / 4 * 2 + e % 2]"
            elif self._first:
                read[source.value] = f"{name}[kk][e]"
            else:
                w.line(f"const auto {name} = {self._load(b, member, at)}{'.pairs()' if pairs else ''};")
                read[source.value] = f"{name}[r]" if pairs else f"{name}[e]"
        for source, name in self._rows:
            read[source.value] = f"Pair<{source.ctype}>({name}[r % 2])" if self.operand.pairs else f"{name}[e / 2 % 2]"
        ragged = k.channels % PANEL
        if ragged or self._positions:
            chunk = f"k % {k.chunks}" if prod(k.taps) > 1 and k.chunks > 1 else "k" if k.chunks > 1 else "0"
            w.line(f"const int c = {linear([(chunk, PANEL), ('kk', STEP), ('lane % 4', 2)])};")
        for source, name in self._positions:
            step = self.prologue.place(source).inner[-1]
            read[source.value] = linear([(f"{name}[e / 2 % 2]", 1), ("(c + e / 4 * 8 + e % 2)", step)])
        if self.operand.pairs:
            self._pairs(read)
            return
        w.line(f"Vector<{self.operand.element}, 8> made;")
        with w.unrolled("for (int e = 0; e < 8; ++e)"):
            text = self.prologue.element(read)
            w.line(f"made[e] = {f'kept({text}, c + e / 4 * 8 + e % 2 < {k.channels})' if ragged else text};")
        keep = ", inside" if self.operand.gather.limits else ""
        w.line(f"put_fragment(part[kk % 2], made{keep});")

    def _pairs(self, read: dict[Value, str]) -> None:
        """Writes the same for two elements at a time: register r has row r % 2, columns r / 2 * 8 and the next."""
        w, k = self.w, self.parts.reduction
        with w.unrolled("for (int r = 0; r < 4; ++r)"):
            text = self.prologue.element(read)
            w.line(f"const Pair<{self.operand.element}> made = {text};")
            conditions = ["inside[r % 2]"] if self.operand.gather.limits else []
            if k.channels % PANEL:
                conditions.append(f"c + r / 2 * 8 < {k.channels}")
            kept = f"{' && '.join(conditions)} ? made.bits : 0" if conditions else "made.bits"
            w.line(f"part[kk % 2][r] = {kept};")

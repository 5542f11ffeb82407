"""The Hopper kernels' operand A computed by consumers in registers: what they read, and the fragments they make.

A consumer computes the fragment of the next 16 terms of the sum while the tensor cores multiply the one before.  Two
sets of registers take turns: a product must be done before its registers are written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.buffers import every
from codegen.contraction.wgmma_loads import GRID_CONSTANT, Loads, OperandWriter, Parameter, TileLoads
from codegen.contraction.wgmma_stages import FUNCTION, instructions_of
from codegen.expr import Load, Value
from codegen.iteration import coordinate, coordinates, linear, long, unsigned
from codegen.kernel import parameter
from codegen.operands import PANEL, STEP, Brought, ComputedOperand
from codegen.prologue import Prologue, Source
from codegen.sizes import most


@dataclass(frozen=True)
class _Tile:
    """A tensor that TMA brings, and C names: of its stages, of a thread's elements, and of where these lie."""

    source: Source
    brought: Brought
    member: str
    name: str
    at: str


class OperandAWriter(OperandWriter):
    """Writes how operand A is computed."""

    def __init__(self, loads: Loads, operand: ComputedOperand, prologue: Prologue) -> None:
        block, names = loads.block, loads.w.names
        self.t, self.parts = block.t, block.parts
        self._repeated, self.operand, self.prologue = loads.repeated, operand, prologue
        tensors, s, brought = operand.gather.operands, block.s, {b.load: b for b in operand.brought}
        #: C names of the stages of what TMA brings, by the tensor's number
        self.members = {n: names.unique(tensors[n].name, "_in") for n in brought}
        maps = {n: names.unique(tensors[n].name, "_map") for n in brought}
        boxes = {n: b.boxed(s.tile_m) for n, b in brought.items()}
        self._loads = [
            (b, maps[n], TileLoads(loads, b.side, boxes[n], self.members[n], "m0", s.tile_m, b.panels))
            for n, b in brought.items()
        ]
        self._tiles: list[_Tile] = []
        #: what a thread keeps for its two rows: elements, and positions, which have no pointer
        self._rows: list[tuple[Source, str]] = []
        for source in prologue.sources:
            n = source.value.operand if isinstance(source.value, Load) else None
            stem = source.name if n is None else tensors[n].name
            if n in brought:
                called = names.unique(stem, "_v"), names.unique(stem, "_place")
                self._tiles.append(_Tile(source, brought[n], self.members[n], *called))
            else:
                self._rows.append((source, names.unique(stem, "_rows")))
        #: Where functions take long, all of a stage is read first: with swish on operand A this takes 14 % less time.
        long = instructions_of(operand.gather.program) >= FUNCTION
        self._first = long and sum(not b.row for b in operand.brought) == 1
        named = enumerate(zip(prologue.operands, prologue.pointers))
        plain: dict[int, Parameter] = {n: (parameter(op, name), n) for n, (op, name) in named}
        parameters = plain | {n: (GRID_CONSTANT + maps[n], boxes[n]) for n in brought}
        windows = any(b.side.im2col for b in operand.brought)
        super().__init__(block, [*parameters.values()], sum(b.bytes(s.tile_m) for b in operand.brought), windows)

    # ---- the producer

    def load(self) -> None:
        for b, name, loads in self._loads:
            with self._repeated("u", b.panels):
                loads.write(name)

    # ---- consumers

    def begin(self) -> None:
        """Writes what stays the same for all tiles."""
        self.prologue.scalars()
        row = linear([(self.block.rows, 1), ("t / 32 * 16", 1)])
        for tile in self._tiles:
            b, ctype = tile.brought, tile.source.ctype
            across = "fragment_at_across(t / 32 * 16)"
            if not b.row:
                place = f"fragment_at<{ctype}, {b.width}>({row})" if b.side.along_k else across
                self.w.line(f"const int {tile.at} = {place};")
        self.w.line("uint32 part[2][4];  // fragments of operand A: one is multiplied, the next is made")

    def begin_tile(self) -> None:
        """Writes a thread's values for its two rows of a tile: elements of tensors with one a row, and where windows
        begin.
        """
        w, operand = self.w, self.operand
        gather, rows, batch = operand.gather, operand.rows, operand.batch
        limits = gather.limits
        if not self._rows and not limits:
            return
        for source, name in self._rows:
            w.line(f"{source.ctype} {name}[2];")
        if limits:
            w.line(f"{self.t} {', '.join(f'start{d}[2]' for d in range(len(limits)))};  // of the windows of both rows")
        with w.unrolled("for (int i = 0; i < 2; ++i)"):
            w.line(f"const {self.t} m = {self.block.m.held('m0 + row + i * 8')};")
            outer = coordinates(w, self.t, "m_", "m", rows) if len(rows) > 1 else ["m"]
            at = [coordinate(self.block.at_batch, batch, d) if prod(batch) > 1 else "0" for d in range(len(batch))]
            for source, name in self._rows:
                place = self.prologue.place(source)
                text = linear([*zip(at, place.batch), *zip(outer, place.outer)], place.start)
                w.line(f"{name}[i] = {source.pointer}[{text}];" if source.pointer else f"{name}[i] = {text};")
            for d, x in enumerate(limits):
                w.line(f"start{d}[i] = {linear([*zip(at, x.batch), *zip(outer, x.outer)], x.start)};")

    def begin_stage(self) -> None:
        """Writes the reads of a stage where all is read first, and which rows have elements under the stage's tap."""
        if self._first:
            for tile in self._tiles:
                if not tile.brought.row:
                    self.w.line(f"Fragment<{tile.source.ctype}> {tile.name}[4];")
                    self.w.unrolled_line(f"for (int kk = 0; kk < 4; ++kk) {tile.name}[kk] = {self._fragment(tile)};")
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

    def _fragment(self, tile: _Tile) -> str:
        """Returns the C expression of a thread's part of a tile for step kk."""
        b, ctype, at, stage = tile.brought, tile.source.ctype, tile.at, f"shared.{tile.member}[stage.index]"
        if not b.side.along_k:
            return f"load_fragment_across<{ctype}>({stage}[{self.block.group}], {at} + kk * 2048)"
        if b.panels == 1:
            return f"load_fragment<{ctype}, {b.width}>({stage}, {at} ^ kk * {STEP * b.itemsize})"
        steps = b.panel // STEP
        place = f"{at} ^ kk % {steps} * {STEP * b.itemsize}"
        return f"load_fragment<{ctype}, {b.width}>({stage}[kk / {steps}], {place})"

    def fragment(self) -> None:
        """Writes the computation of the fragment of step kk of a stage."""
        w, k = self.w, self.parts.reduction
        read = self._read()
        if self.operand.pairs:
            self._pairs(read)
            return
        w.line(f"Vector<{self.operand.element}, 8> made;")
        with w.unrolled("for (int e = 0; e < 8; ++e)"):
            text = self.prologue.element(read)
            w.line(f"made[e] = {f'kept({text}, c + e / 4 * 8 + e % 2 < {k.channels})' if self._ragged else text};")
        keep = ", inside" if self.operand.gather.limits else ""
        w.line(f"put_fragment(part[kk % 2], made{keep});")

    @property
    def _ragged(self) -> bool:
        """Whether some channels of the last panel do not exist."""
        return self.parts.reduction.channels % PANEL != 0

    def _read(self) -> dict[Value, str]:
        """Writes the reads of step kk; returns the C expression of each source's element or pair."""
        w, k, pairs = self.w, self.parts.reduction, self.operand.pairs
        read: dict[Value, str] = {}
        for tile in self._tiles:
            name, value = tile.name, tile.source.value
            if tile.brought.row:
                columns = f"load_column{'_pairs' if pairs else 's'}"
                w.line(f"const auto {name} = {columns}(shared.{tile.member}[stage.index] + kk * {STEP});")
                read[value] = f"{name}[r / 2]" if pairs else f"{name}[e / 4 * 2 + e % 2]"
            elif self._first:
                read[value] = f"{name}[kk][e]"
            else:
                w.line(f"const auto {name} = {self._fragment(tile)}{'.pairs()' if pairs else ''};")
                read[value] = f"{name}[r]" if pairs else f"{name}[e]"
        if self._ragged or not all(source.pointer for source, _ in self._rows):
            chunk = f"k % {k.chunks}" if prod(k.taps) > 1 and most(k.chunks) > 1 else "k" if most(k.chunks) > 1 else "0"
            w.line(f"const int c = {linear([(chunk, PANEL), ('kk', STEP), ('lane % 4', 2)])};")
        for source, name in self._rows:
            own, step = f"{name}[e / 2 % 2]", self.prologue.place(source).inner[-1]
            if source.pointer:
                read[source.value] = f"Pair<{source.ctype}>({name}[r % 2])" if pairs else own
            else:
                read[source.value] = linear([(own, 1), ("(c + e / 4 * 8 + e % 2)", step)])
        return read

    def _pairs(self, read: dict[Value, str]) -> None:
        """Writes the same for two elements at a time: register r has row r % 2, columns r / 2 * 8 and the next."""
        w, k = self.w, self.parts.reduction
        with w.unrolled("for (int r = 0; r < 4; ++r)"):
            text = self.prologue.element(read)
            w.line(f"const Pair<{self.operand.element}> made = {text};")
            within = "inside[r % 2]" if self.operand.gather.limits else ""
            kept = every(within, f"c + r / 2 * 8 < {k.channels}" if self._ragged else "")
            w.line(f"part[kk % 2][r] = {f'{kept} ? made.bits : 0' if kept else 'made.bits'};")

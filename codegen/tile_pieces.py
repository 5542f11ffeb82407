"""The pieces of an operand's tile: which of them a thread brings to shared memory, and what it reads for them."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.buffers import Edge
from codegen.naming import Writer
from codegen.prologue import Prologue, Source
from codegen.records import once
from codegen.tile_path import ACROSS_BYTES, TilePath


@dataclass(frozen=True)
class TilePieces:
    """An operand's tile in pieces of 16 bytes: which of them a thread brings, and what it reads for each.

    w         the writer of the kernel.
    t         C type of positions and places.
    way       how the elements come to shared memory.
    label     "a" or "b", with which the kernel's variables begin.
    prologue  what is read, and what is computed from it.  A stage holds a tile of every operand B, brought from the
              same places of each.
    tile      rows (of operand A) or columns (of operand B) of a tile; ``of_warp`` those of a warp.
    total     rows or columns altogether; ``depth`` terms of a sum.
    inner     terms of a stage.
    threads   that bring the tiles; ``target`` the C expression of the tile's place in shared memory.
    """

    w: Writer
    t: str
    way: TilePath
    label: str
    prologue: Prologue
    tile: int
    of_warp: int
    total: int
    depth: int
    inner: int
    threads: int
    target: str

    # ---- the tile

    @property
    def first(self) -> bool:
        return self.label == "a"

    @once
    def row_bytes(self) -> int:
        """Bytes of a row of the tile as it lies in shared memory."""
        way = self.way
        return self.inner * way.itemsize if way.along_k else min(ACROSS_BYTES, self.tile * way.itemsize)

    @property
    def bytes(self) -> int:
        """Bytes of a tile, or of one part of it."""
        return self.tile * self.inner * self.way.itemsize

    @property
    def products(self) -> int:
        return self.prologue.products

    @once
    def pieces(self) -> int:
        return self.tile * self.inner // self.way.piece

    @once
    def edge(self) -> Edge:
        """The rows (or columns) in tiles."""
        return Edge(self.total, self.tile)

    @once
    def terms(self) -> Edge:
        """The terms of a sum in stages."""
        return Edge(self.depth, self.inner)

    # ---- what a thread brings

    @property
    def row_pieces(self) -> int:
        return self.way.pieces_of_row(self.tile, self.inner)

    @once
    def count(self) -> int:
        """How many pieces a thread brings."""
        return self.way.count(self.tile, self.inner, self.threads)

    @once
    def step(self) -> int:
        """The distance from one of them to the next: rows of the tile, or pieces of one row."""
        return self.way.step(self.tile, self.inner, self.threads)

    @once
    def vectors(self) -> int:
        """How many copies a piece takes."""
        return self.way.piece // self.way.vector

    @once
    def bases(self) -> int:
        """From how many places along rows or columns a thread brings pieces."""
        if not self.way.along_k:
            return self.vectors
        return self.count if self.way.threads_along_k else 1

    @once
    def base_at(self) -> str:
        """The subscript of what a thread keeps for each of them: piece ``i``, or vector ``v`` of a piece."""
        return "" if self.bases == 1 else "[i]" if self.way.along_k else "[v]"

    # ---- what is read for a piece

    def _apart(self, source: Source) -> int:
        """Returns the distance from one element of a vector to the next."""
        place = self.prologue.place(source)
        return (place.inner if self.way.along_k else place.outer)[-1]

    def _fixed(self, source: Source) -> bool:
        """Tells whether what is read for a row or column stays the same over the reduction."""
        return self.computed and not any(self.prologue.place(source).inner) and self.prologue.free(source)

    def _common(self, source: Source) -> bool:
        """Tells whether a thread's pieces, which lie in different rows, share what is read."""
        way, place = self.way, self.prologue.place(source)
        if not (self.computed and way.along_k and way.threads_along_k) or self._fixed(source):
            return False
        return not any((*place.batch, *place.outer)) and self.prologue.free(source)

    def _single(self, source: Source) -> bool:
        """Tells whether the elements of a vector are all one, or follow from one position."""
        return self.computed and (self._apart(source) == 0 or not source.pointer)

    def _held(self, source: Source) -> str:
        """Returns the C type of what is read for a vector."""
        if self._single(source):
            return source.ctype
        return f"{'Packed' if self._packed(source) else 'Vector'}<{source.ctype}, {self.way.vector}>"

    def _packed(self, source: Source) -> bool:
        """Tells whether a vector is kept in the words in which it is loaded."""
        return (
            not (self._stored and self.vectors == 1)
            and source.itemsize <= 2
            and source.itemsize * self.way.vector >= 4
            and self._wide(source)
        )

    def _wide(self, source: Source) -> bool:
        """Tells whether a vector of a source is one access, or several of 16 bytes."""
        if not self.computed:
            return True
        place, vector = self.prologue.place(source), self.way.vector
        steps = [*place.batch, *place.outer, *place.inner]
        width = min(16, vector * source.itemsize)
        if self._apart(source) != 1:
            return False
        steps.remove(1)
        return all(s * source.itemsize % width == 0 for s in (*steps, place.start)) and source.alignment % width == 0

    @once
    def computed(self) -> bool:
        """Whether elements are computed from what is read."""
        return self.way.gather.program is not None

    @property
    def _stored(self) -> bool:
        """Whether elements are stored as they are read."""
        way = self.way
        return not self.computed and way.parts == 1 and way.gather.operand.dtype.ctype == way.element

    @property
    def guarded(self) -> bool:
        """Whether some computed elements are zero, whatever the program says."""
        return self.computed and bool(self.way.gather.limits or self.terms.ragged)

"""Arrays of a kernel: what lies in shared memory, from which its declaration and its bytes follow."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from codegen.declined import Declined
from codegen.dtypes import ALL, SIZE_OF
from codegen.records import once
from codegen.sizes import Size

#: Bytes of a C type: those of the dtypes, and of `codegen/device`'s structs.
SIZES = {
    **{dtype.ctype: dtype.itemsize for dtype in ALL},
    **SIZE_OF,
    "int": 4,
    "unsigned char": 1,
    "Barrier": 8,
    "attention::Span": 12,
}
#: TMA and wgmma swizzle 1024 bytes at a time; ldmatrix and vectors take 16.
SWIZZLED, VECTORS = 1024, 16


class Buffer(NamedTuple):
    """An array, or a ring of them.

    name, ctype  of the array in C.
    shape        its dimensions; the last one's elements are neighbours.
    stages       arrays of the ring; 0: there is one array, and no dimension for them.
    pad          elements behind each row, so that the rows of a column are in different banks.
    align        bytes of which its address is a multiple: `SWIZZLED`, `VECTORS`, or 0 for the type's own.
    note         what its declaration says of it.
    """

    name: str
    ctype: str
    shape: tuple[int, ...] = ()
    stages: int = 0
    pad: int = 0
    align: int = 0
    note: str = ""

    @property
    def dims(self) -> tuple[int, ...]:
        """All dimensions, as declared."""
        padded = (*self.shape[:-1], self.shape[-1] + self.pad) if self.shape else ()
        return (self.stages, *padded) if self.stages else padded

    @property
    def bytes(self) -> int:
        """Bytes of all stages."""
        return SIZES[self.ctype] * prod(self.dims)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.bytes // max(self.stages, 1)

    @property
    def alignment(self) -> int:
        """Bytes of which its address is a multiple."""
        return max(self.align, 4 if "::" in self.ctype else SIZES[self.ctype])

    @property
    def declaration(self) -> str:
        """The C declaration, with its note.  Raises Declined for an array whose size varies."""
        aligned = f"alignas({self.align}) " if self.align else ""
        return f"{aligned}{self._array}{f'  // {self.note}' if self.note else ''}"

    @property
    def static(self) -> str:
        """The C declaration in a kernel's static shared memory.  Raises Declined for an array whose size varies."""
        aligned = f"__align__({self.align}) " if self.align else ""
        return f"__shared__ {aligned}{self._array}"

    @property
    def _array(self) -> str:
        if any(isinstance(n, Size) for n in self.dims):
            raise Declined(f"array {self.name!r} in shared memory has a size that varies: {list(self.dims)}")
        return f"{self.ctype} {self.name}{''.join([f'[{n}]' for n in self.dims])};"


class Buffers(tuple[Buffer, ...]):
    """What a block has in shared memory, in its order: schedules count its bytes, kernels declare it."""

    @property
    def bytes(self) -> int:
        """Bytes from the first buffer's begin to the last one's end."""
        return self.places[-1]

    @property
    def places(self) -> list[int]:
        """The bytes at which the buffers begin, as C lays out a struct of them, and at which the last one ends."""
        places, end = [], 0
        for buffer in self:
            places.append(-(-end // buffer.alignment) * buffer.alignment)
            end = places[-1] + buffer.bytes
        return [*places, end]

    @once
    def stage_bytes(self) -> int:
        """Bytes of a stage of all that have stages."""
        return sum(buffer.stage_bytes for buffer in self if buffer.stages)

    def __getitem__(self, name: str) -> Buffer:  # type: ignore[override]
        return next(b for b in self if b.name == name)


class Edge(NamedTuple):
    """So many positions in tiles of so many: the last tile may be partly empty."""

    total: int
    size: int

    @property
    def tiles(self) -> int:
        return -(-self.total // self.size)

    @property
    def padded(self) -> int:
        """Positions of all tiles."""
        return self.tiles * self.size

    @property
    def ragged(self) -> bool:
        return self.total % self.size != 0

    def inside(self, position: str) -> str:
        """Returns the C condition that a position exists; empty if all do."""
        return f"{position} < {self.total}" if self.ragged else ""

    def outside(self, position: str) -> str:
        """Returns the C condition that a position does not exist; empty if all do.  The first one always does."""
        return f"{position} >= {self.total}" if self.ragged and position != "0" else ""

    def held(self, position: str) -> str:
        """Returns a position that exists: the last one for those beyond it."""
        return f"min({position}, {self.total - 1})" if self.ragged else position


def every(*conditions: str) -> str:
    """Returns the C condition that all of some hold, of which empty ones always do; empty if there is none."""
    return " && ".join(c for c in conditions if c)


def where(condition: str, value: str, other: str) -> str:
    """Returns the C expression of a value, or of another one where a condition does not hold; empty ones always do."""
    return f"{condition} ? {value} : {other}" if condition else value


def guard(condition: str) -> str:
    """Returns what a statement begins with that is for where a C condition holds; an empty one always does."""
    return f"if ({condition}) " if condition else ""

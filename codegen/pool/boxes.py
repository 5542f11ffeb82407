"""What a block of a staged pool kernel makes, and what it reads for it: boxes of operands, in shared memory run by run.

A block takes ``planes`` neighbours of the last dimension without windows, ``band`` positions of the last window but one
(of the only one), and all positions of the last one, and of every one whose windows have different sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from codegen.buffers import VECTORS, Buffer, Edge
from codegen.expr import Load, Operand
from codegen.family import Schedule
from codegen.iteration import extent
from codegen.pool.space import Space
from codegen.records import once
from codegen.sizes import most
from codegen.windows import Adaptive


@dataclass(frozen=True)
class StagedSchedule(Schedule):
    """How a staged pool kernel is mapped to blocks and threads.

    vector  neighbours in memory, outside of all windows, that a thread folds at once.
    itype   C type of coordinates and offsets, signed.
    planes  neighbours of the last dimension without windows that a block takes.
    band    positions of the last window but one, or of the only one, that a block takes.
    rows    positions of the last window but one that a thread takes at once.
    cols    positions of the last window that it takes.
    blocks  of the grid, each of which takes tiles in turn, and brings one while it folds the one before; 0: one each.
    """

    vector: int
    itype: str
    planes: int
    band: int
    rows: int = 1
    cols: int = 1
    blocks: int = 0


class Along(NamedTuple):
    """A dimension of a box: its number among outer dimensions and windows, its elements, how far apart they are."""

    dim: int
    size: int
    stride: int


@dataclass(frozen=True)
class Box:
    """A box of an operand's elements in shared memory.

    segments  its dimensions, slowest first, whose elements are not neighbours; every run of neighbours begins anew.
    run       the dimensions of a run, slowest first.
    vector    neighbours of an access to global memory.
    shifted   whether runs begin anywhere between two vectors; they then lie as far behind one in shared memory, too.
    padded    whether runs are a vector apart, so that elements one above the other are in different banks.
    stages    how many such boxes there are, one behind the other.
    """

    operand: Operand
    segments: tuple[Along, ...]
    run: tuple[Along, ...]
    vector: int
    shifted: bool = False
    padded: bool = False
    stages: int = 1

    @property
    def length(self) -> int:
        """Elements of a run."""
        return prod(a.size for a in self.run)

    @property
    def vectors(self) -> int:
        """Vectors of a run."""
        return Edge(self.length + (self.vector - 1 if self.shifted else 0), self.vector).tiles

    @property
    def pitch(self) -> int:
        """Elements from one run to the next in shared memory."""
        return (self.vectors + self.padded) * self.vector

    @property
    def runs(self) -> int:
        return prod(a.size for a in self.segments)

    @once
    def steps(self) -> dict[int, int]:
        """Elements from one position to the next in shared memory, by dimension."""
        found, step = {a.dim: a.stride for a in self.run}, self.pitch
        for a in reversed(self.segments):
            found[a.dim] = step
            step *= a.size
        return found

    def buffer(self, name: str) -> Buffer:
        return Buffer(name, self.operand.dtype.ctype, (self.stages * self.runs * self.pitch,), align=VECTORS)


class Tiles:
    """The tile of a block, and its boxes in shared memory: those of loads, and those of stores.

    size   positions of a tile along each outer dimension.
    reach  elements under them along each window, of which the first is ``fresh`` elements behind that of the tile in
           front; the very first is element ``shift``, which may be negative.
    """

    def __init__(self, space: Space, s: StagedSchedule) -> None:
        self.space, self.s = space, s
        self.size = [1] * space.rank
        free = [d for d in range(space.rank) if all(d != k for k, _ in space.windows)]
        if free:
            self.size[free[-1]] = _at_most(s.planes, space.outer[free[-1]])
        self.reach: list[int] = []
        self.fresh: list[int] = []
        self.shift: list[int] = []
        banded = max(0, len(space.windows) - 2)
        for k, (d, window) in enumerate(space.windows):
            if isinstance(window, Adaptive):
                self.size[d] = space.outer[d]
                self._reached(window.size, 0, 0)
                continue
            wanted = window.unit if k < banded else s.band if k == banded else space.outer[d]
            self.size[d] = _at_most(wanted, space.outer[d])
            assert self.size[d] % window.unit == 0 or self.size[d] == space.outer[d]
            if self.size[d] == space.outer[d]:
                self._reached(window.size, 0, 0)
            else:
                self._reached(window.span(self.size[d]), window.fresh(self.size[d]), window.shift)
        program = space.program
        self.loads = {n: box for n in space.taps if (box := self._load(program.loads[n])) is not None}
        self.stores = {n: box for n, x in enumerate(program.stores) if (box := self._store(x.operand)) is not None}

    def _reached(self, reach: int, fresh: int, shift: int) -> None:
        self.reach.append(reach)
        self.fresh.append(fresh)
        self.shift.append(shift)

    @property
    def edges(self) -> list[Edge]:
        return [Edge(n, size) for n, size in zip(self.space.outer, self.size)]

    @once
    def pairs(self) -> str:
        """The C type of 16-bit floats whose largest or smallest ones are found two at a time; "" if there is none."""
        program, found = self.space.program, set()
        for reduction in program.reductions:
            of = reduction.value.operand if isinstance(reduction.value, Load) else -1
            if of not in self.loads or reduction.at is not None or not reduction.combiner.selects:
                return ""
            found.add(program.loads[of].dtype if reduction.ctype == "float" else None)
        dtype = found.pop() if len(found) == 1 else None
        halves = dtype is not None and dtype.name in ("float16", "bfloat16") and self.s.vector > 1
        return dtype.ctype if dtype is not None and halves else ""

    @property
    def count(self) -> int:
        return prod(edge.tiles for edge in self.edges)

    @property
    def bytes(self) -> int:
        """Bytes of shared memory."""
        loads = (2 if self.s.blocks else 1) * sum(box.buffer("").bytes + VECTORS for box in self.loads.values())
        return loads + sum(box.buffer("").bytes + VECTORS for box in self.stores.values())

    def _steps(self, strides: tuple[int, ...]) -> list[int]:
        """Returns by how many elements an operand's tiles are apart along each outer dimension."""
        return [(edge.size if most(edge.tiles) > 1 else 0) * t for edge, t in zip(self.edges, strides)]

    def _load(self, operand: Operand) -> Box | None:
        """Returns the box of a load that is brought in vectors of neighbours, as wide as possible; None for others."""
        rank, strides = self.space.rank, operand.strides
        under = strides[rank:]
        every = [Along(d, size, strides[d]) for d, size in enumerate(self.size)]
        every += [Along(rank + k, reach, t) for k, (reach, t) in enumerate(zip(self.reach, under))]
        segments, run = _runs(every)
        begins = [*self._steps(strides), *(a.stride for a in segments)]
        begins += [step * t for steps in (self.fresh, self.shift) for step, t in zip(steps, under)]
        for nbytes in (16, 8, 4):
            vector = nbytes // operand.dtype.itemsize
            if not run or not vector or operand.alignment % nbytes:
                continue
            shifted = any(b % vector for b in begins)
            within = any(a.dim >= rank and a.stride % vector for a in segments)  # runs begin anywhere within a plane
            if not within and not (shifted and self.s.vector > 1):
                return Box(operand, segments, run, vector, shifted)
        return None

    def _store(self, operand: Operand) -> Box | None:
        """Returns the box of a store, unless neighbouring threads store neighbours in memory themselves."""
        last, itemsize = self.space.rank - 1, operand.dtype.itemsize
        if self.space.inner or (operand.strides[last] == 1 and self.s.cols == 1):
            return None
        segments, run = _runs([Along(d, size, operand.strides[d]) for d, size in enumerate(self.size)])
        begins = [*self._steps(operand.strides), *(a.stride for a in segments)]
        vector = gcd(operand.alignment, VECTORS, *(b * itemsize for b in begins)) // itemsize
        return Box(operand, segments, run, max(1, vector), padded=all(a.dim != last for a in run))

    def extent(self, operand: Operand) -> int:
        """Returns one more than the largest offset of a load's elements."""
        return extent((*self.space.outer, *(w.size for _, w in self.space.windows)), operand.strides)


def _at_most(wanted: int, size: int) -> int:
    """Returns the positions of a tile that is to have so many of a dimension: all of them if it never has more."""
    return size if most(size) <= wanted else wanted


def _runs(every: list[Along]) -> tuple[tuple[Along, ...], tuple[Along, ...]]:
    """Returns the dimensions of a box's segments and of its runs, without those of one element."""
    left = sorted((a for a in every if most(a.size) > 1 and a.stride > 0), key=lambda a: -a.stride)
    run: list[Along] = []
    while left and left[-1].stride == prod(a.size for a in run):
        run.insert(0, left.pop())
    return tuple(left), tuple(run)

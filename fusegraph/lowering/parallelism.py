"""How much of a reduction can be done side by side, and what its kernel is estimated to take, whole or in parts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod

from codegen.arch import SECTOR_BYTES
from codegen.rows.schedule import (
    LEAST_SIDE,
    PORTABLE_BLOCKS,
    SEGMENT_BYTES,
    clusters_at_once,
    clusters_of,
)
from codegen.sizes import dividing
from codegen.target import Target
from fusegraph.graph import Graph, Tensor
from fusegraph.ops.base import Kind

#: With fewer blocks than this, of which each reads more than LONG_BYTES, most of a GPU is idle: what else is computed
#: for each element goes to another kernel.  A row of neighbours can have a cluster of blocks.
FEW_ROWS, LONG_BYTES = 16, 512 << 10
#: Bytes that neighbouring rows have side by side in one block.
COLUMN_BYTES = 64
#: Bytes that a block keeps of what it reads, and how often a kernel reads what it does not keep.
KEPT_BYTES, LOOKS = 64 << 10, 3
#: Where rows are short, and blocks enough, these have as many rows as make so many bytes.
SHORT_BYTES = 16 << 10
#: Bytes of such rows that a block reads in a cycle, and a multiprocessor with many blocks, of which it has at most so
#: many; cycles for which each of them waits, alone or in a cluster.  Fits to the times of norms of channels.
BLOCK_RATE, COLUMN_RATE, MOST_RESIDENT = 8.0, 33.0, 8
ALONE, TOGETHER = 2000.0, 4000.0
#: Bytes of an access with which a multiprocessor reads so many; with narrower ones it is as much less.
WIDE_ACCESS = 8


@dataclass(frozen=True)
class Parallelism:
    """A kernel that reduces each row in one block.

    blocks      that it has.
    bytes_each  that each of them reads.
    across      whether neighbouring elements are those of neighbouring rows.
    access      bytes that a thread may read at once; where `run` is not empty, in a kernel that leaves it out.
    moved       bytes of the sectors that a block reads, for each byte of them that it needs.
    """

    blocks: int
    bytes_each: int
    across: bool
    access: int = WIDE_ACCESS
    moved: float = 1.0

    def cycles(self, target: Target, looks: int) -> float:
        """Returns the cycles that a kernel takes which needs each element so often, clusters included.

        Along rows, a cluster keeps what it has room for.
        """
        every = self.blocks * self.bytes_each
        if not self.across:
            reads = 1 if self.bytes_each <= _kept_bytes(target) else looks
            return self._along(target, reads * self.moved)
        memory = every / target.bytes_per_cycle
        enough = MOST_RESIDENT * target.sms
        wide = max(1, min(SHORT_BYTES // max(self.bytes_each, 1), self.blocks // enough))
        found = []
        for cluster in clusters_of(target):
            each = wide * self.bytes_each / cluster
            turns = -(-self.blocks // (wide * clusters_at_once(target, cluster)))
            kept = each <= KEPT_BYTES
            room = int(2 * KEPT_BYTES / max(each, 1)) if kept else turns
            resident = max(1, min(MOST_RESIDENT, turns, room)) if cluster == 1 else 1
            waits = -(-turns // resident) * (ALONE if cluster == 1 else TOGETHER)
            rate = min(self._column_rate, BLOCK_RATE * resident)
            walk = turns * each * (1 if kept else looks) / rate
            again = not kept and looks > 1 and every > target.l2_share(0.5)  # from memory, once at least
            found.append(max(waits + walk, memory * (2 if again else 1)))
        return min(found)

    def cycles_written(self, target: Target) -> float:
        """Returns the cycles that writing as much, just as it lies, takes longer than writing whole sectors."""
        return self._along(target, self.moved - 1)

    def cycles_apart(self, target: Target, looks: int) -> float:
        """Returns the cycles that kernels of parts take instead, which are ``looks`` more than one."""
        rate = min(target.bytes_per_cycle, self._column_rate * target.sms)
        return looks * (target.launch_cycles + self.blocks * self.bytes_each / rate)

    def _along(self, target: Target, times: float) -> float:
        """Returns the cycles in which the blocks of rows move their bytes so many times."""
        every = self.blocks * self.bytes_each
        return every * times / target.bytes_per_cycle / min(1.0, max(self.blocks, 1) / target.sms)

    @property
    def _column_rate(self) -> float:
        """Bytes that a multiprocessor with many blocks reads in a cycle."""
        return COLUMN_RATE * min(1.0, self.access / WIDE_ACCESS)


def parallelism(x: Tensor, axes: tuple[int, ...]) -> Parallelism:
    """Returns how much of reducing a tensor along axes can be done side by side."""
    length, itemsize = prod(x.shape[d] for d in axes), x.dtype.itemsize
    results, steps = x.size // max(length, 1), _steps(x)
    if steps and steps[0][1] not in axes:
        width = max(1, min(results * itemsize, COLUMN_BYTES))
        return Parallelism(results * itemsize // width, length * width, True, _access(x, axes))
    if short := run(x, axes):
        moved = max(1.0, SECTOR_BYTES / (prod(x.shape[d] for d in short) * itemsize))
        return Parallelism(results, length * itemsize, False, _access(x, {*axes} - {*short}), moved)
    return Parallelism(results, length * itemsize, False)


def run(x: Tensor, axes: Collection[int]) -> tuple[int, ...]:
    """Returns those of the axes of a reduction along which neighbours in memory lie, if these are few.

    They are few if threads that read side by side have elements of other rows next: the channels of a group, channels
    last.  A kernel that reduces along the other axes alone reads all of them in one piece.
    """
    found: list[int] = []
    width = 1
    for stride, d in _steps(x):
        if stride != width:
            break
        if d not in axes:
            few = width * x.dtype.itemsize < SEGMENT_BYTES and width * x.shape[d] >= LEAST_SIDE
            others = any(x.shape[axis] > 1 for axis in axes if axis not in found)
            return tuple(found) if few and others else ()
        found.append(d)
        width *= x.shape[d]
    return ()


def _steps(x: Tensor) -> list[tuple[int, int]]:
    """Returns strides and dimensions, of those that have any, nearest neighbours first."""
    return sorted((stride, d) for d, (n, stride) in enumerate(zip(x.shape, x.strides)) if n > 1 and stride > 0)


def _access(x: Tensor, axes: Collection[int]) -> int:
    """Returns the bytes that a thread may read at once of neighbours in memory that belong to neighbouring rows."""
    width = 1
    others: list[int] = []
    for stride, d in _steps(x):
        if stride == width and d not in axes and not others:
            width *= x.shape[d]
        else:
            others.append(stride)
    return x.dtype.itemsize * min(dividing(n, max(1, WIDE_ACCESS // x.dtype.itemsize)) for n in (width, *others))


def parallelism_of(graph: Graph, x: Tensor, axes: tuple[int, ...]) -> Parallelism:
    """Returns how much of reducing a tensor along axes can be done side by side.

    What counts is how the tensor lies that a kernel reads.  Where neighbours are those of other rows, its bytes count,
    too: they are often half as many.
    """
    read = read_for(graph, x)
    found = parallelism(read, axes)
    whole_runs = not found.across and not run(read, axes)
    nbytes = found.bytes_each // read.dtype.itemsize * x.dtype.itemsize
    return replace(found, bytes_each=nbytes) if whole_runs else found


def axes_of_parts(graph: Graph, x: Tensor, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns along which of the axes of a reduction its parts had better be reduced: not along short runs."""
    short = run(read_for(graph, x), axes)
    return tuple(d for d in axes if d not in short)


def read_for(graph: Graph, x: Tensor) -> Tensor:
    """Returns the one tensor as large that pointwise nodes make a tensor of: the one that a kernel of them reads."""
    while (node := graph.producer(x)) is not None and node.kind is Kind.POINTWISE and x not in graph.output_numbers:
        large = {t for t in node.inputs if t.shape == x.shape}
        if len(large) != 1:
            break
        (x,) = large
    return x


def _kept_bytes(target: Target) -> int:
    """Returns the bytes of a row that a cluster keeps."""
    return PORTABLE_BLOCKS * target.arch.shared_bytes_per_block


def keeps_whole(found: Parallelism, target: Target) -> bool:
    """Returns true if a kernel may read its rows once and write as much.

    Along rows it has enough blocks, or each little to do, and a cluster of them keeps a row.  Across rows, and where
    parts of sectors are read, it is estimated to take no longer than a kernel that reduces parts, one that combines
    them, and one that reads all again.
    """
    if not found.across:
        kept = _kept_bytes(target)
        if found.moved <= 1 or found.bytes_each > kept:
            return found.bytes_each <= (kept if found.blocks >= FEW_ROWS else LONG_BYTES)
    return found.cycles(target, LOOKS) + found.cycles_written(target) <= found.cycles_apart(target, 2)

"""How much of a reduction can be done side by side, and what its kernel is estimated to take, whole or in parts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.rows.schedule import PORTABLE_BLOCKS, clusters_at_once, clusters_of
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
    access      bytes that a thread may read at once.
    """

    blocks: int
    bytes_each: int
    across: bool
    access: int = WIDE_ACCESS

    def cycles(self, target: Target, looks: int) -> float:
        """Returns the cycles that a kernel across rows takes which needs each element so often, clusters included."""
        every = self.blocks * self.bytes_each
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

    def cycles_apart(self, target: Target, looks: int) -> float:
        """Returns the cycles that kernels of parts take instead, which are ``looks`` more than one."""
        rate = min(target.bytes_per_cycle, self._column_rate * target.sms)
        return looks * (target.launch_cycles + self.blocks * self.bytes_each / rate)

    @property
    def _column_rate(self) -> float:
        """Bytes that a multiprocessor with many blocks reads in a cycle."""
        return COLUMN_RATE * min(1.0, self.access / WIDE_ACCESS)


def parallelism(x: Tensor, axes: tuple[int, ...]) -> Parallelism:
    """Returns how much of reducing a tensor along axes can be done side by side."""
    length = prod(x.shape[d] for d in axes)
    steps = [(stride, d) for d, (n, stride) in enumerate(zip(x.shape, x.strides)) if n > 1 and stride > 0]
    across = bool(steps) and min(steps)[1] not in axes
    results = x.size // max(length, 1)
    if not across:
        return Parallelism(results, length * x.dtype.itemsize, False)
    width, itemsize = max(1, min(results * x.dtype.itemsize, COLUMN_BYTES)), x.dtype.itemsize
    beside = min(steps)[1]
    others = [stride for stride, d in steps if d != beside]
    access = itemsize * min(dividing(n, max(1, WIDE_ACCESS // itemsize)) for n in (x.shape[beside], *others))
    return Parallelism(results * itemsize // width, length * width, True, access)


def parallelism_of(graph: Graph, x: Tensor, axes: tuple[int, ...]) -> Parallelism:
    """Returns how much of reducing a tensor along axes can be done side by side.

    Across rows the bytes are those that a kernel reads: of what pointwise nodes make a tensor of, often half as many.
    """
    found = parallelism(x, axes)
    return parallelism(_read_for(graph, x), axes) if found.across else found


def _read_for(graph: Graph, x: Tensor) -> Tensor:
    """Returns the one tensor as large that pointwise nodes make a tensor of."""
    while (node := graph.producer(x)) is not None and node.kind is Kind.POINTWISE and x not in graph.output_numbers:
        large = [t for t in node.inputs if t.shape == x.shape]
        if len(large) != 1:
            break
        (x,) = large
    return x


def keeps_whole(found: Parallelism, target: Target) -> bool:
    """Returns true if a kernel may read its rows once and write as much.

    Along rows it has enough blocks, or each little to do, and a cluster of them keeps a row.  Across rows it is
    estimated to take no longer than a kernel that reduces parts, one that combines them, and one that reads all again.
    """
    if not found.across:
        kept = PORTABLE_BLOCKS * target.arch.shared_bytes_per_block
        return found.bytes_each <= (kept if found.blocks >= FEW_ROWS else LONG_BYTES)
    return found.cycles(target, LOOKS) <= found.cycles_apart(target, 2)

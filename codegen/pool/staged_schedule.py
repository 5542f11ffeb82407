"""Schedules of staged pool kernels: how large a block's tile is, and how many windows a thread folds at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from math import hypot, lcm, prod

from codegen.buffers import Edge
from codegen.canonical import canonical
from codegen.declined import Declined
from codegen.expr import Result
from codegen.pool.boxes import Box, StagedSchedule, Tiles
from codegen.pool.schedule import PoolSchedule, is_strip
from codegen.pool.space import Space, index_type, normalize, patches, steps, widest, width
from codegen.pool.steps import THREADS, planes_of_block
from codegen.spec import PoolSpec
from codegen.target import Target
from codegen.windows import Adaptive, Covering, Sliding

#: Bytes that a tile should bring to shared memory, and the most that its boxes may take there: four blocks fit.
TILE_BYTES, MOST_BYTES = (5 << 10, 10 << 10, 20 << 10, 40 << 10), 52 << 10
#: Neighbours that a block takes where no window is along them, in bytes of the widest operand along them.
SIDE_BYTES = (32, 64, 128, 256)
#: Most sums and maxima that a thread keeps, and the registers that it needs besides.
KEPT, OTHER_REGISTERS = 40, 32
#: What a multiprocessor does in a cycle: instructions that count as one thread's, and bytes that its banks give.
INSTRUCTIONS, BANKS_BYTES = 210.0, 128
#: The share of the memory's rate that kernels reach; bytes of a run below which it is less, and by how much.
MEMORY, RUN_BYTES, SHORT_RUN = 0.9, 128, 0.15
#: Cycles of a kernel's beginning, of a block's, and how many blocks alone the last ones take.
BEGIN, LATENCY, ENDS = 3800, 2000, 2.1
#: Windows with an element in common from which on neighbouring threads had better read it from shared memory.
SHARED_WINDOWS = 5
#: Most elements of windows of different sizes that a thread folds alone.
UNEVEN = 64
#: How many schedules are worth trying.
MOST_TRIED = 6
#: How many of them also with blocks that take tiles in turn.
IN_TURN = 2


def schedules(spec: PoolSpec, target: Target) -> Iterator[StagedSchedule]:
    """Yields schedules worth trying, best guess first.  Raises Declined where threads had better fold alone."""
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch.name} has no asynchronous copies")
    space = normalize(spec)
    if not space.windows:
        raise Declined("there are no windows")
    uneven = any(isinstance(w, Adaptive) for _, w in space.windows)
    if uneven and (space.inner or prod(w.count for _, w in space.windows) > UNEVEN or planes_of_block(spec, target)):
        raise Declined("windows of different sizes are large, or not along neighbours in memory")
    if not prod(space.outer) * prod(w.size for _, w in space.windows):
        raise Declined("there is nothing to fold")
    if space.apart:
        raise Declined("no two windows have an element in common")
    if _alone(space):
        raise Declined("threads read what lies under their windows in vectors, and share little of it")
    found = _ranked(canonical(spec), target)
    if not found:
        raise Declined("no tile's elements are neighbours in memory, or fit shared memory")
    for number, s in enumerate(found):
        yield s
        turns = _Work(space, replace(s, blocks=1))
        blocks = target.sms * _resident(turns, target)
        fits = turns.tiles.bytes <= target.arch.shared_bytes_per_block
        if number < IN_TURN and fits and turns.blocks > blocks:
            yield replace(s, blocks=blocks)


@lru_cache(256)
def _ranked(spec: PoolSpec, target: Target) -> list[StagedSchedule]:
    """Returns the best schedules of a canonical spec, the fastest by estimate first: equal layers share them."""
    space = normalize(spec)
    found = sorted((cycles(space, s, target), k, s) for k, s in enumerate(every(space)))
    return [s for _, _, s in found[:MOST_TRIED]]


def _alone(space: Space) -> bool:
    """Tells whether threads had better fold their windows alone: in vectors, and elements are in few windows."""
    itype, last = index_type(space), space.rank - 1
    if space.inner:
        return prod(w.count / (w.stride if isinstance(w, Sliding) else 1) for _, w in space.windows) < SHARED_WINDOWS
    strips = (PoolSchedule(1, itype, 1, cols) for cols in patches(space, 1, (2, 4, 8, 16)))
    straight = all(x.operand.strides[last] == 1 for x in space.program.stores)
    return straight and any(all(is_strip(space, s, n) for n in space.taps) for s in strips)


def every(space: Space) -> Iterator[StagedSchedule]:
    """Yields all schedules that suit a space."""
    vector, itype = widest(space), index_type(space)
    free = [d for d in range(space.rank) if all(d != k for k, _ in space.windows)]
    side = space.outer[free[-1]] if free else 1
    across = [s.operand.strides for s in space.program.stores if free and s.operand.strides[free[-1]] == 1]
    (banded, tall), (last, _) = space.windows[max(0, len(space.windows) - 2)], space.windows[-1]
    unit = space.outer[banded] if isinstance(tall, Adaptive) else tall.unit

    @cache
    def brought(planes: int, band: int) -> int:
        """Returns the bytes of a tile's loads, whatever patches its threads take."""
        tiles = Tiles(space, StagedSchedule(vector, itype, planes, band))
        return sum(box.buffer("").bytes for box in tiles.loads.values())

    for cols in patches(space, 1, range(1, 9)):
        if cols > 1 and not space.inner and cols % 2 == 0 and not isinstance(space.windows[-1][1], Covering):
            continue  # threads side by side would read from the same banks
        for rows in patches(space, 2, (1, 2, 4, 6, 8)):
            if rows * cols * vector * len(space.program.reductions) > KEPT and (rows, cols) != (1, 1):
                continue
            each = lcm(unit, cols if banded == last else rows)
            seen = set()
            for nbytes in TILE_BYTES:
                for planes in _planes(space, side, vector, bool(across)):
                    wanted = StagedSchedule(vector, itype, planes, each, rows, cols)
                    s = _fitting(space, wanted, banded, side, nbytes, brought)
                    if s is not None and s not in seen:
                        seen.add(s)
                        yield s


def _planes(space: Space, side: int, vector: int, across: bool) -> list[int]:
    """Returns how many neighbours of the last dimension without windows a block may take; 0 stands for all that fit."""
    if not space.inner and not across:
        return [0]
    itemsize = min(op.dtype.itemsize for op in space.program.operands if op.strides[space.rank - 1] or across)
    return sorted({min(side, max(vector, nbytes // itemsize)) for nbytes in SIDE_BYTES})


def _fitting(
    space: Space, s: StagedSchedule, banded: int, side: int, nbytes: int, brought: Callable[[int, int], int]
) -> StagedSchedule | None:
    """Returns a schedule with as large a band, and as many planes if those are 0, as bring so many bytes.

    ``brought`` tells the bytes of planes and bands.
    """
    size, planes, band = space.outer[banded], s.planes or 1, s.band
    while band < size and brought(planes, min(size, 2 * band)) <= nbytes:
        band = min(size, 2 * band)
    if band < size:  # as even parts as possible
        parts = -(-size // band)
        band = min(size, -(-size // parts // s.band) * s.band)
    if not s.planes and band >= size:
        while planes < side and brought(2 * planes, band) <= nbytes:
            planes *= 2
    band = -(-band // s.band) * s.band  # a tile beyond the last position is none the larger
    made = Tiles(space, StagedSchedule(s.vector, s.itype, planes, band, s.rows, s.cols))
    if not made.loads or made.bytes > MOST_BYTES:
        return None
    return made.s


class _Work:
    """What a block does: ``bytes`` that it brings and writes, ``busy`` cycles of a multiprocessor without others."""

    def __init__(self, space: Space, s: StagedSchedule) -> None:
        self.space, self.s, self.tiles = space, s, Tiles(space, s)
        n, program = len(space.windows), space.program
        #: positions of a thread along each window, and along each dimension
        self.patch = [s.cols if k == n - 1 else s.rows if k == n - 2 else 1 for k in range(n)]
        along = {d: many for (d, _), many in zip(space.windows, self.patch)}
        self.chunk = [along.get(d, s.vector if d == space.rank - 1 else 1) for d in range(space.rank)]
        self.counts = [-(-size // each) for size, each in zip(self.tiles.size, self.chunk)]
        self.blocks = prod(edge.tiles for edge in self.tiles.edges)
        self.brought = sum(box.buffer("").bytes for box in self.tiles.loads.values())
        self.bytes = sum(box.buffer("").bytes * _short(box) for box in self.tiles.loads.values())
        for n, store in enumerate(program.stores):
            operand, box = store.operand, self.tiles.stores.get(n)
            written = operand.dtype.itemsize * prod(n for n, t in zip(space.outer, operand.strides) if t)
            self.bytes += written / self.blocks * (_short(box) if box is not None else 1.0)
        self.kept = prod(self.patch) * s.vector * len(program.reductions) // (2 if self.tiles.pairs else 1)
        warps = -(-prod(self.counts) // 32)
        under = prod(width(window, many) for (_, window), many in zip(space.windows, self.patch))
        self.busy = max(self._instructions(under) / INSTRUCTIONS, warps * under * self._accesses())

    def _instructions(self, under: int) -> float:
        """Estimates the instructions of all threads; ``under`` is the number of elements under a thread's windows."""
        space, s, program = self.space, self.s, self.space.program
        folded, final = (
            sum(Result(k) in v for k in range(len(program.instructions))) for v in (space.folded, space.final)
        )
        narrow = sum(program.loads[n].dtype.itemsize < 4 for n in space.taps)
        words = sum(max(1, s.vector * program.loads[n].dtype.itemsize // 16) for n in space.taps)
        adds = min(steps(space, self.patch)) if s.rows > 1 else steps(space, self.patch)[0]
        each = 0 if self.tiles.pairs else s.vector * (narrow + folded)
        together = 2 if self.tiles.pairs else 1
        item = 40 + under * (each + 2 + 2 * words) + adds * s.vector * len(program.reductions) / together
        item += prod(self.patch) * (s.vector * (2 + final) + 6)
        boxes = [*self.tiles.loads.values(), *self.tiles.stores.values()]
        moved = sum(Edge(box.runs * box.vectors, THREADS).padded for box in boxes)
        return Edge(prod(self.counts), THREADS).padded * item + 16 * moved

    def _accesses(self) -> int:
        """Returns how many accesses to shared memory a warp needs for one of its reads: a bank gives a word in each."""
        total = 0
        for box in self.tiles.loads.values():
            nbytes = box.operand.dtype.itemsize * self.s.vector
            together = max(1, min(32, BANKS_BYTES // max(4, nbytes)))  # lanes that are served at once
            words: dict[tuple[int, int], set[int]] = {}
            for lane, place in enumerate(self._places(box)):
                begin = place * box.operand.dtype.itemsize
                for word in range(begin // 4, (begin + nbytes - 1) // 4 + 1):
                    words.setdefault((lane // together, word % 32), set()).add(word)
            worst: dict[int, int] = {}
            for (group, _), found in words.items():
                worst[group] = max(worst.get(group, 0), len(found))
            total += sum(worst.values())
        return total

    def _places(self, box: Box) -> list[int]:
        """Returns where the first element under the windows of each thread of a warp lies in shared memory."""
        found = [0]
        for d in reversed(range(self.space.rank)):
            along = []
            for at in range(min(self.counts[d], -(-32 // len(found)))):
                position = at * self.chunk[d]
                offset = position * box.steps.get(d, 0)
                for k, (dim, window) in enumerate(self.space.windows):
                    if dim == d:
                        if isinstance(window, Adaptive):
                            source = position * window.size // window.positions
                        else:
                            source = position * window.fresh(window.unit) // window.unit
                        offset += source * box.steps.get(self.space.rank + k, 0)
                along.append(offset)
            found = [offset + inner for offset in along for inner in found]
        return found[:32]


def _short(box: Box) -> float:
    """Returns how much longer a box takes because of its runs: short ones use only a part of each access to memory."""
    return 1 + SHORT_RUN * max(0.0, RUN_BYTES / (box.length * box.operand.dtype.itemsize) - 1)


def cost(spec: PoolSpec, s: StagedSchedule, target: Target) -> float:
    """Returns the estimated cycles of a schedule.  Raises Declined for tiles that bring nothing, or do not fit."""
    space = normalize(spec)
    tiles = Tiles(space, s)
    if not tiles.loads or tiles.bytes > target.arch.shared_bytes_per_block:
        raise Declined("no tile's elements are neighbours in memory, or fit shared memory")
    return cycles(space, s, target)


def cycles(space: Space, s: StagedSchedule, target: Target) -> float:
    """Estimates the cycles that a kernel takes, fitted to measurements."""
    work = _Work(space, s)
    resident = _resident(work, target)
    blocks = max(1.0, work.blocks / target.sms)
    memory = work.bytes / (MEMORY * target.bytes_per_cycle / target.sms)
    alone = LATENCY + work.busy + work.brought / 64
    return BEGIN + blocks * max(hypot(memory, work.busy), alone / min(resident, blocks)) + ENDS * alone


def _resident(work: _Work, target: Target) -> int:
    """Returns how many blocks a multiprocessor has room for, by an estimate of a thread's registers."""
    registers = -(-(work.kept + OTHER_REGISTERS) // 8) * 8
    shared = target.arch.shared_bytes_per_sm // (work.tiles.bytes + 1024)
    return max(1, min(shared, target.arch.blocks_per_sm(THREADS, registers)))

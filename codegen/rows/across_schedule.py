"""Schedules of rows kernels whose neighbours in memory belong to neighbouring rows: strips of rows, each of which a
block reads, or the blocks of a cluster if there are few strips.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from codegen.arch import SECTOR_BYTES
from codegen.dtypes import SIZE_OF
from codegen.records import once
from codegen.rows.schedule import (
    MOST_REGISTERS,
    MOST_ROWS,
    OTHER_REGISTERS,
    SEGMENT_BYTES,
    SLACK_REGISTERS,
    RowsSchedule,
    clusters_at_once,
    clusters_of,
    power,
)
from codegen.rows.space import Space, widest
from codegen.rows.stages import Stages
from codegen.target import Target

#: Shared memory that threads exchange results in, at most, and accesses of a thread that only reads to have in flight.
EXCHANGE_BYTES, IN_FLIGHT = 40 * 1024, 4
#: Cycles until memory answers, that the threads of a block take to combine what they have, those of a cluster's blocks
#: besides, and until these have begun together.
LATENCY, COMBINE, COMBINE_BLOCKS, BEGIN = 800.0, 400.0, 1000.0, 1000.0
#: Threads of a block, where every multiprocessor has enough such blocks: each takes a while to begin.
BLOCK_THREADS, ENOUGH_BLOCKS = 256, 8
#: By how much reading single sectors of large tensors takes longer than reading long runs.
SHORT_RUN = 0.5
#: Sectors of which warps write a part that the L2 cache takes in a cycle, for each multiprocessor.
PARTS_WRITTEN = 0.3
#: Elements of a thread's part of short rows.
SHORT_ROW = 8
#: A schedule is preferred to the one that is usual, or a cluster is used, if it is estimated to take at most this share
#: of the time.
CLEARLY = 0.75


@dataclass(frozen=True)
class _Across:
    """What schedules of a space are made of: neighbouring rows of a thread, and bytes of the widest element."""

    space: Space
    target: Target
    vector: int
    itemsize: int

    @once
    def stages(self) -> Stages:
        return Stages(self.space)

    @once
    def words(self) -> int:
        """Registers of a thread for each place of a row, if it keeps what more than one loop needs."""
        loads = self.space.program.loads
        kept = self.stages.kept(early=True)
        return sum(max(1, loads[n].dtype.itemsize // 4) for n in kept) * self.vector

    @once
    def sides(self) -> list[int]:
        """Numbers of neighbouring threads that may have rows of their own."""
        last = self.space.outer[-1]
        return [side for side in (32, 16, 8, 4, 2, 1) if side * self.vector <= power(last)] or [1]

    @property
    def writes(self) -> bool:
        """Whether ptxas, left alone, may spill a few words of the loop to fit one more block."""
        program = self.space.program
        return any(self.space.varies(store.operand) for store in program.stores) or len(program.reductions) > 1

    @once
    def turned(self) -> bool:
        """Whether what is written lies along rows, so that neighbouring threads write far apart."""
        beside = len(self.space.outer) - 1
        written = [x.operand.strides for x in self.space.program.stores if self.space.varies(x.operand)]
        return bool(written) and all(x[-1] == 1 and x[beside] != 1 for x in written)

    def scatters(self, side: int) -> bool:
        """Tells whether a warp, with so many threads side by side, writes less than sectors of what is turned."""
        return 32 // side * self.itemsize < SECTOR_BYTES

    def scattered(self, side: int) -> float:
        """Returns the cycles that writing a byte takes where warps write less than sectors, with so many threads side
        by side; 0 where they do not.
        """
        if not (self.turned and self.scatters(side)):
            return 0.0
        return 1 / (max(1, 32 // side) * self.itemsize * PARTS_WRITTEN * self.target.sms)

    def blocks(self, side: int) -> int:
        return -(-prod(self.space.outer) // (side * self.vector))

    def exchanged(self, schedule: RowsSchedule) -> int:
        """Returns bytes of shared memory through which threads combine results."""
        every = self.space.program.reductions
        of_blocks = sum(SIZE_OF[r.ctype] for r in every) * schedule.cluster * schedule.rows
        own = sum({r.ctype: SIZE_OF[r.ctype] for r in every}.values()) * schedule.exchanged
        return own + (of_blocks if schedule.cluster > 1 else 0)

    def registers(self, schedule: RowsSchedule) -> RowsSchedule | None:
        """Returns the schedule with rows in registers; None if they do not fit or are read once anyway."""
        unroll = -(-self.space.length // (schedule.lanes * schedule.cluster))
        needed = 2 * OTHER_REGISTERS + unroll * self.words
        fits = needed <= min(MOST_REGISTERS, self.target.arch.registers_per_sm // schedule.threads)
        if not unroll or not self.words or not fits:
            return None
        schedule = replace(schedule, form="registers")
        if schedule.cluster > 1:  # ptxas would spill a few words to fit one more block
            resident = self.target.arch.blocks_per_sm(schedule.threads, needed + SLACK_REGISTERS)
            schedule = replace(schedule, resident=max(1, resident))
        return schedule

    def cycles(self, schedule: RowsSchedule) -> float:
        """Returns the cycles that a schedule is estimated to take: a block's serial walk, and all of memory's work."""
        s, space, target = schedule, self.space, self.target
        loads = sum(op.dtype.itemsize for op in space.program.loads if space.varies(op))
        stores = sum(x.operand.dtype.itemsize for x in space.program.stores if space.varies(x.operand))
        blocks, loops = -(-prod(space.outer) // s.rows) * s.cluster, self.stages.loops
        again = loads * (loops - 1 if s.form == "memory" else 0)
        turns = -(-blocks // (s.cluster * clusters_at_once(target, s.cluster)))
        elements = -(-space.length // s.cluster) * s.rows
        depth = IN_FLIGHT if s.form == "memory" else -(-space.length // (s.lanes * s.cluster))
        flight = s.threads * s.vector * loads * depth * min(turns, 2)
        width = s.rows * self.itemsize
        rate = min(target.sm_rate * width / (width + SECTOR_BYTES), max(flight, 1) / LATENCY)
        walk = turns * elements * (loads + stores + again) / rate
        every = prod(space.outer) * space.length
        large = every * loads > target.l2_share(0.5)
        memory = every * (loads + stores + (again if large else 0)) / (target.bytes_per_cycle * target.memory_share)
        if large:  # when the neighbours of what a block reads are wanted, the L2 cache has them no more
            memory *= 1 + SHORT_RUN * SECTOR_BYTES / width
        written = self.scattered(s.rows // s.vector) * every * stores
        together = COMBINE + (COMBINE_BLOCKS if s.cluster > 1 else 0)
        waits = loops * LATENCY + len(space.program.reductions) * together + (BEGIN if s.cluster > 1 else 0)
        return max(walk, memory, written) + (waits * turns if s.cluster > 1 else waits)


def schedules(space: Space, target: Target, itype: str) -> Iterator[RowsSchedule]:
    """Returns schedules worth trying, best guess first."""
    itemsize = max(op.dtype.itemsize for op in space.program.operands if space.varies(op))
    of = _Across(space, target, min(MOST_ROWS, widest(space, len(space.outer) - 1)), itemsize)
    plain = list(_plain(of, itype))
    if of.turned:
        plain.sort(key=lambda s: (of.scatters(s.rows // s.vector), of.cycles(s)))
    elif of.words and plain and of.cycles(best := min(plain, key=of.cycles)) < CLEARLY * of.cycles(plain[0]):
        plain = [best, *(schedule for schedule in plain if schedule is not best)]
    found = sorted(_clustered(of, itype), key=of.cycles)
    if found and (not plain or of.cycles(found[0]) < CLEARLY * of.cycles(plain[0])):
        return iter((*found[:3], *plain))
    return iter((*plain, *found[:2]))


def _clustered(of: _Across, itype: str) -> Iterator[RowsSchedule]:
    """Yields schedules whose strips have a cluster each."""
    if of.space.chunk is not None:
        return
    for cluster in clusters_of(of.target)[1:]:
        for side in of.sides:
            for threads in (256, 512, 1024):
                lanes = threads // side
                wide = side * of.vector * of.itemsize >= SECTOR_BYTES or side == of.sides[0]
                schedule = RowsSchedule("memory", of.vector, lanes, side * of.vector, itype, True, cluster)
                if not wide or lanes * cluster > of.space.length or of.exchanged(schedule) > EXCHANGE_BYTES:
                    continue
                kept = of.registers(schedule)
                resident = of.target.arch.blocks_per_sm(threads, 2 * OTHER_REGISTERS)
                yield kept if kept is not None else replace(schedule, resident=min(2, max(1, resident)))


def _plain(of: _Across, itype: str) -> Iterator[RowsSchedule]:
    """Yields schedules whose strips have a block each, best guess first."""
    space, target, vector, sides = of.space, of.target, of.vector, of.sides
    enough = 2 * target.sms
    #: registers of a thread that reads rows again: a word for each of its columns of every operand and sum
    columns = sum(any(op.strides[: len(space.outer)]) for op in space.program.loads) + len(space.program.reductions)
    again = OTHER_REGISTERS + vector * columns
    each = 2 if of.writes or of.words else IN_FLIGHT
    wide = [side for side in sides if SEGMENT_BYTES <= side * vector * of.itemsize <= 2 * SEGMENT_BYTES] or sides[:1]
    best = next((side for side in wide if of.blocks(side) >= enough), wide[-1])
    if of.blocks(best) < enough // 4:
        narrow = [side for side in sides if side * vector * of.itemsize >= SECTOR_BYTES] or sides[:1]
        best = min(reversed(narrow), key=lambda side: of.cycles(_full(of, side, each)))
    order = [best, *(side for side in sides if side != best and side * vector * of.itemsize >= SECTOR_BYTES)]
    if of.turned:
        order.sort(key=lambda side: (of.scatters(side), -side))
    for side in order[:3]:
        # An SM with few blocks to work on needs large ones, and has all registers for them.
        few = of.blocks(side) < 1.5 * target.sms
        bounded = of.writes or of.words > 0 or few
        memory: list[RowsSchedule] = []
        # Parts that are looked at twice, and short rows, are better in small blocks, which do not wait for each other.
        short = of.words and (space.chunk is not None or space.length * side <= 256 * SHORT_ROW)
        usual = (256, 512, 1024) if short else (512, 256, 1024)
        for threads in (1024, 512, 256) if few else usual:
            wanted = power(-(-space.length // each))
            beside = _widened(of, side, wanted)
            lanes = max(32 // beside, min(threads // beside, wanted))
            schedule = RowsSchedule("memory", vector, lanes, beside * vector, itype, across=True)
            if of.exchanged(schedule) > EXCHANGE_BYTES:
                continue
            kept = of.registers(schedule)
            if kept is not None:
                yield kept
            if again * schedule.threads > target.arch.registers_per_sm and threads != 256:
                continue
            resident = target.arch.blocks_per_sm(schedule.threads, max(2 * OTHER_REGISTERS, again)) if bounded else 0
            memory.append(replace(schedule, resident=resident))
        if bounded and not few:  # as many threads as possible, which read rows again
            memory.sort(key=lambda schedule: -schedule.threads * schedule.resident)
        yield from memory


def _widened(of: _Across, side: int, lanes: int) -> int:
    """Returns as many threads side by side as blocks need that have few, because rows are short."""
    while 2 * side * lanes <= BLOCK_THREADS and of.blocks(2 * side) >= ENOUGH_BLOCKS * of.target.sms:
        side *= 2
    return side


def _full(of: _Across, side: int, each: int) -> RowsSchedule:
    """Returns the schedule of so many threads side by side with as many lanes as a block has, for ``each`` elements."""
    lanes = max(32 // side, min(1024 // side, power(-(-of.space.length // each))))
    schedule = RowsSchedule("memory", of.vector, lanes, side * of.vector, "", across=True)
    return of.registers(schedule) or schedule

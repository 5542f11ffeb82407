"""Schedules of the rows family: how many threads share a row, how wide they read, and where the row stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2, prod

from codegen.arch import REGISTERS_PER_SM
from codegen.declined import Declined
from codegen.expr import Load, Operand
from codegen.family import Schedule
from codegen.records import changed
from codegen.rows.space import Space, segments_of_block, widest
from codegen.rows.stages import Stages, stages_along
from codegen.sizes import most
from codegen.target import Target

MAX_THREADS = 1024
#: Elements of a row that one thread best keeps in registers, each in 32 bits as the compiler may hold it: enough for
#: several accesses in flight, few enough for many threads.
KEPT_WORDS = 32
#: Threads that share a row in shared memory.
SHARED_THREADS = 512
#: Registers that a thread needs besides, further ones that keep the compiler from spilling, and the most in all.
OTHER_REGISTERS, SLACK_REGISTERS, MOST_REGISTERS = 30, 14, 128
#: Fewest bytes of a row that are worth a block of a cluster.
LEAST_CLUSTER_BYTES = 8 * 1024
#: Schedules estimated to be worse than the best by this factor are not tried, nor are more than this number.
PROMISING, MOST_TRIED = 1.4, 8
#: Threads of a block whose rows are too short for all of them.
SHORT_THREADS = 128
#: Threads that keep a multiprocessor busy.
BUSY_THREADS = 1024
#: Blocks of a cluster that every GPU with clusters can hold; more of them leave some of its SMs idle.
PORTABLE_BLOCKS = 8
#: Shared memory that is left for what the threads exchange.
EXCHANGE_BYTES = 8 * 1024
#: Bytes in flight on an SM that keep the memory busy, and those that an SM could read while a kernel begins and ends.
FLIGHT_BYTES, BEGINNING_BYTES = 64 * 1024, 192 * 1024
#: Microseconds from one block to the next that an SM begins.
BEGIN_US = 0.08
#: Accesses of a thread to what all rows share (a norm's weights) that are in flight together, and the cycles that each
#: further one takes: such a thread has no registers left to read ahead.
WEIGHTS_IN_FLIGHT, WEIGHT_WAIT = 40, 200.0
#: Across rows: the fewest neighbouring rows that are worth it, and the most rows of a thread.
LEAST_SIDE, MOST_ROWS = 8, 8
#: Bytes that neighbouring threads should read together.
SEGMENT_BYTES = 128


@dataclass(frozen=True)
class RowsSchedule(Schedule):
    """How a rows kernel is mapped to threads.

    form     where a row is between its passes: "registers", "shared" (dynamic shared memory), or "memory" (read again).
    vector   neighbouring elements that a thread reads at once: of a row, or, across, of neighbouring rows.
    lanes    threads of a row in a block, a power of two.
    rows     rows of a block, a power of two.
    itype    C type of positions and offsets.
    across   whether neighbouring threads are in neighbouring rows, not at neighbouring elements of one.
    cluster  blocks of a row, a power of two.
    resident blocks per SM that the compiler must leave registers for; 0: it decides.
    stages   of a walk, how many rows (or groups of ``rows`` rows) are in shared memory or in flight to it.
    evict_last  whether the L2 cache evicts what is read once after what is written (`codegen.l2_policy`).
    """

    form: str
    vector: int
    lanes: int
    rows: int
    itype: str
    across: bool = False
    cluster: int = 1
    resident: int = 0
    stages: int = 1
    evict_last: bool = False

    @property
    def threads(self) -> int:
        return self.lanes * self.rows // (self.vector if self.across else 1)

    @property
    def exchanged(self) -> int:
        """Elements of an array in which warps combine reductions of rows (across), or of columns (in a walk)."""
        side = self.rows // self.vector if self.across else self.lanes
        return self.threads // max(32, side) * side * self.vector


def reads_across(space: Space) -> bool:
    """Tells whether most bytes have their neighbours in the next row, not in the same, and there are enough rows.

    Where as many have either, what is read decides: stores of part of a sector meet in the L2 cache.
    """
    if space.program.begins:
        return False
    dim, loads = len(space.outer) - 1, len(space.program.loads)
    along, beside = [0, 0], [0, 0]  # bytes in all, and of them those that are read
    for n, operand in enumerate(space.program.operands):
        if space.varies(operand):
            sizes = zip((*space.outer, *space.row), operand.strides)
            nbytes = operand.dtype.itemsize * prod(size for size, stride in sizes if stride)
            for found, meets in (
                (along, operand.strides[-1] == 1 and space.row[-1] > 1),
                (beside, operand.strides[dim] == 1 and space.outer[-1] >= LEAST_SIDE),
            ):
                found[0] += nbytes * meets
                found[1] += nbytes * meets * (n < loads)
    return beside > along


def elements_of_thread(space: Space, schedule: RowsSchedule) -> int:
    """Returns how many elements of a row, or across of all its rows, a thread has; where rows vary, of the longest."""
    step = schedule.lanes * schedule.cluster * (1 if schedule.across else schedule.vector)
    return most(-(-space.length // step)) * schedule.vector


def check_registers(space: Space, schedule: RowsSchedule) -> None:
    """Raises Declined if threads, as many as are to be resident, have no registers for what they keep of the longest
    rows.
    """
    if schedule.form != "registers":
        return
    kept = [space.program.loads[n] for n in Stages(space).kept(early=schedule.across)]
    words = sum(max(1, op.dtype.itemsize // 4) for op in kept)
    registers = OTHER_REGISTERS + elements_of_thread(space, schedule) * words
    if registers > min(MOST_REGISTERS, REGISTERS_PER_SM // (schedule.threads * max(schedule.resident, 1))):
        raise Declined(f"the longest rows do not fit the registers of {schedule.lanes} threads")


def schedules(space: Space, target: Target, itype: str) -> Iterator[RowsSchedule]:
    """Returns schedules whose threads read along rows, or segments of them, best guess first."""
    return (_along if space.segments is None else _in_segments)(space, target, itype)


def _along(space: Space, target: Target, itype: str) -> Iterator[RowsSchedule]:
    program = space.program
    kept = [program.loads[n] for n in Stages(space).kept()]
    read = kept or [op for op in program.loads if space.varies(op)]
    vector = widest(space, len(space.outer) + len(space.row) - 1)
    shared = [program.loads[n] for n in stages_along(space, "shared", vector).kept("shared")]
    clusters = clusters_of(target) if space.chunk is None else [1]
    count = prod(space.outer)
    once = [op for op in program.loads if space.varies(op) and op not in read and space.differs(op)]
    found = list(_in_registers(space, target, clusters, vector, read, once)) if space.length else []
    lanes = min(MAX_THREADS, power(max(1, -(-space.length // vector))))
    if shared and space.chunk is None and lanes >= 128:
        found += _in_shared(space, target, vector, min(SHARED_THREADS, lanes), shared)
    waits = _waits(space, target, vector)
    found = sorted(((bad * waits(schedule), schedule) for bad, schedule in found), key=lambda f: f[0])
    promising = [schedule for bad, schedule in found if bad < found[0][0] * PROMISING]
    # Rows that are read once from memory are worth neither a cluster nor shared memory, if there are enough of them;
    # sooner so if they would be looked at more often there.
    looks = Stages(space).loops
    one_look = stages_along(space, "memory", vector).loops == 1 and count >= target.sms * (1 if looks > 1 else 2)
    elsewhere = bool(promising) and (promising[0].cluster > 1 or promising[0].form == "shared")
    streams = one_look and elsewhere and lanes >= SHARED_THREADS
    if streams:
        yield _shaped("memory", vector, SHARED_THREADS, itype)
    yield from (changed(schedule, itype=itype) for schedule in promising[:MOST_TRIED])
    for threads in (512, 1024, 256):
        if threads <= lanes and (threads == 512 or not promising) and not (streams and threads == SHARED_THREADS):
            yield _shaped("memory", vector, threads, itype)
    if lanes < 512:
        yield _shaped("memory", vector, lanes, itype)


def _in_registers(
    space: Space, target: Target, clusters: Sequence[int], vector: int, read: Sequence[Operand], once: Sequence[Operand]
) -> Iterator[tuple[float, RowsSchedule]]:
    """Yields schedules with rows in registers, each after its badness; ``once`` is in flight with ``read``, kept."""
    count, vectors = prod(space.outer), max(1, -(-space.length // vector))
    itemsize = sum(op.dtype.itemsize for op in read) or 4
    words = sum(max(1, op.dtype.itemsize // 4) for op in (*read, *once)) or 1
    for cluster in clusters:
        for exponent in range(11):
            lanes = 1 << exponent
            unroll = -(-vectors // (lanes * cluster))
            registers = OTHER_REGISTERS + unroll * vector * words
            nbytes = unroll * vector * itemsize
            schedule = changed(_shaped("registers", vector, lanes, ""), cluster=cluster)
            if registers > MOST_REGISTERS or registers * schedule.threads > target.arch.registers_per_sm:
                continue
            if lanes > 1 and lanes * cluster >= 2 * vectors:
                continue
            if cluster > 1 and (lanes < 128 or nbytes * lanes < LEAST_CLUSTER_BYTES):
                continue
            resident = target.arch.blocks_per_sm(schedule.threads, registers)
            if vectors % lanes and schedule.rows > 1:
                # Left alone, ptxas may spill the last few words of a short row to fit one more block.
                schedule = changed(
                    schedule, resident=target.arch.blocks_per_sm(schedule.threads, registers + SLACK_REGISTERS)
                )
            bad = _badness(schedule, target, count, resident, itemsize, schedule.threads * nbytes)
            bad *= 1 + 0.01 * abs(log2(unroll * vector * words / KEPT_WORDS))
            # All blocks of a cluster wait for their loads into registers before one goes on.
            bad *= 1.06 if cluster > 1 else 1.0
            # A pass whose last lanes have nothing to do costs its instructions, not its bytes.
            bad *= 1 + 0.1 * (unroll * lanes * cluster / vectors - 1)
            # Lanes of a warp that read few bytes side by side use only a part of each memory access.
            width = min(op.dtype.itemsize for op in read) if read else 4
            bad *= 1 + 0.1 * max(0.0, SEGMENT_BYTES / (min(lanes, vectors) * vector * width) - 1)
            # Where all blocks run at once, more threads hide the latency of memory and of what they compute.
            blocks = -(-count // schedule.rows) * cluster
            if 0 < blocks <= resident * target.sms:
                busy = schedule.threads * -(-blocks // target.sms)
                bad *= 1 + 0.05 * max(0.0, log2(BUSY_THREADS / busy))
            yield bad * (1 + _alone(target, schedule, count) * unroll), schedule


def _in_shared(
    space: Space, target: Target, vector: int, lanes: int, kept: Sequence[Operand]
) -> Iterator[tuple[float, RowsSchedule]]:
    """Yields schedules that keep rows in shared memory, several on an SM or as much of one as fits, after badness."""
    itemsize = sum(op.dtype.itemsize for op in kept)
    length, count = space.length, prod(space.outer)
    per_sm = target.arch.shared_bytes_per_sm
    for room in (per_sm // 4, per_sm // 2 - 1024, target.arch.shared_bytes_per_block):
        cluster = next((c for c in clusters_of(target) if itemsize * length <= c * (room - EXCHANGE_BYTES)), None)
        if cluster is not None and most(length) > vector * lanes * cluster:  # else registers keep all of it
            schedule = RowsSchedule("shared", vector, lanes, 1, "", cluster=cluster)
            nbytes = -(-itemsize * length // cluster)
            resident = max(1, target.arch.blocks_per_sm(lanes, OTHER_REGISTERS, nbytes + EXCHANGE_BYTES))
            bad = _badness(schedule, target, count, resident, itemsize, nbytes)
            alone = _alone(target, schedule, count)
            bad *= 1 + alone * -(-length // (vector * lanes * cluster))
            # Every pass reads the row again, if only from shared memory; a block alone on its SM hides no latency, and
            # registers take all of a row at once.
            yield (1.2 if alone else 1.08 if resident == 1 else 1.03) * bad, schedule


def _in_segments(space: Space, target: Target, itype: str) -> Iterator[RowsSchedule]:
    """Yields schedules for rows whose segments are each reduced by a warp."""
    assert space.segments is not None
    lead = len(space.row) - space.segments.dims
    segments, size = prod(space.row[:lead]), prod(space.row[lead:])
    vector = widest(space, len(space.outer) + len(space.row) - 1)
    kept = [space.program.loads[n] for n in Stages(space).kept("shared")]
    itemsize = sum(op.dtype.itemsize for op in kept) or 4
    count = prod(space.outer)
    found = []
    for lanes in (512, 256, 128, 64, 1024):
        for cluster in clusters_of(target):
            warps = lanes // 32
            if warps * cluster >= 2 * segments and lanes * cluster > 64:
                continue
            own = segments_of_block(segments, lanes, cluster)
            nbytes = own * size * itemsize
            schedule = RowsSchedule("shared", vector, lanes, 1, itype, cluster=cluster)
            if not kept or nbytes > target.arch.shared_bytes_per_block - EXCHANGE_BYTES:
                continue
            resident = max(1, target.arch.blocks_per_sm(lanes, OTHER_REGISTERS, nbytes + EXCHANGE_BYTES))
            bad = _badness(schedule, target, count, resident, itemsize, nbytes) * own * cluster / segments
            found.append((bad * (1 + 0.1 * max(0.0, log2(512 / (lanes * resident)))), schedule))
    found.sort(key=lambda f: f[0])
    yield from [schedule for bad, schedule in found if bad < found[0][0] * PROMISING][:MOST_TRIED]
    lanes = 32 * min(16, max(2, power(segments)))
    yield RowsSchedule("memory", vector, lanes, 1, itype)


def _alone(target: Target, schedule: RowsSchedule, count: int) -> float:
    """Returns how much each access of a thread lengthens a kernel in which no other row hides its latency."""
    return 0.03 if count <= schedule.rows * target.sms else 0.0


def _waits(space: Space, target: Target, vector: int) -> Callable[[RowsSchedule], float]:
    """Returns how much longer a schedule takes because its last threads wait, access by access, for what all rows share
    and they read behind a reduction.
    """
    program, (first, *others) = space.program, Stages(space).needed
    late = [op for n, op in enumerate(program.loads) if any(Load(n) in needed - first for needed in others)]
    each = sum(-(-vector * op.dtype.itemsize // 16) for op in late if not space.differs(op))
    own = sum(op.dtype.itemsize for op in program.operands if space.varies(op) and space.differs(op))
    moved = prod(space.outer) * space.length * own / target.bytes_per_cycle

    def longer(schedule: RowsSchedule) -> float:
        accesses = each * -(-space.length // (vector * schedule.lanes * schedule.cluster))
        return 1 + WEIGHT_WAIT * max(0, accesses - WEIGHTS_IN_FLIGHT) / max(moved, target.launch_cycles)

    return longer


def _badness(schedule: RowsSchedule, target: Target, count: int, resident: int, itemsize: int, nbytes: int) -> float:
    """Returns a guess at how much longer than a copy a schedule takes, fitted to measurements.

    count     rows in all.
    resident  blocks that an SM has room for.
    itemsize  bytes of an element, over all tensors that are read.
    nbytes    that a block reads.

    While a block waits for its row's last element, or for other blocks of its cluster, further blocks should load.
    Elements of two bytes take as much computation as others, but are copied faster.  The exchange between the blocks of
    a cluster takes longer the more there are, and a cluster begins and ends as one.
    """
    blocks = -(-count // schedule.rows) * schedule.cluster
    share = max(1.0, nbytes * blocks / target.sms)  # per SM, if all had as much to do
    idle = (BEGINNING_BYTES + nbytes) / (BEGINNING_BYTES + min(nbytes, share))
    few = 1 + 0.4 / itemsize / resident**2
    starved = 1 + max(0.0, 1 - resident * nbytes / min(FLIGHT_BYTES, share)) * 0.5
    exchange = 1 + 0.01 * (schedule.lanes // 32).bit_length()
    together = 1 + 0.095 * (schedule.cluster.bit_length() - 1) + 0.5 * (schedule.cluster > PORTABLE_BLOCKS)
    # An SM begins one block after the other, which takes longer than the work of very small ones.
    begun = BEGIN_US * blocks / target.sms
    moved = nbytes * blocks / target.memory_rate
    return idle * few * starved * exchange * together * max(1.0, begun / max(moved, 1.0))


def clusters_of(target: Target) -> list[int]:
    """Returns the numbers of blocks that may share a row."""
    if not target.arch.has_clusters:
        return [1]
    return [1, 2, 4, 8, 16] if target.arch.major in (9, 10) else [1, 2, 4, 8]


def clusters_at_once(target: Target, blocks: int) -> int:
    """Returns how many clusters of so many blocks run at a time, if each multiprocessor has one block."""
    known = min(blocks, PORTABLE_BLOCKS)
    return max(1, target.clusters_of(known) * known // blocks)


def _shaped(form: str, vector: int, lanes: int, itype: str) -> RowsSchedule:
    rows = 1 if lanes > 32 else SHORT_THREADS // lanes
    return RowsSchedule(form, vector, lanes, rows, itype)


def power(number: int) -> int:
    """Returns the smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()

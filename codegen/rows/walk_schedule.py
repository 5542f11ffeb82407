"""Schedules of rows kernels that combine columns: how many threads walk a row, and how many rows are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2, prod

from codegen.arch import DEFAULT_SHARED_BYTES_PER_BLOCK, MAX_REGISTERS_PER_THREAD
from codegen.dtypes import SIZE_OF
from codegen.iteration import index_type
from codegen.rows.schedule import MAX_THREADS, MOST_TRIED, RowsSchedule
from codegen.rows.space import Space, normalize, repeated, streamed, widest
from codegen.rows.stages import Stages
from codegen.spec import RowsSpec
from codegen.target import Target

#: Registers that a thread needs besides what it keeps; the most elements of a row that it should have; the most words
#: of columns' reductions; and the best number of elements: with fewer, little hides the barriers.
OTHER_REGISTERS, MOST_ELEMENTS, MOST_SUM_WORDS, BEST_ELEMENTS = 40, 32, 48, 16
#: Threads of blocks whose rows are too short for all of them, and threads that keep an SM busy.
SHORT_THREADS, BUSY_THREADS = (512, 256, 1024), 512
#: Bytes in flight to an SM that keep the memory busy, and the best number: more interfere with what is written.
FLIGHT_BYTES, BEST_FLIGHT_BYTES = 32 * 1024, 64 * 1024
#: Bytes that a block should read from one barrier to the next, so that barriers take less time than reading.
STEP_BYTES = 32 * 1024
#: Most groups of rows that have a barrier each, and most rows in shared memory.
MOST_BARRIERS = 8
MOST_STAGES = 16


def schedules(spec: RowsSpec, target: Target) -> Iterator[RowsSchedule]:
    """Yields schedules worth trying, best guess first."""
    space = normalize(spec)
    itype = index_type(*space.bounds())
    vector = widest(space, len(space.outer) + len(space.row) - 1)
    while vector > 1 and not _aligned(space, vector):
        vector //= 2
    found = sorted(_every(space, target, vector, itype), key=lambda f: f[0])
    yield from [schedule for _, schedule in found][:MOST_TRIED]


def _aligned(space: Space, vector: int) -> bool:
    """Tells whether parts of columns begin where vectors may."""
    assert space.walk is not None
    sizes = ((space.program.stores[n].operand.dtype.itemsize, step) for n, step in space.walk.sums)
    return all(step * size % min(16, vector * size) == 0 for size, step in sizes)


def sum_words(space: Space) -> int:
    """Returns how many 32-bit registers the reductions of one column take."""
    return sum((SIZE_OF[space.program.reductions[k].ctype] + 3) // 4 for k in set(space.sums.values()))


def _every(space: Space, target: Target, vector: int, itype: str) -> Iterator[tuple[float, RowsSchedule]]:
    """Yields schedules, each after its estimated badness."""
    program, walk = space.program, space.walk
    assert walk is not None
    vectors = max(1, -(-space.length // vector))
    walked = max(1, prod(space.outer[len(space.outer) - walk.dims :]))
    blocks = prod(space.outer) // walked * -(-walked // walk.chunk)
    wanted = max(1, -(-blocks // target.sms))  # blocks per SM
    fetched = [program.loads[n].dtype.itemsize for n in streamed(space)]
    kept = [n for n in Stages(space).kept() if n in streamed(space)]
    read, same = (
        sum(max(4, program.loads[n].dtype.itemsize * vector) for n in which)
        for which in (streamed(space), repeated(space))
    )
    reductions = len(program.reductions) - len(set(space.sums.values()))
    exchanged = max((SIZE_OF[program.reductions[k].ctype] for k in space.sums.values()), default=4)
    copied = fetched and all(vector * size in (4, 8) or vector * size % 16 == 0 for size in fetched)
    straight = all(program.loads[n].strides[-1] == 1 for n in streamed(space))
    most = min(MOST_ELEMENTS, MOST_SUM_WORDS // sum_words(space))
    for power in range(11):
        lanes = 1 << power
        unroll = -(-vectors // lanes)
        if (lanes >= 2 * vectors and lanes > 1) or (unroll * vector > most and lanes < MAX_THREADS):
            continue
        for threads in SHORT_THREADS if lanes <= 32 else (lanes, *(n for n in SHORT_THREADS if n > lanes)):
            rows = threads // lanes
            if lanes > 32 and rows > MOST_BARRIERS:
                continue
            steps = -(-min(walk.chunk, walked) // rows)
            registers = OTHER_REGISTERS + unroll * (vector * sum_words(space) + same // 4)
            waste = unroll * lanes / vectors * steps * rows / min(walk.chunk, walked)
            schedule = RowsSchedule("", vector, lanes, rows, itype)
            static = rows > 1 and schedule.exchanged * exchanged
            if static > DEFAULT_SHARED_BYTES_PER_BLOCK:
                continue
            for form, ring in (("registers", True), ("shared", True), ("registers", False), ("memory", False)):
                # A row that is read from memory is in registers for a while, whether it stays there or not.
                own = registers + (unroll * read // 4 if form != "shared" else 0)
                fit = target.arch.registers_per_sm // threads // max(8, -(-own // 8) * 8)
                resident = max(1, min(wanted, fit, target.arch.max_threads_per_sm // threads))
                stages, flight = 1, threads * unroll * vector * sum(fetched)
                if ring:
                    nbytes = max(1, rows * space.length * sum(fetched))
                    room = min(target.arch.shared_bytes_per_block, target.arch.shared_bytes_per_sm // resident - 1024)
                    room -= static + 1024
                    ahead = max(1, BEST_FLIGHT_BYTES // (resident * nbytes))
                    stages = min(1 + ahead, MOST_STAGES, 1 + steps, room // nbytes)
                    if stages < 2 or not (copied and straight):
                        continue
                    flight = (stages - 1) * nbytes
                if form == "registers" and not kept:
                    continue
                limit = min(MAX_REGISTERS_PER_THREAD, target.arch.registers_per_sm // (threads * resident))
                busy = log2(threads * resident / BUSY_THREADS)
                bad = waste * (1 + 0.2 * max(0.0, -busy) + 0.03 * max(0.0, busy))
                step_bytes = max(1, threads * resident * unroll * vector * sum(fetched))
                bad *= 1 + 0.15 * max(0.0, log2(STEP_BYTES / step_bytes))
                # Groups of rows hide each other's reductions, if there are several to wait for.
                bad *= 1.05 if rows > 1 and reductions == 1 else 1.0
                bad *= 1 + 0.04 * abs(log2(unroll * vector / BEST_ELEMENTS))
                bad *= 1 + max(0.0, own / limit - 1) * 4 + 0.3 * (wanted / resident - 1)
                bad *= 1 + max(0.0, 1 - flight * resident / FLIGHT_BYTES)
                bad *= (1.0 if form == "registers" else 1.03) if ring else 1.3 if form == "registers" else 1.5
                yield bad, replace(schedule, form=form, resident=resident, stages=stages)

"""Schedules of the pool family: how many neighbours a thread folds at once, and which threads are neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import hypot, prod

from codegen.arch import SECTOR_BYTES
from codegen.family import Schedule
from codegen.pool.space import Space, index_type, normalize, patches, widest, width
from codegen.pool.steps import THREADS, planes_of_block, vector_of_columns
from codegen.spec import PoolSpec
from codegen.target import Target
from codegen.windows import Adaptive

#: Most bytes of the elements under a thread's windows that it keeps in registers, so that all are in flight at once.
HELD_BYTES = 256
#: Most bytes of sums and maxima that a thread keeps.
KEPT_BYTES = 128
#: Most windows of a thread: with more of them, they begin too far apart.
MOST_WINDOWS = 16
#: Bytes from which on a kernel is long enough for neighbours in memory to matter more than how soon it has begun.
WIDE_BYTES = 8 << 20
#: Threads per multiprocessor that keep all of them busy.
ENOUGH_THREADS = (1 << 15) / 33
#: With more elements in a window, only the innermost loop is unrolled, and by this much.
UNROLLED = 64
UNROLL = 4
#: Cycles until memory answers a thread's loads that are in flight together, and for each of them: fits to the times of
#: few windows.  Cycles that the threads of a window take to combine what they have; a multiprocessor's threads.
LATENCY, EACH, COMBINE, RESIDENT = 700.0, 280.0, 800.0, 1024
#: By how much reading single sectors of large tensors takes longer than reading long runs.
SHORT_RUN = 0.5
#: Threads share windows where this is estimated to take at most this share of the time without, and to save so much.
CLEARLY, LEAST_SAVED = 0.75, 1500.0


@dataclass(frozen=True)
class PoolSchedule(Schedule):
    """How a pool kernel is mapped to threads.

    vector  neighbours in memory, outside of all windows, that a thread folds at once.
    itype   C type of coordinates and offsets, signed.
    rows    positions of the last window but one that a thread takes.
    cols    positions of the last window that a thread takes: elements in several of its windows are read once.
    down    positions of the last window but one that are neighbours in a block: the L1 cache has what they share.
    planes  of a block that folds windows in two steps, `codegen.pool.steps`; 0: every thread folds its windows alone.
    lanes   threads that take the elements of a window in turn, a power of two (`codegen.pool.lanes`).
    each    windows of a thread that have no element in common (`codegen.pool.apart`); 0 for others.
    """

    vector: int
    itype: str
    rows: int = 1
    cols: int = 1
    down: int = 1
    planes: int = 0
    lanes: int = 1
    each: int = 0


def patch(space: Space, s: PoolSchedule) -> list[int]:
    """Returns how many positions a thread takes along each window."""
    n = len(space.windows)
    return [s.cols if k == n - 1 else s.rows if k == n - 2 else 1 for k in range(n)]


def is_strip(space: Space, s: PoolSchedule, n: int) -> bool:
    """Tells whether elements under the last windows are a vector, in the image or outside, and its neighbours."""
    operand = space.program.loads[n]
    if not space.windows or space.inner or s.cols == 1:
        return False
    window = space.windows[-1][1]
    if isinstance(window, Adaptive) or operand.strides[-1] != 1 or window.shift > 0:
        return False
    each = window.fresh(s.cols)
    width_bytes = each * operand.dtype.itemsize
    aligned = all(t * operand.dtype.itemsize % width_bytes == 0 for t in operand.strides[:-1])
    power = each & (each - 1) == 0 and each > 1 and width_bytes <= 16
    return power and window.size % each == 0 and aligned and operand.alignment % width_bytes == 0


def held_from(space: Space, s: PoolSchedule) -> int:
    """Returns the first window from which on all elements are read before any is used; how many there are if none."""
    sizes = [width(window, many) for (_, window), many in zip(space.windows, patch(space, s))]
    bytes_each = sum(max(4, s.vector * space.program.loads[n].dtype.itemsize) for n in space.taps)
    first = len(sizes)
    while first > 0 and prod(sizes[first - 1 :]) * bytes_each <= HELD_BYTES:
        first -= 1
    return first


def schedules(spec: PoolSpec, target: Target) -> Iterator[PoolSchedule]:
    """Yields schedules worth trying, best guess first: the fewest elements read per result, if threads suffice."""
    space = normalize(spec)
    itype = index_type(space)
    vector = widest(space)
    if space.apart:
        yield from _of_own(space, vector, itype, target)
    kinds = [window for _, window in space.windows]
    planes = planes_of_block(spec, target)
    if planes:
        yield PoolSchedule(vector_of_columns(spec), itype, planes=planes)
    # Finding where the largest element is also takes that element.
    kept = vector * sum(8 if r.at is not None else 4 for r in spec.program.reductions)
    found = []
    for c in _powers(space, 1, 16):
        for r in _powers(space, 2, 4):
            s = PoolSchedule(vector, itype, r, c)
            first = held_from(space, s)
            # The purpose of a patch is to read once what its windows share, and to hold it.
            held = len(kinds) - first >= (2 if r > 1 else 1 if c > 1 else 0)
            if (r, c) != (1, 1) and (kept * r * c > KEPT_BYTES or r * c > MOST_WINDOWS or not held):
                continue
            found.append((_cost(space, s, first, target), s))
    # Of patches with as many accesses, those along memory are faster, unless there is so little that latency counts.
    wide = _nbytes(space) >= WIDE_BYTES
    found.sort(key=lambda item: (item[0], -item[1].cols if wide else item[1].cols))
    sharing = sorted(_sharing(space, vector, itype), key=lambda s: _cycles(space, s, target))
    alone = _cycles(space, found[0][1], target)
    if sharing and _cycles(space, sharing[0], target) < min(CLEARLY * alone, alone - LEAST_SAVED):
        yield from sharing[:3]
    for _, s in found[:4]:
        many = down(space, s)
        yield replace(s, down=many)
        if many > 1:
            yield s
        elif len(kinds) > 1 and space.inner and vector > 1 and not space.apart:
            yield replace(s, down=2)


def _of_own(space: Space, vector: int, itype: str, target: Target) -> Iterator[PoolSchedule]:
    """Yields schedules whose threads take windows that have no element in common: as many as registers keep."""
    nbytes = prod(w.count for _, w in space.windows) * sum(
        max(4, vector * space.program.loads[n].dtype.itemsize) for n in space.taps
    )
    threads = prod(space.outer) / vector
    for each in (4, 2, 8, 1):
        if each * nbytes <= HELD_BYTES and (each == 1 or threads >= each * RESIDENT * target.sms):
            yield PoolSchedule(vector, itype, each=each)


def shares(space: Space, lanes: int) -> tuple[int, ...]:
    """Returns how many of the threads of a window are beside each other along each of its dimensions: as leaves each
    thread the fewest elements, and most along the last one.
    """
    powers = [1 << n for n in range(lanes.bit_length())]
    ways = [way for way in product(powers, repeat=len(space.windows)) if prod(way) == lanes]
    return min(ways, key=lambda way: (_passes(space, way), way)) if ways else ()


def _passes(space: Space, shares: tuple[int, ...]) -> int:
    """Returns how many elements of a window a thread takes at most."""
    return prod(-(-window.count // many) for (_, window), many in zip(space.windows, shares))


def _sharing(space: Space, vector: int, itype: str) -> Iterator[PoolSchedule]:
    """Yields schedules whose threads share windows."""
    if any(r.at is not None for r in space.program.reductions) or not space.taps:
        return
    elements = prod(window.count for _, window in space.windows)
    nbytes = vector * min(space.program.loads[n].dtype.itemsize for n in space.taps)
    # Neighbouring threads read whole sectors; where windows lie along the innermost dimension, those of a warp share.
    lanes, most = 2, min(THREADS * nbytes // SECTOR_BYTES, THREADS) if space.inner else 32
    while lanes <= most and 2 * lanes <= elements:
        yield PoolSchedule(vector, itype, lanes=lanes)
        lanes *= 2


def _cycles(space: Space, s: PoolSchedule, target: Target) -> float:
    """Estimates the cycles of a kernel, where waiting for memory takes most of them."""
    many = patch(space, s)
    if s.lanes > 1:
        loads, depth, combine = _passes(space, shares(space, s.lanes)), UNROLL, COMBINE
    else:
        widths = [width(window, m) for (_, window), m in zip(space.windows, many)]
        loads, depth, combine = prod(widths), max(UNROLL, prod(widths[held_from(space, s) :])), 0.0
    dims = {d: m for (d, _), m in zip(space.windows, many)}
    threads = s.lanes * prod(-(-size // dims.get(d, 1)) for d, size in enumerate(space.outer)) / s.vector
    turns = max(1.0, threads / (RESIDENT * target.sms))
    waits = turns * (-(-loads // depth) * LATENCY + loads * EACH + combine)
    nbytes = _nbytes(space)
    memory = nbytes / (target.memory_share * target.bytes_per_cycle)
    if s.lanes > 1 and space.inner and nbytes > target.l2_share(0.5):
        beside = THREADS // s.lanes * s.vector * min(space.program.loads[n].dtype.itemsize for n in space.taps)
        memory *= 1 + SHORT_RUN * SECTOR_BYTES / beside
    return hypot(waits, memory)


def _nbytes(space: Space) -> int:
    """Returns the bytes that a kernel reads and writes."""
    shape = (*space.outer, *(window.size for _, window in space.windows))
    return sum(op.dtype.itemsize * prod(n for n, t in zip(shape, op.strides) if t) for op in space.program.operands)


def _powers(space: Space, back: int, most: int) -> list[int]:
    """Returns the numbers of positions along a window, counted from the last, that a thread may take."""
    if len(space.windows) < back:
        return [1]
    window = space.windows[-back][1]
    each = 1 if isinstance(window, Adaptive) else window.unit
    return patches(space, back, [1, *(n for n in (each * k for k in (1, 2, 4, 8, 16)) if 1 < n <= most)])


def down(space: Space, s: PoolSchedule) -> int:
    """Returns how many positions lie below each other in a block: several where windows overlap there."""
    if space.apart or len(space.windows) < 2 or not space.inner or s.vector == 1:
        return 1
    dim, window = space.windows[-2]
    if isinstance(window, Adaptive):  # they overlap: adaptive windows of equal sizes have become sliding ones
        return 2 if space.outer[dim] >= 2 else 1
    if window.reach > window.stride and space.outer[dim] >= 4 * s.rows:
        return 4
    return 1


def _cost(space: Space, s: PoolSchedule, first: int, target: Target) -> tuple[float, ...]:
    """Returns how many accesses a thread makes for each result; more if threads are too few."""
    many = patch(space, s)
    accesses = 0.0
    for n in space.taps or (0,):
        lines = [width(window, m) for (_, window), m in zip(space.windows, many)]
        if space.taps and is_strip(space, s, n):
            window = space.windows[-1][1]
            assert not isinstance(window, Adaptive)
            lines[-1] = 1 + max(lines[-1] - window.fresh(s.cols), 0)
            accesses += prod(lines)
        else:
            accesses += prod(lines) * _apart(space, s, n)
    each = prod(many)
    dims = {d: m for (d, _), m in zip(space.windows, many)}
    threads = prod(-(-size // dims.get(d, 1)) for d, size in enumerate(space.outer)) / s.vector
    wasted = prod(-(-space.outer[d] // m) * m / max(space.outer[d], 1) for d, m in dims.items())
    few = max(1.0, ENOUGH_THREADS * target.sms / max(threads, 1.0)) if each > 1 else 1.0
    waits = 1.5 if first else 1.0  # not everything is read before the first element is used
    rows = 1.0
    if s.rows > 1 and not space.inner:
        # The rows of a result that are shorter than an access are written in parts, unless threads have one each.
        rows += SECTOR_BYTES / (max(space.outer[-1], 1) * min(x.operand.dtype.itemsize for x in space.program.stores))
    if s.rows > 1 and any(r.at is not None for r in space.program.reductions):
        rows *= 1.25  # every window asks of every element whether it is the largest
    return (accesses / each * wasted * few * waits * rows, each)


def _apart(space: Space, s: PoolSchedule, n: int) -> float:
    """Returns how many words lie between the elements of neighbouring threads, none of which reads vectors."""
    if space.inner or not space.windows or s.cols == 1 or n not in space.taps:
        return 1.0
    window = space.windows[-1][1]
    assert not isinstance(window, Adaptive)
    return max(1.0, window.fresh(s.cols) * space.program.loads[n].dtype.itemsize / 4)

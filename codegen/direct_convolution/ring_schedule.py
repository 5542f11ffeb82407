"""Schedules of direct convolution's ring form: the candidates for a spec, and their estimated times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from codegen.buffers import Buffer, Edge
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.family import Schedule
from codegen.target import Target

#: Most registers of a thread for weights and for sums, and most threads of a block, of the schedules that are tried.
MAX_WEIGHTS = 100
MAX_SUMS = 64
MAX_PRODUCTS = 800  # that a thread's code spells out; more do not fit the instruction cache
MAX_READS = 80  # columns that a step looks at; more do not become straight code
MAX_THREADS = 512
MIN_THREADS = 64
#: Bytes of neighbouring channels that a block reads of every pixel: whole cache lines where there are so many.
RUNS = (64, 128, 256)
#: The share of the memory bandwidth that is reached when all multiprocessors read, and of what one then gets from the
#: L2 cache; and cycles until a byte arrives.
MEMORY_SHARE, CACHE_SHARE, LATENCY = 0.7722, 28 / 70, 1100.0
START = 3000.0  # cycles before the first rows are there and after the last ones are, when nothing overlaps
#: Share of the time in which a warp of this code cannot issue; share of the issue slots that are filled at best.
STALLED, ISSUED = 0.75, 0.85
#: Blocks per multiprocessor beyond which blocks are not made smaller.
ENOUGH_BLOCKS = 4


@dataclass(frozen=True)
class RingSchedule(Schedule):
    """A block walks down rows of outputs with the input rows in a ring in shared memory.

    A block has ``lanes`` threads of ``vector`` channels each, and ``across`` of them along the columns; each computes
    ``rows`` x ``cols`` outputs per step, for ``steps`` steps, while the input of the next ``ahead`` steps is in flight
    in copies of ``copy`` elements.
    """

    rows: int
    cols: int
    across: int
    lanes: int
    vector: int
    steps: int
    ahead: int
    copy: int
    itype: str

    @property
    def threads(self) -> int:
        return self.lanes * self.across

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return self.lanes * self.vector

    @property
    def block_rows(self) -> int:
        """Rows of outputs of a block."""
        return self.rows * self.steps

    @property
    def out_cols(self) -> int:
        """Columns of outputs of a block."""
        return self.cols * self.across


def ring_buffer(spec: DirectConvolutionSpec, s: RingSchedule) -> Buffer:
    """Returns the ring, whose stages are rows: those under a step's outputs and those in flight."""
    rows = spec.under(1, s.rows) + s.ahead * s.rows * spec.stride[1]
    return Buffer("ring", spec.x.dtype.ctype, (spec.under(2, s.out_cols), s.channels), rows, note="rows of the input")


def widest_access(spec: DirectConvolutionSpec, widths: Sequence[int], *counts: int) -> int:
    """Returns how many channels the widest possible access has, of the ``widths`` in bytes; 0 if there is none.

    Accesses of this width can start at every pixel's channels, and their channels divide the ``counts``.
    """
    size = spec.x.dtype.itemsize
    steps = [s for s, many in zip(spec.x.strides, (spec.images, 1, 1, *spec.sizes)) if many > 1]
    for width in widths:
        count = width // size
        if count and spec.x.alignment % width == 0 and all(n % count == 0 for n in (spec.groups, *steps, *counts)):
            return count
    return 0


def ring_copy(spec: DirectConvolutionSpec) -> int:
    """Returns how many elements the widest copy to the ring has; 0 if none is of at least 4 bytes."""
    return widest_access(spec, (16, 8, 4))


def ring_schedules(spec: DirectConvolutionSpec, target: Target, itype: str) -> list[RingSchedule]:
    """Returns schedules, best first; none if the spec is no depthwise convolution with contiguous channels."""
    if not (target.arch.has_cp_async and spec.flat and ring_copy(spec)):
        return []
    every = {s: ring_cycles(spec, s, target) for s in _candidates(spec, target, itype)}
    return sorted(every, key=lambda s: every[s])


def _candidates(spec: DirectConvolutionSpec, target: Target, itype: str) -> Iterator[RingSchedule]:
    size, (_, height, width), taps = spec.x.dtype.itemsize, spec.out, prod(spec.taps)
    words = spec.word // 4
    widest = ring_copy(spec)
    vectors = [v for v in (8, 4, 2, 1) if v <= widest and v * taps * words <= MAX_WEIGHTS]
    vectors = [v for v in vectors if v * size >= 4] or vectors
    for run, vector, rows, cols in product(RUNS, vectors, (1, 2, 4), (1, 2, 4, 8)):
        # A power of two of lanes divides the copies of a pixel evenly among threads.
        lanes = _power(min(run // size, -(-spec.groups // widest) * widest) // vector)
        sums = rows * cols * vector
        if not lanes or sums * words > MAX_SUMS or sums * taps > MAX_PRODUCTS or rows > height or cols > 2 * width:
            continue
        if rows * spec.under(2, cols) > MAX_READS:
            continue
        for across in dict.fromkeys(-(-width // (cols * parts)) for parts in powers(width)):
            if lanes * across > MAX_THREADS or (lanes * across < MIN_THREADS and cols * across < width):
                continue
            copy = min(widest, lanes * vector)
            strips = spec.images * -(-spec.groups // (lanes * vector)) * -(-width // (cols * across))
            for pieces in powers(height // rows):
                steps = -(-height // (rows * pieces))
                for ahead in (2, 4) if steps > 2 else (1,):
                    s = RingSchedule(rows, cols, across, lanes, vector, steps, ahead, copy, itype)
                    if ring_buffer(spec, s).bytes <= target.arch.shared_bytes_per_block:
                        yield s
                if strips * pieces >= ENOUGH_BLOCKS * target.sms:
                    break


def ring_registers(spec: DirectConvolutionSpec, s: RingSchedule) -> int:
    """Returns the estimated registers of a thread: weights, sums of columns that taps touch at a time, addresses."""
    words = spec.word // 4
    under_way = min(s.cols, -(-((spec.taps[2] - 1) * spec.dilation[2] + 1) // spec.stride[2]))
    more = 8 if spec.program.instructions else 0
    return 36 + more + words * s.vector * (prod(spec.taps) + s.rows * under_way)


def ring_cycles(spec: DirectConvolutionSpec, s: RingSchedule, target: Target) -> float:
    """Returns the estimated cycles of a kernel.

    The slowest of instructions, device memory, cache, bytes in flight and shared memory counts, a little more where
    several are as slow, and what does not overlap.
    """
    size, sms = spec.x.dtype.itemsize, target.sms
    edges = (Edge(spec.groups, s.channels), Edge(spec.out[2], s.out_cols), Edge(spec.out[1], s.block_rows))
    blocks = spec.images * prod(edge.tiles for edge in edges)
    ring = ring_buffer(spec, s)
    resident = target.arch.blocks_per_sm(s.threads, min(255, ring_registers(spec, s)), ring.bytes)
    if not resident:
        return float("inf")
    waves = -(-blocks // (sms * resident))
    active = min(resident, -(-blocks // sms))
    # Blocks of the SM that has most.
    blocks_each = -(-blocks // sms) if waves == 1 else waves * resident
    row_bytes = ring.stage_bytes
    lines = s.rows * spec.stride[1] * s.steps + (spec.taps[1] - 1) * spec.dilation[1]
    warps = -(-s.threads // 32)
    filled = min(ISSUED, 1 - STALLED ** (active * warps / 4))
    issue = blocks_each * s.steps * warps * _instructions(spec, s, row_bytes) / (4 * filled)
    read = blocks_each * lines * row_bytes
    program = spec.program
    written = sum(store.operand.dtype.itemsize for store in program.stores) or size
    beside = sum(op.dtype.itemsize for op in program.loads if op.strides[1] and op.strides[5])
    outputs = blocks_each * s.block_rows * s.out_cols * s.channels
    once = spec.images * spec.groups * prod(spec.sizes) * size / sms
    memory = (once + outputs * (written + beside)) / (MEMORY_SHARE * target.bytes_per_cycle / sms)
    cache = (read + outputs * (written + beside)) / (CACHE_SHARE * target.l2_rate)
    flying = active * s.ahead * s.rows * spec.stride[1] * row_bytes
    latency = read * LATENCY / flying
    shared = blocks_each * s.steps * warps * _wavefronts(spec, s, row_bytes)
    worst: float = (issue**4 + memory**4 + cache**4 + latency**4 + shared**4) ** 0.25
    return worst + START * (waves if resident == 1 else 1)


def _instructions(spec: DirectConvolutionSpec, s: RingSchedule, row_bytes: int) -> float:
    """Returns how many instructions a thread takes for one step, as counted in compiled kernels."""
    taps, outputs = prod(spec.taps), s.rows * s.cols * s.vector
    rows, cols = spec.under(1, s.rows), spec.under(2, s.cols)
    size, words = spec.x.dtype.itemsize, spec.word // 4
    convert = 0 if size == spec.word else 1
    reads = rows * cols * (max(1, s.vector * size // 16) + convert * s.vector) + 4 * rows
    copies = s.rows * spec.stride[1] * (8 + 5 * -(-row_bytes // size // s.copy // s.threads))
    stores = s.rows * s.cols * 4 + outputs * (0.5 + 6 * len(spec.program.instructions))
    crowded = 50 if s.vector == 8 else 0  # moves between registers
    return words * outputs * taps + reads + copies + stores + 55 + 1.5 * outputs + crowded


def _wavefronts(spec: DirectConvolutionSpec, s: RingSchedule, row_bytes: int) -> float:
    """Returns how many accesses of 128 bytes to shared memory a warp makes in one step."""
    rows, cols = spec.under(1, s.rows), spec.under(2, s.cols)
    access = s.vector * spec.x.dtype.itemsize
    pixel = s.lanes * access
    # Threads whose pixels are a multiple of 128 bytes apart meet in the same banks.
    meet = max(1, 128 // pixel) if s.cols * spec.stride[2] * pixel % 128 == 0 else 1
    copied = s.rows * spec.stride[1] * row_bytes / 128 / Edge(s.threads, 32).tiles
    return rows * cols * max(1.0, access / 4) * meet + copied


def _power(size: int) -> int:
    """Returns the largest power of two of at most ``size``; 0 if there is none."""
    return 1 << (size.bit_length() - 1) if size > 0 else 0


def powers(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to ``most``."""
    return [1 << k for k in range(max(most, 1).bit_length())]

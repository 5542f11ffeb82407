"""Schedules of direct convolution's form whose threads slide down the image, and what a thread keeps meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm, prod

from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.family import Schedule
from codegen.target import Target

#: Most 32-bit registers for weights and sums; most products that a thread's code spells out.
MAX_WEIGHTS, MAX_REGISTERS, MAX_PRODUCTS = 128, 230, 1600
#: Most columns under a thread's outputs: as many as a mask has bits.
MAX_UNDER = 64
THREADS = 128
#: Rows that are loaded before they are needed.
AHEAD = (1, 2, 3, 4, 6)
#: Bytes of neighbouring channels that neighbouring threads read of a pixel.
RUNS = (64, 128)


@dataclass(frozen=True)
class SlideSchedule(Schedule):
    """A thread slides down over ``rows`` rows of ``cols`` neighbouring outputs of ``vector`` neighbouring channels.

    It loads ``ahead`` rows of its input before it needs them.  ``lanes`` threads side by side take neighbouring
    channels, the next ones neighbouring columns: what both read comes from the L1 cache if they are in one block.
    """

    rows: int
    cols: int
    vector: int
    ahead: int
    lanes: int
    threads: int
    itype: str


@dataclass(frozen=True)
class Walk:
    """How the code goes down over the input rows under a strip of ``rows`` rows of outputs.

    under   input rows.
    slots   rows of outputs whose sums are kept at a time.
    period  input rows that are written out: behind them everything is in the same registers again.
    """

    under: int
    slots: int
    period: int

    @property
    def whole(self) -> bool:
        """Whether all rows are written out."""
        return self.period == self.under


def walk(spec: DirectConvolutionSpec, rows: int, sums: int, ahead: int = 1) -> Walk:
    """Returns how to go down over ``rows`` rows of ``sums`` outputs each, with ``ahead`` rows of input in registers."""
    under, stride = spec.under(1, rows), spec.stride[1]
    slots = -(-((spec.taps[1] - 1) * spec.dilation[1] + 1) // stride)
    period = lcm(stride, ahead, spec.input_dilation[1])
    if period >= under or rows * sums * prod(spec.taps) <= MAX_PRODUCTS:
        return Walk(under, rows, under)
    return Walk(under, slots, period)


def columns(spec: DirectConvolutionSpec, cols: int) -> list[int]:
    """Returns which of the columns under ``cols`` outputs are columns of the input and meet taps."""
    apart = spec.input_dilation[2]
    every = {q * spec.stride[2] + ks * spec.dilation[2] for q in range(cols) for ks in range(spec.taps[2])}
    return sorted(ix for ix in every if ix % apart == spec.before[2] % apart)


def widths(spec: DirectConvolutionSpec) -> list[int]:
    """Returns how many columns of outputs a thread may have."""
    width = spec.out[2]
    few = [n for n in range(1, width + 1) if n <= 8 or (width % n == 0 and n <= 16)]
    return [n for n in few if keeps_phase(spec, 2, n) and spec.under(2, n) <= MAX_UNDER]


def keeps_phase(spec: DirectConvolutionSpec, axis: int, size: int) -> bool:
    """Tells whether strips of ``size`` rows (or columns) of outputs all begin in the same phase of a dilated input."""
    return size % spec.input_dilation[axis] == 0 or size >= spec.out[axis]


def strips(spec: DirectConvolutionSpec) -> list[int]:
    """Returns into how many rows each the outputs may be cut."""
    height = spec.out[1]
    parts = [n for k in range(10) for n in (1 << k, 3 << k)]
    every = dict.fromkeys(-(-height // n) for n in sorted(parts) if n <= height)
    return [rows for rows in every if keeps_phase(spec, 1, rows)]


def lanes(spec: DirectConvolutionSpec, vector: int) -> list[int]:
    """Returns how many threads side by side may take neighbouring channels: all there are, or for whole sectors."""
    most = -(-spec.groups // vector)
    found = {most} if most * vector * spec.x.dtype.itemsize <= 2 * max(RUNS) else set()
    for run in RUNS:
        count = min(most, max(1, run // (vector * spec.x.dtype.itemsize)))
        even = max(n for n in range(1, count + 1) if most % n == 0)
        found.add(even if 2 * even > count else count)
    return sorted(found)


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


def slide_vector(spec: DirectConvolutionSpec) -> int:
    """Returns how many channels the widest access has: 1 if none has more."""
    return widest_access(spec, (16, 8, 4)) or 1 if spec.x.strides[1] == 1 else 1


def slide_registers(spec: DirectConvolutionSpec, s: SlideSchedule) -> int:
    """Returns the estimated registers of a thread."""
    words, count = spec.word // 4, s.vector * spec.filters
    width, planes = len(columns(spec, s.cols)), spec.taps[0]
    rows = walk(spec, s.rows, s.cols * count, s.ahead)
    live = min(s.rows, -(-((spec.taps[1] - 1) * spec.dilation[1] + 1) // spec.stride[1]))
    line = planes * width * -(-s.vector * spec.x.dtype.itemsize // 4)
    kept = words * (count * (prod(spec.taps) + live * s.cols) + planes * width * s.vector)
    per_channel = sum(1 for op in spec.program.loads if op.strides[1] and not any(op.strides[2:])) * count
    return 24 + kept + per_channel + line * min(s.ahead, rows.under)


def slide_candidates(spec: DirectConvolutionSpec, itype: str) -> Iterator[SlideSchedule]:
    """Yields the schedules that fit registers."""
    words = spec.word // 4
    widest = slide_vector(spec) if spec.filters == 1 else 1
    for vector, cols in product([v for v in (8, 4, 2, 1) if v <= widest], widths(spec)):
        count = vector * spec.filters
        if count * prod(spec.taps) * words > MAX_WEIGHTS:
            continue
        for rows in strips(spec):
            for ahead, along in product(AHEAD, lanes(spec, vector)):
                if ahead > spec.under(1, rows):
                    continue
                s = SlideSchedule(rows, cols, vector, ahead, along, THREADS, itype)
                if slide_registers(spec, s) <= MAX_REGISTERS:
                    yield s


def slide_schedules(spec: DirectConvolutionSpec, target: Target, itype: str) -> list[SlideSchedule]:
    """Returns schedules, best first."""
    every = {s: slide_cycles(spec, s, target) for s in slide_candidates(spec, itype)}
    return sorted(every, key=lambda s: every[s])


def slide_cycles(spec: DirectConvolutionSpec, s: SlideSchedule, target: Target) -> float:
    """Returns the estimated cycles of a kernel: the slowest of instructions, device memory and latency counts."""
    size, sms = spec.x.dtype.itemsize, target.sms
    count, taps = s.vector * spec.filters, prod(spec.taps)
    strips = -(-spec.out[1] // s.rows) * -(-spec.out[2] // s.cols) * spec.out[0]
    threads = spec.images * strips * -(-spec.groups // s.vector)
    blocks = -(-threads // s.threads)
    registers = slide_registers(spec, s)
    resident = target.arch.blocks_per_sm(s.threads, min(255, registers), 0)
    each = -(-blocks // sms)
    waves = -(-each // resident)
    rows = walk(spec, s.rows, s.cols * count, s.ahead)
    outputs = s.rows * s.cols * count
    reads = rows.under * spec.taps[0] * len(columns(spec, s.cols)) * (3 + s.vector)
    program = spec.program
    stores = s.rows * s.cols * (3 + count * (0.5 + 1.5 * len(program.instructions)))
    instructions = outputs * taps * spec.word // 4 + reads + stores + 3 * count * taps + 80
    warps = s.threads / 32
    active = min(resident, each) * warps
    issue = each * warps * instructions / (4 * min(0.8, 0.25 * active / 4))
    written = sum(store.operand.dtype.itemsize for store in program.stores) or size
    beside = sum(op.dtype.itemsize for op in program.loads if op.strides[1] and op.strides[5])
    once = spec.images * spec.groups * prod(spec.sizes) * size
    memory = (once + spec.images * spec.groups * spec.filters * prod(spec.out) * (written + beside)) / (
        0.77 * target.bytes_per_cycle
    )
    latency = waves * (1500 + 800 * rows.under / s.ahead)
    worst: float = (issue**4 + memory**4 + latency**4) ** 0.25
    return worst

"""Schedules of direct convolution's form whose threads slide down the image, and what a thread keeps meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import lcm, prod
from typing import NamedTuple

from codegen.arch import SECTOR_BYTES
from codegen.buffers import Edge
from codegen.direct_convolution.cost import Work, cycles, finishing, partial
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.family import Schedule
from codegen.sizes import below
from codegen.target import Target

#: Most 32-bit registers for weights and sums; most products that a thread's code spells out.
MAX_WEIGHTS, MAX_REGISTERS, MAX_PRODUCTS = 128, 190, 1600
#: Most of the weights' registers for several neighbouring channels: with more, one channel has been faster.
MAX_TOGETHER = 80
#: Most columns under a thread's outputs: as many as a mask has bits.
MAX_UNDER = 64
THREADS = 128
#: Taps of a column beyond which rows outside of the image are left out.
MANY_TAPS = 3
#: Rows that are loaded before they are needed.
AHEAD = (1, 2, 3, 4, 6)
#: Bytes of neighbouring channels that neighbouring threads read of a pixel.
RUN = 128
#: Figures of the cost model, fitted to measured times.  Instructions of a load and of a weight; share of the issue
#: slots that a warp of a scheduler fills; cycles until a row arrives.
LOAD, WEIGHT = 6.5, 1.8
FILLED, LATENCY = 0.45, 175.0
SECTORS = 35  # bytes that a run of channels costs besides its own
#: Registers for which a multiprocessor must have room, as a share of those estimated: one block fewer costs a wave.
MARGIN = 1.08


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

    under    input rows.
    slots    rows of outputs whose sums are kept at a time.
    period   input rows that are written out: behind them everything is in the same registers again.
    trimmed  whether rows outside of the image are left out.
    """

    under: int
    slots: int
    period: int

    trimmed: bool

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
        return Walk(under, rows, under, trimmed=False)
    return Walk(under, slots, period, trimmed=period == 1 and spec.taps[1] > MANY_TAPS)


def columns(spec: DirectConvolutionSpec, cols: int) -> list[int]:
    """Returns which of the columns under ``cols`` outputs are columns of the input and meet taps."""
    apart = spec.input_dilation[2]
    return [*_touched(cols, spec.taps[2], spec.stride[2], spec.dilation[2], apart, spec.before[2] % apart)]


@lru_cache(1 << 12)
def _touched(cols: int, taps: int, stride: int, dilation: int, apart: int, first: int) -> tuple[int, ...]:
    every = {q * stride + ks * dilation for q in range(cols) for ks in range(taps)}
    return tuple(sorted(ix for ix in every if ix % apart == first))


def widths(spec: DirectConvolutionSpec) -> list[int]:
    """Returns how many columns of outputs a thread may have."""
    width = spec.out[2]
    few = [n for n in range(1, width + 1) if n <= 8 or (width % n == 0 and n <= 16)]
    return [n for n in few if keeps_phase(spec, 2, n) and spec.under(2, n) <= MAX_UNDER]


def keeps_phase(spec: DirectConvolutionSpec, axis: int, size: int) -> bool:
    """Tells whether strips of ``size`` rows (or columns) of outputs all begin in the same phase of a dilated input."""
    return size % spec.input_dilation[axis] == 0 or below(spec.out[axis] - 1, size)


def strips(spec: DirectConvolutionSpec) -> list[int]:
    """Returns into how many rows each the outputs may be cut."""
    height = spec.out[1]
    parts = [n for k in range(10) for n in (1 << k, 3 << k)]
    every = dict.fromkeys(-(-height // n) for n in sorted(parts) if n <= height)
    return [rows for rows in every if keeps_phase(spec, 1, rows)]


def lanes(spec: DirectConvolutionSpec, vector: int) -> list[int]:
    """Returns how many threads side by side may take neighbouring channels.

    Those are channels of a cache line, none of the threads idle if so many are busy otherwise; where an output has its
    columns closer than its channels, also those of a sector, so that more neighbours write neighbouring columns.
    """
    most, found = -(-spec.groups // vector), []
    turned = any(store.operand.strides[5] < store.operand.strides[1] for store in spec.program.stores)
    for run in (RUN, SECTOR_BYTES) if turned else (RUN,):
        count = min(most, max(1, run // (vector * spec.x.dtype.itemsize)))
        even = max(n for n in range(1, count + 1) if most % n == 0)
        found.append(even if 2 * even > count else count)
    return list(dict.fromkeys(found))


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


class _Thread(NamedTuple):
    """What a thread of a schedule does: how it walks down, under how many columns, in how many registers."""

    rows: Walk
    width: int
    registers: int


def _thread(spec: DirectConvolutionSpec, s: SlideSchedule, width: int) -> _Thread:
    """Returns what a thread does under ``width`` columns; its registers are fitted to what ptxas takes."""
    words, count = spec.word // 4, s.vector * spec.filters
    weights, planes = count * prod(spec.taps), spec.taps[0]
    rows = walk(spec, s.rows, s.cols * count, s.ahead)
    live = min(s.rows, -(-((spec.taps[1] - 1) * spec.dilation[1] + 1) // spec.stride[1])) * s.cols * count
    line = planes * width * -(-s.vector * spec.x.dtype.itemsize // 4) * min(s.ahead, rows.under)
    converted = planes * width * s.vector
    if rows.whole:
        return _Thread(rows, width, round(14 + words * (0.67 * weights + 1.6 * live + 0.5 * converted) + 0.77 * line))
    return _Thread(rows, width, round(36 + words * (weights + 0.8 * live + 0.55 * converted) + 1.2 * line))


def _candidates(spec: DirectConvolutionSpec, itype: str) -> Iterator[tuple[SlideSchedule, _Thread]]:
    """Yields the schedules that fit registers, and what a thread of each does."""
    words, heights = spec.word // 4, strips(spec)
    widest = slide_vector(spec) if spec.filters == 1 else 1
    for vector, cols in product([v for v in (8, 4, 2, 1) if v <= widest], widths(spec)):
        count = vector * spec.filters
        if count * prod(spec.taps) * words > (MAX_TOGETHER if vector > 1 else MAX_WEIGHTS):
            continue
        width, sides = len(columns(spec, cols)), lanes(spec, vector)
        for rows, ahead in product(heights, AHEAD):
            s = SlideSchedule(rows, cols, vector, ahead, sides[0], THREADS, itype)
            if ahead <= spec.under(1, rows) and (thread := _thread(spec, s, width)).registers <= MAX_REGISTERS:
                yield from ((replace(s, lanes=side), thread) for side in sides)


def slide_schedules(spec: DirectConvolutionSpec, target: Target, itype: str) -> list[SlideSchedule]:
    """Returns schedules, best first."""
    every = {s: cycles(spec, _work(spec, s, thread), target) for s, thread in _candidates(spec, itype)}
    return sorted(every, key=lambda s: every[s])


def slide_cycles(spec: DirectConvolutionSpec, s: SlideSchedule, target: Target) -> float:
    """Returns the estimated cycles of a kernel."""
    return cycles(spec, _work(spec, s, _thread(spec, s, len(columns(spec, s.cols)))), target)


def _work(spec: DirectConvolutionSpec, s: SlideSchedule, thread: _Thread) -> Work:
    """Returns what blocks do under a number of columns that is known."""
    size, run = spec.x.dtype.itemsize, s.vector * s.lanes
    tiles, chunks, heights = (
        Edge(n, m).tiles for n, m in zip((spec.out[2], spec.groups, spec.out[1]), (s.cols, run, s.rows))
    )
    # Neighbouring threads of a block read the same columns, those of other blocks read rows and columns again.
    side = min(tiles, max(1, s.threads // s.lanes))
    again: float = spec.out[0] * heights * Edge(tiles, side).tiles
    for axis, outputs in enumerate((1, s.rows, side * s.cols)):
        again *= min(spec.sizes[axis], spec.under(axis, outputs) / spec.input_dilation[axis])
    digits = (
        (s.lanes, {1: s.vector}), (tiles, {5: s.cols}), (chunks, {1: run}), (heights, {4: s.rows}),
        (spec.images, {0: 1}),
    )  # fmt: skip
    instructions = _instructions(spec, s, thread)
    return Work(
        blocks=Edge(spec.images * spec.out[0] * heights * tiles * chunks * s.lanes, s.threads).tiles,
        threads=s.threads,
        registers=round(MARGIN * thread.registers),
        shared=0,
        instructions=instructions,
        filled=FILLED,
        accesses=0,
        fetched=spec.images * spec.groups * size * again * (1 + SECTORS / (run * size)),
        partial=partial(spec, digits, s.vector * spec.filters, 1 if spec.filters == 1 else 2),
        waits=LATENCY * thread.rows.under / s.ahead,
        code=instructions * thread.rows.period / thread.rows.under,
    )


def products(spec: DirectConvolutionSpec, rows: Walk, height: int, column: int) -> float:
    """Returns the products of a thread with ``height`` rows of outputs, of which each has ``column`` for a tap row."""
    stride, apart = spec.stride[1], prod(spec.input_dilation[1:])
    if rows.whole:
        taps = height * spec.taps[1]
    elif rows.trimmed and height >= spec.out[1]:
        taps = spec.sizes[1] * spec.taps[1] // stride
    else:
        taps = rows.under * spec.taps[1] // stride
    return taps * column * spec.taps[0] * spec.taps[2] / apart * spec.word / 4


def _instructions(spec: DirectConvolutionSpec, s: SlideSchedule, thread: _Thread) -> float:
    """Returns how many instructions a thread takes."""
    rows = thread.rows
    count = s.vector * spec.filters
    loads = rows.under / spec.input_dilation[1] * thread.width * spec.taps[0]
    convert = 0 if spec.x.dtype.itemsize >= 4 else s.vector
    moves = 0 if rows.whole else (rows.slots - 1) * s.cols * count * s.rows
    stores = s.rows * s.cols * (3 + count * finishing(spec))
    total = products(spec, rows, s.rows, s.cols * count) + loads * (LOAD + convert) + moves + stores
    return total + WEIGHT * count * prod(spec.taps) + 80

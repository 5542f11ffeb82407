"""Schedules of filter gradients: the candidates for a spec, and their estimated cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from math import gcd, prod

from codegen.buffers import Edge
from codegen.canonical import canonical
from codegen.declined import Declined
from codegen.expr import Operand, Program
from codegen.family import Schedule
from codegen.filter_gradient.spec import FilterGradientSpec
from codegen.iteration import extent, signed_index_type
from codegen.records import changed
from codegen.sizes import below, smaller, values
from codegen.target import Target

#: Registers of a thread for sums, for all that it keeps, and products that its code spells out, at most.
MAX_SUMS, MAX_REGISTERS, MAX_PRODUCTS = 112, 184, 1700
MAX_SPAN = 48  # columns of the image that a thread looks at
WARPS = (4, 8)
ROWS, COLUMNS = (1, 2, 4, 7, 8), (1, 2, 4, 7, 8)
#: Share of the time in which a warp of this code cannot issue, and share of the issue slots that are filled at best.
STALLED, ISSUED = 0.7, 0.75
#: The share of the memory bandwidth that is reached; instructions to find a patch; cycles before and after the walk.
MEMORY_SHARE, PLACE, START = 0.65, 30, 2500.0
#: Registers and threads of a multiprocessor, and registers that ptxas may take beyond the estimate.
SM_REGISTERS, SM_THREADS, SPARE = 65536, 2048, 8
#: Cycles of a multiprocessor for a load of a warp, and cycles until a patch's loads arrive.
LOAD, LATENCY = 1.5, 1000.0
CANDIDATES = 12


@dataclass(frozen=True)
class FilterGradientSchedule(Schedule):
    """Threads walk over patches of ``rows`` x ``cols`` positions and keep the sums of some taps in registers.

    A block has ``warps`` warps.  A warp has ``lanes`` threads side by side with other channels; the others walk over
    patches of their own.  A thread has ``channels`` x ``filters`` neighbouring ones of a group, or of a depthwise
    convolution ``channels`` channels with a filter each; ``taps`` are the rows and columns of the filter that it sums
    up.
    """

    rows: int
    cols: int
    lanes: int
    channels: int
    filters: int
    taps: tuple[int, int]
    warps: int
    itype: str

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def walkers(self) -> int:
        """Threads of a warp that have the same channels."""
        return 32 // self.lanes


@dataclass(frozen=True)
class Span:
    """What a thread reads along an axis: image elements ``first + place * step`` for the places that taps touch.

    places  how many there are from the first to the last; touched has the bit of each that a tap touches.
    stride  places from a position to the next; dilation those from a tap to the next.
    """

    step: int
    places: int
    touched: int
    stride: int
    dilation: int


def span(spec: FilterGradientSpec, axis: int, positions: int, taps: int) -> Span:
    """Returns what lies under so many positions and taps along an axis."""
    # The stride of one position, or the dilation of one tap, means nothing.
    return _span(spec.stride[axis] * (positions > 1), spec.dilation[axis] * (taps > 1), positions, taps)


@cache
def _span(stride: int, dilation: int, positions: int, taps: int) -> Span:
    step = gcd(stride, dilation) or 1
    stride, dilation = max(stride // step, 1), max(dilation // step, 1)
    at = {p * stride + t * dilation for p in range(positions) for t in range(taps)}
    return Span(step, max(at) + 1, sum(1 << place for place in at), stride, dilation)


def pairs(spec: FilterGradientSpec, s: FilterGradientSchedule) -> int:
    """Returns how many pairs of a channel and a filter a thread multiplies."""
    return s.channels if spec.depthwise else s.channels * s.filters


def lanes_of(spec: FilterGradientSpec, s: FilterGradientSchedule) -> Edge:
    """Returns the threads side by side that all channels and filters take, in warps' lanes."""
    if spec.depthwise:
        return Edge(spec.groups // s.channels, s.lanes)
    return Edge(spec.groups * (spec.channels // s.channels) * (spec.filters // s.filters), s.lanes)


def tap_tiles(spec: FilterGradientSpec, s: FilterGradientSchedule) -> tuple[Edge, Edge]:
    """Returns rows and columns of the filter in the parts of them that a thread sums up."""
    return Edge(spec.taps[1], s.taps[0]), Edge(spec.taps[2], s.taps[1])


def blocks_of(spec: FilterGradientSpec, s: FilterGradientSchedule) -> int:
    """Returns the number of blocks of a part."""
    down, across = tap_tiles(spec, s)
    return spec.taps[0] * down.tiles * across.tiles * lanes_of(spec, s).tiles


def patches(spec: FilterGradientSpec, s: FilterGradientSchedule) -> tuple[int, int]:
    """Returns the patches of a band along rows and columns."""
    return -(-smaller(spec.band, spec.out[1]) // s.rows), -(-spec.out[2] // s.cols)


def registers(spec: FilterGradientSpec, s: FilterGradientSchedule) -> int:
    """Returns the estimated registers of a thread: sums, losses of a patch, a row of the image, addresses."""
    row = span(spec, 2, s.cols, s.taps[1]).touched.bit_count() * s.channels
    losses = s.rows * s.cols * (s.channels if spec.depthwise else s.filters)
    return 44 + spec.words * (pairs(spec, s) * prod(s.taps) + losses + row)


def blocks_per_sm(spec: FilterGradientSpec, s: FilterGradientSchedule) -> int:
    """Returns how many blocks a multiprocessor is to hold: ptxas may take a few more registers than are counted."""
    return _resident(s.threads, registers(spec, s))


def _resident(threads: int, registers: int) -> int:
    return max(1, min(SM_REGISTERS // (threads * min(255, registers + SPARE)), SM_THREADS // threads))


def schedules(spec: FilterGradientSpec, target: Target) -> list[FilterGradientSchedule]:
    """Returns schedules worth trying, best guess first."""
    kinds: dict[tuple[int, ...], FilterGradientSchedule] = {}
    for _, s in _ranked(canonical(spec), target):
        kinds.setdefault((s.rows, s.cols, s.channels, s.filters), s)
    return [*kinds.values()][:CANDIDATES]


def cycles(spec: FilterGradientSpec, target: Target) -> float:
    """Returns the cycles that the best schedule is estimated to take, at the sizes that are known here."""
    return _least(canonical(values(spec)), target)


@lru_cache(256)
def _least(spec: FilterGradientSpec, target: Target) -> float:
    cycles = _cost_model(spec, target)
    return min(cycles(s, work) for s, work in _works_of(spec))


@lru_cache(256)
def _ranked(spec: FilterGradientSpec, target: Target) -> list[tuple[float, FilterGradientSchedule]]:
    """Returns the candidates for a canonical spec, each after its estimated cycles: equal layers share them."""
    cycles = _cost_model(spec, target)
    return sorted(((cycles(s, work), s) for s, work in _works_of(spec)), key=lambda entry: entry[0])


def _works_of(spec: FilterGradientSpec) -> list[tuple[FilterGradientSchedule, Work]]:
    return _works(replace(spec, parts=1, program=Program()), _itype(spec))


@lru_cache(64)
def _works(spec: FilterGradientSpec, itype: str) -> list[tuple[FilterGradientSchedule, Work]]:
    """Returns the candidates for a spec, of one part and without a program: those of other numbers of parts share them.

    The type of indices is all that they take of the program.
    """
    found = []
    for s, counts in _candidates(spec, itype):
        work, needed = work_of(spec, s), registers(spec, s)
        for warps in counts:
            other = s if warps == s.warps else changed(s, warps=warps)
            found.append((other, work if other is s else changed(work, resident=_resident(other.threads, needed))))
    return found


def _candidates(spec: FilterGradientSpec, itype: str) -> Iterator[tuple[FilterGradientSchedule, tuple[int, ...]]]:
    """Yields the schedules that fit registers and code, each once for the numbers of warps that it may have; if none
    does, one that keeps a sum alone.
    """
    least, found = None, False
    tiles = [(-(-spec.taps[1] // n), -(-spec.taps[2] // m)) for n in range(1, 9) for m in (1, 2, 4, 8)]
    for channels, filters in _vectors(spec):
        wide = (
            (spec.groups // channels)
            if spec.depthwise
            else lanes_of(spec, FilterGradientSchedule(1, 1, 1, channels, filters, (1, 1), 1, itype)).total
        )
        many = channels if spec.depthwise else channels * filters
        fitting = [t for t in dict.fromkeys(tiles) if prod(t) * many * spec.words <= MAX_SUMS]
        best = max((prod(t) for t in fitting), default=0)
        for taps in [t for t in fitting if 2 * prod(t) > best] or [(1, 1)]:
            for rows, cols in product(ROWS, COLUMNS):
                if not _fits(spec, rows, cols):
                    continue
                s = FilterGradientSchedule(rows, cols, _lanes(spec, wide), channels, filters, taps, WARPS[0], itype)
                least = least or s
                large = rows * cols * prod(taps) * many > MAX_PRODUCTS or registers(spec, s) > MAX_REGISTERS
                if not large and span(spec, 2, cols, taps[1]).places <= MAX_SPAN:
                    found = True
                    yield s, WARPS
    if least is not None and not found:
        yield FilterGradientSchedule(1, 1, least.lanes, 1, 1, (1, 1), WARPS[0], itype), WARPS[:1]


def _fits(spec: FilterGradientSpec, rows: int, cols: int) -> bool:
    """Tells whether patches of so many positions fill whole bands, and are not much larger than an image."""
    whole = spec.band % rows == 0 or spec.band >= spec.out[1]
    return whole and rows < 2 * spec.out[1] and cols < 2 * spec.out[2]


def _lanes(spec: FilterGradientSpec, wide: int) -> int:
    """Returns how many threads of a warp take neighbouring channels: a power of two that leaves few of them idle.

    It is 1 where neighbouring channels are no neighbours in memory: then positions are.
    """
    lanes = 1
    together = spec.loss.strides[1 if spec.filters == 1 else 2] == 1
    while together and lanes < 32 and -(-wide // (2 * lanes)) * 2 * lanes <= 1.125 * wide:
        lanes *= 2
    return lanes


def _vectors(spec: FilterGradientSpec) -> list[tuple[int, int]]:
    """Returns the channels and filters that a thread can have."""
    widths = (8, 4, 2, 1)
    if spec.depthwise:
        both = [(spec.x, 1, spec.sizes), (spec.loss, 1, spec.out)]
        return [(n, 1) for n in widths if all(wide(op, n, d, (spec.images, spec.groups, 1, *z)) for op, d, z in both)]
    over_x = (spec.images, spec.groups, spec.channels, *spec.sizes)
    over_loss = (spec.images, spec.groups, spec.filters, *spec.out)
    return [
        (n, m)
        for n in widths
        for m in widths
        if n * m <= 16 and wide(spec.x, n, 2, over_x) and wide(spec.loss, m, 2, over_loss)
    ]


def wide(operand: Operand, count: int, along: int, sizes: tuple[int, ...]) -> bool:
    """Tells whether so many neighbours along a dimension of an operand, from a multiple of it on, are one access."""
    if count == 1:
        return True
    width = count * operand.dtype.itemsize
    others = [s for d, (s, n) in enumerate(zip(operand.strides, sizes)) if d != along and n > 1]
    return (
        sizes[along] % count == 0
        and operand.strides[along] == 1
        and width <= 16
        and operand.alignment % width == 0
        and all(s % count == 0 for s in others)
    )


def _itype(spec: FilterGradientSpec) -> str:
    reach = [
        extent((spec.images, spec.groups, spec.channels, *spec.sizes), spec.x.strides),
        extent((spec.images, spec.groups, spec.filters, *spec.out), spec.loss.strides),
        spec.images * prod(Edge(n, k).padded for n, k in zip(spec.out, (1, spec.band + 8, 8))),
        prod(spec.space),
        *(extent(spec.space, op.strides) for op in spec.program.operands),
    ]
    return signed_index_type(*reach)


@dataclass(frozen=True)
class Work:
    """What a schedule's threads do, of however many parts their sums are.

    blocks    the blocks of one part; resident has how many of them a multiprocessor holds.
    patches   the patches of a band.
    each      instructions for a patch; ends those after the last one.
    loads     loads for a patch; lines has how many accesses each of them takes.
    """

    blocks: int
    resident: int
    patches: int
    each: float
    ends: int
    loads: int
    lines: float


def work_of(spec: FilterGradientSpec, s: FilterGradientSchedule) -> Work:
    """Returns what a schedule's threads do for a spec."""
    many = pairs(spec, s)
    losses = s.channels if spec.depthwise else s.filters
    convert = 0 if spec.x.dtype.ctype == spec.accumulate else 1
    down, across = span(spec, 1, s.rows, s.taps[0]), span(spec, 2, s.cols, s.taps[1])
    reads = down.touched.bit_count() * across.touched.bit_count()
    positions = s.rows * s.cols
    multiplied = spec.words * positions * prod(s.taps) * many
    converted = convert * (reads * s.channels + positions * losses)
    ragged = (spec.out[1] % s.rows > 0) * s.rows + (spec.out[2] % s.cols > 0) * positions
    return Work(
        blocks=blocks_of(spec, s),
        resident=blocks_per_sm(spec, s),
        patches=prod(patches(spec, s)),
        each=multiplied + converted + 1.4 * reads + positions + 4 * ragged + PLACE,
        ends=prod(s.taps) * many * (3 + 2 * s.walkers.bit_length()) + 200,
        loads=reads + positions,
        lines=_lines(spec, s),
    )


def _cost_model(spec: FilterGradientSpec, target: Target) -> Callable[[FilterGradientSchedule, Work], float]:
    """Returns what estimates the cycles of a spec's schedules.

    They are the slowest of instructions, cache and memory, and what is around.
    """
    bands, parts, sms = spec.bands.size, spec.parts, target.sms
    read = prod((spec.images, spec.groups, spec.channels, *spec.sizes)) + prod(
        (spec.images, spec.groups, spec.filters, *spec.out)
    )
    memory = (read * spec.x.dtype.itemsize + 4 * prod(spec.space)) / (MEMORY_SHARE * target.bytes_per_cycle)

    def cycles(s: FilterGradientSchedule, work: Work) -> float:
        blocks = parts * work.blocks
        steps = -(-bands * work.patches // (s.warps * s.walkers))
        a_sm = -(-blocks // sms)
        waves = -(-blocks // (sms * work.resident))
        each_sm = a_sm if waves == 1 else waves * work.resident
        filled = min(ISSUED, 1 - STALLED ** (min(work.resident, a_sm) * s.warps / 4))
        issue = each_sm * s.warps * (steps * work.each + work.ends) / (4 * filled)
        waiting = waves * steps * (LATENCY + work.each)
        cache = LOAD * each_sm * s.warps * steps * work.loads * work.lines
        total: float = max(issue, cache, memory, waiting) + 0.2 * (issue + cache + memory) + START
        return total

    return cycles


def check_rows(spec: FilterGradientSpec, s: FilterGradientSchedule) -> None:
    """Raises Declined for patches whose rows do not fill bands, where a band is less than the image at some size."""
    if spec.band % s.rows and not below(spec.out[1] - 1, spec.band):
        raise Declined("rows of patches do not fill bands")


def cost(spec: FilterGradientSpec, s: FilterGradientSchedule, target: Target) -> float:
    """Returns the estimated cycles of a schedule.  Raises Declined for one whose patches do not fill bands."""
    check_rows(spec, s)
    return _cost_model(spec, target)(s, work_of(spec, s))


def _lines(spec: FilterGradientSpec, s: FilterGradientSchedule) -> float:
    """Returns how many accesses of 128 bytes a warp's load takes.

    Lanes read neighbours; walkers read patches side by side, or half as many accesses as they are.
    """
    size = spec.x.dtype.itemsize
    if s.lanes == 1:
        return max(1.0, s.walkers * s.cols * spec.stride[2] * size / 128)
    return max(1.0, s.lanes * s.channels * size / 128) * max(1.0, s.walkers / 2)

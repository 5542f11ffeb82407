"""Schedules of direct convolution: its forms, the sizes of their halo tiles, and which of them fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias, TypeVar

from codegen.arch import SECTOR_BYTES
from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.direct_convolution.cost import Work, conflicts, cycles, finishing, partial
from codegen.direct_convolution.flat_schedule import (
    FlatSchedule,
    flat_candidates,
    flat_copy,
    flat_schedules,
    flat_threads,
)
from codegen.direct_convolution.slide_schedule import SlideSchedule, columns, slide_schedules, widest_access
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.family import Schedule
from codegen.iteration import extent, signed_index_type
from codegen.target import PORTABLE, Target

SHARED_LIMIT = 48 * 1024
#: Threads of a block with a halo tile: most, and the fewest where there is work for more.
THREADS, LEAST_THREADS = 256, 64
PATCH_COLUMNS = 4
#: Bytes of registers for the part of an input row that a thread keeps, and for a column of weights and its sums.
LINE_BYTES = 256
COLUMN_BYTES = 512
#: Limits of the strips form: elements besides a vector, weights, registers of the rows a thread keeps, products it adds
#: up.
STRIP_ROWS = (1, 2, 3, 4, 6, 7, 8)
MAX_HALO = 8
MAX_WEIGHTS = 50
STRIP_REGISTERS = 90
STRIP_PRODUCTS = 1600
SM_THREADS, SM_REGISTERS = 1024, 65536  # threads that hide the latency of memory; registers of a multiprocessor
CANDIDATES = 12  # schedules to try
#: Figures of the cost models, fitted to measured times.  Instructions of an element that is put into the halo tile, of
#: a weight and of a row of a thread there, of a weight of channels, and of a load of strips; shares of the issue slots
#: that a warp of a scheduler fills; cycles until an element arrives.
FILL, FILTER, LINE, COLUMN, STRIP = 14.7, 48.0, 27.0, 5.0, 2.35
FILLED, STRIP_FILLED, LATENCY, STRIP_LATENCY = 0.18, 0.8, 490.0, 330.0


@dataclass(frozen=True)
class PlanesSchedule(Schedule):
    """Threads side by side take neighbouring columns of one image plane.

    A block has ``lanes`` threads along the columns, ``down`` along the rows and ``planes`` planes (of an image and a
    group); each thread has a patch of ``rows`` x ``cols`` outputs for every filter of its group.
    """

    rows: int
    cols: int
    lanes: int
    down: int
    itype: str
    planes: int = 1

    @property
    def threads(self) -> int:
        return self.lanes * self.down * self.planes

    @property
    def out_rows(self) -> int:
        """Rows of outputs of a block."""
        return self.rows * self.down

    @property
    def out_cols(self) -> int:
        """Columns of outputs of a block."""
        return self.cols * self.lanes


@dataclass(frozen=True)
class ChannelsSchedule(Schedule):
    """Threads side by side take neighbouring channels of a depthwise convolution.

    A block has ``lanes`` threads of ``vector`` channels each, and ``columns`` of outputs; each thread has ``rows`` rows
    of its column.
    """

    rows: int
    columns: int
    lanes: int
    vector: int
    itype: str

    @property
    def threads(self) -> int:
        return self.lanes * self.columns

    @property
    def out_rows(self) -> int:
        """Rows of outputs of a block."""
        return self.rows

    @property
    def out_cols(self) -> int:
        """Columns of outputs of a block."""
        return self.columns

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return self.lanes * self.vector


@dataclass(frozen=True)
class StripsSchedule(Schedule):
    """A thread has ``rows`` rows of ``vector`` neighbouring outputs of one plane, for every filter of its group."""

    rows: int
    vector: int
    threads: int
    itype: str


DirectConvolutionSchedule: TypeAlias = PlanesSchedule | ChannelsSchedule | StripsSchedule | SlideSchedule | FlatSchedule
#: Schedules whose blocks stage a halo tile in shared memory.
TiledSchedule: TypeAlias = PlanesSchedule | ChannelsSchedule
ScheduleT = TypeVar("ScheduleT")
Tiled = TypeVar("Tiled", PlanesSchedule, ChannelsSchedule)


def threads_of(spec: DirectConvolutionSpec, s: DirectConvolutionSchedule) -> int:
    """Returns the threads of a block."""
    return flat_threads(spec, s) if isinstance(s, FlatSchedule) else s.threads


def fits(spec: DirectConvolutionSpec) -> str | None:
    """Returns why direct convolution has no kernel for a spec; None if it has one."""
    if max(spec.input_dilation) > 1:
        return None if slides(spec, PORTABLE) else "a dilated input of several channels a group or many taps"
    if any(strip_candidates(spec)):
        return None
    every: list[TiledSchedule] = [*(_channels_schedules(spec, 8) if channels_last(spec) else _planes_schedules(spec))]
    if any(_misfit(spec, s) is None for s in every):
        return None
    return _misfit(spec, min(every, key=lambda s: buffers(spec, s).bytes))


def _misfit(spec: DirectConvolutionSpec, s: TiledSchedule) -> str | None:
    """Returns why a schedule does not suit a spec; None if it does."""
    needed = buffers(spec, s).bytes
    if needed > SHARED_LIMIT:
        return f"a halo tile of {needed} bytes does not fit {SHARED_LIMIT} bytes of shared memory"
    if isinstance(s, ChannelsSchedule) and (spec.taps[1] + s.rows) * s.vector * spec.word > COLUMN_BYTES:
        return f"a column of {spec.taps[1]} taps does not fit a thread's registers"
    return None


def channels_last(spec: DirectConvolutionSpec) -> bool:
    """Tells whether neighbouring channels are neighbours in memory, each convolved with a filter of its own."""
    if max(spec.input_dilation) > 1:
        return False
    return spec.in_channels == 1 and spec.filters == 1 and spec.groups >= 8 and spec.x.strides[1] == 1


def strips(spec: DirectConvolutionSpec, target: Target) -> list[StripsSchedule]:
    """Returns strips worth trying, best guess first; none where rows cannot be read 16 bytes at a time.

    Nor are there any where rows are not written as they are read, in vectors, or are read for several planes of taps,
    and whole images fit shared memory.
    """
    found = sorted(strip_candidates(spec), key=lambda s: strip_cycles(spec, s, target))
    again = any(spec.across) or spec.taps[0] > 1 or any(spec.out[2] % s.vector for s in found)
    return [] if again and any(flat_candidates(spec, target, _itype(spec))) else found


def slides(spec: DirectConvolutionSpec, target: Target) -> list[SlideSchedule]:
    """Returns slides worth trying, best guess first; one of each group of similar ones."""
    contiguous = spec.groups > 1 and spec.x.strides[1] == 1
    if spec.in_channels > 1 or not (contiguous or max(spec.input_dilation) > 1):
        return []
    return _unlike(slide_schedules(spec, target, _itype(spec)), lambda s: (s.rows, s.cols, s.vector))


def flats(spec: DirectConvolutionSpec, target: Target) -> list[FlatSchedule]:
    """Returns flat ones worth trying, best guess first; one of each group of similar ones."""
    return _unlike(flat_schedules(spec, target, _itype(spec)), lambda s: (s.rows, s.cols, flat_copy(spec, s.planes)[1]))


def _unlike(ranked: Iterable[ScheduleT], kind: Callable[[ScheduleT], Hashable]) -> list[ScheduleT]:
    """Returns the best schedule of each kind, as many as are worth trying."""
    kinds: dict[Hashable, ScheduleT] = {}
    for schedule in ranked:
        kinds.setdefault(kind(schedule), schedule)
    return [*kinds.values()][:CANDIDATES]


def planes(spec: DirectConvolutionSpec, target: Target) -> list[PlanesSchedule]:
    """Returns halo tiles of planes worth trying, best guess first."""
    if channels_last(spec) or max(spec.input_dilation) > 1:
        return []
    return _by_cost(spec, _planes_schedules(spec), target)


def channels(spec: DirectConvolutionSpec, target: Target) -> list[ChannelsSchedule]:
    """Returns halo tiles of channels worth trying, best guess first."""
    if not channels_last(spec):
        return []
    found = _by_cost(spec, _channels_schedules(spec, 2), target)
    # Of large filters a tile has few channels.
    return found if _misfit(spec, found[0]) is None else _by_cost(spec, _channels_schedules(spec, 8), target)


def _by_cost(spec: DirectConvolutionSpec, candidates: Iterable[Tiled], target: Target) -> list[Tiled]:
    """Returns the schedules that cost least among those whose halo tile fits; the smallest one if none fits."""
    every = list(candidates)
    fitting = [s for s in every if _misfit(spec, s) is None]
    fitting = [s for s in fitting if s.threads >= LEAST_THREADS] or fitting
    return sorted(fitting, key=lambda s: tiled_cycles(spec, s, target))[:CANDIDATES] or [
        min(every, key=lambda s: buffers(spec, s).bytes)
    ]


def halo(spec: DirectConvolutionSpec) -> tuple[int, int]:
    """Returns how many elements an unstrided filter reaches left and right of outputs, negative if not so far."""
    return spec.before[2], (spec.taps[2] - 1) * spec.dilation[2] - spec.before[2]


def strip_candidates(spec: DirectConvolutionSpec) -> Iterator[StripsSchedule]:
    """Yields strips of reasonable code and registers; none where rows cannot be read as vectors."""
    size, xs = spec.x.dtype.itemsize, spec.x.strides
    vector = 16 // size
    left, right = halo(spec)
    steps = [step for step, many in zip(xs, (spec.images, spec.groups, 1, *spec.sizes[:2])) if many > 1]
    aligned = spec.x.alignment % 16 == 0 and all(step % vector == 0 for step in (*steps, spec.sizes[2]))
    unstrided = spec.stride[1:] == (1, 1) and max(spec.input_dilation) == 1
    if not (spec.in_channels == 1 and unstrided and xs[5] == 1 and aligned):
        return
    if right < 0 or left + right > MAX_HALO or spec.filters * prod(spec.taps[1:]) > MAX_WEIGHTS:
        return
    for rows, threads in product(STRIP_ROWS, (128, 256)):
        if rows <= spec.out[1] and _strip_fits(spec, vector, rows):
            yield StripsSchedule(rows, vector, threads, _itype(spec))


def _strip_fits(spec: DirectConvolutionSpec, vector: int, rows: int) -> bool:
    """Tells whether a strip's input rows fit a thread's registers, and its products the instruction cache."""
    lines = rows + (spec.taps[1] - 1) * spec.dilation[1]
    products = rows * vector * spec.filters * prod(spec.taps[1:])
    return lines * (4 + sum(halo(spec))) <= STRIP_REGISTERS and products <= STRIP_PRODUCTS


def _planes_schedules(spec: DirectConvolutionSpec) -> Iterator[PlanesSchedule]:
    height, width = spec.out[1], spec.out[2]
    itype = _itype(spec)
    most = 4 if spec.filters <= 2 else 2 if spec.filters <= 4 else 1
    for rows, cols in product(_halves(most, height), (PATCH_COLUMNS, 1)):
        for lanes in _halves(32, -(-width // cols)):
            for down in _halves(THREADS // lanes, -(-height // rows)):
                for planes in _halves(THREADS // (lanes * down), spec.images * spec.groups):
                    yield PlanesSchedule(rows, cols, lanes, down, itype, planes)


def _channels_schedules(spec: DirectConvolutionSpec, narrowest: int) -> Iterator[ChannelsSchedule]:
    """Yields tiles of the channels of a cache line, or a part of them, down to one of so many."""
    height, width = spec.out[1], spec.out[2]
    itype = _itype(spec)
    for rows, vector in product(_halves(8, height), (4, 2, 1)):
        if spec.groups % vector == 0:
            wide = max(1, 128 // spec.x.dtype.itemsize // vector)  # lanes for 128 contiguous bytes
            most, *_ = _halves(min(32, wide), -(-spec.groups // vector))
            for lanes in (max(1, most // n) for n in powers(narrowest)):
                for columns in sorted({min(-(-width // n), THREADS // lanes) for n in range(1, 33)}):
                    yield ChannelsSchedule(rows, columns, lanes, vector, itype)


def tiled_cycles(spec: DirectConvolutionSpec, s: TiledSchedule, target: Target) -> float:
    """Returns the estimated cycles of a kernel whose blocks stage a halo tile."""
    return cycles(spec, _channels_work(spec, s) if isinstance(s, ChannelsSchedule) else _planes_work(spec, s), target)


def _planes_work(spec: DirectConvolutionSpec, s: PlanesSchedule) -> Work:
    depth, rows, cols = tile_sizes(spec, s)
    tiles = -(-spec.out[1] // s.out_rows) * -(-spec.out[2] // s.out_cols)
    blocks = -(-spec.images * spec.groups // s.planes) * spec.out[0] * tiles
    size, outputs, under = spec.x.dtype.itemsize, spec.filters * s.rows * s.cols, spec.under(1, s.rows)
    interleaved = spec.in_channels > 1 and spec.x.strides[2] == 1
    lines = s.planes * depth * rows * (1 if interleaved else spec.in_channels)
    width = cols * (spec.in_channels if interleaved else 1)
    lanes = fill_lanes(width, s.threads)
    steps = -(-lines // (s.threads // lanes)), -(-width // lanes)
    staged, filters = prod(steps), s.planes * spec.filters * spec.in_channels * prod(spec.taps) / s.threads
    # A row of the tile under a thread's patch is read in vectors, or as many elements as taps meet.
    met = len(columns(spec, s.cols))
    vectors = line_reads(spec, s) is not None and s.cols * spec.stride[2] % PATCH_COLUMNS == 0
    reads, count = ((line_reads(spec, s) or 0) / PATCH_COLUMNS, PATCH_COLUMNS) if vectors else (met, 1)
    if line_reads(spec, s) is None:
        reads = s.cols * spec.taps[2]
    pitch = _pitch(spec, s) * spec.word
    above = s.rows * spec.stride[1] * pitch
    places = (
        (s.lanes, s.cols * spec.stride[2] * spec.word),
        (s.down, above),
        (s.planes, spec.in_channels * depth * rows * pitch),
    )
    loads = spec.in_channels * depth * under * reads
    weights = spec.filters * spec.in_channels * prod(spec.taps) * (1 if s.rows <= spec.taps[1] else s.rows)
    products = spec.filters * spec.in_channels * prod(spec.taps) * s.rows * s.cols * spec.word / 4
    digits = (s.lanes, {5: s.cols}), (s.down, {4: s.rows}), (s.planes, {1: 1})
    return Work(
        blocks=blocks,
        threads=s.threads,
        registers=_registers(spec, s),
        shared=buffers(spec, s).bytes,
        instructions=FILL * staged
        + FILTER * filters
        + loads
        + weights
        + products
        + outputs * finishing(spec)
        + LINE * steps[0]
        + 60,
        filled=FILLED,
        accesses=loads * conflicts(places, count * spec.word) + weights + 2 * staged,
        fetched=blocks * lines * width * size * (1 + SECTOR_BYTES / (width * size)),
        partial=partial(spec, digits, s.cols, 5, spec.out[2] % s.cols == 0),
        waits=LATENCY * (1 + staged / 4),
        code=loads + weights + products,
    )


def _channels_work(spec: DirectConvolutionSpec, s: ChannelsSchedule) -> Work:
    depth, rows, cols = tile_sizes(spec, s)
    tiles = spec.out[0] * -(-spec.out[1] // s.out_rows) * -(-spec.out[2] // s.out_cols)
    size, blocks = spec.x.dtype.itemsize, spec.images * -(-spec.groups // s.channels) * tiles
    access = widest_access(spec, (16, 8, 4, 2), s.channels) or 1
    staged, under = depth * rows * cols * s.channels / access / s.threads, spec.under(1, s.rows)
    loads, weights = depth * spec.taps[2] * under, prod(spec.taps) * s.vector
    convert = 0 if size >= 4 else s.vector
    instructions = (
        loads * (1 + convert) + weights * (COLUMN + s.rows * spec.word / 4) + s.rows * s.vector * finishing(spec)
    )
    digits = (s.lanes, {1: s.vector}), (s.columns, {5: 1})
    return Work(
        blocks=blocks,
        threads=s.threads,
        registers=_registers(spec, s),
        shared=buffers(spec, s).bytes,
        instructions=FILL * staged + instructions + 60,
        filled=FILLED,
        accesses=loads * max(1.0, s.vector * size / 4) + staged * access * size / 4,
        fetched=blocks * depth * rows * cols * s.channels * size * (1 + SECTOR_BYTES / (s.channels * size)),
        partial=partial(spec, digits, s.vector, 1),
        # Columns of weights are read one after the other.
        waits=LATENCY * (1 + staged / 4 + spec.taps[0] * spec.taps[2] / 4),
        code=instructions,
    )


def strip_cycles(spec: DirectConvolutionSpec, s: StripsSchedule, target: Target) -> float:
    """Returns the estimated cycles of a kernel of strips."""
    high, wide = -(-spec.out[1] // s.rows), -(-spec.out[2] // s.vector)
    lines, beside, size = spec.under(1, s.rows), sum(halo(spec)), spec.x.dtype.itemsize
    taps, outputs = spec.filters * prod(spec.taps), spec.filters * s.rows * s.vector
    convert = 0 if size >= 4 else s.vector + beside
    instructions = spec.taps[0] * lines * (STRIP * (1 + beside) + convert) + taps * s.rows * s.vector * spec.word / 4
    instructions += 2 * taps + outputs * finishing(spec) + 60
    digits = (wide, {5: s.vector}), (high, {4: s.rows}), (spec.out[0], {3: 1}), (spec.groups, {1: 1})
    work = Work(
        blocks=-(-spec.images * spec.groups * spec.out[0] * high * wide // s.threads),
        threads=s.threads,
        registers=30
        + lines * (4 + beside)
        + taps // spec.taps[0]
        + min(s.rows, spec.taps[1]) * s.vector * spec.filters,
        shared=0,
        instructions=instructions,
        filled=STRIP_FILLED,
        accesses=0,
        fetched=spec.traffic[0] * spec.taps[0] * lines / s.rows,
        partial=partial(spec, digits, s.vector, 5, spec.out[2] % s.vector == 0),
        waits=STRIP_LATENCY * spec.taps[0],
        code=instructions / spec.taps[0],
    )
    return cycles(spec, work, target)


def _halves(size: int, enough: int) -> list[int]:
    """Returns a power of two, halved for as long as the result is ``enough``, and the smaller ones, down to 1."""
    while size > 1 and size // 2 >= enough:
        size //= 2
    return powers(size)[::-1]


def powers(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to ``most``."""
    return [1 << k for k in range(max(most, 1).bit_length())]


def _itype(spec: DirectConvolutionSpec) -> str:
    space = (spec.images, spec.groups, spec.filters, *spec.out)
    reach = [prod(space), extent((spec.images, spec.groups, spec.in_channels, *spec.sizes), spec.x.strides)]
    reach.append(extent((spec.groups, spec.filters, spec.in_channels, *spec.taps), spec.w.strides))
    reach += [extent(space, op.strides) for op in spec.program.operands]
    return signed_index_type(*reach)


def tile_sizes(spec: DirectConvolutionSpec, s: TiledSchedule) -> tuple[int, int, int]:
    """Returns (depth, rows, columns) of the halo tile of one channel.  Depth is only the planes that taps touch."""
    return spec.taps[0], spec.under(1, s.out_rows), spec.under(2, s.out_cols)


def line_reads(spec: DirectConvolutionSpec, s: PlanesSchedule) -> int | None:
    """Returns how many elements of a tile row lie under a thread's patch, in vectors of four; None if too many."""
    reads = Edge(spec.under(2, s.cols), PATCH_COLUMNS).padded
    return reads if reads * spec.word <= LINE_BYTES else None


def _pitch(spec: DirectConvolutionSpec, s: PlanesSchedule) -> int:
    """Returns the distance, in elements, from one row of a plane's tile to the next.

    It is a multiple of four with room for the last thread's reads.
    """
    last = (s.lanes - 1) * s.cols * spec.stride[2] + (line_reads(spec, s) or 0)
    return Edge(max(last, tile_sizes(spec, s)[2]), PATCH_COLUMNS).padded


def buffers(spec: DirectConvolutionSpec, s: TiledSchedule) -> Buffers:
    """Returns what a block has in static shared memory: the halo tile, and the weights of planes."""
    depth, rows, cols = tile_sizes(spec, s)
    if isinstance(s, ChannelsSchedule):
        return Buffers((Buffer("tile", spec.x.dtype.ctype, (depth, rows, cols, s.channels), align=VECTORS),))
    planes = (s.planes,) if s.planes > 1 else ()
    tile = (*planes, spec.in_channels, depth, rows, _pitch(spec, s))
    weights = (*planes, spec.filters, spec.in_channels, *spec.taps)
    return Buffers((Buffer("tile", spec.accumulate, tile, align=VECTORS), Buffer("weights", spec.accumulate, weights)))


def blocks_per_sm(spec: DirectConvolutionSpec, s: TiledSchedule) -> int:
    """Returns how many blocks a multiprocessor should hold: enough to hide memory latency, if registers suffice.

    Left alone, ptxas spills a few registers to fit one more block; told that one is enough, it takes so many registers
    that few blocks fit.
    """
    if spec.word > 4:
        return 1  # pairs of registers: ptxas spills before it runs out
    return max(1, min(SM_THREADS // s.threads, SM_REGISTERS // (s.threads * _registers(spec, s))))


def _registers(spec: DirectConvolutionSpec, s: TiledSchedule) -> int:
    """Returns the estimated registers of a thread."""
    if isinstance(s, ChannelsSchedule):
        return 48 + (spec.taps[1] + s.rows + 1) * s.vector
    return 64 + spec.filters * s.rows * s.cols + (line_reads(spec, s) or s.cols)


def fill_lanes(width: int, threads: int) -> int:
    """Returns how many threads side by side take a row of the halo tile of planes."""
    lanes = 32
    while lanes > 1 and (lanes // 2 >= width or threads % lanes):
        lanes //= 2
    return lanes

"""Schedules of direct convolution: its forms, the sizes of their halo tiles, and which of them fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TypeAlias, TypeVar

from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.direct_convolution.flat_schedule import FlatSchedule, flat_candidates, flat_schedules, flat_threads
from codegen.direct_convolution.slide_schedule import SlideSchedule, slide_schedules
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.family import Schedule
from codegen.iteration import extent, signed_index_type
from codegen.target import PORTABLE, Target

SHARED_LIMIT = 48 * 1024
THREADS = 256
PATCH_COLUMNS = 4
#: Bytes of registers for the part of an input row that a thread keeps, and for a column of weights and its sums.
LINE_BYTES = 256
COLUMN_BYTES = 512
#: Blocks per multiprocessor, and threads of each, that keep all multiprocessors busy.
ENOUGH_BLOCKS = 2
ENOUGH_THREADS = 128
#: Limits of the strips form: elements besides a vector, weights, registers of the rows a thread keeps, products it adds
#: up.
STRIP_ROWS = 4  # with more rows less is read twice, but there is room for fewer threads
MAX_HALO = 8
MAX_WEIGHTS = 50
STRIP_CANDIDATES = (4, 7, 2, 8, 3, 6)
STRIP_REGISTERS = 90
STRIP_PRODUCTS = 1600
SM_THREADS, SM_REGISTERS = 1024, 65536  # threads that hide the latency of memory; registers of a multiprocessor
CANDIDATES = 12  # schedules to try
SECTOR = 32  # bytes of the smallest access to device memory


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
    if strips_schedule(spec):
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


def strips(spec: DirectConvolutionSpec, target: Target) -> Iterator[StripsSchedule]:
    """Yields strips worth trying, best guess first; none where rows cannot be read 16 bytes at a time.

    Nor are there any where rows are not written as they are read, in vectors, or are read for several planes of taps,
    and whole images fit shared memory.
    """
    best = strips_schedule(spec, target)
    again = any(spec.across) or spec.taps[0] > 1 or (best is not None and spec.out[2] % best.vector > 0)
    if best is not None and not (again and any(flat_candidates(spec, target, best.itype))):
        yield best
        for rows in STRIP_CANDIDATES:
            if rows <= spec.out[1] and _strip_fits(spec, best.vector, rows):
                yield from (replace(best, rows=rows, threads=threads) for threads in (128, 256))


def slides(spec: DirectConvolutionSpec, target: Target) -> list[SlideSchedule]:
    """Returns slides worth trying, best guess first; one of each group of similar ones."""
    contiguous = spec.groups > 1 and spec.x.strides[1] == 1
    if spec.in_channels > 1 or not (contiguous or max(spec.input_dilation) > 1):
        return []
    return _unlike(slide_schedules(spec, target, _itype(spec)), lambda s: (s.rows, s.cols, s.vector))


def flats(spec: DirectConvolutionSpec, target: Target) -> list[FlatSchedule]:
    """Returns flat ones worth trying, best guess first; one of each group of similar ones."""
    return _unlike(flat_schedules(spec, target, _itype(spec)), lambda s: (s.rows, s.cols))


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
    return sorted(fitting, key=lambda s: _cost(spec, s, target))[:CANDIDATES] or [
        min(every, key=lambda s: buffers(spec, s).bytes)
    ]


def halo(spec: DirectConvolutionSpec) -> tuple[int, int]:
    """Returns how many elements an unstrided filter reaches left and right of outputs, negative if not so far."""
    return spec.before[2], (spec.taps[2] - 1) * spec.dilation[2] - spec.before[2]


def strips_schedule(spec: DirectConvolutionSpec, target: Target = PORTABLE) -> StripsSchedule | None:
    """Returns the largest strips of reasonable code and registers; None where rows cannot be read as vectors."""
    size, xs = spec.x.dtype.itemsize, spec.x.strides
    vector = 16 // size
    left, right = halo(spec)
    steps = [step for step, many in zip(xs, (spec.images, spec.groups, 1, *spec.sizes[:2])) if many > 1]
    aligned = spec.x.alignment % 16 == 0 and all(step % vector == 0 for step in (*steps, spec.sizes[2]))
    unstrided = spec.stride[1:] == (1, 1) and max(spec.input_dilation) == 1
    if not (spec.in_channels == 1 and unstrided and xs[5] == 1 and aligned):
        return None
    if right < 0 or left + right > MAX_HALO or spec.filters * prod(spec.taps[1:]) > MAX_WEIGHTS:
        return None
    for rows in _halves(STRIP_ROWS, spec.out[1]):
        threads = spec.images * spec.groups * spec.out[0] * -(-spec.out[1] // rows) * -(-spec.out[2] // vector)
        busy = rows == 1 or threads >= ENOUGH_BLOCKS * target.sms * ENOUGH_THREADS
        if busy and _strip_fits(spec, vector, rows):
            return StripsSchedule(rows, vector, ENOUGH_THREADS, _itype(spec))
    return None


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
                for columns in sorted({-(-width // n) for n in range(1, 33)}):
                    if columns * lanes <= THREADS:
                        yield ChannelsSchedule(rows, columns, lanes, vector, itype)


def _cost(spec: DirectConvolutionSpec, s: TiledSchedule, target: Target) -> tuple[float, int]:
    """Returns what to minimize: instructions of all threads, at least those of one wave of blocks; then idle threads.

    The count was made by hand from the code in `codegen.direct_convolution`: staging an element, multiplying, loading
    weights, storing.  Blocks of few threads, and runs that leave much of the touched memory sectors unused, take
    longer.
    """
    depth, rows, cols = tile_sizes(spec, s)
    taps, under = prod(spec.taps), spec.under(1, s.rows)
    tiles = spec.out[0] * -(-spec.out[1] // s.out_rows) * -(-spec.out[2] // s.out_cols)
    if isinstance(s, ChannelsSchedule):
        blocks = spec.images * -(-spec.groups // s.channels) * tiles
        run = min(s.channels, spec.groups) * spec.x.dtype.itemsize
        access = max(1, min(16, run) // spec.x.dtype.itemsize)
        staged = depth * rows * cols * s.channels * (1 + 20 / access) * max(1.0, SECTOR / run)
        each: float = (
            depth * spec.taps[2] * under * (1 + s.vector) + taps * s.vector * (s.rows + 2) + 6 * s.rows * s.vector
        )
    else:
        blocks = -(-spec.images * spec.groups // s.planes) * tiles
        run = cols * spec.x.dtype.itemsize
        staged = s.planes * spec.in_channels * depth * rows * cols * 8 * _sectors(run) * SECTOR / run
        outputs = spec.filters * s.rows * s.cols
        lines = spec.in_channels * depth * under
        reads = (line_reads(spec, s) or s.cols * spec.taps[2] * PATCH_COLUMNS) / PATCH_COLUMNS
        each = lines * reads + spec.in_channels * taps * spec.filters * s.rows * (1 + s.cols) + 6 * outputs
    idle = max(1.0, ENOUGH_THREADS / s.threads)
    return max(1.0, blocks / (ENOUGH_BLOCKS * target.sms)) * (staged + s.threads * each) * idle, -s.threads


def _sectors(run: int) -> int:
    """Returns how many sectors of memory a run of bytes touches at most, wherever it starts."""
    return -(-run // SECTOR) + 1


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
    if isinstance(s, ChannelsSchedule):
        registers = 36 + (spec.taps[1] + s.rows + 1) * s.vector
    else:
        registers = 64 + spec.filters * s.rows * s.cols + (line_reads(spec, s) or s.cols)
    return max(1, min(SM_THREADS // s.threads, SM_REGISTERS // (s.threads * registers)))

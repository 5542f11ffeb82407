"""Schedules of the window family: the two forms of its kernels, the sizes of their halo tiles, and which fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from codegen.iteration import extent, index_type
from codegen.spec import WindowSpec

SHARED_LIMIT = 48 * 1024
THREADS = 256
PATCH_COLUMNS = 4
#: Bytes of registers for the part of an input row that a thread keeps, and for a column of weights and its sums.
LINE_BYTES = 256
COLUMN_BYTES = 512
#: Blocks that keep a large GPU busy: below that, blocks take fewer planes each.
ENOUGH_BLOCKS = 264


@dataclass(frozen=True)
class PlanesSchedule:
    """Threads side by side take neighbouring columns of one image plane.

    A block has ``lanes`` threads along the columns, ``down`` along the rows and ``planes`` planes (of an image and a
    group); each thread has a patch of ``rows`` x ``cols`` outputs for every filter of its group.
    """

    rows: int
    cols: int
    lanes: int
    down: int
    planes: int
    itype: str

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
class ChannelsSchedule:
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


WindowSchedule: TypeAlias = PlanesSchedule | ChannelsSchedule


def fits(spec: WindowSpec) -> str | None:
    """Why the window family has no kernel for a spec; None if it has."""
    schedule = best_schedule(spec)
    needed = shared_bytes(spec, schedule)
    if needed > SHARED_LIMIT:
        return f"a halo tile of {needed} bytes does not fit {SHARED_LIMIT} bytes of shared memory"
    if isinstance(schedule, ChannelsSchedule) and _column_bytes(spec, schedule) > COLUMN_BYTES:
        return f"a column of {spec.taps[1]} taps does not fit a thread's registers"
    return None


def channels_last(spec: WindowSpec) -> bool:
    """Whether neighbouring channels are neighbours in memory and each is convolved with one filter of its own."""
    return spec.in_channels == 1 and spec.filters == 1 and spec.groups >= 8 and spec.x.strides[1] == 1


def best_schedule(spec: WindowSpec) -> WindowSchedule:
    """The schedule used when nothing was tuned: the largest tile that fits, shrunk until the outputs fill it."""
    return _channels_schedule(spec) if channels_last(spec) else _planes_schedule(spec)


def _planes_schedule(spec: WindowSpec) -> PlanesSchedule:
    height, width = spec.out[1], spec.out[2]
    rows = _halved(4 if spec.filters <= 2 else 2 if spec.filters <= 4 else 1, height)
    lanes = _halved(32, -(-width // PATCH_COLUMNS))
    down = _halved(THREADS // lanes, -(-height // rows))
    planes = _halved(THREADS // (lanes * down), spec.images * spec.groups)
    schedule = PlanesSchedule(rows, PATCH_COLUMNS, lanes, down, planes, _itype(spec))
    tiles = spec.out[0] * -(-height // schedule.out_rows) * -(-width // schedule.out_cols)
    while schedule.planes > 1 and -(-spec.images * spec.groups // schedule.planes) * tiles < ENOUGH_BLOCKS:
        schedule = replace(schedule, planes=schedule.planes // 2)
    for smaller in _smaller(schedule):
        if shared_bytes(spec, schedule) <= SHARED_LIMIT:
            break
        schedule = smaller
    return schedule


def _smaller(s: PlanesSchedule) -> Iterator[PlanesSchedule]:
    """Ever smaller tiles, down to one output."""
    for field in ("planes", "rows", "down", "lanes", "cols"):
        while getattr(s, field) > 1:
            s = replace(s, **{field: getattr(s, field) // 2})
            yield s


def _channels_schedule(spec: WindowSpec) -> ChannelsSchedule:
    rows = _halved(8, spec.out[1])
    itype = _itype(spec)

    def affordable(vector: int) -> bool:
        return _column_bytes(spec, ChannelsSchedule(rows, 1, 1, vector, itype)) <= COLUMN_BYTES

    vector = next(v for v in (4, 2, 1) if spec.groups % v == 0 and (v == 1 or affordable(v)))
    wanted = max(1, 128 // spec.x.dtype.itemsize // vector)  # lanes for 128 contiguous bytes
    lanes = 1
    while lanes < min(wanted, 32) and lanes * vector < spec.groups:
        lanes *= 2
    width = spec.out[2]
    columns = min(range(max(1, 128 // lanes), THREADS // lanes + 1), key=lambda c: (-(-width // c) * c, -c))
    schedule = ChannelsSchedule(rows, columns, lanes, vector, itype)
    while shared_bytes(spec, schedule) > SHARED_LIMIT and schedule.rows * schedule.columns > 1:
        if schedule.rows > 1:
            schedule = replace(schedule, rows=schedule.rows // 2)
        else:
            schedule = replace(schedule, columns=schedule.columns // 2)
    return schedule


def _halved(size: int, enough: int) -> int:
    """A power of two, halved for as long as half of it is enough."""
    while size > 1 and size // 2 >= enough:
        size //= 2
    return size


def _itype(spec: WindowSpec) -> str:
    space = (spec.images, spec.groups, spec.filters, *spec.out)
    reach = [prod(space), extent((spec.images, spec.groups, spec.in_channels, *spec.sizes), spec.x.strides)]
    reach.append(extent((spec.groups, spec.filters, spec.in_channels, *spec.taps), spec.w.strides))
    reach += [extent(space, op.strides) for op in spec.program.operands]
    return "int32" if index_type(*(2 * r for r in reach)) == "uint32" else "int64"


def tile_sizes(spec: WindowSpec, s: WindowSchedule) -> tuple[int, int, int]:
    """(depth, rows, columns) of the halo tile of one channel.  Depth is only the planes that taps touch."""
    rows = (s.out_rows - 1) * spec.stride[1] + (spec.taps[1] - 1) * spec.dilation[1] + 1
    cols = (s.out_cols - 1) * spec.stride[2] + (spec.taps[2] - 1) * spec.dilation[2] + 1
    return spec.taps[0], rows, cols


def line_reads(spec: WindowSpec, s: PlanesSchedule) -> int | None:
    """Elements of a tile row under one thread's patch, in whole vectors of four; None if they are too many to keep."""
    span = (s.cols - 1) * spec.stride[2] + (spec.taps[2] - 1) * spec.dilation[2] + 1
    reads = -(-span // PATCH_COLUMNS) * PATCH_COLUMNS
    return reads if reads * element_bytes(spec.accumulate) <= LINE_BYTES else None


def pitch(spec: WindowSpec, s: PlanesSchedule) -> int:
    """Elements from one row of a plane's tile to the next: a multiple of four with room for the last thread's reads."""
    last = (s.lanes - 1) * s.cols * spec.stride[2] + (line_reads(spec, s) or 0)
    return -(-max(last, tile_sizes(spec, s)[2]) // PATCH_COLUMNS) * PATCH_COLUMNS


def element_bytes(ctype: str) -> int:
    """Size of an accumulator."""
    return 8 if ctype in ("double", "uint64") else 4


def _column_bytes(spec: WindowSpec, s: ChannelsSchedule) -> int:
    """Bytes of a thread's registers for a column of weights and for its sums."""
    return (spec.taps[1] + s.rows) * s.vector * element_bytes(spec.accumulate)


def shared_bytes(spec: WindowSpec, s: WindowSchedule) -> int:
    """Static shared memory of a block, in bytes."""
    depth, rows, cols = tile_sizes(spec, s)
    if isinstance(s, ChannelsSchedule):
        return depth * rows * cols * s.channels * spec.x.dtype.itemsize
    weights = spec.filters * spec.in_channels * prod(spec.taps)
    tile = spec.in_channels * depth * rows * pitch(spec, s)
    return s.planes * (tile + weights) * element_bytes(spec.accumulate)

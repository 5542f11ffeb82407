"""Schedules of convolutions whose windows are read from a part of the image in shared memory, and their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd, hypot, prod
from typing import Any, TypeVar

from codegen.arch import SECTOR_BYTES
from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.contraction.halo_windows import (
    CHUNK,
    FRAGMENT_COLS,
    FRAGMENT_ROWS,
    MOST_SUMS,
    Phase,
    Windows,
    windows,
)
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.fragments import MOST_PAD
from codegen.operands import round_up
from codegen.ranking import in_order
from codegen.records import changed, once
from codegen.spec import ContractionSpec, Gather
from codegen.target import Target

#: Bytes of a product's part of the reduction, and of shared memory's banks.
STEP, BANKS = 32, 128


@dataclass(frozen=True)
class HaloSchedule(Schedule):
    """A tile has the results of ``groups`` groups at ``images`` x ``depth`` x ``rows`` x ``cols`` positions.

    warps      of a block, each of which has as many positions, 16 at a time, and the filters of all the groups.
    stages     parts of the image in shared memory: with two, one is read while the next one is brought.
    wgmma      whether four warps together multiply, as warpgroups: filters are read where they lie.
    workers    blocks that share the tiles of a group; ``resident`` those that a multiprocessor is to hold.
    """

    images: int
    depth: int
    rows: int
    cols: int
    groups: int
    warps: int
    stages: int = 1
    wgmma: bool = False
    workers: int = 1
    resident: int = 1

    @property
    def tile(self) -> tuple[int, int, int, int]:
        return self.images, self.depth, self.rows, self.cols

    @property
    def threads(self) -> int:
        return 32 * self.warps


def vector_bytes(gather: Gather, steps: tuple[int, ...], width: int) -> int:
    """Returns the bytes of an asynchronous copy of channels of an operand, ``width`` bytes of which are neighbours.

    0: they are no neighbours, or at odd addresses.  ``steps`` are those of all that is no channel.
    """
    size = gather.operand.dtype.itemsize
    if gather.inner[0] != 1:
        return 0
    least = gcd(width, gather.operand.alignment, *(abs(step) * size for step in (*steps, gather.start)))
    return next((n for n in (16, 8, 4) if least % n == 0), 0)


class HaloTile:
    """What a block has in shared memory, and how its warps share the results of a tile."""

    convolution = staticmethod(windows)
    parts = 1  #: of an element of the operands

    def __init__(self, spec: ContractionSpec, schedule: HaloSchedule) -> None:
        self.spec, self.s, self.at = spec, schedule, self.convolution(spec)
        s, at = schedule, self.at
        #: elements of the image under the tile: images, and in each spatial dimension
        self.under = (s.images, *at.under(s.tile[1:]))
        self.pixels, self.positions = prod(self.under), prod(s.tile)
        self.cols, self.width = s.groups * at.filters, s.groups * at.width
        self.edges = tuple(Edge(*both) for both in zip((at.images, *at.out), s.tile))
        self.slabs = Edge(at.groups, s.groups)
        self.tiles = prod(edge.tiles for edge in self.edges)
        #: fragments below each other that a warp has, and in all
        self.own = -(-self.positions // (FRAGMENT_ROWS * s.warps))
        self.sums = 4 * self.own * at.fragments * s.groups
        #: whether results are written from registers: where four threads have 16 bytes that are neighbours
        self.direct = at.filters >= FRAGMENT_COLS and all(x.operand.strides[-1] == 1 for x in spec.program.stores)
        #: columns of results that a thread has next to each other: 4 where two fragments share 16 filters evenly
        self.run = 4 if self.direct and at.filters % (2 * FRAGMENT_COLS) == 0 else 2

    @once
    def moved(self) -> float:
        """The bytes of a tile that memory moves, whole sectors of it: the image's and those of results, and of what
        is read beside them.
        """
        spec, at = self.spec, self.at
        image: float = self.pixels * self.width
        if spec.a.inner[0] != 1 and at.steps[-1] == 1:
            image *= _sectors(self.under[1:], at.sizes, at.itemsize)
        size = max((store.operand.dtype.itemsize for store in spec.program.stores), default=0)
        results: float = self.positions * self.cols * len(at.phases) * size * len(spec.program.operands)
        if any(store.operand.strides[-2] == 1 < at.filters for store in spec.program.stores):
            results *= _sectors(self.s.tile[1:], at.out, size)
        return image + results

    def steps_of(self, phase: Phase) -> int:
        """Returns the products along the sum that a phase takes."""
        return -(-self.at.chunks_of(phase) * CHUNK // STEP)

    @once
    def steps(self) -> int:
        """The products along the sums of all phases."""
        return sum(map(self.steps_of, self.at.phases))

    @once
    def image_vector(self) -> int:
        """Bytes of a copy of the image, 0 where there is none."""
        outside = (self.spec.a.outer[0], *self.at.steps)
        return vector_bytes(self.spec.a, outside, gcd(self.at.width * self.at.groups, self.width))

    @once
    def filter_vector(self) -> int:
        """Bytes of a copy of the filters, 0 where there is none."""
        b = self.spec.b
        return vector_bytes(b, (*b.batch, *b.outer, *b.inner[1:]), self.at.width)

    @property
    def registers(self) -> int:
        """Registers of a thread, roughly."""
        return self.sums + (8 * self.own * self.s.groups if self.s.wgmma else 4 * self.own) + 2 * self.own + 60

    @once
    def reads(self) -> tuple[int, float]:
        """Returns the bytes from a pixel to the next, and how often shared memory is read for a fragment's half."""
        return _pitched(self.at, self.s.tile, round_up(self.width, VECTORS))

    @property
    def image(self) -> Buffer:
        """The part of the image."""
        shape = (self.pixels, self.reads[0])
        return Buffer("image", "unsigned char", shape, self.s.stages, align=VECTORS, note="under the tile")

    @property
    def tables(self) -> tuple[Buffer, ...]:
        """What lies there besides the operands."""
        return ()

    @once
    def buffers(self) -> Buffers:
        row = self.steps * STEP
        row += -(row - STEP) % BANKS if row % BANKS not in (STEP, 3 * STEP) else 0
        rows, columns = (2 * self.steps, VECTORS * self.cols) if self.s.wgmma else (self.cols, row)
        sums = max(FRAGMENT_ROWS * (self.cols + MOST_PAD), self.cols * (FRAGMENT_ROWS + MOST_PAD))
        filters = Buffer("filters", "unsigned char", (self.parts * rows, columns), align=BANKS, note="tap by tap")
        left = Buffer("sums", "float", (self.s.warps, sums), align=VECTORS, note="each warp's, on their way out")
        return Buffers((self.image, filters, *self.tables, *(() if self.direct else (left,))))

    def resident(self, target: Target) -> int:
        """Returns how many blocks a multiprocessor holds."""
        return target.arch.blocks_per_sm(self.s.threads, self.registers, self.buffers.bytes)


@lru_cache(4096)
def _pitched(at: Windows, tile: tuple[int, ...], width: int) -> tuple[int, float]:
    """Returns the bytes from a pixel of ``width`` bytes to the next, and how often shared memory is read."""
    found = ((pitch, _reads(at, tile, pitch)) for pitch in range(width, width + 64, VECTORS))
    return min(found, key=lambda each: each[1] + each[0] / 4096)


def _reads(at: Windows, tile: tuple[int, ...], pitch: int) -> float:
    """Returns how often the banks are read, on average, for half of a warp's chunks of a step: 4 rows of 4 chunks."""
    under = (tile[0], *at.under(tile[1:]))
    rows = [sum(c * step for c, step in zip(place, _pixels(at, under))) for place in first_positions(tile, 12)]
    reach = [step * dilation for step, dilation in zip(_pixels(at, under, 1), at.dilation)]
    steps = range(0, -(-at.chunks // 4), -(-at.chunks // 16))
    found = 0
    for step in steps:
        chunks = [divmod(min(4 * step + lane, at.chunks - 1), at.width // CHUNK) for lane in range(4)]
        taps = [(sum(c * r for c, r in zip(unravel(tap, at.taps), reach)), inside) for tap, inside in chunks]
        for first in (0, 8):
            places = {(row + tap) * pitch + inside * CHUNK for row in rows[first : first + 4] for tap, inside in taps}
            banks = [place % BANKS for place in places]
            found += max(map(banks.count, banks), default=0)
    return found / (2 * len(steps))


def _sectors(tile: tuple[int, ...], sizes: tuple[int, ...], itemsize: int) -> float:
    """Returns how many bytes move for one of a tile whose last dimension lies together, and begins anywhere."""
    run = tile[-1] * (tile[-2] if tile[-1] >= sizes[-1] else 1) * itemsize
    return 1 + (SECTOR_BYTES - itemsize) / run


def _pixels(at: Windows, under: tuple[int, ...], first: int = 0) -> list[int]:
    """Returns the pixels from one position of a tile to the next in each dimension, or with ``first`` 1 one element."""
    steps = [prod(under[d + 1 :]) for d in range(len(under))]
    return steps[1:] if first else [step * stride for step, stride in zip(steps, (1, *at.stride))]


def unravel(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the coordinates of a row-major position."""
    return tuple(number // prod(sizes[d + 1 :]) % size for d, size in enumerate(sizes))


def first_positions(sizes: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Returns the coordinates of the first positions of a tile."""
    return [unravel(number, sizes) for number in range(min(count, prod(sizes)))]


# ---- schedules

TileT = TypeVar("TileT", bound=HaloTile)
#: Most warps of a block, fragments below each other of a warp, and fragments of a warp that warpgroups multiply in a
#: step: with more, the compiler makes them wait for each product.
MOST_WARPS, MOST_OWN, MOST_TOGETHER = 16, 4, 4
#: Bytes of channels of a block that are worth trying, and its positions.
WIDTHS, POSITIONS = (64, 128, 256), (32, 512)
#: How many tiles are tried of about the same number of positions.
TILES = 4
#: Most schedules worth trying.
MOST = 48
#: Cycles of a multiprocessor for a product of a warp; of a warpgroup's, for 8 columns, and for how many more columns;
#: bytes that it gets from the L2 cache in a cycle, and instructions of threads in a cycle.
PRODUCT, TOGETHER, MORE, L2_RATE, ISSUE = 2.7, 1.2, 16, 25.6, 128.0
#: Instructions of a thread for a copy, for an element that it loads, for a result, and for one that is staged.
COPY, ELEMENT, RESULT, STAGED = 20.0, 27.0, 6.0, 10.7
#: Cycles of the launch, until the first operands have come; of a warp for a tile, more if its part of the image is not
#: brought ahead, for a step of it, and for each instruction.
LAUNCH, TILE, BROUGHT, WAIT, BETWEEN = 3000.0, 1455.0, 1455.0, 28.0, 2.7
#: The share of all other work that is not hidden behind the longest.
EXPOSED = 0.36
#: How much longer tiles were measured to take, and those whose results lie in phases.
LONGER, PHASED = 1.12, 1.6


def schedules(spec: ContractionSpec, target: Target) -> tuple[HaloSchedule, ...]:
    """Returns schedules worth trying, the one with the least estimated time first, then the best of every other kind.

    Raises Declined with a reason.
    """
    return in_order(_ranked(spec, target), lambda s: (s.wgmma, s.stages, s.groups, s.warps))[:MOST]


def cycles(spec: ContractionSpec, target: Target) -> float:
    """Returns the cycles that the best schedule is estimated to take.  Raises Declined with a reason."""
    return _ranked(spec, target)[0][0]


def cost(spec: ContractionSpec, schedule: HaloSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take."""
    tile = HaloTile(spec, schedule)
    return _cost(tile, -(-tile.tiles // schedule.workers), schedule.resident, target)


@lru_cache(256)
def _ranked(spec: ContractionSpec, target: Target) -> list[tuple[float, HaloSchedule]]:
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch} has no asynchronous copies to shared memory")
    tiles = (HaloTile(spec, s) for s in _candidates(windows(spec)) if target.arch.has_wgmma or not s.wgmma)
    suits = (
        x for x in tiles if not x.s.wgmma or (x.filter_vector and x.direct and x.own * x.s.groups <= MOST_TOGETHER)
    )
    return ranked(suits, _cost, target)


def ranked(
    tiles: Iterable[TileT], cost: Callable[[TileT, int, int, Target], float], target: Target
) -> list[tuple[float, Any]]:
    """Returns the schedules of the tiles that fit, their estimated cycles in front, the least first.

    ``cost`` is told how many tiles a block has, and how many blocks a multiprocessor.  Raises Declined if none fits.
    """
    found = []
    for x in tiles:
        if resident := x.resident(target) if x.sums <= MOST_SUMS else 0:
            most = -(-x.tiles // max(1, resident * target.sms // x.slabs.tiles))  # tiles of a block
            chosen = changed(x.s, workers=-(-x.tiles // most), resident=resident)
            found.append((cost(x, most, resident, target), chosen))
    if not found:
        raise Declined("no part of the image, with its filters, fits the shared memory and the registers of a block")
    return sorted(found, key=lambda entry: entry[0])


def _candidates(at: Windows) -> Iterator[HaloSchedule]:
    counts = dict.fromkeys(max(1, min(at.groups, width // at.width)) for width in WIDTHS)
    for groups, (images, depth, rows, cols) in product(counts, likely_tiles(at)):
        fragments = -(-images * depth * rows * cols // FRAGMENT_ROWS)
        for warps in dict.fromkeys(-(-fragments // own) for own in range(1, MOST_OWN + 1)):
            for stages in (1, 2) if warps <= MOST_WARPS else ():
                yield HaloSchedule(images, depth, rows, cols, groups, warps, stages)
            together = round_up(warps, 4)
            if at.wgmma and together <= MOST_WARPS:
                every = (HaloSchedule(images, depth, rows, cols, groups, together, stages, True) for stages in (1, 2))
                yield from every


def likely_tiles(at: Windows) -> list[tuple[int, int, int, int]]:
    """Returns tiles of positions, parts of an image or whole images: those of every size that make the least work."""
    low, high = POSITIONS
    found: dict[int, list[tuple[float, tuple[int, int, int, int]]]] = {}
    for depth, rows, cols in product(*(_shares(size) for size in at.out)):
        tile, count = (depth, rows, cols), depth * rows * cols
        whole = tile == at.out
        for images in _shares(at.images) if whole else (1,):
            positions = images * count
            if positions > high or (positions < low and not (whole and images == at.images)):
                continue
            tiles = -(-at.images // images) * prod(-(-size // part) for size, part in zip(at.out, tile))
            under = at.under(tile)
            apart = _sectors(under, at.sizes, at.itemsize) if at.steps[-1] == 1 else 1.0
            work = tiles * (images * prod(under) * apart + round_up(positions, FRAGMENT_ROWS))
            found.setdefault(positions.bit_length(), []).append((work, (images, depth, rows, cols)))
    return [tile for every in found.values() for _, tile in sorted(every)[:TILES]]


def _shares(size: int) -> list[int]:
    """Returns sizes of parts worth trying: equal ones, small ones, and powers of two."""
    equal = {-(-size // n) for n in range(1, 17)}
    return sorted(n for n in equal | {*range(1, 9), 16, 32, 64, 128, 256} if n <= size)


def _cost(x: HaloTile, tiles: int, resident: int, target: Target) -> float:
    """Returns the estimated cycles if a block has so many tiles.  The constants are fits to measurements."""
    s, at = x.s, x.at
    fragments = s.warps * x.own * s.groups * x.steps
    image, filters, results = x.pixels * x.width, x.cols * x.steps * STEP, x.positions * x.cols * len(at.phases)
    products, matrices = fragments * at.fragments * PRODUCT, at.fragments * (1 + 1 / x.own)
    shared = fragments * (4 * x.reads[1] + 2 * at.fragments / x.own) + image / BANKS
    if s.wgmma:
        products, matrices = fragments * (at.filters + MORE) / FRAGMENT_COLS * TOGETHER, 0.5
        shared = fragments * 4 * x.reads[1] + image / BANKS
    shared += 0 if x.direct else 8 * results / BANKS
    instructions = results * (RESULT if x.direct else STAGED) + _copies(image, x.image_vector, at.itemsize)
    instructions += 32 * fragments * (2 + matrices + 6 / x.own / s.groups)
    work = [products, shared, instructions / ISSUE, x.moved / L2_RATE]
    busy = max(work) + EXPOSED * (sum(work) - max(work))
    # A warp that takes part in a product waits for its fragments, and for those of the others.
    waits = TILE + (BROUGHT if s.stages == 1 else 0.0) + x.steps * WAIT * (1 + s.wgmma)
    waits += BETWEEN * instructions / s.threads
    blocks = -(-x.slabs.tiles * -(-x.tiles // tiles) // target.sms)  # of a multiprocessor
    once = LAUNCH + blocks * (filters / L2_RATE + _copies(filters, x.filter_vector, at.itemsize) / ISSUE)
    longer = PHASED if len(at.phases) > 1 else LONGER
    return once + longer * -(-blocks // resident) * tiles * hypot(busy * min(blocks, resident), waits)


def _copies(size: int, vector: int, itemsize: int) -> float:
    """Returns the instructions that copies take."""
    return size / vector * COPY if vector else size / itemsize * ELEMENT

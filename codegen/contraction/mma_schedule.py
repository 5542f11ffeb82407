"""Schedules of contractions on mma.sync: tiles, how warps share them, and their cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log2, prod
from operator import itemgetter
from typing import NamedTuple

from codegen.buffers import Buffer, Buffers
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.fragments import MOST_PAD, space, staging
from codegen.phases import busy_share
from codegen.ranking import in_order, least
from codegen.records import changed
from codegen.spec import ContractionSpec
from codegen.target import Target
from codegen.tile_path import TilePaths, convert_registers, held_registers, tile_paths


@dataclass(frozen=True)
class MmaSchedule(Schedule):
    """A tile of ``tile_m`` x ``tile_n`` a block, of which each of ``warps_m`` x ``warps_n`` warps has an equal part.

    tile_k   elements of the reduction per stage; ``stages`` those of the ring.
    split_k   blocks (a cluster) that share the reduction of a tile.
    raster_group    rows of tiles that concurrent blocks go through together.
    widen   whether 8-bit floats become float16 on the way to shared memory: for tensor cores that do not take them, or
            add them up in fewer bits.

    Raises ValueError unless the part of a warp has 16, 32 or 64 rows and columns and a row of a stage 64 or 128 bytes:
    these are the tiles that `tile_paths` can fill.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warps_m: int
    warps_n: int
    stages: int
    split_k: int = 1
    raster_group: int = 8
    widen: bool = False

    def __post_init__(self) -> None:
        if self.warp_rows not in (16, 32, 64) or self.warp_cols not in (16, 32, 64):
            raise ValueError(f"{self}: a warp has 16, 32 or 64 rows and columns")
        if self.stages < 2 or self.warp_rows // 16 % self.split_k:
            raise ValueError(f"{self}: at least 2 stages, and a split_k that divides a warp's rows by 16")

    @property
    def warp_rows(self) -> int:
        return self.tile_m // self.warps_m

    @property
    def warp_cols(self) -> int:
        return self.tile_n // self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def tiles(self, parts: TilePaths) -> int:
        """Returns the number of tiles that make up the results."""
        return parts.batch * -(-parts.rows // self.tile_m) * -(-parts.cols // self.tile_n)


# ---- schedules

#: (rows, cols, warps_m, warps_n)
TILES = (
    (128, 256, 2, 4),
    (256, 128, 4, 2),
    (128, 128, 2, 4),
    (128, 128, 2, 2),
    (256, 64, 4, 1),
    (64, 256, 1, 4),
    (128, 64, 2, 2),
    (64, 128, 2, 2),
    (64, 64, 2, 2),
    (128, 32, 4, 1),
    (32, 128, 1, 4),
    (64, 32, 2, 2),
    (32, 64, 2, 2),
    (128, 16, 4, 1),
    (16, 128, 1, 4),
    (64, 16, 4, 1),
    (16, 64, 1, 4),
    (32, 32, 2, 2),
    (32, 16, 2, 1),
    (16, 32, 1, 2),
    (16, 16, 1, 1),
)
STAGES = (4, 3, 2)

#: The share of the L2 cache's rate that is reached, and the cycles until the first bytes arrive; bytes of shared
#: memory, and instructions of single threads, in a cycle.
L2_SHARE, LATENCY, SHARED_RATE, ISSUE = 48 / 70, 1000.0, 128.0, 128.0
#: Instructions that round an element to tf32.
ROUND = 2.0
#: Cycles between two loads to registers of a warp that has one of the multiprocessor's schedulers to itself.
BETWEEN_LOADS = 15.0
#: How much longer products take of so few warps.
FEW_WARPS = {1: 2.0, 2: 1.5, 4: 1.2}
#: Cycles of a tile before and after its reduction, and bytes of its results in a cycle.
OVERHEAD, BEGIN, EPILOGUE_RATE = 380.0, 175.0, 20.0
#: More cycles for a result where they are written one by one; and where operands are read so, of the largest tile and
#: of any: few blocks hide the waits of so many reads.
#: Pairs of 16 bits take half of that for each.
SINGLE, SINGLE_OPERAND, SINGLE_OF_TILE, WARP_TILE, WORD = 0.2, 0.1, 0.85 / (128 * 128), 64, 4
#: And for an operand that lies across the results: each lane reads a sector of its own.
CROSSING = 0.85
#: How much longer a stage takes that is gathered from windows of an image, forward and backward to the filter, or that
#: has a computed operand.
WINDOWS, ACROSS, COMPUTED = 1.2, 1.8, 2.2
#: The share of that where so many blocks, or more, are on a multiprocessor: they hide each other's waits.
SLOWER, SLOWER_TOGETHER = {1: 1.2, 2: 1.2}, 0.5
#: Where lanes read elements one by one: those that are rounded to tf32 in a cycle; how much longer a stage takes for
#: few warps, for many, and with windows of an image; the longest side of a tile.
CONVERTED, WAITING, SHARING, WORDS_ACROSS, WORDS_SIDE = 16.0, 2.0, 1.25, 1.3, 128
#: Cycles in which the code arrives of twice as many products of a warp, which is not in the caches at first.
CODE = 1580.0
#: Registers of a thread beyond sums, fragments and what it keeps for the pieces that it copies.
OTHER_REGISTERS = 44
MOST_REGISTERS = 250


def schedules(spec: ContractionSpec, target: Target) -> tuple[MmaSchedule, ...]:
    """Returns schedules worth trying, the one with the least estimated time first, then the best of every other tile.

    Raises Declined with a reason.
    """
    return in_order(_ranked(spec, target), lambda s: (s.tile_m, s.tile_n, s.warps_m, s.split_k))


def cycles(spec: ContractionSpec, target: Target) -> float:
    """Returns the cycles that the best schedule is estimated to take.  Raises Declined with a reason.

    Matrices that are larger than the L2 cache come from memory, as those of thin products.
    """
    # Schedules are ranked without the time between loads: the best ones have about the same.
    found = cost(spec, best(spec, target), target)
    if spec.a.image is not None:
        return found
    sides = ((spec.a, spec.m), (spec.b, spec.n))
    moved = sum(prod((*spec.batch, *sizes, *spec.k)) * side.operand.dtype.itemsize for side, sizes in sides)
    return max(found, moved / (target.memory_share * target.bytes_per_cycle)) if moved > target.l2_bytes else found


@lru_cache(256)
def best(spec: ContractionSpec, target: Target) -> MmaSchedule:
    """Returns the schedule with the least estimated time, the first one of `schedules`.  Raises Declined likewise."""
    parts = _checked(spec, target)
    tiles = ((_at_least(spec, parts, way, target), way) for way in _tiles(spec, parts, target))
    found = least(tiles, lambda way: min(_of_tile(spec, parts, way, target), key=_FIRST, default=None))
    if found is None:
        raise Declined(NO_ROOM)
    return found[1]


def cost(spec: ContractionSpec, schedule: MmaSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take."""
    parts = _paths(spec, _widens(spec, target))
    tile = _tile(spec, parts, schedule, target)
    if tile is None:
        raise Declined("threads cannot fill the tiles of this schedule, or have too few registers")
    return _cost(
        parts, tile, schedule, target, _resident(tile, schedule.threads, schedule.stages, target), BETWEEN_LOADS
    )


@lru_cache(256)
def _ranked(spec: ContractionSpec, target: Target) -> list[tuple[float, MmaSchedule]]:
    parts = _checked(spec, target)
    found = [each for way in _tiles(spec, parts, target) for each in _of_tile(spec, parts, way, target)]
    if not found:
        raise Declined(NO_ROOM)
    return sorted(found, key=_FIRST)


_FIRST = itemgetter(0)
NO_ROOM = "no tile fits the shared memory of a block"


def _checked(spec: ContractionSpec, target: Target) -> TilePaths:
    """Returns the paths of the operands.  Raises Declined with a reason if warps do not multiply them."""
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch} has no asynchronous copies to shared memory")
    parts = _paths(spec, _widens(spec, target))
    if parts.a.parts > 1:
        raise Declined("float32 is multiplied in parts by warpgroups only")
    return parts


@lru_cache(64)
def _paths(spec: ContractionSpec, widen: bool) -> TilePaths:
    """Returns the paths of the operands for estimates: numbers in them may be those of an equal spec, 0.0 for -0.0."""
    return tile_paths(spec, widen)


def _widens(spec: ContractionSpec, target: Target) -> bool:
    """Tells whether 8-bit floats are multiplied as float16: tensor cores add those up with the bits of float32."""
    return not target.arch.has_fp8_mma or not spec.fast_fp8


def _tiles(spec: ContractionSpec, parts: TilePaths, target: Target) -> Iterator[MmaSchedule]:
    """Yields tiles that might be fast, with the fewest stages."""
    widen = _widens(spec, target) and parts.a.product == "float16"
    for rows, cols, warps_m, warps_n in TILES:
        if cols // warps_n % spec.col_chunk or rows // warps_m % spec.row_chunk:
            continue
        if not spec.partials and ((rows > 16 and rows >= 2 * parts.rows) or (cols > 16 and cols >= 2 * parts.cols)):
            continue
        if parts.a.words and max(rows, cols) > WORDS_SIDE:
            continue
        for row_bytes in (128,) if parts.a.words else (128, 64):
            yield MmaSchedule(rows, cols, row_bytes // parts.a.itemsize, warps_m, warps_n, STAGES[-1], widen=widen)


def _of_tile(
    spec: ContractionSpec, parts: TilePaths, way: MmaSchedule, target: Target
) -> Iterator[tuple[float, MmaSchedule]]:
    """Yields the schedules of a tile, and their estimated cycles."""
    tile = _tile(spec, parts, way, target)
    if tile is None:
        return
    for stages in STAGES:
        resident = _resident(tile, way.threads, stages, target) if stages <= max(2, tile.depth) else 0
        if not resident:
            continue
        s = changed(way, stages=stages)
        yield _cost(parts, tile, s, target, resident), s
        split_k = 2
        while target.arch.has_clusters and s.warp_rows // 16 % split_k == 0 and tile.depth >= 4 * split_k:
            if tile.tiles * split_k <= target.sms and s.warp_rows // split_k % spec.row_chunk == 0:
                shared = changed(s, split_k=split_k)
                yield _cost(parts, tile, shared, target, resident), shared
            split_k *= 2


def _at_least(spec: ContractionSpec, parts: TilePaths, s: MmaSchedule, target: Target) -> float:
    """Returns cycles below which no schedule of a tile is estimated, about: as if its threads left room for as many
    blocks as can be.
    """
    depth, tiles = parts.stages(s.tile_k), s.tiles(parts)
    rounds = -(-tiles // target.sms)
    together, split_k = min(rounds, max(1, target.arch.max_threads_per_sm // s.threads)), 1
    while 2 * split_k <= s.warp_rows // 16 and depth >= 8 * split_k and 2 * tiles * split_k <= target.sms:
        split_k *= 2
    ahead = STAGES[0] - 1 if parts.a.copied and parts.b.copied else 1
    slower = prod(1 + (factor - 1) * SLOWER_TOGETHER for factor in _slower(spec, parts))
    stage = max(_busy(parts, s, target), LATENCY / ahead / together) * slower
    each = (busy_share(spec) * -(-depth // split_k) * stage) + _leaving(spec, s) / split_k + OVERHEAD / together
    return LATENCY + rounds * each


class _Tile(NamedTuple):
    """What schedules of one tile have in common, however many stages and blocks of a cluster they have.

    tiles      that make up the results, and the stages (``depth``) that the reduction of each takes.
    ring       bytes of a stage, and of the sums that take the place of all stages at the end (``sums``).
    registers  of a thread, roughly.
    busy       cycles of a stage that is there: of what takes longest, and a share of the rest.
    converted  cycles in which lanes round its elements to tf32; 0 where they round none.
    loads      to registers that a thread has in a stage.
    slower     how many times as long a stage takes, factor by factor.
    results    cycles in which the results leave.
    share      of the batches that have terms.
    """

    tiles: int
    depth: int
    ring: int
    sums: int
    registers: int
    busy: float
    converted: float
    loads: int
    slower: tuple[float, ...]
    results: float
    share: float


def _tile(spec: ContractionSpec, parts: TilePaths, s: MmaSchedule, target: Target) -> _Tile | None:
    """Returns what a tile takes; None if the threads of a block cannot fill it, or have too few registers."""
    if not (parts.a.fills(s.tile_m, s.tile_k, s.threads) and parts.b.fills(s.tile_n, s.tile_k, s.threads)):
        return None
    registers = _registers(parts, s, target)
    if registers > MOST_REGISTERS:
        return None
    return _Tile(
        s.tiles(parts),
        parts.stages(s.tile_k),
        buffers(parts, s).stage_bytes,
        _sums(parts, s).bytes,
        registers,
        _busy(parts, s, target),
        _fragments(parts, s) / CONVERTED if parts.a.words else 0.0,
        _loads(parts, s),
        _slower(spec, parts),
        _leaving(spec, s),
        busy_share(spec),
    )


def _fragments(parts: TilePaths, s: MmaSchedule) -> int:
    """Returns how many elements of a stage the warps load."""
    return s.warps_m * s.warps_n * (s.warp_rows + s.warp_cols * parts.products) * s.tile_k


def _busy(parts: TilePaths, s: MmaSchedule, target: Target) -> float:
    """Returns the cycles of a stage that is there: of what takes longest, and a share of the rest."""
    itemsize, cols = parts.a.itemsize, s.tile_n * parts.products
    products = s.tile_m * cols * s.tile_k / (target.mma * 2 / itemsize)
    filled = (s.tile_m + cols) * s.tile_k * itemsize
    shared = (filled + _fragments(parts, s) * itemsize) / SHARED_RATE
    pieces = s.tile_m * s.tile_k / parts.a.piece * parts.a.busy + cols * s.tile_k / parts.b.piece * parts.b.busy
    # Instructions of warps that multiply: one for 16 x 8 results and 32 bytes, and those that load its fragments.
    multiply = s.tile_m * cols * s.tile_k * itemsize / (16 * 8 * 32) * 1.6
    # What lanes round to tf32 on the way to the products.
    rounded = 0 if parts.a.words or parts.a.gather.operand.dtype.name != "float32" else ROUND * _fragments(parts, s)
    moved = filled + sum(
        (size if way.along_k else s.tile_k) * way.beside for way, size in ((parts.a, s.tile_m), (parts.b, cols))
    )
    work = [products, shared, moved / (L2_SHARE * target.l2_rate), (pieces + 32 * multiply + rounded) / ISSUE]
    return max(work) + 0.1 * (sum(work) - max(work))


def _leaving(spec: ContractionSpec, s: MmaSchedule) -> float:
    """Returns the cycles in which the results of a tile leave."""
    size = max((store.operand.dtype.itemsize for store in spec.program.stores), default=0)
    each, tile = size * len(spec.program.operands) / EPILOGUE_RATE, s.tile_m * s.tile_n
    run = _run(spec)
    if run == 1:
        each += SINGLE + (SINGLE_OPERAND + SINGLE_OF_TILE * tile) * _differing(spec)
    elif 0 < run * size <= WORD:
        each += (SINGLE + (SINGLE_OPERAND + SINGLE_OF_TILE * min(tile, 128 * 128)) * _differing(spec)) / run
    return tile * (each + CROSSING * _crossing(spec))


@lru_cache(64)
def _run(spec: ContractionSpec) -> int:
    """Returns how many aligned neighbours of the results are written together; 0 if nothing is."""
    return staging(space(spec), WARP_TILE, WARP_TILE, spec.products).run if spec.program.stores else 0


def _differing(spec: ContractionSpec) -> int:
    """Returns how many operands of the program differ along rows and along columns of the results."""
    first, last = len(spec.batch), len(spec.space) - len(spec.n)
    return sum(any(op.strides[first:last]) and any(op.strides[last:]) for op in spec.program.loads)


@lru_cache(64)
def _crossing(spec: ContractionSpec) -> int:
    """Returns how many operands of the program have no neighbours where the results have."""
    if not spec.program.stores:
        return 0
    at = space(spec)
    along = at.along(by_rows=staging(at, WARP_TILE, WARP_TILE, spec.products).by_rows)
    return sum(op.strides[along] not in (0, 1) for op in at.program.loads) if at.shape[along] > 1 else 0


def _slower(spec: ContractionSpec, parts: TilePaths) -> tuple[float, ...]:
    """Returns how many times as long a stage takes, factor by factor, because of how its elements are found."""
    found = []
    if spec.a.image is not None and len(spec.k) - spec.k.count(1) > 1:
        beside = parts.a.along_k and abs(parts.a.gather.inner[-1]) == 1
        # Positions are neighbours in memory; and loads of single words that lie far apart take long anyway.
        if not (spec.a.image.across and (beside or (not parts.a.copied and parts.a.busy > parts.a.effort))):
            found.append(WORDS_ACROSS if parts.a.words else ACROSS if spec.a.image.across else WINDOWS)
    elif spec.a.image is None and len(parts.a.inner) > 1:
        found.append(ACROSS)
    if any(way.gather.program is not None for way in (parts.a, parts.b)):
        found.append(COMPUTED)
    return tuple(found)


def _resident(tile: _Tile, threads: int, stages: int, target: Target) -> int:
    """Returns how many blocks a multiprocessor holds; 0 if there can be none."""
    needed = max(stages * tile.ring, tile.sums)
    if needed > target.arch.shared_bytes_per_block:
        return 0
    return max(1, target.arch.blocks_per_sm(threads, tile.registers, needed))


def _registers(parts: TilePaths, s: MmaSchedule, target: Target) -> int:
    """Returns how many registers a thread needs, roughly."""
    warp_cols = s.warp_cols * parts.products
    sums = s.warp_rows * warp_cols // 32
    fragments = 2 * (s.warp_rows + warp_cols) // 16 * 4
    if target.arch.has_wgmma and parts.a.itemsize == 1 and parts.a.gather.operand.dtype.is_float:
        # Hopper's mma.sync has no 8-bit floats: the compiler converts them to float16, some steps ahead.
        fragments = fragments * (7 if s.tile_k > 64 else 5) // 2
    held = held_registers(parts.a, s.tile_m, s.tile_k, s.threads, 1) + convert_registers(parts.a, target)
    held += held_registers(parts.b, s.tile_n, s.tile_k, s.threads, parts.products) + convert_registers(parts.b, target)
    return sums + fragments + held + OTHER_REGISTERS


def buffers(parts: TilePaths, s: MmaSchedule) -> Buffers:
    """Returns the stages of both operands in shared memory."""
    a = parts.a.buffer("a", s.tile_m, s.tile_k, s.stages)
    return Buffers((a, parts.b.buffer("b", s.tile_n, s.tile_k, s.stages, parts.products)))


def staged_bytes(parts: TilePaths, s: MmaSchedule) -> int:
    """Returns how many bytes of shared memory a block takes whose sums take the place of the stages at the end.

    They lie in rows or columns, whichever the outputs have (`codegen.fragments.Staging`): this is enough for both.
    """
    return max(buffers(parts, s).bytes, _sums(parts, s).bytes)


def _sums(parts: TilePaths, s: MmaSchedule) -> Buffer:
    return Buffer("staged", "float", (max(s.tile_m, s.tile_n), min(s.tile_m, s.tile_n)), parts.products, MOST_PAD)


def _loads(parts: TilePaths, s: MmaSchedule) -> int:
    """Returns how many loads to registers a thread has in a stage."""
    sides = ((parts.a, s.tile_m), (parts.b, s.tile_n * parts.products))
    return sum(way.count(n, s.tile_k, s.threads) * way.piece // way.vector for way, n in sides if not way.copied)


def _cost(
    parts: TilePaths, tile: _Tile, s: MmaSchedule, target: Target, resident: int, between_loads: float = 0.0
) -> float:
    """Returns the estimated cycles: rounds of blocks that wait for products, shared memory, the L2 cache or latency."""
    warps = s.warps_m * s.warps_n
    depth = -(-tile.depth // s.split_k)
    rounds, busy_rounds = (-(-round(tile.tiles * share) * s.split_k // target.sms) for share in (1.0, tile.share))
    together = max(1, min(resident, busy_rounds))
    ahead = s.stages - 1 if parts.a.copied and parts.b.copied else 1
    busy = tile.busy * FEW_WARPS.get(together * warps, 1.0)
    if parts.a.words:
        busy = max(busy, tile.converted) * (WAITING if together * warps <= 8 else SHARING)
    latency = LATENCY / ahead / together
    if together * warps <= 2:
        latency += between_loads * tile.loads
    stage = max(busy, latency)
    for factor in tile.slower:
        stage *= 1 + (factor - 1) * SLOWER.get(together, SLOWER_TOGETHER)
    results, exchange = tile.results / s.split_k, 3000.0 if s.split_k > 1 else 0.0
    code = CODE * log2(s.warp_rows * s.warp_cols / 256)
    begun = rounds * (results + exchange + BEGIN + OVERHEAD / together)
    return LATENCY + code + busy_rounds * depth * stage + begun

"""Schedules of products of a large operand with a thin one: rows in memory, split among warps, and their cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from codegen.arch import SECTOR_BYTES
from codegen.buffers import VECTORS, Edge
from codegen.contraction.thin_pieces import (
    LANES,
    THIN,
    WIDE,
    Piece,
    ThinPaths,
    aligned,
    in_pairs,
    piece_sizes,
    source_steps,
    thin_paths,
)
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.fragments import MOST_PAD
from codegen.iteration import Strides
from codegen.ranking import in_order
from codegen.spec import ContractionSpec
from codegen.target import Target
from codegen.tile_path import TilePath

TILES, WARPS, PIECES = (16, 32), (8, 4, 16, 2, 1), (2, 4, 1)
#: Cycles for which a piece is waited for, of a block beside its reduction, and of a kernel beside its blocks; the share
#: of the L2 cache's rate that is reached; instructions of single threads in a cycle, and those of one warp.  Fitted to
#: 1,000 schedules of layers of decoders: those chosen take 2.1 % longer than the fastest, by geometric mean.
LATENCY, BLOCK, START, L2_SHARE, ISSUE, WARP_ISSUE = 650.0, 4580.0, 2000.0, 0.4, 180.0, 11.7
#: Cycles of a block that estimates of other forms leave out.
UNTOLD = 2000.0
#: Bytes of a row for which memory takes as long to begin as to bring them: blocks read many rows at a time.
BEGIN = 42.0
#: Instructions that an element takes which is converted, or computed by a program of one instruction; one of a pair
#: that is decoded from a code, or computed; one of the thin operand, and more where its terms get another order.  Those
#: on bits are counted twice: there is room for half as many.
CONVERT, STEP, PAIR_STEP, EACH_THIN, ORDER = 6.0, 1.0, 2.0, 0.5, 1.0
DECODE = {"int8": 8.0, "uint8": 7.0, "int4": 5.0, "uint4": 5.0, "float4_e2m1": 8.0, "float8_e4m3": 10.0}
#: Registers of a thread beyond sums and pieces, and more where these are computed one by one; the most that there are.
OTHER_REGISTERS, COMPUTING, MOST_REGISTERS = 24, 64, 240
#: Registers that pieces of the thin operand may take.
MOST_THIN_REGISTERS = 48
#: Bytes of sums of all warps in shared memory, and of pieces that they have in flight: more were slower, of long rows
#: by half.
MOST_SUMS, MOST_FLYING = 40 << 10, 64 << 10
#: Warps of a block whose pieces come to a ring: a step of Llama 1B in bfloat16 took 777 us with 8 or 16, 808 with 4,
#: 860 with half the bytes in flight, 782 with twice as many; 836 where pieces come to registers.
RING_WARPS = 8


@dataclass(frozen=True)
class ThinSchedule(Schedule):
    """A block has ``tile`` rows (or columns) of the large operand, and all of the thin one.

    warps   of a block, which share the reduction.
    pieces  of a row that a lane has in flight while it multiplies as many.
    ring    whether they are on their way to shared memory, not to registers: from before the kernel waits for those
            that were launched before it.

    Raises ValueError unless a tile has a multiple of 16 rows, and warps and pieces are powers of two.
    """

    tile: int
    warps: int
    pieces: int
    ring: bool = False

    def __post_init__(self) -> None:
        if self.tile < WIDE or self.tile % WIDE:
            raise ValueError(f"{self}: a tile has a multiple of {WIDE} rows")
        if any(n < 1 or n & (n - 1) for n in (self.warps, self.pieces)) or self.warps > 32:
            raise ValueError(f"{self}: 1, 2, 4, ... warps, at most 32, and 1, 2, 4, ... pieces")

    @property
    def threads(self) -> int:
        return 32 * self.warps


def schedules(spec: ContractionSpec, target: Target) -> tuple[ThinSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    return in_order(_ranked(spec, target), lambda s: (s.tile, s.warps))


def cycles(spec: ContractionSpec, target: Target) -> float:
    """Returns the cycles that the best schedule is estimated to take with its operands in the L2 cache, as other forms
    are compared.  Raises Declined with a reason.

    An operand that is larger than the cache, and multiplied as it lies in memory, comes from there: TMA brings it no
    slower, in longer runs.
    """
    paths = thin_paths(spec)
    size = paths.batch * paths.size * paths.products * _row_bytes(paths.wide, paths)
    cold = target.arch.has_wgmma and paths.wide.gather.program is None and size > target.l2_bytes
    return _cost(spec, paths, _ranked(spec, target)[0][1], target, cold=cold) - UNTOLD


def cost(spec: ContractionSpec, schedule: ThinSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take."""
    return _cost(spec, thin_paths(spec), schedule, target)


@lru_cache(256)
def _ranked(spec: ContractionSpec, target: Target) -> list[tuple[float, ThinSchedule]]:
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch} has no tensor cores for these types")
    paths = thin_paths(spec)
    found = [(_cost(spec, paths, s, target), s) for s in _candidates(paths)]
    if not found:
        raise Declined("a thread would need more registers than it has")
    # Of those that memory makes equally fast, the one that leaves most to spare.
    return sorted(found, key=lambda entry: (entry[0], _cost(spec, paths, entry[1], target, cold=False)))


def _candidates(paths: ThinPaths) -> Iterator[ThinSchedule]:
    """Yields what might be fast: warps that all have work, and pieces that fit their registers."""
    for tile in TILES:
        if tile > WIDE and tile >= 2 * paths.size:
            continue
        for warps in WARPS:
            for pieces in PIECES:
                s = ThinSchedule(tile, warps, pieces)
                idle = paths.span(pieces) * warps > max(paths.depth, paths.span(1))
                fits = blocks_of_registers(paths, s) and sums_bytes(paths, s) <= MOST_SUMS
                if fits and not idle and flying_bytes(paths, s) <= MOST_FLYING:
                    yield s


def behind(spec: ContractionSpec, schedule: ThinSchedule) -> tuple[ThinSchedule, range] | None:
    """Returns the schedule whose large operand is on its way before earlier kernels end, and the numbers of its tensors
    among the arguments; None if it comes to registers.

    That is so of weights of few bits, which more warps decode: steps of Llama 1B and 8B took a fourth longer otherwise.
    """
    paths = thin_paths(spec)
    if paths.columns > 1 or not _copies(paths.wide, paths.piece):
        return None
    tensors, before = (spec.a.operands, 0) if paths.first else ((*spec.b.operands, *spec.others), len(spec.a.operands))
    many = [
        s
        for s in (ThinSchedule(schedule.tile, RING_WARPS, pieces, ring=True) for pieces in (16, 8, 4, 2))
        if flying_bytes(paths, schedule) <= flying_bytes(paths, s) <= MOST_FLYING
        and sums_bytes(paths, s) <= MOST_SUMS
        and paths.span(s.pieces) * s.warps <= paths.depth
        and blocks_of_registers(paths, s)
    ]
    return (many[0], range(before, before + len(tensors))) if many else None


def _copies(way: TilePath, piece: int) -> bool:
    """Tells whether pieces of an operand are whole copies, and multiplied as they lie in memory."""
    gather, sizes = way.gather, piece_sizes(way.inner, piece)
    if gather.program is not None or sizes is None:
        return False
    inner = source_steps(way, 0)[2]
    each = Piece(sizes, inner[len(inner) - len(sizes) :])
    dtype = gather.operand.dtype
    whole = each.dense and aligned(way, 0, each) and each.reach * dtype.itemsize % VECTORS == 0
    return whole and dtype.ctype == way.element and way.product != "tf32"


def rows_of_lane(s: ThinSchedule) -> int:
    """Returns how many rows of a tile a lane reads."""
    return s.tile // 8


def flying_bytes(paths: ThinPaths, s: ThinSchedule) -> float:
    """Returns the bytes of the large operand that a block has in flight."""
    piece = paths.piece * _row_bytes(paths.wide, paths) / paths.depth
    return s.threads * s.pieces * rows_of_lane(s) * paths.products * piece


def thin_pieces(paths: ThinPaths, s: ThinSchedule) -> int:
    """Returns how many pieces a lane has of the thin operand in flight: all, if they take few registers.

    It is in the caches, and takes less time to come than the large one; but short sums wait for nothing else.
    """
    count, each = s.pieces, paths.columns * _words(paths.thin, paths.piece)
    while count > 2 and count * each > MOST_THIN_REGISTERS:
        count //= 2
    return count


def sums_bytes(paths: ThinPaths, s: ThinSchedule) -> int:
    """Returns the bytes of shared memory in which warps add up their sums, and in which these wait for the program."""
    tile = s.tile * paths.columns * THIN
    return 4 * paths.products * (s.warps * tile + tile + max(s.tile, paths.columns * THIN) * MOST_PAD)


def registers(paths: ThinPaths, s: ThinSchedule) -> int:
    """Returns how many registers a thread needs, roughly."""
    rows, columns = rows_of_lane(s) * paths.products, paths.columns
    flying = (1 if s.ring else s.pieces) * rows * _words(paths.wide, paths.piece)
    flying += thin_pieces(paths, s) * columns * _words(paths.thin, paths.piece)
    sums = rows // 2 * columns * 4
    needed = flying + sums + 2 * (rows + columns) + OTHER_REGISTERS
    computed = [way for way in (paths.wide, paths.thin) if way.gather.program is not None]
    if any(in_pairs(way, paths.piece) is None for way in computed):
        return needed + (rows + columns) * paths.words + COMPUTING
    return needed


def blocks_of_registers(paths: ThinPaths, s: ThinSchedule) -> int:
    """Returns for how many blocks a multiprocessor has registers, which is four times 16 Ki since Ampere."""
    each = -(-registers(paths, s) // 8) * 8
    return 0 if each > MOST_REGISTERS else 4 * ((16 << 10) // (32 * each)) // s.warps


def _words(way: TilePath, piece: int) -> int:
    """Returns how many registers hold what is read for a piece."""
    total = 0
    for n, op in enumerate(way.gather.operands):
        inner = source_steps(way, n)[2]
        if any(inner):
            sizes = piece_sizes(way.inner, piece)
            assert sizes is not None
            reach = Piece(sizes, inner[len(inner) - len(sizes) :]).reach
            total += max(1, -(-min(reach, piece) * op.dtype.itemsize // 4))
    return total


def blocks_per_sm(paths: ThinPaths, s: ThinSchedule, target: Target) -> int:
    """Returns how many blocks a multiprocessor holds."""
    shared = sums_bytes(paths, s) + (int(flying_bytes(paths, s)) if s.ring else 0)
    return max(1, target.arch.blocks_per_sm(s.threads, registers(paths, s), shared))


def _cost(spec: ContractionSpec, paths: ThinPaths, s: ThinSchedule, target: Target, *, cold: bool = True) -> float:
    """Returns the estimated cycles: those in which memory, or the busiest multiprocessor, brings the operands.

    With ``cold``, operands are in memory, and the whole is no faster than it.
    """
    tiles = paths.batch * Edge(paths.size, s.tile).tiles
    row, thin = _row_bytes(paths.wide, paths), _row_bytes(paths.thin, paths) * paths.few
    tile = s.tile * paths.products * row
    rounds = Edge(tiles, target.sms).tiles
    together = min(blocks_per_sm(paths, s, target), rounds)
    # What is in flight: pieces of lanes.
    piece = paths.piece * row / paths.depth
    flying = min(flying_bytes(paths, s), tile)
    run = min(row, s.warps * s.pieces * LANES * piece)
    share = target.memory_share * run / (run + BEGIN)
    memory = tiles * tile / (target.bytes_per_cycle * share) if cold else 0.0
    elements = s.tile * paths.products * paths.depth
    work = elements * (_effort(paths.wide, paths.piece) + paths.columns / 10)
    pairs = in_pairs(paths.wide, paths.piece)
    order = ORDER if pairs is not None and pairs.apart > 1 else 0.0
    work += max(paths.few, THIN) * paths.depth * (_effort(paths.thin, paths.piece) + EACH_THIN + order)
    work += s.tile * paths.few * paths.products * len(spec.program.operands)
    # A piece is read again as soon as it is multiplied.
    multiply = work * paths.span(1) / paths.depth / WARP_ISSUE
    rate = min(target.sm_rate, together * flying / (LATENCY + multiply))
    # A block first waits for memory and then multiplies; others on its multiprocessor do so meanwhile.
    alone = max(tile * LATENCY / flying, tile / target.sm_rate) + work / min(ISSUE, WARP_ISSUE * s.warps) + BLOCK
    issue = min(ISSUE, WARP_ISSUE * s.warps * together)
    busy = max(tile / rate, (tile + thin) / (L2_SHARE * target.l2_rate), work / issue, alone / together)
    return START + max(memory, rounds * busy)


def _row_bytes(way: TilePath, paths: ThinPaths) -> float:
    """Returns the bytes of memory that a row takes, at least one: all of its terms may be in a single word.

    Runs of terms that are apart from those of the next row take whole sectors.
    """
    total = 0.0
    for n, op in enumerate(way.gather.operands):
        _, outer, inner, _ = source_steps(way, n)
        varying = prod(size for size, step in zip(way.inner, inner) if step)
        beside = min((abs(step) for size, step in zip(way.outer, outer) if size > 1 and step), default=1)
        run = run_of(way.inner, inner)
        apart = min(SECTOR_BYTES, beside * op.dtype.itemsize)
        total += varying / run * max(run * op.dtype.itemsize, apart) if any(inner) else 0
    return max(total, 1.0)


def run_of(sizes: Strides, steps: Strides) -> int:
    """Returns how many terms lie one behind another in memory, of dimensions of these sizes."""
    run = 1
    for step, size in sorted((abs(step), size) for size, step in zip(sizes, steps) if size > 1 and step):
        if step != run:
            break
        run *= size
    return run


def _effort(way: TilePath, piece: int) -> float:
    """Returns the instructions that an element takes on its way to a product."""
    program, pairs = way.gather.program, in_pairs(way, piece)
    if pairs is not None and pairs[0].gather.program is not None:
        decoded = [DECODE.get(code.kind, 2 * CONVERT) for load, code in pairs[1].items() if _varies(way, load, piece)]
        return (sum(decoded) + PAIR_STEP * len(pairs[0].gather.program.instructions)) / 2
    if program is not None:
        return CONVERT + STEP * len(program.instructions)
    return 0.0 if way.gather.operand.dtype.ctype == way.element and way.product != "tf32" else CONVERT


def _varies(way: TilePath, n: int, piece: int) -> bool:
    """Tells whether the elements of a piece of a tensor differ."""
    sizes, inner = piece_sizes(way.inner, piece), source_steps(way, n)[2]
    return sizes is not None and any(inner[len(inner) - len(sizes) :])

"""Schedules of products of a large operand with a thin one: rows in memory, split among warps, and their cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from codegen.bf16x6 import BF16X6
from codegen.buffers import Edge
from codegen.codes import FREE_OFFSET, HALVES, Code, codes
from codegen.declined import Declined
from codegen.expr import Index, Load, Value
from codegen.family import Schedule
from codegen.fragments import MOST_PAD
from codegen.packed import packed
from codegen.ranking import in_order
from codegen.sizes import Size, most
from codegen.spec import ContractionSpec, Gather, Strides
from codegen.target import Target
from codegen.tile_path import PIECE, TilePath, merged_gather, orders, product_types

#: Most rows (or columns) of the thin operand: two products of 8 columns for each part of the large one.
MOST_THIN = 16
#: Rows (or columns) of the large operand that a product takes, and of the thin one.
WIDE, THIN = 16, 8
#: Lanes that share a row.
LANES = 4
#: Most terms of a piece whose elements are computed one by one.
MOST_EACH = 16


@dataclass(frozen=True)
class ThinSchedule(Schedule):
    """A block has ``tile`` rows (or columns) of the large operand, and all of the thin one.

    warps   of a block, which share the reduction.
    pieces  of a row that a lane has in flight while it multiplies as many.

    Raises ValueError unless a tile has a multiple of 16 rows, and warps and pieces are powers of two.
    """

    tile: int
    warps: int
    pieces: int

    def __post_init__(self) -> None:
        if self.tile < WIDE or self.tile % WIDE:
            raise ValueError(f"{self}: a tile has a multiple of {WIDE} rows")
        if any(n < 1 or n & (n - 1) for n in (self.warps, self.pieces)) or self.warps > 32:
            raise ValueError(f"{self}: 1, 2, 4, ... warps, at most 32, and 1, 2, 4, ... pieces")

    @property
    def threads(self) -> int:
        return 32 * self.warps


class ThinPaths(NamedTuple):
    """The operands of a product, and what a lane brings of them at a time.

    wide, thin  how each lies in memory: the large operand and the other one.
    first       whether the large one is operand A.
    size, few   rows (or columns) of each.
    depth       terms of a sum; batch, products as in `codegen.tile_path.TilePaths`.
    piece       terms that a lane has of a row: neighbours, at least 16 bytes of them in memory or as they are
                multiplied.
    """

    wide: TilePath
    thin: TilePath
    first: bool
    batch: int
    size: int
    few: int
    depth: int
    products: int
    piece: int

    @property
    def columns(self) -> int:
        """Products of 8 columns that the thin operand takes."""
        return Edge(most(self.few), THIN).tiles

    @property
    def words(self) -> int:
        """Registers of a piece as it is multiplied."""
        return self.piece * self.wide.itemsize // 4

    def span(self, pieces: int) -> int:
        """Returns the terms that the lanes of a row have in so many pieces each."""
        return LANES * self.piece * pieces


# ---- pieces


@dataclass(frozen=True)
class Piece:
    """Where the elements of a piece lie: coordinates of its elements, and a tensor's steps along them.

    sizes  of the piece along the last dimensions of the reduction.
    steps  of the tensor along these.
    """

    sizes: tuple[int, ...]
    steps: Strides

    @property
    def reach(self) -> int:
        """Elements from the first one to the last one."""
        return 1 + sum((size - 1) * step for size, step in zip(self.sizes, self.steps))

    @property
    def dense(self) -> bool:
        """Whether all elements lie within one vector of at most as many."""
        return min(self.steps) >= 0 and self.reach <= prod(self.sizes) and self.reach & (self.reach - 1) == 0

    def offset(self, element: str) -> str:
        """Returns the C expression of an element's place, given its number."""
        terms, below = [], 1
        for size, step in reversed(list(zip(self.sizes, self.steps))):
            if step and size > 1:
                coordinate = element if below == 1 else f"{element} / {below}"
                if below * size < prod(self.sizes):
                    coordinate = f"{coordinate} % {size}"
                terms.append(coordinate if step == 1 else f"{coordinate} * {step}")
            below *= size
        return " + ".join(reversed(terms)) or "0"


def piece_sizes(inner: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Returns the sizes of a piece along the last dimensions, as many as it has; None if pieces do not divide them."""
    sizes: list[int] = []
    for size in reversed(inner):
        if size % count == 0:
            return (count, *sizes)
        if type(size) is int and count % size == 0:
            sizes.insert(0, size)
            count //= size
        else:
            return None
    return None


def thin_paths(spec: ContractionSpec) -> ThinPaths:
    """Returns how the operands come to registers.  Raises Declined unless one is thin, and the other lies along k."""
    products = product_types(spec, widen=True)
    if products[0] == BF16X6:
        raise Declined("float32 is multiplied in parts by warpgroups only")
    batch, rows, cols, depth = (prod(sizes) for sizes in (spec.batch, spec.m, spec.n, spec.k))
    if not batch * rows * cols * depth:
        raise Declined("there is nothing to multiply")
    if spec.partials or spec.terms or spec.a.limits or spec.b.limits:
        raise Declined("thin products have operands without limits, and whole results")
    if most(rows) > MOST_THIN and (most(cols) > MOST_THIN or spec.others):
        raise Declined(f"neither operand has at most {MOST_THIN} rows or columns")
    first = most(rows) > MOST_THIN
    sides = [(spec.a, spec.m, products[0]), (spec.b, spec.n, products[1])]
    wide, thin = sides if first else sides[::-1]
    reason = Declined("the large operand does not lie along the reduction")
    for order in orders(spec):
        a, b = _path(spec, *wide, order), _path(spec, *thin, order)
        piece = _piece(a, b)
        if piece:
            size, few = (rows, cols) if first else (cols, rows)
            return ThinPaths(a, b, first, batch, size, few, depth, spec.products, piece)
        reason = Declined("the large operand does not lie along the reduction, in whole pieces of 16 bytes")
    raise reason


def _path(
    spec: ContractionSpec, gather: Gather, outer: tuple[int, ...], product: str, order: Sequence[int]
) -> TilePath:
    merged, batch, outer, inner = merged_gather(spec, gather, outer, order)
    return TilePath(merged, batch, outer, inner, product, True, 1, True)


def _piece(wide: TilePath, thin: TilePath) -> int:
    """Returns the terms of a piece; 0 if the large operand does not lie so."""
    least = PIECE // wide.itemsize
    count = max(least, min(_whole(wide), 4 * least))
    while count >= least:
        sizes = [piece_sizes(way.inner, count) for way in (wide, thin)]
        # Elements that are computed one by one take long: short pieces leave some to more warps.
        long = count > MOST_EACH and wide.gather.program is not None and in_pairs(wide, count) is None
        if not long and all(sizes) and all(suits(wide, n, count) for n in range(len(wide.gather.operands))):
            return count
        count //= 2
    return 0


def _whole(way: TilePath) -> int:
    """Returns the terms of which each tensor has at most 16 bytes: one of 4 bits has two of them in a byte."""
    found = []
    for n, op in enumerate(way.gather.operands):
        steps = source_steps(way, n)[2]
        if any(steps):
            found.append(
                PIECE * prod(most(size) for size, step in zip(way.inner, steps) if not step) // op.dtype.itemsize
            )
    whole = min(found, default=PIECE // 4)
    return 1 << whole.bit_length() - 1


def source_steps(way: TilePath, n: int) -> tuple[Strides, Strides, Strides, int]:
    """Returns the steps of tensor n along batch, outer and inner dimensions, and where it starts."""
    gather = way.gather
    if gather.program is None:
        return gather.batch, gather.outer, gather.inner, gather.start
    batch, outer, inner = gather.steps()
    return batch[n + 1], outer[n + 1], inner[n + 1], gather.starts[n]


def suits(way: TilePath, n: int, count: int) -> bool:
    """Tells whether lanes read pieces of a tensor in vectors, or one element for each."""
    inner = source_steps(way, n)[2]
    if not any(inner):
        return True
    sizes = piece_sizes(way.inner, count)
    assert sizes is not None
    piece = Piece(sizes, inner[len(inner) - len(sizes) :])
    if not any(piece.steps):
        return True
    return piece.dense and aligned(way, n, piece)


def aligned(way: TilePath, n: int, piece: Piece) -> bool:
    """Tells whether every piece of a tensor is as aligned as its vectors are."""
    batch, outer, inner, start = source_steps(way, n)
    op = way.gather.operands[n]
    width = min(16, piece.reach * op.dtype.itemsize)
    # From piece to piece the innermost of its dimensions goes on where the last one ended.
    along = (*inner[: len(inner) - len(piece.sizes)], piece.steps[0] * piece.sizes[0])
    steps = (*batch, *outer, *along, start)
    return all(step * op.dtype.itemsize % width == 0 for step in steps) and op.alignment % width == 0


# ---- codes


#: Neighbours among which pairs are made, in any order of terms.
RUN = 8


class Pairs(NamedTuple):
    """An operand whose program computes pairs of 16-bit floats.

    way    the operand, with that program.
    codes  by load what is decoded from vectors of bytes.
    """

    way: TilePath
    codes: Mapping[int, Code]

    @property
    def apart(self) -> int:
        """How far apart the elements of a pair are, as its codes are decoded."""
        return max((code.apart for code in self.codes.values()), default=1)


@lru_cache(256)
def in_pairs(way: TilePath, piece: int) -> Pairs | None:
    """Returns an operand whose program computes pairs; None if it is not computed, or not in pairs."""
    program, sizes = way.gather.program, piece_sizes(way.inner, piece)
    if program is None or sizes is None or way.itemsize != 2:
        return None
    elements: dict[Value, Any] = {}
    vectors: dict[int, Any] = {}  # by load, of which element of a vector each element of a piece is made
    coords = np.unravel_index(np.arange(piece), sizes)
    for n in range(len(program.loads) + len(program.indices)):
        batch, outer, inner, start = source_steps(way, n)
        lead, steps = inner[: len(inner) - len(sizes) + 1], inner[len(inner) - len(sizes) :]
        if any(isinstance(step, Size) for step in (*batch, *outer, *inner)):
            return None
        places = sum((c * step for c, step in zip(coords, steps)), np.zeros(piece, np.int64))
        if n >= len(program.loads):
            if not any((*batch, *outer, *lead[:-1], *(steps[:1] if sizes[0] != way.inner[len(lead) - 1] else ()))):
                elements[Index(n - len(program.loads))] = places + start
        elif any(steps) and not (aligned(way, n, Piece(sizes, steps)) and Piece(sizes, steps).dense):
            return None
        elif runs(Piece(sizes, steps)):  # both elements of a pair are the same one
            elements[Load(n)] = np.zeros_like(places)
        else:
            elements[Load(n)] = vectors[n] = places
    found = codes(program, elements)
    # Where vectors are decoded, offsets are added at no cost.
    free = {v: c for v, c in found.items() if c.load in vectors and abs(c.offset) <= FREE_OFFSET}
    pairs = packed(program, {v: replace(c, offset=0) if v in free else c for v, c in found.items()})
    if pairs is None:
        return None
    decoded = {c.load: c if v in free else replace(c, offset=0) for v, c in found.items() if c.load in vectors}
    for n, places in vectors.items():
        each = 2 if n in decoded and decoded[n].kind in HALVES else 1
        if not np.array_equal(places, np.arange(piece) // each):
            return None
        if program.loads[n].dtype.itemsize == 1 and (n not in decoded or piece // each % 4):
            return None
    gather = replace(way.gather, program=pairs, starts=way.gather.starts[: len(pairs.loads)])
    return Pairs(replace(way, gather=gather), decoded)


def runs(piece: Piece) -> bool:
    """Tells whether a tensor has one element for each run of neighbours."""
    below = 1
    for size, step in reversed(list(zip(piece.sizes, piece.steps))):
        if step and size > 1:
            return below % RUN == 0
        below *= size
    return True


# ---- schedules

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
    flying = s.pieces * rows * _words(paths.wide, paths.piece)
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
    return max(1, target.arch.blocks_per_sm(s.threads, registers(paths, s), sums_bytes(paths, s)))


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
    """Returns the bytes of memory that a row takes."""
    total = 0.0
    for n, op in enumerate(way.gather.operands):
        steps = source_steps(way, n)[2]
        varying = prod(size for size, step in zip(way.inner, steps) if step)
        total += varying * op.dtype.itemsize if any(steps) else 0
    return total


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

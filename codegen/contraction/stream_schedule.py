"""Schedules of products whose large operand is streamed through the registers of single threads, and their cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf, pow, prod
from typing import NamedTuple

from codegen.arch import LINE_BYTES, SECTOR_BYTES
from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.contraction.merge import merged
from codegen.declined import Declined
from codegen.dtypes import SIZE_OF
from codegen.expr import Operand
from codegen.family import Schedule
from codegen.iteration import widest_vector
from codegen.pointwise.schedule import aligned
from codegen.ranking import in_order
from codegen.records import changed, once
from codegen.sizes import most
from codegen.spec import ContractionSpec, Gather, Strides
from codegen.target import Target

ROWS, WIDTHS, WARPS, SPLITS, TERMS = (16, 8, 4, 2, 1), (8, 4, 2, 1), (8, 4), (1, 2, 4, 8), (8, 4)
#: Lanes that share a sum, and the fewest bytes of a row of the large operand that they read at a time.
LANES, LEAST_BYTES = (8, 16, 32), 32
#: Rows of the few that are worth trying: tensor cores, or tiles in shared memory, are faster for more terms of more.
MOST_FEW = 256
#: Of them beside rows that lie along the sum.
MOST_FEW_ROWS = 16
#: Bytes of shared memory for the few rows, and for sums that warps exchange; registers of a thread for sums, as many
#: for what is on its way, for these and what is multiplied meanwhile, and for all else.
MOST_HELD, MOST_EXCHANGED, MOST_WORDS, MOST_TOGETHER, OTHER_REGISTERS = 128 << 10, 32 << 10, 64, 160, 40
#: Cycles of a kernel, of a block beside its sums, until the terms that a thread asks for at a time have come, more for
#: each of them, and until the elements of the few rows have; and the power of the rounds of blocks in which all of them
#: wait.  Fits to 780 schedules, as are the constants below (error 21 %), but for the kernel's, which is of the smallest
#: products alone, and those of the few rows, whose elements came one by one then.
START, BLOCK, WAIT, TERM, FILL, ROUNDS = 1000.0, 375.0, 1140.0, 60.0, 600.0, 0.75
#: How many elements of the few rows a thread asks for at a time.
TOGETHER = 4
#: Instructions of an element that is converted, of each step of its program, and of a result; the share of instructions
#: that a multiprocessor issues; that of the rate of the L2 cache.
CONVERT, STEP, RESULT, ISSUED, L2_SHARE = 0.54, 0.88, 2.4, 0.38, 0.69
#: Cycles that a line of a multiprocessor's cache takes.
LINE = 0.97
#: Cycles of a kernel whose large operand lies along the sum, beside those that memory takes: 400 schedules, which did
#: not yet ask for it before the few rows had come, took twice as many.
START_ROWS = 4500.0
#: Lines' worth of an access to four of the few rows by lanes that have terms apart.
SHARED = 4.0


@dataclass(frozen=True)
class StreamSchedule(Schedule):
    """A thread has sums of ``rows`` of the few rows, and of ``vector`` neighbouring columns of the large operand.

    warps  of a block; ``split`` of them share the reduction, and so do ``lanes`` of each.
    terms  of the reduction for which a thread asks at a time.

    Raises ValueError unless all are powers of two, at most 32 lanes, and the warps a multiple of those that share the
    reduction.
    """

    rows: int
    vector: int
    warps: int
    split: int
    terms: int
    lanes: int = 1

    def __post_init__(self) -> None:
        numbers = (self.rows, self.vector, self.warps, self.split, self.terms, self.lanes)
        if any(n < 1 or n & (n - 1) for n in numbers) or self.split > self.warps or self.lanes > 32:
            raise ValueError(f"{self}: 1, 2, 4, ... of each, and at least as many warps as share the reduction")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.warps // self.split * 32 // self.lanes * self.vector

    @property
    def step(self) -> int:
        """Terms for which a warp asks at a time."""
        return self.terms * self.lanes


@dataclass(frozen=True)
class Streams:
    """A product whose operands are merged, and which of them is the large one.

    spec       whose batch has all dimensions of the large operand's rows but the last, if it is operand A.
    first      whether the large operand is A.
    few, size  rows of the other operand and of the large one; ``depth`` terms of a sum.
    """

    spec: ContractionSpec
    first: bool
    few: int
    size: int
    depth: int

    @property
    def large(self) -> Gather:
        return self.spec.a if self.first else self.spec.b

    @property
    def other(self) -> Gather:
        return self.spec.b if self.first else self.spec.a

    @property
    def along(self) -> int:
        """The dimension of the program's space in which the large operand's rows lie."""
        return len(self.spec.batch) + (0 if self.first else len(self.spec.m))

    @once
    def sources(self) -> list[Source]:
        """The tensors that the large operand is read from."""
        gather = self.large
        every = [*zip(*(x[: 1 + len(gather.starts)] for x in gather.steps()), (gather.start, *gather.starts))]
        steps = every if gather.program is None else every[1:]
        operands = (*gather.operands, *self.spec.others)
        return [
            Source(op, b, o[-1], i[-1], start) for op, (b, o, i, start) in zip(operands, steps * self.spec.products)
        ]

    @once
    def in_rows(self) -> bool:
        """Whether the large operand lies along the reduction, in rows that are longer than a line of the cache.

        Lanes that have a row each would ask for a line each: some lanes share a row.
        """
        return any(x.term == 1 and x.step > 1 and x.step * x.operand.dtype.itemsize > LINE_BYTES for x in self.sources)

    @once
    def widest(self) -> int:
        """How many neighbouring rows of the large operand a thread may have: every access to them is whole."""
        reads, along, space = [] if self.in_rows else self.sources, self.along, self.spec.space
        if any(x.step not in (0, 1) for x in reads):
            return 1
        batch = [d for d, size in enumerate(self.spec.batch) if size > 1]
        beside = [d for d, size in enumerate(space) if size > 1 and d != along]
        moving = [(x.operand, [x.term, x.start, *(x.batch[d] for d in batch)]) for x in reads if x.step]
        moving += [(op, [op.strides[d] for d in beside]) for op in self.spec.program.operands if op.strides[along] == 1]

        def suits(vector: int) -> bool:
            return self.size % vector == 0 and all(whole(op, vector, steps) for op, steps in moving)

        return widest_vector(8, suits) if moving or self.in_rows else 1

    @once
    def run(self) -> int:
        """How many terms of a row of the large operand are one access: several if they are neighbours."""
        read = self.sources[0] if self.large.program is None else None
        if read is None or read.term != 1:
            return 1
        steps = (*read.batch, read.step, read.start)
        most = VECTORS // read.operand.dtype.itemsize
        return widest_vector(most, lambda count: self.depth % count == 0 and whole(read.operand, count, steps))


def streams(spec: ContractionSpec) -> Streams:
    """Returns how a product is streamed.  Raises Declined, with the reason, if it cannot be."""
    if spec.a.limits or spec.b.limits or spec.terms or spec.results or spec.partials:
        raise Declined("operands are streamed that have no limits, for whole results")
    if not prod((*spec.batch, *spec.m, *spec.n, *spec.k)):
        raise Declined("there is nothing to multiply")
    spec = merged(spec)
    first = most(prod(spec.m)) > most(prod(spec.n))
    if first and spec.others:
        raise Declined("several operands B are streamed, with few rows of A")
    if first and len(spec.m) > 1:
        spec = _batched(spec)
    rows, cols, depth = (prod(sizes) for sizes in (spec.m, spec.n, spec.k))
    few, size = (cols, rows) if first else (rows, cols)
    if len(spec.k) > 1 or len(spec.n) > 1:
        raise Declined("streams have sums over one dimension, and columns in one")
    if most(few) > MOST_FEW:
        raise Declined(f"neither operand has at most {MOST_FEW} rows or columns")
    found = Streams(spec, first, few, size, depth)
    if most(few) > MOST_FEW_ROWS and found.in_rows:
        raise Declined(f"beside rows that lie along the reduction there are at most {MOST_FEW_ROWS} others")
    return found


def _batched(spec: ContractionSpec) -> ContractionSpec:
    """Returns the spec with all row dimensions but the last in the batch."""
    count = len(spec.m) - 1
    batch, outer, inner = spec.a.steps()
    a = spec.a.stepped([b + o[:-1] for b, o in zip(batch, outer)], [o[-1:] for o in outer], inner)
    batch, outer, inner = spec.b.steps()
    b = spec.b.stepped([s + (0,) * count for s in batch], outer, inner)
    return changed(spec, batch=(*spec.batch, *spec.m[:-1]), m=spec.m[-1:], a=a, b=b)


class Source(NamedTuple):
    """A tensor that the large operand is read from, with its steps over batches, rows and terms, and its start."""

    operand: Operand
    batch: Strides
    step: int
    term: int
    start: int


def whole(operand: Operand, count: int, steps: Iterable[int]) -> bool:
    """Tells whether so many neighbours, from places apart by some steps, are one access."""
    size = operand.dtype.itemsize * count
    return size <= VECTORS and aligned(operand, size, tuple(steps))


def schedules(spec: ContractionSpec, target: Target) -> tuple[StreamSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    return in_order(_ranked(spec, target), lambda s: (s.rows, s.vector))


def cycles(spec: ContractionSpec, target: Target) -> float:
    """Returns the cycles that the best schedule is estimated to take.  Raises Declined with a reason."""
    return _ranked(spec, target)[0][0]


def cost(spec: ContractionSpec, schedule: StreamSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take; infinity if it does not fit."""
    found = streams(spec)
    return _cost(found, schedule, target) if fits(found, schedule) else inf


@lru_cache(256)
def _ranked(spec: ContractionSpec, target: Target) -> list[tuple[float, StreamSchedule]]:
    s = streams(spec)
    found = [(_cost(s, schedule, target), schedule) for schedule in _candidates(s)]
    fitting = [entry for entry in found if entry[0] < inf]
    if not fitting:
        raise Declined("the few rows do not fit shared memory")
    return sorted(fitting, key=lambda entry: entry[0])


def _candidates(s: Streams) -> Iterator[StreamSchedule]:
    """Yields what might be fast: threads with registers for their sums, and warps that all have work."""
    wide, word, piece = s.widest, SIZE_OF[s.spec.accumulate] // 4, s.run
    few, depth, products = most(s.few), most(s.depth), s.spec.products
    shares = [1]
    if s.in_rows:
        shares = [n for n in LANES if n * piece * s.sources[0].operand.dtype.itemsize >= LEAST_BYTES]
    for rows, vector, warps, split, terms, lanes in product(ROWS, WIDTHS, WARPS, SPLITS, TERMS, shares):
        if rows >= 2 * few or vector > wide or (piece > 1 and vector > 1 and lanes == 1) or split > warps:
            continue
        made = StreamSchedule(rows, vector, warps, split, max(terms, piece), lanes)
        idle = (split - 1) * made.step >= depth or (terms > min(TERMS) and (terms * lanes >= 2 * depth))
        each = vector * word * products
        held = max(rows, made.terms) * each <= MOST_WORDS and (rows + 2 * made.terms) * each <= MOST_TOGETHER
        if not idle and held and fits(s, made):
            yield made


def fits(s: Streams, schedule: StreamSchedule) -> bool:
    """Tells whether a schedule, perhaps one that was found for other sizes, is one for these operands."""
    tiles = buffers(s, schedule)
    room = tiles["few"].bytes <= MOST_HELD and tiles["parts"].bytes <= MOST_EXCHANGED
    return room and s.widest % schedule.vector == 0 and (schedule.lanes > 1) == s.in_rows


def buffers(s: Streams, schedule: StreamSchedule) -> Buffers:
    """Returns what a block has in shared memory: its few rows, and sums that warps and lanes exchange.

    Of the few rows it has a row for each term; or chunks of some of them, for lanes that have terms apart.
    """
    c, rows, vector, lanes = s.spec.accumulate, schedule.rows, schedule.vector, schedule.lanes
    exchanged = (schedule.warps, s.spec.products * rows, vector, 32 // lanes) if schedule.split * lanes > 1 else (0,)
    terms, each = Edge(most(s.depth), schedule.step).padded, chunk(c, rows)
    held = (terms, rows) if lanes == 1 else (rows // each, terms, each)
    return Buffers((Buffer("few", c, held, align=VECTORS), Buffer("parts", c, exchanged, align=VECTORS)))


def chunk(ctype: str, rows: int) -> int:
    """Returns how many of the few rows one access to shared memory brings."""
    return min(rows, VECTORS // SIZE_OF[ctype])


def _cost(s: Streams, schedule: StreamSchedule, target: Target) -> float:
    """Returns the estimated cycles: the most of what the caches, instructions and waiting for memory take."""
    spec, word = s.spec, SIZE_OF[s.spec.accumulate] // 4
    rows, vector, split, terms = schedule.rows, schedule.vector, schedule.split, schedule.terms
    products = spec.products
    tiles = prod(spec.batch) * Edge(s.size, schedule.columns).tiles * Edge(s.few, rows).tiles
    registers = OTHER_REGISTERS + word * vector * products * (rows + 2 * terms) + rows
    held = target.arch.blocks_per_sm(schedule.threads, registers, buffers(s, schedule).bytes)
    if not held:
        return inf
    each = Edge(tiles, target.sms).tiles
    together, piece, steps = min(held, each), s.run, Edge(s.depth, schedule.step * split).tiles
    # What a thread does for each term: reads, elements, products.
    read, lanes = s.sources, schedule.lanes
    reads = sum((vector if lanes > 1 else 1) / piece if x.term else 1 / terms for x in read)
    made = CONVERT if s.large.program is None else CONVERT + STEP * len(s.large.program.instructions)
    a_term = reads + word * rows / 4 + vector * products * (made + rows * word)
    results = rows * vector * (RESULT * products + len(spec.program.instructions) + 2 * len(spec.program.loads))
    exchange = products * rows * vector * (1 + split + 2 * (lanes.bit_length() - 1)) if split * lanes > 1 else 0
    instructions = schedule.warps * (steps * terms * a_term + results / (split * lanes) + exchange)
    # Lanes whose elements are apart ask for a line each.
    if lanes > 1:
        beside = piece * lanes * read[0].operand.dtype.itemsize / LINE_BYTES  # lines of a row that its lanes ask for
        asked = len(read) * vector / piece * 32 / lanes * max(1.0, beside) + SHARED * word * rows / 4
    else:
        asked = sum(lines(x.operand, x.step, vector) / (piece if x.term == 1 else 1) for x in read if x.term)
    asked = schedule.warps * steps * terms * asked + schedule.warps * rows / (split * lanes) * sum(
        lines(op, op.strides[s.along], vector) for op in spec.program.operands
    )
    size = sum(_bytes(x.operand, 1 if x.term == 1 else x.step) for x in read if x.step or x.term)
    moved = schedule.columns * s.depth * size + rows * s.depth * s.other.operand.dtype.itemsize
    moved += schedule.columns * rows * sum(_bytes(op, op.strides[s.along]) for op in spec.program.operands)
    issue = each * instructions / (4 * ISSUED)
    fills = Edge(s.depth * rows, schedule.threads * TOGETHER).tiles
    waits = pow(each / together, ROUNDS) * (BLOCK + FILL * fills + (WAIT + TERM * terms) * steps)
    found = max(each * moved / (L2_SHARE * target.l2_rate), issue, waits, each * asked * LINE)
    if lanes == 1:
        return START + found
    read_once = prod(spec.batch) * s.size * s.depth * size
    return START_ROWS + max(found, read_once / (target.bytes_per_cycle * target.memory_share))


def lines(operand: Operand, step: int, vector: int) -> float:
    """Returns how many lines of a cache the lanes of a warp ask for at once."""
    return min(32.0, max(1.0, 32 * vector * abs(step) * operand.dtype.itemsize / LINE_BYTES))


def _bytes(operand: Operand, step: int) -> float:
    """Returns the bytes that an element takes on its way to a thread, whose neighbours' are some elements apart."""
    return min(SECTOR_BYTES, abs(step) * operand.dtype.itemsize)

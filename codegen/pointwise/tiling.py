"""Tiles for pointwise kernels whose operands lie in memory in different orders: which axes, how large, how staged.

The space is split into outer dimensions, *row* dimensions and *column* dimensions, in this order.  Operands that are
contiguous along the columns are read and written directly.  Those that are contiguous along the last row dimension
(*turned* operands) pass through shared memory: a block reads its tile along the rows and picks it up along the columns,
or the other way round for results.  So do reads of tables at places that follow from coordinates, as in concatenations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from codegen.buffers import VECTORS, Buffer, Buffers
from codegen.expr import Operand, Program
from codegen.family import Schedule
from codegen.iteration import bounds, far, index_type, memory_order, packed, rebase, widest_vector
from codegen.pointwise.alignment import LEAST, access, is_skewed, period
from codegen.pointwise.schedule import THREADS, aligned, traffic
from codegen.pointwise.tables import placed, read_vector
from codegen.records import once
from codegen.spec import PointwiseSpec
from codegen.target import Target

#: Smaller spaces are read in place: tiles would leave most of a GPU idle.  Reads of tables alone are not turned in some
#: that are larger, where caches have what neighbouring threads read of the same sectors.
ENOUGH_ELEMENTS, ENOUGH_READS = 2**15, 2**18
#: Bounds on the tiles of a block: bytes of all turned operands, bytes of one operand; bytes and accesses of a thread
#: that are in flight together for one operand.
SHARED_BYTES = 32768
TILE_BYTES = 16384
BYTES_IN_FLIGHT = 256
MOST_ACCESSES = 16
#: What shifting words into place adds to the cost of moving a byte.
SHIFT = 0.3
#: Tiles of a multiprocessor that keep a GPU busy, and the least elements along a side of tiles that are cut for more;
#: bytes of a cache line.
ENOUGH_TILES, LEAST_SIDE, LINE = 4, 24, 128


@dataclass(frozen=True)
class TilesSchedule(Schedule):
    """How a pointwise kernel is cut into tiles.

    order       the dimensions of the spec's space, slowest first: columns come last.
    outer, turn the first and the last row dimension of the space in that order, merged.
    rows, cols  the tile.
    vector      elements of one access along the columns.
    unaligned   rows and columns may begin between words (`pointwise.tiles_unaligned`).
    """

    order: tuple[int, ...]
    outer: int
    turn: int
    rows: int
    cols: int
    vector: int
    itype: str
    unaligned: bool = False


@dataclass(frozen=True)
class Stage:
    """How one turned operand passes through shared memory.

    Element (row, col) of a tile lies at ``row * width + row / vector * skew + col``.  Lanes that take ``vector`` rows
    of a column each store them one after the other.  A warp's lanes are ``lanes`` columns by 32 / lanes groups of rows;
    the distance between the groups is an odd multiple of ``chunk`` bytes and the lanes of a group together write no
    more than a chunk, at the same place in each.  So 128 / chunk groups in a row cover every bank once.

    vector  rows of one access to global memory, at most 16 bytes.
    lanes   neighbouring columns among the lanes of a warp.
    chunk   bytes; accesses of up to so many along the columns are aligned.
    skew    elements left free after every ``vector`` rows.
    width   elements from row to row of the tile.
    shifted whether the access may begin anywhere: the words around it are shifted into place.
    """

    vector: int
    lanes: int
    chunk: int
    skew: int
    width: int
    shifted: bool

    @staticmethod
    def of(operand: Operand, vector: int, cols: int, run: int, width: int, shifted: bool) -> Stage:
        """Returns the stage of an operand in tiles of ``cols`` columns; ``run`` elements of a column are neighbours."""
        size = operand.dtype.itemsize
        chunk = 16 if size == 8 else max(4, vector * size)
        lanes = 2 if size == 8 else max(1, vector * size // 4)
        # Where columns end after a few bytes, neighbouring lanes keep a warp together.
        while run * lanes * size < LINE // 4 and lanes < min(32, cols):
            lanes *= 2
        if cols < 2 * lanes and cols % lanes:
            lanes = cols
        used = vector * width * size
        step = -(-used // chunk)
        return Stage(vector, lanes, chunk, ((step + (step % 2 == 0)) * chunk - used) // size, width, shifted)

    def elements(self, rows: int) -> int:
        """Returns how many elements of shared memory a tile of ``rows`` rows takes."""
        return rows * self.width + rows // self.vector * self.skew


class Tiling:
    """A spec along the axes of a schedule."""

    def __init__(self, spec: PointwiseSpec, schedule: TilesSchedule) -> None:
        self.schedule = schedule
        self.shape, self.program = rebase(spec.program, spec.shape, schedule.order)
        self.row_dims = self.shape[schedule.outer : schedule.turn + 1]
        self.col_dims = self.shape[schedule.turn + 1 :]
        self.height, self.width = prod(self.row_dims), prod(self.col_dims)

    @property
    def lead(self) -> Operand:
        """The operand in whose memory vectors are aligned, where rows begin anywhere."""
        return self.program.stores[0].operand

    @once
    def skewed(self) -> bool:
        """Whether the columns that a block writes begin at another place in every row: where vectors of the lead do."""
        return self.schedule.unaligned and is_skewed(self.lead, self.schedule.vector)

    @property
    def frame(self) -> int:
        """Columns of the tiles of turned operands.

        Where columns are skewed, a block writes those of row r from ``col0 - skew(r)`` on.  Its tile has the columns
        from ``col0 - vector`` on, which include all of these; column c of row r lies ``skew(r)`` further to the right
        in it, so that what is written begins at the same place in every row: ``vector`` elements after the row's start.
        """
        return self.schedule.cols + (self.schedule.vector if self.skewed else 0)

    @property
    def overhangs(self) -> bool:
        """Whether columns of a tile may be outside of the space."""
        return self.skewed or self.width % self.schedule.cols != 0

    @property
    def blocks(self) -> tuple[int, int]:
        """How many blocks lie along the rows and along the columns."""
        over = period(self.lead, self.schedule.vector) - 1 if self.skewed else 0
        return -(-self.height // self.schedule.rows), -(-(self.width + over) // self.schedule.cols)

    @property
    def flat(self) -> bool:
        """Whether a thread's vectors run through the whole tile, over the ends of rows.

        Its columns are then all there are, and rows follow each other in every operand that is accessed in vectors.
        """
        s = self.schedule
        return s.cols == self.width and self.width % s.vector != 0

    def direct(self, operand: Operand) -> str:
        """Returns how a thread reads or writes a vector of a direct operand.

        "scalar" or "uniform" (one value), "vector", "unaligned" (words that are shifted into place), "strided" (one
        access per element, at even distances) or "element" (one access per element, each with coordinates of its own).
        """
        strides, vector = operand.strides, self.schedule.vector
        if self.schedule.unaligned:
            return access(operand, self.lead, vector) or "element"
        if not any(strides):
            return "scalar"
        if self.flat:
            wide = strides[self.schedule.outer :] == packed((*self.row_dims, *self.col_dims))
            steps = strides[: self.schedule.outer]
        else:
            cols = strides[self.schedule.turn + 1 :]
            if len(cols) > 1 and self.col_dims[-1] % vector:
                wide = cols == packed(self.col_dims)
                if not wide:
                    return "element"
            wide = strides[-1] == 1
            steps = strides[:-1] if self.col_dims[-1] % vector == 0 else strides[: self.schedule.turn + 1]
        if wide and aligned(operand, min(16, vector * operand.dtype.itemsize), steps):
            return "vector"
        if self.flat:
            return "element"
        return "strided" if strides[-1] else "uniform"

    @once
    def reads(self) -> dict[int, int]:
        """Reads of tables that may be turned, by their number as operands behind the program's: their instructions."""
        return {len(self.program.operands) + n: k for n, k in enumerate(self._placed)}

    @once
    def _placed(self) -> dict[int, Operand]:
        return placed(self.program)

    def operand(self, n: int) -> Operand:
        """Returns an operand, or what a read of a table reads, by its number."""
        return self._placed[self.reads[n]] if n in self.reads else self.program.operands[n]

    @once
    def stages(self) -> dict[int, Stage]:
        """The turned operands, by their number among the program's operands, and reads of tables behind these."""
        s, several = self.schedule, len(self.row_dims) > 1
        width = self.frame + (s.vector if self.skewed else 0)
        found = {}
        for n, op in enumerate(self.program.operands):
            if op.strides[-1] and fastest(op, self.shape) == s.turn:
                vector, widest = (row_vector(op, self.shape, s.turn, s.rows, several, u) for u in (False, s.unaligned))
                shifted = widest > vector and widest * op.dtype.itemsize >= LEAST
                vector = widest if shifted else vector
                found[n] = Stage.of(op, vector, self.frame, self.row_dims[-1], width, shifted)
        for n, k in self.reads.items():
            op = self.operand(n)
            if op.strides[-1] and fastest(op, self.shape) == s.turn:
                vector = read_vector(self.program, k, self.shape, s.turn, s.rows)
                found[n] = Stage.of(op, vector, self.frame, self.row_dims[-1], width, False)
        return found

    def tile(self, n: int, name: str = "") -> Buffer:
        """Returns the tile of a turned operand in shared memory."""
        elements = self.stages[n].elements(self.schedule.rows)
        return Buffer(name, self.operand(n).dtype.ctype, (elements,), align=VECTORS)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return Buffers(self.tile(n) for n in self.stages).bytes


def fastest(operand: Operand, shape: tuple[int, ...]) -> int:
    """Returns the dimension along which an operand's elements are neighbours in memory; the last one among equals."""
    strides = [(s, -d) for d, (size, s) in enumerate(zip(shape, operand.strides)) if s and size > 1]
    return -min(strides)[1] if strides else len(shape) - 1


def row_vector(
    operand: Operand, shape: tuple[int, ...], turn: int, rows: int, several: bool, anywhere: bool = False
) -> int:
    """Returns how many elements one access to a turned operand has.

    It has 16 bytes, or fewer where rows start between such words (unless they may begin ``anywhere``), where a tile of
    ``rows`` ends between them, or where they reach over the end of one of ``several`` row dimensions.
    """
    if operand.strides[turn] != 1:
        return 1
    steps = tuple(s for d, s in enumerate(operand.strides) if d != turn)

    def suits(vector: int) -> bool:
        whole = rows % vector == 0 and not (several and shape[turn] % vector)
        return whole and (anywhere or aligned(operand, vector * operand.dtype.itemsize, steps))

    return widest_vector(16 // operand.dtype.itemsize, suits)


def best_tiles(spec: PointwiseSpec, target: Target) -> TilesSchedule | None:
    """Returns the best guess at tiles; None if no operand is turned or the space is small."""
    orders = _orders(spec)
    shape, program = rebase(spec.program, spec.shape, orders[0])
    across = any(_across(op, shape) for op in program.operands)
    reads = prod(shape) >= ENOUGH_READS and any(_across(op, shape) for op in _every(program))
    if prod(shape) < ENOUGH_ELEMENTS or not (across or reads):
        return None
    # Shifting words takes arithmetic, which costs less than moving one or two bytes at a time.
    kinds = (False, True) if min(op.dtype.itemsize for op in program.operands) < LEAST else (False,)
    return _cheapest(spec, kinds, target)


def _cheapest(spec: PointwiseSpec, kinds: Sequence[bool], target: Target) -> TilesSchedule | None:
    """Returns the cheapest tiles over all orders, unaligned or not (``kinds``); None if they turn no operand."""
    found = [pair for order in _orders(spec) for unaligned in kinds for pair in _along(spec, order, unaligned, target)]
    if not found:
        return None
    _, best = min(found, key=lambda pair: pair[0])
    return best if Tiling(spec, best).stages else None


def _is_possible(tiling: Tiling) -> bool:
    """Tells whether unaligned tiles of a schedule's sizes are possible, and differ from aligned ones.

    They are if all results and direct operands lie along the columns, which are one dimension, if turned operands are
    read several bytes at a time, and if nothing is read through a table: the program runs outside of the space as well.
    """
    s, operands = tiling.schedule, tiling.program.operands
    if tiling.program.tables:
        return False
    kinds = {n: tiling.direct(op) for n, op in enumerate(operands) if n not in tiling.stages}
    results = range(len(tiling.program.loads), len(operands))
    stages = [(stage, operands[n].dtype.itemsize) for n, stage in tiling.stages.items()]
    return (
        s.vector > 1
        and len(tiling.col_dims) == 1
        and tiling.width > 2 * s.cols
        and s.cols % s.vector == 0
        and tiling.lead.strides[-1] == 1
        and "element" not in kinds.values()
        and all(n in kinds and (kinds[n] == "vector" or operands[n] is tiling.lead) for n in results)
        and all(stage.vector * size >= LEAST for stage, size in stages)
        and (tiling.skewed or "unaligned" in kinds.values() or any(stage.shifted for stage, _ in stages))
    )


def tiles(spec: PointwiseSpec, target: Target) -> Iterator[TilesSchedule]:
    """Yields schedules worth trying, best guess first."""
    best = best_tiles(spec, target)
    if best is None:
        return
    yield from _around(spec, best)
    other = _cheapest(spec, (not best.unaligned,), target)
    if other is not None:
        yield from _around(spec, other)


def _around(spec: PointwiseSpec, best: TilesSchedule) -> Iterator[TilesSchedule]:
    """Yields a schedule, and those with tiles of other sizes."""
    yield best
    tiling = Tiling(spec, best)
    step = max(best.vector, *(stage.vector for stage in tiling.stages.values()))
    for rows, cols in ((2, 1), (1, 2), (0.5, 1), (1, 0.5), (2, 0.5), (0.5, 2), (0.5, 0.5)):
        other = replace(best, rows=int(best.rows * rows), cols=int(best.cols * cols))
        fits = other.rows % step == 0 and (cols == 1 or (other.cols % best.vector == 0 and best.cols < tiling.width))
        inside = other.rows <= max(tiling.height, best.rows) and other.cols <= max(tiling.width, best.cols)
        long = other.rows >= 8 and other.cols >= min(8, best.cols)
        if fits and inside and long:
            cut = Tiling(spec, other)
            if cut.shared_bytes <= 49152 and (not best.unaligned or _is_possible(cut)):
                yield other


def _orders(spec: PointwiseSpec) -> list[tuple[int, ...]]:
    """Returns the memory orders of the first output and of all operands that have every element of the space."""
    program = spec.program
    full = [
        op
        for op in (*(store.operand for store in program.stores), *program.loads)
        if op is program.stores[0].operand or all(stride or size == 1 for size, stride in zip(spec.shape, op.strides))
    ]
    return list(dict.fromkeys(memory_order(spec.shape, op.strides) for op in full))


def _every(program: Program) -> tuple[Operand, ...]:
    """Returns the operands of a program, and what its reads of tables read that may be turned."""
    return (*program.operands, *placed(program).values())


def _across(operand: Operand, shape: tuple[int, ...]) -> bool:
    """Tells whether neighbours along the last dimension are farther apart in memory than those along another one."""
    return operand.strides[-1] != 0 and fastest(operand, shape) != len(shape) - 1


def _along(
    spec: PointwiseSpec, order: tuple[int, ...], unaligned: bool, target: Target
) -> Iterator[tuple[float, TilesSchedule]]:
    """Yields tiles whose columns are the fastest dimensions of an order, each after its cost in bytes."""
    shape, program = rebase(spec.program, spec.shape, order)
    itype = index_type(*bounds(program.operands, shape), *far(program))
    weight = [0] * len(shape)
    for op in _every(program):
        if _across(op, shape):
            weight[fastest(op, shape)] += traffic(op, shape)
    turn = max(range(len(shape)), key=lambda d: weight[d])
    if not weight[turn]:
        turn = max(len(shape) - 2, 0)
    for vector in (16, 8, 4, 2, 1):
        sizes = [op.dtype.itemsize for op in program.operands]
        if vector == 1 or (vector * min(sizes) <= 16 and vector * max(sizes) <= 32):
            first = TilesSchedule(order, turn, turn, 1, 1, vector, itype, unaligned)
            tiling = Tiling(spec, _sized(program, shape, first, target))
            if not unaligned or _is_possible(tiling):
                yield _cost(tiling), tiling.schedule


def _sized(program: Program, shape: tuple[int, ...], schedule: TilesSchedule, target: Target) -> TilesSchedule:
    """Returns the schedule with its rows and columns chosen."""
    turn, vector = schedule.turn, schedule.vector
    width = prod(shape[turn + 1 :])
    tables = [(k, op) for k, op in placed(program).items() if op.strides[-1] and fastest(op, shape) == turn]
    full = [op for op in program.operands if op.strides[-1] or op.strides[turn]]
    turned = [op for op in full if op.strides[-1] and fastest(op, shape) == turn]
    widths = [row_vector(op, shape, turn, 16, False, schedule.unaligned) for op in turned]
    widths = [*widths, *(read_vector(program, k, shape, turn, 16) for k, _ in tables)] or [vector]
    turned += [op for _, op in tables]
    sizes = [op.dtype.itemsize for op in (*full, *(op for _, op in tables))]
    through = sum(op.dtype.itemsize for op in turned)
    area = min(
        THREADS * BYTES_IN_FLIGHT // sum(sizes),
        SHARED_BYTES // max(through, 1),
        TILE_BYTES // max(sizes),
        THREADS * MOST_ACCESSES * min(vector, *widths),
    )
    # Narrow accesses to shared memory have no bank conflicts if a row has 8 vectors: see `Stage`.
    narrow = any(w < vector and w * op.dtype.itemsize < 16 for w, op in zip(widths, turned))

    def cut(area: int) -> TilesSchedule:
        cols = 8 * vector if narrow else 1 << area.bit_length() // 2
        if width <= cols + cols // 8:
            cols = width
        elif _wasteful(width, cols):
            count, step = -(-width // cols), max(vector, 4)
            cols = -(-width // count // step) * step
        outer, height = turn, shape[turn]
        step = max(vector, *widths)  # a whole number of accesses, however wide
        rows = max(step, 1 << max(area // cols, 1).bit_length() - 1)
        while outer > 0 and (height < rows or (_wasteful(height, rows) and not shape[turn] % (16 // min(sizes)))):
            outer -= 1
            height *= shape[outer]
        if height <= rows + rows // 4:
            rows = -(-height // step) * step
        elif _wasteful(height, rows):
            rows = -(-height // -(-height // rows) // step) * step
        return replace(schedule, outer=outer, rows=rows, cols=cols)

    if width * min(sizes) < LINE:  # such rows take many accesses of few lanes: blocks that begin apart hide their waits
        area //= 2
    made = cut(1 << area.bit_length() - 1)
    while area > 1 and _blocks(shape, made) < ENOUGH_TILES * target.sms:
        area //= 2
        less = cut(1 << area.bit_length() - 1)
        if less.rows < LEAST_SIDE or less.cols < min(LEAST_SIDE, width):
            break
        made = less
    return made


def _wasteful(extent: int, tile: int) -> bool:
    """Tells whether tiles of this size would reach far past the end."""
    return -(-extent // tile) * tile > extent * 9 // 8


def _blocks(shape: tuple[int, ...], schedule: TilesSchedule) -> int:
    height, width = prod(shape[schedule.outer : schedule.turn + 1]), prod(shape[schedule.turn + 1 :])
    return prod(shape[: schedule.outer]) * -(-height // schedule.rows) * -(-width // schedule.cols)


def _cost(tiling: Tiling) -> float:
    """Returns the bytes moved, with a surcharge for narrow accesses, shared memory and tiles that end outside."""
    cost = 0.0
    vector, loads = tiling.schedule.vector, len(tiling.program.loads)
    for n in (*range(len(tiling.program.operands)), *tiling.reads):
        op = tiling.operand(n)
        size = op.dtype.itemsize
        moved = traffic(op, tiling.shape)
        if n in tiling.stages:
            stage = tiling.stages[n]
            narrow = stage.chunk < min(16, vector * size)
            detour = (0.4 if narrow else 0.25) + (SHIFT if stage.shifted else 0)
            cost += moved * tiling.frame / tiling.schedule.cols * (_dear(stage.vector * size) + detour)
        elif _across(op, tiling.shape):
            cost += moved * 32 / size  # a sector for every element
        elif n in tiling.reads:
            cost += moved * _dear(size)
        elif tiling.direct(op) in ("scalar", "vector", "uniform"):
            cost += moved * _dear(vector * size)
        elif tiling.direct(op) == "unaligned":
            cost += moved * (_dear(vector * size) + (SHIFT if op is not tiling.lead else 0))
        else:
            cost += moved * _dear(size) * (1 if vector == 1 else 1.3 if n < loads else 2)
    s = tiling.schedule
    blocks = prod(tiling.shape[: s.outer]) * prod(tiling.blocks)
    return cost * blocks * s.rows * s.cols / max(prod(tiling.shape), 1)


def _dear(width: int) -> float:
    return {8: 1.1, 4: 1.3, 2: 1.8, 1: 3.0}.get(width, 1.0)

"""Schedules of the SIMT form of the contraction family, by a model of how busy they keep the multiprocessors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple, TypeAlias

from codegen.arch import MAX_REGISTERS_PER_THREAD
from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.contraction.merge import merged
from codegen.dtypes import SIZE_OF
from codegen.family import Schedule
from codegen.iteration import extent, signed_index_type
from codegen.phases import busy_share
from codegen.spec import ContractionSpec, Gather
from codegen.target import PORTABLE, Target

Tile: TypeAlias = tuple[int, int, int, int, int]
#: Of a product: batch, m, n and k.
Sizes: TypeAlias = tuple[int, int, int, int]

CHUNK = 4  # sums of a thread lie in chunks of 4 neighbouring rows and columns: one shared-memory access loads four


@dataclass(frozen=True)
class SimtSchedule(Schedule):
    """Tile of a block (tile_m, tile_n, tile_k) and sums of a thread (thread_rows x thread_cols).

    ``blocks`` is the least number of blocks that a multiprocessor is to hold, which limits the registers of a thread.
    A ring of more than two ``stages`` is filled by asynchronous copies; of two, through registers.  Raises ValueError
    unless the threads divide both tiles evenly and the sums come in chunks of four.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    thread_rows: int
    thread_cols: int
    itype: str
    blocks: int = 1
    stages: int = 2

    def __post_init__(self) -> None:
        threads = self.threads
        if self.thread_rows % CHUNK or self.thread_cols % CHUNK or threads > 1024:
            raise ValueError(
                f"{self}: a thread has a multiple of {CHUNK} rows and columns, a block at most 1024 threads"
            )
        if any(n * self.tile_k % threads for n in (self.tile_m, self.tile_n)) or threads % self.tile_k:
            raise ValueError(f"{self}: {threads} threads do not divide the tiles evenly")

    @property
    def tile(self) -> Tile:
        return self.tile_m, self.tile_n, self.tile_k, self.thread_rows, self.thread_cols

    @property
    def copied(self) -> bool:
        """Whether tiles come by asynchronous copies."""
        return self.stages > 2

    @property
    def threads(self) -> int:
        return (self.tile_m // self.thread_rows) * (self.tile_n // self.thread_cols)


#: (rows, cols, inner, thread_rows, thread_cols), largest first.
TILES: tuple[Tile, ...] = (
    (128, 128, 8, 8, 8),
    (128, 64, 8, 8, 4),
    (64, 128, 8, 4, 8),
    (64, 64, 16, 4, 4),
    (128, 32, 16, 4, 4),
    (32, 128, 16, 4, 4),
    (32, 32, 16, 4, 4),
)


class Ring(NamedTuple):
    """A tile that is brought by asynchronous copies.

    stages  of the ring; ``blocks`` of which a multiprocessor is to hold so many if the product is plain.
    share   of the multiply-adds that there could be, from times.
    """

    tile: Tile
    stages: int
    blocks: int
    share: float


RINGS: tuple[Ring, ...] = (
    Ring((256, 128, 8, 16, 8), 4, 1, 0.89),
    Ring((128, 128, 16, 8, 8), 3, 2, 0.88),
    Ring((128, 64, 16, 8, 8), 3, 4, 0.87),
    Ring((64, 128, 16, 8, 8), 3, 4, 0.87),
    Ring((64, 64, 16, 8, 4), 4, 4, 0.81),
    Ring((64, 32, 16, 4, 4), 4, 4, 0.68),
    Ring((32, 64, 16, 4, 4), 4, 4, 0.68),
    Ring((32, 32, 16, 4, 4), 4, 8, 0.62),
)
#: Cycles until the first stage is there and after the last; instructions for a copy, and for one whose place in the
#: reduction has several coordinates; warps that keep a multiprocessor's schedulers busy, and the share without.
RING_START, COPY, COPY_FROM_WINDOW, BUSY_WARPS, IDLE = 2500.0, 3.0, 14.0, 8, 0.9
#: Bytes of shared memory that a block may declare.
STATIC_BYTES = 48 << 10
#: Cycles that a stage takes at least, however little is to be multiplied while the next one is in flight; the same
#: where it is fetched element by element, and how much longer such a stage takes while all blocks began together.  Fits
#: to times (rms error 9 %), as are the constants below.
LATENCY, SCATTERED_LATENCY, IN_STEP = 1400.0, 1150.0, 600.0
#: What a thread's reads of shared memory, and a block's fetches and writes of tiles, add to its multiply-adds; cycles
#: of a block besides its stages; registers of a thread besides its sums.
READS, FETCHES, BLOCK, OTHER_REGISTERS = 1.0, 12.0, 60.0, 72
#: Cycles in which a result leaves, and more for each operand that differs: fits to 270 schedules (rms error 33 %).
RESULT, RESULT_OPERAND = 0.25, 0.1


def schedules(spec: ContractionSpec, target: Target = PORTABLE) -> tuple[SimtSchedule, ...]:
    """Returns schedules of the tiles, the one with the least estimated time first.

    Larger thread tiles read less shared memory for each product (their rate is higher), smaller ones waste less at the
    edges and fill the machine sooner.
    """
    return tuple(schedule for _, schedule in _ranked(spec, target))


def cycles(spec: ContractionSpec, target: Target = PORTABLE) -> float:
    """Returns the cycles that the best tile is estimated to take."""
    return _ranked(spec, target)[0][0]


def cost(spec: ContractionSpec, schedule: SimtSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take; infinity if it does not fit."""
    return next((found for found, _ in _estimates(spec, target, schedule)), inf)


def _ranked(spec: ContractionSpec, target: Target) -> list[tuple[float, SimtSchedule]]:
    """Returns the schedules that fit, each after its estimated cycles."""
    return sorted(_estimates(spec, target), key=lambda entry: entry[0])


def _estimates(
    spec: ContractionSpec, target: Target, wanted: SimtSchedule | None = None
) -> Iterator[tuple[float, SimtSchedule]]:
    """Yields the schedules that fit, or only the one that is wanted, each after its estimated cycles."""
    sizes = prod(spec.batch), prod(spec.m), prod(spec.n), prod(spec.k)
    c, products, itype = spec.accumulate, spec.products, _itype(spec)
    # Sums that leave a thread enough registers for everything else; the smallest tiles always do.
    most = max(256 // SIZE_OF[c], CHUNK * CHUNK * products)
    scattered, share = _scattered(spec), busy_share(spec)
    for tile in TILES:
        schedule = SimtSchedule(*tile, itype)
        if wanted not in (None, schedule) or tile[3] * tile[4] * products > most or not _divides(spec, tile):
            continue
        beside = combined(spec, tile).bytes or passing(spec, schedule.threads).bytes
        if buffers(tile, c, products).bytes + beside <= STATIC_BYTES:
            found = _cycles(target, tile, sizes, products, c, scattered, share)
            yield found + _leaving(spec, target, tile, sizes), schedule
    # A CPU, for which the portable target is, takes twice as long over copies of single elements.
    if target.arch.has_cp_async and target != PORTABLE and _copyable(spec):
        plain = _plain(spec) and itype == "int32"
        for ring in RINGS:
            tile, stages, blocks, _ = ring
            if not _divides(spec, tile) or (tile[3] > 2 * CHUNK and not plain):
                continue  # addresses take registers, too
            schedule = SimtSchedule(*tile, itype, blocks if plain else max(1, blocks // 2), stages)
            if wanted in (None, schedule):
                found = _ring_cycles(target, ring, sizes, _widths(spec, tile), share, plain=plain)
                yield found + _leaving(spec, target, tile, sizes), schedule


def _divides(spec: ContractionSpec, tile: Tile) -> bool:
    """Tells whether chunks of rows and columns that are combined lie in one tile."""
    return not (tile[0] % spec.row_chunk or tile[1] % spec.col_chunk)


def buffers(
    tile: Tile, ctype: str, products: int = 1, in_chunks: Sequence[bool] = (False, False), stages: int = 2
) -> Buffers:
    """Returns the stages of the tiles in shared memory: a row for each term of the sum.

    Or ``in_chunks`` a row for each four terms, which then lie one behind the other.  The pad keeps rows 16-byte aligned
    and spreads the writes of one column over the banks.  Where threads have a vector each, as many threads as fill 32
    banks write the same terms of neighbouring rows.
    """
    rows, cols, inner, _, _ = tile
    found = []
    for name, size, many, chunks in zip(("a_tile", "b_tile"), (rows, cols), (1, products), in_chunks):
        shape, pad = ((inner // CHUNK, CHUNK * size), 32 * CHUNK // inner) if chunks else ((inner, size), CHUNK)
        dims = (many, stages, *shape) if many > 1 else (stages, *shape)
        found.append(Buffer(name, ctype, dims, pad=pad, align=VECTORS))
    return Buffers(found)


def passes(spec: ContractionSpec, rows_fast: bool) -> bool:
    """Tells whether lanes pass their sums to each other where no access can be wide: each would write every fourth
    element of its rows (with ``rows_fast``, columns).
    """
    lying = [op for op in (st.operand for st in spec.program.stores) if op.strides[-2 if rows_fast else -1] == 1]
    return SIZE_OF[spec.accumulate] == 4 and bool(lying) and not spec.partials


def passing(spec: ContractionSpec, threads: int) -> Buffer:
    """Returns where lanes find each other's sums: 4 rows of 32 for each warp; the pad spreads writes over the banks."""
    many = (spec.products,) if spec.products > 1 else ()
    return Buffer("passed", spec.accumulate, (*many, threads // 32, CHUNK, 32), pad=16, align=VECTORS)


def part_buffers(spec: ContractionSpec, tile: Tile) -> Buffers:
    """Returns where threads combine their values of each partial reduction: one after another, in the same place."""
    found = []
    for x in spec.partials:
        along, across = tile[:2] if x.rows else tile[1::-1]
        found.append(Buffer("parts", x.reduction.ctype, (along // x.chunk, x.chunk // CHUNK, across)))
    return Buffers(found)


def combined(spec: ContractionSpec, tile: Tile) -> Buffer:
    """Returns the shared memory in which threads combine their values of partial reductions."""
    size = max((x.bytes for x in part_buffers(spec, tile)), default=0)
    return Buffer("parts", "unsigned char", (size,), align=VECTORS)


def _cycles(
    target: Target, tile: Tile, sizes: Sizes, products: int, ctype: str, scattered: bool = False, share: float = 1.0
) -> float:
    """Returns the cycles that products of these sizes are estimated to take in tiles that come through registers.

    They are the rounds of as many blocks as the multiprocessors hold, each as long as its stages.  The next stage is in
    flight while one is multiplied.  The rest of the batches than this ``share`` have no terms, and take no time.
    """
    k, (rows, cols, inner, tr, tc) = sizes[3], tile
    words = SIZE_OF[ctype] // 4
    threads, sums = rows // tr * (cols // tc), tr * tc * products
    registers = min(MAX_REGISTERS_PER_THREAD, OTHER_REGISTERS + sums * words)
    held = max(1, target.arch.blocks_per_sm(threads, registers, buffers(tile, ctype, products).bytes))
    work = rows * cols * products * inner * words / target.fma
    work *= 1 + READS * (tr + tc * products) / sums + FETCHES * (1 / rows + 1 / (cols * products))
    blocks = _blocks(target, tile, sizes, share)
    together = min(blocks, held)
    stage = max(LATENCY + work / 10, together * work)
    if scattered:  # a block waits for the next stage just after asking for it, as do those that began with it
        stage = max(SCATTERED_LATENCY + work, together * work + (IN_STEP if blocks <= held else 0))
    return blocks / together * (Edge(k, inner).tiles * stage + BLOCK) if blocks else 0.0


def _blocks(target: Target, tile: Tile, sizes: Sizes, share: float = 1.0) -> int:
    """Returns the blocks of a multiprocessor, of this share of the batches."""
    batch, m, n, _ = sizes
    return Edge(round(batch * share) * Edge(m, tile[0]).tiles * Edge(n, tile[1]).tiles, target.sms).tiles


def _leaving(spec: ContractionSpec, target: Target, tile: Tile, sizes: Sizes) -> float:
    """Returns the cycles in which the results of a multiprocessor leave."""
    each = RESULT + RESULT_OPERAND * sum(any(op.strides) for op in spec.program.loads)
    return _blocks(target, tile, sizes) * prod(tile[:2]) * each


def _ring_cycles(
    target: Target, ring: Ring, sizes: Sizes, widths: tuple[int, int], share: float = 1.0, *, plain: bool = True
) -> float:
    """Returns the cycles that a product is estimated to take in copied tiles, of ``widths`` elements a copy.

    The rest of the batches than this ``share`` have no terms.
    """
    k, (rows, cols, inner, tr, tc) = sizes[3], ring.tile
    blocks = _blocks(target, ring.tile, sizes, share)
    copies = (COPY if plain else COPY_FROM_WINDOW) * (1 / (cols * widths[0]) + 1 / (rows * widths[1]))
    work = rows * cols * Edge(k, inner).padded * (1 + copies) / target.fma / ring.share
    if blocks * (rows // tr) * (cols // tc) < 32 * BUSY_WARPS:
        work /= IDLE
    return blocks * work + Edge(blocks, ring.blocks).tiles * RING_START


def along_reduction(spec: ContractionSpec, gather: Gather) -> bool:
    """Tells whether threads side by side fetch neighbours along the reduction (else along the rows or columns)."""
    over, along = abs(gather.outer[-1]), abs(gather.inner[-1])
    return (along == 1 and spec.k[-1] > 1) or (over != 1 and along < over)


def _copyable(spec: ContractionSpec) -> bool:
    """Tells whether asynchronous copies can bring the operands: floats as they lie in memory."""
    as_they_are = all(g.program is None and g.operand.dtype.ctype == "float" for g in (spec.a, spec.b))
    return as_they_are and spec.accumulate == "float" and not spec.others


@lru_cache(64)
def _merged(spec: ContractionSpec) -> ContractionSpec:
    """Returns the spec merged, for estimates: numbers in it may be those of an equal one, 0.0 for -0.0."""
    return merged(spec)


def _plain(spec: ContractionSpec) -> bool:
    """Tells whether a spec is a product of matrices."""
    spec = _merged(spec)
    return len(spec.k) == 1 and not (spec.a.limits or spec.b.limits or spec.terms or spec.results or spec.partials)


def _widths(spec: ContractionSpec, tile: Tile) -> tuple[int, int]:
    """Returns how many elements of each operand a copy brings."""
    spec = _merged(spec)
    sides = ((spec.a, spec.m, tile[0]), (spec.b, spec.n, tile[1]))
    a, b = (copied_width(spec, gather, outer, length, tile) for gather, outer, length in sides)
    return a, b


def copied_width(spec: ContractionSpec, gather: Gather, outer: tuple[int, ...], size: int, tile: Tile) -> int:
    """Returns how many neighbours of an operand a copy brings: those along the reduction go to different rows."""
    return 1 if along_reduction(spec, gather) else width(spec, gather, outer, size, tile)


def width(spec: ContractionSpec, gather: Gather, outer: tuple[int, ...], size: int, tile: Tile) -> int:
    """Returns how many neighbours of an operand threads fetch as one vector: 4 or 1.  The spec is merged.

    It is 4 where every four are all inside or all outside of the operand and lie on a boundary of 16 bytes, and the
    threads divide the tile evenly.
    """
    rows, cols, inner, thread_rows, thread_cols = tile
    threads = (rows // thread_rows) * (cols // thread_cols)
    along_k = along_reduction(spec, gather)
    steps, sizes, length = (gather.inner, spec.k, inner) if along_k else (gather.outer, outer, size)
    other = [*gather.batch, *gather.outer, *gather.inner, gather.start]
    other.remove(steps[-1])
    limits = [x.inner if along_k else x.outer for x in gather.limits]
    together = not any(x[-1] for x in limits) and not spec.terms and sizes[-1] % CHUNK == 0
    plain = gather.program is None and gather.operand.dtype.ctype == spec.accumulate == "float"
    shared = plain and not (spec.others and gather is spec.b)
    divided = size * inner % (CHUNK * threads) == 0 and threads % (length // CHUNK) == 0
    aligned = gather.operand.alignment % 16 == 0 and not any(x % CHUNK for x in other)
    return CHUNK if shared and divided and aligned and together and steps[-1] == 1 else 1


def _scattered(spec: ContractionSpec) -> bool:
    """Tells whether threads work out for each element that they fetch which term of the sum it belongs to."""
    spec = _merged(spec)
    return len(spec.k) > 1 and not any(along_reduction(spec, gather) for gather in (spec.a, spec.b))


def _itype(spec: ContractionSpec) -> str:
    """Returns int32 when every offset fits with room for padding, else int64 (gathers may start before the tensor)."""
    m, n = prod(spec.m), prod(spec.n)
    reach = [prod(spec.batch) * m * n, prod(spec.k)]
    reach += [*spec.a.reaches(spec.batch, spec.m, spec.k), *spec.b.reaches(spec.batch, spec.n, spec.k)]
    reach += [extent(spec.space, op.strides) for op in spec.program.operands]
    return signed_index_type(*reach)

"""Schedules of the SIMT form of the contraction family, by a model of how busy they keep the multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.iteration import extent, index_type
from codegen.spec import ContractionSpec

CHUNK = 4  # sums of a thread lie in chunks of 4 neighbouring rows and columns: one shared-memory access loads four


@dataclass(frozen=True)
class SimtSchedule:
    """Tile of a block (rows, cols, inner) and sums of a thread (thread_rows x thread_cols).

    Raises ValueError unless the threads divide both tiles evenly and the sums come in chunks of four.
    """

    rows: int
    cols: int
    inner: int
    thread_rows: int
    thread_cols: int
    itype: str

    def __post_init__(self) -> None:
        threads = self.threads
        if self.thread_rows % CHUNK or self.thread_cols % CHUNK or threads > 1024:
            raise ValueError(
                f"{self}: a thread has a multiple of {CHUNK} rows and columns, a block at most 1024 threads"
            )
        if any(threads % n or n * self.inner % threads for n in (self.rows, self.cols)) or threads % self.inner:
            raise ValueError(f"{self}: {threads} threads do not divide the tiles evenly")

    @property
    def threads(self) -> int:
        return (self.rows // self.thread_rows) * (self.cols // self.thread_cols)


#: (rows, cols, inner, thread_rows, thread_cols), largest first.
TILES = (
    (128, 128, 8, 8, 8),
    (128, 64, 8, 8, 4),
    (64, 128, 8, 4, 8),
    (64, 64, 16, 4, 4),
    (128, 32, 16, 4, 4),
    (32, 128, 16, 4, 4),
    (32, 32, 16, 4, 4),
)
WAVE = 132
#: Shared memory that a block may declare.
STATIC_BYTES = 48 << 10
#: Multiply-adds of a multiprocessor in a cycle.
LANES = 128


def schedules(spec: ContractionSpec) -> tuple[SimtSchedule, ...]:
    """The tiles by estimated time: padded work over the share of the multiprocessors that it keeps busy.

    Larger thread tiles read less shared memory for each product (their rate is higher), smaller ones waste less at the
    edges and fill the machine sooner.
    """
    sizes = prod(spec.batch), prod(spec.rows), prod(spec.cols), prod(spec.inner)
    wide = spec.accumulate in ("double", "uint64")
    products, row_chunk, col_chunk = spec.products, spec.row_chunk, spec.col_chunk
    # Sums of a thread that leave it registers for everything else; the smallest tiles always do.
    most = max(32 if wide else 64, CHUNK * CHUNK * products)
    size = 8 if wide else 4
    fitting = [t for t in TILES if t[3] * t[4] * products <= most and not (t[0] % row_chunk or t[1] % col_chunk)]
    fitting = [t for t in fitting if _shared(t, products) * size + part_bytes(spec, t[0], t[1]) <= STATIC_BYTES]
    ranked = sorted(fitting, key=lambda tile: _cycles(tile, *sizes, products))
    itype = _itype(spec)
    return tuple(SimtSchedule(*tile, itype) for tile in ranked)


def part_bytes(spec: ContractionSpec, rows: int, cols: int) -> int:
    """Shared memory in which the threads of a block combine what they have of the parts of a reduction."""
    sizes = {"float": 4, "int32": 4, "uint32": 4, "double": 8, "int64": 8, "uint64": 8}
    each = [sizes[x.reduction.ctype] for x in spec.partials]
    return max(each, default=0) * rows * cols // CHUNK


def _shared(tile: tuple[int, int, int, int, int], products: int) -> int:
    """Elements of both stages of the tiles in shared memory."""
    rows, cols, inner, _, _ = tile
    return 2 * inner * (rows + CHUNK + products * (cols + CHUNK))


def _cycles(tile: tuple[int, int, int, int, int], batch: int, m: int, n: int, k: int, products: int = 1) -> float:
    """Cycles that products of these sizes are estimated to take in tiles."""
    rows, cols, _, tr, tc = tile
    blocks = batch * -(-m // rows) * -(-n // cols)
    waves = -(-blocks // WAVE)
    rate = LANES * tr * tc * products / (tr * tc * products + 2.0 * (tr + tc * products))
    return waves * rows * cols * k / rate


def cycles(batch: int, m: int, n: int, k: int) -> float:
    """Cycles that ``batch`` products of m x k by k x n in float32 are estimated to take in their best tiles."""
    return min(_cycles(tile, batch, m, n, k) for tile in TILES)


def _itype(spec: ContractionSpec) -> str:
    """int32 when every offset fits with room for padding, else int64 (gathers may start before the tensor)."""
    m, n = prod(spec.rows), prod(spec.cols)
    reach = [prod(spec.batch) * m * n, prod(spec.inner)]
    for gather, outer in ((spec.a, spec.rows), (spec.b, spec.cols)):
        sizes = (*spec.batch, *outer, *spec.inner)
        for batch, over, inner, start in zip(*gather.steps(), (gather.start, *gather.starts)):
            reach.append(extent(sizes, (*batch, *over, *inner)) + abs(start))
    reach += [extent(spec.space, op.strides) for op in spec.program.operands]
    return "int32" if index_type(*(2 * r for r in reach)) == "uint32" else "int64"

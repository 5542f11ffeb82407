"""Schedules of contractions on mma.sync: tiles, how warps share them, and their cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from codegen.declined import Declined
from codegen.family import Schedule
from codegen.ranking import in_order
from codegen.spec import ContractionSpec
from codegen.target import Target
from codegen.ways import Ways, convert_registers, held_registers, ways


@dataclass(frozen=True)
class MmaSchedule(Schedule):
    """A tile of ``rows`` x ``cols`` a block, of which each of ``warps_m`` x ``warps_n`` warps has an equal part.

    inner   elements of the reduction a stage; stages: of the ring.
    split   blocks (a cluster) that share the reduction of a tile.
    band    rows of tiles that blocks at work at the same time go through together.
    widen   whether 8-bit floats become float16 on the way to shared memory: for tensor cores that do not take them, or
            add them up in fewer bits.

    Raises ValueError for parts of a warp that are no 16, 32 or 64 rows and columns, and for rows of a stage other than
    64 or 128 bytes, so that `ways` has tiles it can fill.
    """

    rows: int
    cols: int
    inner: int
    warps_m: int
    warps_n: int
    stages: int
    split: int = 1
    band: int = 8
    widen: bool = False

    def __post_init__(self) -> None:
        if self.warp_rows not in (16, 32, 64) or self.warp_cols not in (16, 32, 64):
            raise ValueError(f"{self}: a warp has 16, 32 or 64 rows and columns")
        if self.stages < 2 or self.warp_rows // 16 % self.split:
            raise ValueError(f"{self}: at least 2 stages, and a split that divides a warp's rows by 16")

    @property
    def warp_rows(self) -> int:
        return self.rows // self.warps_m

    @property
    def warp_cols(self) -> int:
        return self.cols // self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


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

#: Bytes that a multiprocessor gets from the L2 cache in a cycle and the cycles until they come; bytes of shared memory
#: and instructions of single threads in a cycle.
L2_RATE, LATENCY, SHARED_RATE, ISSUE = 48.0, 900.0, 128.0, 128.0
#: Cycles from one load to registers to the next of a warp that has its scheduler of the multiprocessor for itself.
BETWEEN_LOADS = 15.0
#: Cycles of a tile before and after its reduction, and bytes of its results in a cycle.
OVERHEAD, EPILOGUE_RATE = 1500.0, 20.0
#: How much longer a stage takes that is gathered from windows of an image, or has a factor that is computed.
WINDOWS, COMPUTED = 1.6, 2.2
#: Registers of a thread beyond sums, fragments and what it keeps for its pieces.
OTHER_REGISTERS = 44
MOST_REGISTERS = 250


def schedules(spec: ContractionSpec, target: Target) -> tuple[MmaSchedule, ...]:
    """Schedules worth trying, the one with the least estimated time first, then the best of every other tile.

    Raises Declined with a reason.
    """
    return in_order(_ranked(spec, target), lambda s: (s.rows, s.cols, s.warps_m, s.split))


def cycles(spec: ContractionSpec, target: Target) -> float:
    """Cycles that the best schedule is estimated to take.  Raises Declined with a reason."""
    # Schedules are ranked without the time between loads, of which those that come first have about as much.
    return _cost(
        spec, ways(spec, _widens(spec, target)), _ranked(spec, target)[0][1], target, between_loads=BETWEEN_LOADS
    )


@lru_cache(256)
def _ranked(spec: ContractionSpec, target: Target) -> list[tuple[float, MmaSchedule]]:
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch} has no asynchronous copies to shared memory")
    parts = ways(spec, _widens(spec, target))
    found = [(_cost(spec, parts, s, target), s) for s in _candidates(spec, parts, target)]
    if not found:
        raise Declined("no tile fits the shared memory of a block")
    return sorted(found, key=lambda entry: entry[0])


def _widens(spec: ContractionSpec, target: Target) -> bool:
    """Whether 8-bit floats are multiplied as float16, of whose sums tensor cores keep the bits that float32 has."""
    return not target.arch.has_fp8_mma or not spec.fast_fp8


def _candidates(spec: ContractionSpec, parts: Ways, target: Target) -> Iterator[MmaSchedule]:
    widen = _widens(spec, target) and parts.a.product == "float16"
    for rows, cols, warps_m, warps_n in TILES:
        if cols // warps_n % spec.col_chunk or rows // warps_m % spec.row_chunk:
            continue
        if not spec.partials and ((rows > 16 and rows >= 2 * parts.rows) or (cols > 16 and cols >= 2 * parts.cols)):
            continue
        tiles = parts.batch * -(-parts.rows // rows) * -(-parts.cols // cols)
        for row_bytes in (128, 64):
            inner = row_bytes // parts.a.itemsize
            depth = parts.stages(inner)
            for stages in STAGES:
                s = MmaSchedule(rows, cols, inner, warps_m, warps_n, stages, widen=widen)
                if (stages > 2 and stages > depth) or not _possible(parts, s, target):
                    continue
                yield s
                split = 2
                while target.arch.has_clusters and s.warp_rows // 16 % split == 0 and depth >= 4 * split:
                    if tiles * split <= target.sms and s.warp_rows // split % spec.row_chunk == 0:
                        yield replace(s, split=split)
                    split *= 2


def _possible(parts: Ways, s: MmaSchedule, target: Target) -> bool:
    """Whether the block's threads can fill the tiles, its registers hold the sums, its shared memory the stages."""
    sides = ((parts.a, s.rows), (parts.b, s.cols))
    if not all(way.fills(size, s.inner, s.threads) for way, size in sides):
        return False
    return (
        _registers(parts, s, target) <= MOST_REGISTERS and shared_bytes(parts, s) <= target.arch.shared_bytes_per_block
    )


def _registers(parts: Ways, s: MmaSchedule, target: Target) -> int:
    """Registers of a thread, roughly."""
    warp_cols = s.warp_cols * parts.products
    sums = s.warp_rows * warp_cols // 32
    fragments = 2 * (s.warp_rows + warp_cols) // 16 * 4
    if target.arch.has_wgmma and parts.a.itemsize == 1 and parts.a.gather.operand.dtype.is_float:
        # Hopper's mma.sync knows no 8-bit floats: the compiler makes float16 of them, some steps ahead.
        fragments = fragments * (7 if s.inner > 64 else 5) // 2
    kept = sum(
        held_registers(way, size, s.inner, s.threads, products) + convert_registers(way, target)
        for way, size, products in ((parts.a, s.rows, 1), (parts.b, s.cols, parts.products))
    )
    return sums + fragments + kept + OTHER_REGISTERS


def ring_bytes(parts: Ways, s: MmaSchedule) -> int:
    """Shared memory of the stages."""
    return s.stages * s.inner * (s.rows * parts.a.itemsize + s.cols * parts.products * parts.b.itemsize)


def shared_bytes(parts: Ways, s: MmaSchedule) -> int:
    """Shared memory of a block: the stages and later, in their place, the sums with a pad a row (or column)."""
    sums = 4 * parts.products * max(s.rows * (s.cols + 8), s.cols * (s.rows + 8))
    return max(ring_bytes(parts, s), sums)


def _loads(parts: Ways, s: MmaSchedule) -> int:
    """Loads to registers of a thread in a stage."""
    sides = ((parts.a, s.rows), (parts.b, s.cols * parts.products))
    return sum(way.count(n, s.inner, s.threads) * way.piece // way.vector for way, n in sides if not way.copied)


def _cost(spec: ContractionSpec, parts: Ways, s: MmaSchedule, target: Target, *, between_loads: float = 0.0) -> float:
    """Estimated cycles: rounds of blocks, bound by the tensor cores, shared memory, the L2 cache or latency."""
    itemsize = parts.a.itemsize
    warps = s.warps_m * s.warps_n
    blocks = parts.batch * -(-parts.rows // s.rows) * -(-parts.cols // s.cols) * s.split
    depth = -(-parts.stages(s.inner) // s.split)
    rate = target.mma * 2 / itemsize
    cols = s.cols * parts.products
    products = s.rows * cols * s.inner / rate
    filled = (s.rows + cols) * s.inner * itemsize
    read = warps * (s.warp_rows + s.warp_cols * parts.products) * s.inner * itemsize
    shared = (filled + read) / SHARED_RATE
    pieces = sum(size * s.inner / way.piece * way.effort for way, size in ((parts.a, s.rows), (parts.b, cols)))
    # Instructions of warps that multiply: one for 16 x 8 results and 32 bytes, and fragments for them.
    multiply = s.rows * cols * s.inner * itemsize / (16 * 8 * 32) * 1.6
    instructions = (pieces + 32 * multiply) / ISSUE
    work = [products, shared, filled / L2_RATE, instructions]
    busy = max(work) + 0.1 * (sum(work) - max(work))
    resident = max(
        1, target.arch.blocks_per_sm(s.threads, min(255, _registers(parts, s, target)), shared_bytes(parts, s))
    )
    together = min(resident, -(-blocks // target.sms))
    ahead = s.stages - 1 if parts.a.copied and parts.b.copied else 1
    busy *= {1: 2.0, 2: 1.5, 4: 1.2}.get(together * warps, 1.0)
    latency = LATENCY / ahead / together
    if together * warps <= 2:
        latency += between_loads * _loads(parts, s)
    stage = max(busy, latency)
    if spec.a.image is not None and len(spec.inner) - spec.inner.count(1) > 1:
        stage *= WINDOWS
    if any(way.gather.program is not None for way in (parts.a, parts.b)):
        stage *= COMPUTED
    size = max((store.operand.dtype.itemsize for store in spec.program.stores), default=0)
    results = s.rows * s.cols * size * len(spec.program.operands) / EPILOGUE_RATE / s.split
    exchange = 3000.0 if s.split > 1 else 0.0
    rounds = -(-blocks // target.sms)
    return LATENCY + rounds * (depth * stage + results + exchange + OVERHEAD / together)

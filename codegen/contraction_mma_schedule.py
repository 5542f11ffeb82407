"""Schedules of contractions on mma.sync: operand types, the ways of both factors to shared memory, tiles, their cost.

A tile of a factor lies in shared memory in pieces of 16 bytes, in rows that run along the reduction or, for elements
of 16 bits, across it (ldmatrix transposes those).  A thread brings whole pieces: by asynchronous copies of 16, 8 or 4
bytes where the elements lie next to each other as the tensor cores want them, else through registers, converted on the
way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from codegen.arch import Arch
from codegen.iteration import collapse, extent
from codegen.spec import ContractionSpec, Gather, Limit
from codegen.tiles import Unsupported

PIECE = 16  # bytes
PERIOD = 8  # rows after which the swizzle of a tile repeats
ACROSS_BYTES = 128  # most bytes of a row of a tile that lies across the reduction


@dataclass(frozen=True)
class MmaSchedule:
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


# ---- what is multiplied

_INTEGERS = {"int8": "int8", "uint8": "uint8", "bool": "uint8"}
_NARROW = frozenset(("float8_e4m3", "float8_e5m2"))
_REAL = frozenset(("float32", "float16", "bfloat16", *_NARROW, *_INTEGERS))
#: C type of an element in shared memory and its bytes, by the type that the tensor cores multiply.
ELEMENTS = {
    "tf32": ("float", 4),
    "bfloat16": ("bfloat16", 2),
    "float16": ("float16", 2),
    "float8_e4m3": ("float8_e4m3", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "int8": ("int8", 1),
    "uint8": ("uint8", 1),
}


def product_types(spec: ContractionSpec, widen: bool) -> tuple[str, str]:
    """The types in which the factors are multiplied: the narrowest that hold both exactly (but for tf32).

    bfloat16 and float16 together fit tf32: 8 bits of exponent and 11 of mantissa.  8-bit integers fit bfloat16, 8-bit
    floats both.  Raises Unsupported for what tensor cores do not multiply exactly.
    """
    a, b = (gather.operand.dtype.name for gather in (spec.a, spec.b))
    both = {a, b}
    if both <= set(_INTEGERS):
        if spec.accumulate != "uint32":
            raise Unsupported(f"tensor cores do not add up {a} products in {spec.accumulate}")
        return _INTEGERS[a], _INTEGERS[b]
    if not both <= _REAL:
        raise Unsupported(f"tensor cores do not multiply {a} with {b}")
    if spec.accumulate != "float":
        raise Unsupported(f"tensor cores do not add up in {spec.accumulate}")
    if "float32" in both:
        if not spec.tf32:
            raise Unsupported("float32 products are exact unless the graph asks for tf32")
        return "tf32", "tf32"
    if both == {"float16", "bfloat16"}:
        return "tf32", "tf32"
    if both <= _NARROW and not widen:
        return a, b
    return ("bfloat16", "bfloat16") if "bfloat16" in both else ("float16", "float16")


# ---- the ways of the factors to shared memory


@dataclass(frozen=True)
class Way:
    """How a factor comes to shared memory.

    gather    the factor over dimensions merged as far as its strides and limits allow.
    batch, outer, inner  sizes of these; ``inner`` in the order in which the reduction is walked.
    product   the type in which it is multiplied.
    along_k   whether rows of the tile run along the reduction (else along rows or columns of the result).
    vector    elements that one copy brings, next to each other in memory and in a piece.
    threads_along_k  whether neighbouring threads bring neighbouring pieces along the reduction; only if along_k.
    held      whether elements go through registers even where asynchronous copies could bring them.
    """

    gather: Gather
    batch: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    product: str
    along_k: bool
    vector: int
    threads_along_k: bool
    held: bool = False

    @property
    def element(self) -> str:
        """C type of an element in shared memory."""
        return ELEMENTS[self.product][0]

    @property
    def itemsize(self) -> int:
        """Bytes of an element in shared memory."""
        return ELEMENTS[self.product][1]

    @property
    def piece(self) -> int:
        """Elements of a piece."""
        return PIECE // self.itemsize

    @property
    def copied(self) -> bool:
        """Whether copies are asynchronous: the elements need no conversion and lie in words."""
        dtype = self.gather.operand.dtype
        return (
            not self.held
            and self.gather.program is None
            and dtype.ctype == self.element
            and self.vector * dtype.itemsize >= 4
        )

    @property
    def reach(self) -> int:
        """What no place of an element, or number that a limit bounds, exceeds."""
        g, sizes = self.gather, (*self.batch, *self.outer, *self.inner)
        found = [prod(self.outer), prod(self.inner)]
        for batch, outer, inner, start in zip(*g.steps(), (g.start, *g.starts)):
            found.append(extent(sizes, (*batch, *outer, *inner)) + abs(start))
        return max(
            [*found, *(abs(x.start) + sum(x.ends(self.batch, self.outer, self.inner), x.size) for x in g.limits)]
        )

    @property
    def granule(self) -> int:
        """Elements of a piece that share all coordinates of the reduction but the last, and keep the limits or not."""
        if not self.along_k:
            return 1
        if any(limit.inner[-1] for limit in self.gather.limits):
            return self.vector
        size = self.inner[-1]
        return min(self.piece, size & -size)  # the largest power of two that divides it, a multiple of the vector

    @property
    def effort(self) -> float:
        """Instructions that a piece takes, roughly."""
        loads = self.piece / self.vector
        places = self.piece / self.granule if self.along_k else 1.0
        walk = 2.0 + (4.0 * len(self.inner) if len(self.inner) > 1 else 0.0) + 2.0 * len(self.gather.limits)
        fast = self.gather.inner if self.along_k and self.threads_along_k else self.gather.outer
        scattered = 1.0 if abs(fast[-1]) <= 1 else 4.0
        loads *= len(self.gather.operands)
        work = 1 if self.gather.program is None else 2 + len(self.gather.program.instructions)
        return (
            loads * (2.0 if self.copied else 3.0) * scattered
            + places * walk
            + (0 if self.copied else self.piece * work)
        )

    def pieces_of_row(self, size: int, inner: int) -> int:
        """Pieces in a row of a tile of ``size`` rows or columns and ``inner`` elements of the reduction."""
        return (inner if self.along_k else size) // self.piece

    def count(self, size: int, inner: int, threads: int) -> int:
        """Pieces of a tile that a thread brings."""
        return max(1, size * inner // self.piece // threads)

    def step(self, size: int, inner: int, threads: int) -> int:
        """From one of a thread's pieces to the next: rows of the tile or, if not threads_along_k, pieces of its row."""
        if self.along_k and not self.threads_along_k:
            return threads // size
        return threads // self.pieces_of_row(size, inner)

    def fills(self, size: int, inner: int, threads: int) -> bool:
        """Whether so many threads can fill such a tile: a thread's pieces lie at distances that the swizzle keeps."""
        step = self.step(size, inner, threads)
        if step < 1:
            return False
        if self.along_k and not self.threads_along_k:
            return True
        return step % PERIOD == 0 or self.count(size, inner, threads) == 1


@dataclass(frozen=True)
class Ways:
    """The factors of a contraction with ``batch`` times ``rows`` x ``cols`` results of ``depth`` terms.

    products  second factors: there are so many results at each place.
    """

    batch: int
    rows: int
    cols: int
    depth: int
    a: Way
    b: Way
    products: int = 1

    def stages(self, inner: int) -> int:
        """Stages that the reduction takes."""
        return -(-self.depth // inner)


def ways(spec: ContractionSpec, widen: bool = False) -> Ways:
    """The cheapest ways of both factors.  Raises Unsupported, with the reason, if tensor cores cannot multiply them."""
    products = product_types(spec, widen)
    batch, rows, cols, depth = (prod(sizes) for sizes in (spec.batch, spec.rows, spec.cols, spec.inner))
    if not batch * rows * cols * depth:
        raise Unsupported("there is nothing to multiply")
    if batch * rows * cols >= 2**40 or max(rows, cols, depth) >= 2**31 - 2**16:
        raise Unsupported("more results than the tiles of a grid")
    best: Ways | None = None
    for order in orders(spec):
        a = way_of(spec, spec.a, spec.rows, order, products[0])
        b = way_of(spec, spec.b, spec.cols, order, products[1])
        if best is None or a.effort + b.effort < best.a.effort + best.b.effort:
            best = Ways(batch, rows, cols, depth, a, b, spec.products)
    assert best is not None
    return best


def orders(spec: ContractionSpec) -> list[tuple[int, ...]]:
    """Orders in which the reduction may be walked: as either factor lies in memory, or the first dimension fastest."""
    dims = range(len(spec.inner))
    orders = [tuple(sorted(dims, key=lambda d: (-abs(g.inner[d]), d))) for g in (spec.a, spec.b)]
    return list(dict.fromkeys([*orders, (*dims[1:], *dims[:1])]))


def way_of(spec: ContractionSpec, gather: Gather, outer: Sequence[int], order: Sequence[int], product: str) -> Way:
    """The cheapest way of one factor, the reduction being walked in an order."""
    # A limit on the terms of the sum holds for either factor: what is zero in one makes no product.
    terms = tuple(Limit(x.batch, (0,) * len(outer), x.inner, x.start, x.size) for x in spec.terms)
    limits = (*gather.limits, *terms)
    # Limits take part like operands: dimensions merge only if no limit tells them apart.
    every = replace(gather, limits=limits)
    over = every.steps()
    batch, over_batch = collapse(spec.batch, over[0], range(len(spec.batch)))
    outer, over_outer = collapse(outer, over[1], range(len(outer)))
    inner, over_inner = collapse(spec.inner, over[2], order)
    merged = every.stepped(over_batch, over_outer, over_inner)
    itemsize = ELEMENTS[product][1]
    along, across = (_vector(merged, batch, outer, inner, itemsize, along_k=k) for k in (True, False))
    # The nearer their elements lie, the fewer lines of the cache the threads of a warp touch.
    near, far = ((abs(g[-1]), -sizes[-1]) for g, sizes in ((merged.inner, inner), (merged.outer, outer)))
    near_k = prod(outer) == 1 or (prod(inner) > 1 and near <= far)
    found = [Way(merged, batch, outer, inner, product, True, along, along > 1 or near_k)]
    if itemsize == 2 and across > 1:
        found.append(Way(merged, batch, outer, inner, product, False, across, False))
    return min(found, key=lambda way: way.effort)


def _vector(
    gather: Gather,
    batch: Sequence[int],
    outer: Sequence[int],
    inner: Sequence[int],
    itemsize: int,
    *,
    along_k: bool,
) -> int:
    """Elements of a piece that always lie next to each other in memory, aligned to as many."""
    size, stride = (inner[-1], gather.inner[-1]) if along_k else (outer[-1], gather.outer[-1])
    bounded = any((x.inner if along_k else x.outer)[-1] for x in gather.limits)
    if stride != 1 or bounded:
        return 1
    steps = [*gather.batch, *gather.outer, *gather.inner, gather.start]
    steps.remove(1)  # the one along the vector
    if gather.program is not None:  # each tensor that is read may have another alignment
        vector = PIECE // itemsize
        return vector if size % vector == 0 else min(size & -size, vector)
    own = gather.operand.dtype.itemsize
    vector = PIECE // max(itemsize, own)
    while vector > 1 and (size % vector or gather.operand.alignment % (vector * own) or any(s % vector for s in steps)):
        vector //= 2
    return vector


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

#: Multiply-adds of 16-bit elements that a multiprocessor does in a cycle with mma.sync, by compute capability; those of
#: the consumer's chips are half as fast when they add up in float32.  Hopper's own rate is for wgmma.
RATE = {80: 1024, 86: 512, 87: 1024, 89: 512, 90: 1300, 100: 1024, 103: 1024, 110: 1024, 120: 512, 121: 512}
#: Bytes that a multiprocessor gets from the L2 cache in a cycle and the cycles until they come; bytes of shared memory
#: and instructions of single threads in a cycle.
L2_RATE, LATENCY, SHARED_RATE, ISSUE = 48.0, 900.0, 128.0, 128.0
#: Cycles of a tile before and after its reduction, and bytes of its results in a cycle.
OVERHEAD, EPILOGUE_RATE = 1500.0, 20.0
#: How much longer a stage takes that is gathered from windows of an image, or has a factor that is computed.
WINDOWS, COMPUTED = 1.6, 2.2
#: Registers of a thread beyond sums, fragments and what it keeps for its pieces.
OTHER_REGISTERS = 44
MOST_REGISTERS = 250


def schedules(spec: ContractionSpec, arch: Arch) -> tuple[MmaSchedule, ...]:
    """Schedules worth trying, the one with the least estimated time first, then the best of every other tile.

    Raises Unsupported with a reason.
    """
    ranked = [s for _, s in _ranked(spec, arch)]
    leaders: dict[tuple[int, ...], MmaSchedule] = {}
    for s in ranked:
        leaders.setdefault((s.rows, s.cols, s.warps_m, s.split), s)
    return tuple(dict.fromkeys([*leaders.values(), *ranked]))


def cycles(spec: ContractionSpec, arch: Arch) -> float:
    """Cycles that the best schedule is estimated to take.  Raises Unsupported with a reason."""
    return _ranked(spec, arch)[0][0]


@lru_cache(256)
def _ranked(spec: ContractionSpec, arch: Arch) -> list[tuple[float, MmaSchedule]]:
    if not arch.has_cp_async:
        raise Unsupported(f"{arch} has no asynchronous copies to shared memory")
    parts = ways(spec, _widens(spec, arch))
    found = [(_cost(spec, parts, s, arch), s) for s in _candidates(spec, parts, arch)]
    if not found:
        raise Unsupported("no tile fits the shared memory of a block")
    return sorted(found, key=lambda entry: entry[0])


def _widens(spec: ContractionSpec, arch: Arch) -> bool:
    """Whether 8-bit floats are multiplied as float16, of whose sums tensor cores keep the bits that float32 has."""
    return not arch.has_fp8_mma or not spec.fast_fp8


def _candidates(spec: ContractionSpec, parts: Ways, arch: Arch) -> Iterator[MmaSchedule]:
    widen = _widens(spec, arch) and parts.a.product == "float16"
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
                if (stages > 2 and stages > depth) or not _possible(parts, s, arch):
                    continue
                yield s
                split = 2
                while arch.has_clusters and s.warp_rows // 16 % split == 0 and depth >= 4 * split:
                    if tiles * split <= arch.sm_count_hint and s.warp_rows // split % spec.row_chunk == 0:
                        yield replace(s, split=split)
                    split *= 2


def _possible(parts: Ways, s: MmaSchedule, arch: Arch) -> bool:
    """Whether the block's threads can fill the tiles, its registers hold the sums, its shared memory the stages."""
    sides = ((parts.a, s.rows), (parts.b, s.cols))
    if not all(way.fills(size, s.inner, s.threads) for way, size in sides):
        return False
    return _registers(parts, s, arch) <= MOST_REGISTERS and shared_bytes(parts, s) <= arch.shared_bytes_per_block


def _registers(parts: Ways, s: MmaSchedule, arch: Arch) -> int:
    """Registers of a thread, roughly."""
    warp_cols = s.warp_cols * parts.products
    sums = s.warp_rows * warp_cols // 32
    fragments = 2 * (s.warp_rows + warp_cols) // 16 * 4
    if arch.has_wgmma and parts.a.itemsize == 1 and parts.a.gather.operand.dtype.is_float:
        # Hopper's mma.sync knows no 8-bit floats: the compiler makes float16 of them, some steps ahead.
        fragments = fragments * (7 if s.inner > 64 else 5) // 2
    kept = sum(
        held_registers(way, size, s.inner, s.threads, products) + _convert_registers(way, arch)
        for way, size, products in ((parts.a, s.rows, 1), (parts.b, s.cols, parts.products))
    )
    return sums + fragments + kept + OTHER_REGISTERS


def held_registers(way: Way, size: int, inner: int, threads: int, products: int = 1) -> int:
    """Registers in which a thread holds where its pieces of a tile come from, and what is on its way from there."""
    count = way.count(size, inner, threads)
    kept = (count if way.threads_along_k else 1) * (1 + len(way.gather.limits))
    places = way.piece // way.granule if way.along_k else 1
    if places > 1:
        kept += 4 + places * (1 + len(way.gather.limits))
    if way.gather.program is not None:
        kept += _sources_registers(way, count) + way.piece
    if not way.copied:  # on their way from global memory; single elements take a register each
        count *= products
        kept += count * max(4, way.piece if way.vector == 1 else 4)
        if places == way.piece:  # and more of them, the more places there are to work out
            kept += max(0, count * places - 32) // 2
    return kept


def _convert_registers(way: Way, arch: Arch) -> int:
    """Registers of converting 8-bit floats where no instruction does: it takes some steps of integers and floats."""
    dtype = way.gather.operand.dtype
    emulated = not way.copied and dtype.is_float and dtype.itemsize == 1 and not arch.has_fp8_convert
    return 36 if emulated else 0


def _sources_registers(way: Way, count: int) -> int:
    """Registers of what elements are computed of, beyond those of one tensor as large as the factor."""
    program, registers, first = way.gather.program, 0, True
    assert program is not None
    batch, outer, inner = way.gather.steps()
    for op, b, o, i in zip(program.loads, batch[1:], outer[1:], inner[1:]):
        words = max(1, way.piece * min(4, op.dtype.itemsize) // 4) if way.vector > 1 else way.piece
        along = (i if way.along_k else o)[-1]
        each = words if along else max(1, way.piece // way.vector)
        per_piece = any(i) and (any(o) or any(b) or not way.threads_along_k)
        if per_piece and any(o) and first:
            registers, first = registers + count * max(0, each - 4), False
        elif any((*b, *o, *i)):
            registers += each * (count if per_piece or (any(o) and way.threads_along_k) else 1)
    return registers


def ring_bytes(parts: Ways, s: MmaSchedule) -> int:
    """Shared memory of the stages."""
    return s.stages * s.inner * (s.rows * parts.a.itemsize + s.cols * parts.products * parts.b.itemsize)


def shared_bytes(parts: Ways, s: MmaSchedule) -> int:
    """Shared memory of a block: the stages and later, in their place, the sums with a pad a row (or column)."""
    sums = 4 * parts.products * max(s.rows * (s.cols + 8), s.cols * (s.rows + 8))
    return max(ring_bytes(parts, s), sums)


def _cost(spec: ContractionSpec, parts: Ways, s: MmaSchedule, arch: Arch) -> float:
    """Estimated cycles: rounds of blocks, bound by the tensor cores, shared memory, the L2 cache or latency."""
    itemsize = parts.a.itemsize
    warps = s.warps_m * s.warps_n
    blocks = parts.batch * -(-parts.rows // s.rows) * -(-parts.cols // s.cols) * s.split
    depth = -(-parts.stages(s.inner) // s.split)
    rate = RATE.get(arch.major * 10 + arch.minor, 1024) * 2 / itemsize
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
    resident = max(1, arch.blocks_per_sm(s.threads, min(255, _registers(parts, s, arch)), shared_bytes(parts, s)))
    together = min(resident, -(-blocks // arch.sm_count_hint))
    ahead = s.stages - 1 if parts.a.copied and parts.b.copied else 1
    busy *= {1: 2.0, 2: 1.5, 4: 1.2}.get(together * warps, 1.0)
    stage = max(busy, LATENCY / ahead / together)
    if spec.a.image is not None and len(spec.inner) - spec.inner.count(1) > 1:
        stage *= WINDOWS
    if any(way.gather.program is not None for way in (parts.a, parts.b)):
        stage *= COMPUTED
    size = max((store.operand.dtype.itemsize for store in spec.program.stores), default=0)
    results = s.rows * s.cols * size * len(spec.program.operands) / EPILOGUE_RATE / s.split
    exchange = 3000.0 if s.split > 1 else 0.0
    rounds = -(-blocks // arch.sm_count_hint)
    return LATENCY + rounds * (depth * stage + results + exchange + OVERHEAD / together)

"""Schedules of the Hopper form of the contraction family: those worth trying, by a cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import product
from math import prod

from codegen.bf16x6 import BF16X6, PRODUCTS, ROW
from codegen.buffers import Buffer
from codegen.computed_tiles import computed
from codegen.contraction.wgmma_layout import GROUP, RESERVE, Layout, ResultSpace, WgmmaSchedule
from codegen.contraction.wgmma_stages import (
    SHARED_RATE,
    computing,
    filling,
    loading,
    sparse_traffic,
    split_traffic,
)
from codegen.declined import Declined
from codegen.filled_tiles import filled
from codegen.operands import (
    OperandTiles,
    round_up,
)
from codegen.ranking import in_order, least
from codegen.records import changed
from codegen.scaled_tiles import ScaledOperand, scaled
from codegen.sparse_tiles import sparse_tiles
from codegen.spec import ContractionSpec
from codegen.target import Target
from codegen.tile_path import TilePath, held_registers, product_types
from codegen.tiles import gathered, operand_tiles


def operand_types(spec: ContractionSpec, fill: bool = False) -> tuple[str, str]:
    """Returns the types in which wgmma multiplies the operands; with ``fill``, once threads have converted them.

    Raises Declined for those it cannot multiply.
    """
    if fill:
        return product_types(spec, widen=False)
    a, b = (gather.operand.dtype.name for gather in (spec.a, spec.b))
    if a == b == "float32":
        if not spec.tf32:
            raise Declined("float32 products are exact unless the graph asks for tf32")
        return "tf32", "tf32"
    if a == b and a in ("bfloat16", "float16"):
        return a, b
    if {a, b} <= {"float8_e4m3", "float8_e5m2"} or {a, b} <= {"int8", "uint8"}:
        return a, b
    raise Declined(f"tensor cores do not multiply {a} with {b}")


def multiplied(spec: ContractionSpec, s: WgmmaSchedule, parts: OperandTiles | None = None) -> tuple[str, str]:
    """Returns the types in which the kernel of a schedule multiplies the operands."""
    if not s.scales:
        return operand_types(spec, s.converts)
    tiles = parts or s.operand_tiles(spec)
    assert isinstance(tiles.a, ScaledOperand)
    assert isinstance(tiles.b, ScaledOperand)
    return tiles.a.map.element, tiles.b.map.element


def adds_up_stages(spec: ContractionSpec, s: WgmmaSchedule) -> bool:
    """Tells whether threads add up the sums of the stages in float32.

    Those of fp8 products have 14 bits on sm_90, those of float32 products are truncated, and those of codes have
    factors of their own.
    """
    if s.scales:
        return True
    first = operand_types(spec, s.converts)[0]
    return first == BF16X6 or (first.startswith("float8") and not spec.fast_fp8)


def schedules(spec: ContractionSpec, target: Target) -> tuple[WgmmaSchedule, ...]:
    """Returns schedules worth trying, those with the least estimated time first.  Raises Declined with a reason.

    First come the best few, then the best one of every other way to fill tiles and to share them, if it is not
    hopeless, then the rest.
    """
    return in_order(
        _ranked(spec, target),
        lambda s: (s.gather, s.producer_warpgroups, s.computes, s.scales, s.pingpong, s.doubled, s.split_k > 1),
        first=BEST,
        hopeless=HOPELESS,
    )


def cycles(spec: ContractionSpec, target: Target) -> float:
    """Returns the cycles that the best schedule is estimated to take.  Raises Declined with a reason.

    The time of memory is left out, as in the estimates of the other forms.
    """
    schedule = best(spec, target)
    return _cost(_layout(spec, schedule), schedule, target, cold=False)


@lru_cache(256)
def best(spec: ContractionSpec, target: Target) -> WgmmaSchedule:
    """Returns the schedule with the least estimated time, the first one of `schedules`.  Raises Declined likewise."""
    return min(_tried(spec, target, _least), key=lambda entry: entry[0])[1]


def cost(spec: ContractionSpec, schedule: WgmmaSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take with operands in memory."""
    return _cost(_layout(spec, schedule), schedule, target)


def _layout(spec: ContractionSpec, s: WgmmaSchedule) -> Layout:
    over = _space(spec, s.form(spec))
    return Layout(over.spec, over.parts, s, over)


@lru_cache(64)
def _space(spec: ContractionSpec, form: Callable[[ContractionSpec], OperandTiles]) -> ResultSpace:
    """Returns the space of results for estimates: numbers in it may be those of an equal spec, 0.0 for -0.0."""
    return ResultSpace.of(spec, form(spec))


@lru_cache(256)
def _ranked(spec: ContractionSpec, target: Target) -> list[tuple[float, WgmmaSchedule]]:
    return sorted(_tried(spec, target, _candidates), key=lambda entry: entry[0])


def _tried(
    spec: ContractionSpec,
    target: Target,
    found: Callable[[ResultSpace, WgmmaSchedule, Target], Iterable[tuple[float, WgmmaSchedule]]],
) -> list[tuple[float, WgmmaSchedule]]:
    """Returns what is ``found`` of every way to bring tiles.  Raises Declined with a reason if that is nothing."""
    if not target.arch.has_wgmma:
        raise Declined(f"{target.arch} has no warpgroup matrix products")
    try:
        operand_types(spec)
    except Declined:
        operand_types(spec, fill=True)
    if spec.accumulate not in ("float", "uint32"):
        raise Declined(f"tensor cores do not add up in {spec.accumulate}")
    if not prod(spec.k) or not prod(spec.m) or not prod(spec.n) or not prod(spec.batch):
        raise Declined("there is nothing to multiply")
    ranked: list[tuple[float, WgmmaSchedule]] = []
    has_prologue = spec.bf16x6 or any(gather.program is not None for gather in (spec.a, spec.b))
    reason = Declined("no tile fits the shared memory of a block")
    dense = (scaled, operand_tiles, gathered, computed, filled)
    for form in dense if spec.metadata is None else (sparse_tiles,):
        if form is filled and any(s.computes or s.scales for _, s in ranked):
            continue  # always slower
        try:
            if form in (operand_tiles, gathered, sparse_tiles):
                operand_types(spec)
            over = _space(spec, form)
        except Declined as refusal:
            # Where threads must bring an operand, the reason why they cannot says more.
            reason = refusal if form in (operand_tiles, sparse_tiles) or (form is filled and has_prologue) else reason
            continue
        if form is filled and has_prologue:
            reason = Declined("threads cannot fill a tile that fits the shared memory and registers of a block")
        if spec.partials and prod(over.parts.batch) != prod(spec.batch):
            reason = Declined("parts are reduced of rows that do not lie at equal distances")
            continue
        for count in (1, 2) if form is filled else (int(form is scaled),):
            way = WgmmaSchedule(
                1,
                16,
                2,
                target.sms,
                gather=form is gathered,
                producer_warpgroups=count,
                computes=form is computed,
                scales=form is scaled,
            )  # its tile and stages are still to be chosen
            ranked += found(over, way, target)
    if not ranked:
        raise reason
    return ranked


def _candidates(over: ResultSpace, way: WgmmaSchedule, target: Target) -> Iterator[tuple[float, WgmmaSchedule]]:
    """Yields schedules that bring tiles in a way, and their estimated cycles."""
    for s in _tiles(over.spec, over.parts, way):
        if (found := _staged(over, s, target)) is not None:
            yield found


def _least(over: ResultSpace, way: WgmmaSchedule, target: Target) -> Iterator[tuple[float, WgmmaSchedule]]:
    """Yields the one of these that takes the least cycles, if there is any."""
    tiles = ((_at_least(over, s, target), s) for s in _tiles(over.spec, over.parts, way))
    if (found := least(tiles, lambda s: _staged(over, s, target))) is not None:
        yield found


def _staged(over: ResultSpace, s: WgmmaSchedule, target: Target) -> tuple[float, WgmmaSchedule] | None:
    """Returns a schedule with as many stages as there is room for, and its estimated cycles; None for too few."""
    layout = Layout(over.spec, over.parts, s, over)
    crosses = over.program.loads and any(op.strides[-1] != 1 for op in over.stores)
    if crosses and s.tile_n > (MOST_COLS_CROSSING[0] if s.pingpong else MOST_COLS_CROSSING[s.groups]):
        return None
    stages = _most_stages(layout, target)
    chosen = changed(s, stages=stages)
    return (_cost(layout, chosen, target), chosen) if stages >= 2 else None


def _tiles(spec: ContractionSpec, parts: OperandTiles, way: WgmmaSchedule) -> Iterator[WgmmaSchedule]:
    """Yields tiles whose sums fit the registers, shared in every way."""
    adds_up = adds_up_stages(spec, way)
    # With several operands that lie across the reduction, each has whole panels.
    unit = max(16 if parts.b.along_k or spec.products == 1 else 64, spec.col_chunk)
    fitting = [c for c in (256, 192, 160, 128, 96, 64, 32, 16) if not c % unit]
    for groups, cols in product((2, 3, 1), [c for c in fitting if c == unit or c < 2 * round_up(parts.cols, unit)]):
        s = changed(way, groups=groups, tile_n=cols)
        if spec.totals and groups > 1:
            continue  # a consumer adds up the totals of its rows, which are few
        held = _registers(spec, cols)
        both = held + cols * spec.products // 2 if adds_up else held  # including the sums of a stage
        most = _most_cols(s)
        room = min(MOST_BOTH[groups], s.registers[1] - BESIDE_BOTH) if adds_up else most // 2 + SPARE
        if cols * spec.products > most or both > room:
            continue
        in_turn = groups == 2 and not (way.converts or adds_up) and held <= MOST_COLS_IN_TURN // 2
        yield from _shared(spec, parts, s, in_turn)


def _shared(spec: ContractionSpec, parts: OperandTiles, s: WgmmaSchedule, in_turn: bool) -> Iterator[WgmmaSchedule]:
    """Yields a tile whose reduction the blocks of a cluster share, or one block has; with ``in_turn`` also one for each
    of two ping-pong consumers.
    """
    tiles, even = s.tiles(parts), not s.gather and not parts.reduction.skips  # every tile takes as many stages
    for split_k in range(1, 9 if even else 2):
        few = tiles * split_k <= 2 * s.blocks and parts.reduction.stages >= 4 * split_k
        if split_k > 1 and (not few or 32 < s.tile_n < 16 * split_k):
            continue
        found = s if split_k == 1 else changed(s, split_k=split_k)
        if found.part % spec.col_chunk or not _filled(spec, parts, found):
            continue
        yield found
        if split_k == 1 and in_turn and even and tiles > s.blocks:
            yield changed(found, pingpong=True)
        wide = _registers(spec, s.tile_n) > MOST_COLS_DOUBLED // 2
        if split_k == 1 and s.groups == 2 and spec.metadata is not None and not wide:
            yield changed(found, doubled=True)


#: How many schedules are tried in any case.  And how many times as long as the best one a schedule of another kind may
#: be estimated to take, if it is to be tried before others of the best one's kind.
BEST, HOPELESS = 4, 2.0
#: Registers that a thread can spare for its values of reduced parts of rows.
SPARE = 16
#: Most registers for the sums of a tile and of a stage and for parts of rows, by the number of consumers.
MOST_BOTH = {1: 192, 2: 192, 3: 128}
#: Registers that a consumer needs besides.
BESIDE_BOTH = 24
#: Most stages of a ring, unless they are so small that fewer bytes than these would be in flight.
MOST_STAGES, IN_FLIGHT = 8, 192 * 1024
#: Most columns of a ping-pong consumer: its thread has twice as many sums.
MOST_COLS_IN_TURN = 160
#: Most columns of so many consumers (of a ping-pong one, 0) whose results lie along rows, with what the program reads:
#: of more, the compiler spills some.
MOST_COLS_CROSSING = {0: 128, 1: 256, 2: 192, 3: 160}
#: The same of a consumer of 128 rows of a tile that two share: it has fewer values besides.
MOST_COLS_DOUBLED = 192


def _filled(spec: ContractionSpec, parts: OperandTiles, s: WgmmaSchedule) -> bool:
    """Tells whether the producer's threads can fill the tiles, and have registers for what is in flight."""
    inner, threads, needed = parts.reduction.panel, s.producer_warpgroups * GROUP, FILL_OTHER_REGISTERS
    for way, size, products in ((parts.a, s.tile_m, 1), (parts.b, s.tile_n, spec.products)):
        if isinstance(way, TilePath):
            if not way.fills(size, inner, threads):
                return False
            limits = len(way.gather.limits)
            kept = way.count(size, inner, threads) if limits else 0  # whether there are elements
            deep = FILL_DEEP_REGISTERS if way.gather.image and len(way.gather.image.sizes) > 2 else 0
            needed += held_registers(way, size, inner, threads, products) + kept + 2 * limits + deep
            needed += FILL_OPERAND_REGISTERS
    return not s.producer_warpgroups or needed <= s.registers[0]


def _most_cols(s: WgmmaSchedule) -> int:
    """Returns for how many columns the sums fit the registers that a thread of such a block starts with."""
    if s.groups == 3:
        return 128 if s.gather or s.converts else 192
    return 192 if s.groups == 2 and (s.gather or s.producer_warpgroups == 2) else 256


def _registers(spec: ContractionSpec, cols: int) -> int:
    """Returns how many registers a thread needs for its sums and for its values of reduced parts of its two rows."""
    return cols * spec.products // 2 + sum(2 * cols // x.chunk for x in spec.partials if not x.rows)


def _most_stages(layout: Layout, target: Target) -> int:
    """Returns how many stages the ring may have; 0 if the sums that blocks of a cluster exchange do not fit it."""
    s, parts = layout.s, layout.parts
    others = sum(x.bytes for x in (*layout.out, *layout.left_by_warps, *layout.totals))
    room = target.arch.shared_bytes_per_block - RESERVE - others
    useful = parts.reduction.stages * -(-s.tiles(parts) // s.blocks)  # the ring is filled for the next tile meanwhile
    each = layout.ring.stage_bytes
    most = max(MOST_STAGES, IN_FLIGHT // each)
    stages = min(most, max(room // layout.stage_bytes, 0), max(2, useful))
    # They take the place of the ring, and of nothing else: blocks read them while others leave their results.
    sums = Buffer("sums", "float", (s.tile_m, s.tile_n * layout.spec.products))
    return stages if s.split_k == 1 or sums.bytes <= stages * each else 0


#: Cycles until operands have come that TMA brings to where results were, once these have been read.
BROUGHT = 1300.0
#: The share of the tensor cores' peak rate that is reached.
SHARE = 0.9
#: Cycles of a consumer from its last product of a stage to the first of the next, besides those of adding up its sums.
ADD_STAGE = 100.0
#: The instructions of a sum that has a factor of its own, to one of a sum that is only added.
ADD_SCALED = 2.25
#: Cycles until the first bytes arrive from the L2 cache.
LATENCY = 1500.0
#: The share of memory's rate that all multiprocessors get; cycles until a stage arrives while others are asked for as
#: well; and the share of the shorter of the times of memory and of all else by which it lengthens the longer.
MEMORY_SHARE, ROUND_TRIP, OVERLAP = 0.73125, 2000.0, 0.2
#: Registers of a thread that fills tiles: in any case, for each operand besides what it holds of it, and for windows of
#: three dimensions.
FILL_OTHER_REGISTERS, FILL_OPERAND_REGISTERS, FILL_DEEP_REGISTERS = 16, 12, 28
#: Cycles of the epilogue: of each tile, of each of its chunks, and of 8 columns of a consumer for each operand.  Where
#: threads write results, chunks and columns take longer than where TMA copies them out; where warps carry rows that
#: begin anywhere, longer still; more so with operands that they fetch the same way.  Fits to 1,000 schedules.
EPILOGUE, EPILOGUE_CHUNK, EPILOGUE_OPERAND = 700.0, 200.0, 40.0
WRITTEN_CHUNK, WRITTEN_OPERAND = 400.0, 65.0
CARRIED, CARRIED_CHUNK, CARRIED_OPERAND, FETCHED_CHUNK, FETCHED_OPERAND = 1000.0, 800.0, 85.0, 2000.0, 180.0
#: Cycles that adding up takes in a cluster, and for each of its blocks; bytes of sums that it exchanges in a cycle.
EXCHANGE, EXCHANGE_BLOCK, EXCHANGE_RATE = 1500.0, 200.0, 20.0


def _multiplying(s: WgmmaSchedule, cols: int, row: int, target: Target) -> float:
    """Returns the cycles in which tensor cores multiply a stage of so many columns and bytes of a row."""
    # A wgmma takes as long as 16 more columns to read its rows, and longer if there are few columns to hide that.
    taken = cols + 16 + max(0, 128 - cols) / 4
    return s.tile_m * taken * row / (target.wgmma * 2) / SHARE


def _rounds(s: WgmmaSchedule, tiles: int, target: Target) -> tuple[int, int]:
    """Returns how many tiles are worked on at a time, and how often."""
    together = max(1, target.clusters_of(s.split_k) * s.blocks // target.sms)
    return together, -(-tiles // together)


def _at_least(over: ResultSpace, s: WgmmaSchedule, target: Target) -> float:
    """Returns cycles below which `_cost` is not, about: as if operands were there, and results left at once."""
    k, cols, tiles = over.parts.reduction, s.tile_n * over.spec.products, s.tiles(over.parts)
    together, rounds = _rounds(s, tiles, target)
    depth = k.share * -(-k.stages // s.split_k)
    products = _multiplying(s, cols, k.row, target) / (2 if k.sparse else 1)
    epilogue = EPILOGUE + EPILOGUE_CHUNK * s.pieces + EPILOGUE_OPERAND * s.pieces * s.part / 8
    if s.split_k > 1:
        epilogue += EXCHANGE + EXCHANGE_BLOCK * s.split_k + s.tile_m * cols * 4 / EXCHANGE_RATE
    work = rounds * depth * products + (epilogue if s.pingpong else rounds * epilogue)
    memory = over.fresh / _memory_rate(s, min(tiles, together), target)
    return LATENCY + max(work, memory) + OVERLAP * min(work, memory)


def _memory_rate(s: WgmmaSchedule, tiles: int, target: Target) -> float:
    """Returns the bytes in a cycle that the blocks of so many tiles take from memory."""
    return min(MEMORY_SHARE * target.bytes_per_cycle, target.sm_rate * tiles * s.split_k)


def _leaving(layout: Layout) -> tuple[float, float, float]:
    """Returns the cycles of the epilogue of a tile, of a chunk, and of 8 columns, by the way results leave."""
    if layout.maps is not None:
        return EPILOGUE, EPILOGUE_CHUNK, EPILOGUE_OPERAND
    if not layout.by_warps:
        return EPILOGUE, WRITTEN_CHUNK, WRITTEN_OPERAND
    fetched = any(map(layout.over.by_row, layout.program.loads))
    return CARRIED, *((FETCHED_CHUNK, FETCHED_OPERAND) if fetched else (CARRIED_CHUNK, CARRIED_OPERAND))


def _cost(layout: Layout, s: WgmmaSchedule, target: Target, *, cold: bool = True) -> float:
    """Returns the estimated cycles: rounds of tiles, each bound by the tensor cores or by what brings its operands, and
    the epilogue.

    With ``cold``, operands are in memory, and the whole is no faster than it.  The constants are fits to measurements.
    """
    spec, parts, k = layout.spec, layout.parts, layout.parts.reduction
    tiles, cols, depth = s.tiles(parts), s.tile_n * spec.products, k.share * -(-k.stages // s.split_k)
    factors = parts.b.factors if isinstance(parts.b, ScaledOperand) else None
    apart = factors is not None and factors.together(s.tile_n) == 1
    products = _multiplying(s, cols, k.row, target)
    if k.sparse:
        products = max(products / 2, sparse_traffic(layout) / SHARED_RATE)
        products = max(products, products / (1 if s.pingpong else s.groups) + ADD_STAGE)  # a consumer waits for a stage
    if k.row == ROW:
        products = max(PRODUCTS * products, split_traffic(layout) / SHARED_RATE)
    if adds_up_stages(spec, s):
        # A consumer waits, then adds.
        products = max(products, products / s.groups + cols / 2 * (ADD_SCALED if apart else 1.0) + ADD_STAGE)
    together, rounds = _rounds(s, tiles, target)
    refill = ROUND_TRIP / s.stages if cold and rounds * depth > s.stages else 0.0
    loads = max(loading(layout, target), filling(layout), computing(layout), refill)
    operands = max(1, len(spec.program.operands) - len(layout.operand_maps))
    tile, chunk, operand = _leaving(layout)
    epilogue = tile + chunk * layout.chunks + operand * s.pieces * s.part / 8 * operands
    if layout.operand_maps:
        epilogue += BROUGHT
    mainloop = depth * (max(products, loads) + 0.05 * loads)
    if s.split_k > 1:
        epilogue += EXCHANGE + EXCHANGE_BLOCK * s.split_k + s.tile_m * cols * 4 / EXCHANGE_RATE
    work = rounds * (mainloop + epilogue)
    if s.pingpong:  # one consumer's epilogue overlaps with the other's products
        work = max(rounds * mainloop + epilogue, -(-rounds // 2) * (mainloop + epilogue))
    rate = _memory_rate(s, min(tiles, together), target)
    memory = layout.over.fresh / rate + epilogue if cold else 0.0
    return LATENCY + max(work, memory) + OVERLAP * min(work, memory)

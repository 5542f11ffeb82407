"""Schedules of the Hopper form of the contraction family: those worth trying, by a cost model fitted on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from codegen.arch import Arch
from codegen.contraction_wgmma_layout import BAND, GROUP_ROWS, PIECES, Layout, WgmmaSchedule, round_up
from codegen.spec import ContractionSpec
from codegen.tiles import ROW_BYTES, Factors, Unsupported, factors, gathered


def operand_types(spec: ContractionSpec) -> tuple[str, str]:
    """How wgmma sees the factors' elements.  Raises Unsupported for those it cannot multiply."""
    a, b = (gather.operand.dtype.name for gather in (spec.a, spec.b))
    if a == b == "float32":
        if not spec.tf32:
            raise Unsupported("float32 products are exact unless the graph asks for tf32")
        return "tf32", "tf32"
    if a == b and a in ("bfloat16", "float16"):
        return a, b
    if {a, b} <= {"float8_e4m3", "float8_e5m2"} or {a, b} <= {"int8", "uint8"}:
        return a, b
    raise Unsupported(f"tensor cores do not multiply {a} with {b}")


def schedules(spec: ContractionSpec, arch: Arch) -> tuple[WgmmaSchedule, ...]:
    """Schedules worth trying, the one with the least estimated time first.  Raises Unsupported with a reason."""
    if not arch.has_wgmma:
        raise Unsupported(f"{arch} has no warpgroup matrix products")
    operand_types(spec)
    if spec.accumulate not in ("float", "uint32"):
        raise Unsupported(f"tensor cores do not add up in {spec.accumulate}")
    if not prod(spec.inner) or not prod(spec.rows) or not prod(spec.cols) or not prod(spec.batch):
        raise Unsupported("there is nothing to multiply")
    ranked: list[tuple[float, WgmmaSchedule]] = []
    reason = Unsupported("no tile fits the shared memory of a block")
    for gather in (False, True):
        try:
            parts = (gathered if gather else factors)(spec)
        except Unsupported as refusal:
            reason = reason if gather else refusal
            continue
        ranked += [(_cost(spec, parts, s), s) for s in _candidates(spec, parts, arch, gather)]
    if not ranked:
        raise reason
    return tuple(s for _, s in sorted(ranked, key=lambda entry: entry[0]))


def _candidates(spec: ContractionSpec, parts: Factors, arch: Arch, gather: bool) -> Iterator[WgmmaSchedule]:
    sms = arch.sm_count_hint
    unit = 16 if parts.b.along_k else 64
    for groups in (2, 3, 1):
        for cols in (256, 192, 160, 128, 96, 64, 32, 16):
            if cols * spec.products > _most_cols(groups, gather):
                continue
            if cols % unit or (cols > unit and cols >= 2 * round_up(parts.cols, unit)):
                continue
            tiles = prod(parts.batch) * -(-parts.rows // (groups * GROUP_ROWS)) * -(-parts.cols // cols)
            even = not gather and not parts.reduction.skips  # every tile takes as many stages as the others
            for split in range(1, 9):
                if split > 1 and (
                    not even or tiles * split > 2 * sms or parts.reduction.stages < 4 * split or cols < 16 * split
                ):
                    continue
                s = WgmmaSchedule(groups, cols, 2, split, BAND, sms, gather)
                for turns in (False, True) if even and groups == 2 and split == 1 else (False,):
                    taken = replace(s, turns=turns)
                    if turns and (tiles <= sms or cols * spec.products > MOST_COLS_IN_TURN):
                        continue
                    stages = _most_stages(spec, parts, taken, arch)
                    if stages >= 2:
                        yield replace(taken, stages=stages)


#: Columns of a consumer that takes turns: its thread has twice as many sums.
MOST_COLS_IN_TURN = 160


def _most_cols(groups: int, gather: bool) -> int:
    """Columns whose sums fit the registers that a thread of such a block starts with."""
    if gather:
        return {1: 256, 2: 192, 3: 128}[groups]
    return 192 if groups == 3 else 256


def _most_stages(spec: ContractionSpec, parts: Factors, s: WgmmaSchedule, arch: Arch) -> int:
    stage = ROW_BYTES * (s.rows + s.cols * spec.products)
    layout = Layout(spec, parts, s)
    room = arch.shared_bytes_per_block - layout.staging_bytes - 1024
    tiles = prod(parts.batch) * -(-parts.rows // s.rows) * -(-parts.cols // s.cols)
    useful = parts.reduction.stages * -(-tiles // s.blocks)  # the ring is filled for the next tile meanwhile
    stages = min(8, max(room // (stage + 16), 0), max(2, useful))
    return stages if max(stages * stage, layout.sums_bytes) <= room else 0


#: Multiply-adds a multiprocessor does in a cycle, by bytes of an element, and the share of them that remains.
RATE, SHARE = {1: 4096, 2: 2048, 4: 1024}, 0.9
#: Bytes a multiprocessor gets from the L2 cache in a cycle, and cycles until the first arrive.
L2_RATE, LATENCY = 70.0, 1500.0
#: Cycles of a warp's copy of 32 pieces, and of the copy engine's of a row of a panel.
GATHER, PANEL_ROW = 16.0, 2.0
#: Cycles of the epilogue for each 8 columns of a consumer, those that a cluster needs to add up, and the bytes of sums
#: that it exchanges in a cycle.
EPILOGUE, EXCHANGE, EXCHANGE_RATE = 60.0, 6000.0, 30.0
#: Clusters of a size that 132 multiprocessors hold at a time: those of a cluster are neighbours.
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


def _cost(spec: ContractionSpec, parts: Factors, s: WgmmaSchedule) -> float:
    """Estimated cycles: rounds of tiles, each bound by the tensor cores or by what brings its factors; the epilogue.

    The constants are fits to measurements on an H200.
    """
    itemsize = spec.a.operand.dtype.itemsize
    tiles = prod(parts.batch) * -(-parts.rows // s.rows) * -(-parts.cols // s.cols)
    depth = parts.reduction.share * -(-parts.reduction.stages // s.split)
    # A wgmma spends as long as 16 columns take to get at the rows, and more if there are few columns to hide that.
    cols = s.cols * spec.products
    products = s.rows * (cols + 16 + max(0, 128 - cols) / 4) * (ROW_BYTES // itemsize) / RATE[itemsize] / SHARE
    loads = ROW_BYTES * (s.rows + cols) / L2_RATE
    if s.gather:
        loads += s.rows * PIECES / 32 * GATHER
    else:  # the copy engine takes as long for a short row as for one of 128 bytes
        loads = max(loads, (s.rows + cols) * parts.reduction.per_stage * PANEL_ROW)
    epilogue = EPILOGUE * s.pieces * s.part / 8 * max(1, len(spec.program.operands)) + 800
    rounds = -(-tiles // max(1, CLUSTERS[s.split] * s.blocks // 132))
    if s.turns:  # one consumer's epilogue meanwhile the other's products
        mainloop = depth * (max(products, loads) + 0.05 * loads)
        return LATENCY + max(rounds * mainloop + epilogue, -(-rounds // 2) * (mainloop + epilogue))
    exchange = EXCHANGE + s.rows * cols * 4 / EXCHANGE_RATE if s.split > 1 else 0.0
    return LATENCY + rounds * (depth * (max(products, loads) + 0.05 * loads) + epilogue + exchange)

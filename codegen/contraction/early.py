"""Which products may begin while the kernel before ends, and wait for it.

Blocks that come in where others leave room are spread unevenly: as many as fit are on one multiprocessor, while others
have none.  That costs nothing where all of them wait for memory anyway, and much where a few multiprocessors bring what
all could.  With 32 blocks of 64 threads, which fit one multiprocessor, a product of 1024 x 160 x 32 takes 7
microseconds longer.
"""

from __future__ import annotations

from math import prod

from codegen.contraction import mma_schedule, simt_schedule
from codegen.contraction.mma_schedule import MmaSchedule
from codegen.contraction.simt_schedule import SimtSchedule
from codegen.dtypes import SIZE_OF
from codegen.sizes import most
from codegen.spec import ContractionSpec
from codegen.target import PORTABLE
from codegen.tile_path import tile_paths

#: Rows or columns of a product that waits for memory.
FEW = 64
#: Cycles that a kernel gains by beginning early, about.
GAINED = 1500.0


def waits(spec: ContractionSpec, _: object = None) -> bool:
    """Tells whether a product waits for memory: it has few rows or columns."""
    return min(most(prod(spec.m)), most(prod(spec.n))) <= FEW


def mma_waits(spec: ContractionSpec, s: MmaSchedule) -> bool:
    """Tells whether a product of this form waits for memory, even if its blocks are spread unevenly."""
    parts = tile_paths(spec, s.widen)
    each = (s.tile_m + s.tile_n * spec.products) * most(prod(spec.k)) * parts.a.itemsize // s.split_k
    blocks, shared = s.tiles(parts) * s.split_k, mma_schedule.staged_bytes(parts, s)
    return waits(spec) and _evenly(most(blocks), s.threads, shared, each)


def simt_waits(spec: ContractionSpec, s: SimtSchedule) -> bool:
    """Tells the same of a product by multiply-adds."""
    tiles = -(-most(prod(spec.m)) // s.tile_m) * -(-most(prod(spec.n)) // s.tile_n)
    each = (s.tile_m + s.tile_n * spec.products) * most(prod(spec.k)) * SIZE_OF[spec.accumulate]
    shared = simt_schedule.buffers(s.tile, spec.accumulate, spec.products, stages=s.stages).bytes
    return waits(spec) and _evenly(most(prod(spec.batch)) * tiles, s.threads, shared, each)


def _evenly(blocks: int, threads: int, shared: int, each: int) -> bool:
    """Tells whether so many blocks, which bring ``each`` bytes, take about as long however they are spread."""
    target = PORTABLE.planned
    together = max(1, target.arch.blocks_per_sm(threads, 32, shared))
    even = max(-(-blocks // target.sms) * each / target.sm_rate, blocks * each / target.bytes_per_cycle)
    return min(together, blocks) * each / target.sm_rate <= even + GAINED

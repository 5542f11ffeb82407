"""Schedules of the Hopper form of attention's gradients: what a block holds, and those worth trying."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from codegen.attention.backward_fragments import random_registers
from codegen.attention.backward_scores import INTERVALS, own_ranges
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.fragments import check_types, padded
from codegen.attention.wgmma_schedule import PANEL, ROWS, SHARED_IN_L2, box, panels
from codegen.buffers import SWIZZLED, VECTORS, Buffer, Buffers
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.pipeline import GROUP, barriers
from codegen.target import Target

#: Registers of a thread of the producer and of a consumer, by the number of consumers.
REGISTERS = {1: (40, 240), 2: (24, 240), 3: (32, 160)}
#: The same for two consumers that hold at most so many registers.
FEWER, MOST_WITH_FEWER = (40, 232), 200
#: Registers of a consumer's thread that scores, gradients, operands and sums may take.
HELD = {1: 228, 2: 228, 3: 136}


@dataclass(frozen=True)
class AttentionBackwardWgmmaSchedule(Schedule):
    """A tile of groups * 64 rows a block.

    groups  consumer warpgroups of a block, 1 to 3.
    cols    columns of a tile of the ring, a multiple of 16 up to 256.
    stages  of the ring of tiles, two or more: a tile is released while the next one is worked on.
    heads   batches whose rows are worked on together.
    apart   whether the operands A of the two sums have registers of their own; else the second waits for the first.
    blocks  of the grid, if there is work for as many.
    ahead   tiles of rows in shared memory: with two, the next one is brought while this one is worked on.
    """

    groups: int
    cols: int
    stages: int
    heads: int = 1
    apart: bool = False
    blocks: int = 1 << 24
    ahead: int = 1

    @property
    def threads(self) -> int:
        return (1 + self.groups) * GROUP

    @property
    def height(self) -> int:
        return self.groups * ROWS


def tiles(spec: AttentionBackwardSpec, s: AttentionBackwardWgmmaSchedule) -> list[Buffer]:
    """Returns two tiles of rows and two rings of tiles of columns: of the scores and of the products with the loss."""
    a, queries, keys = spec.attention, ("queries", "losses"), ("keys", "values")
    rows = s.ahead, s.height, "panels of 128 bytes, swizzled", queries if spec.queries else keys
    cols = s.stages, s.cols, "", keys if spec.queries else queries
    return [
        Buffer(name, a.q.dtype.ctype, (panels(elements), height, PANEL), stages, align=SWIZZLED, note=note)
        for stages, height, note, names in (rows, cols)
        for name, elements in zip(names, (a.depth, a.width))
    ]


def buffers(spec: AttentionBackwardSpec, s: AttentionBackwardWgmmaSchedule, *more: Buffer) -> Buffers:
    """Returns what a block has in shared memory; ``more`` is what it has beside the tiles."""
    found = [*tiles(spec, s), *more]
    if not spec.queries:
        shape = (2, 1 + spec.with_loss, s.cols)
        what = f"{'lse and row_dot' if spec.with_loss else 'lse'} of a tile's queries, and of the next one's"
        found.append(Buffer("numbers", "float", shape if spec.fused else (s.groups, *shape), align=VECTORS, note=what))
    if own_ranges(spec):
        found.append(Buffer("met", "int", (len(INTERVALS),), s.ahead, note=f"{', '.join(INTERVALS)} of the rows"))
    return Buffers((*found, *barriers("held", s.ahead), *barriers("", s.stages)))


def registers_held(spec: AttentionBackwardSpec, cols: int, *, apart: bool) -> int:
    """Returns how many registers of a consumer's thread scores, gradients, operands and sums take."""
    a = spec.attention
    first, second = spec.first is not None, spec.second is not None
    sums = padded(a.depth) // 2 * first + padded(a.width) // 2 * second
    factors = cols // 4 * (1 + (first and second and apart))
    return sums + cols // 2 * (2 + spec.sloped) + factors + random_registers(a, cols)


def registers(spec: AttentionBackwardSpec, s: AttentionBackwardWgmmaSchedule) -> tuple[int, int]:
    """Returns how many registers a thread of the producer and one of a consumer have."""
    few = registers_held(spec, s.cols, apart=s.apart) <= MOST_WITH_FEWER
    return FEWER if s.groups == 2 and few else REGISTERS[s.groups]


def check(spec: AttentionBackwardSpec, target: Target) -> None:
    """Raises Declined with the reason if a spec cannot have this form."""
    a = spec.attention
    if not target.arch.has_wgmma:
        raise Declined(f"{target.arch.name} has no warpgroup matrix products")
    check_types(a)
    if spec.loss.dtype.name != a.q.dtype.name:
        raise Declined(f"tensor cores multiply {spec.loss.name} in {a.q.dtype.name}")
    if a.depth > 256 or a.width > 256:
        raise Declined(f"the sums of {max(a.depth, a.width)} elements do not fit the registers of a warpgroup")
    if a.empty:
        raise Declined("there is nothing to multiply")
    totals, elements = (a.rows, a.keys, a.keys, a.rows), (a.depth, a.depth, a.width, a.width)
    for n, (op, total, each) in enumerate(zip(spec.arguments, totals, elements)):
        box(a, op, n, total, each, 64)


def schedules(spec: AttentionBackwardSpec, target: Target) -> tuple[AttentionBackwardWgmmaSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    if spec.fused:
        return ()
    check(spec, target)
    a = spec.attention
    tall = max(a.depth, a.width)
    widths = [128, 96, 112, 80, 64, 48, 32] if spec.queries else [64, 80, 96, 48, 32]
    if spec.queries and tall > 64:
        widths.remove(128)
    heads = spec.together(target.l2_share(SHARED_IN_L2))
    found = []
    for groups, width in product((1, 2) if spec.rows <= ROWS else (2,), widths):
        cols = min(width, max(16, padded(spec.cols)))
        # The threads that bring tiles look at ranges, too, which takes more registers.
        most = min(HELD[groups], MOST_WITH_FEWER) if own_ranges(spec) else HELD[groups]
        if registers_held(spec, cols, apart=False) > most:
            continue
        for stages in (3, 2) if tall <= 64 else (2,):
            s = AttentionBackwardWgmmaSchedule(groups, cols, stages, heads)
            if buffers(spec, s).bytes <= target.arch.shared_bytes_per_block:
                found.append(s)
                break
    if not found:
        raise Declined("no tile fits the shared memory and registers of a block")
    return tuple(dict.fromkeys(found))

"""Schedules of the Hopper form of attention: what a block holds, and those worth trying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from codegen.attention.fragments import check_types, padded
from codegen.attention.ranges import Ranges
from codegen.attention.scores import merged
from codegen.attention.spec import AttentionSpec, Pages
from codegen.buffers import SWIZZLED, Buffer, Buffers
from codegen.declined import Declined
from codegen.expr import Operand
from codegen.family import Schedule
from codegen.pipeline import GROUP, barriers
from codegen.sizes import below
from codegen.spec import TensorMap
from codegen.target import Target
from codegen.tensor_map import MOST_RANK, refusal

ROWS = 64  # of a warpgroup's products
PANEL = 64  # 16-bit elements of 128 bytes
#: Registers of a thread of the producer and of a consumer, by the number of consumers.
REGISTERS = {1: (40, 240), 2: (24, 240), 3: (32, 160), 4: (24, 112)}
#: The same where the producer looks at the tiles.
LISTING_REGISTERS = {1: (80, 240), 2: (56, 224), 3: (56, 152), 4: (56, 104)}
#: The same where a second warp looks at queries to come.
SPANNED_REGISTERS = {1: (56, 240), 2: (40, 232), 3: (56, 152), 4: (56, 104)}
#: Registers of a consumer's thread that scores, probabilities and results may take.
HELD = {1: 200, 2: 208, 3: 128, 4: 80}
#: At most so many queries are few tiles.
FEW_ROWS = 1024
#: More blocks than there is ever work for.
MOST_BLOCKS = 1 << 24
#: Most tiles of queries for which it matters how they are dealt to blocks.
MOST_TILES = 1 << 14
#: How many ways of dealing them are looked at.
CHOICES = 12
#: A time makes a difference if it is smaller than this part of another.
NOTICEABLE = 0.995
#: How many batches are worked on together where data say which keys are met: by whether later queries meet more keys.
#: If so, tiles take different times, and long ones of many batches are to begin early; else the L2 cache is to hold the
#: keys.
TOGETHER = {True: 32, False: 8}
#: Columns of scores that take as long as the other work of a tile of keys, and as the beginning of a tile of queries
#: that waits for the end of the one before.
OF_KEYS, OF_QUERIES = 18, 80
#: Of short sequences without masks: the time of a tile of queries in units of the work of 128 rows on one column of
#: scores; of one whose keys are not whole tiles, whose products are not joined; of one whose scores are one tile, so
#: that nothing goes on beside their exponentials.  By the number of consumers, how much longer a column takes.
OF_SHORT, OF_RAGGED, OF_ONE = 200, 85, 28
SLOWER = {1: 0.8, 2: 1.0, 3: 1.36}
#: Sequences of at most so many keys are short.
SHORT = 768
#: Share of the L2 cache that may hold the keys and values which blocks running at the same time share.
SHARED_IN_L2 = 2 / 5


@dataclass(frozen=True)
class AttentionWgmmaSchedule(Schedule):
    """A tile of groups * 64 queries a block.

    groups  consumer warpgroups of a block, 1 to 3.
    keys    of a tile, a multiple of 16 up to 256.
    stages  of the rings of keys and values.
    pingpong   whether consumers ping-pong: they start their products one after the other.
    heads   batches whose queries are worked on together.
    blocks  of the grid at most.
    ahead   tiles of queries in shared memory: with two, the next one is brought while this one is worked on, and (see
            `joined`) multiplied with its first keys while this one ends.
    chains  of maxima and of sums that do not wait for each other.
    alternate  whether blocks take every other round of tiles in reverse: after a long tile a block has a short one.
    """

    groups: int
    keys: int
    stages: int
    pingpong: bool = False
    heads: int = 1
    blocks: int = MOST_BLOCKS
    ahead: int = 1
    chains: int = 2
    alternate: bool = False

    def registers(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns registers of a thread of the producer and of a consumer."""
        every = LISTING_REGISTERS if listed(spec) else SPANNED_REGISTERS if spanned(spec) else REGISTERS
        return every[self.groups]

    def joined(self, spec: AttentionSpec) -> bool:
        """Tells whether the first product of a tile of queries begins while the tile before ends.

        Not where the tile before may have no tile of keys.  Nor where the same tile of keys is incomplete for all
        queries: there the compiler, which knows this, finds no registers for products that go on around the loop.
        """
        return (
            self.ahead > 1
            and not (listed(spec) or spec.pages)
            and spec.parts == 1
            and bool(spec.ranges or (spec.bounds and not below(spec.keys, self.keys + 1)) or spec.keys % self.keys == 0)
        )

    @property
    def threads(self) -> int:
        return (1 + self.groups) * GROUP

    @property
    def rows(self) -> int:
        return self.groups * ROWS


def listed(spec: AttentionSpec) -> bool:
    """Tells whether the producer finds the tiles of keys that are met one by one: they are no interval."""
    return len(Ranges.intervals(spec)) < len(spec.ranges) or (bool(spec.ranges) and spec.computed[0] is not None)


def spanned(spec: AttentionSpec) -> bool:
    """Tells whether the tiles met are an interval that depends on data, which a warp finds ahead of the producer."""
    return bool(spec.ranges) and not listed(spec)


def panels(elements: int, size: int = 2) -> int:
    """Returns how many rows of 128 bytes hold ``elements`` elements of ``size`` bytes."""
    return -(-elements * size // (2 * PANEL))


def narrow(spec: AttentionSpec) -> bool:
    """Tells whether 8-bit floats are multiplied: values lie along the keys, tiles are added up in float32."""
    return spec.q.dtype.itemsize == 1


def buffers(spec: AttentionSpec, s: AttentionWgmmaSchedule) -> Buffers:
    """Returns what a block has in shared memory."""
    t, size = spec.q.dtype.ctype, spec.q.dtype.itemsize
    deep, wide, panel = panels(spec.depth, size), panels(spec.width), 2 * PANEL // size
    of_values = (1, padded(spec.width), s.keys) if narrow(spec) else (wide, s.keys, PANEL)
    found = [
        Buffer("queries", t, (max(deep, wide), s.rows, panel), s.ahead, 0, SWIZZLED, "panels of 128 bytes, swizzled"),
        Buffer("keys", t, (deep, s.keys, panel), s.stages, 0, SWIZZLED),
        Buffer("values", t, of_values, s.stages, 0, SWIZZLED, "along the keys" if narrow(spec) else ""),
        *(() if spec.computed[0] is not None else barriers("queries", s.ahead)),
        *barriers("keys", s.stages),
        *barriers("values", s.stages),
    ]
    if spanned(spec):
        note = "of queries to come, and the end; who reads one says so"
        found += [*barriers("spans", s.ahead), Buffer("spans", "attention::Span", (), s.ahead, note=note)]
    if listed(spec):
        note = "of keys: twice the number, and whether no range is broken; -1 is the end"
        found.append(Buffer("tiles", "int", (), s.stages, note=note))
    return Buffers(found)


def registers_held(spec: AttentionSpec, keys: int) -> int:
    """Returns how many registers of a consumer's thread scores, probabilities and results take."""
    if narrow(spec):
        return keys // 2 + keys // 8 + padded(spec.width)
    return keys // 2 + keys // 4 + padded(spec.width) // 2


def coordinates(spec: AttentionSpec, op: Operand, first: str) -> str:
    """Returns the coordinates of a box behind that along the elements: ``first``, its row, and those of its batch."""
    batch = [f"b{d}" for d, (size, step) in enumerate(zip(spec.batch, op.strides)) if size > 1 and step]
    return ", ".join([first, *batch])


def box(
    spec: AttentionSpec, op: Operand, argument: int, rows: int, elements: int, height: int, pages: Pages | None = None
) -> TensorMap:
    """Returns a map whose box has 128 bytes of each of ``height`` rows.  Raises Declined if TMA cannot bring them."""
    size = op.dtype.itemsize
    *batch, row, element = op.strides
    if elements > 1 and element != 1:
        raise Declined(f"the elements of {op.name} are not neighbours in memory")
    if op.alignment % 16:
        raise Declined(f"the address of {op.name} is not known to be a multiple of 16 bytes")
    outer = [(n, step) for n, step in zip(spec.batch, batch) if n > 1 and step]
    outer += [(pages.blocks, pages.step)] if pages is not None else []
    sizes = (elements, rows, *(n for n, _ in outer))
    if len(sizes) > MOST_RANK:
        raise Declined(f"{op.name} has more than {MOST_RANK} dimensions in memory")
    strides = (row * size if rows > 1 else max(16, -(-elements * size // 16) * 16), *(step * size for _, step in outer))
    boxed = (2 * PANEL // size, height, *(1 for _ in outer))
    made = TensorMap(argument, op.dtype.ctype, sizes, strides, boxed, (1,) * len(sizes), 128)
    reason = refusal(made)
    if reason is None and not all(strides):
        reason = "its rows lie in one place"
    if reason is not None:
        raise Declined(f"{op.name} cannot be brought by TMA: {reason}")
    return made


def check(spec: AttentionSpec, target: Target) -> AttentionSpec:
    """Returns the spec with merged batches.  Raises Declined with the reason if it cannot have this form."""
    if not target.arch.has_wgmma:
        raise Declined(f"{target.arch.name} has no warpgroup matrix products")
    check_types(spec, small=True)
    for op, computed in zip((spec.k, spec.v), spec.computed[1:]):
        if computed is not None:
            raise Declined(f"{op.name} is computed, and not brought by TMA")
    if narrow(spec) and not spec.q.dtype == spec.k.dtype == spec.v.dtype:
        raise Declined("queries, keys and values are 8-bit floats of different kinds")
    if spec.depth > 256 or spec.width > 256:
        raise Declined(f"the sums of {max(spec.depth, spec.width)} elements do not fit the registers of a warpgroup")
    if spec.empty:
        raise Declined("there is nothing to multiply")
    spec = merged(spec)
    if narrow(spec) and spec.pages is not None:
        raise Declined("8-bit floats in pages do not lie along the keys")
    for pages in spec.pages or ():
        if pages.size % 8:
            raise Declined(f"pages of {pages.size} keys are not made of groups of 8, as swizzled tiles are")
    maps(spec, ROWS, 8)
    return spec


def maps(spec: AttentionSpec, rows: int, keys: int) -> dict[int, TensorMap]:
    """Returns the maps of queries (operand 0, unless they are computed), keys (1) and values (2), for tiles of so many.

    A box of keys or values is a tile, or what of it lies in one page.
    """
    made = {0: box(spec, spec.q, 0, spec.rows, spec.depth, rows)} if spec.computed[0] is None else {}
    first = len(made)
    if narrow(spec):
        return made | {1: _narrow_keys(spec, first), 2: _narrow_values(spec, first + 1)}
    for n, (op, elements) in enumerate(((spec.k, spec.depth), (spec.v, spec.width))):
        pages = None if spec.pages is None else spec.pages[n]
        total, height = (spec.keys, keys) if pages is None else (pages.size, min(keys, pages.size))
        made[n + 1] = box(spec, op, first + n, total, elements, height, pages)
    return made


def _narrow_keys(spec: AttentionSpec, argument: int) -> TensorMap:
    """Returns the map of 8-bit keys: a box has the first two of each four keys, or the last two; else all of a tile."""
    plain = box(spec, spec.k, argument, spec.keys, spec.depth, 2 * PANEL)
    if spec.keys % 4 or len(plain.sizes) == MOST_RANK:
        return plain
    (elements, keys, *sizes), (step, *strides) = plain.sizes, plain.strides
    return replace(
        plain,
        sizes=(elements, 4, keys // 4, *sizes),
        strides=(step, 4 * step, *strides),
        box=(plain.box[0], 2, PANEL // 2, *plain.box[2:]),
        steps=(1, *plain.steps),
    )


def _narrow_values(spec: AttentionSpec, argument: int) -> TensorMap:
    """Returns the map of 8-bit values: a box has 128 keys of all elements."""
    *batch, key, element = spec.v.strides
    if key != 1 and spec.keys > 1:
        raise Declined(f"{spec.v.name} is multiplied along the keys, which are not neighbours in memory")
    turned = replace(spec.v, strides=(*batch, element, 1))
    return box(spec, turned, argument, spec.width, spec.keys, padded(spec.width))


def tile_keys(spec: AttentionSpec, most: int) -> int:
    """Returns how many keys a tile has: at most ``most``, and whole pages or a part of one; 0 if no number suits."""
    if narrow(spec):
        return 2 * PANEL
    found = min(most, max(16, -(-spec.keys // 16) * 16))
    if spec.pages is None:
        return found
    sizes = [p.size for p in spec.pages]
    return max((n for n in range(16, most + 1, 16) if all(n % s == 0 or s % n == 0 for s in sizes)), default=0)


def _tiles(spec: AttentionSpec, target: Target) -> list[tuple[int, int]]:
    """Returns consumers and keys of the tiles worth trying, best guess first."""
    sides = {b.key for b in spec.bounds if b.key}
    reads, programmed = any(op.strides[-1] for op in spec.program.loads), bool(spec.inside.instructions)
    tall = max(spec.depth, spec.width)
    if narrow(spec):
        preferred = [(2, 2 * PANEL)]
    elif tall <= 64:
        preferred = [(2, 128), (2, 160), (2, 192), (2, 64)]
        # Two tiles, the last not whole: the loop is unrolled, and there are no registers for three consumers.
        if not (sides or 128 < spec.keys < 256 or reads or programmed):
            preferred = [(3, 128), *preferred]
    elif tall <= 128:
        preferred = [(2, 176), (2, 160), (2, 128), (2, 96)]
        if reads:
            preferred = [(2, 128), (2, 96), (2, 112)] if spec.ranges else [(2, 96), (2, 80), (2, 112)]
        elif spanned(spec) and (len(sides) > 1 or programmed):
            preferred = [(2, 128), (2, 96), *([] if spec.within.instructions else [(2, 160)])]
        elif len(sides) > 1 or programmed:
            preferred = [(2, 128), (2, 176), (2, 96)]
        elif sides:
            preferred = sorted(preferred, key=lambda tile: _columns(spec, target, *tile))
        elif not (spec.ranges or spec.pages):
            preferred = sorted(preferred, key=lambda tile: _time(spec, tile[0], tile[1], target))
    elif tall <= 192:
        preferred = [(2, 96), (2, 128), (2, 64)] if not reads else [(2, 64), (2, 80), (2, 96)]
    elif reads or programmed:
        preferred = [(2, 48), (2, 64)] if reads else [(2, 64), (2, 48)]
    else:
        preferred = [(2, 80), (2, 64), (2, 48)]
    if tall <= 128 and not (narrow(spec) or sides or spec.ranges or reads or programmed or spec.pages):
        preferred = _short(spec, target) + preferred
    if spec.weight is not None and not narrow(spec):
        # What the weight computes, such as random numbers, needs registers of its own.
        most = 128 if tall <= 128 else 64 if tall <= 192 else 48
        preferred = [(2, min(keys, most)) for _, keys in preferred]
    if spec.rows <= 64:
        preferred = [(1, min(keys, 128)) for _, keys in preferred] + preferred
    elif spec.rows <= 128:
        preferred = [(2, keys) for groups, keys in preferred if groups <= 2] + preferred
    found = ((groups, tile_keys(spec, keys)) for groups, keys in preferred)
    return list(dict.fromkeys(tile for tile in found if tile[1]))


def compare(spec: AttentionSpec, schedule: AttentionWgmmaSchedule, target: Target) -> float:
    """Returns how long a schedule takes, in units of its own: `_time` of its tiles."""
    return _time(spec, schedule.groups, schedule.keys, target)


def _time(spec: AttentionSpec, groups: int, keys: int, target: Target) -> float:
    """Returns the time of tiles of a sequence without masks, in columns of scores: a fit to measurements."""
    rounds = -(-prod(spec.batch) * -(-spec.rows // (groups * ROWS)) // target.sms)
    columns = -(-spec.keys // keys) * (keys * (spec.depth + spec.width) / (2 * PANEL) + OF_KEYS)
    rest = OF_SHORT + OF_RAGGED * (spec.keys % keys > 0) + OF_ONE * (keys >= spec.keys)
    return rounds * (columns * SLOWER[groups] + rest)


def _short(spec: AttentionSpec, target: Target) -> list[tuple[int, int]]:
    """Returns the tiles of a short sequence without masks, the fastest first: it matters how much of them is beyond it.

    Sequences that are not short have none.
    """
    if spec.keys > SHORT or spec.rows <= ROWS:
        return []

    counts = range(1, -(-spec.keys // 64) + 1)
    sizes = {-(-spec.keys // (16 * n)) * 16 for n in counts} | {96, 128}
    every = [(groups, keys) for groups in (2, 3) for keys in sorted(sizes) if 64 <= keys <= 256]

    def fits(tile: tuple[int, int]) -> bool:
        groups, keys = tile
        if groups == 3 and keys < spec.keys < 2 * keys:
            return False  # the loop is unrolled, and there are no registers for three consumers
        s = AttentionWgmmaSchedule(groups, keys, stages=1 if keys >= spec.keys else 2, ahead=2)
        room = target.arch.shared_bytes_per_block
        return registers_held(spec, keys) <= HELD[groups] and buffers(spec, s).bytes <= room

    return sorted(filter(fits, every), key=lambda tile: _time(spec, tile[0], tile[1], target))[:3]


def schedules(spec: AttentionSpec, target: Target) -> tuple[AttentionWgmmaSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    spec = check(spec, target)
    sides, tall = any(b.key for b in spec.bounds), max(spec.depth, spec.width)
    # Where tiles of queries take very different times, blocks of one tile each spread them better.
    blocks = MOST_BLOCKS if listed(spec) or (sides and tall > 192) else target.sms
    shared = target.l2_share(SHARED_IN_L2)
    found = []
    for groups, keys in _tiles(spec, target):
        # Few queries: the bytes in flight count.  Short rows: so does what follows a tile of queries.
        deeper = ((3, 1),) if groups == 1 else ((3, 2),) if tall <= 64 else ()
        heads, alternate = _dealt(spec, blocks, groups * ROWS, keys, shared)
        chains = 4 if tall <= 64 and groups == 2 else 2
        # Products of 8-bit floats take half as long, but exponentials do not: a consumer would wait for the other.
        pingpong = groups > 1
        if narrow(spec) and 64 < tall <= 128:
            chains, pingpong = 1, False
        # One tile of keys: the next queries' are better brought while these are multiplied than not at all.
        single = ((1, 2),) if keys >= spec.keys and groups > 1 else ()
        for stages, ahead in (*deeper, (2, 2), *single, (2, 1), (3, 1), (1, 1)):
            s = AttentionWgmmaSchedule(
                groups, keys, stages, pingpong, heads, blocks, ahead, chains, alternate=alternate
            )
            fits = buffers(spec, s).bytes <= target.arch.shared_bytes_per_block
            if fits and registers_held(spec, keys) <= HELD[groups]:
                found.append(s)
                break
    if not found:
        raise Declined("no tile fits the shared memory and registers of a block")
    return tuple(found)


def _columns(spec: AttentionSpec, target: Target, groups: int, keys: int) -> int:
    """Returns the time of a batch's queries, in columns of scores of all tiles met: wide ones overlap a diagonal."""
    s = AttentionWgmmaSchedule(groups, keys, stages=2, pingpong=True, blocks=1, ahead=2)
    begun_early = buffers(spec, s).bytes <= target.arch.shared_bytes_per_block and s.joined(spec)
    step = s.rows * -(-spec.rows // (s.rows * MOST_TILES))
    each = (tiles_met(spec, first, s.rows, keys) - 1 for first in range(0, spec.rows, step))
    return sum(met * (keys + OF_KEYS) + (0 if begun_early else OF_QUERIES) for met in each)


def _dealt(spec: AttentionSpec, blocks: int, rows: int, keys: int, shared: int) -> tuple[int, bool]:
    """Returns how many batches' tiles of queries follow each other, and whether every other round of them is reversed.

    As many batches follow each other as have keys and values that together fit ``shared`` bytes of the L2 cache, or
    fewer where that gives all blocks as much to do.
    """
    batches = prod(spec.batch)
    if spanned(spec):
        return TOGETHER[spec.growing], False
    if not any(b.key for b in spec.bounds) and spec.rows <= FEW_ROWS:
        return 1, False  # tiles of one batch follow each other: none of them takes long
    shares = prod(n for n, step in zip(spec.batch, spec.k.strides) if step == 0)  # queries of the same keys
    each = spec.keys * (spec.depth + spec.width) * 2
    most = max(1, shared // max(each, 1)) * shares
    costs = [tiles_met(spec, first, rows, keys) for first in range(0, spec.rows, rows)]
    costs = costs[::-1] if spec.growing else costs
    if min(costs) == max(costs) or not blocks < len(costs) * batches <= MOST_TILES:
        return most, False
    most = min(batches, most)
    least = max(1, most // 3)
    step = 1 + (most - least) // CHOICES
    found = range(most, least - 1, -step)
    spans = {(h, x): longest(costs, batches, h, blocks, alternate=x) for h in found for x in (False, True)}
    best = min(spans, key=lambda way: (spans[way], way[1]))  # among equals, the order that only goes forward is faster
    return best if spans[best] < NOTICEABLE * spans[most, False] else (most, False)


def tiles_met(spec: AttentionSpec, m0: int, rows: int, keys: int) -> int:
    """Returns how many tiles of keys queries from m0 on meet, as far as masks say without data, and one to begin."""
    low, high = 0, spec.keys - 1
    for b in spec.bounds:
        most = b.start + max(b.row * m0, b.row * min(m0 + rows - 1, spec.rows - 1))
        if b.key < 0 and not b.loads:
            high = min(high, most)
        elif b.key > 0 and not b.loads:
            low = max(low, -most)
    return 1 + max(0, high // keys + 1 - low // keys)


def longest(costs: Sequence[int], batches: int, heads: int, blocks: int, *, alternate: bool) -> int:
    """Returns the largest sum of costs of any block's tiles; ``costs`` are those of one batch, in their order."""
    order: list[int] = []
    for first in range(0, batches, heads):
        together = min(heads, batches - first)
        for cost in costs:
            order += [cost] * together
    if alternate:
        order += [0] * (-len(order) % blocks)
        for start in range(blocks, len(order), 2 * blocks):
            order[start : start + blocks] = order[start : start + blocks][::-1]
    return max(sum(order[block::blocks]) for block in range(blocks))

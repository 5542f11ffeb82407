"""Schedules of the Hopper form of attention: what a block holds, and those worth trying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from codegen.attention.fragments import check_types
from codegen.attention.ranges import Ranges
from codegen.attention.scores import merged
from codegen.attention.spec import AttentionSpec, Pages
from codegen.declined import Declined
from codegen.expr import Operand
from codegen.family import Schedule
from codegen.spec import TensorMap
from codegen.target import Target
from codegen.tensor_map import MOST_RANK, refusal

GROUP, ROWS = 128, 64  # threads of a warpgroup, rows of its products
PANEL = 64  # 16-bit elements of 128 bytes
#: Registers of a thread of the producer and of a consumer, by the number of consumers.
REGISTERS = {1: (40, 240), 2: (24, 240), 3: (32, 160), 4: (24, 112)}
#: The same where the producer looks at the tiles.
LISTING_REGISTERS = {1: (80, 240), 2: (56, 224), 3: (56, 152), 4: (56, 104)}
#: The same where a warp beside it looks at queries to come.
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
    blocks  of the grid, if there is work for as many.
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

    def registers(self, *, listing: bool, spanned: bool = False) -> tuple[int, int]:
        """Returns registers of a thread of the producer and of a consumer."""
        if spanned:
            return SPANNED_REGISTERS[self.groups]
        return (LISTING_REGISTERS if listing else REGISTERS)[self.groups]

    def joined(self, spec: AttentionSpec) -> bool:
        """Tells whether the first product of a tile of queries begins while the tile before ends.

        Not where the tile before may have no tile of keys.  Nor where every tile of queries has just one tile of keys,
        the same and incomplete: there the compiler finds no registers for products that go on around the loop.
        """
        return (
            self.ahead > 1
            and not (listed(spec) or spec.pages)
            and spec.parts == 1
            and bool(spec.ranges or (spec.bounds and spec.keys > self.keys) or spec.keys % self.keys == 0)
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


def dynamic(spec: AttentionSpec) -> bool:
    """Tells whether blocks take tiles of queries as they come to them: a block with short tiles takes more."""
    return spec.order is not None and spanned(spec)


def panels(elements: int, size: int = 2) -> int:
    """Returns how many rows of 128 bytes hold ``elements`` elements of ``size`` bytes."""
    return -(-elements * size // (2 * PANEL))


def narrow(spec: AttentionSpec) -> bool:
    """Tells whether 8-bit floats are multiplied.

    Their values lie along the keys, and the sums of 128 products each are added up in float32.
    """
    return spec.q.dtype.itemsize == 1


def columns(width: int) -> int:
    """Returns how many columns the product with the values has."""
    return -(-width // 16) * 16


def shared_bytes(spec: AttentionSpec, s: AttentionWgmmaSchedule) -> int:
    row, deep = 2 * PANEL, panels(spec.depth, spec.q.dtype.itemsize)
    queries = s.rows * row * max(deep, panels(spec.width))
    values = columns(spec.width) if narrow(spec) else s.keys * panels(spec.width)
    ring = s.stages * row * (s.keys * deep + values)
    spans = 32 * s.ahead if spanned(spec) else 0
    return s.ahead * queries + ring + 16 * (2 * s.stages + s.ahead) + 4 * s.stages + spans + 128


def registers_held(spec: AttentionSpec, keys: int) -> int:
    """Returns how many registers of a consumer's thread scores, probabilities and results take."""
    if narrow(spec):
        return keys // 2 + keys // 8 + columns(spec.width)
    return keys // 2 + keys // 4 + columns(spec.width) // 2


def coordinates(spec: AttentionSpec, op: Operand, first: str) -> str:
    """Returns the coordinates of a box of a map of `box`'s, except that along the elements.

    They are ``first``, its row, and those of its batch.
    """
    batch = [f"b{d}" for d, (size, step) in enumerate(zip(spec.batch, op.strides)) if size > 1 and step]
    return ", ".join([first, *batch])


def box(
    spec: AttentionSpec, op: Operand, argument: int, rows: int, elements: int, height: int, pages: Pages | None = None
) -> TensorMap:
    """Returns the map of queries, keys, values or results, whose box has 128 bytes of each of ``height`` rows.

    Raises Declined if TMA cannot bring them.
    """
    size = op.dtype.itemsize
    *batch, row, element = op.strides
    if elements > 1 and element != 1:
        raise Declined(f"the elements of {op.name} are not neighbours in memory")
    if op.alignment % 16:
        raise Declined(f"the address of {op.name} is not known to be a multiple of 16 bytes")
    sizes, strides = [elements, rows], [row * size if rows > 1 else max(16, -(-elements * size // 16) * 16)]
    for n, step in zip(spec.batch, batch):
        if n > 1 and step:
            sizes.append(n)
            strides.append(step * size)
    if pages is not None:
        sizes.append(pages.blocks)
        strides.append(pages.step * size)
    if len(sizes) > MOST_RANK:
        raise Declined(f"{op.name} has more than {MOST_RANK} dimensions in memory")
    boxed = (2 * PANEL // size, height, *(1 for _ in sizes[2:]))
    made = TensorMap(argument, op.dtype.ctype, tuple(sizes), tuple(strides), boxed, (1,) * len(sizes), 128)
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
    if not all((prod(spec.batch), spec.rows, spec.keys, spec.depth, spec.width)):
        raise Declined("there is nothing to multiply")
    spec = merged(spec)
    if spec.computed[0] is None:
        box(spec, spec.q, 0, spec.rows, spec.depth, 64)
    if narrow(spec):
        if spec.pages is not None:
            raise Declined("8-bit floats in pages do not lie along the keys")
        box(spec, spec.k, 1, spec.keys, spec.depth, 64)
        values_box(spec)
        return spec
    for n, (op, elements) in enumerate(((spec.k, spec.depth), (spec.v, spec.width))):
        pages = None if spec.pages is None else spec.pages[n]
        if pages is not None and pages.size % 8:
            raise Declined(f"pages of {pages.size} keys are not made of groups of 8, as swizzled tiles are")
        box(spec, op, n + 1, spec.keys if pages is None else pages.size, elements, 8, pages)
    return spec


def values_box(spec: AttentionSpec) -> TensorMap:
    """Returns the map of 8-bit values: a box has 128 keys of all elements."""
    *batch, key, element = spec.v.strides
    if key != 1 and spec.keys > 1:
        raise Declined(f"{spec.v.name} is multiplied along the keys, which are not neighbours in memory")
    turned = replace(spec.v, strides=(*batch, element, 1))
    return box(spec, turned, 2, spec.width, spec.keys, columns(spec.width))


def quads_box(spec: AttentionSpec) -> TensorMap | None:
    """Returns the map of 8-bit keys whose box has the first two of each four keys, or the last two; None if there is
    none.
    """
    plain = box(spec, spec.k, 1, spec.keys, spec.depth, 2 * PANEL)
    if spec.keys % 4 or len(plain.sizes) == MOST_RANK:
        return None
    (elements, keys, *sizes), (step, *strides) = plain.sizes, plain.strides
    boxed = (plain.box[0], 2, PANEL // 2, *plain.box[2:])
    return replace(
        plain,
        sizes=(elements, 4, keys // 4, *sizes),
        strides=(step, 4 * step, *strides),
        box=boxed,
        steps=(1,) * len(boxed),
    )


def tile_keys(spec: AttentionSpec, most: int) -> int:
    """Returns how many keys a tile has: at most ``most``, and whole pages or a part of one; 0 if no number suits."""
    if narrow(spec):
        return 2 * PANEL
    found = min(most, max(16, -(-spec.keys // 16) * 16))
    if spec.pages is None:
        return found
    sizes = [p.size for p in spec.pages]
    return max((n for n in range(16, most + 1, 16) if all(n % s == 0 or s % n == 0 for s in sizes)), default=0)


def schedules(spec: AttentionSpec, target: Target) -> tuple[AttentionWgmmaSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    spec = check(spec, target)
    sides = {b.key for b in spec.bounds if b.key}
    reads = any(op.strides[-1] for op in spec.program.loads)
    tall = max(spec.depth, spec.width)
    if tall <= 64:
        preferred = [(2, 128), (2, 160), (2, 192), (2, 64)]
        # Two tiles, the last not whole: the loop is unrolled, and there are no registers for three consumers.
        if not sides and not 128 < spec.keys < 256:
            preferred = [(3, 128), *preferred]
    elif tall <= 128:
        preferred = [(2, 176), (2, 160), (2, 128), (2, 96)]
        if sides:
            preferred = sorted(preferred, key=lambda tile: _columns(spec, target, *tile))
        if len(sides) > 1 or spec.inside.instructions:
            preferred = [(2, 128), (2, 176), (2, 96)]
            if spanned(spec):
                preferred = [(2, 128), (2, 96), *([] if spec.within.instructions else [(2, 160)])]
        if reads:
            preferred = [(2, 128), (2, 96), (2, 112)] if spec.ranges else [(2, 96), (2, 80), (2, 112)]
    elif tall <= 192:
        preferred = [(2, 96), (2, 128), (2, 64)] if not reads else [(2, 64), (2, 80), (2, 96)]
    else:
        preferred = [(2, 80), (2, 64), (2, 48)]
        if reads or spec.inside.instructions:
            preferred = [(2, 48), (2, 64)] if reads else [(2, 64), (2, 48)]
    if reads or spec.inside.instructions:
        preferred = [(groups, keys) for groups, keys in preferred if groups < 3]
    if spec.weight is not None:  # what the weight computes, such as random numbers, needs registers of its own
        most = 128 if tall <= 128 else 64 if tall <= 192 else 48
        preferred = list(dict.fromkeys((2, min(keys, most)) for _, keys in preferred))
    if narrow(spec):
        preferred = [(2, 2 * PANEL)]
    if spec.rows <= 64:
        preferred = [(1, min(keys, 128)) for _, keys in preferred] + preferred
    elif spec.rows <= 128:
        preferred = [(2, keys) for groups, keys in preferred if groups <= 2] + preferred
    # Where tiles of queries take very different times, blocks of one tile each spread them better.
    blocks = MOST_BLOCKS if listed(spec) or (sides and tall > 192) else target.sms
    shared = target.l2_share(SHARED_IN_L2)
    found = []
    for groups, keys in dict.fromkeys(preferred):
        keys = tile_keys(spec, keys)
        if not keys:
            continue
        # Few queries: the bytes in flight count.  Short rows: so does what follows a tile of queries.
        deeper = ((3, 1),) if groups == 1 else ((3, 2),) if tall <= 64 else ()
        heads, alternate = _dealt(spec, blocks, groups * ROWS, keys, shared)
        chains = 4 if tall <= 64 and groups == 2 else 2
        # Products of 8-bit floats take half as long, but exponentials do not: a consumer would wait for the other.
        pingpong = groups > 1
        if narrow(spec) and 64 < tall <= 128:
            chains, pingpong = 1, False
        grid = blocks
        if groups > 1 and not sides and not spec.ranges:
            # All tiles take the same time.  No more blocks than the number of rounds asks for: the last round is as
            # long as the others.
            work = prod(spec.batch) * -(-spec.rows // (groups * ROWS))
            grid = -(-work // -(-work // blocks))
        for stages, ahead in (*deeper, (2, 2), (2, 1), (3, 1), (1, 1)):
            s = AttentionWgmmaSchedule(groups, keys, stages, pingpong, heads, grid, ahead, chains, alternate=alternate)
            if (
                registers_held(spec, keys) <= HELD[groups]
                and shared_bytes(spec, s) <= target.arch.shared_bytes_per_block
            ):
                found.append(s)
                break
    if not found:
        raise Declined("no tile fits the shared memory and registers of a block")
    return tuple(dict.fromkeys(found))


def _columns(spec: AttentionSpec, target: Target, groups: int, keys: int) -> int:
    """Returns the time of a batch's queries, in columns of scores.

    These are the columns of all tiles of keys that are met: wide tiles reach farther beyond a diagonal, narrow ones are
    more numerous.
    """
    s = AttentionWgmmaSchedule(groups, keys, stages=2, pingpong=True, blocks=1, ahead=2)
    begun_early = shared_bytes(spec, s) <= target.arch.shared_bytes_per_block and s.joined(spec)
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
        return min(batches, TOGETHER[spec.growing]), False
    if not any(b.key for b in spec.bounds) and spec.rows <= FEW_ROWS:
        return 1, False  # tiles of one batch follow each other: none of them takes long
    shares = prod(n for n, step in zip(spec.batch, spec.k.strides) if step == 0)  # queries of the same keys
    each = spec.keys * (spec.depth + spec.width) * 2
    most = min(batches, max(1, shared // max(each, 1)) * shares)
    costs = [tiles_met(spec, first, rows, keys) for first in range(0, spec.rows, rows)]
    costs = costs[::-1] if spec.growing else costs
    if min(costs) == max(costs) or not blocks < len(costs) * batches <= MOST_TILES:
        return most, False
    least = max(1, most // 3)
    step = 1 + (most - least) // CHOICES
    found = range(most, least - 1, -step)
    spans = {(h, x): longest(costs, batches, h, blocks, alternate=x) for h in found for x in (False, True)}
    best = min(spans, key=lambda way: (spans[way], way[1]))  # among equals, the order that only goes forward is faster
    return best if spans[best] < NOTICEABLE * spans[most, False] else (most, False)


def tiles_met(spec: AttentionSpec, m0: int, rows: int, keys: int) -> int:
    """Returns one more than the number of tiles of keys that the queries from m0 on meet, as far as masks say without
    data.

    The one is for beginning.
    """
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

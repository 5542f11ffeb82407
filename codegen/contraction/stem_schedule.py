"""Schedules of convolutions of few channels, whose terms are words of a part of the image, and their cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import hypot, prod
from operator import mul
from typing import NamedTuple

from codegen.bf16x6 import BF16X6, PARTS, PRODUCTS, TERMS
from codegen.buffers import VECTORS, Buffer
from codegen.contraction.halo_schedule import (
    BANKS,
    ISSUE,
    MORE,
    MOST,
    MOST_OWN,
    MOST_WARPS,
    STEP,
    HaloSchedule,
    HaloTile,
    first_positions,
    likely_tiles,
    ranked,
)
from codegen.contraction.halo_windows import FRAGMENT_COLS, FRAGMENT_ROWS, LEAST, Phase, Windows, convolution
from codegen.declined import Declined
from codegen.filled_tiles import as_it_lies
from codegen.operands import round_up
from codegen.ranking import in_order
from codegen.records import once
from codegen.spec import ContractionSpec
from codegen.target import Target
from codegen.tile_path import ELEMENTS

#: Bytes of a word, and words of a step of the reduction.
WORD, WORDS = 4, 8
#: Steps whose terms tensor cores add up where elements have parts.
TOGETHER = TERMS * 2 // STEP
#: Most channels, terms of a sum and filters.
MOST_CHANNELS, MOST_TERMS, MOST_FILTERS = 4, 512, 128
#: Most registers for what waits for its place in shared memory.
MOST_WAITING = 36


@dataclass(frozen=True)
class StemSchedule(HaloSchedule):
    """As `HaloSchedule`, of one group; with two ``stages`` the next part of the image waits in registers."""


class Word(NamedTuple):
    """Four neighbouring bytes of the image that are terms of the reduction.

    row    rows of the part of the image from a window's first one to the word's.
    place  bytes from the window's begin to the word's, within a row.
    terms  the coordinates (channel, *taps) of each element; None for one that is none of the window.
    clean  whether elements that are none of the window are zeros.
    """

    row: int
    place: int
    terms: tuple[tuple[int, ...] | None, ...]
    clean: bool

    @property
    def mask(self) -> int:
        """The bits that are terms, or zeros."""
        size = WORD // len(self.terms)
        kept = (e for e, term in enumerate(self.terms) if self.clean or term is not None)
        return sum(((1 << 8 * size) - 1) << 8 * size * e for e in kept)


def stem(spec: ContractionSpec) -> Windows:
    """Returns the convolution that a spec is.  Raises Declined, with the reason, if it has no kernel of this form."""
    at = convolution(spec)
    if at.groups > 1:
        raise Declined("channels are in groups")
    if spec.terms or spec.results:
        raise Declined("phases of a strided convolution")
    if at.channels > MOST_CHANNELS or prod(spec.k) > MOST_TERMS:
        raise Declined(f"{at.channels} channels and {prod(at.taps)} taps are not few")
    if at.filters % 2 or at.filters > MOST_FILTERS:
        raise Declined(f"{at.filters} filters are no pairs, or too many for a block")
    for gather, kind in zip((spec.a, spec.b), at.types):
        lies = as_it_lies(gather, kind) or (kind == BF16X6 and gather.program is None)
        if not lies or gather.operand.dtype.name.startswith("float8"):
            raise Declined("an operand is computed or converted")
    return at


class StemTile(HaloTile):
    """What a block has in shared memory: rows of the image, channel by channel, and filters in the order of words."""

    convolution = staticmethod(stem)

    def __init__(self, spec: ContractionSpec, schedule: HaloSchedule) -> None:
        super().__init__(spec, schedule)
        at = self.at
        self.parts = PARTS if at.types[0] == BF16X6 else 1
        self.element, self.itemsize = ELEMENTS[at.types[0]]
        per = WORD // self.itemsize
        #: whether the taps of a row lie next to each other, a window of them beginning with a word
        self.whole = at.stride[2] * at.channels % per == 0
        #: channels of a column in shared memory
        self.channels = at.channels if self.whole else round_up(at.channels, per)
        self.each, self.vector = self._columns()
        #: columns in front of the first window, so that what a thread brings is aligned
        self.lead = -at.before[2] % self.each if self.vector else 0
        #: what threads bring of a row, and the rows
        self.pieces, self.rows = -(-(self.lead + self.under[3]) // self.each), prod(self.under[:3])

    def _columns(self) -> tuple[int, bool]:
        """Returns how many columns a thread brings at a time, and whether they are whole vectors of memory."""
        at, gather = self.at, self.spec.a
        size, channel, column = at.itemsize, gather.inner[0], at.steps[2]
        most = VECTORS // self.itemsize
        planes = column == 1 or at.channels == 1
        if not (column == at.channels and channel == 1 if at.channels > 1 and not planes else column == 1):
            return most, False
        steps = [gather.outer[0], *at.steps[:2], channel if planes and at.channels > 1 else 0]
        for each in (most, most // 2, most // 4):
            bytes_ = min(VECTORS, each * size)
            aligned = gather.operand.alignment % bytes_ == 0 and not any(step * size % bytes_ for step in steps)
            begins = self.edges[3].tiles == 1 or self.s.cols * at.stride[2] % each == 0
            if each > 1 and aligned and begins and at.sizes[2] % each == 0:
                return each, True
        return most, False

    @property
    def brought(self) -> int:
        """How many pieces of a part of the image a thread brings at most."""
        return -(-self.rows * self.pieces // self.s.threads)

    @property
    def waiting(self) -> int:
        """Registers for what waits for its place in shared memory."""
        return self.brought * self.at.channels * self.each * self.at.itemsize // 4 if self.s.stages > 1 else 0

    @property
    def interleaved(self) -> bool:
        """Whether vectors of memory have all channels of a column, one column behind the other."""
        return self.vector and self.at.channels > 1 and self.at.steps[2] != 1

    @once
    def words(self) -> tuple[Word, ...]:
        """The words of a window, those first all of whose elements are terms or zeros."""
        at = self.at
        under = self.under[2] if at.taps[0] > 1 else 1
        return _words(at.taps, at.dilation, at.channels, self.channels, self.lead, under, self.itemsize)

    @property
    def clean(self) -> int:
        """Steps of the reduction all of whose words are clean."""
        return sum(word.clean for word in self.words) // WORDS

    def steps_of(self, phase: Phase) -> int:
        count = -(-len(self.words) // WORDS)
        return round_up(count, TOGETHER) if self.parts > 1 else count

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the image that threads bring."""
        return self.pieces * self.each * self.channels * self.itemsize

    @once
    def reads(self) -> tuple[int, float]:
        """Returns the bytes from a row to the next, and how often shared memory is read for a quarter of a fragment."""
        every = range(round_up(self.row_bytes, VECTORS), self.row_bytes + BANKS, 2 * VECTORS)
        first = first_positions(self.s.tile, FRAGMENT_ROWS)
        zero, one = self.strides(0), self.strides(1)
        rows = tuple((sum(map(mul, p, one)) - sum(map(mul, p, zero)), sum(map(mul, p, zero))) for p in first)
        return min(((pitch, _reads(self.words, rows, pitch)) for pitch in every), key=lambda x: x[1] + x[0] / 4096)

    def strides(self, pitch: int) -> tuple[int, ...]:
        """Returns the bytes from the window of a position to that of the next, in each dimension of a tile."""
        at, (_, depth, height, _) = self.at, self.under
        rows = (depth * height, at.stride[0] * height, at.stride[1])
        return (*(n * pitch for n in rows), at.stride[2] * self.channels * self.itemsize)

    @property
    def part_bytes(self) -> int:
        """Bytes of a part of the elements of the image."""
        return self.rows * self.reads[0]

    @property
    def image(self) -> Buffer:
        shape = (self.parts * self.rows, self.reads[0])
        return Buffer("image", "unsigned char", shape, 1, align=VECTORS, note="rows of the image under the tile")

    @property
    def tables(self) -> tuple[Buffer, ...]:
        reach = Buffer("reach", "int", (self.steps * WORDS,), align=VECTORS, note="from a window's begin to its words")
        kept = Buffer(
            "kept", "uint32", ((self.steps - self.clean) * WORDS,), align=VECTORS, note="bits of the last ones"
        )
        return (reach, kept) if self.clean < self.steps else (reach,)

    @property
    def registers(self) -> int:
        own, parts = self.own, self.parts
        products = 4 * own * (TOGETHER * parts if parts > 1 else 1)
        if parts > 1:
            products += self.at.filters // 2 if self.s.wgmma else 4 * own + 12
        return self.sums + products + 2 * own + (self.waiting + 16 if self.waiting else 0) + 64


@lru_cache(256)
def _words(
    taps: tuple[int, ...], dilation: tuple[int, ...], channels: int, stored: int, lead: int, under: int, itemsize: int
) -> tuple[Word, ...]:
    """Returns the words of a window; ``stored`` are the channels of a column, ``under`` the rows of a plane."""
    per, found = WORD // itemsize, []
    joined = stored == channels and dilation[2] == 1
    count = channels * (taps[2] if joined else 1)
    for depth, row, tap in product(range(taps[0]), range(taps[1]), (0,) if joined else range(taps[2])):
        begin = (lead + tap * dilation[2]) * stored
        for first in range(begin // per * per, begin + count, per):
            every = [first + e - begin for e in range(per)]
            terms = tuple((n % channels, depth, row, tap + n // channels) if 0 <= n < count else None for n in every)
            clean = None not in terms or stored > channels
            found.append(Word(depth * dilation[0] * under + row * dilation[1], first * itemsize, terms, clean))
    return tuple(sorted(found, key=lambda word: not word.clean))


@lru_cache(4096)
def _reads(words: tuple[Word, ...], positions: tuple[tuple[int, int], ...], pitch: int) -> float:
    """Returns how often shared memory is read, on average, for a quarter of a fragment.

    Positions have the rows, and the bytes within a row, at which their windows begin.
    """
    begins = [row * pitch + place for row, place in positions]
    steps = -(-len(words) // WORDS)
    found = []
    for step, half in product(range(0, steps, -(-steps // 3)), (0, 1)):
        own = [word.row * pitch + word.place for word in words[step * WORDS + half : (step + 1) * WORDS : 2]]
        for rows in (begins[: FRAGMENT_ROWS // 2], begins[FRAGMENT_ROWS // 2 :]):
            banks = Counter(place // WORD % (BANKS // WORD) for place in {row + word for row in rows for word in own})
            found.append(max(banks.values(), default=0))
    return sum(found) / len(found)


# ---- schedules

#: Cycles of a multiprocessor for a product of a warp, and of a warpgroup's for 8 columns; bytes of the image and of
#: results that it moves in a cycle.
PRODUCT, WARPGROUP, MOVED = 2.1, 1.2, 21.5
#: Instructions of a thread for what it brings at a time, more for each element, for one that comes by itself, for a
#: result, and for one that is staged.
PIECE, ELEMENT, ALONE, RESULT, STAGED = 160.0, 6.0, 13.7, 12.3, 17.0
#: Cycles of the launch, of a thread for a word of the filters, of a warp for a tile, more if its part of the image does
#: not wait in registers, and for a step of it, alone or of a warpgroup.
LAUNCH, FILTER, TILE, BROUGHT, WAIT, WAIT_TOGETHER = 7288.0, 278.0, 414.0, 2217.0, 37.4, 32.4
#: The share of all other work that is not hidden behind the longest.
EXPOSED = 0.261


def schedules(spec: ContractionSpec, target: Target) -> tuple[StemSchedule, ...]:
    """Returns schedules worth trying, the one with the least estimated time first, then the best of every other kind.

    Raises Declined with a reason.
    """
    return in_order(_ranked(spec, target), lambda s: (s.wgmma, s.stages, s.warps))[:MOST]


def cycles(spec: ContractionSpec, target: Target) -> float:
    """Returns the cycles that the best schedule is estimated to take.  Raises Declined with a reason."""
    return _ranked(spec, target)[0][0]


@lru_cache(256)
def _ranked(spec: ContractionSpec, target: Target) -> list[tuple[float, StemSchedule]]:
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch} multiplies no bfloat16 and no tf32")
    tiles = (StemTile(spec, s) for s in _candidates(stem(spec)) if target.arch.has_wgmma or not s.wgmma)
    tiles = (x for x in tiles if (x.direct or not x.s.wgmma) and (x.vector or x.s.stages == 1))
    return ranked((x for x in tiles if x.waiting <= MOST_WAITING), _cost, target)


def _candidates(at: Windows) -> Iterator[StemSchedule]:
    for images, depth, rows, cols in likely_tiles(at):
        fragments = -(-images * depth * rows * cols // FRAGMENT_ROWS)
        every = dict.fromkeys(-(-fragments // own) for own in range(1, MOST_OWN + 1))
        kinds = [(warps, False) for warps in every]
        if at.types[0] == BF16X6 and at.filters % FRAGMENT_COLS == 0 and at.filters >= LEAST:
            kinds += [(warps, True) for warps in dict.fromkeys(round_up(warps, 4) for warps in every)]
        for (warps, together), stages in product(kinds, (1, 2)):
            if warps <= MOST_WARPS:
                yield StemSchedule(images, depth, rows, cols, 1, warps, stages, together)


def cost(spec: ContractionSpec, schedule: StemSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take."""
    x = StemTile(spec, schedule)
    return _cost(x, -(-x.tiles // schedule.workers), schedule.resident, target)


def _cost(x: StemTile, tiles: int, resident: int, target: Target) -> float:
    """Returns the estimated cycles if a block has so many tiles.  The constants are fits to measurements."""
    s, at, spec = x.s, x.at, x.spec
    fragments, times = s.warps * x.own * x.steps, PRODUCTS if x.parts > 1 else 1
    image, results = x.rows * x.pieces * x.each * at.channels, x.positions * x.cols
    products = fragments * at.fragments * PRODUCT * times
    shared = fragments * x.parts * (4 * x.reads[1] + (1 + 2 * at.fragments) / x.own) + image * x.itemsize / BANKS
    instructions = 32 * fragments * (8 * x.parts + at.fragments * times + at.fragments * x.parts / x.own)
    if s.wgmma:
        products = fragments * (at.filters + MORE) / FRAGMENT_COLS * WARPGROUP * times
        shared = fragments * x.parts * (4 * x.reads[1] + 1 / x.own) + image * x.itemsize / BANKS
        instructions = 32 * fragments * (25 + at.filters / 4)
    shared += 0 if x.direct else 8 * results / BANKS
    instructions += results * (RESULT if x.direct else STAGED)
    instructions += x.rows * x.pieces * PIECE + image * (ELEMENT if x.vector else ALONE)
    size = max((store.operand.dtype.itemsize for store in spec.program.stores), default=0)
    moved = (image * at.itemsize + results * size * len(spec.program.stores)) / MOVED
    work = [products, shared, instructions / ISSUE, moved]
    busy = max(work) + EXPOSED * (sum(work) - max(work))
    waits = TILE + (BROUGHT if s.stages == 1 else 0.0) + x.steps * (WAIT_TOGETHER if s.wgmma else WAIT)
    blocks = -(-x.tiles // (tiles * target.sms))  # of a multiprocessor
    words = x.cols * x.steps * WORDS * x.parts
    once = LAUNCH + blocks * words * ALONE / ISSUE + words / s.threads * FILTER
    others = min(blocks, resident) - 1  # which work while a block waits
    return once + -(-blocks // resident) * tiles * (busy + hypot(busy * others, waits))

"""Convolutions as windows that move over an image: their groups, phases and sizes, always in three dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

from codegen.declined import Declined
from codegen.filled_tiles import as_it_lies
from codegen.spec import ContractionSpec, Image, Limit
from codegen.tile_path import product_types

CHUNK = 8  # bytes of the reduction that a thread brings to a product
FRAGMENT_ROWS, FRAGMENT_COLS = 16, 8  # results of a product
DIMS = 3  # spatial dimensions of a tile
MOST_ALONE = 64  # bytes of channels without groups
#: The least filters that warpgroups multiply, and most registers of a thread for sums.
LEAST, MOST_SUMS = 16, 128


@dataclass(frozen=True)
class Phase:
    """Results that lie under the same taps: all results, but of a gradient of a strided convolution.

    batch   its coordinates among the batches behind that of groups.
    first, taps  the first of the filter's taps in each spatial dimension, and how many there are.
    reach   elements of the image from where windows begin to the first tap.
    """

    batch: tuple[int, ...]
    first: tuple[int, ...]
    taps: tuple[int, ...]
    reach: tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """A convolution in groups, with three spatial dimensions: those in front that it does not have are 1.

    types                     in which the operands are multiplied; ``itemsize`` bytes of an element of either.
    groups, channels, filters  of the convolution, and of a group.
    images, out, sizes, taps  images, and elements of the results, the image and the filter in each dimension.
    steps                     elements from one to the next of the image's dimensions.
    stride, dilation, before  of the window, as in `Image`.
    phases                    of which each has some of the window's taps.
    """

    types: tuple[str, str]
    itemsize: int
    groups: int
    channels: int
    filters: int
    images: int
    out: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    phases: tuple[Phase, ...]

    @property
    def width(self) -> int:
        """Bytes of a group's channels."""
        return self.channels * self.itemsize

    @property
    def chunks(self) -> int:
        """Chunks of a window: tap by tap, those of its channels."""
        return prod(self.taps) * self.width // CHUNK

    def chunks_of(self, phase: Phase) -> int:
        """Returns the chunks of a filter that a phase has."""
        return prod(phase.taps) * self.width // CHUNK

    @property
    def fragments(self) -> int:
        """Fragments that a group's filters take."""
        return -(-self.filters // FRAGMENT_COLS)

    @property
    def wgmma(self) -> bool:
        """Whether warpgroups can multiply the filters of a group where they lie in shared memory."""
        if len(self.phases) > 1:
            return False
        return self.itemsize == 2 and self.filters % FRAGMENT_COLS == 0 and LEAST <= self.filters <= MOST_SUMS * 2

    def under(self, tile: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how many elements of the image lie under a tile of positions, in each spatial dimension."""
        every = zip(tile, self.stride, self.taps, self.dilation)
        return tuple((size - 1) * stride + (taps - 1) * dilation + 1 for size, stride, taps, dilation in every)


def windows(spec: ContractionSpec) -> Windows:
    """Returns the convolution that a spec is.  Raises Declined, with the reason, if it has no kernel of this form."""
    at = convolution(spec)
    if at.groups == 1 and at.width > MOST_ALONE:
        raise Declined(f"there is one group of {at.channels} channels")
    if not all(as_it_lies(gather, kind) for gather, kind in zip((spec.a, spec.b), at.types)) or "float8" in at.types[0]:
        raise Declined("an operand is computed or converted")
    if at.width % CHUNK or at.filters % 2:
        raise Declined(
            f"groups of {at.channels} channels and {at.filters} filters: no {CHUNK} bytes, and pairs of filters"
        )
    return at


def convolution(spec: ContractionSpec) -> Windows:
    """Returns the convolution that a spec is.  Raises Declined, with the reason, if it is none of an image."""
    types, image = product_types(spec, widen=False), spec.a.image
    if image is None or image.across:
        raise Declined("the rows of operand A are no windows of an image")
    if spec.results and max(image.dilation) > 1:
        raise Declined("phases of a strided convolution whose windows are dilated")
    if spec.others or spec.partials:
        raise Declined("it has one filter, and makes no reductions of its results")
    if not spec.batch or (spec.batch[1:] and not spec.results) or 1 in spec.batch[1:] or len(spec.n) != 1:
        raise Declined("its batch is not one of groups, or of their phases")
    if not prod((*spec.batch, *spec.m, *spec.n, *spec.k)):
        raise Declined("there is nothing to multiply")
    return _in_space(spec, image, types)


def _in_space(spec: ContractionSpec, image: Image, types: tuple[str, str]) -> Windows:
    missing = DIMS - len(image.sizes)

    def three(values: Iterable[int], fill: int) -> tuple[int, ...]:
        return (*(fill for _ in range(missing)), *values)

    phases = [(place, *_taps(spec, image, place)) for place in product(*map(range, spec.batch[1:]))]
    busy = [(taps, reach) for _, _, taps, reach in phases if prod(taps)]
    begins = [min(reach) for reach in zip(*(reach for _, reach in busy))]
    counts = [
        max((reach[d] - begin) // image.dilation[d] + taps[d] for taps, reach in busy) for d, begin in enumerate(begins)
    ]
    return Windows(
        types,
        spec.a.operand.dtype.itemsize,
        spec.batch[0],
        spec.k[0],
        spec.n[0],
        spec.m[0],
        three(spec.m[1:], 1),
        three(image.sizes, 1),
        three(image.steps, 0),
        three(counts, 1),
        three(image.stride, 1),
        three(image.dilation, 1),
        three((-begin for begin in begins), 0),
        tuple(
            Phase(place, three(first, 0), three(taps, 1), three((r - b for r, b in zip(reach, begins)), 0))
            for place, first, taps, reach in phases
        ),
    )


def _taps(spec: ContractionSpec, image: Image, place: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the first tap of a phase in each dimension, how many there are, and how far the first one lies from the
    element that the window belongs to.
    """
    batch = (0, *place)

    def at(x: Limit, tap: int, d: int) -> bool:
        return 0 <= x.start + sum(s * b for s, b in zip(x.batch, batch)) + tap * x.inner[1 + d] < x.size

    found = []
    for d, count in enumerate(spec.k[1:]):
        mine = [x for x in spec.terms if x.inner[1 + d] or not any(x.inner)]
        taps = [tap for tap in range(count) if all(at(x, tap, d) for x in mine)]
        shift = sum(s * b for s, b in zip(image.shifts[d], batch)) if image.shifts else 0
        first = taps[0] if taps else 0
        found.append((first, len(taps), first * image.dilation[d] + shift - image.before[d]))
    return tuple(zip(*found))

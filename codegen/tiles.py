"""Tiles of a contraction's operands as TMA brings them to shared memory.

The reduction is cut into panels: at most 128 bytes of neighbouring channels of one tap.  A stage of the pipeline holds
as many panels as make up 128 bytes of each operand.  An operand without a tensor map (strides that are no multiple of
16 bytes, or steps that TMA cannot express) raises `Declined` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import gcd, prod

from codegen.declined import Declined
from codegen.expr import Operand
from codegen.iteration import collapse, linear
from codegen.operands import (
    LEAST_SWIZZLE,
    PANEL_RATE,
    ROW_BYTES,
    Gathered,
    MappedOperand,
    OperandTiles,
    ReductionPanels,
)
from codegen.phases import busy_share, condition, idle
from codegen.records import changed
from codegen.spec import ContractionSpec, Gather, Image, Limit, TensorMap
from codegen.tensor_map import MOST_RANK, MOST_STEP, MOST_STRIDE, UNIT, corner_limit, offset_limit


def gathered(spec: ContractionSpec) -> OperandTiles:
    """Returns a convolution whose image threads gather.  Raises Declined, with the reason, where they cannot."""
    gather, image, itemsize = spec.a, spec.a.image, spec.a.operand.dtype.itemsize
    if image is None:
        raise Declined("only the windows of an image are gathered")
    _check_elements(spec)
    check_limits(spec)
    if image.across:
        raise Declined("the rows of operand A are no windows")
    lines = spec.k[0] > 1 and gather.inner[0] != 1
    a = _lines(spec, image) if lines else Gathered(spec.m, spec.k[1:], spec.k[0], image, _apart(spec))
    if a.channels * itemsize % 16:
        raise Declined(f"{gather.operand.name!r} has no 16 bytes of a window next to each other")
    starts = (*a.steps, *a.image.steps[:-1], a.image.steps[-1] * (a.image.stride[-1] if lines else 1))
    if any(step * itemsize % 16 for step in starts):
        raise Declined(f"{gather.operand.name!r} has rows that do not start at multiples of 16 bytes")
    if prod(image.sizes) * max(1, spec.m[0]) * spec.k[0] >= 2**31:
        raise Declined(f"{gather.operand.name!r} is too large for offsets of 32 bits")
    if any(size >= 2**14 for size in (*a.image.sizes, *a.taps)):
        raise Declined("an image too large for positions of 16 bits")
    order = range(len(spec.k)) if lines else (*range(1, len(spec.k)), 0)
    inner, along = collapse(spec.k, [spec.b.inner], order)
    if len(inner) > 1:
        raise Declined(f"{spec.b.operand.name!r} does not lie tap by tap, channel by channel")
    reduction = ReductionPanels((), prod(inner), ROW_BYTES // itemsize, 1)
    batch, (over,) = collapse(spec.batch, [spec.b.batch], range(len(spec.batch)))
    b = tiled(changed(spec.b, batch=over, inner=along[0]), 1, batch, prod(spec.n), inner, 0)
    if not b.along_k:
        raise Declined(f"{spec.b.operand.name!r} is not stored along the reduction")
    return OperandTiles(batch, prod(spec.m), prod(spec.n), reduction, a, b)


def _lines(spec: ContractionSpec, image: Image) -> Gathered:
    """Returns an image whose channels are planes: the taps of a row lie next to each other, as channels do elsewhere.

    Channels are one more dimension of taps.  Raises Declined if windows reach over the ends of rows.
    """
    (channels, *taps), (*_, last) = spec.k, image.sizes
    reach = (spec.m[-1] - 1) * image.stride[-1] + taps[-1]
    if image.steps[-1] != 1 or image.dilation[-1] != 1 or image.before[-1] or reach > last:
        raise Declined(f"{spec.a.operand.name!r} has no rows of taps next to each other")
    planes = Image(
        (channels, *image.sizes),
        (spec.a.inner[0], *image.steps),
        (1, *image.stride),
        (1, *image.dilation),
        (0, *image.before),
    )
    return Gathered((spec.m[0], 1, *spec.m[1:]), (channels, *taps[:-1], 1), taps[-1], planes, _apart(spec))


def _apart(spec: ContractionSpec) -> tuple[int, int]:
    """Returns the elements from one image, and from one group, to the next."""
    return spec.a.outer[0], spec.a.batch[0] if prod(spec.batch) > 1 else 0


def check_across(itemsize: int, *along_k: bool) -> None:
    """Raises Declined if operands with such elements are not stored along the reduction, but must be."""
    if itemsize != 2 and not all(along_k):
        raise Declined("only 16-bit operands may be stored across the reduction")


def _check_elements(spec: ContractionSpec) -> None:
    for gather in (spec.a, spec.b):
        if gather.program is not None:
            raise Declined(f"{gather.operand.name!r} is computed: it is not in memory")
    if spec.b.operand.dtype.itemsize != spec.a.operand.dtype.itemsize:
        raise Declined("the operands' elements differ in size")
    check_element(spec.a)
    check_element(spec.b)


def check_element(gather: Gather) -> None:
    """Raises Declined if TMA cannot bring an operand, whatever its strides."""
    if gather.operand.alignment % 16:
        raise Declined(f"{gather.operand.name!r} may lie at an address that is no multiple of 16 bytes")


def check_limits(spec: ContractionSpec) -> None:
    """Raises Declined for phases of a strided convolution, and for reversed filters."""
    if spec.terms or spec.results or any(any(x) for x in (spec.a.image.shifts if spec.a.image else ())):
        raise Declined("phases of a strided convolution, or a filter turned around")


def _across(spec: ContractionSpec) -> OperandTiles:
    """Returns a convolution backward to the filter: rows are (*taps, channels), the reduction runs over the windows.

    Raises Declined where it has no tensor maps.
    """
    gather, image, itemsize = spec.a, spec.a.image, spec.a.operand.dtype.itemsize
    assert image is not None
    name, panel = gather.operand.name, ROW_BYTES // itemsize
    *taps, channels = spec.m
    check_across(itemsize, False)
    # A panel has channels of one tap.
    width = gcd(channels, panel)
    if width < LEAST_SWIZZLE // itemsize or gather.outer[-1] != 1:
        raise Declined(f"{name!r} has no multiple of {LEAST_SWIZZLE // itemsize} channels next to each other")
    inner, along = collapse(spec.k, [spec.b.inner], range(len(spec.k)))
    if len(inner) > 1:
        raise Declined(f"the windows of {spec.b.operand.name!r} do not lie at equal distances")
    cols, over = collapse(spec.n, [spec.b.outer], range(len(spec.n)))
    batch, (first, second) = collapse(spec.batch, [gather.batch, spec.b.batch], range(len(spec.batch)))
    pixels, step, several = spec.k, 0, prod(batch) > 1
    if several and (first[0], second[0]) == (pixels[0] * gather.inner[0], prod(pixels) * along[0][0]):
        # Batches are parts of the reduction: windows of the images, one image behind another.  All are whole panels.
        step, inner, pixels = prod(pixels), (batch[0] * inner[0],), (batch[0] * pixels[0], *pixels[1:])
        first, second, step = (0, *first[1:]), (0, *second[1:]), -(-step // panel) * panel
    if len(batch) > 1 + (step > 0) or len(cols) > 1:
        raise Declined("batches that do not lie at equal distances")
    b = tiled(changed(spec.b, batch=second, outer=over[0], inner=along[0]), 1, batch, prod(cols), inner, 0)
    group = len(batch) - 1
    start = f"{{b{group}}} * {first[group]} + {{c}}" if any(first) and several else "{c}"
    total = (batch[group] - 1) * first[group] + channels
    a = _windows(gather, image, start, total, pixels, tuple(taps), "p")
    a = changed(a, along_k=False, pixels=pixels, taps=(*taps, channels // width), width=width)
    return OperandTiles(batch, prod(spec.m), prod(cols), ReductionPanels((), prod(spec.k), panel, 1, step=step), a, b)


def operand_tiles(spec: ContractionSpec) -> OperandTiles:
    """Returns the tensor maps of a contraction.  Raises Declined, with the reason, if an operand cannot have one."""
    _check_elements(spec)
    itemsize = spec.a.operand.dtype.itemsize
    if spec.a.image is not None and not spec.a.image.across and spec.results:
        return _phased(spec)
    check_limits(spec)
    if spec.a.image is not None and spec.a.image.across:
        return _across(spec)
    spec = simplified(spec)
    rows, batch = spec.m, spec.batch
    image = spec.a.image if spec.a.limits or len(rows) > 1 else None
    if len(rows) > 1 and image is None:
        if any(spec.b.batch) and spec.batch:
            raise Declined("rows of a batched product that do not lie at equal distances")
        spec = _rows_as_batch(spec)
        rows, batch = spec.m, spec.batch
    if spec.b.limits:
        raise Declined("an operand B with padding")
    channel = _channel(spec, image is not None)
    b = tiled(spec.b, 1, spec.batch, prod(spec.n), spec.k, channel)
    a = None if image else tiled(spec.a, 0, spec.batch, prod(rows), spec.k, channel)
    # Rows of a tile that lie across the reduction hold a full panel.
    reduction = _reduction(spec, channel, itemsize, b.along_k and (a is None or a.along_k))
    a = a or im2col(spec, channel, reduction, prod(spec.batch))
    check_across(itemsize, a.along_k, b.along_k)
    return OperandTiles(batch, prod(rows), prod(spec.n), reduction, a, b)


def _phased(spec: ContractionSpec) -> OperandTiles:
    """Returns the gradient of a strided convolution: a batch is a group and a phase, which has windows and taps of its
    own.

    A phase has the last taps of each dimension.  The first ones that would lie outside of the filter are not
    multiplied, not even with zeros.
    """
    _, *taps = spec.k
    dims: list[tuple[str, int, int]] = []
    skips, start, share = [], spec.b.start, 1.0
    for d, count in enumerate(taps):
        phases = [k for k, step in enumerate(spec.results[1 + d].batch) if step and spec.batch[k] > 1]
        numbers = [x for x in spec.terms if x.inner[1 + d]]
        skip = _Skip(numbers[0], 1 + d) if numbers else None
        skips.append(skip.text(phases) if skip else "0")
        # Both the phase and the tap step over the filter: one dimension of the map.
        steps = [spec.b.batch[k] for k in phases]
        step = gcd(*steps, spec.b.inner[1 + d])
        reached = [
            sum(s * b for s, b in zip(steps, place)) + spec.b.inner[1 + d] * tap
            for place in product(*(range(spec.batch[k]) for k in phases))
            for tap in range(skip.count(dict(zip(phases, place))) if skip else 0, count)
        ]
        share *= len(reached) / (count * prod(spec.batch[k] for k in phases))
        low, high = min(reached, default=0), max(reached, default=0)
        start += low
        if high > low:
            terms = [*((f"b{k}", s // step) for k, s in zip(phases, steps)), (f"t{d}", spec.b.inner[1 + d] // step)]
            dims.append((_placeholders(terms, -low // step), (high - low) // step + 1, step))
    never = changed(spec, terms=tuple(x for x in spec.terms if not any(x.inner)))
    nothing = condition(idle(never), [f"b{k}" for k in range(len(spec.batch))])
    share *= busy_share(never)
    groups = spec.batch[0]
    only_groups = tuple(step if k == 0 else 0 for k, step in enumerate(spec.b.batch))
    b = changed(spec.b, batch=only_groups, start=start)
    second = tiled(b, 1, spec.batch, prod(spec.n), spec.k, 0, dims)
    itemsize = spec.a.operand.dtype.itemsize
    check_across(itemsize, second.along_k)
    reduction = ReductionPanels(
        tuple(taps), spec.k[0], ROW_BYTES // itemsize, 1, tuple(skips), share, idle=_marked(nothing)
    )
    first = im2col(spec, 0, reduction, groups)
    return OperandTiles(spec.batch, prod(spec.m), prod(spec.n), reduction, first, second)


class _Skip:
    """How many of the first taps of a dimension a phase does not have: those whose numbers lie past the filter.

    The number of tap i is ``b . batch + i * inner + start`` with a negative step.
    """

    def __init__(self, number: Limit, dim: int) -> None:
        self._number, self._step = number, -number.inner[dim]
        self._over = number.start - number.size + self._step

    def count(self, at: Mapping[int, int]) -> int:
        return (sum(self._number.batch[k] * b for k, b in at.items()) + self._over) // self._step

    def text(self, phases: Sequence[int]) -> str:
        terms = [(f"b{k}", self._number.batch[k]) for k in phases]
        return f"({_placeholders(terms, self._over)}) / {self._step}"


def _placeholders(terms: Sequence[tuple[str, int]], constant: int) -> str:
    """Returns a linear expression with placeholders for the names of coordinates, positive terms first."""
    ordered = sorted([*terms, (str(constant), 1)] if constant > 0 else terms, key=lambda term: term[1] < 0)
    return _marked(linear(ordered, min(constant, 0)))


def _marked(text: str) -> str:
    """Returns an expression with placeholders for the names of coordinates."""
    return re.sub(r"\b[bt]\d\b", lambda name: f"{{{name[0]}}}", text)


def simplified(spec: ContractionSpec) -> ContractionSpec:
    """Returns the spec with dimensions merged that both operands step over alike; an image keeps its windows apart.

    Windows of one element whose channels are planes are none: TMA brings tiles of the planes.
    """
    a, b = spec.a, spec.b
    batch, strides = collapse(spec.batch, [a.batch, b.batch], range(len(spec.batch)))
    a, b = changed(a, batch=strides[0]), changed(b, batch=strides[1])
    cols, over = collapse(spec.n, [b.outer], range(len(spec.n)))
    if len(cols) > 1:
        raise Declined("columns that do not lie at equal distances")
    b = changed(b, outer=over[0])
    if not a.limits:
        rows, over = collapse(spec.m, [a.outer], range(len(spec.m)))
        planes = prod(spec.k[1:]) == 1 and a.inner[0] != 1
        if len(rows) == 1 or planes or a.image is None:
            order = sorted(range(len(spec.k)), key=lambda d: (-abs(a.inner[d]), d))
            inner, along = collapse(spec.k, [a.inner, b.inner], order)
            a, b = changed(a, outer=over[0], inner=along[0], image=None), changed(b, inner=along[1])
            return changed(spec, batch=batch, m=rows, n=cols, k=inner, a=a, b=b)
    return changed(spec, batch=batch, n=cols, a=a, b=b)


def _rows_as_batch(spec: ContractionSpec) -> ContractionSpec:
    """Returns the spec with all row dimensions but the last as batches: operand B repeats."""
    lead = spec.m[:-1]
    a = changed(spec.a, batch=(*spec.a.batch, *spec.a.outer[:-1]), outer=spec.a.outer[-1:])
    b = changed(spec.b, batch=(*spec.b.batch, *(0 for _ in lead)))
    return changed(spec, batch=(*spec.batch, *lead), m=spec.m[-1:], a=a, b=b)


def _channel(spec: ContractionSpec, image: bool) -> int:
    """Returns the dimension of the reduction in which panels lie.

    It is contiguous in the operands stored along the reduction.
    """
    if image:
        return 0  # (channels, *taps)
    for gather in (spec.a, spec.b):
        if gather.outer[-1] == 1 and not (spec.k[-1:] and 1 in gather.inner):
            continue
        for d, stride in enumerate(gather.inner):
            if stride == 1:
                return d
    return len(spec.k) - 1


def _reduction(spec: ContractionSpec, channel: int, itemsize: int, divisible: bool) -> ReductionPanels:
    taps = tuple(size for d, size in enumerate(spec.k) if d != channel)
    channels = spec.k[channel]
    full = ROW_BYTES // itemsize
    if prod(taps) == 1 or not divisible:
        return ReductionPanels(taps, channels, full, 1)

    def cost(panel: int) -> float:
        return -(-channels // panel) * panel / PANEL_RATE[panel * itemsize]

    panel = min((full >> shift for shift in range(4)), key=lambda p: (cost(p), -p))
    return ReductionPanels(taps, channels, panel, full // panel)


def tiled(
    gather: Gather,
    argument: int,
    batch: Sequence[int],
    outer: int,
    inner: Sequence[int],
    channel: int,
    taps: Sequence[tuple[str, int, int]] | None = None,
) -> MappedOperand:
    """Returns an operand whose rows (or columns) lie at equal distances.

    taps are (expression, size, stride) of the map's dimensions for them, if they are not those of the reduction.
    """
    name = gather.operand.name
    step, along = gather.outer[-1], gather.inner[channel]
    along_k = along == 1 or (inner[channel] == 1 and step != 1)
    if not along_k and step != 1 and outer > 1:
        raise Declined(f"{name!r} is contiguous neither along the reduction nor across it")
    channel_dim = ("{c}", inner[channel], along)
    outer_dim = ("{o}", outer, step)
    others = [d for d in range(len(inner)) if d != channel]
    tap_dims = [(f"{{t{n}}}", inner[d], gather.inner[d]) for n, d in enumerate(others) if inner[d] > 1]
    tap_dims = tap_dims if taps is None else list(taps)
    batch_dims = [(f"{{b{d}}}", size, gather.batch[d]) for d, size in enumerate(batch) if size > 1 and gather.batch[d]]
    if 2 + len(tap_dims) + len(batch_dims) > MOST_RANK:
        tap_dims = _nested(tap_dims)
    first, second = (channel_dim, outer_dim) if along_k else (outer_dim, channel_dim)
    start = gather.start
    terms, sizes, strides = [], [], []
    middle = [*reversed(tap_dims), second] if along_k else [second, *reversed(tap_dims)]
    for term, size, stride in [first, *middle, *reversed(batch_dims)]:
        if stride < 0:
            start += (size - 1) * stride
            term, stride = f"{size - 1} - {term}", -stride
        terms.append(term)
        sizes.append(size)
        strides.append(stride)
    return MappedOperand(_map(gather.operand, argument, sizes, strides[1:], start), along_k, tuple(terms))


def _nested(dims: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Returns a map's dimensions, the outermost first, those merged that lie in each other without gaps."""
    found: list[tuple[str, int, int]] = []
    for term, size, stride in dims:
        if found and found[-1][2] == size * stride:
            outside, count, _ = found.pop()
            outside = f"({outside})" if " " in outside else outside
            term, size = f"{outside} * {size} + {term}", count * size
        found.append((term, size, stride))
    return found


def _map(operand: Operand, argument: int, sizes: Sequence[int], strides: Sequence[int], start: int) -> TensorMap:
    """Returns the map of elements that lie so far apart, from ``start`` on.  Raises Declined if there can be none."""
    name, itemsize = operand.name, operand.dtype.itemsize
    offset = start * itemsize
    # A dimension of one element may have any stride: the map needs one that it can express.
    strides = [max(UNIT, s * itemsize) if size == 1 else s * itemsize for size, s in zip(sizes[1:], strides)]
    if len(sizes) > MOST_RANK:
        raise Declined(f"{name!r} takes {len(sizes)} dimensions, TMA {MOST_RANK}")
    if any(s % UNIT for s in strides) or offset % UNIT or offset < 0:
        raise Declined(f"{name!r} has rows that do not start at multiples of 16 bytes")
    if any(s >= MOST_STRIDE for s in strides) or any(not 1 <= size < 2**31 for size in sizes):
        raise Declined(f"{name!r} is larger than TMA can address, or empty")
    return TensorMap(argument, operand.dtype.ctype, tuple(sizes), tuple(strides), (), (1,) * len(sizes), 0, offset)


def im2col(spec: ContractionSpec, channel: int, reduction: ReductionPanels, groups: int) -> MappedOperand:
    """Returns the windows of an image, gathered by TMA's im2col mode."""
    gather, image = spec.a, spec.a.image
    assert image is not None
    channels = spec.k[channel]
    if gather.inner[channel] != 1 and channels > 1:
        raise Declined(f"{gather.operand.name!r} is not stored with its channels next to each other")
    if groups > 1 and channels % reduction.panel:
        # A dimension of the map tells the groups apart: what lies beyond the channels of one is zero.
        return _windows(gather, image, "{c}", channels, spec.m, spec.k[1:], "o", spec.batch, groups)
    start = f"{{b0}} * {channels} + {{c}}" if groups > 1 else "{c}"
    return _windows(gather, image, start, groups * channels, spec.m, spec.k[1:], "o", spec.batch)


def _windows(
    gather: Gather,
    image: Image,
    start: str,
    channels: int,
    positions: Sequence[int],
    taps: Sequence[int],
    letter: str,
    batch: Sequence[int] = (),
    groups: int = 0,
) -> MappedOperand:
    """Returns an im2col map.

    ``start`` is the C expression of the channel; ``positions`` are (images, *output positions), whose coordinates the
    placeholders with this letter stand for.  Shifts of the batches are part of the offsets.  With ``groups``, the first
    dimension of the batch is the last one of the map, in the place of the images, through which windows move instead.
    """
    rank, (images, *out) = len(image.sizes), positions
    moves = [[(k, step) for k, step in enumerate(shift) if step] for shift in image.shifts] or [[]] * rank
    least = [sum(min(step * (batch[k] - 1), 0) for k, step in move) for move in moves]
    most = [sum(max(step * (batch[k] - 1), 0) for k, step in move) for move in moves]
    lower = tuple(low - before for low, before in zip(least, image.before))
    last = [low + (size - 1) * stride for low, size, stride in zip(lower, out, image.stride)]
    upper = tuple(end - (size - 1) for end, size in zip(last, image.sizes))
    reach = [(n - 1) * d + high - low for n, d, high, low in zip(taps, image.dilation, most, least)]
    moving = rank + bool(groups)
    if moving + 2 > MOST_RANK:
        raise Declined(f"groups of {channels} channels take {moving + 2} dimensions, TMA {MOST_RANK}")
    limit = corner_limit(moving)
    if any(not -limit <= corner < limit for corner in (*lower, *upper)) or max(reach) > offset_limit(moving):
        raise Declined("a filter larger than TMA's im2col mode takes")
    if max(image.stride) > MOST_STEP:
        raise Declined("a stride larger than TMA's im2col mode takes")
    sizes = [channels, *reversed(image.sizes), images]
    strides = [*reversed(image.steps), (gather.inner if image.across else gather.outer)[0]]
    if groups:
        sizes, strides = [*sizes, groups], [*strides, gather.batch[0]]
    tensor_map = _map(gather.operand, 0, sizes, strides, 0)
    spatial = [f"{{{letter}{d + 1}}} * {image.stride[d]} - {-lower[d]}" for d in range(rank)]
    offsets = [f"{{t{d}}} * {image.dilation[d]}" for d in range(rank)]
    for d, move in enumerate(moves):
        if move:
            tap = [(f"t{d}", image.dilation[d])] if taps[d] > 1 else []
            offsets[d] = _placeholders([*tap, *((f"b{k}", step) for k, step in move)], -least[d])
    terms, still = [start, *reversed(spatial), f"{{{letter}0}}"], (0,) * bool(groups)
    if groups:
        terms, offsets = [*terms, "{b0}"], ["0", *offsets]
    tensor_map = changed(
        tensor_map,
        steps=(1, *reversed(image.stride), *(1 for _ in range(1 + bool(groups)))),
        lower=(*lower[::-1], *still),
        upper=(*upper[::-1], *still),
    )
    return MappedOperand(tensor_map, True, tuple(terms), tuple(reversed(offsets)))

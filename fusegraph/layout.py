"""Layouts: how a tensor's logical dimensions are laid out in memory, as strides counted in elements.

Shapes are always logical (N, C, H, W for images, as in cuDNN); only the strides tell NCHW from NHWC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from codegen.sizes import at, corners, most
from fusegraph.errors import LayoutError, ShapeError, shown
from fusegraph.values import Unfit, integer, several

#: Layout name -> dimensions from the slowest to the fastest in memory, by rank.
_LAYOUTS: dict[str, tuple[int, ...]] = {
    name: tuple(map(logical.index, name))
    for logical, last in (
        ("NCW", "NWC"),
        ("NCHW", "NHWC"),
        ("NCDHW", "NDHWC"),
        ("KCS", "KSC"),
        ("KCRS", "KRSC"),
        ("KCTRS", "KTRSC"),
    )
    for name in (logical, last)
}
MAX_ELEMENTS = 2**62
#: Dimensions of a tensor: NumPy has no arrays of more, nor has torch.
MAX_RANK = 64


def check_shape(shape: object) -> tuple[int, ...]:
    """Returns the shape as a tuple of ints.

    Raises ShapeError for sizes that are not non-negative integers, or whose product is more than `MAX_ELEMENTS`, and
    for more than `MAX_RANK` of them.
    """
    try:
        result: tuple[int, ...] = several(integer)(shape)
    except Unfit as wanted:
        raise ShapeError(f"a shape is {wanted}, got {shown(shape)}") from None
    if len(result) > MAX_RANK:
        raise ShapeError(
            f"a shape has at most {MAX_RANK} dimensions, as NumPy's arrays have; this one has {len(result)}"
        )
    if negative := [size for size in result if most(size) < 0]:
        raise ShapeError(f"sizes are not negative, got {negative[0]} in shape {result}")
    total = prod(max(size, 1) for size in result)
    if total > MAX_ELEMENTS:
        raise ShapeError(f"shape {result} overflows: {total} elements, the limit is 2**62")
    return result


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape to which NumPy broadcasts all shapes.  Raises ShapeError, naming them and the axis."""
    rank = max(len(shape) for shape in shapes)
    result = []
    for axis in range(-rank, 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(sizes) > 1:
            listed = " and ".join(str(list(shape)) for shape in shapes)
            differing = " and ".join(map(str, sorted(sizes)))
            raise ShapeError(f"shapes {listed} do not broadcast: along axis {axis} the sizes are {differing}")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def packed_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps; ``order`` has its dimensions, slowest first (default: as given)."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order if order is not None else range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def layout_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Returns the strides of a packed tensor in a named layout (NCHW, NHWC, ..., contiguous, channels_last).

    Raises LayoutError for a name that is unknown or of another rank.
    """
    rank = len(shape)
    name = layout if isinstance(layout, str) else ""
    if name == "contiguous":
        return packed_strides(shape)
    if name == "channels_last" and rank >= 3:
        return packed_strides(shape, (0, *range(2, rank), 1))
    order = _LAYOUTS.get(name)
    if order is None or len(order) != rank:
        fits = [name for name, dims in _LAYOUTS.items() if len(dims) == rank and name[0] == "N"]
        known = ", ".join(["contiguous", *(["channels_last"] if rank >= 3 else []), *fits])
        raise LayoutError(f"layout {shown(layout)} does not fit a tensor of rank {rank} {tuple(shape)}; one of {known}")
    return packed_strides(shape, order)


def check_strides(shape: Sequence[int], strides: object) -> tuple[int, ...]:
    """Returns the strides as a tuple of ints.  Raises LayoutError if they do not fit, are negative or overflow."""
    try:
        result: tuple[int, ...] = several(integer)(strides)
    except Unfit:
        raise LayoutError(f"strides are integers counted in elements, got {shown(strides)}") from None
    if len(result) != len(shape):
        raise LayoutError(f"{len(result)} strides {result} for a tensor of {len(shape)} dimensions {tuple(shape)}")
    if any(s < 0 for s in result):
        raise LayoutError(f"strides are not negative, got {result} for shape {tuple(shape)}")
    if extent(shape, result) > MAX_ELEMENTS:
        raise LayoutError(f"strides {result} of shape {tuple(shape)} overflow: offsets reach past 2**62 elements")
    return result


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Counts the elements from the first to the last that a tensor touches, both included (0 if it has none)."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def stride_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions from the slowest to the fastest in memory.

    Dimensions of size 1 have no place of their own in memory: they stay where they are among their neighbours, so
    that a packed NHWC tensor with one channel is still recognised as the NCHW tensor it also is.
    """
    real = [d for d in range(len(shape)) if shape[d] != 1]
    moved = iter(sorted(real, key=lambda d: -strides[d]))
    return tuple(next(moved) if shape[d] != 1 else d for d in range(len(shape)))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns true if two elements may share an address, at some end of the bounds of sizes that vary.

    Sufficient test, as in NumPy and torch: sorted by stride, every dimension must step over all the faster ones.
    """
    shape, strides = tuple(shape), tuple(strides)
    return any(_overlaps(*at((shape, strides), sizes)) for sizes in corners((shape, strides)))


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if min(shape, default=1) <= 0:  # sizes that no call has
        return False
    reach = 0
    for stride, size in sorted((strides[d], shape[d]) for d in range(len(shape)) if shape[d] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Tells whether two sets of strides address the same elements; dimensions of size 1 do not matter."""
    return 0 in shape or all(size == 1 or x == y for size, x, y in zip(shape, a, b))


def given_strides(shape: tuple[int, ...], layout: str | None, strides: Iterable[int] | None) -> tuple[int, ...] | None:
    """Returns the strides, from a layout or as given; None without either.  Raises LayoutError, also for both."""
    if layout is not None and strides is not None:
        raise LayoutError("give a layout or strides, not both")
    if strides is not None:
        return check_strides(shape, strides)
    return None if layout is None else layout_strides(shape, layout)

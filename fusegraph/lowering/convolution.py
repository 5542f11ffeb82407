"""A convolution or a gradient of one -> the sums of products that it is (implicit GEMM), nothing being unfolded.

Forward, and backward to the filter, every result sums up over windows of the image.  Backward to the image a result
sums up over the windows that it lay in: a convolution of the loss with the filter turned around, if the stride is 1.
With a larger stride elements in different phases of it lie under different taps; every phase is such a convolution by
itself, with its own taps of the filter, and the phases of all dimensions are batches of one product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod

from codegen.arch import SECTOR_BYTES
from codegen.expr import Operand
from codegen.sizes import below, most
from codegen.spec import Gather, Image, Limit
from codegen.target import Target
from fusegraph.graph import Node, Tensor
from fusegraph.lowering.program import StridesOf, broadcast_strides
from fusegraph.ops.base import Role

#: The share of device memory's rate that kernels get, and cycles of a multiprocessor that an element takes which is
#: written by itself: of an image by phases, and of a filter whose neighbours along channels are in other sectors.
STREAMED, PHASES_APART, TAPS_APART = 0.8, 1.0, 2.5


@dataclass(frozen=True)
class Product:
    """The main loop of a contraction: fields of `ContractionSpec`, and the strides of its program's tensors."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    inner: tuple[int, ...]
    a: Gather
    b: Gather
    strides: StridesOf
    terms: tuple[Limit, ...] = ()
    results: tuple[Limit, ...] = ()


def is_product(node: Node) -> bool:
    """Returns true if a convolution, or a gradient of one, multiplies every position by one matrix: no windows."""
    at = node.attributes
    taps = node.output.shape[2:] if node.op.role is Role.WGRAD else node.inputs[1].shape[2:]
    return prod(taps) == 1 and max(at["stride"]) == 1 and not any(p for pair in at["padding"] for p in pair)


def _unit(rank: int, dim: int, step: int = 1) -> tuple[int, ...]:
    return tuple(step if d == dim else 0 for d in range(rank))


def _dot(a: Iterable[int], b: Iterable[int]) -> int:
    return sum(x * y for x, y in zip(a, b))


def fprop(node: Node, first: Operand, second: Operand) -> Product:
    """Rows: (image, *positions).  Columns: filters.  Reduction: (channels, *taps).  Batch: groups."""
    x, w = node.inputs
    shape, at = node.output.shape, node.attributes
    groups, rank = at["groups"], x.rank - 2
    filters, channels, taps = w.shape[0] // groups, w.shape[1], w.shape[2:]
    stride, dilation, before = at["stride"], at["dilation"], tuple(p[0] for p in at["padding"])
    steps, along = first.strides[2:], second.strides[2:]
    rows, inner = (x.shape[0], *shape[2:]), (channels, *taps)
    limits = [
        Limit((0,), _unit(rank + 1, 1 + d, stride[d]), _unit(rank + 1, 1 + d, dilation[d]), -before[d], x.shape[2 + d])
        for d in range(rank)
    ]
    a = Gather(
        first,
        (channels * first.strides[1],),
        (first.strides[0], *(s * step for s, step in zip(stride, steps))),
        (first.strides[1], *(s * step for s, step in zip(dilation, steps))),
        -_dot(before, steps),
        _needed(limits, (groups,), rows, inner),
        Image(x.shape[2:], steps, stride, dilation, before),
    )
    flip = at["mode"] == "convolution"
    b = Gather(
        second,
        (filters * second.strides[0],),
        (second.strides[0],),
        (second.strides[1], *((-s if flip else s) for s in along)),
        sum((count - 1) * s for count, s in zip(taps, along)) if flip else 0,
    )

    def strides(tensor: Tensor) -> tuple[int, ...]:
        n, k, *spatial = broadcast_strides(tensor, shape)
        return (filters * k, n, *spatial, k)

    return Product((groups,), rows, (filters,), inner, a, b, strides)


def wgrad(node: Node, first: Operand, second: Operand) -> Product:
    """Rows: (*taps, channels).  Columns: filters.  Reduction: (images, *positions).  Batch: groups.

    Channels come last: neighbouring rows are neighbours in memory for an image in NHWC.  Of a filter with one tap and
    no stride it is a matrix product: there are no windows.
    """
    x, loss = node.inputs
    shape, at = node.output.shape, node.attributes
    groups, rank = at["groups"], x.rank - 2
    filters, channels, taps = shape[0] // groups, shape[1], shape[2:]
    stride, dilation, before = at["stride"], at["dilation"], tuple(p[0] for p in at["padding"])
    steps = first.strides[2:]
    rows, inner = (*taps, channels), (x.shape[0], *loss.shape[2:])
    limits = [
        Limit((0,), _unit(rank + 1, d, dilation[d]), _unit(rank + 1, 1 + d, stride[d]), -before[d], x.shape[2 + d])
        for d in range(rank)
    ]
    a = Gather(
        first,
        (channels * first.strides[1],),
        (*(s * step for s, step in zip(dilation, steps)), first.strides[1]),
        (first.strides[0], *(s * step for s, step in zip(stride, steps))),
        -_dot(before, steps),
        _needed(limits, (groups,), rows, inner),
        Image(x.shape[2:], steps, stride, dilation, before, across=True) if not is_product(node) else None,
    )
    b = Gather(second, (filters * second.strides[1],), (second.strides[1],), (second.strides[0], *second.strides[2:]))
    flip = at["mode"] == "convolution" and prod(taps) > 1
    # The rows of a flipped filter are its taps in reverse: the program's coordinates count from the other end.
    results = tuple(
        Limit((0,), _unit(rank + 1, d, -1 if flip and d < rank else 1), (), size - 1 if flip and d < rank else 0, size)
        for d, size in enumerate(rows)
    )

    def strides(tensor: Tensor) -> tuple[int, ...]:
        k, c, *spatial = broadcast_strides(tensor, shape)
        return (filters * k, *spatial, c, k)

    return Product((groups,), rows, (filters,), inner, a, b, strides, results=results if flip else ())


def is_apart(node: Node) -> bool:
    """Returns true if each element of an image is under one tap of one window: no two windows share any."""
    at, taps, size = node.attributes, node.inputs[1].shape[2:], node.output.shape[2:]
    if tuple(at["stride"]) != tuple(taps) or any(p for pair in at["padding"] for p in pair):
        return False
    dilated = any(k > 1 and d > 1 for k, d in zip(taps, at["dilation"]))
    return not dilated and size == tuple(n * k for n, k in zip(node.inputs[0].shape[2:], taps))


def _apart(node: Node, first: Operand, second: Operand) -> Product:
    """Rows: (image, *positions).  Columns: channels.  Reduction: filters.  Batch: (groups, *taps)."""
    loss, w = node.inputs
    groups = node.attributes["groups"]
    filters, channels, taps = w.shape[0] // groups, w.shape[1], w.shape[2:]
    own, rest = (filters * first.strides[1], filters * second.strides[0]), tuple(0 for _ in taps)
    a = Gather(first, (own[0], *rest), (first.strides[0], *first.strides[2:]), (first.strides[1],))
    flip = node.attributes["mode"] == "convolution"
    along = tuple(-s if flip else s for s in second.strides[2:])
    start = sum((n - 1) * s for n, s in zip(taps, second.strides[2:])) if flip else 0
    b = Gather(second, (own[1], *along), (second.strides[1],), (second.strides[0],), start)

    def strides(tensor: Tensor) -> tuple[int, ...]:
        n, c, *spatial = broadcast_strides(tensor, node.output.shape)
        return (channels * c, *spatial, n, *(s * k for s, k in zip(spatial, taps)), c)

    return Product((groups, *taps), (loss.shape[0], *loss.shape[2:]), (channels,), (filters,), a, b, strides)


def dgrad(node: Node, first: Operand, second: Operand) -> Product:
    """Rows: (image, *elements of a phase).  Columns: channels.  Reduction: (filters, *taps of a phase, last first).
    Batch: groups, phases of each dimension.
    """
    if is_apart(node):
        return _apart(node, first, second)
    loss, w = node.inputs
    shape, at = node.output.shape, node.attributes
    groups, rank = at["groups"], loss.rank - 2
    filters, channels, taps = w.shape[0] // groups, w.shape[1], w.shape[2:]
    before = tuple(p[0] for p in at["padding"])
    every = [phases(shape[2 + d], taps[d], at["stride"][d], at["dilation"][d], before[d]) for d in range(rank)]
    batch = (groups, *(size for p in every for size in p.sizes))
    rows, inner = (shape[0], *(p.rows for p in every)), (filters, *(p.count for p in every))

    def over(d: int, steps: Sequence[int]) -> tuple[int, ...]:
        """Returns steps over the phases of a dimension as steps over the whole batch."""
        own = [steps if k == d else (0,) * len(p.sizes) for k, p in enumerate(every)]
        return (0, *(step for part in own for step in part))

    steps, along = first.strides[2:], second.strides[2:]
    shifts = tuple(over(d, p.shifts) for d, p in enumerate(every))
    lead = tuple((p.count - 1) * p.dilation - p.shift for p in every)
    limits = [
        Limit(shifts[d], _unit(rank + 1, 1 + d), _unit(rank + 1, 1 + d, p.dilation), -lead[d], loss.shape[2 + d])
        for d, p in enumerate(every)
    ]
    moved = [_dot(column, steps) for column in zip(*shifts)]
    a = Gather(
        first,
        (filters * first.strides[1], *moved[1:]),
        (first.strides[0], *steps),
        (first.strides[1], *(p.dilation * step for p, step in zip(every, steps))),
        -_dot(lead, steps),
        _needed(limits, batch, rows, inner),
        Image(loss.shape[2:], steps, (1,) * rank, tuple(p.dilation for p in every), lead, shifts),
    )
    # The tap of a phase: first + apart * (count - 1 - the reduction's coordinate).
    numbers = [
        Limit(over(d, p.taps), (), _unit(rank + 1, 1 + d, -p.apart), p.tap + p.apart * (p.count - 1), taps[d])
        for d, p in enumerate(every)
    ]
    idle = [Limit(over(d, p.idles), (), (0,) * (rank + 1), p.idle, 1) for d, p in enumerate(every)]
    signs = [-1 if at["mode"] == "convolution" else 1] * rank
    turned = [s * step for s, step in zip(signs, along)]
    b = Gather(
        second,
        (filters * second.strides[0], *(_dot((x.batch[k] for x in numbers), turned) for k in range(1, len(batch)))),
        (second.strides[1],),
        (second.strides[0], *(x.inner[1 + d] * turned[d] for d, x in enumerate(numbers))),
        sum((x.start if s > 0 else x.size - 1 - x.start) * step for x, s, step in zip(numbers, signs, along)),
    )
    places = [Limit((0,) * len(batch), _unit(rank + 1, 0, int(shape[0] > 1)), (), 0, shape[0])]
    places += [
        Limit(over(d, p.onto), _unit(rank + 1, 1 + d, p.stride), (), p.first, shape[2 + d]) for d, p in enumerate(every)
    ]

    def strides(tensor: Tensor) -> tuple[int, ...]:
        n, c, *spatial = broadcast_strides(tensor, shape)
        return (channels * c, *(0 for _ in batch[1:]), n, *spatial, c)

    return Product(
        batch,
        rows,
        (channels,),
        inner,
        a,
        b,
        strides,
        _needed([*numbers, *idle], batch, (), inner),
        tuple(places) if prod(at["stride"]) > 1 else (),
    )


def _needed(
    limits: Iterable[Limit], batch: Sequence[int], outer: Sequence[int], inner: Sequence[int]
) -> tuple[Limit, ...]:
    """Returns the limits that some coordinates in a space of these sizes break: the others need no check."""
    ends = ((x, *x.ends(batch, outer, inner)) for x in limits)
    return tuple(x for x, low, high in ends if not (below(-1, low) and below(high, x.size)))


def of_layouts(node: Node, written: Tensor, target: Target) -> tuple[float, float] | None:
    """Returns the cycles in which a gradient is written as it lies, and in which channels last and turned.

    None if neighbours in memory are neighbours of a tile.  They are not, and so are written one by one, if they belong
    to different phases of an image, or to different taps of a filter.
    """
    if node.op.role not in (Role.DGRAD, Role.WGRAD) or written.rank != node.output.rank:
        return None
    if node.op.role is Role.WGRAD:
        taps = most(written.strides[1])
        apart = most(written.shape[1]) > 1 and taps > 1 and 1 in written.strides[2:]
        each = TAPS_APART * min(1.0, taps * written.dtype.itemsize / SECTOR_BYTES)
    else:
        dims = zip(node.attributes["stride"], written.shape[2:], written.strides[2:])
        apart, each = any(stride > 1 and size > 1 and step == 1 for stride, size, step in dims), PHASES_APART
    turned = target.launch_cycles + 2 * written.nbytes / (STREAMED * target.bytes_per_cycle)
    return (each * written.size / target.sms, turned) if apart else None


def turned_behind(node: Node, written: Tensor, target: Target) -> bool:
    """Returns true if what a gradient writes had better be written with its channels last first.

    That is so where there are so many elements that writing them one by one takes longer than another kernel, which
    turns them.
    """
    cycles = of_layouts(node, written, target)
    return cycles is not None and cycles[0] > cycles[1]


@dataclass(frozen=True)
class Phases:
    """One spatial dimension of an image, split by phase of the stride, and what lies over each part.

    With b the coordinates in ``sizes`` (up to two dimensions of phases) and u the row, 0 to rows - 1:

    element    u * stride + b . onto + first, the place in the image.
    tap j      j * apart + b . taps + tap, for j from 0 to count - 1: those of the filter that ever lie over it.
    position   u - j * dilation + b . shifts + shift, that of the window whose tap j lies over it.
    idle       b . idles + idle: no tap ever lies over the element unless this is 0.
    """

    sizes: tuple[int, ...]
    rows: int
    stride: int
    onto: tuple[int, ...]
    first: int
    apart: int
    count: int
    taps: tuple[int, ...]
    tap: int
    dilation: int
    shifts: tuple[int, ...]
    shift: int
    idles: tuple[int, ...]
    idle: int


def phases(size: int, taps: int, stride: int, dilation: int, before: int) -> Phases:
    """Returns the phases of a dimension of ``size`` elements under windows of so many taps.

    Tap r of the window at position p lies over p * stride + r * dilation - before.  So the elements h = u * stride + e,
    for one e, are under the taps r for which r * dilation - before - e is a multiple of the stride: with g the greatest
    common divisor of stride and dilation, none unless g divides e + before, and then every (stride / g)-th tap.
    """
    g = gcd(stride, dilation)
    apart, step = stride // g, dilation // g
    count = -(-taps // apart)
    inverse = pow(step, -1, apart)
    found = []
    for e in range(stride):
        idle = (e + before) % g
        tap = (e + before) // g * inverse % apart
        found.append((tap, (e + before - idle - tap * dilation) // stride, idle))
    start, follower = found[0], found[min(1, stride - 1)]
    moves = [b - a for a, b in zip(start, follower)]
    if all(f == tuple(a + e * m for a, m in zip(start, moves)) for e, f in enumerate(found)):
        # First tap, position and idleness are linear in e: one dimension of phases.
        tap, shift, idle = start
        every = [(stride, 1, *moves)] if stride > 1 else []
        rows, first = -(-size // stride), 0
    else:
        # Else the first tap t and the rest i = (e + before) mod g are the coordinates: h = u * stride + t * dilation +
        # i - before.  Every t has the same rows, so that some elements are outside of the image.
        tap, idle = 0, 0
        low = shift = -((g - 1 + (apart - 1) * dilation - before) // stride)
        every = [p for p in ((apart, dilation, 1, 0, 0), (g, 1, 0, 0, 1)) if p[0] > 1]
        rows, first = max((size - 1 + before) // stride - low + 1, 0), low * stride - before
    sizes, onto, taps_, shifts, idles = zip(*every) if every else ((), (), (), (), ())
    return Phases(sizes, rows, stride, onto, first, apart, count, taps_, tap, step, shifts, shift, idles, idle)

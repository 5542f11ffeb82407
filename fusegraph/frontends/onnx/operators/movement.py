"""Operators that move elements: shapes, parts and padding."""

from __future__ import annotations

from math import prod

from codegen.sizes import larger, least, smaller
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.frontends.onnx.tensors import checked_shape
from fusegraph.graph import Tensor
from fusegraph.ops.reduction import normal_axes

# ---- shapes


@operator("Reshape")
def reshape(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    """Reshapes: a size of 0 means the input's, unless allowzero is set; -1 means what is left."""
    wanted = call.integers(shape, "the shape")
    if not call["allowzero"]:
        for size in wanted:
            if least(size) == 0 != size:  # where it is 0 it means another one
                call.fixed(size, "the shape")
        for d, size in enumerate(wanted):
            if size == 0 and d >= x.rank:
                raise ModelError(f"shape {wanted[:8]} has a 0 where the input {list(x.shape)} has no dimension")
        wanted = [x.shape[d] if size == 0 else size for d, size in enumerate(wanted)]
    return call.graph.reshape(x, wanted)


@operator("Flatten")
def flatten(call: Call, x: Tensor) -> Tensor:
    axis = call["axis"]
    if not -x.rank <= axis <= x.rank:
        raise ModelError(f"axis {axis} is not one of {list(x.shape)}")
    axis += x.rank if axis < 0 else 0
    return call.graph.reshape(x, [prod(x.shape[:axis]), prod(x.shape[axis:])])


@operator("Squeeze")
def squeeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """Squeezes; before version 13 the axes are an attribute, like those of Unsqueeze and the sizes of Split."""
    return call.graph.squeeze(x, call["axes"] if axes is None else call.integers(axes, "axes"))


@operator("Unsqueeze")
def unsqueeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return call.graph.unsqueeze(x, call["axes"] if axes is None else call.integers(axes, "axes"))


@operator("Transpose")
def transpose(call: Call, x: Tensor) -> Tensor:
    return call.graph.transpose(x, call["perm"])


@operator("Expand")
def expand(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    """Broadcasts the input and the shape to each other."""
    wanted = checked_shape("the shape", call.integers(shape, "the shape"))
    rank = max(x.rank, len(wanted))
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in (x.shape, wanted)]
    return call.graph.broadcast(x, [b if a == 1 else a for a, b in zip(*padded)])


@operator("Tile")
def tile(call: Call, x: Tensor, repeats: Tensor) -> Tensor:
    counts = call.integers(repeats, "repeats")
    if len(counts) != x.rank or min(counts, default=0) < 0:
        raise ModelError(f"repeats are {x.rank} numbers of at least 0, got {counts[:8]}")
    between = [size for n in x.shape for size in (1, n)]
    repeated = [size for r, n in zip(counts, x.shape) for size in (r, n)]
    spread = call.graph.broadcast(call.graph.reshape(x, between), repeated)
    return call.graph.reshape(spread, [r * n for r, n in zip(counts, x.shape)])


@operator("DepthToSpace")
def depth_to_space(call: Call, x: Tensor) -> Tensor:
    """Moves channels to space; CRD is torch's order of channels, DCR has the place in the block before the channel."""
    if x.rank != 4:
        raise ModelError(f"an image (N, C, H, W) is wanted, got {list(x.shape)}")
    block, (images, channels, *sizes) = call["blocksize"], x.shape
    if block < 1 or channels % block**2:
        raise ModelError(f"{channels} channels are no whole number of blocks of {block}^2")
    if call.word("mode", "DCR", "CRD") == "DCR":
        parts = call.graph.reshape(x, [images, block**2, channels // block**2, *sizes])
        x = call.graph.reshape(call.graph.transpose(parts, [0, 2, 1, 3, 4]), x.shape)
    return call.graph.depth_to_space(x, block)


@operator("SpaceToDepth")
def space_to_depth(call: Call, x: Tensor) -> Tensor:
    """Moves space to channels; CRD is torch's order, DCR (also that of older versions) as in DepthToSpace."""
    if x.rank != 4:
        raise ModelError(f"an image (N, C, H, W) is wanted, got {list(x.shape)}")
    y = call.graph.space_to_depth(x, call["blocksize"])
    if call["mode"] == "CRD":
        return y
    parts = call.graph.reshape(y, [x.shape[0], x.shape[1], call["blocksize"] ** 2, *y.shape[2:]])
    return call.graph.reshape(call.graph.transpose(parts, [0, 2, 1, 3, 4]), y.shape)


# ---- parts


@operator("Concat")
def concat(call: Call, *operands: Tensor) -> Tensor:
    return call.graph.concatenate(*operands, axis=call["axis"])


@operator("Split")
def split(call: Call, x: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
    """Splits into parts of the given sizes, or into num_outputs parts, of which the last may be smaller."""
    (axis,) = normal_axes(call["axis"], x.rank)
    if sizes is not None or call["split"]:
        parts = call["split"] if sizes is None else call.integers(sizes, "the sizes")
    else:
        count = call["num_outputs"] or len(call.node.output)
        if count < 1 or count > len(call.node.output):
            raise ModelError(f"num_outputs is {count}, but there are {len(call.node.output)} outputs")
        each = -(-x.shape[axis] // count)
        parts = [larger(smaller(each, x.shape[axis] - n * each), 0) for n in range(count)]
    found: list[Tensor] = call.graph.split(x, parts, axis)
    return found


@operator("Slice")
def slice_(
    call: Call, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    first, last = call.integers(starts, "starts"), call.integers(ends, "ends")
    along = list(range(len(first))) if axes is None else call.integers(axes, "axes")
    step = [1] * len(first) if steps is None else call.integers(steps, "steps")
    if not len(first) == len(last) == len(along) == len(step):
        raise ModelError(
            f"starts, ends, axes and steps have {len(first)}, {len(last)}, {len(along)}, {len(step)} numbers"
        )
    bounds: list[list[int | None]] = [[None] * x.rank for _ in range(3)]
    for a, b, c, axis in zip(first, last, step, along):
        if not -x.rank <= axis < x.rank or bounds[2][axis] is not None:
            raise ModelError(f"axes {along[:8]} are not axes of {list(x.shape)}, each once")
        # An end before the first element would be counted from the end by Python.
        stop = None if c < 0 and b < -x.shape[axis] else b
        bounds[0][axis], bounds[1][axis], bounds[2][axis] = a, stop, c
    return call.graph.slice(x, *bounds)


@operator("Pad")
def pad(call: Call, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
    """Pads; negative padding cuts off."""
    numbers = call.integers(pads, "pads")
    along = list(range(x.rank)) if axes is None else normal_axes_in_order(call.integers(axes, "axes"), x.rank)
    if len(numbers) != 2 * len(along):
        raise ModelError(f"pads has {2 * len(along)} numbers, got {len(numbers)}")
    graph, padding = call.graph, [(0, 0)] * x.rank
    for d, before, after in zip(along, numbers, numbers[len(along) :]):
        padding[d] = (before, after)
    mode = call.word("mode", "constant", "reflect", "edge", "wrap")
    if any(min(each) < 0 for each in padding):
        starts, stops = ([-min(p[end], 0) for p in padding] for end in (0, 1))
        if any(a + b > n for a, b, n in zip(starts, stops, x.shape)):
            raise ModelError(f"padding {padding} cuts off more than there is of {list(x.shape)}")
        x = graph.slice(x, starts, [n - s for n, s in zip(x.shape, stops)])
        padding = [(max(a, 0), max(b, 0)) for a, b in padding]
    if mode == "wrap":
        return _wrapped(call, x, padding)
    fill = 0 if value is None or not value.size else call.number(value, "the value")
    if mode == "constant":
        return graph.pad(x, padding, value=bool(fill) if x.dtype.is_bool else fill)
    return graph.pad(x, padding, "replicate" if mode == "edge" else mode)


def _wrapped(call: Call, x: Tensor, padding: list[tuple[int, int]]) -> Tensor:
    for axis, (before, after) in enumerate(padding):
        if before or after:
            if max(before, after) > x.shape[axis]:
                raise call.refuse("mode wrap, more than once around")
            others = (slice(None),) * axis
            last, first = x[(*others, slice(x.shape[axis] - before, None))], x[(*others, slice(after))]
            x = call.graph.concatenate(last, x, first, axis=axis)
    return x


def normal_axes_in_order(axes: list[int], rank: int) -> list[int]:
    """Returns axes as numbers from 0, in the order given.  Raises AttributeValueError as `normal_axes` does."""
    normal_axes(axes, rank)
    return [axis % rank for axis in axes]

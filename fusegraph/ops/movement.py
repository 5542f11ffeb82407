"""Movement: ops whose elements are elements of their operands, at other coordinates.

Nothing is computed, so results have the operands' bits and dtype.  A kernel that takes such a result reads the operand
at the coordinates that `lowering.coordinates` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from codegen.sizes import Size, larger, least, most, smaller
from fusegraph.dtypes import DType, int32
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.layout import broadcast, check_shape
from fusegraph.ops.base import REQUIRED, Array, Attributes, Kind, Op, Role, TensorType, Types, register
from fusegraph.ops.convert import from_reference
from fusegraph.ops.reduction import normal_axes
from fusegraph.ops.reverse import Reverse

#: Where positions are known, and no element is taken more often, its gradient is a sum of what is read.
MOST_TAKEN = 8
#: mode of a pad -> the mode of `numpy.pad`.
PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


def _movement(
    name: str,
    attributes: Attributes,
    normalize: Callable[[Types, Attributes], dict[str, Any]],
    shape: Callable[[Types, Attributes], Sequence[int]],
    reference: Callable[..., Array],
    doc: str,
    **rest: Any,
) -> None:
    """Registers a movement op; ``shape`` is that of the result, whose dtype is the first operand's."""

    def infer(types: Types, values: Attributes) -> TensorType:
        return TensorType(tuple(shape(types, values)), types[0].dtype)

    register(
        Op(
            name=name,
            kind=Kind.MOVEMENT,
            role=Role(name),
            operands=rest.pop("operands", ("x",)),
            attributes=attributes,
            normalize=normalize,
            infer=infer,
            reference=reference,
            ulps=0,
            doc=doc,
            **rest,
        )
    )


# ---- transpose, reshape, broadcast


def _perm(types: Types, values: Attributes) -> dict[str, Any]:
    rank = len(types[0].shape)
    if values["perm"] is None:
        return {"perm": tuple(reversed(range(rank)))}
    given = values["perm"]
    if any(not -rank <= d < rank for d in given) or sorted(d % rank for d in given) != list(range(rank)):
        raise AttributeValueError(f"perm has each of the {rank} dimensions once, got {given}")
    return {"perm": tuple(d % rank for d in given)}


_movement(
    "transpose",
    {"perm": None},
    _perm,
    lambda types, at: [types[0].shape[d] for d in at["perm"]],
    lambda x, perm: np.transpose(x, perm),
    """The dimensions in another order: dimension d of the result is dimension perm[d] of the operand (None: in
    reverse).""",
    cudnn="transpose",
    gradient=lambda at, x, perm: at.graph.transpose(at.loss, sorted(range(x.rank), key=perm.__getitem__)),
)


def _new_shape(types: Types, values: Attributes) -> dict[str, Any]:
    size, given = prod(types[0].shape), list(values["shape"])
    open_ = [d for d, n in enumerate(given) if n == -1]
    if len(open_) > 1:
        raise AttributeValueError(f"at most one size is -1, got {given}")
    if open_:
        rest = prod(n for n in given if n != -1)
        if rest <= 0 or size % rest:
            raise ShapeError(f"{size} elements do not fit the shape {given}")
        given[open_[0]] = size // rest
    shape = check_shape(given)
    if prod(shape) != size:
        raise ShapeError(f"{size} elements do not fit the shape {list(shape)}, which has {prod(shape)}")
    return {"shape": shape}


_movement(
    "reshape",
    {"shape": REQUIRED},
    _new_shape,
    lambda _, at: at["shape"],
    lambda x, shape: np.reshape(x, shape),
    """The same elements, in row-major order of the logical dimensions, in another shape; one size may be -1: as many
    as are left.""",
    cudnn="reshape",
    gradient=lambda at, x, shape: at.graph.reshape(at.loss, x.shape),
)


def _target(types: Types, values: Attributes) -> dict[str, Any]:
    shape, target = types[0].shape, check_shape(values["shape"])
    if len(target) < len(shape) or broadcast([shape, target]) != target:
        raise ShapeError(f"{list(shape)} does not broadcast to {list(target)}")
    return {"shape": target}


_movement(
    "broadcast",
    {"shape": REQUIRED},
    _target,
    lambda _, at: at["shape"],
    lambda x, shape: np.broadcast_to(x, shape),
    """The tensor repeated to a shape: dimensions of size 1, and new ones in front.""",
    gradient=lambda at, x, shape: at.loss,  # which is summed up
)


# ---- slice, pad, concatenate


def _per_dimension(what: str, value: tuple[int | None, ...] | None, rank: int) -> tuple[int | None, ...]:
    """Returns one entry a dimension, or None (for all of them)."""
    if value is not None and len(value) != rank:
        raise AttributeValueError(f"{what} have one entry for each of the {rank} dimensions, got {value!r}")
    return (None,) * rank if value is None else value


def _bounds(types: Types, values: Attributes) -> dict[str, Any]:
    shape = types[0].shape
    given = [_per_dimension(key, values[key], len(shape)) for key in ("starts", "stops", "steps")]
    starts, stops, steps = [], [], []
    for size, start, stop, step in zip(shape, *given):
        if step == 0:
            raise AttributeValueError(f"steps are not 0, got {values['steps']!r}")
        first, last, step = ends(size, start, stop, step)
        count = _count(first, last, step)
        starts.append(first if count else 0)
        steps.append(step)
        if not isinstance(count, Size) and (count == 0 or not isinstance(last, Size)):
            last = starts[-1] + count * step
            stops.append(last if last >= 0 else None)
        else:  # what lies in front of the first element at some sizes is counted from the end
            stops.append(last if least(last) >= 0 else last - size)
    return {"starts": tuple(starts), "stops": tuple(stops), "steps": tuple(steps)}


def _sliced(types: Types, values: Attributes) -> list[int]:
    every = zip(types[0].shape, values["starts"], values["stops"], values["steps"])
    return [part(*each)[1] for each in every]


def part(size: int, start: int | None, stop: int | None, step: int | None) -> tuple[int, int, int]:
    """Returns the first position of a Python slice of so many elements, the number of positions, and the step."""
    first, last, step = ends(size, start, stop, step)
    return first, _count(first, last, step), step


def ends(size: int, start: int | None, stop: int | None, step: int | None) -> tuple[int, int, int]:
    """Returns the first position of a Python slice of so many elements, where it stops, and the step.

    It is `slice.indices` for sizes that vary, too.
    """
    step = 1 if step is None else step
    low, high = (0, size) if step > 0 else (-1, size - 1)
    single = start is not None and stop is not None and start >= 0 and stop - start == step == 1  # an index
    own = single or isinstance(start, Size) or isinstance(stop, Size)

    def place(given: int) -> int:
        if given < 0 <= most(given):
            raise AttributeValueError(f"{given} is negative at some sizes, not at all: it counts from either end")
        found = given + size if given < 0 else given
        if (single or isinstance(given, Size)) and low <= found <= high:  # the program says it is there
            return found
        return smaller(larger(found, low), high)

    first = (low if step > 0 else high) if start is None else place(start)
    last = (high if step > 0 else low) if stop is None else place(stop)
    if not own and least((last - first) * step) < 0:
        last = larger(last, first) if step > 0 else smaller(last, first)
    if isinstance(first, Size) and start is not None and start < 0 < least(size) and least(first) < 0:
        # There is nothing to take where it is -1.
        moved = larger(first, 0)
        first, last = moved, last + moved - first
    return first, last, step


def _count(first: int, last: int, step: int) -> int:
    count = -((first - last) // step if step > 0 else (last - first) // -step)
    return count if count >= 0 else larger(count, 0)


def spread_out(at: Reverse, loss: Any, shape: Sequence[int], starts: Sequence[int], steps: Sequence[int]) -> Any:
    """Returns zeros of a shape with the elements of loss at every steps[d]-th position from starts[d] on."""
    g = at.graph
    if not loss.size:
        return g.broadcast(g.constant(0, dtype=loss.dtype), shape)
    if backwards := [d for d, step in enumerate(steps) if step < 0]:
        loss = g.flip(loss, backwards)
    counts = loss.shape
    first = [start + min(step, 0) * (n - 1) for start, step, n in zip(starts, steps, counts)]
    apart = [abs(step) if n > 1 else 1 for step, n in zip(steps, counts)]
    for d, step in enumerate(apart):
        if step > 1:  # each element with the zeros behind it, but the last
            loss = g.pad(g.unsqueeze(loss, d + 1), [(0, (step - 1) * (axis == d + 1)) for axis in range(loss.rank + 1)])
            loss = g.reshape(loss, [*loss.shape[:d], loss.shape[d] * step, *loss.shape[d + 2 :]])
            loss = g.slice(loss, stops=[n - (step - 1) * (axis == d) for axis, n in enumerate(loss.shape)])
    padding = [(start, n - start - m) for start, n, m in zip(first, shape, loss.shape)]
    return g.pad(loss, padding) if any(map(any, padding)) else loss


_movement(
    "slice",
    {"starts": None, "stops": None, "steps": None},
    _bounds,
    _sliced,
    lambda x, starts, stops, steps: x[tuple(slice(*each) for each in zip(starts, stops, steps))],
    """Every steps[d]-th element from starts[d] up to stops[d] of each dimension, as Python's slices: None is all there
    is, negative numbers count from the end, a negative step goes backwards.""",
    cudnn="slice",
    keeps_layout=True,
    gradient=lambda at, x, starts, stops, steps: spread_out(at, at.loss, x.shape, starts, steps),
)


def _exact(value: Any, dtype: DType) -> float | int | bool:
    """Returns a number as a dtype holds it."""
    if dtype.is_bool:
        return bool(value)
    if dtype.is_float:
        return float(from_reference(np.asarray(float(value)), dtype).astype(np.float64))
    if value != value or value != int(value) or not dtype.min <= int(value) <= dtype.max:
        raise AttributeValueError(f"value = {value!r} is no {dtype}, an integer in [{dtype.min}, {dtype.max}]")
    return int(value)


def _padding(types: Types, values: Attributes) -> dict[str, Any]:
    shape, given, mode = types[0].shape, values["padding"], values["mode"]
    if isinstance(given, int):
        given = [given] * len(shape)
    if len(given) != len(shape):
        raise AttributeValueError(
            f"padding is a number, or for each of the {len(shape)} dimensions one or (before, after), got {given!r}"
        )
    pairs = []
    for size, each in zip(shape, given):
        both = (each, each) if isinstance(each, int) else each
        if len(both) != 2:
            raise AttributeValueError(f"padding of a dimension is a number or (before, after), got {each!r}")
        before, after = both
        if min(before, after) < 0:
            raise AttributeValueError(f"padding is not negative, got {each!r}; slice what is to go")
        most = max(size - 1, 0) if mode == "reflect" else 0 if mode == "replicate" and size == 0 else before + after
        if max(before, after) > most and mode != "constant":
            raise ShapeError(f"a dimension of size {size} has too few elements for a {mode} padding of {each!r}")
        pairs.append((before, after))
    return {"padding": tuple(pairs), "mode": mode, "value": _exact(values["value"], types[0].dtype)}


def _pad_reference(x: Array, padding: Any, mode: str, value: Any) -> Array:
    if not x.ndim:
        return x
    keys = {"constant_values": value} if mode == "constant" else {}
    return np.asarray(np.pad(x, padding, PAD_MODES[mode], **keys))  # type: ignore[call-overload]


def _by_padded(at: Reverse, x: Any, padding: Any, mode: str, value: Any) -> Any:
    """What is padded with other elements of x gives its gradient back to these, one dimension after the other."""
    g, total = at.graph, at.loss
    for axis, ((before, after), size) in enumerate(zip(padding, x.shape)):
        if not before and not after:
            continue

        def cut(start: int, stop: int, of: Any = total, axis: int = axis) -> Any:
            limits = [(start, stop) if d == axis else (0, n) for d, n in enumerate(of.shape)]
            return g.slice(of, *zip(*limits))

        def put(edge: Any, start: int, axis: int = axis, size: int = size) -> Any:
            around = (start, size - start - edge.shape[axis])
            return g.pad(edge, [around if d == axis else (0, 0) for d in range(edge.rank)])

        total, edges = cut(before, before + size), (cut(0, before), cut(before + size, before + size + after))
        if mode == "constant":
            continue
        for edge, count, first in zip(edges, (before, after), (1, size - 1 - after)):
            if count and mode == "reflect":
                total = g.add(total, put(g.flip(edge, axis), first))
            elif count:
                total = g.add(total, put(g.reduction(edge, "add", axis), 0 if edge is edges[0] else size - 1))
    return total


_movement(
    "pad",
    {"padding": REQUIRED, "mode": "constant", "value": 0},
    _padding,
    lambda types, at: [size + before + after for size, (before, after) in zip(types[0].shape, at["padding"])],
    _pad_reference,
    """Elements around the tensor: padding is one number, or for each dimension one or (before, after).

    mode is constant (value, rounded to the tensor's dtype), reflect (as in a mirror on the outermost elements, which
    are not repeated; the padding is smaller than the dimension) or replicate (the outermost elements again).""",
    words={"mode": tuple(PAD_MODES)},
    keeps_layout=True,
    gradient=_by_padded,
)


def _axis(types: Types, values: Attributes) -> dict[str, Any]:
    if not types[0].shape:
        raise ShapeError("a tensor of rank 0 has no axis")
    first = types[0]
    for other in types[1:]:
        if other.dtype != first.dtype:
            raise DTypeError(f"tensors of one dtype are joined, got {first.dtype} and {other.dtype}; cast one")
        if len(other.shape) != len(first.shape):
            raise ShapeError(f"shapes {list(first.shape)} and {list(other.shape)} have different ranks")
    (axis,) = normal_axes(values["axis"], len(first.shape))
    for other in types[1:]:
        if any(a != b for d, (a, b) in enumerate(zip(first.shape, other.shape)) if d != axis):
            raise ShapeError(f"shapes {list(first.shape)} and {list(other.shape)} differ beyond axis {axis}")
    return {"axis": axis}


def _joined(types: Types, values: Attributes) -> list[int]:
    shape = list(types[0].shape)
    shape[values["axis"]] = sum(t.shape[values["axis"]] for t in types)
    return shape


def _by_joined(at: Reverse, *xs: Any, axis: int) -> Any:
    ends = list(accumulate(x.shape[axis] for x in xs))

    def part_of(x: Any, end: int) -> Any:
        limits = [(end - n, end) if d == axis else (0, n) for d, n in enumerate(x.shape)]
        return at.graph.slice(at.loss, *zip(*limits))

    return tuple(partial(part_of, x, end) for x, end in zip(xs, ends))


_movement(
    "concatenate",
    {"axis": 0},
    _axis,
    _joined,
    lambda *xs, axis: np.concatenate(xs, axis),
    """Tensors of one dtype behind one another along an axis; their other sizes are equal.""",
    cudnn="concatenate",
    variadic=True,
    keeps_layout=True,
    gradient=_by_joined,
)


# ---- gather


def _gather(types: Types, values: Attributes) -> dict[str, Any]:
    x, index = types
    if not index.dtype.is_int:
        raise DTypeError(f"index holds integers, got {index.dtype}")
    if not x.shape:
        raise ShapeError("a tensor of rank 0 has no axis")
    (axis,) = normal_axes(values["axis"], len(x.shape))
    if x.shape[axis] == 0 and 0 not in index.shape:
        raise ShapeError(f"axis {axis} of x {list(x.shape)} has no elements to take")
    return {"axis": axis}


def _gathered(types: Types, values: Attributes) -> tuple[int, ...]:
    (x, index), axis = types, values["axis"]
    return x.shape[:axis] + index.shape + x.shape[axis + 1 :]


def _take(x: Array, index: Array, axis: int) -> Array:
    if not index.size:
        return np.zeros(x.shape[:axis] + index.shape + x.shape[axis + 1 :], x.dtype)
    return np.asarray(np.take(x, index.astype(np.int64), axis, mode="clip"))


def _by_taken(at: Reverse, x: Any, index: Any, axis: int) -> Any:
    """Elements that were taken several times sum up what comes back."""
    g, (before, behind) = at.graph, (x.shape[:axis], x.shape[axis + 1 :])
    if index.dtype.itemsize < 4:
        index = g.cast(index, int32)
    loss = g.reshape(at.loss, [*before, index.size, *behind])
    if index.value is not None and not isinstance(x.shape[axis], Size):
        taken = np.clip(index.value.reshape(-1).astype(np.int64), 0, x.shape[axis] - 1)
        counts = np.bincount(taken, minlength=x.shape[axis])
        if 0 < counts.max(initial=0) <= MOST_TAKEN:
            return _gathered_back(at, loss, taken, counts, axis)
    # one line along the axis, as a scatter has it, of which nothing is outside
    line = g.clamp(g.reshape(index, [*(1 for _ in before), index.size, *(1 for _ in behind)]), 0, x.shape[axis] - 1)
    zeros = g.broadcast(g.constant(0, dtype=loss.dtype), x.shape)
    return g.scatter(zeros, line, loss, axis, "add")


def _gathered_back(at: Reverse, loss: Any, taken: Array, counts: Array, axis: int) -> Any:
    """Returns, for each element, the sum of the losses at the places to which it was taken, which are known."""
    g, order, total = at.graph, np.argsort(taken, kind="stable"), None
    first = np.cumsum(counts) - counts
    along = [counts.size if d == axis else 1 for d in range(loss.rank)]
    for k in range(counts.max()):
        place = order[np.minimum(first + k, order.size - 1)].astype(np.int32)
        part = g.gather(loss, place, axis)
        if not (counts > k).all():
            part = g.binary_select(part, 0.0, (counts > k).reshape(along))
        total = part if total is None else g.add(total, part)
    return total


_movement(
    "gather",
    {"axis": 0},
    _gather,
    _gathered,
    _take,
    """The elements of x at the positions along an axis that index says; the index's dimensions take the axis's place,
    as in `numpy.take`.  Positions outside of the axis are clamped to its ends (negative ones to 0).""",
    operands=("x", "index"),
    integers=("index",),
    gradient=_by_taken,
)

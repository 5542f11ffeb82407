"""``scatter``: puts updates at places of a tensor that an index gives, one by one or combined.

The result is the same whatever the order in which the updates come: sums, extremes and "the last one" are written as
combinations of integers (`ops.scatter_parts`), which atomics make in any order, and the kernels are linear in the
number of updates and of places.  An extreme is the largest of unsigned integers in the floats' order.  The last update
is the one with the largest position.  A sum of floats is one of multiples of a unit that the largest exponent at each
place decides, with more digits than the floats have: it is exact but for digits far below the last one of a float.
Only products depend on the order: one thread walks all updates that share their other coordinates.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from codegen.combiners import ADD, MAX, MIN, MUL, Combiner
from codegen.sizes import below, most, varies
from fusegraph.dtypes import int32, int64, uint64
from fusegraph.errors import DTypeError, ShapeError
from fusegraph.layout import packed_strides
from fusegraph.ops.base import Array, Attributes, Kind, Op, Role, TensorType, Types, register
from fusegraph.ops.composite import Writing, single_axis
from fusegraph.ops.modes import product_slope
from fusegraph.ops.reverse import Reverse
from fusegraph.ops.scatter_parts import ACCUMULATE, EXPONENT, FIXED, FLOATING, ORDER, ORDERED

Reduction: TypeAlias = Literal["none", "add", "mul", "max", "min", "mean"]
#: reduction -> how updates are combined; None: the last one stays.
REDUCTIONS: dict[str, Combiner | None] = {"none": None, "add": ADD, "mul": MUL, "max": MAX, "min": MIN, "mean": ADD}
#: Up to this many updates along the axis are compared with each place, which takes one kernel of pointwise ops.
FEW_UPDATES = 4


def _normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    if not types[0].shape:
        raise ShapeError("a tensor of rank 0 has no axis")
    return {**attributes, "axis": single_axis(attributes["axis"], types[0].shape)}


def _infer(types: Types, attributes: Attributes) -> TensorType:
    x, index, updates = types
    axis = attributes["axis"]
    if not index.dtype.is_int:
        raise DTypeError(f"index holds integers, got {index.dtype}")
    if updates.dtype != x.dtype:
        raise DTypeError(f"updates have the dtype of x, {x.dtype}, got {updates.dtype}")
    if attributes["reduction"] == "mean" and not x.dtype.is_float:
        raise DTypeError(f"the mean of {x.dtype} is not exact; cast to a float")
    if not len(x.shape) == len(index.shape) == len(updates.shape):
        raise ShapeError(f"x, index and updates have one rank, got {list(x.shape)}, {list(index.shape)} and more")
    for d, (n, i, u) in enumerate(zip(x.shape, index.shape, updates.shape)):
        if i != u and (i != 1 or d == axis):
            raise ShapeError(f"dimension {d} of index has {i} elements, that of updates has {u}")
        if u > n and d != axis:
            raise ShapeError(f"dimension {d} of updates has {u} elements, more than the {n} of x")
    return x


def _reference(
    x: Array, index: Array, updates: Array, axis: int, reduction: str = "none", include_self: bool = True
) -> Array:
    at = np.broadcast_to(index, updates.shape)
    inside = (at >= 0) & (at < x.shape[axis])
    places = list(np.nonzero(inside))
    places[axis] = at[inside].astype(np.int64)
    where, values = tuple(places), updates[inside]
    y = np.array(x)
    with np.errstate(all="ignore"):
        combiner = REDUCTIONS[reduction]
        if combiner is None:
            # In row-major order, in which the last of those that have a place keeps it: so NumPy assigns.
            y[where] = values
            return y
        if not include_self:
            y[where] = combiner.start(y.dtype)
        combiner.ufunc.at(y, where, values)
        if reduction == "mean":
            count = np.full(x.shape, float(include_self))
            np.add.at(count, where, 1.0)
            y = np.where(count > 0, y / np.maximum(count, 1.0), y)
    return y


def _expand(write: Writing, x: Any, index: Any, updates: Any, axis: int, reduction: str, include_self: bool) -> Any:
    if not x.size or not updates.size:
        return x
    dtype = x.dtype
    if not dtype.is_float and dtype not in (int32, int64):
        wide = int32 if dtype.itemsize < 4 else int64
        x, updates = write("identity", "in", x, dtype=wide), write("identity", "put", updates, dtype=wide)
        if dtype == uint64 and reduction in ("max", "min"):  # signed numbers in the order of the unsigned ones
            x, updates = (write("bitwise_xor", "signed", t, int(int64.min)) for t in (x, updates))
        if dtype.is_bool:
            reduction = {"add": "max", "mul": "min"}.get(reduction, reduction)
    found = _Put(write, x, index, updates, axis, reduction, include_self).result()
    if dtype.is_bool:
        return write("cmp_neq", "", found, 0)
    if dtype == uint64 and reduction in ("max", "min"):
        found = write("bitwise_xor", "unsigned", found, int(int64.min))
    return found if found.dtype == dtype else write("identity", "", found, dtype=dtype)


class _Put:
    """Writes one scatter as the ops that it is made of."""

    def __init__(
        self, write: Writing, x: Any, index: Any, updates: Any, axis: int, reduction: str, include_self: bool
    ) -> None:
        self.write, self.x, self.updates, self.axis = write, x, updates, axis
        self.reduction, self.include_self, self.wide = reduction, include_self, x.dtype.itemsize == 8
        self.size, self.count = x.shape[axis], updates.shape[axis]
        #: elements of x behind those that updates have in the other dimensions
        self.beyond = [(0, 0 if d == axis else n - u) for d, (n, u) in enumerate(zip(x.shape, updates.shape))]
        if index.dtype not in (int32, int64):
            index = write("identity", "wide index", index, dtype=int32 if index.dtype.itemsize < 4 else int64)
        if any(after for _, after in self.beyond) and index.shape != updates.shape:
            index = write("broadcast", "indices", index, shape=updates.shape)
        self.index = index

    def result(self) -> Any:
        few = not varies(self.count) and self.count <= FEW_UPDATES
        few = few and self.include_self and self.reduction != "mean"
        return self._one_by_one() if few else getattr(self, f"_{self.reduction}")()

    # ---- a few updates

    def _one_by_one(self) -> Any:
        write, y = self.write, self.x
        index, updates = self._padded(self.index, -1), self._padded(self.updates, 0)
        place = write("gen_index", "place", self.x, axis=self.axis)
        for k in range(self.count):
            at, value = (self._part(t, k) for t in (index, updates))
            if self.reduction != "none":
                value = write(self.reduction, f"with {k}", y, value)
            y = write("binary_select", f"after {k}", value, y, write("cmp_eq", f"hit {k}", at, place))
        return y

    def _part(self, tensor: Any, k: int) -> Any:
        if self.count == 1:
            return tensor
        starts, stops = ([n if d == self.axis else None for d in range(tensor.rank)] for n in (k, k + 1))
        return self.write("slice", f"{tensor.name} {k}", tensor, starts=starts, stops=stops)

    def _padded(self, tensor: Any, value: float) -> Any:
        if not any(after for _, after in self.beyond):
            return tensor
        return self.write("pad", f"{tensor.name} everywhere", tensor, padding=self.beyond, value=value)

    # ---- which updates a place has

    @cached_property
    def _numbers(self) -> Any:
        """The number of each update along the axis, from 1 on."""
        return self.write("add", "number", self.write("gen_index", "position", self.index, axis=self.axis), 1)

    @cached_property
    def _last_inside(self) -> Any:
        """For each place the number of its last update, 0 for none, where updates may be."""
        return self._accumulated("last", self.index, self._numbers, self.size, "most")

    @cached_property
    def _last(self) -> Any:
        return self._padded(self._last_inside, 0)

    @cached_property
    def _is_met(self) -> Any:
        """Whether a place has an update."""
        return self.write("cmp_gt", "met", self._last, 0)

    def _accumulated(self, part: str, index: Any, values: Any, size: int, combine: str) -> Any:
        return self.write(ACCUMULATE, part, index, values, size=size, axis=self.axis, combine=combine)

    def _taken(self, part: str, source: Any, at: Any) -> Any:
        """Returns the elements of source at positions along the axis; other dimensions of ``at`` may be 1."""
        write, axis = self.write, self.axis
        if all(n == 1 for d, n in enumerate(at.shape) if d != axis):
            line = at if at.rank == 1 else write("reshape", f"{part} line", at, shape=[-1])
            return write("gather", part, source, line, axis=axis)
        shape = [at.shape[axis] if d == axis else max(n, m) for d, (n, m) in enumerate(zip(source.shape, at.shape))]
        if at.shape != tuple(shape):
            at = write("broadcast", f"{part} at", at, shape=shape)
        wide = int64 if most(source.size) > int32.max else int32
        position = at if at.dtype == wide else write("identity", f"{part} wide", at, dtype=wide)
        steps = packed_strides(source.shape)
        if steps[axis] != 1:
            position = write("mul", f"{part} step", position, steps[axis])
        for d, n in enumerate(source.shape):
            if d != axis and n > 1:
                own = write("gen_index", f"{part} coordinate {d}", at, axis=d)
                own = own if wide == int32 else write("identity", f"{part} wide {d}", own, dtype=wide)
                own = write("mul", f"{part} offset {d}", own, steps[d]) if steps[d] != 1 else own
                position = write("add", f"{part} position {d}", position, own)
        return write("gather", part, write("reshape", f"{part} flat", source, shape=[-1]), position, axis=0)

    # ---- values that are combined at each place

    @cached_property
    def _by_update(self) -> bool:
        """Whether there is a slot for each update: where these are fewer than places, at all sizes."""
        return below(self.count, self.size)

    @cached_property
    def _slots(self) -> tuple[Any, int]:
        """The slot in which each update is combined, and the number of slots.

        Slots are the places of the axis or, if there are fewer updates, one for each update: updates of one place then
        share the slot of the last of them.
        """
        if not self._by_update:
            return self.index, self.size
        write = self.write
        own = write("sub", "slot", self._taken("last there", self._last_inside, self.index), 1)
        begun = write("cmp_ge", "not before", self.index, 0)
        inside = write("logical_and", "inside", begun, write("cmp_lt", "not behind", self.index, self.size))
        return write("binary_select", "slot inside", own, -1, inside), self.count

    def _combined(self, part: str, values: Any, combine: str) -> Any:
        """Returns the values that are put into each slot, combined."""
        index, size = self._slots
        return self._accumulated(part, index, values, size, combine)

    def _at_places(self, combined: Any, none: float) -> Any:
        """Returns what was combined in slots, at every place of x; ``none`` where a place has no update."""
        if self._by_update:
            at = self.write("sub", f"{combined.name} slot", self._last_inside, 1)
            there = self._taken(f"{combined.name} there", combined, at)
            met = self.write("cmp_gt", f"{combined.name} met", self._last_inside, 0)
            combined = self.write("binary_select", f"{combined.name} if any", there, none, met)
        return self._padded(combined, none)

    @cached_property
    def _own(self) -> Any:
        """What stands for x when updates are combined with it."""
        if self.include_self:
            return self.x
        combiner = REDUCTIONS[self.reduction]
        assert combiner is not None
        neutral = combiner.start(np.dtype(np.float64) if self.x.dtype.is_float else self.x.dtype.numpy)
        return self.write("binary_select", "own", neutral, self.x, self._is_met)

    # ---- reductions

    def _none(self) -> Any:
        at = self.write("sub", "winner", self._last_inside, 1)
        found = self._padded(self._taken("found", self.updates, at), 0)
        return self.write("binary_select", "put", found, self.x, self._is_met)

    def _max(self) -> Any:
        down = self.reduction == "min"
        keys = self._combined("extreme", self.write(ORDER, "key", self.updates, down=down, wide=self.wide), "most")
        return self.write(ORDERED, "", self._own, self._at_places(keys, 0), down=down, wide=self.wide)

    _min = _max

    def _mul(self) -> Any:
        found = self._at_places(self._combined("product", self.updates, "mul"), 1)
        return self.write("mul", "", self._own, found)

    def _add(self) -> Any:
        write, updates = self.write, self.updates
        if updates.dtype.is_int:
            return write("add", "", self._own, self._at_places(self._combined("sum", updates, "add"), 0))
        # Each update is less than 2 ** places: a sum of ``count`` of them does not overflow.
        places, wide = 62 - most(self.count).bit_length(), self.wide
        scale = self._combined("scale", write(EXPONENT, "exponent", updates, wide=wide), "most")
        own = self._taken("own scale", scale, self._slots[0])
        sums = [
            self._combined(
                part, write(FIXED, f"fixed {part}", updates, own, places=places, rest=rest, wide=wide), "add"
            )
            for part, rest in (("sum", False), ("rest", True))[: 1 + wide]
        ]
        operands = [self._at_places(t, 0) for t in (scale, *sums)]
        return write(FLOATING, "total", self._own, *operands, places=places, wide=wide)

    def _mean(self) -> Any:
        write = self.write
        ones = write("min", "one", self._numbers, 1)
        count = self._padded(self._accumulated("count", self.index, ones, self.size, "add"), 0)
        all_ = write("add", "all", count, 1) if self.include_self else write("max", "at least one", count, 1)
        return write("div", "", self._add(), write("identity", "number of all", all_, dtype=self.x.dtype))


# ---- gradients


def _gradient(
    at: Reverse, x: Any, index: Any, updates: Any, axis: int, reduction: str, include_self: bool
) -> tuple[Any, ...]:
    """The gradients by x and by the updates: losses at their places, times the slope of what is combined there."""
    if not x.size or not updates.size:
        return (at.loss,)
    g, size = at.graph, x.shape[axis]
    index = g.cast(index, int32) if index.dtype.itemsize < 4 else index
    index = index if index.shape == updates.shape else g.broadcast(index, updates.shape)
    inside = g.logical_and(g.cmp_ge(index, 0), g.cmp_lt(index, size))

    def there(places: Any) -> Any:
        """Returns what is at the places of the updates; anything for those that are outside."""
        return g.take_along_axis(places, index, axis)

    def put(start: float, values: Any, how: str) -> Any:
        """Combines values, of which there is one for each update, with a number at every place."""
        begin = g.broadcast(g.constant(start, dtype=values.dtype), x.shape)
        return g.scatter(begin, index, values, axis, how)

    def count(of: Any) -> Any:
        return put(0, g.cast(of, int32), "add")

    if reduction == "none":
        number = g.gen_index(updates, axis)
        last = put(-1, number, "max")
        include_self = False  # only where nothing is put
        slopes = 1.0, g.cast(g.cmp_eq(number, there(last)), at.loss.dtype)
    elif reduction == "add":
        slopes = 1.0, 1.0
    elif reduction == "mean":
        share = g.cast(g.max(g.add(count(inside), int(include_self)), 1), at.loss.dtype)
        slopes = g.reciprocal(share), g.reciprocal(there(share))
    elif reduction == "mul":
        own, each = (g.cmp_eq(t, 0) for t in (x, updates))
        others, zeros = put(1.0, g.binary_select(1.0, updates, each), "mul"), count(each)
        if include_self:
            others, zeros = others * g.binary_select(1.0, x, own), g.add(zeros, g.cast(own, int32))
        slopes = product_slope(at, x, others, zeros), product_slope(at, updates, there(others), there(zeros))
    else:  # those that equal the extreme share
        own, each = g.cmp_eq(x, at.y), g.cmp_eq(updates, there(at.y))
        equals = count(each)
        equals = g.add(equals, g.cast(own, int32)) if include_self else equals
        share = g.reciprocal(g.cast(g.max(equals, 1), at.loss.dtype))
        slopes = g.binary_select(share, 0.0, own), g.binary_select(there(share), 0.0, each)

    def by_x() -> Any:
        return at.loss * slopes[0] if include_self else g.binary_select(at.loss, 0.0, g.cmp_eq(count(inside), 0))

    return by_x, None, lambda: g.binary_select(there(at.loss) * slopes[1], 0.0, inside)


register(
    Op(
        name="scatter",
        kind=Kind.SCATTER,
        role=Role.PUT,
        operands=("x", "index", "updates"),
        attributes={"axis": 0, "reduction": "none", "include_self": True},
        words={"reduction": tuple(REDUCTIONS)},
        integers=("index",),
        normalize=_normalize,
        infer=_infer,
        reference=_reference,
        expand=_expand,
        gradient=_gradient,
        doc="""x with updates put at the positions in index along an axis: element [i, index[i, j, k], k] of the result
        is updates[i, j, k] for axis 1, as in ONNX's ScatterElements and torch's scatter.

        x and updates have one dtype and one rank, the index is of integers.  updates' other sizes are at most x's; the
        index has updates' shape, or 1 in other dimensions than the axis, where it is then the same for all.  An index
        that is not in [0, size of the axis) is left out: nothing is put.

        reduction says what becomes of several updates of a place: none, the last one in the order of their positions
        along the axis is put; add, mul, max, min or mean (of floats), all of them and, unless include_self is False,
        the element that is there are combined.  Where nothing is put x stays.  NaN where one is NaN.  For bool add and
        max are "or", mul and min "and"; sums and products of integers wrap around.

        Time and memory are linear in the numbers of updates and elements, and the same inputs give the same bits.
        Updates are combined by as many threads as there are, with integer atomics, for which a sum of floats needs 12
        bytes (of float64: 20) for each place or update, whichever are fewer; products, by one thread for those that
        share their other coordinates.  Raises DTypeError, ShapeError, AttributeValueError.""",
    )
)

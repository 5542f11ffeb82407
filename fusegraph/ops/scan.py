"""Running sums, products and extremes along an axis: one op for each way to combine, of one table."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from codegen.combiners import Combiner
from fusegraph.dtypes import BY_NUMPY, DType, int32, int64, sum_dtype, uint32
from fusegraph.errors import DTypeError
from fusegraph.ops.base import Array, Attributes, Kind, Op, TensorType, Types, register
from fusegraph.ops.composite import Writing
from fusegraph.ops.modes import COMBINED, Combined
from fusegraph.ops.reduction import normal_axes, result_dtype
from fusegraph.ops.reverse import Reverse, Rule
from fusegraph.ops.scatter_parts import ORDER


def along(combiner: Combiner, x: Array, axis: int, reverse: bool) -> Array:
    """Returns each element of x combined with all before it or, if ``reverse``, behind it, in x's dtype."""
    turned = np.flip(x, axis) if reverse else x
    with np.errstate(all="ignore"):
        total = combiner.ufunc.accumulate(turned, axis=axis, dtype=x.dtype)
    return np.asarray(np.flip(total, axis) if reverse else total)


def _normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    return {**attributes, "axis": normal_axes(attributes["axis"], len(types[0].shape))[0]}


def _by_sums(at: Reverse, x: Any, axis: int, reverse: bool, dtype: DType | None) -> Any:
    return at.graph.cumsum(at.loss, axis, not reverse)


def _by_products(at: Reverse, x: Any, axis: int, reverse: bool, dtype: DType | None) -> Any:
    """Up to the first 0 it is the sum of loss * y from there on, over x; at the first 0 that without this factor."""
    g = at.graph
    none = g.cmp_eq(x, 0)
    count = g.cumsum(g.cast(none, int32), axis, reverse)
    first = g.logical_and(none, g.cmp_eq(count, 1))
    without = g.cumprod(g.binary_select(1.0, x, first), axis, reverse, dtype=at.y.dtype)

    def summed(y: Any) -> Any:
        return g.cumsum(at.loss * y, axis, not reverse)

    behind = g.binary_select(summed(without), 0.0, first)
    return g.binary_select(summed(at.y) / x, behind, g.cmp_eq(count, 0))


def _by_extremes(at: Reverse, x: Any, axis: int, reverse: bool) -> Any:
    g = at.graph
    turned, loss = (g.flip(t, axis) if reverse else t for t in (x, at.loss))
    index = getattr(g, f"{at.name}_index")(turned, axis, int32)
    zeros = g.broadcast(g.constant(0, dtype=loss.dtype), x.shape)
    total = g.scatter(zeros, index, loss, axis, "add")
    return g.flip(total, axis) if reverse else total


def _by_exponentials(at: Reverse, x: Any, axis: int, reverse: bool) -> Any:
    """exp(x) times the sum of loss / exp(y) from there on, in logarithms, those of losses of either sign apart."""
    g = at.graph

    def part(loss: Any) -> Any:
        exists = g.logical_and(g.cmp_gt(loss, 0), g.cmp_gt(at.y, -inf))
        share = g.binary_select(g.log(loss) - at.y, -inf, exists)
        return g.exp(g.logcumsumexp(share, axis, not reverse) + x)

    return part(at.loss) - part(g.neg(at.loss))


def _register(name: str, mode: Combined, makes: str, doc: str, gradient: Rule) -> None:
    combiner, typed = mode.combiner, mode.combiner.widens

    def infer(types: Types, attributes: Attributes) -> TensorType:
        (x,) = types
        if mode.floats and not x.dtype.is_float:
            raise DTypeError(f"{name} takes floats, got {x.dtype}")
        return TensorType(x.shape, result_dtype(x, mode, attributes.get("dtype")))

    def reference(x: Array, axis: int, reverse: bool, dtype: DType | None = None) -> Array:
        whole = x.dtype.kind in "iu" and typed
        total = along(combiner, x.astype(np.int64) if whole else x, axis, reverse)
        source = BY_NUMPY[x.dtype]
        return total.astype(sum_dtype(source, dtype or source).numpy) if whole else total

    register(
        Op(
            name=name,
            kind=Kind.SCAN,
            operands=("x",),
            attributes={"axis": -1, "reverse": False, **({"dtype": None} if typed else {})},
            normalize=_normalize,
            infer=infer,
            reference=reference,
            gradient=gradient,
            combiner=combiner,
            keeps_layout=True,
            doc=f"The {makes} of each element and all before it along an axis; of all after it with reverse=True{doc}",
        )
    )


_TYPED = """

        What follows a NaN or infinity is as combining one by one makes it; what precedes it stays.  dtype is that of
        the result, as in a `reduction`: by default the operand's, int32 for 8-bit integers (which wrap around) and
        float32 for fp8."""
_register("cumsum", COMBINED["add"], "sums", ", which is the gradient of the other." + _TYPED, _by_sums)
_register("cumprod", COMBINED["mul"], "products", "." + _TYPED, _by_products)
_register("cummax", COMBINED["max"], "largest", ".  From a NaN on it is NaN.", _by_extremes)
_register("cummin", COMBINED["min"], "smallest", ".  From a NaN on it is NaN.", _by_extremes)
_register(
    "logcumsumexp",
    COMBINED["logaddexp"],
    "logarithms of the sums of exponentials",
    ", without overflow.  x holds floats.",
    _by_exponentials,
)


# ---- where the extremes are


def _first_index(x: Array, axis: int, dtype: DType, down: bool) -> Array:
    """Finds the positions one element after the other, for all rows at once."""
    lines = np.moveaxis(x, axis, 0)
    result = np.zeros(lines.shape, np.int64)
    for k in range(1, len(lines)):
        most = np.take_along_axis(lines, result[k - 1][None], 0)[0]
        further = lines[k] <= most if down else lines[k] >= most
        if x.dtype.kind == "f":
            further = np.isnan(lines[k]) | (further & ~np.isnan(most))
        result[k] = np.where(further, k, result[k - 1])
    return np.asarray(np.moveaxis(result, 0, axis).astype(dtype.numpy))


def _expand_index(write: Writing, x: Any, axis: int, dtype: DType, down: bool) -> Any:
    """Writes a running maximum: of 64-bit keys, the number above its position; for wider numbers, of positions.

    The positions are then those of elements that equal the running extreme, 0 elsewhere.
    """
    position = write("gen_index", "position", x, axis=axis)
    if x.dtype.is_int and x.dtype.itemsize < 4:
        x = write("identity", "wide", x, dtype=int32)
    if x.dtype.itemsize <= 4 and x.dtype != uint32:
        number = write("add", "zero of one sign", x, 0) if x.dtype.is_float else x
        signed = write("bitwise_xor", "signed", write(ORDER, "order", number, down=down), -(2**31))
        upper = write("shift_left", "upper", write("identity", "wide order", signed, dtype=int64), 32)
        key = write("bitwise_or", "key", upper, write("identity", "wide position", position, dtype=int64))
        found = write("bitwise_and", "found", write("cummax", "largest", key, axis=axis), 2**32 - 1)
    else:
        extreme = write("cummin" if down else "cummax", "extreme", x, axis=axis)
        hit = write("cmp_eq", "hit", x, extreme)
        if x.dtype.is_float:
            hit = write("logical_or", "hit or nan", hit, write("isnan", "nan", x))
        candidate = write("binary_select", "candidate", position, 0, hit)
        found = write("cummax", "found", candidate, axis=axis)
    return found if found.dtype == dtype else write("identity", "", found, dtype=dtype)


def _register_index(name: str, down: bool) -> None:
    def normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
        if attributes["dtype"] not in (int32, int64):
            raise DTypeError(f"{name} is an int32 or int64; cast the result to {attributes['dtype']}")
        return _normalize(types, attributes)

    def infer(types: Types, attributes: Attributes) -> TensorType:
        if types[0].dtype.is_bool:
            raise DTypeError(f"{name} does not take bool; cast to int32")
        return TensorType(types[0].shape, attributes["dtype"])

    kind, value = ("smallest", "cummin") if down else ("largest", "cummax")
    register(
        Op(
            name=name,
            kind=Kind.COMPOSITE,
            operands=("x",),
            attributes={"axis": -1, "dtype": int64},
            normalize=normalize,
            infer=infer,
            reference=lambda x, axis, dtype: _first_index(x, axis, dtype, down),
            expand=lambda write, x, axis, dtype: _expand_index(write, x, axis, dtype, down),
            keeps_layout=True,
            doc=f"""Where along an axis the {kind} of each element and all before it is, as `{value}` has it: the last
            of equals, and the last NaN if there is one.  dtype is int64 or int32.""",
        )
    )


_register_index("cummax_index", False)
_register_index("cummin_index", True)

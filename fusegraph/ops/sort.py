"""Sorting along an axis, and the largest or smallest elements: the elements, and where they were.

The order is NumPy's: NaN comes behind everything else, zeros of both signs are equal, and so are all NaN.  Equal
elements stay in the order in which they are, whether sorted upwards or downwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fusegraph.dtypes import DType, as_dtype, int32, int64
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops.base import REQUIRED, Array, Attributes, Kind, Op, TensorType, Types, register
from fusegraph.ops.reduction import normal_axes
from fusegraph.ops.reverse import Reverse


class Order(NamedTuple):
    """What is sorted: along which axis, whether downwards, and how many elements of a row are kept, from the first."""

    axis: int
    descending: bool
    keep: int


def order_of(x: TensorType, attributes: Attributes) -> Order:
    """Returns what an op of this module, with normalized attributes, makes of a tensor."""
    axis = attributes["axis"]
    return Order(axis, attributes.get("descending", attributes.get("largest")), attributes.get("k", x.shape[axis]))


def positions(x: Array, axis: int, descending: bool) -> Array:
    """Returns where the elements of each row come from once it is sorted."""
    if not descending:
        return np.asarray(np.argsort(x, axis, kind="stable"))
    # Upwards from the last element on, then read backwards: equal ones are in their order again.
    turned = np.argsort(np.flip(x, axis), axis, kind="stable")
    return np.asarray(x.shape[axis] - 1 - np.flip(turned, axis))


def _normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    shape, result = types[0].shape, dict(attributes)
    (axis,) = normal_axes(attributes["axis"], len(shape))
    result["axis"] = axis
    if "k" in attributes:
        if not isinstance(result["k"], int):
            raise AttributeValueError(f"k is an integer, got {result['k']!r}")
        if not 0 <= result["k"] <= shape[axis]:
            raise AttributeValueError(f"k is from 0 to the {shape[axis]} elements of axis {axis}, got {result['k']}")
    if "dtype" in attributes:
        result["dtype"] = as_dtype(attributes["dtype"])
        if result["dtype"] not in (int32, int64):
            raise DTypeError(f"positions are int32 or int64, not {result['dtype']}")
    if shape[axis] > int32.max:
        raise ShapeError(f"axis {axis} has {shape[axis]} elements; at most {int32.max} are sorted")
    return result


def _infer(types: Types, attributes: Attributes) -> TensorType:
    (x,), order = types, order_of(types[0], attributes)
    shape = (*x.shape[: order.axis], order.keep, *x.shape[order.axis + 1 :])
    return TensorType(shape, attributes.get("dtype", x.dtype))


def _sorted(x: Array, **attributes: Any) -> Array:
    attributes.setdefault("dtype", None)
    axis = attributes["axis"]
    return np.asarray(np.take_along_axis(x, _index(x, **attributes), axis))


def _index(x: Array, dtype: DType | None, **attributes: Any) -> Array:
    axis, descending, keep = order_of(TensorType(x.shape, int32), attributes)
    return np.take(positions(x, axis, descending), np.arange(keep), axis)


def _by_sorted(at: Reverse, x: Any, **attributes: Any) -> Any:
    """Each element's gradient goes where the element came from; those that are not kept have none."""
    g, axis = at.graph, attributes["axis"]
    index = getattr(g, f"{at.name}_index")(x, **attributes)
    zeros = g.broadcast(g.constant(0, dtype=at.loss.dtype), x.shape)
    return g.scatter(zeros, index, at.loss, axis)


def _op(name: str, reference: Any, attributes: dict[str, Any], doc: str) -> None:
    register(
        Op(
            name=name,
            kind=Kind.SORT,
            operands=("x",),
            attributes=attributes,
            normalize=_normalize,
            infer=_infer,
            reference=reference,
            gradient=None if "dtype" in attributes else _by_sorted,
            keeps_layout=True,
            ulps=0,
            doc=doc,
        )
    )


_DTYPE = "dtype is that of the positions, int32 or int64.  It is made in one kernel with the elements themselves."

_op(
    "sort",
    _sorted,
    {"axis": -1, "descending": False},
    """The elements of each row along an axis in ascending order, or descending.

    NaN counts as larger than everything, -0 equals 0; equal elements stay in their order.  `sort_index` tells where the
    elements come from.""",
)
_op(
    "sort_index",
    _index,
    {"axis": -1, "descending": False, "dtype": int32},
    f"""The positions along an axis that the elements of `sort` come from: NumPy's stable argsort.

    {_DTYPE}""",
)
_op(
    "topk",
    _sorted,
    {"k": REQUIRED, "axis": -1, "largest": True},
    """The k largest elements of each row along an axis from the largest on, or the k smallest from the smallest on.

    They are the first of what `sort` makes, in descending or ascending order: NaN counts as larger than everything, and
    of equal elements the first ones are taken.  `topk_index` tells where they come from.""",
)
_op(
    "topk_index",
    _index,
    {"k": REQUIRED, "axis": -1, "largest": True, "dtype": int32},
    f"""The positions along an axis that the elements of `topk` come from.

    {_DTYPE}""",
)

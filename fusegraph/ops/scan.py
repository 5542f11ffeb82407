"""Running sums along an axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, int64
from fusegraph.ops.base import Kind, Op, TensorType, register
from fusegraph.ops.reduction import normal_axes, result_dtype

Array = np.ndarray[Any, Any]


def _normalize(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {**attributes, "axis": normal_axes(attributes["axis"], len(types[0].shape))[0]}


def _infer(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> TensorType:
    x, normal = types[0], _normalize(types, attributes)
    return TensorType(x.shape, result_dtype(x, "add", normal["dtype"]))


def _reference(x: Array, axis: int, reverse: bool, dtype: DType | None) -> Array:
    wide = x.astype(np.int64) if x.dtype.kind in "iu" else x
    turned = np.flip(wide, axis) if reverse else wide
    with np.errstate(all="ignore"):
        total = np.cumsum(turned, axis=axis)
    total = np.flip(total, axis) if reverse else total
    narrow = x.dtype.kind in "iu" and dtype != int64 and x.dtype != np.int64
    return np.asarray(total.astype(np.int32) if narrow else total)


register(
    Op(
        name="cumsum",
        kind=Kind.SCAN,
        operands=("x",),
        attributes={"axis": -1, "reverse": False, "dtype": None},
        normalize=_normalize,
        infer=_infer,
        reference=_reference,
        keeps_layout=True,
        doc="""The sums of each element and all before it along an axis; of all after it with reverse=True, which is the
        gradient of the other.

        What follows a NaN or infinity is as adding up one by one makes it; what precedes it stays.  dtype is that of
        the result, as in a sum by `reduction`: by default the operand's, int32 for 8-bit integers (which wrap around)
        and float32 for fp8.""",
    )
)

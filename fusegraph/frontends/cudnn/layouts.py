"""The strides that cuDNN infers for results whose strides were not set.

The rules are those of cudnn-frontend's C++ nodes (include/cudnn_frontend/node/*.h, `infer_properties_node`).  The
strides that the Python graph shows before that are provisional, and row-major throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusegraph.layout import packed_strides, stride_order

Shape = tuple[int, ...]

#: Node types whose results are channels-last, whatever their operands are.
_CHANNELS_LAST = frozenset({"CONV_FPROP", "CONV_DGRAD", "CONV_WGRAD", "REDUCTION"})


def channels_last(shape: Shape) -> Shape:
    """Returns packed strides in which the second dimension varies fastest."""
    rank = len(shape)
    return packed_strides(shape, (0, *range(2, rank), 1) if rank > 2 else None)


def in_order_of(shape: Shape, like: Shape, strides: Shape) -> Shape:
    """Returns packed strides with the order of dimensions of another tensor; row-major if its rank differs."""
    return packed_strides(shape, stride_order(like, strides) if len(like) == len(shape) else None)


def result_strides(
    kind: str, params: Mapping[str, object], shape: Shape, operands: Sequence[tuple[Shape, Shape]]
) -> Shape:
    """Returns the strides that cuDNN gives a result; ``operands`` are the (shape, strides) of the node's, in order."""
    if kind in _CHANNELS_LAST:
        return channels_last(shape)
    if kind in ("MATMUL", "MOE_GROUPED_MATMUL", "SDPA", "SDPA_FP8") or not operands:
        return packed_strides(shape)
    if kind == "MOE_GROUPED_MATMUL_BWD":
        return packed_strides(shape, (0, 2, 1))
    first, strides = operands[0]
    if kind == "RESHAPE":
        return packed_strides(shape) if is_logical(params) else channels_last(shape)
    if kind == "TRANSPOSE":
        order: Any = params["permutation"]
        return tuple(strides[d] for d in order)
    if kind == "SLICE":
        return strides
    for like, found in operands if kind == "POINTWISE" else operands[:1]:
        if like == shape:
            return found
    return in_order_of(shape, first, strides)


def is_logical(params: Mapping[str, object]) -> bool:
    """Tells whether a reshape keeps the elements in row-major order; otherwise it keeps their places in memory."""
    return getattr(params.get("reshape_mode"), "name", None) == "LOGICAL"

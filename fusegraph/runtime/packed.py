"""Elements of fewer than 8 bits at the boundary: NumPy has them one a byte, kernels several.

Element o, counted in memory, is bits o * bits and up of the bytes, the lowest first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.errors import ArgumentError
from fusegraph.layout import extent

if TYPE_CHECKING:
    from fusegraph.graph import Tensor

Array = np.ndarray[Any, Any]


def pack(array: Array, dtype: DType, strides: tuple[int, ...]) -> Array:
    """The bytes in which the values of an array, in the dtype's NumPy type, lie with these strides (elements); gaps
    between elements are 0.
    """
    each = 8 // dtype.bits
    codes = np.zeros(dtype.nbytes(extent(array.shape, strides)) * each, np.uint8)
    np.lib.stride_tricks.as_strided(codes, array.shape, strides)[...] = array.view(np.uint8) & ((1 << dtype.bits) - 1)
    shifted = codes.reshape(-1, each) << np.arange(0, 8, dtype.bits, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(shifted, axis=1))


def unpack(packed: Any, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """The values that lie in bytes, of which there are as many as the shape and strides say; a new array."""
    shifted = np.asarray(packed).reshape(-1, 1) >> np.arange(0, 8, dtype.bits, dtype=np.uint8)
    line = (shifted & ((1 << dtype.bits) - 1)).reshape(-1)
    codes = np.array(np.lib.stride_tricks.as_strided(line, shape, strides))
    if dtype.is_float:
        return codes.view(dtype.numpy)
    top = np.uint8(-int(dtype.min))
    return ((codes ^ top) - top).view(np.int8).astype(dtype.numpy)


def as_bytes(tensor: Tensor, array: Any, *, written: bool = False) -> Any:
    """What a kernel takes for an array given for a tensor: for packed elements their bytes, one after another.

    An array in NumPy's type of the dtype is packed; if it is to be ``written``, bytes are made that stand for it.
    Others are left to the checks of every array.
    """
    if not tensor.dtype.is_packed:
        return array
    if isinstance(array, np.ndarray) and array.dtype == tensor.dtype.numpy:
        if array.shape != tensor.shape:
            raise ArgumentError(
                f"{tensor.name!r} of graph {tensor.graph.name!r} has shape {list(array.shape)}, "
                f"the graph was built for {list(tensor.shape)}"
            )
        if written and not array.flags.writeable:
            raise ArgumentError(f"output {tensor.name!r} of graph {tensor.graph.name!r} is read-only")
        return pack(array, tensor.dtype, tensor.strides)
    if isinstance(array, np.ndarray):
        return array.reshape(-1) if array.flags.c_contiguous else array
    contiguous = getattr(array, "is_contiguous", None)  # torch's
    return array.reshape(-1) if contiguous is not None and contiguous() else array

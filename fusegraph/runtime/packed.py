"""Elements of fewer than 8 bits at the boundary: NumPy has them one a byte, kernels several.

Element o, counted in memory, is bits o * bits and up of the bytes, the lowest first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.layout import extent

Array = np.ndarray[Any, Any]


def pack(array: Array, dtype: DType, strides: tuple[int, ...]) -> Array:
    """Returns the bytes in which the values of an array, in the dtype's NumPy type, lie with these strides
    (elements); gaps between elements are 0.
    """
    each = 8 // dtype.bits
    codes = np.zeros(dtype.nbytes(extent(array.shape, strides)) * each, np.uint8)
    np.lib.stride_tricks.as_strided(codes, array.shape, strides)[...] = array.view(np.uint8) & ((1 << dtype.bits) - 1)
    shifted = codes.reshape(-1, each) << np.arange(0, 8, dtype.bits, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(shifted, axis=1))


def unpack(packed: Any, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Returns the values that lie in bytes, of which there are as many as the shape and strides say; a new array."""
    shifted = np.asarray(packed).reshape(-1, 1) >> np.arange(0, 8, dtype.bits, dtype=np.uint8)
    line = (shifted & ((1 << dtype.bits) - 1)).reshape(-1)
    codes = np.array(np.lib.stride_tricks.as_strided(line, shape, strides))
    if dtype.is_float:
        return codes.view(dtype.numpy)
    top = np.uint8(-int(dtype.min))
    return ((codes ^ top) - top).view(np.int8).astype(dtype.numpy)

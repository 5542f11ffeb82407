"""Packs and unpacks elements of fewer than 8 bits: NumPy stores one per byte, kernels several.

The element at offset o starts at bit o * bits of the memory, counted from the lowest bit of the first byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.layout import extent

Array = np.ndarray[Any, Any]


def pack(array: Array, dtype: DType, strides: tuple[int, ...]) -> Array:
    """Returns the packed bytes (uint8) of an array in the dtype's NumPy type; strides in elements, gaps are 0."""
    each = 8 // dtype.bits
    codes = np.zeros(dtype.nbytes(extent(array.shape, strides)) * each, np.uint8)
    np.lib.stride_tricks.as_strided(codes, array.shape, strides)[...] = array.view(np.uint8) & ((1 << dtype.bits) - 1)
    shifted = codes.reshape(-1, each) << np.arange(0, 8, dtype.bits, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(shifted, axis=1))


def unpack(packed: Any, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Returns the values in packed bytes as a new array of ``shape`` in the dtype's NumPy type; strides in elements."""
    shifted = np.asarray(packed).reshape(-1, 1) >> np.arange(0, 8, dtype.bits, dtype=np.uint8)
    line = (shifted & ((1 << dtype.bits) - 1)).reshape(-1)
    codes = np.array(np.lib.stride_tricks.as_strided(line, shape, strides))
    if dtype.is_float:
        return codes.view(dtype.numpy)
    top = np.uint8(-int(dtype.min))
    return ((codes ^ top) - top).view(np.int8).astype(dtype.numpy)

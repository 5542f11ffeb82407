"""Random device arrays for timing: one block of random values, repeated on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.layout import extent
from fusegraph.ops.base import Array, Role
from fusegraph.ops.convert import from_reference
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import DeviceArray, cuda_device
from fusegraph.tensor import Tensor

#: How many random elements are made on the host; larger arrays repeat them, which does not change the timing.
BLOCK = 1 << 22


def random_array(
    shape: Sequence[int], strides: Sequence[int], dtype: DType, device: int = 0, seed: int = 0
) -> DeviceArray:
    """Returns a random array on a device; strides are in elements.

    Floats are standard normal, integers are at most 9 in size, bools are true with probability 1/2.
    """
    count = max(extent(shape, strides), 1)
    block = _block(1 << (min(count, BLOCK) - 1).bit_length(), dtype, seed)[:count]
    nbytes, filled = count * dtype.itemsize, block.nbytes
    buffer = driver.allocate(nbytes, device)
    driver.copy_to_device(buffer.pointer, block.ctypes.data, filled, device)
    while filled < nbytes:
        step = min(filled, nbytes - filled)
        driver.copy_on_device(buffer.pointer + filled, buffer.pointer, step, device)
        filled += step
    driver.synchronize(0, device)
    return DeviceArray(buffer.pointer, tuple(shape), tuple(strides), dtype, cuda_device(device), buffer)


def array_like(tensor: Any, device: int = 0, seed: int = 0) -> DeviceArray:
    """Returns a random array like a tensor, or whatever has a shape, strides and a dtype.

    For metadata of sparse products, which are no numbers, it returns zeros, which kernels take for valid ones.
    """
    array = random_array(tensor.shape, tensor.strides, tensor.dtype, device, seed)
    graph: Any = tensor.graph if isinstance(tensor, Tensor) else None
    readers = [] if graph is None else graph.consumers(tensor)
    if any(n.op.role is Role.SPARSE_MATMUL and tensor in n.inputs[2:] for n in readers):
        driver.memset(array.pointer, 0, tensor.nbytes, device)
        driver.synchronize(0, device)
    return array


@lru_cache(maxsize=64)
def _block(number: int, dtype: DType, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype.is_float:
        return from_reference(rng.standard_normal(number), dtype)
    if dtype.is_bool:
        return rng.random(number) < 0.5
    return rng.integers(0 if dtype.min == 0 else -9, 10, number).astype(dtype.numpy)

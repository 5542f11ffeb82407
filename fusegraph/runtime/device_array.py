"""DeviceArray: fusegraph's own array on a GPU, for callers that bring no framework of their own."""

from __future__ import annotations

import math
from typing import Any, Self

from fusegraph.dtypes import DType, as_dtype
from fusegraph.runtime import dlpack, driver
from fusegraph.runtime.device import CPU, Device, cuda_device
from fusegraph.runtime.strides import NDArray, contiguous_strides, empty_numpy, span


class DeviceArray:
    """An n-dimensional array in device memory: ``shape``, ``strides`` (elements), ``dtype``, ``device``, ``pointer``.

    ``stream`` is the stream whose queued work completes the contents; consumers of the array through DLPack or
    ``__cuda_array_interface__`` wait for it.  The stream must exist as long as the array is in use.  ``owner`` keeps
    the memory alive.
    """

    __slots__ = ("__weakref__", "device", "dtype", "owner", "pointer", "shape", "stream", "strides")

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        device: Device,
        owner: object,
        stream: int = 0,
    ) -> None:
        self.pointer, self.shape, self.strides, self.dtype = pointer, shape, strides, dtype
        self.device, self.owner, self.stream = device, owner, stream

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        strides: tuple[int, ...] | None = None,
        device: int = 0,
        stream: int = 0,
    ) -> Self:
        """Returns an array in new memory with undefined contents.

        ``strides`` (in elements, 0 or more) default to C order.  Raises DeviceError if the memory does not suffice.
        """
        dtype = as_dtype(dtype)
        strides = contiguous_strides(shape) if strides is None else strides
        buffer = driver.allocate(span(shape, strides) * dtype.itemsize, device)
        return cls(buffer.pointer, shape, strides, dtype, cuda_device(device), buffer, stream)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements, without the gaps between them."""
        return self.size * self.dtype.itemsize

    def to_numpy(self) -> NDArray:
        """Returns a copy on the host with the same strides, after the work queued on ``self.stream`` is done."""
        host = empty_numpy(self.shape, self.strides, self.dtype.numpy)
        nbytes = span(self.shape, self.strides) * self.dtype.itemsize
        driver.copy_to_host(host.ctypes.data, self.pointer, nbytes, self.device.index, self.stream)
        return host

    def __array__(self, *_: object, **__: object) -> NDArray:
        raise TypeError("a DeviceArray is not converted to NumPy implicitly; use .to_numpy()")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface, version 3.  Raises AttributeError for bfloat16 and 8-bit floats: consumers then try DLPack."""
        if self.dtype.numpy.isbuiltin != 1:
            raise AttributeError(f"__cuda_array_interface__ cannot express {self.dtype}; use DLPack")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.pointer if self.size else 0, False),
            "strides": tuple(stride * self.dtype.itemsize for stride in self.strides),
            "stream": self.stream or 1,  # 0 is not allowed: 1 is the legacy default stream
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.K_CUDA, self.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Returns a DLPack capsule, after making the consumer's stream wait for this array's.

        ``stream`` is the consumer's: None or 1 is the legacy default stream, with -1 nothing waits.  A copy is made
        only to reach the CPU (``dl_device`` (1, 0)) or if ``copy`` is True.  Raises BufferError for another device, and
        for the CPU with ``copy`` False.
        """
        versioned = max_version is not None and max_version[0] >= 1
        target = self.__dlpack_device__() if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if target == (dlpack.K_CPU, 0) and copy is not False:
            host = self.to_numpy()
            address = host.ctypes.data
            return dlpack.export(address, self.shape, self.strides, self.dtype, CPU, host, versioned=versioned)
        if target != self.__dlpack_device__():
            raise BufferError(f"the array is on {self.device}; DLPack device {target} cannot be had without a copy")
        source = self.copy() if copy else self
        if stream != -1:
            driver.order(source.stream or 1, stream or 1, self.device.index)
        return dlpack.export(
            source.pointer, source.shape, source.strides, source.dtype, source.device, source, versioned=versioned
        )

    def copy(self) -> DeviceArray:
        """Returns a copy in new memory with the same strides, made on ``self.stream``."""
        index = self.device.index
        other = DeviceArray.empty(self.shape, self.dtype, strides=self.strides, device=index, stream=self.stream)
        nbytes = span(self.shape, self.strides) * self.dtype.itemsize
        driver.copy_on_device(other.pointer, self.pointer, nbytes, index, self.stream)
        return other

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, strides={self.strides}, dtype={self.dtype}, device={self.device})"

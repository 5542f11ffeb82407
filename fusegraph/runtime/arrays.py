"""The arrays a graph runs on: any framework's, read without copying, and new ones in the caller's framework.

``view`` (see ``views``) reads what the caller gives; ``allocator`` makes what the caller gets back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.runtime import driver
from fusegraph.runtime.device import CPU, Device, cuda_device
from fusegraph.runtime.device_array import DeviceArray
from fusegraph.runtime.packed import pack
from fusegraph.runtime.streams import as_stream, current_stream, stream_query
from fusegraph.runtime.strides import NDArray, contiguous_strides, empty_numpy, numpy_over, span
from fusegraph.runtime.views import ArrayView, refuse_gradient, torch_dtype, view

__all__ = [
    "CPU",
    "ArrayView",
    "Device",
    "DeviceArray",
    "allocator",
    "as_stream",
    "cuda_device",
    "current_stream",
    "hand_over",
    "refuse_gradient",
    "to_device",
    "to_numpy",
    "torch_allocates",
    "torch_dtype",
    "torch_memory",
    "view",
]


def allocator(
    framework: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: Device, *, stream: int = 0
) -> Callable[[], Any]:
    """Returns a function that makes a new array, with undefined contents, at each call.

    It is a torch or CuPy array for those frameworks.  For others, and for dtypes that CuPy lacks, it is a NumPy array
    on the CPU and a DeviceArray on a GPU.  ``strides`` are in elements, 0 or more.  ``stream`` is the stream that will
    write a DeviceArray; torch and CuPy reuse memory in the order of their own current stream.
    """
    if framework == "torch":
        torch = sys.modules["torch"]
        target = torch.device("cpu") if device == CPU else torch.device("cuda", device.index)
        return partial(torch.empty_strided, shape, strides, dtype=torch_dtype(torch, dtype), device=target)
    if device == CPU:
        if strides == contiguous_strides(shape):
            return lambda: np.empty(shape, dtype.numpy)
        return lambda: empty_numpy(shape, strides, dtype.numpy)
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        try:
            _empty_cupy(cupy, (0,), (1,), dtype, device)
        except (TypeError, ValueError):
            pass
        else:
            return lambda: _empty_cupy(cupy, shape, strides, dtype, device)
    return lambda: DeviceArray.empty(shape, dtype, strides=strides, device=device.index, stream=stream)


def torch_allocates(stream: int, ordinal: int) -> bool:
    """Tells whether a stream is torch's current one on a GPU, in whose order torch reuses memory."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and cuda.is_initialized() and stream_query("torch")(ordinal) == stream


def torch_memory(nbytes: int, ordinal: int) -> Any:
    """Returns a torch tensor of so many bytes on a GPU, for work on torch's current stream.

    It may be dropped as soon as that work is queued.  While torch captures the stream, it is memory of the captured
    graph.
    """
    torch = sys.modules["torch"]
    return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", ordinal))


def hand_over(array: Any, framework: str) -> Any:
    """Returns ``array``, made by an ``allocator`` and written (or about to be, on its stream), as the caller's type.

    Only JAX needs this: its arrays are immutable and cannot be written after they are made.  A JAX array takes over the
    memory of a DeviceArray and waits for its ``stream``.  An array of a layout or dtype that JAX refuses stays a
    DeviceArray.
    """
    if framework != "jax":
        return array
    jax = sys.modules["jax"]
    if isinstance(array, np.ndarray):
        return jax.numpy.asarray(array)
    try:
        return jax.dlpack.from_dlpack(array)
    except Exception:  # JAX's errors differ by release; what is refused is still a good array
        return array


def _empty_cupy(cupy: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: Device) -> Any:
    with cupy.cuda.Device(device.index):
        memory = cupy.cuda.alloc(span(shape, strides) * dtype.itemsize)
        return cupy.ndarray(shape, dtype.numpy, memory, strides=tuple(stride * dtype.itemsize for stride in strides))


def to_device(x: Any, device: int = 0, *, stream: int = 0) -> DeviceArray:
    """Returns ``x`` (anything ``view`` takes) as a DeviceArray on ``device``: shared if it is there, else a copy.

    ``stream``, a stream of ``device``, is the one that will use it.  A copy keeps the strides if they leave no gaps,
    and is in C order otherwise.  A copy from another GPU goes through the host, after the work that the array's
    framework has queued there.  Elements of fewer than 8 bits, which NumPy stores one per byte, become packed bytes in
    C order.
    """
    seen = view(x, name="x", stream=stream)
    if seen.dtype.is_packed:
        seen = view(pack(np.asarray(x), seen.dtype, contiguous_strides(seen.shape)), name="x", stream=stream)
    if seen.device == cuda_device(device):
        if isinstance(x, DeviceArray):
            return x
        return DeviceArray(seen.pointer, seen.shape, seen.strides, seen.dtype, seen.device, seen.owner, stream)
    # ``stream`` does not order work on another device, so the array is read again with that device's own stream.
    host = to_numpy(x, stream=current_stream(seen.framework, seen.device)) if seen.device.is_cuda else to_numpy(seen)
    strides = seen.strides
    if span(seen.shape, strides) != host.size:
        host, strides = np.ascontiguousarray(host).reshape(seen.shape), contiguous_strides(seen.shape)
    array = DeviceArray.empty(seen.shape, seen.dtype, strides=strides, device=device, stream=stream)
    driver.copy_to_device(array.pointer, host.ctypes.data, host.nbytes, device, stream)
    return array


def to_numpy(x: Any, *, stream: int = 0) -> NDArray:
    """Returns ``x`` (an ArrayView, or anything ``view`` takes) as a NumPy array.

    Memory on the CPU is shared; memory on a GPU is copied, after the work queued on ``stream``.
    """
    seen = x if isinstance(x, ArrayView) else view(x, name="x", stream=stream)
    if seen.device == CPU:
        array = numpy_over(seen.pointer, seen.shape, seen.strides, seen.dtype.numpy, seen.owner)
        array.flags.writeable = not seen.readonly
        return array
    return DeviceArray(seen.pointer, seen.shape, seen.strides, seen.dtype, seen.device, seen.owner, stream).to_numpy()

"""Reads arrays of any framework without copying.

``view(x, name="x")`` gives the address, shape, strides, dtype and device of a NumPy (with ml_dtypes), torch, CuPy or
JAX array, a DeviceArray, or any object with DLPack, ``__cuda_array_interface__`` or ``__array_interface__``.  Many
calls go through it, so each type is looked up once and then read by a function made for it.  No framework is imported:
if an array exists, its module is in ``sys.modules``.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from codegen.dtypes import ALL, BY_NAME, BY_NUMPY, DType
from fusegraph.errors import ArgumentError
from fusegraph.runtime import dlpack, driver, entry_points
from fusegraph.runtime.device import CPU, Device, cuda_device
from fusegraph.runtime.strides import contiguous_strides


class ArrayView(NamedTuple):
    """An array's memory: ``strides`` in elements, 0 or more; ``owner`` keeps the memory alive.

    ``framework`` is ``"numpy"``, ``"torch"``, ``"cupy"``, ``"jax"``, ``"fusegraph"`` (DeviceArray) or the protocol
    used: ``"dlpack"``, ``"cuda_array_interface"``, ``"array_interface"``.  ``pointer`` may be 0 if the array is empty.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: Device
    framework: str
    owner: object
    readonly: bool


_Viewer = Callable[[Any, str, int], ArrayView]
_viewers: dict[type, _Viewer] = {}
_new: Any = tuple.__new__  # ArrayView(...) without the Python-level constructor, in half the time


def view(x: Any, *, name: str, stream: int = 0) -> ArrayView:
    """Returns ``x`` as an ArrayView, without copying.  ``name`` is its name in error messages.

    ``stream`` is the CUDA stream that will use the array.  Protocols that carry a stream (DLPack,
    ``__cuda_array_interface__``) make it wait for the producer's work; torch and CuPy arrays are taken without waiting,
    as those libraries do among themselves.  Raises ArgumentError for an object that is not an array or has no dense
    memory, a dtype unknown to fusegraph, a misaligned address, and strides that are negative or not whole elements.
    """
    viewer = _viewers.get(type(x))
    if viewer is None:
        viewer = _find_viewer(x, name)
    return viewer(x, name, stream)


def _find_viewer(x: Any, name: str) -> _Viewer:
    """Finds and remembers the viewer for the type of ``x``.  Raises ArgumentError if it is not an array."""
    kind = type(x)
    viewer: _Viewer | None = None
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if base.__name__ == "MaskedArray" and root == "numpy":
            _refuse(name, "is a masked array, whose mask would be lost", "pass x.filled(value)")
        maker = _VIEWER_MAKERS.get((root, base.__name__))
        if maker is not None:
            viewer = maker(sys.modules[root])
            break
    else:
        if kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
            _refuse(
                name, f"is a traced JAX value ({kind.__name__}) without memory", "call it outside jit, grad and vmap"
            )
        if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
            viewer = from_dlpack_viewer("dlpack")
        elif _has(x, "__cuda_array_interface__"):
            viewer = _view_cuda_interface
        elif _has(x, "__array_interface__"):
            viewer = _view_array_interface
    if viewer is None:
        _refuse(
            name,
            f"is of type {kind.__module__}.{kind.__qualname__}, which is not an array",
            "pass a NumPy, torch, CuPy or JAX array, or an object with DLPack or __cuda_array_interface__",
        )
    _viewers[kind] = viewer
    return viewer


def _has(x: Any, name: str) -> bool:
    """Tells whether an object has an attribute that is not None and can be read without an error."""
    try:
        return getattr(x, name, None) is not None
    except Exception:
        return False


# --- what every viewer checks --------------------------------------------------------------------------------------


def _refuse(name: str, seen: str, right: str) -> NoReturn:
    raise ArgumentError(f"input {name!r} {seen}; {right}")


def _refuse_dtype(name: str, dtype: object) -> NoReturn:
    _refuse(name, f"has dtype {dtype}, which fusegraph does not have", f"it has {', '.join(BY_NAME)}")


def _refuse_alignment(name: str, pointer: int, dtype: DType) -> NoReturn:
    _refuse(name, f"lies at address {pointer:#x}, not a multiple of its {dtype.itemsize}-byte elements", "pass a copy")


def _numpy_dtype(dtype: np.dtype[Any], name: str) -> DType:
    found = BY_NUMPY.get(dtype)
    if found is not None:
        return found
    if dtype.hasobject:
        _refuse(name, f"has dtype {dtype}, Python objects", "convert it with .astype('float32')")
    if not dtype.isnative:
        _refuse(
            name, f"has dtype {dtype.str}, of foreign byte order", "convert it with x.astype(x.dtype.newbyteorder('='))"
        )
    _refuse_dtype(name, dtype)


def _element_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    """Converts strides from bytes to elements; those of dimensions of size 1, which are never used, are made valid."""
    if 0 in shape:
        return contiguous_strides(shape)
    result = []
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size == 1:
            stride = max(stride - stride % itemsize, 0)
        if stride < 0:
            _refuse(
                name, f"has a negative stride ({stride} bytes) on axis {axis}", "pass np.ascontiguousarray(x) or a copy"
            )
        if stride % itemsize:
            _refuse(
                name,
                f"has a stride of {stride} bytes on axis {axis}, not whole {itemsize}-byte elements",
                "pass a copy",
            )
        result.append(stride // itemsize)
    return tuple(result)


# --- NumPy ---------------------------------------------------------------------------------------------------------

_Layout = tuple[tuple[int, ...], tuple[int, ...], DType, int]
_LAYOUTS = 4096  # how many layouts are remembered for each framework before all are forgotten
_read_address: Any = ctypes.c_size_t.from_address


def _remember(layouts: dict[Any, _Layout], x: Any, name: str) -> _Layout:
    """Checks the layout of a NumPy or CuPy array: (shape, strides in elements, dtype, address mask).

    It is remembered for the next array that looks the same, as checking costs several times the rest of a view.
    """
    dtype = _numpy_dtype(x.dtype, name)
    strides = _element_strides(x.shape, x.strides, dtype.itemsize, name)
    if len(layouts) >= _LAYOUTS:
        layouts.clear()
    layout = layouts[x.shape, x.strides, x.dtype] = (x.shape, strides, dtype, dtype.itemsize - 1)
    return layout


def _numpy_viewer(numpy: Any) -> _Viewer:
    layouts: dict[Any, _Layout] = {}
    # NumPy's own ways to read an ndarray's address take longer than all the rest of a view.  The address is the first
    # field after the object header in the C ABI (PyArrayObject_fields), on which compiled extensions rely, so it cannot
    # move within NumPy 2; this is verified here all the same.
    header = object.__basicsize__
    probe = numpy.arange(6)[2:]
    direct = sys.implementation.name == "cpython" and _read_address(id(probe) + header).value == probe.ctypes.data

    def view_numpy(x: Any, name: str, stream: int) -> ArrayView:
        shape, strides, dtype, mask = layouts.get((x.shape, x.strides, x.dtype)) or _remember(layouts, x, name)
        pointer = _read_address(id(x) + header).value if direct else x.ctypes.data
        if pointer & mask:
            _refuse_alignment(name, pointer, dtype)
        view: ArrayView = _new(ArrayView, (pointer, shape, strides, dtype, CPU, "numpy", x, not x.flags.writeable))
        return view

    return view_numpy


# --- torch ---------------------------------------------------------------------------------------------------------


def _torch_viewer(torch: Any) -> _Viewer:
    # torch dtype -> DType, address mask, and whether the negative bit can be set.  torch sets it for x.conj().imag, so
    # only on dtypes that are parts of complex ones.
    dtypes = {
        torch_dtype(torch, dtype): (dtype, dtype.itemsize - 1, dtype.name in ("float16", "float32", "float64"))
        for dtype in ALL
        if hasattr(torch, torch_name(dtype))
    }
    devices = {torch.device("cpu"): CPU}
    devices |= {torch.device("cuda", index): cuda_device(index) for index in range(64)}

    def view_torch(x: Any, name: str, stream: int) -> ArrayView:
        try:
            pointer, strides = x.data_ptr(), x.stride()
            dtype, mask, may_be_negative = dtypes[x.dtype]
            device = devices[x.device]
        except Exception as failure:
            _refuse_torch(torch, x, name, failure)
        if may_be_negative and x.is_neg():
            _refuse(name, "is a torch tensor with a pending negation", "pass x.resolve_neg()")
        if pointer & mask:
            _refuse_alignment(name, pointer, dtype)
        if not pointer and x.numel():
            _refuse(
                name,
                f"is a {type(x).__name__} without memory of its own",
                "pass the plain tensor it wraps, or one whose storage has not been freed",
            )
        view: ArrayView = _new(ArrayView, (pointer, x.shape, strides, dtype, device, "torch", x, False))
        return view

    return view_torch


def refuse_gradient(x: Any, name: str) -> None:
    """Raises ArgumentError for a torch tensor whose gradient or forward derivative is being recorded.

    Results of fusegraph would silently be without it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return
    if x.requires_grad and torch.is_grad_enabled():
        _refuse(
            name,
            "is a torch tensor that requires a gradient, which is not recorded here",
            f"pass {name}.detach(), or call it under torch.no_grad()",
        )
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None:
        _refuse(
            name, "is a torch tensor with a tangent, which is not recorded here", f"pass unpack_dual({name}).primal"
        )


def torch_name(dtype: DType) -> str:
    """Returns torch's name of ``dtype``."""
    return {"float8_e4m3": "float8_e4m3fn", "float8_e8m0": "float8_e8m0fnu"}.get(dtype.name, dtype.name)


def torch_dtype(torch: Any, dtype: DType) -> Any:
    """Returns the torch dtype of ``dtype``.  Raises AttributeError if this torch lacks it."""
    return getattr(torch, torch_name(dtype))


def _refuse_torch(torch: Any, x: Any, name: str, failure: Exception) -> NoReturn:
    """Raises an ArgumentError that says why a tensor could not be read."""
    if x.is_nested:
        _refuse(name, "is a nested torch tensor", "pass its parts one by one, or x.to_padded_tensor(0)")
    if x.layout is not torch.strided:
        _refuse(name, f"is a torch tensor of layout {x.layout}, without dense strides", "pass x.to_dense()")
    if x.is_quantized:
        _refuse(name, f"is a quantised torch tensor ({x.dtype})", "pass x.dequantize()")
    if x.device.type not in ("cpu", "cuda"):
        _refuse(name, f"is on torch device {x.device}", "pass a tensor on the CPU or a CUDA device")
    if isinstance(failure, KeyError):
        _refuse_dtype(name, x.dtype)
    raise ArgumentError(
        f"input {name!r} is a torch {type(x).__name__} whose memory cannot be reached ({failure}); pass a plain tensor"
    ) from failure


# --- CuPy, JAX, DeviceArray ----------------------------------------------------------------------------------------


def _cupy_viewer(cupy: Any) -> _Viewer:
    layouts: dict[Any, _Layout] = {}

    def view_cupy(x: Any, name: str, stream: int) -> ArrayView:
        shape, strides, dtype, mask = layouts.get((x.shape, x.strides, x.dtype)) or _remember(layouts, x, name)
        memory = x.data
        pointer = memory.ptr
        if pointer & mask:
            _refuse_alignment(name, pointer, dtype)
        device = cuda_device(memory.device_id)
        view: ArrayView = _new(ArrayView, (pointer, shape, strides, dtype, device, "cupy", x, False))
        return view

    return view_cupy


def _jax_viewer(jax: Any) -> _Viewer:
    through_dlpack = from_dlpack_viewer("jax")

    def view_jax(x: Any, name: str, stream: int) -> ArrayView:
        if x.is_deleted():  # checked first: reading anything else of a deleted or donated array can crash JAX
            _refuse(name, "is a deleted JAX array", "keep it from being donated or deleted")
        if x.platform() == "cpu":
            x.block_until_ready()  # on a GPU the stream is made to wait instead
        return through_dlpack(x, name, stream)._replace(readonly=True)  # JAX arrays never change

    return view_jax


def _device_array_viewer(_: Any) -> _Viewer:
    def view_device_array(x: Any, name: str, stream: int) -> ArrayView:
        if x.stream != stream:
            driver.order(x.stream, stream, x.device.index)
        view: ArrayView = _new(ArrayView, (x.pointer, x.shape, x.strides, x.dtype, x.device, "fusegraph", x, False))
        return view

    return view_device_array


# --- protocols -----------------------------------------------------------------------------------------------------


def from_dlpack_viewer(framework: str) -> _Viewer:
    """Returns a viewer through DLPack that labels its views with ``framework`` and raises ArgumentError as `view` does.

    The producer's deleter is called when a view's ``owner`` is collected.
    """

    def view_dlpack(x: Any, name: str, stream: int) -> ArrayView:
        try:
            device_type, device_id = x.__dlpack_device__()
            device = dlpack.device_of(int(device_type), int(device_id))
            # On a GPU the producer makes our stream wait for its own (1 is DLPack's name for the legacy stream 0).
            arguments = {"stream": stream or 1} if device is not None and device.is_cuda else {}
            try:
                capsule = x.__dlpack__(max_version=dlpack.VERSION, **arguments)
            except TypeError:  # a producer from before DLPack 1.0
                capsule = x.__dlpack__(**arguments)
            array = dlpack.consume(capsule)
        except Exception as failure:
            raise ArgumentError(
                f"input {name!r} ({type(x).__name__}) cannot be read through DLPack: {failure}"
            ) from failure
        if array.device is None:
            _refuse(
                name, f"is on a device of DLPack type {array.device_type}", "pass an array on the CPU or a CUDA device"
            )
        dtype = dlpack.DTYPES.get((array.code, array.bits)) if array.lanes == 1 else None
        if dtype is None:
            _refuse_dtype(name, f"with DLPack code {array.code}, {array.bits} bits, {array.lanes} lanes")
        itemsize = dtype.itemsize
        strides = _element_strides(array.shape, tuple(s * itemsize for s in array.strides), itemsize, name)
        if array.pointer % itemsize:
            _refuse_alignment(name, array.pointer, dtype)
        return ArrayView(
            array.pointer, array.shape, strides, dtype, array.device, framework, array.owner, array.readonly
        )

    return view_dlpack


def _view_cuda_interface(x: Any, name: str, stream: int) -> ArrayView:
    """Source: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html (version 3)."""
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        _refuse(name, "has a mask in its __cuda_array_interface__", "pass an array without a mask")
    pointer, readonly = interface["data"]
    shape = tuple(interface["shape"])
    try:
        numpy_dtype = np.dtype(interface["typestr"])
    except TypeError:
        _refuse_dtype(name, interface["typestr"])
    dtype = _numpy_dtype(numpy_dtype, name)
    strides = interface.get("strides")
    if strides is None:
        strides = tuple(stride * dtype.itemsize for stride in contiguous_strides(shape))
    elements = _element_strides(shape, tuple(strides), dtype.itemsize, name)
    pointer = pointer or 0
    if pointer % dtype.itemsize:
        _refuse_alignment(name, pointer, dtype)
    index = entry_points.pointer_device(pointer) if 0 not in shape else 0
    if index is None:
        _refuse(
            name, f"has a __cuda_array_interface__ with address {pointer:#x}, which is no device memory", "pass another"
        )
    producer = interface.get("stream")
    if producer is not None:
        driver.order(int(producer), stream or 1, index)
    return ArrayView(pointer, shape, elements, dtype, cuda_device(index), "cuda_array_interface", x, bool(readonly))


def _view_array_interface(x: Any, name: str, stream: int) -> ArrayView:
    """Source: https://numpy.org/doc/stable/reference/arrays.interface.html (version 3); NumPy itself reads it."""
    try:
        array = np.asarray(x)
    except Exception as failure:
        raise ArgumentError(f"input {name!r} has an unusable __array_interface__: {failure}") from failure
    scalar = isinstance(x, np.generic)  # a NumPy scalar has a value to read, but no memory to write to
    seen = view(array, name=name)
    return seen._replace(framework="array_interface", readonly=seen.readonly or scalar)


_VIEWER_MAKERS: dict[tuple[str, str], Callable[[Any], _Viewer]] = {
    ("numpy", "ndarray"): _numpy_viewer,
    ("torch", "Tensor"): _torch_viewer,
    ("cupy", "ndarray"): _cupy_viewer,
    ("jaxlib", "ArrayImpl"): _jax_viewer,
    ("fusegraph", "DeviceArray"): _device_array_viewer,
}

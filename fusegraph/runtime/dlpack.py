"""DLPack, the protocol by which frameworks share arrays without copying: export and import, through ctypes.

Source: https://dmlc.github.io/dlpack (version 1.1).  A producer gives a PyCapsule around a DLManagedTensor (before 1.0)
or a DLManagedTensorVersioned; the consumer takes the struct over by renaming the capsule and calls ``deleter`` when it
no longer needs the memory.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import numpy as np

from codegen.dtypes import ALL, DType
from fusegraph.runtime.device import CPU, Device, cuda_device
from fusegraph.runtime.strides import contiguous_strides, numpy_over

VERSION = (1, 1)  # the first with 8-bit floats
K_CPU, K_CUDA, K_CUDA_HOST, K_CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY = 1

# Type codes of DLDataType: by NumPy's kind of dtype, and for the dtypes that have a code of their own.
_OF_KINDS = {"i": 0, "u": 1, "f": 2}
_OWN = {"bfloat16": 4, "bool": 6, "float8_e4m3": 10, "float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13}
#: dtype -> (type code, bits)
CODES = {t: (_OWN[t.name] if t.name in _OWN else _OF_KINDS[t.numpy.kind], t.bits) for t in ALL if not t.is_packed}
DTYPES: dict[tuple[int, int], DType] = {code: dtype for dtype, code in CODES.items()}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# A capsule keeps the address of its name, so each name is one object that lives as long as the process.
_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
_USED, _USED_VERSIONED = b"used_dltensor", b"used_dltensor_versioned"

_api = ctypes.pythonapi
_OBJECT_AND_NAME = (ctypes.py_object, ctypes.c_char_p)
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, *_OBJECT_AND_NAME)(("PyCapsule_IsValid", _api))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_OBJECT_AND_NAME)(("PyCapsule_GetPointer", _api))
_capsule_rename = ctypes.PYFUNCTYPE(ctypes.c_int, *_OBJECT_AND_NAME)(("PyCapsule_SetName", _api))
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _struct_of(capsule: Any) -> Any:
    """Returns the struct in an unused capsule.  Raises ValueError for anything else."""
    if _capsule_is_valid(capsule, _NAME_VERSIONED):
        return _ManagedVersioned.from_address(_capsule_pointer(capsule, _NAME_VERSIONED))
    if _capsule_is_valid(capsule, _NAME):
        return _Managed.from_address(_capsule_pointer(capsule, _NAME))
    raise ValueError(f"not an unused DLPack capsule: {capsule!r}")


# --- export --------------------------------------------------------------------------------------------------------


def export(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    device: Device,
    owner: object,
    *,
    versioned: bool,
    readonly: bool = False,
) -> Any:
    """Returns a DLPack capsule for the array (strides in elements).

    ``owner`` lives until the consumer calls the deleter.  With NumPy older than 2.1 the capsule is never ``versioned``,
    which consumers must expect anyway.
    """
    # A deleter written in Python cannot be correct: consumers call it without the GIL, with an exception set, or after
    # the interpreter's end.  NumPy's deleter is native and handles all three.  So NumPy exports an array of unsigned
    # integers of this shape at this address, without reading the memory, and the type and device are corrected here.
    integers = np.dtype(f"u{dtype.itemsize}")
    array: Any = numpy_over(pointer, shape, strides, integers, owner)
    try:
        capsule = array.__dlpack__(max_version=(VERSION if versioned else None))
    except TypeError:
        capsule = array.__dlpack__()
    managed = _struct_of(capsule)
    tensor = managed.tensor
    tensor.device_type, tensor.device_id = (K_CUDA if device.is_cuda else K_CPU), device.index
    tensor.code, tensor.bits = CODES[dtype]
    if isinstance(managed, _ManagedVersioned):
        managed.major, managed.minor = VERSION
        managed.flags = READ_ONLY if readonly else 0
    return capsule


# --- import --------------------------------------------------------------------------------------------------------


class Imported(NamedTuple):
    """The array that a capsule described: ``strides`` in elements, ``code`` and ``bits`` as in DLDataType (see DTYPES).

    ``device`` is None for device types other than CPU and CUDA.  The memory lives as long as ``owner``.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    code: int
    bits: int
    lanes: int
    device_type: int
    device: Device | None
    readonly: bool
    owner: object


class _Owner:
    """Calls the producer's deleter when collected."""

    __slots__ = ("__weakref__",)

    def __init__(self, address: int, deleter: int | None) -> None:
        if deleter:
            weakref.finalize(self, _DELETER(deleter), address).atexit = False


def consume(capsule: Any) -> Imported:
    """Takes over a DLPack capsule.

    Raises ValueError if it is not a capsule, was consumed already, or is versioned with a major version other than 1.
    """
    managed = _struct_of(capsule)
    readonly = False
    if isinstance(managed, _ManagedVersioned):
        if managed.major != VERSION[0]:
            raise ValueError(f"DLPack version {managed.major}.{managed.minor}; versions 0 and 1 are understood")
        readonly = bool(managed.flags & READ_ONLY)
        _capsule_rename(capsule, _USED_VERSIONED)
    else:
        _capsule_rename(capsule, _USED)
    owner = _Owner(ctypes.addressof(managed), managed.deleter)
    tensor = managed.tensor
    ndim = tensor.ndim
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    strides = tuple(tensor.strides[:ndim]) if ndim and tensor.strides else contiguous_strides(shape)
    return Imported(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        code=tensor.code,
        bits=tensor.bits,
        lanes=tensor.lanes,
        device_type=tensor.device_type,
        device=device_of(tensor.device_type, tensor.device_id),
        readonly=readonly,
        owner=owner,
    )


def device_of(device_type: int, device_id: int) -> Device | None:
    """Returns the Device of a DLDevice; None for types other than CPU and CUDA.  Page-locked host memory is CPU."""
    if device_type in (K_CPU, K_CUDA_HOST):
        return CPU
    return cuda_device(int(device_id)) if device_type in (K_CUDA, K_CUDA_MANAGED) else None

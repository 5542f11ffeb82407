"""Tensor maps: 128 bytes, passed to a kernel, that describe a tensor to TMA.

For a GPU the driver encodes them (CUDA driver API, "Tensor Map Object Management"); for the CPU they hold the fields of
``TensorMapFields`` in ``codegen/cpu/abi.h``.
"""

from __future__ import annotations

import ctypes
import struct

from codegen.spec import TensorMap
from codegen.tensor_map import ELEMENT_BYTES, UNIT, refusal
from fusegraph.errors import DeviceError, FusegraphError, KernelError
from fusegraph.runtime import driver
from fusegraph.runtime.entry_points import entry_point, failure

BYTES, ALIGNMENT = 128, 64

#: Element type -> CUtensorMapDataType.  The type matters only to reductions into memory and to loads of TFLOAT32, which
#: round.  So types that TMA lacks are copied as integers of their size.
_DATA_TYPES = {
    "double": "FLOAT64",
    "float": "FLOAT32",
    "tf32": "TFLOAT32",
    **{name: name.upper() for name in ("float16", "bfloat16", "uint16", "int32", "uint32", "int64", "uint64")},
    "int16": "UINT16",
    **dict.fromkeys(("int8", "uint8", "bool"), "UINT8"),
    **dict.fromkeys(("float8_e4m3", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), "UINT8"),
}

#: Codes, as in TensorMapFields, of types that reductions add up, and of tf32, to which loads round.
_KINDS = {"float": b"f", "float16": b"h", "bfloat16": b"b", "int32": b"i", "int64": b"i", "tf32": b"t"}
_MAGIC = b"tnsormap"
_FIELDS = struct.Struct("<8sQ4Q5I5H3h3h5BBBBBc")


def encode(block: int, described: TensorMap, address: int, kernel: str) -> None:
    """Writes the map for a GPU at address ``block``, a multiple of 64.

    address   the address of the map's first element, ``described.offset`` included.
    kernel    the kernel's name in error messages.

    Raises DeviceError for a map that breaks a rule of ``codegen.tensor_map`` or that the driver refuses.
    """
    _check(described, address, kernel, DeviceError)
    cuda = driver.bindings()
    rank = len(described.sizes)
    steps = (ctypes.c_uint32 * rank)(*described.steps)
    arguments = [
        ctypes.c_void_p(block),
        _constant(cuda.CUtensorMapDataType, f"DATA_TYPE_{_DATA_TYPES[described.element]}"),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*described.sizes),
        (ctypes.c_uint64 * (rank - 1))(*described.strides),
    ]
    if described.lower is None or described.upper is None:
        function = "cuTensorMapEncodeTiled"
        # The driver wants the number of elements that a box spans, of which every step-th is loaded.
        span = [(size - 1) * step + 1 for size, step in zip(described.box, described.steps)]
        arguments += [(ctypes.c_uint32 * rank)(*span), steps]
    else:
        function = "cuTensorMapEncodeIm2col"
        corners = [(ctypes.c_int * (rank - 2))(*corner) for corner in (described.lower, described.upper)]
        arguments += [*corners, *map(ctypes.c_uint32, described.box), steps]
    swizzle = f"SWIZZLE_{described.swizzle}B" if described.swizzle else "SWIZZLE_NONE"
    arguments += [
        _constant(cuda.CUtensorMapInterleave, "INTERLEAVE_NONE"),
        _constant(cuda.CUtensorMapSwizzle, swizzle),
        _constant(cuda.CUtensorMapL2promotion, "L2_PROMOTION_L2_128B"),
        _constant(cuda.CUtensorMapFloatOOBfill, "FLOAT_OOB_FILL_NONE"),  # zeros
    ]
    code = entry_point(function)(*arguments)
    if code:
        raise failure(function, code, f"describe a tensor of kernel {kernel} to TMA ({described})")


def move(block: int, address: int, kernel: str) -> None:
    """Points the encoded map at ``block`` to a tensor at another address.  Raises DeviceError."""
    code = entry_point("cuTensorMapReplaceAddress")(ctypes.c_void_p(block), ctypes.c_void_p(address))
    if code:
        doing = f"point a tensor map of kernel {kernel} to address {address:#x}"
        raise failure("cuTensorMapReplaceAddress", code, doing)


def encode_for_cpu(described: TensorMap, address: int, kernel: str) -> bytes:
    """Returns the 128 bytes of a map whose first element lies at ``address``, as the CPU's emulation of TMA takes them.

    Raises KernelError for a map that breaks a rule of ``codegen.tensor_map``.
    """
    _check(described, address, kernel, KernelError)
    fields = _FIELDS.pack(
        _MAGIC,
        address,
        *_padded(described.strides, 4),
        *_padded([size - 1 for size in described.sizes], 5),
        *_padded(described.box, 5),
        *_padded(described.lower or (), 3),
        *_padded(described.upper or (), 3),
        *_padded(described.steps, 5),
        len(described.sizes),
        ELEMENT_BYTES[described.element],
        described.swizzle,
        described.lower is not None,
        _KINDS.get(described.element, b"\0"),
    )
    return fields.ljust(BYTES, b"\0")


def _check(described: TensorMap, address: int, kernel: str, error: type[FusegraphError]) -> None:
    reason = refusal(described)
    if reason is None and address % UNIT:
        reason = f"its tensor lies at {address:#x}, which is no multiple of {UNIT}"
    if reason is not None:
        raise error(f"kernel {kernel}: a tensor map is not possible: {reason} ({described})")


def _constant(enumeration: object, name: str) -> ctypes.c_int:
    return ctypes.c_int(int(getattr(enumeration, f"CU_TENSOR_MAP_{name}")))


def _padded(values: tuple[int, ...] | list[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]

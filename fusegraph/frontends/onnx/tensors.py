"""Converts types and tensors of ONNX to dtypes and NumPy arrays; sizes are checked before memory is allocated."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from codegen.sizes import Size
from fusegraph.dtypes import ALL, PACKED, DType, float8_e4m3, float32, float64, int64, uint32, uint64
from fusegraph.errors import ModelError
from fusegraph.layout import packed_strides
from fusegraph.runtime.packed import unpack

Array = np.ndarray[Any, Any]

#: ONNX's names of element types -> dtypes; all but three are a dtype's name in upper case.
_NAMES = {dtype.name.upper().replace("_", ""): dtype for dtype in (*ALL, *PACKED)} | {
    "FLOAT": float32,
    "DOUBLE": float64,
    "FLOAT8E4M3FN": float8_e4m3,
}
#: ONNX's element type -> dtype, for those that have one; older versions of ONNX have fewer.
DTYPES: dict[int, DType] = {element: _NAMES[name] for name, element in TensorProto.DataType.items() if name in _NAMES}
#: NumPy's largest number of dimensions.
MAX_RANK = 64
#: Dtype -> the field that has its values if there are no raw bytes, and the NumPy type of the field's elements.  All
#: others are in int32_data, packed ones with one byte in each element.
_FIELDS: dict[DType, tuple[str, Any]] = {
    float32: ("float_data", np.float32),
    float64: ("double_data", np.float64),
    int64: ("int64_data", np.int64),
    **dict.fromkeys((uint32, uint64), ("uint64_data", np.uint64)),
}


def type_name(element: int) -> str:
    """Returns an element type's name for messages: int16, string, ..."""
    try:
        return str(TensorProto.DataType.Name(element)).lower()
    except ValueError:
        return f"number {element}"


def checked_shape(what: str, sizes: Any) -> tuple[int, ...]:
    """Returns a shape as a tuple.  Raises ModelError for negative sizes and more dimensions than NumPy has."""
    if len(sizes) > MAX_RANK:
        raise ModelError(f"{what} has {len(sizes)} dimensions; at most {MAX_RANK} are possible")
    shape = tuple(size if isinstance(size, Size) else int(size) for size in sizes)
    if any(size < 0 for size in shape):
        raise ModelError(f"{what} has a negative size: {list(shape)}")
    return shape


def to_array(tensor: TensorProto, what: str, folder: Path | None) -> Array:
    """Converts a tensor of one of `DTYPES` to an array; ``folder`` is where external data is (None: not allowed).

    Raises ModelError if the data does not have the size that the shape requires.
    """
    shape, dtype = checked_shape(what, tensor.dims), DTYPES[tensor.data_type]
    count = prod(shape)
    if tensor.HasField("segment"):
        raise ModelError(f"{what} is stored in segments, which no version of ONNX defines")
    if tensor.data_location == TensorProto.EXTERNAL:
        raw: bytes | None = external(tensor, what, folder, dtype.nbytes(count))
    else:
        raw = tensor.raw_data if tensor.HasField("raw_data") else None
    if raw is not None:
        if len(raw) != dtype.nbytes(count):
            raise ModelError(f"{what} {list(shape)} of {dtype} has {len(raw)} bytes, not {dtype.nbytes(count)}")
        if dtype.is_packed:
            return unpack(np.frombuffer(raw, np.uint8), dtype, shape, packed_strides(shape))
        if dtype.is_bool:
            return np.asarray(np.frombuffer(raw, np.uint8) != 0).reshape(shape)
        little = np.frombuffer(raw, dtype.numpy.newbyteorder("<"))
        return little.astype(dtype.numpy, copy=False).reshape(shape)
    field, stored = _FIELDS.get(dtype, ("int32_data", np.int32))
    values = getattr(tensor, field)
    expected = dtype.nbytes(count) if dtype.is_packed else count
    if len(values) != expected:
        raise ModelError(f"{what} {list(shape)} of {dtype} has {len(values)} elements, not {expected}")
    array = np.fromiter(values, stored, expected)
    if dtype.is_packed:
        return unpack(array.astype(np.uint8), dtype, shape, packed_strides(shape))
    if dtype.is_float and field == "int32_data":  # the bits of each float are in an integer
        return array.astype(np.uint16 if dtype.itemsize == 2 else np.uint8).view(dtype.numpy).reshape(shape)
    return array.astype(dtype.numpy).reshape(shape)


def external(tensor: TensorProto, what: str, folder: Path | None, expected: int) -> bytes:
    """Reads the bytes of a tensor from another file, which must be inside the model's folder.  Raises ModelError."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelError(f"{what} lies in another file, {location[:200]!r}; load the model from its file")
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", str(expected)))
        root = os.path.realpath(folder)
        path = os.path.realpath(os.path.join(root, location))
        inside = not os.path.isabs(location) and os.path.commonpath([root, path]) == root
    except ValueError:  # not numbers, or NUL in the path
        raise ModelError(f"{what} has external data with malformed entries") from None
    if not location or not inside:
        raise ModelError(f"{what}: external data {location[:200]!r} is not inside of the model's folder {root}")
    if not os.path.isfile(path):
        raise ModelError(f"{what}: external data {location[:200]!r} is no file in {root}")
    if length != expected:
        raise ModelError(f"{what} has {length} bytes of external data, not {expected}")
    if offset < 0 or offset + length > os.path.getsize(path):
        raise ModelError(f"{what}: bytes {offset} to {offset + length} are not all in {location[:200]!r}")
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise ModelError(f"{what}: {location[:200]!r} cannot be read: {error.strerror or error}") from None

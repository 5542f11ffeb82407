"""Public names of the scalar types, and how two of them combine."""

from __future__ import annotations

from typing import Any

import numpy as np

from codegen.dtypes import (
    ALL,
    BY_NAME,
    BY_NUMPY,
    DType,
    bfloat16,
    bool_,
    float8_e4m3,
    float8_e5m2,
    float16,
    float32,
    float64,
    int8,
    int32,
    int64,
    uint8,
)
from fusegraph.errors import DTypeError, shown

__all__ = [
    "ALL",
    "BY_NAME",
    "BY_NUMPY",
    "DType",
    "as_dtype",
    "bfloat16",
    "bool_",
    "float8_e4m3",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "int8",
    "int32",
    "int64",
    "promote",
    "uint8",
]

_ALIASES = {
    "half": float16,
    "fp16": float16,
    "bf16": bfloat16,
    "fp32": float32,
    "float": float32,
    "fp64": float64,
    "double": float64,
    "float8_e4m3fn": float8_e4m3,
    "fp8_e4m3": float8_e4m3,
    "fp8_e5m2": float8_e5m2,
    "bool_": bool_,
}


def as_dtype(value: Any) -> DType:
    """The DType meant by a name, a NumPy (ml_dtypes) dtype or scalar type, or a torch dtype.

    Raises DTypeError, which lists what is known, for anything else.
    """
    if isinstance(value, DType):
        return value
    if type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    if isinstance(value, str):
        if value in BY_NAME or value in _ALIASES:
            return BY_NAME.get(value) or _ALIASES[value]
    else:
        try:
            if value is not None:  # which NumPy takes for float64
                return BY_NUMPY[np.dtype(value)]
        except Exception:  # NumPy asks an object for its dtype
            pass
    raise DTypeError(f"unknown dtype {shown(value)}; fusegraph has {', '.join(BY_NAME)}")


# For floats: (bits of significand, bits of exponent).  A type holds another exactly if both are at least as large.
_FLOAT_SIZE = {
    float8_e4m3: (4, 4),
    float8_e5m2: (3, 5),
    float16: (11, 5),
    bfloat16: (8, 8),
    float32: (24, 8),
    float64: (53, 11),
}


def promote(a: DType, b: DType) -> DType:
    """The smallest type that holds both: bool < integers < floats; an integer with a float gives the float.

    float16 with bfloat16 gives float32, e4m3 with e5m2 float16, int8 with uint8 int32.
    """
    if a == b:
        return a
    if a.is_float and b.is_float:
        (ma, ea), (mb, eb) = _FLOAT_SIZE[a], _FLOAT_SIZE[b]
        for dtype in (float8_e4m3, float8_e5m2, float16, bfloat16, float32, float64):
            m, e = _FLOAT_SIZE[dtype]
            if m >= max(ma, mb) and e >= max(ea, eb):
                return dtype
    if a.is_float or b.is_float:
        return a if a.is_float else b
    if a.is_bool or b.is_bool:
        return b if a.is_bool else a
    return int64 if int64 in (a, b) else int32

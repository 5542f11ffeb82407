"""Public names of the scalar types, and how two of them combine.

What is computed in what:

- float64 in float64; all other floats of 8 bits and more in float32 (or in float64 if the graph says so), rounded where
  they are stored or cast.  8-bit floats are as good as others in every op, but only float8_e4m3 and float8_e5m2 are
  multiplied by tensor cores; the fnuz types (no infinity, no negative zero) are meant for storage.
- Integers of 8 to 64 bits, signed and unsigned, in themselves, wrapping around as NumPy's do; sums and products of many
  in 32 bits, or 64 where the operand or the result has as many (see `sum_dtype`).
- bool in itself: sums and counts want a cast.
- int4, uint4, int2, uint2 and float4_e2m1 in nothing: they are packed in memory, moved, chosen by a mask, and cast.
  Everything else raises DTypeError.  So it is with float8_e8m0, the scales of MX formats: powers of 2 from 2^-127 to
  2^127, and NaN, which is what numbers that are not positive or too large become.  Others round to the nearest, halfway
  up.

Floats become integers by truncation and saturate, NaN is 0; integers wrap around; floats round to nearest even.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from codegen.dtypes import ALL as ALL
from codegen.dtypes import BY_NAME as BY_NAME
from codegen.dtypes import BY_NUMPY as BY_NUMPY
from codegen.dtypes import PACKED as PACKED
from codegen.dtypes import DType as DType
from codegen.dtypes import bfloat16 as bfloat16
from codegen.dtypes import bool_ as bool_
from codegen.dtypes import float4_e2m1 as float4_e2m1
from codegen.dtypes import float8_e4m3 as float8_e4m3
from codegen.dtypes import float8_e4m3fnuz as float8_e4m3fnuz
from codegen.dtypes import float8_e5m2 as float8_e5m2
from codegen.dtypes import float8_e5m2fnuz as float8_e5m2fnuz
from codegen.dtypes import float8_e8m0 as float8_e8m0
from codegen.dtypes import float16 as float16
from codegen.dtypes import float32 as float32
from codegen.dtypes import float64 as float64
from codegen.dtypes import int2 as int2
from codegen.dtypes import int4 as int4
from codegen.dtypes import int8 as int8
from codegen.dtypes import int16 as int16
from codegen.dtypes import int32 as int32
from codegen.dtypes import int64 as int64
from codegen.dtypes import uint2 as uint2
from codegen.dtypes import uint4 as uint4
from codegen.dtypes import uint8 as uint8
from codegen.dtypes import uint16 as uint16
from codegen.dtypes import uint32 as uint32
from codegen.dtypes import uint64 as uint64
from fusegraph.errors import DTypeError, shown

_ALIASES = {
    "half": float16,
    "fp16": float16,
    "bf16": bfloat16,
    "fp32": float32,
    "float": float32,
    "fp64": float64,
    "double": float64,
    "float4_e2m1fn": float4_e2m1,
    "float8_e4m3fn": float8_e4m3,
    "float8_e8m0fnu": float8_e8m0,
    "fp8_e4m3": float8_e4m3,
    "fp8_e5m2": float8_e5m2,
    "bool_": bool_,
}


def as_dtype(value: Any) -> DType:
    """Returns the DType meant by a name, a NumPy (ml_dtypes) dtype or scalar type, or a torch dtype.

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


@cache
def promote(a: DType, b: DType) -> DType:
    """Returns the smallest type that holds both: bool < integers < floats; an integer with a float gives the float.

    float16 with bfloat16 gives float32, e4m3 with e5m2 float16, int8 with uint8 int32 (not int16), uint32 with a signed
    type int64.  Raises DTypeError for uint64 with a signed type, as no integer holds both.
    """
    if a == b:
        return a
    if a.kind != b.kind:
        return max(a, b, key=lambda dtype: ("bool", "int", "float").index(dtype.kind))
    if {a, b} == {int8, uint8}:
        return int32
    for dtype in sorted((*ALL, *PACKED), key=lambda dtype: dtype.bits):
        if dtype.kind == a.kind and dtype.holds(a) and dtype.holds(b):
            return dtype
    raise DTypeError(f"no integer type holds all of {a} and {b}; cast one of them")


def sum_dtype(source: DType, result: DType) -> DType:
    """Returns the type in which integers of one dtype are summed or multiplied to a result of another.

    It wraps around.  It has 64 bits if one of the two has, else 32, and is unsigned for unsigned sources of 32 bits and
    more.
    """
    wide = 64 in (source.bits, result.bits)
    if source.min == 0 and source.bits >= 32:
        return uint64 if wide else uint32
    return int64 if wide else int32


def scalar_dtype(value: bool | int | float, like: DType) -> DType:
    """Returns the dtype of a Python number next to a tensor: the tensor's, unless it cannot hold such a number."""
    if isinstance(value, bool):
        return bool_
    if isinstance(value, int):
        if like.is_bool:
            return int32
        if like.is_int and not like.min <= value <= like.max:
            return next((d for d in (int32, int64, uint64) if d.min <= value <= d.max), int64 if value < 0 else uint64)
        return like
    return like if like.is_float else float32

"""The scalar types a tensor can hold, as NumPy, CUDA C and the compute rules see them.

Inside a kernel a value lives in its *compute* type: ``float`` for every float of 32 bits or fewer, ``double`` for
float64, the type itself for integers and booleans.  Rounding to the storage type happens at stores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """One scalar type.

    ``name`` is the public name, ``ctype`` the storage type in CUDA C (``codegen/device/types.cuh``), ``compute`` the C
    type values have in registers, ``kind`` one of ``"float"``, ``"int"``, ``"bool"``.

    Elements of fewer than 8 ``bits`` are packed: element o is bits o * bits and up of the memory, the lowest first
    (NumPy's arrays of them have one byte per element).  Kernels know none of these: values are held in a ``carrier``.
    float8_e8m0, a power of 2 or NaN, is another such type, with one element a byte.
    """

    name: str
    ctype: str
    compute: str
    kind: str
    numpy: np.dtype[Any] = field(compare=False)
    carrier: DType | None = None
    packed_bits: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element, where each has bytes of its own."""
        return self.numpy.itemsize

    @property
    def bits(self) -> int:
        """Bits of one element in memory."""
        return self.packed_bits or 8 * self.itemsize

    @property
    def is_packed(self) -> bool:
        """Whether memory is bytes whose bits only casts understand: mostly a byte has several elements."""
        return self.packed_bits > 0

    def nbytes(self, count: int) -> int:
        """Returns how many bytes ``count`` contiguous elements take."""
        return -(-count * self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind == "int"

    @property
    def is_bool(self) -> bool:
        return self.kind == "bool"

    @property
    def has_infinity(self) -> bool:
        """Whether infinity is one of its values."""
        return self.is_float and bool(np.isinf(np.asarray(np.inf).astype(self.numpy).astype(np.float64)))

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero has two signs."""
        return self.is_float and bool(np.signbit(np.asarray(-0.0).astype(self.numpy).astype(np.float64)))

    def holds(self, other: DType) -> bool:
        """Tells whether every value of another dtype is one of this one's; a zero's sign and NaN aside."""
        if not self.is_float:
            return not other.is_float and self.min <= other.min and other.max <= self.max
        if not other.is_float:
            return self.min < 0 and max(-other.min, other.max) <= min(1 / self.unit_roundoff, self.max)
        ours, theirs = ml_dtypes.finfo(self.numpy), ml_dtypes.finfo(other.numpy)
        return (
            self.unit_roundoff <= other.unit_roundoff
            and self.max >= other.max
            and self.min <= other.min
            and float(ours.smallest_subnormal) <= float(theirs.smallest_subnormal)
            and self.has_infinity >= other.has_infinity
        )

    @property
    def saturates(self) -> bool:
        """Whether what is too large is rounded to the largest finite number, as in signed floats of up to 8 bits."""
        return self.is_float and self.bits <= 8 and self.min < 0

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest (2**-53 for float64, 0 for integers)."""
        return float(ml_dtypes.finfo(self.numpy).eps) / 2 if self.is_float else 0.0

    @property
    def max(self) -> float | int:
        """Largest finite value."""
        if self.is_float:
            return float(ml_dtypes.finfo(self.numpy).max)
        return 1 if self.is_bool else int(ml_dtypes.iinfo(self.numpy).max)

    @property
    def min(self) -> float | int:
        """Smallest (most negative) finite value."""
        if self.is_float:
            return float(ml_dtypes.finfo(self.numpy).min)
        return 0 if self.is_bool else int(ml_dtypes.iinfo(self.numpy).min)

    def __repr__(self) -> str:
        return self.name


float64 = DType("float64", "double", "double", "float", np.dtype(np.float64))
float32 = DType("float32", "float", "float", "float", np.dtype(np.float32))
float16 = DType("float16", "float16", "float", "float", np.dtype(np.float16))
bfloat16 = DType("bfloat16", "bfloat16", "float", "float", np.dtype(ml_dtypes.bfloat16))
float8_e4m3 = DType("float8_e4m3", "float8_e4m3", "float", "float", np.dtype(ml_dtypes.float8_e4m3fn))
float8_e5m2 = DType("float8_e5m2", "float8_e5m2", "float", "float", np.dtype(ml_dtypes.float8_e5m2))
float8_e4m3fnuz = DType("float8_e4m3fnuz", "float8_e4m3fnuz", "float", "float", np.dtype(ml_dtypes.float8_e4m3fnuz))
float8_e5m2fnuz = DType("float8_e5m2fnuz", "float8_e5m2fnuz", "float", "float", np.dtype(ml_dtypes.float8_e5m2fnuz))
int8 = DType("int8", "int8", "int8", "int", np.dtype(np.int8))
uint8 = DType("uint8", "uint8", "uint8", "int", np.dtype(np.uint8))
int16 = DType("int16", "int16", "int16", "int", np.dtype(np.int16))
uint16 = DType("uint16", "uint16", "uint16", "int", np.dtype(np.uint16))
int32 = DType("int32", "int32", "int32", "int", np.dtype(np.int32))
uint32 = DType("uint32", "uint32", "uint32", "int", np.dtype(np.uint32))
int64 = DType("int64", "int64", "int64", "int", np.dtype(np.int64))
uint64 = DType("uint64", "uint64", "uint64", "int", np.dtype(np.uint64))
bool_ = DType("bool", "bool", "bool", "bool", np.dtype(np.bool_))

_FLOATS = (float64, float32, float16, bfloat16, float8_e4m3, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz)
_INTEGERS = (int8, uint8, int16, uint16, int32, uint32, int64, uint64)
#: Types whose elements have bytes of their own.
ALL: tuple[DType, ...] = (*_FLOATS, *_INTEGERS, bool_)


def _packed(name: str, bits: int, numpy: Any, carrier: DType) -> DType:
    return DType(name, carrier.ctype, carrier.compute, carrier.kind, np.dtype(numpy), carrier, bits)


int4 = _packed("int4", 4, ml_dtypes.int4, int8)
uint4 = _packed("uint4", 4, ml_dtypes.uint4, uint8)
int2 = _packed("int2", 2, ml_dtypes.int2, int8)
uint2 = _packed("uint2", 2, ml_dtypes.uint2, uint8)
float8_e8m0 = _packed("float8_e8m0", 8, ml_dtypes.float8_e8m0fnu, bfloat16)
float4_e2m1 = _packed("float4_e2m1", 4, ml_dtypes.float4_e2m1fn, float8_e4m3)

#: Types for storage, of fewer than 8 bits or of nothing but an exponent: they are stored, moved and cast, and nothing
#: is computed in them.
PACKED: tuple[DType, ...] = (int4, uint4, int2, uint2, float4_e2m1, float8_e8m0)
BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in (*ALL, *PACKED)}
BY_NUMPY: dict[np.dtype[Any], DType] = {dtype.numpy: dtype for dtype in (*ALL, *PACKED)}
#: Bytes of each C type in which reductions are computed.
SIZE_OF = {"float": 4, "double": 8} | {f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)}

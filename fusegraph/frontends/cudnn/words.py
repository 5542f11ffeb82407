"""Converts cuDNN's data types and labels to dtypes and names."""

from __future__ import annotations

import re
from typing import Any

from fusegraph.dtypes import BY_NAME, DType, as_dtype, float4_e2m1, float8_e8m0, float32, int4
from fusegraph.errors import DTypeError
from fusegraph.lowering.cudnn import DATA_TYPES

_DTYPES = {cudnn: BY_NAME[name] for name, cudnn in DATA_TYPES.items()}
_DTYPES |= {"FP8_E8M0": float8_e8m0, "FP4_E2M1": float4_e2m1, "INT4": int4}


def dtype_of(kind: Any) -> DType | None:
    """Returns the dtype of a member of cudnn.data_type or a torch dtype; None if it was not set.

    Raises DTypeError for types that fusegraph lacks.
    """
    name = getattr(kind, "name", None)
    if kind is None or name == "NOT_SET":
        return None
    if isinstance(name, str):
        if name not in _DTYPES:
            raise DTypeError(f"data type {name}, which fusegraph does not have")
        return _DTYPES[name]
    return as_dtype(kind)


def computed(kind: Any) -> DType:
    """Returns the dtype in which a node computes: float32 for BOOLEAN, smaller floats, or if none was set."""
    if getattr(kind, "name", None) == "FAST_FLOAT_FOR_FP8":
        return float32
    found = dtype_of(kind)
    return float32 if found is None or (found.is_float and found.itemsize < 4) or found.is_bool else found


def label_of(text: Any) -> str:
    """Turns a label, which may be any text, into a valid name; "" if nothing is left of it."""
    return re.sub(r"[^\w .:/\[\](),+@#-]", "_", str(text or ""))[:180].strip()

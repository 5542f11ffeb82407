"""One application of an op to reference arrays: what the reference engine and constant folding compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusegraph.dtypes import DType, float32, float64
from fusegraph.ops.base import Array, Attributes, Op, Types
from fusegraph.ops.convert import convert, reference_type, to_reference


def compute_dtype(dtype: DType, real: DType) -> DType:
    """Returns the dtype in which values of a dtype are computed: real (the graph's) for floats up to 32 bits."""
    return dtype if not dtype.is_float or dtype == float64 else float64 if real == float64 else float32


def evaluate(
    op: Op,
    types: Types,
    attributes: Attributes,
    results: Sequence[DType],
    operands: Sequence[Array],
    real: DType = float32,
) -> tuple[Array, ...]:
    """Returns an op's results as reference arrays (floats unrounded in float64), from reference arrays of its operands.

    Operands are converted as kernels do: exactly, but an integer that meets floats rounds to the compute type.
    """
    converted = []
    for x, t, d in zip(operands, types, op.operand_dtypes(types)):
        if t.dtype.is_float and d.is_float:
            converted.append(to_reference(x, d))
        else:
            converted.append(convert(x, t.dtype, compute_dtype(d, real)) if t.dtype != d else x)
    found = op.reference(*converted, **attributes)
    values = found if isinstance(found, tuple) else (found,)
    return tuple(
        _stored(op, np.asarray(v), op.promoted(types), d, attributes) for v, d in zip(values, results, strict=True)
    )


def _stored(op: Op, value: Array, produced: DType, result: DType, attributes: Attributes) -> Array:
    """Converts what a reference gave, computed in one dtype, to a reference array of another."""
    if op.name == "identity":
        exact = produced == result or (produced.is_float and widens(produced, result))
        return value if exact else convert(value, produced, result, saturate=attributes["saturate"])
    if result.is_float:
        return value.astype(np.float64)
    if value.dtype == np.float64:
        return convert(value, produced, result)
    return value.astype(reference_type(result))


def widens(source: DType, target: DType) -> bool:
    """Returns true if a float dtype holds every value of another dtype, so that a cast does not round.

    A float that is still unrounded in its compute type stays unrounded by such a cast.
    """
    return target.is_float and target.holds(source)

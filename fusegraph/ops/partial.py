"""``reduction_partial``: the first half of a reduction for which one block per result would take too long.

It is not in the op table: users write reductions, `passes.split_reductions` writes this.
"""

from __future__ import annotations

from math import prod

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.ops.base import REQUIRED, Array, Attributes, Kind, Op, Role, TensorType, Types
from fusegraph.ops.modes import PARTS, as_rows, reduced_shape


def parts_of(shape: tuple[int, ...], axes: tuple[int, ...], chunk: int) -> int:
    """Returns how many parts a reduction has: each of ``chunk`` elements, the last one of what is left."""
    return -(-prod(shape[d] for d in axes) // chunk)


def _shape(shape: tuple[int, ...], axes: tuple[int, ...], chunk: int, keepdims: bool) -> tuple[int, ...]:
    """Returns the shape of the parts, which lie along the first of the axes."""
    first, parts = min(axes), parts_of(shape, axes, chunk)
    return (*shape[:first], parts, *reduced_shape(shape, axes, keepdims)[first + keepdims :])


def _infer(types: Types, attributes: Attributes) -> TensorType:
    how = {key: attributes[key] for key in ("axes", "chunk", "keepdims")}
    return TensorType(_shape(types[0].shape, **how), attributes["dtype"])


def _reference(x: Array, mode: str, axes: tuple[int, ...], chunk: int, keepdims: bool, dtype: DType) -> Array:
    rows = as_rows(x.astype(np.float64 if dtype.is_float else dtype.numpy), axes)
    starts = range(0, rows.shape[-1], chunk)
    with np.errstate(all="ignore"):
        parts = [PARTS[mode].combine(rows[..., start : start + chunk], (-1,)) for start in starts]
    return np.stack(parts, min(axes)).reshape(_shape(x.shape, axes, chunk, keepdims))


PARTIAL = Op(
    name="reduction_partial",
    kind=Kind.REDUCTION,
    role=Role.PARTIAL,
    operands=("x",),
    attributes={"mode": "add", "axes": REQUIRED, "chunk": REQUIRED, "keepdims": True, "dtype": REQUIRED},
    infer=_infer,
    reference=_reference,
    doc="""Combines every ``chunk`` elements along axes by themselves, in the dtype in which they are combined.  The
    first of the axes has the parts, the others have size 1 or, without ``keepdims``, are dropped.  Which elements make
    a part is up to the kernel, how many are in which is not: the last part has what is left.""",
)

"""``size``: a size that varies as a number.  It is not in the op table: `Graph.constant` writes it."""

from __future__ import annotations

import numpy as np

from fusegraph.ops.base import REQUIRED, Array, Attributes, Cost, Kind, Op, Role, TensorType, Types


def _infer(types: Types, _: Attributes) -> TensorType:
    return types[0]


def _reference(x: Array, number: int) -> Array:
    return np.full(x.shape, number)


SIZE = Op(
    name="size",
    kind=Kind.POINTWISE,
    role=Role.SIZE,
    cost=Cost.ROUNDING,
    operands=("x",),
    attributes={"number": REQUIRED},
    infer=_infer,
    reference=_reference,
    shapes=("x",),
    ulps=0,
    finite=True,
    doc="""An integer that is an attribute, in x's shape and dtype.""",
)

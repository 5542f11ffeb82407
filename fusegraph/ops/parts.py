"""``matmul_parts``, ``conv_fprop_parts`` and ``conv_wgrad_parts``: sums of products of which every part is a result.

The dimension that is summed up (the operands' common one, channels, images) is cut into ``parts`` of equal size,
each of which is summed up by itself: (parts, *shape), in the dtype of the accumulator.  They are not in the op
table: users write contractions, `passes.split_contractions` writes these.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusegraph.ops.base import REQUIRED, TABLE, Array, Attributes, Op, TensorType, Types


def _in_parts(base: Op, *axes: int) -> Op:
    """Returns an op with its operands cut along these axes."""

    def infer(types: Types, attributes: Attributes) -> TensorType:
        whole = base.infer(types, {k: v for k, v in attributes.items() if k != "parts"})
        assert isinstance(whole, TensorType)
        return TensorType((attributes["parts"], *whole.shape), attributes["dtype"])

    def reference(first: Array, second: Array, parts: int, **attributes: Any) -> Array:
        pieces = zip(np.split(first, parts, axes[0]), np.split(second, parts, axes[1]))
        return np.stack([np.asarray(base.reference(a, b, **attributes)) for a, b in pieces])

    return Op(
        name=f"{base.name}_parts",
        kind=base.kind,
        role=base.role,
        operands=base.operands,
        attributes={**base.attributes, "parts": REQUIRED},
        infer=infer,
        reference=reference,
        products=base.products,
    )


#: The axes of operands along which they are cut; op -> the one whose results are parts of its results.
_AXES = {"matmul": (-1, -2), "conv_fprop": (1, 1), "conv_wgrad": (0, 0)}
PARTS = {TABLE[name]: _in_parts(TABLE[name], *axes) for name, axes in _AXES.items()}

"""``matmul_parts``, ``conv_fprop_parts``, ``conv_dgrad_parts``, ``conv_wgrad_parts``: sums of products, every part of
which is a result.

The dimension that is summed up (the operands' common one, channels, filters, images) is cut into ``parts`` of equal
size, each of which is summed up by itself: (parts, *shape), in the dtype of the accumulator.  Of a matrix product the
last part may have less (`part_length`).  They are not in the op
table: users write contractions, `passes.split_contractions` writes these.  A kernel may cut filters' gradients
elsewhere, so that its tiles are whole: only what all parts make together may depend on them.

``conv_wgrad_bands`` cuts what a filter's gradient is summed up over more finely: the positions of an image's planes are
cut along the first dimension (the second of three) into bands of ``band`` rows, and every part has as many of all
images' bands, the last parts what is left.  One part is the gradient itself, with no dimension for parts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from fusegraph.ops.base import REQUIRED, TABLE, Array, Attributes, Op, TensorType, Types

#: Terms of a stage of the tensor-core kernels.
STAGE = 64


def part_length(size: int, parts: int) -> int:
    """Returns the terms of every part of a sum of so many but the last, which has what is left: in whole stages of the
    kernels unless all have as many.
    """
    return size // parts if size % parts == 0 else -(-size // (parts * STAGE)) * STAGE


def _in_parts(base: Op, *axes: int) -> Op:
    """Returns an op with its operands cut along these axes."""

    def reference(first: Array, second: Array, parts: int, **attributes: Any) -> Array:
        size = first.shape[axes[0]]
        ends = [part_length(size, parts) * n for n in range(1, parts)]
        pieces = zip(np.split(first, ends, axes[0]), np.split(second, ends, axes[1]))
        return np.stack([np.asarray(base.reference(a, b, **attributes)) for a, b in pieces])

    return _op(base, f"{base.name}_parts", ("parts",), reference)


def _op(base: Op, name: str, how: tuple[str, ...], reference: Callable[..., Array]) -> Op:
    """Returns an op whose results are parts of another one's: ``how`` are the attributes that say which."""

    def infer(types: Types, attributes: Attributes) -> TensorType:
        whole = base.infer(types, {k: v for k, v in attributes.items() if k not in how})
        assert isinstance(whole, TensorType)
        if "band" in how and attributes["parts"] == 1:
            return whole
        return TensorType((attributes["parts"], *whole.shape), attributes["dtype"])

    return Op(
        name=name,
        kind=base.kind,
        role=base.role,
        operands=base.operands,
        attributes={**base.attributes, **dict.fromkeys(how, REQUIRED)},
        infer=infer,
        reference=reference,
        products=base.products,
    )


def _bands(image: Array, loss: Array, parts: int, band: int, **attributes: Any) -> Array:
    """Returns the sums over each part's bands: the losses of all others are left out."""
    if parts == 1:
        return np.asarray(TABLE["conv_wgrad"].reference(image, loss, **attributes))
    rows = max(loss.ndim - 4, 0)  # the dimension of positions that is cut
    images, sizes = loss.shape[0], loss.shape[2:]
    planes, along = images * prod(sizes[:rows]), -(-sizes[rows] // band)
    each = -(-planes * along // parts)
    number = np.arange(planes * sizes[rows]).reshape(images, *sizes[: rows + 1])
    part = (number // sizes[rows] * along + number % sizes[rows] // band) // each
    part = part.reshape(images, 1, *part.shape[1:], *(1 for _ in sizes[rows + 1 :]))
    found = []
    for n in range(parts):
        # Only images with positions of the part are summed up, and of these every plane with its own positions.
        total = None
        for own in np.unique(np.nonzero(part == n)[0]):
            kept = np.where(part[own : own + 1] == n, loss[own : own + 1], 0)
            term = np.asarray(TABLE["conv_wgrad"].reference(image[own : own + 1], kept, **attributes))
            total = term if total is None else total + term
        if total is None:
            none = slice(0, 0)
            total = np.asarray(TABLE["conv_wgrad"].reference(image[none], loss[none], **attributes))
        found.append(total)
    return np.stack(found)


#: The axes of operands along which they are cut; op -> the one whose results are parts of its results.
_AXES = {"matmul": (-1, -2), "conv_fprop": (1, 1), "conv_dgrad": (1, 0), "conv_wgrad": (0, 0)}
PARTS = {TABLE[name]: _in_parts(TABLE[name], *axes) for name, axes in _AXES.items()}
BANDS = _op(TABLE["conv_wgrad"], "conv_wgrad_bands", ("parts", "band"), _bands)

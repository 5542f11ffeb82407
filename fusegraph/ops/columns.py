"""``col2im``: images of which every position adds up what the windows over it have of each of their taps.

It is the second half of a convolution's gradient by its input: each loss times all taps of the filters is a column of
``(channels, *taps)`` elements, and an element of the image is the sum of those that lie over it (Chellapilla, Puri and
Simard, "High Performance Convolutional Neural Networks for Document Processing", 2006).  The op is not in the table:
`passes.tap_products` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from codegen.combiners import ADD
from codegen.windows import Covering, Window
from fusegraph.ops.base import REQUIRED, Array, Attributes, Kind, Op, TensorType, Types

_Sizes = tuple[int, ...]

#: What is made of a window.
COLUMNS = "columns"


def parts(shape: Sequence[int]) -> tuple[_Sizes, _Sizes]:
    """Returns the taps and the positions of columns ``(images, channels, *taps, *positions)``."""
    rank = (len(shape) - 2) // 2
    return tuple(shape[2 : 2 + rank]), tuple(shape[2 + rank :])


def _windows(types: Types, attributes: Attributes) -> tuple[dict[int, Window], _Sizes]:
    shape = types[0].shape
    taps, positions = parts(shape)
    each = zip(positions, taps, attributes["stride"], attributes["padding"])
    windows: dict[int, Window] = {}
    for d, (n, k, step, (before, _)) in enumerate(each, 2):
        windows[d] = Covering(n, k, step, 1, before)
    return windows, (*shape[:2], *attributes["size"])


def _infer(types: Types, attributes: Attributes) -> TensorType:
    return TensorType(_windows(types, attributes)[1], attributes["dtype"])


def _reference(
    columns: Array, size: _Sizes, stride: _Sizes, padding: Sequence[tuple[int, int]], dtype: object
) -> Array:
    taps, positions = parts(columns.shape)
    reach = [(n - 1) * s + k for n, s, k in zip(positions, stride, taps)]
    ends = [max(r, before + n) for r, n, (before, _) in zip(reach, size, padding)]
    image: Array = np.zeros((*columns.shape[:2], *ends))
    whole = (slice(None), slice(None))
    for tap in product(*map(range, taps)):
        under = tuple(slice(t, t + (n - 1) * s + 1, s) for t, n, s in zip(tap, positions, stride))
        image[whole + under] += columns[whole + tap]
    kept = tuple(slice(before, before + n) for n, (before, _) in zip(size, padding))
    found: Array = image[whole + kept]
    return found


COL2IM = Op(
    name="col2im",
    kind=Kind.POOLING,
    operands=("columns",),
    attributes=dict.fromkeys(("size", "stride", "padding", "dtype"), REQUIRED),
    infer=_infer,
    windows=_windows,
    fold=COLUMNS,
    combiner=ADD,
    reference=_reference,
)

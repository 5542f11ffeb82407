"""``rope`` and its gradient: rotary position embeddings, after cuDNN's.

Su, Lu, Pan, Murtadha, Wen and Liu, "RoFormer: Enhanced transformer with rotary position embedding" (2021); pairs are an
element of the first half and one of the second, as in GPT-NeoX.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.ops.base import Array, Attributes, Kind, Op, Types, register
from fusegraph.ops.composite import Writing, like_first
from fusegraph.ops.pointwise import accepted_kinds, number
from fusegraph.ops.reverse import Reverse


def _normalize(name: str, types: Types, values: Attributes) -> dict[str, Any]:
    x, freqs = types
    for t in types:
        accepted_kinds(name, t.dtype, ("float",))
    if len(x.shape) != 4:
        raise ShapeError(f"{name} is of 4 dimensions (batch, heads, length, elements), got {list(x.shape)}")
    width = values["rope_dim"] or x.shape[-1]
    if width % 2 or not 0 <= width <= x.shape[-1]:
        raise AttributeValueError(f"rope_dim is even and at most {x.shape[-1]}, the elements of a row, got {width}")
    if freqs.shape != (x.shape[2], 1, 1, width):
        raise ShapeError(
            f"freqs {list(freqs.shape)} has not one angle for each position and rotated element: "
            f"{[x.shape[2], 1, 1, width]}"
        )
    return {"rope_dim": width, "output_scale": float(number("output_scale", values["output_scale"], x.dtype, x.shape))}


def _reference(sign: int, x: Array, freqs: Array, rope_dim: int, output_scale: float) -> Array:
    kept, half = x.shape[-1] - rope_dim, rope_dim // 2
    angles = freqs[None, :, 0, 0, :half]
    low, high = x[..., kept : kept + half], x[..., kept + half :]
    with np.errstate(all="ignore"):
        cos, sin = np.cos(angles), sign * np.sin(angles)
        rotated = (x[..., :kept], low * cos - high * sin, high * cos + low * sin)
        return np.concatenate(rotated, axis=-1) * output_scale


def _expand(sign: int, write: Writing, x: Any, freqs: Any, rope_dim: int, output_scale: float) -> Any:
    batch, heads, length, elements = x.shape
    kept, half = elements - rope_dim, rope_dim // 2

    def part(name: str, of: Any, axis: int, first: int, last: int) -> Any:
        starts = tuple(first if d == axis else 0 for d in range(of.rank))
        stops = tuple(last if d == axis else n for d, n in enumerate(of.shape))
        return write("slice", name, of, starts=starts, stops=stops)

    # The halves have a dimension of their own, so that a pair's angle is read as a broadcast.
    turned = part("turned", x, 3, kept, elements) if kept else x
    pairs = write("reshape", "halves", turned, shape=(batch, heads, length, 2, half))
    angles = write("reshape", "angles", part("pairs", freqs, 3, 0, half), shape=(1, 1, length, 1, half))
    low, high = part("low", pairs, 3, 0, 1), part("high", pairs, 3, 1, 2)
    first, second = (write("neg", "negative", high), low) if sign > 0 else (high, write("neg", "negative", low))
    across = write("concatenate", "across", first, second, axis=3)
    along = write("mul", "along", pairs, write("cos", "cos", angles))
    result = write("add", "rotated", along, write("mul", "turn", across, write("sin", "sin", angles)))
    result = write("reshape", "rows", result, shape=(batch, heads, length, rope_dim))
    if kept:
        result = write("concatenate", "whole", part("kept", x, 3, 0, kept), result, axis=3)
    return write("mul", "scaled", result, output_scale) if output_scale != 1 else result


def _by_turned(other: str, at: Reverse, x: Any, freqs: Any, **attributes: Any) -> Any:
    """Turns back; by the angles, gradients go through what the op is written as."""
    if at.wants(1):
        return NotImplemented
    return getattr(at.graph, other)(at.loss, freqs, **attributes)


def _rope(name: str, operand: str, sign: int, doc: str) -> None:
    register(
        Op(
            name=name,
            kind=Kind.COMPOSITE,
            operands=(operand, "freqs"),
            infer=like_first,
            reference=partial(_reference, sign),
            attributes={"rope_dim": 0, "output_scale": 1.0},
            normalize=partial(_normalize, name),
            expand=partial(_expand, sign),
            gradient=partial(_by_turned, "rope_backward" if sign > 0 else "rope"),
            keeps_layout=True,
            doc=doc,
        )
    )


_rope(
    "rope",
    "x",
    1,
    """Rotary position embedding of queries or keys (batch, heads, length, elements): the last rope_dim elements of a
    row (0: all) are pairs, one of the first half and one of the second, which are turned by an angle; the others stay
    as they are.  All are multiplied with output_scale.

    freqs (length, 1, 1, rope_dim) are the angles in radians of each position; those of pairs are its first half.
    Raises ShapeError for other shapes, AttributeValueError for a rope_dim that is odd or larger than a row.""",
)
_rope(
    "rope_backward",
    "loss",
    -1,
    """The gradient of rope: turns the loss back, by the same freqs, rope_dim and output_scale.""",
)

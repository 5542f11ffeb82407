"""Winograd's convolution with 3x3 filters: three linear transforms around a batched matrix product.

M x M results of one channel's 3x3 filter g over a patch d of N x N elements, N = M + 2, are A^T [(G g G^T) * (B^T d B)]
A: N^2 products instead of 9 M^2.  Over all channels, tiles and filters the products of each of the N^2 places are a
matrix product (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016).  The points of F(4x4,3x3)
are 0, +-3/4, +-3/2 and infinity, with whose coefficients errors are a third of those of 0, +-1, +-2 (Barabasz,
Anderson, Soodhalter and Gregg, "Error Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural
Networks", 2020).

The transforms are ops that only `passes.algorithms` adds to a graph: they are not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusegraph.dtypes import float32
from fusegraph.ops.base import REQUIRED, Array, Attributes, Kind, Op, Role, TensorType, Types

#: Results a side of a tile, by the value of a convolution's attribute ``algorithm``.
TILES = {"winograd_4x4": 4, "winograd_2x2": 2}


def _four() -> tuple[Array, Array, Array]:
    """Returns the matrices of F(4, 3) for the points 0, a, -a, b, -b and infinity."""
    a, b = 3 / 4, 3 / 2
    p, q = a * a, b * b
    points = np.array([0, a, -a, b, -b])
    output = np.zeros((4, 6))
    output[:, :5] = points ** np.arange(4)[:, None]
    output[3, 5] = 1
    scale = np.array([1 / (p * q), *[1 / (2 * p * (p - q))] * 2, *[1 / (2 * q * (q - p))] * 2])
    taps = np.zeros((6, 3))
    taps[:5] = scale[:, None] * points[:, None] ** np.arange(3)
    taps[5, 2] = 1
    patch = np.array(
        [
            [p * q, 0, -p - q, 0, 1, 0],
            [0, -a * q, -q, a, 1, 0],
            [0, a * q, -q, -a, 1, 0],
            [0, -b * p, -p, b, 1, 0],
            [0, b * p, -p, -b, 1, 0],
            [0, p * q, 0, -p - q, 0, 1],
        ]
    )
    return output, taps, patch


#: Tile -> A^T (M x N), G (N x 3), B^T (N x N).
MATRICES: Mapping[int, tuple[Array, Array, Array]] = {
    2: (
        np.array([[1.0, 1, 1, 0], [0, 1, -1, 1]]),
        np.array([[1.0, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]),
        np.array([[1.0, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]]),
    ),
    4: _four(),
}


def unsuitable(role: Role | None, types: Types, attributes: Attributes) -> str | None:
    """Returns why Winograd's algorithm cannot do a convolution with these operands; None if it can."""
    taps = types[1].shape[2:]
    if role is Role.WGRAD:
        return "it is for results that share a filter, not for the gradient of one"
    if taps != (3, 3):
        return f"it is for 3x3 filters, not {'x'.join(map(str, taps))}"
    for what in ("stride", "dilation"):
        if max(attributes[what]) > 1:
            return f"it is for a {what} of 1"
    if attributes["groups"] > 1:
        return "it is for one group"
    for t in types:
        if t.dtype != float32:
            return f"it is for float32, not {t.dtype}"
    if attributes["compute_dtype"] == "tf32":
        return "tf32 has tensor cores"
    return None


def tiles(results: tuple[int, int], tile: int) -> tuple[int, int]:
    """Returns how many tiles there are of rows and columns of results."""
    return -(-results[0] // tile), -(-results[1] // tile)


def transforms(
    role: Role | None, attributes: Attributes, shape: tuple[int, ...], tile: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the attributes of the transforms of filter, input and output, for a result of this shape.

    The op is a convolution, or the gradient of its input.
    With a stride of 1 the gradient of an input is the convolution of the loss with the filter turned around and its
    channel dimensions exchanged, padded by what the filter reaches beyond the padding.
    """
    gradient = role is Role.DGRAD
    flip = (attributes["mode"] == "convolution") != gradient
    padding = tuple(p[0] for p in attributes["padding"])
    before = tuple(2 - p for p in padding) if gradient else padding
    return (
        {"tile": tile, "flip": flip, "exchange": gradient},
        {"tile": tile, "before": before, "results": shape[2:]},
        {"tile": tile, "shape": shape},
    )


def _sides(matrix: Array, x: Array) -> Array:
    """Returns matrix x matrix^T on the last two dimensions."""
    return np.asarray(matrix @ x @ matrix.T)


def filter_transform(w: Array, tile: int, flip: bool, exchange: bool, magnitude: bool = False) -> Array:
    """Returns (filters, channels, 3, 3) -> G w G^T as (N^2, channels, filters); magnitude: |G| w |G|^T."""
    matrix = MATRICES[tile][1]
    taps = w[..., ::-1, ::-1] if flip else w
    filters, channels = (1, 0) if exchange else (0, 1)
    with np.errstate(all="ignore"):
        u = _sides(np.abs(matrix) if magnitude else matrix, taps)
    side = tile + 2
    return u.transpose(2, 3, channels, filters).reshape(side * side, w.shape[channels], w.shape[filters])


def input_transform(
    x: Array, tile: int, before: tuple[int, int], results: tuple[int, int], magnitude: bool = False
) -> Array:
    """Returns (images, channels, rows, columns) -> B^T d B of every patch as (N^2, images * tiles, channels)."""
    matrix, side, (down, across) = MATRICES[tile][2], tile + 2, tiles(results, tile)
    padded = np.zeros((*x.shape[:2], down * tile + 2, across * tile + 2))
    own, other = zip(*(_overlap(size, b, whole) for size, b, whole in zip(x.shape[2:], before, padded.shape[2:])))
    padded[(..., *own)] = x[(..., *other)]
    steps = padded.strides
    shape = (*x.shape[:2], down, across, side, side)
    strides = (*steps[:2], tile * steps[2], tile * steps[3], *steps[2:])
    patches = np.lib.stride_tricks.as_strided(padded, shape, strides)
    with np.errstate(all="ignore"):
        v = _sides(np.abs(matrix) if magnitude else matrix, patches)
    return v.transpose(4, 5, 0, 2, 3, 1).reshape(side * side, x.shape[0] * down * across, x.shape[1])


def _overlap(size: int, before: int, whole: int) -> tuple[slice, slice]:
    """Returns where elements 0 to size - 1, put at ``before`` of ``whole`` places, lie: (the places, the elements)."""
    first, last = max(before, 0), min(before + size, whole)
    return slice(first, max(first, last)), slice(first - before, max(first, last) - before)


def output_transform(m: Array, tile: int, shape: tuple[int, ...], magnitude: bool = False, **_: Any) -> Array:
    """Returns (N^2, images * tiles, filters) -> A^T m A of every tile as (images, filters, rows, columns)."""
    matrix, side, (down, across) = MATRICES[tile][0], tile + 2, tiles((shape[2], shape[3]), tile)
    places = m.reshape(side, side, shape[0], down, across, shape[1]).transpose(2, 5, 3, 4, 0, 1)
    with np.errstate(all="ignore"):
        y = _sides(np.abs(matrix) if magnitude else matrix, places)
    whole = y.transpose(0, 1, 2, 4, 3, 5).reshape(shape[0], shape[1], down * tile, across * tile)
    return whole[:, :, : shape[2], : shape[3]]


def _filter_infer(types: Types, attributes: Attributes) -> TensorType:
    filters, channels = types[0].shape[:2]
    side = attributes["tile"] + 2
    columns = (filters, channels) if attributes["exchange"] else (channels, filters)
    return TensorType((side * side, *columns), float32)


def _input_infer(types: Types, attributes: Attributes) -> TensorType:
    images, channels = types[0].shape[:2]
    side, (down, across) = attributes["tile"] + 2, tiles(attributes["results"], attributes["tile"])
    return TensorType((side * side, images * down * across, channels), float32)


def _output_infer(_: Types, attributes: Attributes) -> TensorType:
    return TensorType(attributes["shape"], attributes["dtype"])


def _transform(role: Role, operand: str, infer: Any, reference: Any, *attributes: str) -> Op:
    return Op(
        name=f"winograd_{role.value}",
        kind=Kind.TRANSFORM,
        role=role,
        operands=(operand,),
        attributes=dict.fromkeys(attributes, REQUIRED),
        infer=infer,
        reference=reference,
    )


FILTER = _transform(Role.WINOGRAD_FILTER, "w", _filter_infer, filter_transform, "tile", "flip", "exchange")
INPUT = _transform(Role.WINOGRAD_INPUT, "x", _input_infer, input_transform, "tile", "before", "results")
OUTPUT = _transform(Role.WINOGRAD_OUTPUT, "m", _output_infer, output_transform, "tile", "shape", "dtype")

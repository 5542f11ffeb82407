"""Fourier transforms as products with matrices of sines and cosines.

The last dimension of a signal has size 2 for complex numbers (real, imaginary) and size 1 for real ones.
"""

from __future__ import annotations

from math import isqrt, prod

import numpy as np

from codegen.sizes import smaller
from fusegraph.dtypes import DType, float32, float64
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.frontends.onnx.tensors import Array
from fusegraph.graph import Graph, Tensor
from fusegraph.ops.reduction import normal_axes

#: The most numbers of a matrix, and the largest length that is always transformed by one product.
MAX_MATRIX, WHOLE = 1 << 24, 256


@operator("DFT")
def dft(call: Call, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor:
    """Returns the transform along an axis, which may not be the last; before version 20 the axis is an attribute."""
    given = call["axis"] if call.version < 20 else -2 if axis is None else int(call.number(axis, "the axis"))
    along = _signal_axis(x, given)
    inverse, onesided = bool(call["inverse"]), bool(call["onesided"])
    size = x.shape[along]
    if length is not None:
        size = int(call.number(length, "the length"))
    elif inverse and onesided:
        size = 2 * (size - 1)
    if size < 1:
        raise ModelError(f"the length of a transform is at least 1, got {size}")
    return transform(call, x, along, size, inverse, onesided)


@operator("STFT")
def stft(call: Call, x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None) -> Tensor:
    """Returns the transforms of frames of the signal (batch, length, 1 or 2), each ``step`` elements after the last."""
    graph, hop = call.graph, int(call.number(step, "the step"))
    if x.rank != 3:
        raise ModelError(f"a signal (batch, length, 1 or 2) is wanted, got {list(x.shape)}")
    _signal_axis(x, 1)
    size = x.shape[1] if window is None else window.size
    if length is not None:
        size = int(call.number(length, "the length of a frame"))
    if hop < 1 or not 1 <= size <= x.shape[1]:
        raise ModelError(f"frames of {size} elements, {hop} apart, are none of {x.shape[1]} elements")
    if window is not None and window.shape != (size,):
        raise ModelError(f"the window has {size} elements, got {list(window.shape)}")
    count = (x.shape[1] - size) // hop + 1
    if count * size > MAX_MATRIX:
        raise ModelError(f"{count} frames of {size} elements are too many")
    places = np.arange(count)[:, None] * hop + np.arange(size)
    frames = graph.gather(x, places, 1)  # (batch, frames, length, 1 or 2)
    if window is not None:
        frames = graph.mul(frames, graph.reshape(window, [size, 1]))
    return transform(call, frames, 2, size, False, bool(call["onesided"]))


def _signal_axis(x: Tensor, axis: int) -> int:
    """Returns the axis of a signal, counted from 0.  Raises ModelError if it or the signal is wrong."""
    if x.rank < 2 or x.shape[-1] not in (1, 2):
        raise ModelError(f"the last dimension has a real part, and maybe an imaginary one, got {list(x.shape)}")
    (along,) = normal_axes(axis, x.rank)
    if along == x.rank - 1:
        raise ModelError(f"axis {axis} is that of the real and the imaginary part")
    if not x.dtype.is_float:
        raise ModelError(f"a signal is of floats, got {x.dtype}")
    return along


def transform(call: Call, x: Tensor, axis: int, size: int, inverse: bool, onesided: bool) -> Tensor:
    """Returns the transform of ``size`` elements along an axis; a shorter signal is padded with zeros.

    If ``onesided``, the result is only the first half, whose conjugate the other half is.  If also ``inverse``, the
    signal is such a half, and the result is real.
    """
    if size > MAX_MATRIX:
        raise ModelError(f"a transform of {size} elements is too long; at most {MAX_MATRIX} are possible")
    graph = call.graph
    half = size // 2 + 1
    taken = smaller(x.shape[axis], half if inverse and onesided else size)
    order = [*(d for d in range(x.rank - 1) if d != axis), axis, x.rank - 1]
    y = graph.slice(x, None, [taken if d == axis else None for d in range(x.rank)])
    y = graph.transpose(y, order)
    outer, parts = y.shape[:-2], x.shape[-1]
    rows = graph.reshape(y, [prod(outer), taken, parts])
    if _direct(size) or not taken:
        matrix = _matrix(size, taken, parts, inverse, onesided)
        results, kinds = matrix.shape[2:]
        rows = _product(graph, rows, matrix, x)
    else:
        if parts == 1:
            rows = graph.pad(rows, [(0, 0), (0, 0), (0, 1)])
        if inverse and onesided:
            rows = _mirrored(graph, rows, size, half)
        rows = graph.pad(rows, [(0, 0), (0, size - rows.shape[1]), (0, 0)])
        rows = _in_steps(graph, graph.cast(rows, _wide(x)), inverse)
        results, kinds = (size, 1) if inverse and onesided else (half if onesided else size, 2)
        rows = graph.slice(rows, None, [None, results, kinds])
        rows = graph.mul(rows, 1 / size) if inverse else rows
        rows = graph.cast(rows, x.dtype)
    y = graph.reshape(rows, [*outer, results, kinds])
    return graph.transpose(y, list(np.argsort(order)))


def _wide(x: Tensor) -> DType:
    return float64 if x.dtype == float64 else float32


def _direct(size: int) -> bool:
    """Tells whether a transform is computed by one product: it is short, or its length is prime."""
    return size <= WHOLE or _divisor(size) == 1


def _divisor(size: int) -> int:
    """Returns the largest divisor that is not larger than the square root."""
    return next(d for d in range(isqrt(size), 0, -1) if size % d == 0)


def _turns(first: Array, second: Array, size: int) -> tuple[Array, Array]:
    """Returns the cosine and sine of 2 pi first * second / size, exact where they are 0."""
    eighths = (first.astype(np.int64) * second.astype(np.int64) % size) * 8
    angle = 2 * np.pi * (eighths / 8) / size
    cosine, sine = np.cos(angle), np.sin(angle)
    cosine[(eighths == 2 * size) | (eighths == 6 * size)] = 0
    sine[(eighths == 0) | (eighths == 4 * size)] = 0
    return cosine, sine


def _matrix(size: int, taken: int, parts: int, inverse: bool, onesided: bool) -> Array:
    """Returns the matrix (element, its part, result, its part): what a part of an element adds to a part of a result.

    A part is the real or imaginary one.
    """
    whole = inverse and onesided
    results = size if whole or not onesided else size // 2 + 1
    if 2 * taken * parts * results > MAX_MATRIX:
        raise ModelError(f"a transform of {size} elements, which has no small divisors, needs too large a matrix")
    cosine, sine = _turns(np.arange(taken)[:, None], np.arange(results), size)
    if not inverse:
        sine = -sine
    real = np.stack([cosine, sine], -1)  # of 1 and of i: exp(i angle) and i exp(i angle)
    imaginary = np.stack([-sine, cosine], -1)
    matrix = np.stack([real, imaginary][:parts], 1)
    if inverse:
        matrix = matrix / size
    if whole:
        twice = np.where((np.arange(taken) == 0) | (2 * np.arange(taken) == size), 1.0, 2.0)
        matrix = (matrix * twice[:, None, None, None])[..., :1]
    return matrix


def _product(graph: Graph, rows: Tensor, matrix: Array, like: Tensor) -> Tensor:
    """Returns (rows, elements, parts) times (elements, parts, results, kinds): (rows, results, kinds)."""
    elements, parts, results, kinds = matrix.shape
    flat = graph.reshape(rows, [rows.shape[0], elements * parts])
    wide = _wide(like).numpy
    factor = graph.constant(np.ascontiguousarray(matrix.reshape(elements * parts, results * kinds), wide))
    return graph.reshape(graph.matmul(flat, factor, dtype=like.dtype), [rows.shape[0], results, kinds])


def _mirrored(graph: Graph, rows: Tensor, size: int, half: int) -> Tensor:
    """Returns the whole spectrum of a real signal, of which (rows, elements, 2) is the first half."""
    rows = graph.pad(rows, [(0, 0), (0, half - rows.shape[1]), (0, 0)])
    k = np.arange(size)
    back = k >= half
    places = np.where(back, size - k, k)
    signs = np.ones((size, 2), _wide(rows).numpy)
    signs[back, 1] = -1
    signs[(k == 0) | (2 * k == size), 1] = 0  # these are real
    return graph.mul(graph.gather(rows, places, 1), signs)


def _in_steps(graph: Graph, x: Tensor, inverse: bool) -> Tensor:
    """Returns the transform of (rows, size, 2) without the division by size, by Cooley and Tukey's algorithm."""
    count, size, _ = x.shape
    if _direct(size):
        return _product(graph, x, _matrix(size, size, 2, inverse, False) * (size if inverse else 1), x)
    a = _divisor(size)
    b = size // a
    columns = graph.reshape(graph.transpose(graph.reshape(x, [count, a, b, 2]), [0, 2, 1, 3]), [count * b, a, 2])
    y = graph.reshape(_in_steps(graph, columns, inverse), [count, b, a, 2])
    cosine, sine = _turns(np.arange(b)[:, None], np.arange(a), size)
    sine = sine if inverse else -sine
    wide = _wide(x).numpy
    turned = graph.gather(y, np.array([1, 0]), 3)  # the imaginary part, then the real one
    y = graph.add(
        graph.mul(y, cosine.astype(wide)[..., None]), graph.mul(turned, np.stack([-sine, sine], -1).astype(wide))
    )
    rows = graph.reshape(graph.transpose(y, [0, 2, 1, 3]), [count * a, b, 2])
    z = graph.reshape(_in_steps(graph, rows, inverse), [count, a, b, 2])
    return graph.reshape(graph.transpose(z, [0, 2, 1, 3]), [count, size, 2])


@operator("MelWeightMatrix")
def mel_weight_matrix(call: Call, bins: Tensor, length: Tensor, rate: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Returns weights (length // 2 + 1, bins): triangles over a transform's frequencies, equally spaced in mel."""
    names = ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz")
    numbers = [float(call.number(t, name)) for name, t in zip(names, (bins, length, rate, lower, upper))]
    if not all(np.isfinite(numbers)) or min(numbers[:3]) < 1 or not 0 <= numbers[3] <= numbers[4]:
        raise ModelError(f"{', '.join(names)} are no scale: {', '.join(f'{n:g}' for n in numbers)}")
    count, size = int(numbers[0]), int(numbers[1])
    rows = size // 2 + 1
    if rows * (count + 2) > MAX_MATRIX:
        raise ModelError(f"a matrix of {rows} x {count} weights is too large")
    low, high = (2595 * np.log10(1 + f / 700) for f in numbers[3:])
    mels = low + np.arange(count + 2) * ((high - low) / (count + 2))
    places = np.floor((size + 1) * (700 * (10 ** (mels / 2595) - 1)) / numbers[2]).astype(np.int64)
    if places[-1] > rows:
        raise ModelError(f"frequencies up to {numbers[4]:g} are not among the {rows} of a transform")
    left, centre, right = (places[k : k + count] for k in range(3))
    at = np.arange(rows)[:, None]
    rising = (at - left) / np.maximum(centre - left, 1)
    falling = (right - at) / np.maximum(right - centre, 1)
    weights = np.where((at >= left) & (at <= centre), rising, 0.0)
    weights = np.where((at == centre) & (left == centre), 1.0, weights)
    weights = np.where((at >= centre) & (at < right), falling, weights)
    return call.graph.constant(weights, dtype=call.dtype(call["output_datatype"]))

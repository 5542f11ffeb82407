"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from codegen.sizes import larger, smaller
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators.norms import per_channel
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor

Pads = list[tuple[int, int]]
#: Stride, padding (before, after) and dilation of each spatial dimension.
Window = tuple[list[int], Pads, list[int]]


# ---- matrix products


@operator("MatMul")
def matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """Multiplies as NumPy's matmul: vectors count as a row on the left, a column on the right; that axis is dropped."""
    graph = call.graph
    left = graph.unsqueeze(a, 0) if a.rank == 1 else a
    right = graph.unsqueeze(b, 1) if b.rank == 1 else b
    result = graph.matmul(left, right)
    dropped = [-2] * (a.rank == 1) + [-1] * (b.rank == 1)
    return graph.squeeze(result, dropped) if dropped else result


@operator("Einsum")
def einsum(call: Call, *operands: Tensor) -> Tensor:
    return call.graph.einsum(call["equation"], *operands)


@operator("Gemm")
def gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    graph = call.graph
    left = graph.transpose(a) if call["transA"] else a
    right = graph.transpose(b) if call["transB"] else b
    if left.rank != 2 or right.rank != 2:
        raise ModelError(f"it takes two matrices, got {list(a.shape)} and {list(b.shape)}")
    y = graph.matmul(left, right)
    if call["alpha"] != 1:
        y = graph.mul(y, _factor(call, "alpha", y))
    if c is None or call["beta"] == 0:
        return y
    return graph.add(y, c if call["beta"] == 1 else graph.mul(c, _factor(call, "beta", c)))


def _factor(call: Call, name: str, x: Tensor) -> float:
    value: float = call[name]
    if x.dtype.is_float:
        return value
    if value != int(value):
        raise call.refuse(f"{name} {value} of {x.dtype}")
    return int(value)


@operator("Det")
def determinant(call: Call, x: Tensor) -> Tensor:
    """Returns the product of the pivots of Gaussian elimination with partial pivoting."""
    graph = call.graph
    if x.rank < 2 or x.shape[-1] != x.shape[-2] or not x.dtype.is_float:
        raise ModelError(f"square matrices of floats are wanted, got {x.dtype} {list(x.shape)}")
    call.check_size(20 * x.shape[-1])
    a = graph.reshape(
        graph.cast(x, "float64" if x.dtype.itemsize == 8 else "float32"), [prod(x.shape[:-2]), *x.shape[-2:]]
    )
    y = graph.broadcast(graph.constant(1, dtype=a.dtype), [a.shape[0], 1, 1])
    while a.shape[-1] > 1:
        column = a[:, :, :1]
        place = graph.reduction(graph.abs(column), "argmax", 1)  # (batch, 1, 1)
        pivot = graph.take_along_axis(a, graph.broadcast(place, [a.shape[0], 1, a.shape[2]]), 1)
        first = pivot[:, :, :1]
        y = graph.mul(y, graph.binary_select(first, graph.neg(first), graph.cmp_eq(place, 0)))
        # The first row takes the place of the pivot row.
        rest = graph.binary_select(a[:, :1], a, graph.cmp_eq(graph.gen_index(a, 1), place))[:, 1:]
        share = graph.div(rest[:, :, :1], graph.binary_select(1.0, first, graph.cmp_eq(first, 0.0)))
        a = graph.sub(rest[:, :, 1:], graph.mul(share, pivot[:, :, 1:]))
    y = graph.mul(y, a) if a.shape[-1] else y
    return graph.reshape(graph.cast(y, x.dtype), x.shape[:-2])


# ---- windows of convolutions and pooling


def window_of(call: Call, sizes: Sequence[int], taps: Sequence[int]) -> Window:
    stride, dilation = (per_axis(call, name, len(sizes)) for name in ("strides", "dilations"))
    return stride, _pads(call, sizes, taps, stride, dilation), dilation


def _pads(
    call: Call, sizes: Sequence[int], taps: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Pads:
    """Returns the padding (before, after) of each spatial dimension, from pads or auto_pad."""
    rank, mode, pads = len(sizes), call["auto_pad"], call["pads"] or [0] * (2 * len(sizes))
    if mode in ("NOTSET", None):
        if len(pads) != 2 * rank:
            raise ModelError(f"pads has {2 * rank} numbers, got {len(pads)}")
        return list(zip(pads[:rank], pads[rank:]))
    if mode == "VALID":
        return [(0, 0)] * rank
    call.word("auto_pad", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
    each = zip(sizes, taps, stride, dilation)
    return [_same(mode, (n - 1) // s * s + (k - 1) * d + 1 - n) for n, k, s, d in each]


def _same(mode: str, total: int) -> tuple[int, int]:
    """Splits the total padding of auto_pad into (before, after); SAME_UPPER has more after if it is odd."""
    total = larger(total, 0)
    less = total // 2
    more = total - less
    return (less, more) if mode == "SAME_UPPER" else (more, less)


def per_axis(call: Call, name: str, rank: int) -> list[int]:
    """Returns strides or dilations: a positive number for each spatial dimension, by default 1.  Raises ModelError."""
    values = call[name] or [1] * rank
    if len(values) != rank or min(values) < 1:
        raise ModelError(f"{name} has {rank} numbers of at least 1, got {values[:8]}")
    return list(values)


def taps_of(call: Call, x: Tensor, w: Tensor) -> tuple[int, ...]:
    """Returns the spatial sizes of a filter.  Raises ModelError if kernel_shape differs or ranks are wrong."""
    if w.rank != x.rank or x.rank < 3:
        raise ModelError(f"an image and a filter of one rank of at least 3 are wanted, got {x.rank} and {w.rank}")
    taps = w.shape[2:]
    if call["kernel_shape"] not in (None, [], list(taps)):
        raise ModelError(f"kernel_shape {call['kernel_shape'][:8]} is not that of the filter, {list(taps)}")
    if x.rank > 5:
        raise call.refuse(f"{x.rank - 2} spatial dimensions")
    return taps


@operator("Conv")
def conv(call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    window = window_of(call, x.shape[2:], taps_of(call, x, w))
    y = call.graph.conv_fprop(x, w, *window, call["group"])
    return y if bias is None else call.graph.add(y, per_channel(call, y, bias))


@operator("ConvTranspose")
def conv_transpose(call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns a convolution's gradient by its input, of the size that output_padding or output_shape gives."""
    graph, taps, rank = call.graph, taps_of(call, x, w), x.rank - 2
    stride, dilation = (per_axis(call, name, rank) for name in ("strides", "dilations"))
    more, wanted, mode = call["output_padding"] or [0] * rank, call["output_shape"], call["auto_pad"]
    if len(more) != rank or min(more) < 0:
        raise ModelError(f"output_padding has {rank} numbers of at least 0, got {more[:8]}")
    if wanted and len(wanted) != rank:
        raise ModelError(f"output_shape has {rank} sizes, got {wanted[:8]}")
    full = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in zip(x.shape[2:], taps, stride, dilation)]
    if mode in ("SAME_UPPER", "SAME_LOWER") and not wanted:
        wanted = [n * s for n, s in zip(x.shape[2:], stride)]
    if wanted:
        padding = [_same(mode, reach + extra - size) for reach, extra, size in zip(full, more, wanted)]
    else:
        padding = _pads(call, x.shape[2:], taps, stride, dilation)
    sizes = list(wanted) if wanted else [f + extra - sum(pads) for f, extra, pads in zip(full, more, padding)]
    # Beyond the reach of the last position and the stride after it there are only zeros.
    fitting = [smaller(size, f - sum(p) + s - 1) for size, f, p, s in zip(sizes, full, padding, stride)]
    y = graph.conv_dgrad(x, w, fitting, stride, padding, dilation, call["group"])
    if fitting != sizes:
        y = graph.pad(y, [(0, 0), (0, 0), *((0, size - most) for size, most in zip(sizes, fitting))])
    return y if bias is None else graph.add(y, per_channel(call, y, bias))

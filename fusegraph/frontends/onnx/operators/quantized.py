"""Quantized numbers: small integers or 8-bit floats with a scale and a zero point."""

from __future__ import annotations

from collections.abc import Sequence

from fusegraph.dtypes import DType, float32, int32, uint8
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators.norms import per_channel
from fusegraph.frontends.onnx.operators.products import conv
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor
from fusegraph.ops.reduction import normal_axes

# ---- to and from floats


def _spread(call: Call, x: Tensor, parameter: Tensor) -> Tensor:
    """Returns a scale or zero point so that it broadcasts to x.

    There is one for all elements, one for each position along an axis, or one for each block along it.
    """
    graph = call.graph
    if parameter.size == 1:
        return graph.reshape(parameter, ())
    if call["axis"] is None:
        raise ModelError(f"a parameter is one number, got {list(parameter.shape)}")
    (axis,) = normal_axes(call["axis"], x.rank)
    if parameter.rank == 1:
        return graph.reshape(parameter, [parameter.size if d == axis else 1 for d in range(x.rank)])
    block = call["block_size"] or 0
    expected = tuple(-(-n // max(block, 1)) if d == axis else n for d, n in enumerate(x.shape))
    if block < 1 or parameter.shape != expected:
        raise ModelError(f"a parameter {list(parameter.shape)} is none of {list(x.shape)} in blocks of {block}")
    wide = graph.broadcast(graph.unsqueeze(parameter, axis + 1), [*expected[: axis + 1], block, *expected[axis + 1 :]])
    whole = graph.reshape(wide, [n * block if d == axis else n for d, n in enumerate(expected)])
    return graph.slice(whole, None, x.shape)


def _quantized(call: Call, x: Tensor, zero: Tensor | None, dtype: DType, *, saturate: bool = True) -> Tensor:
    """Quantizes numbers in units of the scale: rounds them for integers, adds the zero point and casts.

    Numbers out of range saturate; as 8-bit floats they become infinite or NaN unless ``saturate``.
    """
    graph = call.graph
    if dtype.is_int:
        x = graph.round(x)
    if zero is not None:
        x = graph.add(x, graph.cast(zero, float32))
    return graph.cast(x, dtype, saturate=saturate)


@operator("QuantizeLinear")
def quantize_linear(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    graph = call.graph
    given = call["output_dtype"]
    dtype = zero.dtype if zero is not None else call.dtype(given) if given else uint8
    units = graph.div(graph.cast(x, float32), graph.cast(_spread(call, x, scale), float32))
    spread = None if zero is None else _spread(call, x, zero)
    return _quantized(call, units, spread, dtype, saturate=call["saturate"] != 0)


@operator("DequantizeLinear")
def dequantize_linear(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    graph = call.graph
    dtype = call.dtype(call["output_dtype"]) if call["output_dtype"] else scale.dtype
    number = graph.cast(x, float32)
    if zero is not None:
        number = graph.sub(number, graph.cast(_spread(call, x, zero), float32))
    return graph.cast(graph.mul(number, graph.cast(_spread(call, x, scale), float32)), dtype)


# ---- products


def _without_zero(call: Call, x: Tensor, zero: Tensor | None, shape: Sequence[int] | None = None) -> Tensor:
    wide = call.graph.cast(x, int32)
    if zero is None:
        return wide
    return call.graph.sub(wide, call.graph.cast(zero if shape is None else call.graph.reshape(zero, shape), int32))


@operator("MatMulInteger")
def matmul_integer(
    call: Call, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    """Sums products of numbers less zero points, modulo 2^32: as sums of the products of the numbers themselves.

    These are what tensor cores multiply.  The others that a zero point brings in, of the sums of each row of a and of
    each column of b, are few, and those of a constant are known before.
    """
    graph = call.graph
    left = graph.unsqueeze(a, 0) if a.rank == 1 else a
    right = graph.unsqueeze(b, 1) if b.rank == 1 else b
    rows, columns = _zero_of(call, a_zero, left, -1), _zero_of(call, b_zero, right, -2)
    y = graph.matmul(left, right, dtype=int32)
    if rows is not None:
        y = graph.sub(y, graph.mul(rows, graph.reduction(graph.cast(right, int32), "add", right.rank - 2)))
    if columns is not None:
        y = graph.sub(y, graph.mul(columns, graph.reduction(graph.cast(left, int32), "add", left.rank - 1)))
    if rows is not None and columns is not None:
        terms = graph.constant(left.shape[-1], dtype=int32)
        y = graph.add(y, graph.mul(graph.mul(rows, columns), terms))
    dropped = [-2] * (a.rank == 1) + [-1] * (b.rank == 1)
    return graph.squeeze(y, dropped) if dropped else y


def _zero_of(call: Call, zero: Tensor | None, x: Tensor, summed: int) -> Tensor | None:
    """Returns zero points, one or one for each row of the first operand or column of the second, as they broadcast.

    ``summed`` is the dimension of x that is summed.  Returns None if they are known to be 0.
    """
    if zero is None:
        return None
    known = call.values.known(zero)
    if known is not None and not known.any():
        return None
    if zero.size == 1:
        zero = call.graph.reshape(zero, ())
    elif zero.rank == 1:
        zero = call.graph.unsqueeze(zero, 1 if summed == -1 else 0)
    elif zero.rank != x.rank or zero.shape[summed] != 1:
        raise ModelError(f"zero points {list(zero.shape)} are not one for each row or column of {list(x.shape)}")
    return call.graph.cast(zero, int32)


@operator("ConvInteger")
def conv_integer(
    call: Call, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    each = None if w_zero is None or w_zero.rank != 1 else [w_zero.size, *(1 for _ in w.shape[1:])]
    return conv(call, _without_zero(call, x, x_zero), _without_zero(call, w, w_zero, each))


@operator("QLinearMatMul")
def qlinear_matmul(
    call: Call,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    graph = call.graph
    sums = matmul_integer(call, a, b, a_zero, b_zero)
    rows = [a_scale.size, 1] if a_scale.rank == 1 and a_scale.size > 1 else a_scale.shape
    scales = graph.mul(graph.cast(graph.reshape(a_scale, rows), float32), graph.cast(b_scale, float32))
    units = graph.div(graph.mul(graph.cast(sums, float32), scales), graph.cast(y_scale, float32))
    return _quantized(call, units, y_zero, y_zero.dtype)


@operator("QLinearConv")
def qlinear_conv(
    call: Call,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    graph = call.graph
    sums = conv_integer(call, x, w, x_zero, w_zero)
    if bias is not None:
        sums = graph.add(sums, per_channel(call, sums, bias))
    each = per_channel(call, sums, w_scale) if w_scale.rank == 1 and w_scale.size > 1 else graph.reshape(w_scale, ())
    scale = graph.div(graph.mul(graph.reshape(x_scale, ()), each), graph.reshape(y_scale, ()))
    return _quantized(call, graph.mul(graph.cast(sums, float32), scale), y_zero, y_zero.dtype)

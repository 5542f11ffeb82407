"""Quantized numbers: small integers or 8-bit floats with a scale and a zero point."""

from __future__ import annotations

from collections.abc import Sequence

from fusegraph.dtypes import DType, float32, int32, uint8
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators.norms import per_channel
from fusegraph.frontends.onnx.operators.products import conv, matmul
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
    rows = None if a_zero is None or a_zero.rank != 1 or a_zero.size == 1 else [a_zero.size, 1]
    return matmul(call, _without_zero(call, a, a_zero, rows), _without_zero(call, b, b_zero))


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

"""Operators that onnxruntime contributes (`frontends.onnx.schemas`): weights of few bits."""

from __future__ import annotations

from math import prod

import numpy as np

from fusegraph.dtypes import float32, uint8
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators.products import matmul
from fusegraph.frontends.onnx.operators.quantized import dequantize_linear
from fusegraph.frontends.onnx.schemas import MICROSOFT
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor

#: Bits of numbers of which a byte has whole ones.
_BITS = (2, 4, 8)
#: The smallest block of MatMulNBits.
_LEAST = 16

operator("DequantizeLinear", domain=MICROSOFT)(dequantize_linear)


def _shaped(call: Call, what: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor in a shape, which older models write as one line.  Raises ModelError for another."""
    if x.shape not in (shape, (prod(shape),)):
        raise ModelError(f"{what} has the shape {list(shape)}, got {list(x.shape)}")
    return x if x.shape == shape else call.graph.reshape(x, shape)


def _apart(call: Call, x: Tensor, bits: int) -> Tensor:
    """Returns the numbers of so many bits in the bytes of the last dimension, the lowest bits first."""
    if bits == 8:
        return x
    graph, each = call.graph, 8 // bits
    wide = graph.broadcast(graph.unsqueeze(x, x.rank), [*x.shape, each])
    places = graph.mul(graph.cast(graph.gen_index(wide, axis=x.rank), uint8), bits)
    numbers = graph.bitwise_and(graph.shift_right(wide, places), (1 << bits) - 1)
    return graph.reshape(numbers, [*x.shape[:-1], x.shape[-1] * each])


def _zeros(call: Call, packed: Tensor, blocks: int, bits: int) -> Tensor:
    """Returns packed zero points.

    Where the last byte of a column has others than its own they are laid out anew, if they are known: these few bytes
    would be at computed positions else.
    """
    graph, known = call.graph, call.values.known(packed)
    if blocks * bits % 8 == 0:
        return _apart(call, packed, bits)
    if known is None:
        return graph.slice(_apart(call, packed, bits), None, (packed.shape[0], blocks))
    places = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (known[:, :, None] >> places & ((1 << bits) - 1)).reshape(packed.shape[0], -1)
    return graph.constant(np.ascontiguousarray(numbers[:, :blocks]))


@operator("MatMulNBits", domain=MICROSOFT)
def matmul_n_bits(
    call: Call,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiplies by a weight (N, K) of numbers of few bits in blocks along K, the last of which may be padded.

    A number means itself less the zero point, times the scale, of its block; with g_idx of the group that this names.
    """
    graph, terms, columns, bits, block = (call.graph, *(call[name] for name in ("K", "N", "bits", "block_size")))
    if bits not in _BITS:
        raise call.refuse(f"numbers of {bits} bits, of which bytes have parts")
    if call["weight_prepacked"]:
        raise call.refuse("weights packed for one kind of GPU")
    if block < _LEAST or block & (block - 1):
        raise ModelError(f"block_size is a power of 2 of at least {_LEAST}, got {block}")
    if not a.rank or a.shape[-1] != terms or columns < 1 or terms < 1:
        raise ModelError(f"A has K = {terms} elements a row and B N = {columns} columns, got A {list(a.shape)}")
    blocks = -(-terms // block)
    whole = blocks * block
    numbers = _apart(call, _shaped(call, "B", b, (columns, blocks, block * bits // 8)), bits)
    scales = _shaped(call, "scales", scales, (columns, blocks))
    if zeros is None:
        zeros = graph.constant(float(1 << (bits - 1)), dtype=float32)
    elif zeros.dtype == uint8:
        zeros = _zeros(call, _shaped(call, "zero_points", zeros, (columns, -(-blocks * bits // 8))), blocks, bits)
    elif zeros.dtype == a.dtype:
        zeros = _shaped(call, "zero_points", zeros, (columns, blocks))
    else:
        raise call.refuse(f"zero points of {zeros.dtype} beside {a.dtype}")
    every = [scales, zeros] if zeros.rank else [scales]
    if groups is None or _in_order(call, groups, block):
        every = [graph.reshape(t, [columns, blocks, 1]) for t in every]
        numbers = graph.reshape(numbers, [columns, blocks, block])
    else:
        if groups.shape not in ((terms,), (whole,)):
            raise ModelError(f"g_idx names the group of each of K = {terms} elements, got {list(groups.shape)}")
        found = graph.pad(groups, [(0, whole - groups.size)]) if groups.size < whole else groups
        every = [graph.gather(t, found, axis=1) for t in every]
        numbers = graph.reshape(numbers, [columns, whole])
    scale, zero = (graph.cast(t, float32) for t in (every[0], every[1] if zeros.rank else zeros))
    w = graph.mul(graph.sub(graph.cast(numbers, float32), zero), scale)
    w = graph.transpose(graph.cast(graph.reshape(w, [columns, whole]), a.dtype), [1, 0])
    if whole > terms:  # what a weight has there means nothing
        a = graph.pad(a, [(0, 0)] * (a.rank - 1) + [(0, whole - terms)])
    y = matmul(call, a, w)
    return y if bias is None else graph.add(y, _shaped(call, "bias", bias, (columns,)))


def _in_order(call: Call, groups: Tensor, block: int) -> bool:
    """Tells whether each element is known to be of its own block's group."""
    found = call.values.known(groups)
    return found is not None and np.array_equal(found, np.arange(found.size) // block)

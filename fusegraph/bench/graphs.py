"""The workloads as graphs, by the names under which `fusegraph.bench.peers` has them in torch."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from fusegraph.graph import Graph, Tensor

Build = Callable[..., Tensor | tuple[Tensor, ...]]

#: Length of each document in a sequence, and by how much the bias decreases with each position of distance.
DOCUMENT, SLOPE = 1024, 0.001
#: How many keys a query sees in a window.
WINDOW = 1024


def _affine(g: Graph, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Returns relu(x * scale + bias), rounded to the dtype of x."""
    return g.cast(g.relu(x * scale + bias), x.dtype)


def _conv_bias_relu(stride: int, padding: int) -> Build:
    return lambda g, x, w, bias: g.relu(g.conv_fprop(x, w, stride=stride, padding=padding) + bias)


def _conv_sums(g: Graph, x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y = g.relu(g.conv_fprop(x, w, padding=1) + bias)
    return y, g.reduction(y, "add", (0, 2, 3))


def _documents(g: Graph, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    scores = g.matmul(q, k.transpose(0, 1, 3, 2), dtype="float32") * (q.shape[-1] ** -0.5)
    row, column = g.gen_index(scores, axis=2), g.gen_index(scores, axis=3)
    same = g.cmp_eq(g.reshape(documents, shape=(documents.size, 1)), documents)
    scores = scores + g.cast(row - column, "float32") * -SLOPE
    scores = g.binary_select(scores, -inf, g.logical_and(same, column <= row))
    return g.cast(g.softmax(scores), "bfloat16") @ v


GRAPHS: dict[str, Build] = {
    "add": lambda g, a, b: a + b,
    "mul_relu": lambda g, a, b: g.relu(a * b),
    "sigmoid_fma": lambda g, a, b, c: g.sigmoid(a + b * c),
    "gelu_tanh": lambda g, a, bias, b: g.gelu(a + bias) * g.tanh(b) + a,
    "dropout": lambda g, x: g.dropout(x, 2026, 0, probability=0.1),
    "softmax": lambda g, x: g.softmax(x),
    "layernorm": lambda g, x, w, b: g.layernorm(x, w, b),
    "layernorm_gelu": lambda g, x, w, b: g.gelu(g.layernorm(x, w, b)),
    "layernorm_mul": lambda g, x, w, b: g.layernorm(x, w, b) * x,
    "layernorm_gelu_dropout_add": lambda g, x, residual, w, b: (
        g.dropout(g.gelu(g.layernorm(x, w, b)), 2026, 0, probability=0.1) + residual
    ),
    "rmsnorm": lambda g, x, w: g.rmsnorm(x, w),
    "add_rmsnorm": lambda g, x, residual, w: g.rmsnorm(x + residual, w),
    "groupnorm": lambda g, x, w, b: g.groupnorm(x, w, b, groups=32),
    "batchnorm_relu": lambda g, x, w, b: g.relu(g.batchnorm(x, w, b)[0]),
    "softmax_backward": Graph.softmax_backward,
    "layernorm_backward": Graph.layernorm_backward,
    "rmsnorm_backward": Graph.rmsnorm_backward,
    "row_sums": lambda g, x: g.reduction(x, "add", -1, dtype="float32"),
    "relu_sums": lambda g, x: g.reduction(g.relu(x), "add", -1, dtype="float32"),
    "maxpool": lambda g, x: g.max_pool(x, 3, 2, 1),
    "avgpool": lambda g, x: g.avg_pool(x, 3, 2, 1),
    "transpose": lambda g, x: g.transpose(x),
    "slice": lambda g, x: x[1024:-1024, 64:-64],
    "concatenate": lambda g, a, b: g.concatenate(a, b, axis=1),
    "to NHWC": lambda g, x: g.identity(x),
    "to NCHW": lambda g, x: g.identity(x),
    "conv": lambda g, x, w: g.conv_fprop(x, w, padding=1),
    "depthwise": lambda g, x, w: g.conv_fprop(x, w, padding=1),
    "depthwise_swish": lambda g, x, w: g.swish(g.conv_fprop(x, w, padding=1)),
    "int8_conv": lambda g, x, w: g.conv_fprop(x, w),
    "affine_conv": lambda g, x, scale, bias, w: g.conv_fprop(_affine(g, x, scale, bias), w, padding=1),
    "conv_relu_conv": lambda g, x, v, w: g.conv_fprop(g.relu(g.conv_fprop(x, v, padding=1)), w, padding=1),
    "conv1x1_bias_relu": _conv_bias_relu(1, 0),
    "conv3x3s1_bias_relu": _conv_bias_relu(1, 1),
    "conv3x3s2_bias_relu": _conv_bias_relu(2, 1),
    "conv7x7s2_bias_relu": _conv_bias_relu(2, 3),
    "conv_bias_relu_sums": _conv_sums,
    "dgrad": lambda g, loss, w: g.conv_dgrad(loss, w, padding=1),
    "wgrad": lambda g, x, loss: g.conv_wgrad(x, loss, padding=1),
    "matmul": lambda g, a, b: a @ b,
    "linear_gelu": lambda g, a, b, bias: g.gelu_approx_tanh(a @ b + bias),
    "relu_matmul": lambda g, a, b: g.relu(a) @ b,
    "affine_matmul": lambda g, a, scale, bias, b: _affine(g, a, scale, bias) @ b,
    "dequantised_matmul": lambda g, a, b, scale: a @ g.cast(b * scale, a.dtype),
    "mlp": lambda g, x, up, down: g.gelu(x @ up) @ down,
    "swiglu": lambda g, x, gate, up: g.swish(x @ gate) * (x @ up),
    "sdpa": lambda g, q, k, v: g.sdpa(q, k, v),
    "sdpa_causal": lambda g, q, k, v: g.sdpa(q, k, v, use_causal_mask=True),
    "sdpa_grouped": lambda g, q, k, v: g.sdpa(q, k, v, use_causal_mask=True),
    "sdpa_window": lambda g, q, k, v: g.sdpa(q, k, v, use_causal_mask=True, diagonal_band_left_bound=WINDOW),
    "sdpa_decode": lambda g, q, k, v: g.sdpa(q, k, v),
    "sdpa_packed": lambda g, q, k, v, offsets: g.sdpa(
        q, k, v, ragged_offset_q=offsets, ragged_offset_kv=offsets, use_causal_mask=True
    ),
    "sdpa_backward": lambda g, *operands: g.sdpa_backward(*operands, use_causal_mask=True),
    "sdpa_documents": _documents,
}

"""ONNX models as exporters write them: a small convolutional network and a block of a transformer, weights random."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper


class Writer:
    """Collects nodes and weights."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.rng, self.dtype = np.random.default_rng(1), np.dtype(dtype)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, *shape: int, scale: float | None = None) -> str:
        wide = self.rng.normal(0, 1, shape) * (scale if scale is not None else 1 / np.sqrt(max(np.prod(shape[1:]), 1)))
        return self.constant(wide.astype(self.dtype))

    def constant(self, value: Any) -> str:
        name = f"weight.{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def __call__(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"/{operator}_{len(self.nodes)}_output_{n}" for n in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def model(self, shape: list[Any], result: str, opset: int = 20) -> ModelProto:
        element = helper.np_dtype_to_tensor_dtype(self.dtype)
        x = helper.make_tensor_value_info("x", element, shape)
        y = helper.make_tensor_value_info("y", element, None)
        nodes = [*self.nodes, helper.make_node("Identity", [result], ["y"])]
        graph = helper.make_graph(nodes, "network", [x], [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def convolutional(dtype: Any = np.float32, channels: int = 16, size: int = 24, classes: int = 10) -> ModelProto:
    """Returns a network of a residual block and a block with depthwise convolution, squeeze and excitation.

    Images are (batch, 3, size, size).
    """
    g = Writer(dtype)

    def normal(x: str, count: int) -> str:
        variance = g.constant(g.rng.uniform(0.5, 2, count).astype(g.dtype))
        return g("BatchNormalization", x, *(g.weight(count, scale=0.5) for _ in range(3)), variance)

    def conv(x: str, out: int, inner: int, taps: int = 3, **more: Any) -> str:
        pads = [taps // 2] * 4
        return g("Conv", x, g.weight(out, inner, taps, taps), pads=pads, kernel_shape=[taps, taps], **more)

    x = g("Relu", normal(conv("x", channels, 3, strides=[2, 2]), channels))
    y = g("Relu", normal(conv(x, channels, channels), channels))
    x = g("Relu", g("Add", normal(conv(y, channels, channels), channels), x))
    wide = 2 * channels
    y = g("HardSwish", normal(conv(x, wide, channels, 1), wide))
    y = g("HardSwish", normal(conv(y, wide, 1, group=wide), wide))
    gate = g("Relu", g("Conv", g("GlobalAveragePool", y), g.weight(8, wide, 1, 1), g.weight(8)))
    gate = g("HardSigmoid", g("Conv", gate, g.weight(wide, 8, 1, 1), g.weight(wide)), alpha=1 / 6)
    x = g("Add", normal(conv(g("Mul", y, gate), channels, wide, 1), channels), x)
    x = g("Flatten", g("GlobalAveragePool", g("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])))
    logits = g("Gemm", x, g.weight(classes, channels), g.weight(classes), transB=1)
    return g.model(["batch", 3, size, size], g("Softmax", logits))


def transformer(dtype: Any = np.float32, width: int = 64, heads: int = 4, length: int = 32) -> ModelProto:
    """Returns a block of GPT-2 on sequences (batch, length, width), with shapes computed as exporters do."""
    g = Writer(dtype)

    def linear(x: str, inner: int, out: int) -> str:
        return g("Add", g("MatMul", x, g.weight(inner, out, scale=inner**-0.5)), g.weight(out))

    def norm(x: str) -> str:
        return g("LayerNormalization", x, g.weight(width), g.weight(width))

    batch = g("Gather", g("Shape", "x"), g.constant(np.int64(0)))
    shape = g("Concat", g("Unsqueeze", batch, g.constant([0])), g.constant([length, heads, width // heads]), axis=0)
    parts = g("Split", linear(norm("x"), width, 3 * width), outputs=3, axis=2, num_outputs=3)
    q, k, v = (g("Transpose", g("Reshape", p, shape), perm=[0, 2, 1, 3]) for p in parts)
    scores = g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2]))
    scores = g("Div", scores, g.constant(np.sqrt(width // heads).astype(g.dtype)))
    allowed = g.constant(np.tril(np.ones((1, 1, length, length), bool)))
    masked = g("Where", allowed, scores, g.constant(np.array(np.finfo(np.float16).min, g.dtype)))
    mixed = g("MatMul", g("Softmax", masked, axis=-1), v)
    flat = g("Reshape", g("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, width]))
    x = g("Add", "x", linear(flat, width, width))
    h = linear(norm(x), width, 4 * width)
    erf = g("Erf", g("Div", h, g.constant(np.sqrt(2).astype(g.dtype))))
    gelu = g("Mul", g("Mul", h, g("Add", erf, g.constant(np.array(1, g.dtype)))), g.constant(np.array(0.5, g.dtype)))
    return g.model(["batch", length, width], g("Add", x, linear(gelu, 4 * width, width)))

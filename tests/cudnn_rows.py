"""The graphs that cuDNN was asked about on an H200, and what it answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import fusegraph as fg
from fusegraph.report.check import LIBRARY_SLACK

Build = Callable[[fg.Graph], Any]

#: How cuDNN says no: its heuristics know no engine for the pattern ...
NO_ENGINE = "No valid engine configs"
#: ... or it, or the frontend, has no such descriptor, type or plan.
UNSUPPORTED = f"{NO_ENGINE}|proposed a plan|[Nn]ot supported|NOT_SUPPORTED|BAD_PARAM"
#: fp8 products are summed with 14 bits by the tensor cores of sm_90: up to 2^-13 of the largest product for each.
FP8_SLACK = 2.0**-8


@dataclass(frozen=True)
class Row:
    """A graph and cuDNN's answer to it.

    words   what the graph is in cuDNN's words, its nodes in order; "" if the lowering refuses it.
    refusal pattern of cuDNN's reason; None if the graph is accepted.
    pieces  graphs into which ``partition=True`` splits a refused one; 0 if a single node is refused; None if the number
            was not recorded.
    slack   see `fusegraph.report.check.compare`.
    """

    name: str
    build: Build
    words: str
    refusal: str | None = None
    io: str = "bfloat16"
    pieces: int | None = None
    slack: float = LIBRARY_SLACK

    def graph(self) -> fg.Graph:
        graph = fg.Graph(self.name, io_dtype=self.io)
        result = self.build(graph)
        for number, tensor in enumerate(result if isinstance(result, tuple) else (result,)):
            graph.output(tensor, name=f"y{number}")
        return graph


def tensors(
    g: fg.Graph, names: Iterable[str], shape: tuple[int, ...], layout: str | None = None
) -> Iterator[fg.Tensor]:
    return (g.tensor(name, shape, layout=layout) for name in names)


def image(g: fg.Graph, name: str = "x", channels: int = 64, layout: str = "NHWC") -> fg.Tensor:
    return g.tensor(name, (8, channels, 28, 28), layout=layout)


def conv(g: fg.Graph, x: fg.Tensor, name: str = "w", channels: int = 64, layout: str = "NHWC", **how: Any) -> fg.Tensor:
    w = g.tensor(name, (64, channels, 3, 3), layout=layout)
    return g.conv_fprop(x, w, **{"padding": 1, **how})


def bias(g: fg.Graph, name: str = "bias") -> fg.Tensor:
    return g.tensor(name, (64, 1, 1))


def dense(g: fg.Graph, name: str = "w", k: int = 128, n: int = 512, **how: Any) -> fg.Tensor:
    return g.tensor(name, (k, n), **how)


def rows(g: fg.Graph, m: int = 256, k: int = 128) -> fg.Tensor:
    return g.tensor("x", (m, k))


# ---- the graphs


def sigmoid_fma(g: fg.Graph) -> fg.Tensor:
    a, b, c = tensors(g, "abc", (4, 64, 256))
    return g.sigmoid(a + b * c)


def chain(g: fg.Graph) -> fg.Tensor:
    a, b = tensors(g, "ab", (4, 64, 256))
    return g.gelu(a + g.tensor("bias", (256,))) * g.tanh(b) + a


def two_outputs(g: fg.Graph) -> tuple[fg.Tensor, fg.Tensor]:
    y = g.relu(g.tensor("a", (4, 64, 256)) + g.tensor("bias", (256,)))
    return y, g.tanh(y) * 2.0


def column_bias(g: fg.Graph) -> fg.Tensor:
    return g.relu(g.tensor("a", (4, 64, 256)) + g.tensor("bias", (64, 1)))


def images(g: fg.Graph) -> fg.Tensor:
    a, b = tensors(g, "ab", (4, 64, 16, 16), "NCHW")
    return g.relu(a * b)


def doubles(g: fg.Graph) -> fg.Tensor:
    a, b = tensors(g, "ab", (4, 64, 256))
    return a + b


def conv_bias_relu(layout: str = "NHWC", channels: int = 64, groups: int = 1, **how: Any) -> Build:
    def build(g: fg.Graph) -> fg.Tensor:
        x = image(g, channels=channels, layout=layout)
        return g.relu(conv(g, x, channels=channels // groups, layout=layout, **how) + bias(g))

    return build


def conv_residual(g: fg.Graph) -> fg.Tensor:
    return g.relu(conv(g, image(g)) + bias(g) + image(g, "residual"))


def conv_then(op: str) -> Build:
    return lambda g: getattr(g, op)(conv(g, image(g)))


def conv_of_line(g: fg.Graph) -> fg.Tensor:
    return g.conv_fprop(g.tensor("x", (2, 4, 9)), g.tensor("w", (4, 4, 3)))


def depthwise_swish(g: fg.Graph) -> fg.Tensor:
    return g.swish(conv(g, image(g), channels=1))


def scaled_conv(g: fg.Graph) -> fg.Tensor:
    return conv(g, g.relu(image(g) * bias(g, "scale") + bias(g)))


def conv_relu_conv(g: fg.Graph) -> fg.Tensor:
    return conv(g, g.relu(conv(g, image(g))), "v")


def matmul_bias_gelu(m: int, k: int, n: int) -> Build:
    return lambda g: g.gelu(rows(g, m, k) @ dense(g, k=k, n=n) + g.tensor("bias", (n,)))


def swiglu(g: fg.Graph) -> fg.Tensor:
    x = rows(g)
    return g.swish(x @ dense(g)) * (x @ dense(g, "v"))


def relu_matmul(g: fg.Graph) -> fg.Tensor:
    return g.relu(rows(g)) @ dense(g)


def matmul_gelu_matmul(g: fg.Graph) -> fg.Tensor:
    return g.gelu(rows(g) @ dense(g)) @ dense(g, "v", 512, 64)


def conv_sum(g: fg.Graph) -> fg.Tensor:
    return g.reduction(conv(g, image(g)), "add", axes=(1, 2, 3), dtype="float32")  # of bfloat16 it stores none


def matmul_max(g: fg.Graph) -> fg.Tensor:
    return g.reduction(rows(g) @ dense(g), "max", axes=-1, dtype="float32")


def row_sum(g: fg.Graph) -> fg.Tensor:
    return g.reduction(rows(g), "add", axes=-1)


def relu_sum(g: fg.Graph) -> fg.Tensor:
    return g.reduction(g.relu(rows(g)), "add", axes=-1)


def softmax(g: fg.Graph) -> fg.Tensor:
    return g.softmax(rows(g))


def joined(g: fg.Graph) -> fg.Tensor:
    return g.concatenate(*tensors(g, "ab", (64, 128)), axis=0)


def sdpa(**how: Any) -> Build:
    def build(g: fg.Graph) -> fg.Tensor:
        q, k, v = tensors(g, "qkv", (2, 4, 128, 64))
        return g.sdpa(q, k, v, **how)

    return build


def sdpa_backward(**how: Any) -> Build:
    def build(g: fg.Graph) -> tuple[fg.Tensor, ...]:
        q, k, v, o, loss = tensors(g, ("q", "k", "v", "o", "dO"), (2, 4, 128, 64))
        return g.sdpa_backward(q, k, v, o, loss, g.tensor("stats", (2, 4, 128, 1), "float32"), **how)

    return build


def layernorm(g: fg.Graph) -> fg.Tensor:
    return g.layernorm(rows(g), g.tensor("scale", (128,)), g.tensor("bias", (128,)))


def layernorm_training(g: fg.Graph) -> tuple[fg.Tensor, ...]:
    x, scale, bias = rows(g), g.tensor("scale", (128,), "float32"), g.tensor("bias", (128,), "float32")
    return g.layernorm(x, scale, bias, norm_forward_phase="training")


def layernorm_gelu(g: fg.Graph) -> fg.Tensor:
    return g.gelu(layernorm(g))


def layernorm_times_x(g: fg.Graph) -> fg.Tensor:
    y = layernorm(g)
    return y * g.tensors["x"]


def add_rmsnorm(g: fg.Graph) -> fg.Tensor:
    return g.rmsnorm(rows(g) + g.tensor("residual", (256, 128)), g.tensor("scale", (128,)))


def fp8_matmul(g: fg.Graph) -> fg.Tensor:
    return g.cast(rows(g) @ dense(g, strides=(1, 128)), "bfloat16")


def dgrad(relu: bool = False, **how: Any) -> Build:
    """Returns a builder of the gradient of an image of 28 x 28."""

    def build(g: fg.Graph) -> fg.Tensor:
        size = 28 if how.get("stride", 1) == 1 else 14
        loss = g.tensor("loss", (8, 128, size, size), layout="NHWC")
        y = g.conv_dgrad(loss, g.tensor("w", (128, 64, 3, 3), layout="NHWC"), size=28, padding=1, **how)
        return g.relu(y) if relu else y

    return build


def wgrad(g: fg.Graph) -> fg.Tensor:
    return g.conv_wgrad(image(g), g.tensor("loss", (8, 128, 28, 28), layout="NHWC"), padding=1)


def int8_conv(result: str) -> Build:
    """Integer convolutions: stored as 32-bit sums, cast to float32 from there, or computed straight into float32."""

    def build(g: fg.Graph) -> fg.Tensor:
        if result == "straight":
            return conv(g, image(g), dtype="float32")
        y = conv(g, image(g))
        return y if result == "int32" else g.cast(y, "float32")

    return build


ROWS = (
    Row("sigmoid fma", sigmoid_fma, "mul add sigmoid"),
    Row("sigmoid fma float32", sigmoid_fma, "mul add sigmoid", io="float32"),
    Row("pointwise chain with a broadcast bias", chain, "add gelu tanh mul add"),
    Row("two outputs", two_outputs, "add relu tanh mul"),
    Row("pointwise NCHW", images, "mul relu", UNSUPPORTED, pieces=0),
    Row("conv bias relu NHWC", conv_bias_relu(), "conv_fprop add relu"),
    Row("conv bias relu NHWC float32", conv_bias_relu(), "conv_fprop add relu", io="float32"),
    Row("conv bias relu NCHW", conv_bias_relu("NCHW"), "conv_fprop add relu"),
    Row("conv bias relu 3 channels", conv_bias_relu(channels=3), "conv_fprop add relu"),
    Row("conv bias relu 35 channels", conv_bias_relu(channels=35), "conv_fprop add relu"),
    Row("conv bias relu grouped", conv_bias_relu(groups=4), "conv_fprop add relu"),
    Row("conv bias relu depthwise", conv_bias_relu(groups=64), "conv_fprop add relu"),
    Row("conv bias relu dilated", conv_bias_relu(padding=2, dilation=2), "conv_fprop add relu"),
    Row("conv bias residual relu", conv_residual, "conv_fprop add add relu"),
    Row("conv hardswish", conv_then("hardswish"), "conv_fprop add relu mul mul"),
    Row("conv mish", conv_then("mish"), "conv_fprop softplus tanh mul"),
    Row("depthwise swish", depthwise_swish, "conv_fprop swish", NO_ENGINE),
    Row("dgrad", dgrad(), "conv_dgrad"),
    Row("strided dgrad relu", dgrad(relu=True, stride=2), "conv_dgrad relu"),
    Row("wgrad", wgrad, "conv_wgrad"),
    Row("scale bias relu conv", scaled_conv, "mul add relu conv_fprop", UNSUPPORTED),
    Row("conv relu conv", conv_relu_conv, "conv_fprop relu conv_fprop", UNSUPPORTED, pieces=2),
    Row("matmul bias gelu", matmul_bias_gelu(256, 128, 512), "matmul add gelu"),
    Row("matmul bias gelu odd sizes", matmul_bias_gelu(257, 129, 511), "matmul add gelu"),
    Row("swiglu", swiglu, "matmul swish matmul mul"),
    Row("relu matmul", relu_matmul, "relu matmul", UNSUPPORTED, pieces=2),
    Row("matmul gelu matmul", matmul_gelu_matmul, "matmul gelu matmul", UNSUPPORTED, pieces=2),
    Row("fp8 matmul", fp8_matmul, "matmul identity", io="float8_e4m3", slack=FP8_SLACK),
    Row("conv sum", conv_sum, "conv_fprop reduction ADD"),
    Row("matmul row max", matmul_max, "matmul reduction MAX"),
    Row("reduction alone", row_sum, "reduction ADD", UNSUPPORTED, pieces=0),
    Row("reduction after relu", relu_sum, "relu reduction ADD", UNSUPPORTED, pieces=0),
    Row("softmax", softmax, "", "has no softmax", pieces=0),
    Row("sdpa causal", sdpa(use_causal_mask=True), "sdpa"),
    Row("sdpa soft cap", sdpa(soft_cap=5.0), "", "has no soft_cap", pieces=0),
    Row("sdpa backward", sdpa_backward(use_causal_mask=True), "sdpa_bwd"),
    Row("sdpa backward soft cap", sdpa_backward(soft_cap=5.0), "", "has no soft_cap", pieces=0),
    Row("layernorm", layernorm, "layernorm"),
    Row("layernorm for training", layernorm_training, "layernorm"),
    # Seen with the rows described as [rows, columns, 1, 1], as the lowering does.
    Row("layernorm gelu", layernorm_gelu, "layernorm gelu"),
    Row("layernorm times x", layernorm_times_x, "layernorm mul", "none of them builds and runs"),
    Row("residual add rmsnorm", add_rmsnorm, "add rmsnorm"),
    Row("float64", doubles, "add", UNSUPPORTED, io="float64", pieces=0),
    # Sums made in float32 would be refused; those made in int32 are accepted, and stored as such they are wrong.
    Row("transpose alone", lambda g: g.transpose(rows(g)), "", "no plans for a transpose by itself", pieces=0),
    Row("slice alone", lambda g: g.slice(rows(g), (0, 8)), "", "no plans for a slice by itself", pieces=0),
    Row("concatenate alone", joined, "", "no plans for a concatenate by itself", pieces=0),
    Row("int8 conv straight to float32", int8_conv("straight"), "conv_fprop", io="int8"),
    Row("int8 conv cast to float32", int8_conv("cast"), "conv_fprop identity", io="int8"),
    Row("int8 conv to int32", int8_conv("int32"), "", "writes other numbers", io="int8", pieces=0),
)
ACCEPTED = [row for row in ROWS if row.refusal is None]
REFUSED = [row for row in ROWS if row.refusal is not None]


def ids(row: Row) -> str:
    return row.name.replace(" ", "_")

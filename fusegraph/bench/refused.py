"""Graphs that cuDNN was seen to refuse, at practical sizes: of its own operations, and of others that it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fusegraph.bench.workload import Input, Workload, transposed
from fusegraph.graph import Graph, Tensor

IMAGE = (64, 256, 56, 56)
ROWS = (16384, 4096)
SQUARE = (8192, 8192)


def _scaled_conv(g: Graph, x: Tensor, scale: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    return g.conv_fprop(g.relu(x * scale + bias), w, padding=1)


def refused() -> Iterator[Workload]:
    """Yields every workload; it is in bfloat16 unless its name says otherwise."""
    dtype = "bfloat16"
    x, rows = Input("x", IMAGE, "NHWC"), Input("x", ROWS)
    weights = (Input("weight", ROWS[1:]), Input("bias", ROWS[1:]))
    channels = tuple(Input(name, (256, 1, 1)) for name in ("scale", "bias"))

    planar = (Input("a", IMAGE), Input("b", IMAGE))
    yield Workload("relu(a * b) 64x256x56x56 NCHW", dtype, planar, IMAGE, "mul_relu")
    depthwise = (x, Input("w", (256, 1, 3, 3)))
    name = "swish(depthwise 3x3) 64x256x56x56 NHWC"
    yield Workload(name, dtype, depthwise, IMAGE, "depthwise_swish")
    operands = (x, *channels, Input("w", (256, 256, 3, 3), "NHWC"))
    name, flops = "conv 3x3(relu(x * scale + bias)) 64x256x56x56->256 NHWC", 2 * prod(IMAGE) * 256 * 9
    yield Workload(name, dtype, operands, IMAGE, "affine_conv", flops, "bf16", _scaled_conv)
    stage = (64, 64, 56, 56)
    operands = (Input("x", stage, "NHWC"), *(Input(w, (64, 64, 3, 3), "NHWC") for w in "vw"))
    name, flops = "conv 3x3(relu(conv 3x3)) 64x64x56x56 NHWC", 2 * 2 * prod(stage) * 64 * 9
    yield Workload(name, dtype, operands, stage, "conv_relu_conv", flops, "bf16")
    operands = (x, Input("w", (256, 256, 1, 1), "NHWC"))
    name = "conv 1x1 64x256x56x56->256 NHWC int8 to int32"
    yield Workload(name, "int8", operands, IMAGE, "int8_conv", output_dtype="int32")

    n = 4096
    operands = (Input("a", (n, n)), transposed("b", n, n))
    yield Workload(f"relu(a) @ b {n}x{n}x{n}", dtype, operands, (n, n), "relu_matmul", 2 * n**3, "bf16")
    m, k, inner = 8192, 1024, 4096
    operands = (Input("x", (m, k)), transposed("up", k, inner), transposed("down", inner, k))
    name, flops = f"gelu(x @ up) @ down {m}x{k}->{inner}->{k}", 4 * m * k * inner
    yield Workload(name, dtype, operands, (m, k), "mlp", flops, "bf16")

    square = Input("x", SQUARE)
    yield Workload("softmax 8192x8192", dtype, (square,), SQUARE, "softmax")
    for name, torch in (("x", "row_sums"), ("relu(x)", "relu_sums")):
        name = f"row sums of {name} 8192x8192, in fp32"
        yield Workload(name, dtype, (square,), (8192, 1), torch, output_dtype="float32")
    yield Workload("gelu(layernorm) 16384x4096", dtype, (rows, *weights), ROWS, "layernorm_gelu")
    yield Workload("layernorm * x 16384x4096", dtype, (rows, *weights), ROWS, "layernorm_mul")
    operands = (rows, Input("residual", ROWS), weights[0])
    yield Workload("rmsnorm(x + residual) 16384x4096", dtype, operands, ROWS, "add_rmsnorm")
    operands = (Input("x", IMAGE), Input("weight", (256, 1, 1)), Input("bias", (256, 1, 1)))
    yield Workload("groupnorm of 32 groups 64x256x56x56 NCHW", dtype, operands, IMAGE, "groupnorm")
    yield Workload("max pool 3x3 stride 2 64x256x56x56 NHWC", dtype, (x,), (64, 256, 28, 28), "maxpool")
    yield Workload("dropout 16384x4096", dtype, (rows,), ROWS, "dropout")

    yield Workload("transpose 8192x8192", dtype, (square,), SQUARE, "transpose")
    part = (8192 - 2 * 1024, 8192 - 2 * 64)
    unread = 2 * (prod(part) - prod(SQUARE))
    yield Workload("slice of 8192x8192", dtype, (square,), part, "slice", extra_bytes=unread)
    halves = tuple(Input(name, (8192, 4096)) for name in "ab")
    yield Workload("concatenate 8192x4096, 8192x4096", dtype, halves, SQUARE, "concatenate")
    doubles = tuple(Input(name, (4096, 8192)) for name in "ab")
    yield Workload("a + b 4096x8192 fp64", "float64", doubles, (4096, 8192), "add")

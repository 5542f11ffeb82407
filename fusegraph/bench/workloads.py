"""The board, the main suite of workloads, and the table of all suites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod

from fusegraph.bench import attention, models
from fusegraph.bench.layouts import calls, layouts
from fusegraph.bench.refused import refused
from fusegraph.bench.scaled import scaled
from fusegraph.bench.sparse import sparse
from fusegraph.bench.workload import Input, Workload, short, transposed


def memory_bound() -> Iterator[Workload]:
    """Yields workloads bound by device-memory bandwidth."""
    operands: tuple[Input, ...]
    for dtype in ("float32", "bfloat16"):
        n = 1 << 26
        abc = tuple(Input(name, (n,)) for name in "abc")
        yield Workload(f"sigmoid(a+b*c) 64Mi {short(dtype)}", dtype, abc, (n,), "sigmoid_fma")
    for dtype in ("float32", "bfloat16"):
        shape = (8192, 8192)
        operands = (Input("a", shape), Input("bias", (8192,)), Input("b", shape))
        name = f"gelu(a+bias)*tanh(b)+a 8192x8192 {short(dtype)}"
        yield Workload(name, dtype, operands, shape, "gelu_tanh")
    for rows, cols in ((8192, 8192), (32768, 1024), (2048, 65536)):
        for dtype in ("bfloat16", "float32"):
            name = f"softmax {rows}x{cols} {short(dtype)}"
            yield Workload(name, dtype, (Input("x", (rows, cols)),), (rows, cols), "softmax")
    for norm in ("layernorm", "layernorm_gelu", "rmsnorm"):
        for rows, cols in ((16384, 4096), (8192, 8192)):
            for dtype in ("bfloat16", "float32"):
                weights = (Input("weight", (cols,)), Input("bias", (cols,)))
                operands = (Input("x", (rows, cols)), *(weights[:1] if norm == "rmsnorm" else weights))
                name = f"{norm.replace('_', '+')} {rows}x{cols} {short(dtype)}"
                yield Workload(name, dtype, operands, (rows, cols), norm)
    rows, cols = shape = (16384, 4096)
    for dtype in ("bfloat16", "float32"):
        operands = (Input("x", shape), Input("residual", shape), Input("weight", (cols,)), Input("bias", (cols,)))
        name = f"layernorm+gelu+dropout+add {rows}x{cols} {short(dtype)}"
        yield Workload(name, dtype, operands, shape, "layernorm_gelu_dropout_add")
    for dtype in ("bfloat16", "float32"):
        statistics = (Input("mean", (rows, 1), dtype="float32"), Input("inv_variance", (rows, 1), dtype="float32"))
        operands = (Input("loss", shape), Input("x", shape), Input("weight", (cols,)), *statistics)
        also = ((cols,), (cols,))
        name = f"layernorm backward {rows}x{cols} {short(dtype)}"
        yield Workload(name, dtype, operands, shape, "layernorm_backward", also=also)
    for dtype in ("bfloat16", "float32"):
        scale = Input("inv_variance", (rows, 1), dtype="float32")
        operands = (Input("loss", shape), Input("x", shape), Input("weight", (cols,)), scale)
        name = f"rmsnorm backward {rows}x{cols} {short(dtype)}"
        yield Workload(name, dtype, operands, shape, "rmsnorm_backward", also=((cols,),))
    for dtype in ("bfloat16", "float32"):
        operands = (Input("loss", (8192, 8192)), Input("y", (8192, 8192)))
        name = f"softmax backward 8192x8192 {short(dtype)}"
        yield Workload(name, dtype, operands, (8192, 8192), "softmax_backward")
    image = (64, 256, 56, 56)
    for dtype in ("bfloat16", "float32"):
        size = prod(image) * (2 if dtype == "bfloat16" else 4)
        operands = (Input("x", image, "NHWC"), Input("weight", (256, 1, 1)), Input("bias", (256, 1, 1)))
        name = f"batchnorm training+relu 64x256x56x56 NHWC {short(dtype)}"
        yield Workload(name, dtype, operands, image, "batchnorm_relu", extra_bytes=size)
    for dtype in ("bfloat16", "float32"):
        name = f"maxpool 3x3 stride 2 64x256x56x56 NHWC {short(dtype)}"
        pooled = (64, 256, 28, 28)
        yield Workload(name, dtype, (Input("x", image, "NHWC"),), pooled, "maxpool")
        name = name.replace("maxpool", "avgpool")
        yield Workload(name, dtype, (Input("x", image, "NHWC"),), pooled, "avgpool")
    for height, width in ((1024, 2048), (8192, 16384)):
        picture = (1, 1, height, width)
        operands = (Input("x", picture), Input("w", (1, 1, 3, 3)))
        yield Workload(f"conv 3x3 1 channel {height}x{width} fp32", "float32", operands, picture, "conv")
    for layout in ("NHWC", "NCHW"):
        operands = (Input("x", image, layout), Input("w", (256, 1, 3, 3)))
        for swish in (False, True):
            name = f"depthwise 3x3{'+swish' if swish else ''} 64x256x56x56 {layout} bf16"
            yield Workload(name, "bfloat16", operands, image, "depthwise_swish" if swish else "depthwise")
    operands = _conv_inputs(64, 64, 56, 256, 1)
    name = "conv 1x1 64x64x56x56->256+bias+relu NHWC bf16"
    yield Workload(name, "bfloat16", operands, (64, 256, 56, 56), "conv1x1_bias_relu")


def _conv_inputs(n: int, c: int, size: int, k: int, taps: int) -> tuple[Input, ...]:
    return (
        Input("x", (n, c, size, size), "NHWC"),
        Input("w", (k, c, taps, taps), "NHWC"),
        Input("bias", (k, 1, 1)),
    )


def tensor_core_bound() -> Iterator[Workload]:
    """Yields workloads bound by the tensor cores."""
    operands: tuple[Input, ...]
    n = 8192
    plain = (Input("a", (n, n)), transposed("b", n, n))
    yield Workload(f"matmul {n}x{n}x{n} bf16", "bfloat16", plain, (n, n), "matmul", 2 * n**3, "bf16")
    for unit, dtype in (("bf16", "bfloat16"), ("tf32", "float32")):
        sizes = [(8192, 8192, 8192), (4096, 4096, 4096)]
        if unit == "bf16":
            sizes += [(128, 8192, 8192), (16384, 1024, 4096)]
        for m, n, k in sizes:
            operands = (Input("a", (m, k)), transposed("b", k, n), Input("bias", (n,)))
            name = f"matmul {m}x{n}x{k}+bias+gelu {unit}"
            yield Workload(name, dtype, operands, (m, n), "linear_gelu", 2 * m * n * k, unit)
    for n, c, size, k, taps, stride, padding in (
        (64, 256, 56, 256, 3, 1, 1),
        (32, 128, 28, 128, 3, 1, 1),
        (8, 512, 14, 512, 3, 1, 1),
        (64, 256, 56, 512, 3, 2, 1),
        (64, 8, 224, 64, 7, 2, 3),
    ):
        out = (size + 2 * padding - taps) // stride + 1
        flops = 2 * n * k * out * out * c * taps * taps
        step = f" stride {stride}" if stride > 1 else ""
        base = f"conv {taps}x{taps}{step} {n}x{c}x{size}x{size}->{k}+bias+relu"
        operands = _conv_inputs(n, c, size, k, taps)
        torch = f"conv{taps}x{taps}s{stride}_bias_relu"
        variants = [("bf16", "bfloat16")]
        if (n, c, size) == (64, 256, 56) and stride == 1:
            variants += [("tf32", "float32"), ("fp32", "float32")]
        for unit, dtype in variants:
            yield Workload(f"{base} {unit}", dtype, operands, (n, k, out, out), torch, flops, unit)
    image, filters = (64, 256, 56, 56), (256, 256, 3, 3)
    flops = 2 * prod(image) * 256 * 9
    x, loss, w = Input("x", image, "NHWC"), Input("loss", image, "NHWC"), Input("w", filters, "NHWC")
    for gradient, operands, output in (("dgrad", (loss, w), image), ("wgrad", (x, loss), filters)):
        name = f"{gradient} 3x3 64x256x56x56 256 filters bf16"
        yield Workload(name, "bfloat16", operands, output, gradient, flops, "bf16")
    yield from prologues()
    yield from on_the_result()
    yield from attention.board()


def prologues() -> Iterator[Workload]:
    """Yields products with prologues: pointwise work on operands."""
    n = 4096
    vectors = tuple(Input(name, (n,), dtype="float32") for name in ("scale", "bias"))
    operands: tuple[Input, ...]
    for m, cols in ((n, n), (4 * n, 256)):  # with many columns, two kernels cost less
        operands = (Input("a", (m, n)), *vectors, transposed("b", n, cols))
        name, flops = f"relu(a*scale+bias) @ b {m}x{cols}x{n} bf16", 2 * m * cols * n
        yield Workload(name, "bfloat16", operands, (m, cols), "affine_matmul", flops, "bf16")
    image = (64, 256, 56, 56)
    vectors = tuple(Input(name, (256, 1, 1), dtype="float32") for name in ("scale", "bias"))
    operands = (Input("x", image, "NHWC"), *vectors, Input("w", (256, 256, 3, 3), "NHWC"))
    name, flops = "scale+bias+relu+conv 3x3 64x256x56x56->256 bf16", 2 * prod(image) * 256 * 9
    yield Workload(name, "bfloat16", operands, image, "affine_conv", flops, "bf16")
    for m in (n, 16):
        weights = replace(transposed("b", n, n), dtype="int8")
        operands = (Input("a", (m, n)), weights, Input("scale", (n,), dtype="float32"))
        name = f"matmul {m}x{n}x{n} with int8 weights*scale bf16"
        torch, flops = "dequantised_matmul", 2 * m * n * n
        yield Workload(name, "bfloat16", operands, (m, n), torch, flops, "bf16")


def on_the_result() -> Iterator[Workload]:
    """Yields two products whose results are combined, and a reduction of a result."""
    m, k, n = 4096, 4096, 14336  # a layer of Llama-8B
    operands: tuple[Input, ...] = (Input("x", (m, k)), transposed("w_gate", k, n), transposed("w_up", k, n))
    name, flops = f"swiglu {m}x{k}->{n} bf16", 4 * m * k * n
    yield Workload(name, "bfloat16", operands, (m, n), "swiglu", flops, "bf16")
    image = (64, 256, 56, 56)
    operands = _conv_inputs(64, 256, 56, 256, 3)
    name, flops = "conv 3x3 64x256x56x56->256+bias+relu+channel sums bf16", 2 * prod(image) * 256 * 9
    sums = ((1, 256, 1, 1),)
    yield Workload(name, "bfloat16", operands, image, "conv_bias_relu_sums", flops, "bf16", also=sums)


def board() -> list[Workload]:
    """Returns every workload of the board, in its order."""
    return [*memory_bound(), *tensor_core_bound()]


#: What ``fusegraph bench --suite`` takes.
SUITES: dict[str, Callable[[], Iterable[Workload]]] = {
    "board": board,
    "memory-bound": memory_bound,
    "tensor-core": tensor_core_bound,
    "models": models.drawn,
    "layers": models.layers,
    "layouts": layouts,
    "calls": calls,
    "refused": refused,
    "scaled": scaled,
    "sparse": sparse,
    "attention": attention.attention,
}

"""Layers of ResNet-50, ConvNeXt-T, VGG-16, GPT-2 and Llama-3-8B, and of odd sizes; and a draw of 40 of them.

Shapes are those of the published models (He et al. 2016, torchvision's variant with the stride in the 3x3; Liu et al.
2022; Simonyan and Zisserman 2015; Radford et al. 2019, 124M; Llama 3 8B, 2024).  Batch normalization is folded into the
filters and biases, as for inference.  Images are NHWC.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

from fusegraph.bench.graphs import Build
from fusegraph.bench.workload import Input, Workload, transposed
from fusegraph.graph import Graph, Tensor

#: Batch sizes: images or sequences.
BATCHES = (1, 8, 32, 64)
#: Tokens per sequence when reading a prompt; when generating, it is 1.
SEQUENCE = 1024
#: Workloads that move more bytes are left out: a GPU has to hold the operands and every peer's results.
MOST_BYTES = 4 * 10**9
#: The draw takes the layers whose names, hashed together with this text, have the smallest hashes.
SEED = "fusegraph 1"

#: Steps of an epilogue that take an operand.
_OPERANDS = ("bias", "scale", "add", "mul")


def _build(product: Build, epilogue: tuple[str, ...]) -> Build:
    """Returns the function that builds a workload's graph: the product of the first two inputs, then every step.

    Steps that take an operand take the next input.
    """

    def build(g: Graph, first: Tensor, second: Tensor, *rest: Tensor) -> Any:
        y, operands = product(g, first, second), iter(rest)
        for step in epilogue:
            if step in ("bias", "add"):
                y = y + next(operands)
            elif step in ("scale", "mul"):
                y = y * next(operands)
            else:
                y = getattr(g, "gelu_approx_tanh" if step == "gelu(tanh)" else step)(y)
        return y

    return build


@dataclass(frozen=True)
class Conv:
    """A convolution of square images (``size``) with square filters (``taps``), and the steps of its epilogue."""

    channels: int
    size: int
    filters: int
    taps: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    epilogue: tuple[str, ...] = ("bias", "relu")

    def workload(self, network: str, batch: int, unit: str) -> Workload:
        n, c, k, taps = batch, self.channels, self.filters, self.taps
        out = (self.size + 2 * self.padding - taps) // self.stride + 1
        shape, dtype = (n, k, out, out), _DTYPES[unit]
        step = f"/{self.stride}" if self.stride > 1 else ""
        kind = "depthwise" if self.groups > 1 else "conv"
        text = f"{kind} {taps}x{taps}{step} {n}x{c}x{self.size}x{self.size}->{k}"
        one_each = (k, 1, 1)
        inputs = [
            Input("x", (n, c, self.size, self.size), "NHWC"),
            Input("w", (k, c // self.groups, taps, taps), "NHWC"),
        ]
        for e in self.epilogue:
            if e in _OPERANDS:
                inputs.append(Input(e, one_each) if e in ("bias", "scale") else Input(e, shape, "NHWC"))

        def product(g: Graph, x: Tensor, w: Tensor) -> Tensor:
            return g.conv_fprop(x, w, stride=self.stride, padding=self.padding)

        # Depthwise convolutions are bound by the bytes they move.
        flops = 2 * n * k * out * out * c * taps * taps if self.groups == 1 else 0
        return Workload(
            "+".join([f"{network} {text}", *self.epilogue]) + f" {unit}",
            dtype,
            tuple(inputs),
            shape,
            "+".join([f"conv s{self.stride} p{self.padding}", *self.epilogue]),
            flops,
            ("tf32" if unit == "tf32" else "bf16") if flops else "",
            _build(product, self.epilogue),
        )


@dataclass(frozen=True)
class Linear:
    """A product with a weight (k, n), with ``rows`` rows per image or sequence, and the steps of its epilogue.

    The weight is stored as (n, k), like that of torch's Linear, unless ``plain``.
    """

    rows: int
    k: int
    n: int
    epilogue: tuple[str, ...] = ("bias",)
    plain: bool = False

    def workload(self, network: str, batch: int, unit: str) -> Workload:
        m, n, k = batch * self.rows, self.n, self.k
        inputs = [Input("a", (m, k)), Input("b", (k, n)) if self.plain else transposed("b", k, n)]
        for e in self.epilogue:
            if e in _OPERANDS:
                inputs.append(Input(e, (n,) if e in ("bias", "scale") else (m, n)))
        return Workload(
            "+".join([f"{network} matmul {m}x{n}x{k}", *self.epilogue]) + f" {unit}",
            _DTYPES[unit],
            tuple(inputs),
            (m, n),
            "+".join(["matmul", *self.epilogue]),
            2 * m * n * k,
            "tf32" if unit == "tf32" else "bf16",
            _build(lambda g, a, b: a @ b, self.epilogue),
        )


Layer: TypeAlias = Conv | Linear
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32"}


@dataclass(frozen=True)
class Network:
    """A network's layers, each shape once; the arithmetics (``units``) that they run in, and how many are drawn."""

    name: str
    layers: tuple[Layer, ...]
    units: tuple[str, ...]
    draw: int

    def variants(self, layer: Layer) -> Iterator[Workload]:
        """Yields a layer in every batch size and arithmetic, up to MOST_BYTES."""
        for batch in BATCHES:
            for unit in self.units:
                workload = layer.workload(self.name, batch, unit)
                if workload.bytes <= MOST_BYTES:
                    yield workload


def _resnet() -> Iterator[Layer]:
    yield Conv(3, 224, 64, 7, 2, 3)
    channels, size = 64, 56
    for stage, width in enumerate((64, 128, 256, 512)):
        stride = 2 if stage else 1
        wide = 4 * width
        yield Conv(channels, size, width, 1)
        yield Conv(width, size, width, 3, stride, 1)
        yield Conv(channels, size, wide, 1, stride, 0, epilogue=("bias",))
        size //= stride
        yield Conv(width, size, wide, 1, epilogue=("bias", "add", "relu"))
        yield Conv(wide, size, width, 1)
        if stage:
            yield Conv(width, size, width, 3, 1, 1)
        channels = wide
    yield Linear(1, 2048, 1000)


def _convnext() -> Iterator[Layer]:
    yield Conv(3, 224, 96, 4, 4, 0, epilogue=("bias",))
    for width, size in ((96, 56), (192, 28), (384, 14), (768, 7)):
        if width > 96:
            yield Conv(width // 2, 2 * size, width, 2, 2, 0, epilogue=("bias",))
        yield Conv(width, size, width, 7, 1, 3, groups=width, epilogue=("bias",))
        yield Linear(size * size, width, 4 * width, ("bias", "gelu"))
        yield Linear(size * size, 4 * width, width, ("bias", "scale", "add"))
    yield Linear(1, 768, 1000)


def _vgg() -> Iterator[Layer]:
    for channels, filters, size in (
        (3, 64, 224),
        (64, 64, 224),
        (64, 128, 112),
        (128, 128, 112),
        (128, 256, 56),
        (256, 256, 56),
        (256, 512, 28),
        (512, 512, 28),
        (512, 512, 14),
    ):
        yield Conv(channels, size, filters, 3, 1, 1)
    yield Linear(1, 25088, 4096, ("bias", "relu"))
    yield Linear(1, 4096, 4096, ("bias", "relu"))
    yield Linear(1, 4096, 1000)


def _gpt2() -> Iterator[Layer]:
    for rows in (1, SEQUENCE):
        yield Linear(rows, 768, 2304, plain=True)
        yield Linear(rows, 768, 768, ("bias", "add"), plain=True)
        yield Linear(rows, 768, 3072, ("bias", "gelu(tanh)"), plain=True)
        yield Linear(rows, 3072, 768, ("bias", "add"), plain=True)
        yield Linear(rows, 768, 50257, ())


def _llama() -> Iterator[Layer]:
    for rows in (1, SEQUENCE):
        yield Linear(rows, 4096, 4096, ())
        yield Linear(rows, 4096, 1024, ())
        yield Linear(rows, 4096, 4096, ("add",))
        yield Linear(rows, 4096, 14336, ())
        yield Linear(rows, 4096, 14336, ("swish", "mul"))
        yield Linear(rows, 14336, 4096, ("add",))
        yield Linear(rows, 4096, 128256, ())


def _odd() -> Iterator[Layer]:
    yield Conv(1, 28, 32, 5)
    yield Conv(3, 227, 96, 11, 4, 0)
    yield Conv(12, 113, 24, 3, 2, 1)
    yield Conv(17, 31, 51, 3, 1, 1)
    yield Conv(60, 35, 509, 1)
    yield Conv(100, 29, 100, 5, 1, 2)
    yield Linear(1, 1000, 1000)
    yield Linear(7, 1021, 509, ("bias", "gelu(tanh)"))
    yield Linear(65, 4100, 513, ("bias", "relu"), plain=True)
    yield Linear(509, 509, 509)
    yield Linear(127, 1000, 3001, (), plain=True)


NETWORKS = (
    Network("ResNet-50", tuple(_resnet()), ("bf16", "fp16", "tf32"), 7),
    Network("ConvNeXt-T", tuple(_convnext()), ("bf16", "fp16"), 7),
    Network("VGG-16", tuple(_vgg()), ("bf16", "tf32"), 6),
    Network("GPT-2", tuple(_gpt2()), ("bf16", "fp16"), 7),
    Network("Llama-8B", tuple(_llama()), ("bf16",), 7),
    Network("odd", tuple(_odd()), ("bf16", "fp16", "tf32"), 6),
)


def layers() -> list[Workload]:
    """Returns every layer of every network in every batch size and arithmetic."""
    return [workload for network in NETWORKS for layer in network.layers for workload in network.variants(layer)]


def drawn() -> list[Workload]:
    """Returns 40 of `layers`: ``draw`` different layers of every network, each in one batch size and arithmetic.

    They are chosen by hash, not by a random generator: the choice is the same everywhere, and adding a layer replaces
    at most one.
    """
    chosen = []
    for network in NETWORKS:
        # A layer is drawn by the hash of its first variant's name.
        every = [list(network.variants(layer)) for layer in network.layers]
        lots = sorted((_lot(f"layer {its[0].name}"), n) for n, its in enumerate(every))
        for n in sorted(n for _, n in lots[: network.draw]):
            chosen.append(min(every[n], key=lambda w: _lot(w.name)))
    return chosen


def _lot(text: str) -> bytes:
    return sha256(f"{SEED}: {text}".encode()).digest()

"""Kernels of contractions and direct convolutions: golden files, and no spills when compiled for any architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from golden_files import check_golden
from graphs import ARCHS, share
from kernel_cases import rendered

import fusegraph as fg
from codegen.contraction.simt_schedule import TILES, SimtSchedule
from codegen.dtypes import ALL
from codegen.spec import KernelSource
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.runtime import nvrtc, targets
from fusegraph.runtime.cache import default_cache

DTYPES = [d.name for d in ALL]
ALIKE = (
    ("float16", "bfloat16"),
    ("float8_e4m3", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *((f"int{bits}", f"uint{bits}") for bits in (8, 16, 32, 64)),
)

#: The seed of layers from the random benchmark, and their kinds.  Those of this seed need no device to be traced.
DRAWN = 9
KINDS = ("conv", "conv_transposed", "conv_backward", "matmul", "norm", "reduction", "softmax", "pool", "movement")


def golden_graphs() -> dict[str, fg.Graph]:
    block = fg.Graph("conv_bias_relu", io_dtype="bf16")
    x, residual = (block.tensor(n, (8, 64, 56, 56), layout="NHWC") for n in ("x", "residual"))
    y = block.conv_fprop(x, block.tensor("w", (64, 64, 3, 3), layout="NHWC"), padding=1, name="conv")
    block.output(block.relu(y + block.tensor("bias", (64, 1, 1)) + residual), name="y")

    dense = fg.Graph("matmul_bias_gelu", io_dtype="bf16")
    y = dense.matmul(dense.tensor("a", (2048, 1024)), dense.tensor("b", (1024, 4096)), name="product")
    dense.output(dense.gelu(y + dense.tensor("bias", (4096,))), name="y")

    ragged = fg.Graph("matmul_bias_gelu_ragged")
    a, b = ragged.tensor("a", (3, 65, 33)), ragged.tensor("b", (3, 33, 127))
    ragged.output(ragged.gelu(ragged.matmul(a, b, name="product") + ragged.tensor("bias", (127,))), name="y")

    depthwise = fg.Graph("depthwise", io_dtype="bf16")
    x = depthwise.tensor("x", (8, 128, 56, 56), layout="NHWC")
    y = depthwise.conv_fprop(x, depthwise.tensor("w", (128, 1, 3, 3)), padding=1, name="conv")
    depthwise.output(depthwise.swish(y + depthwise.tensor("bias", (128, 1, 1))), name="y")

    planes = fg.Graph("depthwise_planes")
    x = planes.tensor("x", (32, 256, 14, 14))
    y = planes.conv_fprop(x, planes.tensor("w", (256, 1, 3, 3)), padding=1, name="conv")
    planes.output(planes.relu(y, upper_clip=6.0), name="y")

    image = fg.Graph("filter3x3")
    x = image.tensor("photo", (3, 1, 1080, 1920))
    y = image.conv_fprop(x, image.tensor("weights", (1, 1, 3, 3)), padding=1, mode="convolution", name="filtered")
    image.output(image.clamp(y, 0.0, 1.0), name="y")
    return {g.name: g for g in (block, dense, ragged, depthwise, planes, image)}


@pytest.mark.parametrize("name", list(golden_graphs()))
def test_golden_source(name: str) -> None:
    (kernel,) = plan(golden_graphs()[name]).kernels
    check_golden(name, kernel.source.code)


def compiled(sources: Sequence[KernelSource], arch: str) -> list[nvrtc.CompiledKernel]:
    """Compiles kernels to cubins; raises AssertionError naming those that spill or take too many registers."""
    kernels = nvrtc.compile_kernels(sources, arch, cache=default_cache())
    wrong = []
    for kernel, source in zip(kernels, sources):
        threads = source.block[0] * source.block[1] * source.block[2]
        title = source.code.splitlines()[:5]
        if kernel.spill_bytes or kernel.stack_bytes:
            wrong.append(f"{arch}: {kernel.spill_bytes} bytes spilled, stack {kernel.stack_bytes}: {title}")
        if not 8 <= kernel.registers <= 255 or kernel.registers * threads > 65536:
            wrong.append(f"{arch}: {kernel.registers} registers for {threads} threads: {title}")
        if kernel.shared_bytes > 49152:
            wrong.append(f"{arch}: {kernel.shared_bytes} bytes of shared memory: {title}")
    assert not wrong, "\n".join(wrong)
    return kernels


def convolution(
    x: tuple[int, ...], w: tuple[int, ...], dtype: str = "float32", layout: str = "contiguous", **attributes: Any
) -> fg.Graph:
    graph = fg.Graph("convolution")
    image = graph.tensor("x", x, dtype, layout=layout)
    y = graph.conv_fprop(image, graph.tensor("w", w, dtype), **attributes)
    bias = graph.tensor("bias", (w[0], *(1 for _ in w[2:])), y.dtype)
    graph.output(graph.relu(y + bias), name="y")
    return graph


def product(m: int, n: int, k: int, dtype: str = "float32", *, transposed: bool = False) -> fg.Graph:
    graph = fg.Graph("product")
    a = graph.tensor("a", (m, k), dtype, strides=(1, m) if transposed else None)
    y = graph.matmul(a, graph.tensor("b", (k, n), dtype, strides=(1, k) if transposed else None))
    if y.dtype.is_float:
        y = graph.gelu(y + graph.tensor("bias", (n,), y.dtype))
    graph.output(y, name="y")
    return graph


def sources(graphs: Sequence[fg.Graph]) -> list[KernelSource]:
    """Returns the sources of the graphs' kernels."""
    return [k.source for g in graphs for k in plan(g).kernels]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_spills(arch: str) -> None:
    depthwise = convolution((8, 64, 28, 28), (64, 1, 5, 5), "float64", "channels_last", padding=2, groups=64)
    graphs = [*golden_graphs().values(), product(65, 63, 33, "int64"), depthwise]
    kernels = dict(zip((g.name for g in graphs), compiled(sources(graphs), arch)))
    assert kernels["matmul_bias_gelu"].registers > 128  # the sums of a large part of the tile
    assert kernels["depthwise"].registers <= 190


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["a100", "h200", "rtx5090"])
def test_kernels_of_drawn_layers_compile_without_spills(machine: str) -> None:
    pytest.importorskip("torch")
    from fusegraph.bench.sweep.cases import case
    from fusegraph.bench.sweep.measured import operands
    from fusegraph.bench.traced import graphs_of

    target = targets.named(machine)
    drawn = [case(DRAWN, number, KINDS) for number in range(18)]
    graphs = [g for c in drawn for g in graphs_of(c.function, operands(c, "meta"), c.dtype, "cuda:0")]
    kernels = [k.source for g in graphs for k in plan(g, Options(target=target)).kernels]
    compiled(kernels, target.arch.name)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_compiles_without_spills(dtype: str, arch: str) -> None:
    first, last = "contiguous", "channels_last"
    graphs = [
        product(100, 100, 100, dtype),
        product(1000, 1000, 64, dtype, transposed=True),
        convolution((8, 64, 28, 28), (128, 64, 3, 3), dtype, first, padding=1),
        convolution((8, 64, 7, 7), (37, 64, 1, 1), dtype, last, stride=2),
        convolution((2, 16, 8, 8, 8), (32, 16, 3, 3, 3), dtype, last, padding=1),
        convolution((8, 128, 7, 7), (128, 1, 3, 3), dtype, first, padding=1, groups=128),
        convolution((8, 128, 56, 56), (128, 1, 3, 3), dtype, first, padding=1, stride=2, groups=128),
        convolution((8, 128, 56, 56), (128, 1, 3, 3), dtype, last, padding=1, groups=128),
        convolution((2, 32, 9, 20, 20), (32, 1, 3, 3, 3), dtype, last, padding=1, groups=32),
        convolution((8, 64, 4000), (64, 1, 31), dtype, first, padding=15, groups=64),
        convolution((8, 3, 224, 224), (8, 3, 7, 7), dtype, last, padding=3, stride=2),
    ]
    for alike in ALIKE:
        if dtype in alike:  # of types that are as wide and converted alike each has its share of the kernels
            graphs = graphs[alike.index(dtype) :: len(alike)]
    compiled(sources(share(arch, graphs, DTYPES.index(dtype))), arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "arch"),
    [("contiguous", "sm_80"), ("contiguous", "sm_90a"), ("channels_last", "sm_90a"), ("channels_last", "sm_120")],
)
def test_every_filter_size_compiles_without_spills(layout: str, arch: str) -> None:
    graphs = []
    for dtype in ("float32", "bfloat16", "float64"):
        for size in (1, 2, 3, 5, 7, 11, 15):
            shape = (8, 96, 56, 56), (96, 1, size, size)
            graphs.append(convolution(*shape, dtype, layout, padding=size // 2, groups=96))
        for dilation in (2, 8):
            graphs.append(
                convolution((8, 33, 64, 64), (33, 1, 3, 3), dtype, layout, dilation=dilation, padding=8, groups=33)
            )
        graphs.append(convolution((8, 4, 64, 64), (8, 4, 8, 8), dtype, layout, padding=3))
        graphs.append(convolution((8, 1, 4000), (8, 1, 255), dtype, layout, padding=127))
    compiled(sources(share(arch, graphs)), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_tile_compiles_without_spills(arch: str) -> None:
    made = []
    for dtype in ("float32", "float64", "int64"):
        wide = dtype in ("float64", "int64")
        for graph in (product(333, 222, 111, dtype), convolution((4, 24, 30, 30), (40, 24, 3, 3), dtype, padding=1)):
            (kernel,) = plan(graph).kernels
            spec = replace(kernel.group.lowered.spec, name=kernel.name)
            for itype in ("int32", "int64") if dtype == "float32" else ("int32",):
                made += [
                    rendered(spec, SimtSchedule(*tile, itype))
                    for tile in TILES
                    if not (wide and tile[3] * tile[4] > 32)
                ]
    kernels = compiled(share(arch, made), arch)
    assert max(k.registers for k in kernels) <= 255


def test_headers_and_names_of_any_graph_compile() -> None:
    """Tensors named after C keywords, the kernel's own variables, and each other."""
    graph = fg.Graph("for")
    names = ["a_tile", "sum", "int", "k0", "row0", "tx", "stage", "x.1", "x 1"]
    a, b, *rest = (graph.tensor(n, (8, 8)) for n in names)
    y = graph.matmul(a, b, name="m")
    for tensor in rest:
        y = y + tensor
    graph.output(y, name="n")
    image = fg.Graph("tile")
    names = ["tile", "weights", "under", "column", "lane"]
    x, w, *rest = (image.tensor(n, (1, 8, 9, 9) if n != "weights" else (8, 1, 3, 3)) for n in names)
    y = image.conv_fprop(x, w, groups=8, padding=1, name="sum")
    for tensor in rest:
        y = y + tensor
    image.output(y, name="q")
    compiled(sources([graph, image]), "sm_90a")


RENDERERS: list[Callable[[], fg.Graph]] = [
    lambda: product(65, 63, 33, "bfloat16"),
    lambda: convolution((2, 40, 9, 9), (40, 1, 3, 3), "int8", "channels_last", groups=40),
    lambda: convolution((2, 3, 9, 9), (8, 3, 3, 3)),
]


@pytest.mark.parametrize("make", RENDERERS)
def test_the_same_graph_gives_the_same_source(make: Callable[[], fg.Graph]) -> None:
    assert sources([make()]) == sources([make()])

"""Positions of 64 bits: kernels of every family for ragged sizes, and tensors whose images are far apart in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graphs import check_all, elementary, executables, filtered, quick
from test_attention import made
from test_attention_backward import made as gradients

import fusegraph as fg
from codegen import iteration, render, schedules, target
from codegen.families import form_of
from codegen.family import Form
from codegen.spec import KernelSource
from fusegraph.layout import extent
from fusegraph.plan import plan
from fusegraph.report.check import check_executable
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

#: Shapes are of this file alone: what is kept in memory of other specifications has positions of 32 bits.


def elements() -> Iterator[fg.Graph]:
    """Yields graphs of the families that read every element once or a few times."""
    g = fg.Graph("elements")
    x = elementary(g, 71, 141)
    g.output(g.reduction(x, "max", 0), name="columns")
    g.output(g.softmax(x, 0), name="down")
    yield g
    for dtype in ("bfloat16", "float32"):
        g = fg.Graph(f"turned {dtype}", io_dtype=dtype)
        a = g.tensor("a", (3, 135, 77))
        g.output(g.transpose(a, (0, 2, 1)) + g.tensor("b", (3, 77, 135)), name="y")
        g.output(g.reshape(g.transpose(a, (2, 0, 1)), (77 * 3, 135)), name="flat")
        g.output(g.layernorm(a, g.tensor("scale", (77,)), g.tensor("bias", (77,))), name="norm")
        yield g
    for layout in ("NHWC", "NCHW"):
        g = fg.Graph(f"pools {layout}", io_dtype="bfloat16")
        x = g.tensor("x", (3, 33, 35, 37), layout=layout)
        g.output(g.max_pool(x, window=(2, 2)), name="pooled")
        g.output(g.avg_pool(x, 3, 1, 1), name="smoothed")
        yield g


def products() -> Iterator[fg.Graph]:
    """Yields graphs of the families of convolutions, products and attention."""
    for layout in ("NHWC", "NCHW"):
        g = fg.Graph(f"images {layout}", io_dtype="bfloat16")
        x = g.tensor("x", (3, 48, 35, 37), layout=layout)
        filtered(g, x, layout)
        g.output(g.conv_fprop(x, g.tensor("v", (36, 48, 3, 3)), padding=1), name="y")
        g.output(g.conv_fprop(x, g.tensor("u", (48, 8, 3, 3)), padding=1, groups=6), name="grouped")
        yield g
    g = fg.Graph("winograd")
    x = g.tensor("x", (1, 17, 19, 21))
    g.output(g.conv_fprop(x, g.tensor("w", (18, 17, 3, 3)), padding=1, algorithm="winograd_4x4"), name="y")
    yield g
    for dtype in ("bfloat16", "float32"):
        g = fg.Graph(f"product {dtype}", io_dtype=dtype)
        g.output(g.gelu(g.tensor("a", (2, 67, 131)) @ g.tensor("b", (2, 131, 203))), name="y")
        g.output(g.tensor("c", (3, 515, 68)) @ g.tensor("d", (3, 68, 204)), name="z")
        yield g
        yield made(name=dtype, dtype=dtype, rows=45, keys=51)
        yield gradients(name=f"gradients {dtype}", dtype=dtype, rows=45, keys=51, results=3)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all positions those of large tensors."""
    monkeypatch.setattr(iteration, "FAR", 0)
    monkeypatch.setattr(iteration, "FAR_SIGNED", 0)


def sources(graphs: list[fg.Graph], arch: str) -> list[KernelSource]:
    """Returns a kernel of every form that the graphs' kernels may have, with 64-bit positions."""
    made: dict[tuple[str, Form], KernelSource] = {}  # type: ignore[type-arg]
    for graph in graphs:
        for kernel in plan(graph).kernels:
            spec = kernel.group.lowered.spec
            for schedule in schedules(spec, target(arch)):
                source = render(spec, schedule)
                made.setdefault((f"{graph.name} {kernel.name}", form_of(schedule)), source)
    return list(made.values())


@pytest.mark.slow
@pytest.mark.parametrize("arch", quick("sm_90a", "sm_80"))
def test_kernels_of_elements_compile(far: None, arch: str) -> None:
    found = sources(list(elements()), arch)
    assert all("int64" in source.code for source in found)
    assert len(nvrtc.compile_kernels(found, arch, cache=default_cache())) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_kernels_of_products_compile(far: None, arch: str) -> None:
    found = sources(list(products()), arch)
    assert len(nvrtc.compile_kernels(found, arch, cache=default_cache())) == len(found)


def test_results_are_right(far: None) -> None:
    check_all(list(elements()))


@pytest.mark.slow
def test_results_of_products_are_right(far: None) -> None:
    check_all(list(products()))


#: Elements from one image to the next; three of them are further than 32 bits reach.
APART = 2**31 - 64


def apart(g: fg.Graph, name: str, *shape: int, channels_last: bool = False) -> fg.Tensor:
    """Returns an input whose parts along the first dimension lie `APART`."""
    order = (0, *range(2, len(shape)), 1) if channels_last else tuple(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    return g.tensor(name, shape, strides=(APART, *strides[1:]))


def distant(dtype: str) -> Iterator[fg.Graph]:
    """Yields graphs of inputs with parts far apart."""
    g = fg.Graph(f"elements {dtype}", io_dtype=dtype)
    x = apart(g, "x", 3, 37, 45)
    g.output(g.transpose(g.gelu(x), (0, 2, 1)), name="turned")
    g.output(g.softmax(x, 2), name="rows")
    g.output(g.softmax(x, 1), name="columns")
    g.output(g.reduction(x, "add", (0, 1)), name="sums")
    g.output(g.cumsum(x, 2), name="running")
    g.output(g.sort(x, 2), name="sorted")
    yield g
    for last in (False, True):
        g = fg.Graph(f"pools {dtype} {last}", io_dtype=dtype)
        g.output(g.max_pool(apart(g, "x", 3, 24, 13, 15, channels_last=last), window=(3, 3), stride=2), name="y")
        yield g
        g = fg.Graph(f"convolution {dtype} {last}", io_dtype=dtype)
        x = apart(g, "x", 3, 32, 33, 31, channels_last=last)
        g.output(g.relu(g.conv_fprop(x, g.tensor("w", (64, 32, 3, 3)), padding=1)), name="y")
        g.output(g.conv_fprop(x, g.tensor("v", (32, 1, 3, 3)), padding=1, groups=32), name="filtered")
        yield g
    for inner in (68, 72):
        g = fg.Graph(f"product {dtype} {inner}", io_dtype=dtype)
        g.output(apart(g, "a", 3, 515, inner) @ apart(g, "b", 3, inner, 204), name="y")
        yield g
    g = fg.Graph(f"attention {dtype}", io_dtype=dtype)
    q, k, v = (apart(g, name, 3, 2, 70, 64) for name in "qkv")
    g.output(g.sdpa(q, k, v), name="y")
    yield g


def distant_inputs(graph: fg.Graph) -> dict[str, np.ndarray]:
    """Returns random inputs, of whose memory only what is between them is never touched."""
    rng, found = np.random.default_rng(0), {}
    for tensor in graph.inputs:
        flat = np.zeros(extent(tensor.shape, tensor.strides), tensor.dtype.numpy)
        steps = [step * flat.itemsize for step in tensor.strides]
        found[tensor.name] = np.lib.stride_tricks.as_strided(flat, tensor.shape, steps)
        found[tensor.name][...] = rng.standard_normal(tensor.shape)
    return found


@pytest.mark.parametrize("arch", quick("sm_90a", "sm_80"))
@pytest.mark.parametrize("dtype", quick("float32", "bfloat16"))
@pytest.mark.slow
def test_parts_may_be_far_apart(arch: str, dtype: str) -> None:
    for executable in executables(list(distant(dtype)), arch=arch):
        result = check_executable(executable, distant_inputs(executable.graph))
        assert result.ok, f"{executable.graph.name}: {result}"

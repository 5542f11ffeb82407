"""Buffers: their bytes are those of the struct that kernels declare."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import fusegraph as fg
from codegen.buffers import SWIZZLED, VECTORS, Buffer, Buffers
from codegen.spec import KernelSource
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.runtime import nvrtc


def test_bytes() -> None:
    ring = Buffer("keys", "bfloat16", (64, 128), 3, pad=8, align=VECTORS)
    assert ring.declaration == "alignas(16) bfloat16 keys[3][64][136];"
    assert (ring.bytes, ring.stage_bytes) == (3 * 64 * 136 * 2, 64 * 136 * 2)
    assert Buffers((Buffer("a", "int"), Buffer("b", "Barrier", (), 2), Buffer("c", "int8", (3,)))).bytes == 27
    tile = Buffer("tile", "float", (32, 32), align=SWIZZLED)
    assert Buffers((Buffer("a", "int"), tile)).bytes == 1024 + 4096


def _attention(*, backward: bool = False, dtype: str = "bf16", depth: int = 64) -> fg.Graph:
    graph = fg.Graph("attention", io_dtype=dtype)
    q, k, v = (graph.tensor(n, (2, 4, 200, depth)) for n in ("q", "k", "v"))
    if not backward:
        graph.output(graph.sdpa(q, k, v, use_causal_mask=True))
        return graph
    o, stats = graph.sdpa(q, k, v, use_causal_mask=True, generate_stats=True)
    for name, t in zip(
        "qkv", graph.sdpa_backward(q, k, v, o, graph.tensor("do", o.shape), stats, use_causal_mask=True)
    ):
        graph.output(t, name=f"d{name}")
    return graph


def _matmul(dtype: str, *, front: bool = False, sums: bool = False) -> fg.Graph:
    graph = fg.Graph("product", io_dtype=dtype)
    x, w = graph.tensor("x", (256, 512)), graph.tensor("w", (512, 384))
    y = (graph.relu(x) if front else x) @ w + graph.tensor("residual", (256, 384))
    graph.output(y)
    if sums:
        graph.output(graph.reduction(y, "add", 0))
    return graph


def _convolution() -> fg.Graph:
    graph = fg.Graph("depthwise", io_dtype="bf16")
    x = graph.tensor("x", (2, 64, 30, 30), layout="NHWC")
    graph.output(graph.conv_fprop(x, graph.tensor("w", (64, 1, 3, 3), layout="NHWC"), padding=1, groups=64))
    return graph


GRAPHS = {
    "attention": _attention(),
    "attention of floats": _attention(dtype="float32"),
    "gradients": _attention(backward=True),
    "long gradients": _attention(backward=True, depth=192),
    "product": _matmul("bf16"),
    "computed": _matmul("bf16", front=True),
    "sums": _matmul("fp16", sums=True),
    "floats": _matmul("float32"),
    "depthwise": _convolution(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a100", "h200"])
def test_bytes_are_those_of_the_struct(name: str) -> None:
    machine, checked = target(name), []
    for graph in GRAPHS.values():
        for kernel in plan(graph, Options(target=machine)).kernels:
            if "struct Shared" in kernel.source.code:
                checked.append(_asserted(kernel.source, len(checked)))
    assert len(checked) >= 5
    nvrtc.compile_kernels(checked, machine.arch.name, options=["--std=c++17"])


def _asserted(source: KernelSource, number: int) -> KernelSource:
    """Returns a kernel that compiles only if its struct has as many bytes as it is launched with."""
    size = max((int(n) for n in re.findall(r"alignas\((\d+)\)", source.code)), default=8)
    most = -(-source.dynamic_shared_bytes // size) * size
    check = f'static_assert(sizeof(Shared) <= {most} && sizeof(Shared) > {most - 2 * size}, "bytes");'
    code = source.code.replace(
        "    FUSEGRAPH_DYNAMIC_SHARED(memory);", f"    {check}\n    FUSEGRAPH_DYNAMIC_SHARED(memory);"
    )
    assert check in code
    name = f"{source.name}_{number}"
    return replace(source, name=name, code=code.replace(f" {source.name}(", f" {name}("))

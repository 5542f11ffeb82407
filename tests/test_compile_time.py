"""What NVRTC takes for the largest kernels of contractions, beside a plain one."""

from __future__ import annotations

import time

import pytest

import codegen
from codegen.spec import KernelSource
from fusegraph.bench.workloads import SUITES
from fusegraph.plan import by_cost_model, plan
from fusegraph.runtime import nvrtc

pytestmark = pytest.mark.slow

PLAIN = "matmul 8192x8192x8192 bf16"
LARGEST = (
    "matmul 8192x8192x8192+bias+gelu tf32",
    "relu(a*scale+bias) @ b 16384x256x4096 bf16",
    "conv 3x3 64x256x56x56->256+bias+relu+channel sums bf16",
    "swiglu 4096x4096->14336 bf16",
    "odd matmul 32576x509x509+bias bf16",
)
#: On an idle machine the plain kernel takes 0.27 s, and the largest 2.1 times as long: 0.6 s is the aim for all.
MOST, TRIES = 2.6, 3


def kernel(name: str) -> KernelSource:
    """Returns the kernel of a workload that holds its contraction, as chosen for Hopper."""
    workload = next(w for suite in ("tensor-core", "models") for w in SUITES[suite]() if w.name == name)
    graph = workload.graph()
    assert graph is not None
    kernels = plan(graph, choose=by_cost_model(codegen.target("sm_90a"))).kernels
    return max((k.source for k in kernels if k.group.family == "contraction"), key=lambda source: len(source.code))


def seconds(source: KernelSource) -> float:
    """Returns the CPU time of this thread that compiling takes; wall time depends on other processes."""
    began = time.thread_time()
    (compiled,) = nvrtc.compile_kernels([source], "sm_90a", jobs=1)
    assert not compiled.spill_bytes
    assert not compiled.warnings  # such as products that wait for one another
    return time.thread_time() - began


def test_the_largest_kernels_compile_soon():
    source = kernel(PLAIN)
    plain = min(seconds(source) for _ in range(TRIES))
    for name in LARGEST:
        source = kernel(name)
        assert any(seconds(source) < MOST * plain for _ in range(TRIES)), name

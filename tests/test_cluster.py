"""Clusters on the CPU: blocks that access each other's shared memory, and every misuse."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cluster_kernels import cluster_cases, cluster_sum
from tma_kernels import Case

from codegen.cpu import GuardedArray
from codegen.spec import KernelSource
from fusegraph.errors import KernelError
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import CpuModule, Order, build

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in cluster_cases()}
WITHOUT_SYNC = cluster_sum("without_sync", sync="__syncthreads();")
WITHOUT_END = [cluster_sum("without_end", end=""), cluster_sum("without_end_static", dynamic=False, end="")]

#: Kernels of clusters of two blocks of one warp that go wrong: name -> (what the error says, code).
WRONG = {
    "twice": ("has arrived already", "cluster_arrive(); cluster_arrive();"),
    "not_arrived": ("has not arrived", "cluster_wait();"),
    "no_block": ("block 2 of a cluster of 2", "cluster_map(&word, 2);"),
    "no_block_before": ("block -1 of a cluster of 2", "cluster_map(&word, -1);"),
    "not_shared": ("the variable, .* is not in the block's shared memory", "int here; cluster_map(&here, 0);"),
    "no_barrier": (
        "in another block of the cluster, was not initialised",
        "barrier_arrive_cluster(one, 1 - cluster_rank());",
    ),
    "no_fence": (
        "initialised without barrier_fence_init",
        "if (threadIdx.x == 0) barrier_init(one, 9); cluster_sync(); barrier_arrive_cluster(one, 1 - cluster_rank());",
    ),
    "deadlock": (
        r"deadlock.*block \(0, 0, 0\): threads 0-31 wait in cluster_sync at deadlock.cu:\d+; "
        r"block \(1, 0, 0\): threads 0-31 wait in barrier_wait .*1 of 1 arrivals",
        "if (threadIdx.x == 0) barrier_init(one, 1); __syncwarp();"
        "if (cluster_rank()) barrier_wait(one, 0); cluster_sync();",
    ),
    "arrives_after_the_end": (
        r"reaches into the shared memory of block \d of the cluster, which has ended",
        "if (threadIdx.x == 0) { barrier_init(one, 1); barrier_fence_init(); } cluster_sync();"
        "if (cluster_rank() == last) barrier_arrive_cluster(one, 1 - cluster_rank());",
    ),
}
_WRONG = """
#include "cluster.cuh"
#include "mbarrier.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) {name}(int last)
{{
    __shared__ Barrier one;
    __shared__ int word;
    {code}
}}
"""


def wrong_kernel(name: str, code: str, cluster: tuple[int, int, int] = (2, 1, 1)) -> KernelSource:
    return KernelSource(name, _WRONG.format(name=name, code=code), (2, 1, 1), (32, 1, 1), 0, True, cluster=cluster)


@pytest.fixture(scope="module")
def module() -> CpuModule:
    sources = [case.source for case in [*CASES.values(), WITHOUT_SYNC, *WITHOUT_END]]
    sources += [wrong_kernel(name, code) for name, (_, code) in WRONG.items()]
    sources += [wrong_kernel("fits", "cluster_sync();"), wrong_kernel("large", "", (17, 1, 1))]
    return build(sources, cache=default_cache())


@pytest.mark.parametrize("host_threads", ["1", "3"])
@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("name", CASES)
def test_results(
    module: CpuModule, name: str, order: Order, host_threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEGRAPH_CPU_THREADS", host_threads)
    case = CASES[name]
    arrays = [GuardedArray(array) for array in case.arrays]
    module.launch(name, [array.pointer for array in arrays], order=order)
    for array, expected in zip(arrays, case.expected):
        np.testing.assert_array_equal(array.array, expected)


def test_a_missing_barrier_of_the_cluster_shows(module: CpuModule) -> None:
    for order in ("forward", "reverse"):
        arrays = [GuardedArray(array) for array in WITHOUT_SYNC.arrays]
        module.launch("without_sync", [array.pointer for array in arrays], order=order)
        assert not np.array_equal(arrays[1].array, WITHOUT_SYNC.expected[1])


@pytest.mark.parametrize("case", WITHOUT_END, ids=lambda case: case.name)
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_memory_of_a_block_that_has_ended(module: CpuModule, case: Case, order: Order) -> None:
    arrays = [GuardedArray(array) for array in case.arrays]
    message = "(read of|reaches into) the shared memory of block . of the cluster, which has ended"
    for _ in range(2):  # the runtime is as good as new afterwards
        with pytest.raises(KernelError, match=message):
            module.launch(case.name, [array.pointer for array in arrays], order=order)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("name", WRONG)
def test_errors(module: CpuModule, name: str, order: Order) -> None:
    with pytest.raises(KernelError, match=re.compile(WRONG[name][0], re.DOTALL)):
        module.launch(name, [int(order == "forward")], order=order)


def test_grids_are_multiples_of_the_cluster(module: CpuModule) -> None:
    module.launch("fits", [0], grid=(4, 1, 1))
    with pytest.raises(KernelError, match=r"grid \(3, 1, 1\) is no multiple of the cluster, \(2, 1, 1\)"):
        module.launch("fits", [0], grid=(3, 1, 1))
    with pytest.raises(KernelError, match=r"clusters of \(17, 1, 1\) blocks; CUDA takes up to 16"):
        module.launch("large", [0], grid=(17, 1, 1))

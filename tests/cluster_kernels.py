"""Kernels with barriers in shared memory, warpgroups and clusters, as Cases: see tma_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tma_kernels import Case, describe, sample

from codegen.spec import KernelSource

_PIPELINE = """
#include "tma.cuh"
#include "warpgroup.cuh"

// A producer warpgroup loads tiles of 16 rows into a ring of {stages}; a consumer warpgroup adds up each column.
extern "C" __global__ void __launch_bounds__(256, 1) {name}(
    const __grid_constant__ TensorMap map, float* __restrict__ y)
{{
    __shared__ __align__(1024) float tiles[{stages}][16][32];
    __shared__ Barrier full[{stages}], empty[{stages}];
    __shared__ float parts[4][32];
    if (threadIdx.x == 0) {{
        for (int s = 0; s < {stages}; ++s) {{
            barrier_init(full[s], 1);
            barrier_init(empty[s], 4);
        }}
        barrier_fence_init();
    }}
    __syncthreads();
    if (threadIdx.x < 128) {{
        registers_decrease<24>();
        if (threadIdx.x == 0)
            for (uint32 k = 0; k < {tiles}; ++k) {{
                {wait_empty}barrier_wait(empty[k % {stages}], (k / {stages} + 1) % 2);
                barrier_expect(full[k % {stages}], 2048);
                tma_load(tiles[k % {stages}], map, full[k % {stages}], blockIdx.x * 32, k * 16);
            }}
    }} else {{
        registers_increase<240>();
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
        float sum = 0;
        for (uint32 k = 0; k < {tiles}; ++k) {{
            {wait_full}barrier_wait(full[k % {stages}], k / {stages} % 2);
            // 16-byte pieces change places by the number of the row.
            for (int r = warp; r < 16; r += 4) sum += tiles[k % {stages}][r][lane ^ (r % 8 * 4)];
            __syncwarp();
            if (lane == 0) barrier_arrive(empty[k % {stages}]);
        }}
        parts[warp][lane] = sum;
        named_barrier_sync(1, 128);
        if (warp == 0) y[blockIdx.x * 32 + lane] = parts[0][lane] + parts[1][lane] + parts[2][lane] + parts[3][lane];
    }}
}}
"""


def pipeline(name: str = "pipeline", skip: str = "", stages: int = 3, tiles: int = 8) -> Case:
    """Computes column sums through a ring of stages, without the wait for ``skip`` ("full" or "empty")."""
    x = sample((tiles * 16, 64), np.float32)
    waits = {f"wait_{what}": "// " if what == skip else "" for what in ("full", "empty")}
    code = _PIPELINE.format(name=name, stages=stages, tiles=tiles, **waits)
    parameters = (describe(x, (32, 16), 128), 1)
    source = KernelSource(name, code, (2, 1, 1), (256, 1, 1), 0, True, parameters)
    return Case(source, (x, np.zeros(64, np.float32)), (x, x.sum(0)))


_ARRIVALS = """
#include "mbarrier.cuh"

// Threads take turns in pairs of phases: even warps write, odd warps read.
extern "C" __global__ void arrivals(uint32* __restrict__ out)
{
    __shared__ uint32 words[32];
    __shared__ Barrier written, taken;
    if (threadIdx.x == 0) {
        barrier_init(written, 32);
        barrier_init(taken, 32);
        barrier_fence_init();
    }
    __syncthreads();
    const uint32 lane = threadIdx.x % 32;
    for (uint32 n = 0; n < 5; ++n)
        if (threadIdx.x < 32) {
            barrier_wait(taken, (n + 1) % 2);
            words[lane] = n * 100 + lane;
            barrier_arrive(written);
        } else {
            barrier_wait(written, n % 2);
            out[n * 32 + lane] = words[31 - lane];
            barrier_arrive(taken);
        }
}
"""


def arrivals() -> Case:
    out = (np.arange(5)[:, None] * 100 + np.arange(31, -1, -1)).astype(np.uint32)
    return Case(KernelSource("arrivals", _ARRIVALS, (1, 1, 1), (64, 1, 1), 0, True), (np.zeros_like(out),), (out,))


_NAMED = """
#include "order.cuh"
#include "warpgroup.cuh"

// The first warp announces what it wrote and goes on; the others wait for it.
extern "C" __global__ void named(uint32* __restrict__ out)
{
    __shared__ uint32 words[32];
    if (threadIdx.x < 32) {
        words[threadIdx.x] = 7 * threadIdx.x;
        named_barrier_arrive(3, 96);
    } else {
        named_barrier_sync(3, 96);
        out[threadIdx.x - 32] = words[threadIdx.x % 32];
    }
    grid_dependency_launch();
    grid_dependency_wait();
}
"""


def named() -> Case:
    out = np.tile(np.arange(32, dtype=np.uint32) * 7, 2)
    return Case(KernelSource("named", _NAMED, (1, 1, 1), (96, 1, 1), 0, True), (np.zeros_like(out),), (out,))


_INDICES = """
#include "cluster.cuh"

extern "C" __global__ void __cluster_dims__(2, 2, 2) indices(uint32* __restrict__ out)
{
    const uint32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) out[block] = cluster_rank();
    cluster_sync();
}
"""


def indices() -> Case:
    """Writes the rank of every block in a cluster of three dimensions."""
    z, y, x = np.indices((2, 4, 6), np.uint32)
    out = x % 2 + y % 2 * 2 + z % 2 * 4
    source = KernelSource("indices", _INDICES, (6, 4, 2), (32, 1, 1), 0, True, cluster=(2, 2, 2))
    return Case(source, (np.zeros_like(out),), (out,))


_SUM = """
#include "cluster.cuh"
#include "shared.cuh"

// Sums of rows: each block of a cluster has a part of the row, in {where} shared memory, and adds up all parts.
extern "C" __global__ void __cluster_dims__(4, 1, 1) {name}(const float* __restrict__ x, float* __restrict__ y)
{{
    {declare}
    const int rank = cluster_rank();
    part[threadIdx.x] = x[blockIdx.x * 48 + threadIdx.x];
    {sync}
    float sum = 0;
    for (int cta = 0; cta < 4; ++cta) sum += cluster_map(part, cta)[threadIdx.x];
    y[blockIdx.x * 48 + threadIdx.x] = sum + rank;
    {end}
}}
"""
_DYNAMIC = "FUSEGRAPH_DYNAMIC_SHARED(bytes); float* const part = reinterpret_cast<float*>(bytes);"
_STATIC = "__shared__ float part[48];"


def cluster_sum(name: str, dynamic: bool = True, sync: str = "cluster_sync();", end: str = "cluster_sync();") -> Case:
    """Sums over four blocks of 48 threads, so that warps of two blocks are not adjacent."""
    x = sample((3, 4, 48), np.float32)
    y = np.repeat(x.sum(1, keepdims=True), 4, 1) + np.arange(4, dtype=np.float32)[:, None]
    where = ("dynamic", _DYNAMIC) if dynamic else ("static", _STATIC)
    code = _SUM.format(name=name, where=where[0], declare=where[1], sync=sync, end=end)
    source = KernelSource(name, code, (12, 1, 1), (48, 1, 1), 192 if dynamic else 0, True, cluster=(4, 1, 1))
    return Case(source, (x, np.zeros_like(y)), (x, y))


_RING = """
#include "cluster.cuh"
#include "mbarrier.cuh"

// Every block waits for the block before it, through a barrier of its own that the other arrives at.
extern "C" __global__ void __cluster_dims__(4, 1, 1) ring(uint32* __restrict__ out)
{
    __shared__ uint32 turn;
    __shared__ Barrier mine;
    const int rank = cluster_rank();
    if (threadIdx.x == 0) {
        turn = 0;
        barrier_init(mine, 1);
        barrier_fence_init();
    }
    cluster_sync();
    for (uint32 n = 0; n < 3; ++n) {
        if (rank != 0 || n != 0) barrier_wait(mine, rank == 0 ? (n + 1) % 2 : n % 2);
        if (threadIdx.x == 0) {
            if (rank == 0) ++turn;
            out[blockIdx.x * 3 + n] = n * 4 + rank;
        }
        __syncthreads();
        if (threadIdx.x == 0) barrier_arrive_cluster(mine, (rank + 1) % 4);
    }
    cluster_sync();
}
"""


def ring() -> Case:
    out = (np.arange(3) * 4 + np.arange(4)[:, None] + np.zeros((2, 1, 1))).astype(np.uint32)
    source = KernelSource("ring", _RING, (8, 1, 1), (32, 1, 1), 0, True, cluster=(4, 1, 1))
    return Case(source, (np.zeros_like(out),), (out,))


_COUNTERS = """
#include "cluster.cuh"

// All threads count in the shared memory of all blocks; half of them have ended before the last barrier.
extern "C" __global__ void __cluster_dims__(1, 2, 1) counters(int* __restrict__ out)
{
    __shared__ int count[2];
    if (threadIdx.x < 2) count[threadIdx.x] = 0;
    cluster_arrive();
    cluster_wait();
    for (int cta = 0; cta < 2; ++cta) atomicAdd(cluster_map(&count[threadIdx.x % 2], cta), 1 + cluster_rank());
    cluster_arrive();
    if (threadIdx.x >= 32) return;
    cluster_wait();
    if (threadIdx.x < 2) out[blockIdx.y * 2 + threadIdx.x] = count[threadIdx.x];
    cluster_sync();
}
"""


def counters() -> Case:
    out = np.full((4, 2), 32 * 3, np.int32)
    source = KernelSource("counters", _COUNTERS, (1, 4, 1), (64, 1, 1), 0, True, cluster=(1, 2, 1))
    return Case(source, (np.zeros_like(out),), (out,))


def barrier_cases() -> Iterator[Case]:
    yield pipeline()
    yield arrivals()
    yield named()


def cluster_cases() -> Iterator[Case]:
    yield indices()
    yield cluster_sum("sum_dynamic")
    yield cluster_sum("sum_static", dynamic=False)
    yield ring()
    yield counters()

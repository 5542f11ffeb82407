// Reductions across the blocks of a cluster.
#pragma once
#include "cluster.cuh"
#include "reduce.cuh"

namespace reduce {

// Over all threads of Blocks blocks of Warps warps each.  Every thread gets the result.  parts: Warps * Blocks elements of
// every block's shared memory for this reduction alone: one barrier is enough, and no block reads another's memory.
template <class Op, int Warps, int Blocks, class T>
__device__ __forceinline__ T cluster(T value, T* parts) {
    value = lanes<Op, 32>(value);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane < Blocks) *cluster_map(parts + cluster_rank() * Warps + warp, lane) = value;
    cluster_sync();
    constexpr int count = Warps * Blocks;
    T total = parts[lane % count];
#pragma unroll
    for (int i = 32; i < count; i += 32) total = Op::of(total, parts[i + lane]);
    return lanes<Op, (count < 32 ? count : 32)>(total);
}

}  // namespace reduce

// Reductions across the blocks of a cluster.
#pragma once
#include "cluster.cuh"
#include "reduce.cuh"

namespace reduce {

// Over all threads of Blocks blocks of Warps warps each.  Every thread gets the result.  parts: Warps * Blocks elements
// of every block's shared memory for this reduction alone: one barrier is enough, and no block reads another's memory.
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

// Sums of exponentials (reduce.cuh) over the same threads: Warps * Blocks elements of shared memory for each of the
// two.
template <int Warps, int Blocks, class T>
__device__ __forceinline__ void exp_cluster(T& most, T& sum, T* most_parts, T* sum_parts) {
    exp_lanes<32>(most, sum);
    const int lane = threadIdx.x % 32, place = cluster_rank() * Warps + threadIdx.x / 32;
    if (lane < Blocks) *cluster_map(most_parts + place, lane) = most, *cluster_map(sum_parts + place, lane) = sum;
    cluster_sync();
    constexpr int count = Warps * Blocks;
    most = most_parts[lane % count], sum = sum_parts[lane % count];
#pragma unroll
    for (int i = 32; i < count; i += 32) {
        const T before = most;
        most = math::maximum(most, most_parts[i + lane]);
        sum = sum * math::exp(before - shift(most)) + sum_parts[i + lane] * math::exp(most_parts[i + lane] - shift(most));
    }
    exp_lanes<(count < 32 ? count : 32)>(most, sum);
}

// Over the threads of Blocks blocks that are a multiple of Side apart, as `across`, which has combined those of each
// block.  parts: those of `across`; of_blocks: Side * V * Blocks elements of every block's shared memory for this
// reduction alone.
template <class Op, int Side, int Lanes, int Blocks, int V, class T>
__device__ __forceinline__ void across_cluster(T (&part)[V], T* parts, T* of_blocks) {
    constexpr int size = Side * V;
    const int mine = threadIdx.x % Side;
    for (int to = threadIdx.x / Side; to < Blocks; to += Lanes)
#pragma unroll
        for (int e = 0; e < V; ++e) *cluster_map(of_blocks + cluster_rank() * size + e * Side + mine, to) = part[e];
    cluster_sync();
    across_groups<Op, Side, Lanes, Blocks>(part, of_blocks, parts);
}

}  // namespace reduce

// Clusters: blocks that run at the same time and reach each other's shared memory (sm_90).  A kernel says its cluster's
// size by __cluster_dims__.
#pragma once
#include "types.cuh"

#ifdef FUSEGRAPH_CPU
#include "cluster_on_cpu.h"
#else

// The block's number in its cluster, x fastest.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster in two halves: what a thread wrote before it arrived, in its own shared
// memory or another block's, is seen by every thread that has waited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The address of the same variable in the shared memory of block `cta` of the cluster.  A block must not end while
// others still reach into it: cluster_sync before.
template <class T>
__device__ __forceinline__ T* cluster_map(T* shared, int cta) {
    T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(cta));
    return there;
}

#endif

// Barriers in shared memory that count arriving threads and arriving bytes (sm_90).
//
// A barrier goes through phases 0, 1, 2, ...  The current phase completes when as many threads have arrived as
// barrier_init said and as many bytes were copied as barrier_expect announced; the next one then begins.
#pragma once
#include "shared.cuh"
#include "types.cuh"

struct alignas(8) Barrier {
    uint64 state;
};

#ifdef FUSEGRAPH_CPU
#include "mbarrier_on_cpu.h"
#else

// Makes a barrier whose phases complete after `arrivals` arrivals; one thread calls it.  That thread then calls
// barrier_fence_init, and the threads of the block (of the cluster, if other blocks use the barrier) synchronise.
__device__ __forceinline__ void barrier_init(Barrier& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Shows the barriers that the calling thread made to the cluster and to TMA.
__device__ __forceinline__ void barrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives; what the thread wrote before is seen by those who wait for the phase.
__device__ __forceinline__ void barrier_arrive(Barrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Announces that copies will bring `bytes` in the current phase, and arrives.
__device__ __forceinline__ void barrier_expect(Barrier& barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

// Waits until a phase of this parity has completed: the n-th wait, counted from 0, is for parity n % 2.  On a new
// barrier parity 1 passes at once, as if a phase -1 had completed.
__device__ __forceinline__ void barrier_wait(Barrier& barrier, uint32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}

// Arrives at the barrier that block `cta` of the cluster has at the same place in its shared memory.  That orders what
// the thread read before it; data written for the other block needs cluster_sync.
__device__ __forceinline__ void barrier_arrive_cluster(Barrier& barrier, int cta) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(shared_address(&barrier)),
        "r"(cta)
        : "memory");
}

#endif

// Asynchronous copies from global to shared memory (cp.async, sm_80 and later).
//
// A thread's copies land in groups, in the order of their commits.  What has landed is visible to the thread that
// waited; to others after a barrier.
#pragma once
#include "shared.cuh"
#include "types.cuh"

#ifdef FUSEGRAPH_CPU
#include "async_copy_on_cpu.h"
#else

// Copies the first `valid` of Bytes (4, 8 or 16) bytes and makes the rest zero.  Both addresses are multiples of Bytes.
// With valid 0, `global` is not read.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid = Bytes) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    const uint32 to = shared_address(shared);
    const uint64 from = __cvta_generic_to_global(global);
    if (Bytes == 16)  // past L1: neighbours of a tile's row are read by other threads of the same copy
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(valid)
                     : "memory");
}

// The same for 16 bytes that other threads of the block will copy as well, or soon again: they stay in the L1 cache.
__device__ __forceinline__ void copy_async_cached(void* shared, const void* global, int valid = 16) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid)
                 : "memory");
}

// The same for what the L2 cache is to evict last: after what is written meanwhile.
__device__ __forceinline__ void copy_async_evict_last(void* shared, const void* global, int valid = 16) {
    asm volatile(
        "{ .reg .b64 p; createpolicy.fractional.L2::evict_last.b64 p, 1.0;"
        " cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, p; }"
        ::"r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(valid) : "memory");
}

// The thread's copies since the last commit become a group, which may be empty.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last Pending groups of the thread have not landed.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

#endif

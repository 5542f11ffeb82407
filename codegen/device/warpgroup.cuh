// Warps that do different work in one block (sm_90): their registers, barriers between some of them, and the start of
// the next kernel while this one ends.
#pragma once
#include "types.cuh"

#ifdef FUSEGRAPH_CPU
#include "warpgroup_on_cpu.h"
#else

// Every warp of a warpgroup (four warps from a multiple of four) calls one of these, once, to have R registers a thread
// from here on: a multiple of 8 from 24 to 256 (sm_90a).  registers_increase waits until others have given enough away.
// The compiler ignores them (C7508) unless __launch_bounds__ names the blocks of an SM too.
template <int R>
__device__ __forceinline__ void registers_increase() {
    static_assert(R % 8 == 0 && R >= 24 && R <= 256, "registers of a thread");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R>
__device__ __forceinline__ void registers_decrease() {
    static_assert(R % 8 == 0 && R >= 24 && R <= 256, "registers of a thread");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}

// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads, a multiple of 32: all that wait and all that only
// arrive.  Whole warps call it.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif

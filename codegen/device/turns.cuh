// What blocks do one after the other, in an order that does not depend on which of them is faster.  The counters are in
// global memory and begin at 0.
#pragma once
#include "types.cuh"

#ifdef FUSEGRAPH_CPU
#include "turns_on_cpu.h"
#else

// The numbers 0, 1, ... in the order in which they are asked for, each to one caller.  A block that has one may wait
// for those with smaller numbers: they have begun, whatever order blocks begin in.
__device__ __forceinline__ int take_number(int32* counter) { return atomicAdd(counter, 1); }

// Waits until turn_end was called for so many turns; sees what these did before, stores by TMA too, and is
// seen by what it tells TMA to do.
__device__ __forceinline__ void turn_wait(const int32* counter, int turns) {
    int32 ended;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(ended) : "l"(__cvta_generic_to_global(counter)) : "memory");
    } while (ended != turns);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Ends a turn.  Stores by TMA are done (tma_wait<0>).
__device__ __forceinline__ void turn_end(int32* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(counter)) : "memory");
}

#endif

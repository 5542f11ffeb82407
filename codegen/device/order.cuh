// The order in which kernels, and a kernel's blocks, begin.
#pragma once
#include "types.cuh"

// The block's number from the end of a grid with one dimension.  Blocks begin in the order of their numbers: those of a
// kernel that begins where the one before has ended find what that read or wrote last still in the L2 cache.
__device__ __forceinline__ uint32 block_from_the_end() { return gridDim.x - 1 - blockIdx.x; }

// Programmatic dependent launch (sm_90 and later): a kernel that is launched as dependent on the one before begins when
// all blocks of that have called grid_dependency_launch or ended, where there is room.  It touches no memory until
// grid_dependency_wait has returned: then all that was queued before is done and can be seen.  (That holds for plain
// loads.  `ld.global.nc`, which the compiler takes for pointers that are const and __restrict__, may move to before the
// wait: so no pointer of such a kernel is both.)  Kernels that are launched otherwise, and those of GPUs without this,
// begin when all is done; both calls do nothing there.
__device__ __forceinline__ void grid_dependency_launch() {
#if !defined(FUSEGRAPH_CPU) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_dependency_wait() {
#if !defined(FUSEGRAPH_CPU) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The order in which a kernel's blocks begin.
#pragma once
#include "types.cuh"

// The block's number from the end of a grid with one dimension.  Blocks begin in the order of their numbers: those of a
// kernel that begins where the one before has ended find what that read or wrote last still in the L2 cache.
__device__ __forceinline__ uint32 block_from_the_end() { return gridDim.x - 1 - blockIdx.x; }

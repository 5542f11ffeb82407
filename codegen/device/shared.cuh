// Dynamic shared memory, and addresses of shared memory as instructions take them.
#pragma once

#ifndef FUSEGRAPH_CPU
// Declares `name` as the block's dynamic shared memory, an array of unsigned char; at block scope, once a kernel.
// Aligned to 1024 bytes, what the 128-byte swizzle of TMA and wgmma wants.  Under FUSEGRAPH_CPU, `name` is a pointer
// (codegen/cpu/cuda_on_cpu.h): do not take its sizeof.
#define FUSEGRAPH_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// Address within the block's shared memory, from a generic pointer.
__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}
#endif

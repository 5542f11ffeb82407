// CUDA C for a host C++ compiler: included before every kernel's source (-include), with FUSEGRAPH_CPU defined.
// Kept free of standard headers: <cmath> alone costs more compile time than a kernel.
#pragma once

#include "abi.h"

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))

// A block runs on one host thread, so "per host thread" is "per block".  The compiler gathers these variables in the
// library's thread-local segment, which the runtime poisons before each block.
#define __shared__ static thread_local

typedef __SIZE_TYPE__ size_t;
extern "C" void* memcpy(void*, const void*, size_t) noexcept;
extern "C" void* memset(void*, int, size_t) noexcept;
extern "C" int printf(const char*, ...);

namespace fusegraph_cpu {

static thread_local Thread* current;

inline const uint3& thread_index() { return current->thread_index; }
inline const uint3& block_index() { return current->block->block_index; }
inline const dim3& block_dim() { return current->block->block_dim; }
inline const dim3& grid_dim() { return current->block->grid_dim; }

// Dynamic shared memory of the block: 1024-byte aligned, followed by an inaccessible page.
inline unsigned char* dynamic_shared() { return current->block->dynamic_shared; }

// A GPU faults on a vector access that is not aligned to its size; so does this.
inline void check_aligned(const volatile void* address, unsigned bytes, const char* file = __builtin_FILE(),
                          int line = __builtin_LINE()) {
    if (reinterpret_cast<__UINTPTR_TYPE__>(address) % bytes)
        current->block->runtime->fail(current, "access of %u bytes at %p, which is not %u-byte aligned (%s:%d)", bytes,
                                      const_cast<void*>(address), bytes, file, line);
}

}  // namespace fusegraph_cpu

#define threadIdx (fusegraph_cpu::thread_index())
#define blockIdx (fusegraph_cpu::block_index())
#define blockDim (fusegraph_cpu::block_dim())
#define gridDim (fusegraph_cpu::grid_dim())

#define FUSEGRAPH_DYNAMIC_SHARED(name) unsigned char* const name = fusegraph_cpu::dynamic_shared()

inline void __trap() { fusegraph_cpu::current->block->runtime->fail(fusegraph_cpu::current, "__trap()"); }

#include "atomics_on_cpu.h"
#include "math_on_cpu.h"
#include "sync_on_cpu.h"

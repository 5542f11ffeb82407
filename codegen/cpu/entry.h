// From a kernel's function to an entry of the module's table: unpacks void** args as cuLaunchKernel does.
#pragma once

#include "cuda_on_cpu.h"

namespace fusegraph_cpu {

template <unsigned... I>
struct Indices {};
template <unsigned N, unsigned... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <unsigned... I>
struct Count<0, I...> {
    using type = Indices<I...>;
};

// The caller's copy of a parameter need not be aligned as its type asks.
template <typename P>
inline P parameter(const void* value) {
    P copy;
    __builtin_memcpy(&copy, value, sizeof copy);
    return copy;
}

// Calls `run` for all threads of the block in turn.  One function for all kernels: it is larger than most of them.
inline void run_threads(void (*run)(void** args), void** args, bool reverse) {
    Thread& self = *current;
    const uint3 dim = self.block->block_dim;
    const unsigned count = dim.x * dim.y * dim.z;
    uint3& index = self.thread_index;
    index = reverse ? uint3{dim.x - 1, dim.y - 1, dim.z - 1} : uint3{0, 0, 0};
    for (unsigned i = 0; i < count; ++i) {
        run(args);
        if (reverse) {
            if (index.x-- == 0) {
                index.x = dim.x - 1;
                if (index.y-- == 0) index.y = dim.y - 1, --index.z;
            }
        } else if (++index.x == dim.x) {
            index.x = 0;
            if (++index.y == dim.y) index.y = 0, ++index.z;
        }
    }
}

template <auto kernel, typename Signature = decltype(kernel)>
struct Entry;

template <auto kernel, typename... P>
struct Entry<kernel, void (*)(P...)> {
    static constexpr unsigned sizes[sizeof...(P) + 1] = {sizeof(P)..., 0};

    template <unsigned... I>
    static void call(void** args, Indices<I...>) {
        kernel(parameter<P>(args[I])...);
    }

    static void run(void** args) { call(args, typename Count<sizeof...(P)>::type()); }

    static void run_block(void** args, bool reverse) { run_threads(&run, args, reverse); }

    static constexpr Kernel with_fibers(const char* name) { return {name, &run, nullptr, sizeof...(P), sizes}; }
    static constexpr Kernel without_fibers(const char* name) {
        return {name, nullptr, &run_block, sizeof...(P), sizes};
    }
};

inline Thread** slot() { return &current; }

}  // namespace fusegraph_cpu

#define FUSEGRAPH_EXPORT __attribute__((visibility("default")))

// warpgroup.cuh for the CPU.  Kernels of a stream run one after the other and a thread has all the registers it wants.
#pragma once

#include "sync_on_cpu.h"

namespace fusegraph_cpu {

// setmaxnreg must be executed by all warps of a warpgroup.
template <int R>
inline void set_registers(const char* what, const char* file, int line) {
    static_assert(R % 8 == 0 && R >= 24 && R <= 256, "registers of a thread");
    current->block->runtime->meet_warpgroup(current, nullptr, nullptr, Where{what, file, line});
}

// Barrier 0 is __syncthreads'; hardware counts whole warps.
inline void check_named_barrier(int id, int threads, const char* what, const char* file, int line) {
    if (id < 1 || id > 15 || threads <= 0 || threads % 32)
        current->block->runtime->fail(current, "%s at %s:%d: barrier %d for %d threads; barriers 1 to 15 are for "
                                      "multiples of 32", what, file, line, id, threads);
}

}  // namespace fusegraph_cpu

template <int R>
inline void registers_increase(FUSEGRAPH_WHERE) {
    fusegraph_cpu::set_registers<R>("registers_increase", file, line);
}

template <int R>
inline void registers_decrease(FUSEGRAPH_WHERE) {
    fusegraph_cpu::set_registers<R>("registers_decrease", file, line);
}

inline void named_barrier_sync(int id, int threads, FUSEGRAPH_WHERE) {
    fusegraph_cpu::check_named_barrier(id, threads, "named_barrier_sync", file, line);
    fusegraph_cpu::named_barrier_sync(unsigned(id), unsigned(threads), file, line);
}

inline void named_barrier_arrive(int id, int threads, FUSEGRAPH_WHERE) {
    fusegraph_cpu::check_named_barrier(id, threads, "named_barrier_arrive", file, line);
    fusegraph_cpu::named_barrier_arrive(unsigned(id), unsigned(threads), file, line);
}

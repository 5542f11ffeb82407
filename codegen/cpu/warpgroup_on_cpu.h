// warpgroup.cuh for the CPU.  A thread has all the registers it wants, but warpgroups are held to what a block of a GPU
// has at launch: when it ends, those that took more than others gave away are an error, for they would wait for ever.
#pragma once

#include "sync_on_cpu.h"

namespace fusegraph_cpu {

struct RegistersWanted {
    unsigned count;
    Where where;
};

inline void complete_set_registers(Thread* threads, unsigned) {
    const auto wanted = [&](int thread) -> const RegistersWanted& {
        return *static_cast<RegistersWanted*>(threads[thread].operand);
    };
    const RegistersWanted& first = wanted(0);
    const Runtime& runtime = *threads->block->runtime;
    for (int i = 1; i < 128; ++i)
        if (wanted(i).count != first.count)
            runtime.fail(threads, "%s at %s:%d: thread 0 of the warpgroup wants %u registers, thread %d %u",
                         first.where.what, first.where.file, first.where.line, first.count, i, wanted(i).count);
    runtime.set_registers(threads, first.count, first.where);
}

// setmaxnreg must be executed by all warps of a warpgroup.
template <int R>
inline void set_registers(const char* what, const char* file, int line) {
    static_assert(R % 8 == 0 && R >= 24 && R <= 256, "registers of a thread");
    RegistersWanted wanted{R, {what, file, line}};
    current->block->runtime->meet_warpgroup(current, &wanted, &complete_set_registers, wanted.where);
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

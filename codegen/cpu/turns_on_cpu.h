// turns.cuh for the CPU.  A wait holds up the host thread, and with it all threads of the block: what is waited for is
// another block's doing, which runs on another host thread or has ended.  Error: a turn that does not come, be it
// because the launch has ended.
#pragma once

#include "sync_on_cpu.h"

extern "C" int sched_yield();

inline int take_number(int32* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL); }

inline void turn_wait(const int32* counter, int turns, FUSEGRAPH_WHERE) {
    constexpr long kMost = 1l << 27;  // a minute or more
    for (long n = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != turns; ++n) {
        const fusegraph_cpu::Runtime& runtime = *fusegraph_cpu::current->block->runtime;
        if (n == kMost || runtime.stopped(fusegraph_cpu::current))
            runtime.fail(fusegraph_cpu::current, "turn_wait at %s:%d: the turn after %d others does not come", file,
                         line, turns);
        sched_yield();
    }
}

inline void turn_end(int32* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL); }

// mbarrier.cuh for the CPU.  Errors: a barrier that was not initialised, or was overwritten; more arrivals or bytes in
// a phase than announced; a phase that completes before all that waited for the one before have gone on; a deadlock,
// with what the barriers miss.
#pragma once

#include "sync_on_cpu.h"

inline void barrier_init(Barrier& barrier, int arrivals, FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    self->block->runtime->mbarrier_init(self, &barrier, arrivals, {"barrier_init", file, line});
}

inline void barrier_fence_init() {
    fusegraph_cpu::current->block->runtime->mbarrier_fence_init(fusegraph_cpu::current);
}

inline void barrier_arrive(Barrier& barrier, FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    self->block->runtime->mbarrier_arrive(self, &barrier, 0, {"barrier_arrive", file, line});
}

inline void barrier_expect(Barrier& barrier, uint32 bytes, FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    self->block->runtime->mbarrier_arrive(self, &barrier, bytes, {"barrier_expect", file, line});
}

inline void barrier_wait(Barrier& barrier, uint32 parity, FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    self->block->runtime->mbarrier_wait(self, &barrier, parity, {"barrier_wait", file, line});
}

inline void barrier_arrive_cluster(Barrier& barrier, int cta, FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    self->block->runtime->mbarrier_arrive_cluster(self, &barrier, cta, {"barrier_arrive_cluster", file, line});
}

// cluster.cuh for the CPU: the blocks of a cluster run together.  Errors: arriving twice, waiting without having
// arrived, and reaching into the shared memory of a block that has ended.
#pragma once

#include "sync_on_cpu.h"

inline int cluster_rank() { return int(fusegraph_cpu::current->block->cluster_rank); }

inline void cluster_arrive(FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    self->block->runtime->cluster_arrive(self, {"cluster_arrive", file, line});
}

inline void cluster_wait(FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    self->block->runtime->cluster_wait(self, {"cluster_wait", file, line});
}

inline void cluster_sync(FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    self->block->runtime->cluster_arrive(self, {"cluster_sync", file, line});
    self->block->runtime->cluster_wait(self, {"cluster_sync", file, line});
}

template <class T>
inline T* cluster_map(T* shared, int cta, FUSEGRAPH_WHERE) {
    fusegraph_cpu::Thread* const self = fusegraph_cpu::current;
    return static_cast<T*>(self->block->runtime->cluster_map(self, shared, cta, {"cluster_map", file, line}));
}

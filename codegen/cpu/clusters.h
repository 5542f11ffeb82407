// Clusters: shared memory of other blocks, and the barrier of all threads.
#pragma once

#include "worker.h"

namespace fusegraph_cpu {

// Where a block's shared memory holds these bytes.  Of the shared variables only those of the running block have an
// address that kernels can take.
inline bool Worker::find_place(const BlockState& block, const void* shared, unsigned bytes, Place& place) const {
    const unsigned char* address = static_cast<const unsigned char*>(shared);
    const unsigned char* dynamic = block.dynamic_shared;
    const auto within = [&](const unsigned char* begin, size_t size) {
        return begin && address >= begin && address <= begin + size && bytes <= size_t(begin + size - address);
    };
    if (within(dynamic, block.dynamic_shared_bytes)) return place = Place(address - dynamic), true;
    if (&block == active_ && within(static_shared_, static_shared_bytes_))
        return place = kVariables | Place(address - static_shared_), true;
    return false;
}

inline Place Worker::place_of(Thread* self, const void* shared, unsigned bytes, const char* what, const Where& where) {
    Place place;
    if (!find_place(state_of(self), shared, bytes, place))
        fail_format(self, nullptr, "%s at %s:%d: %s, %u bytes at %p, is not in the block's shared memory", where.what,
                    where.file, where.line, what, bytes, shared);
    return place;
}

inline unsigned char* Worker::at(const BlockState& block, Place place) const {
    if (!(place & kVariables)) return block.dynamic_shared + place;
    return (&block == active_ ? static_shared_ : block.image->begin()) + (place & ~kVariables);
}

// A block of the cluster that has not ended.
inline BlockState& Worker::neighbour(Thread* self, int cta, const Where& where) {
    if (cta < 0 || cta >= int(blocks_.size()))
        fail_format(self, nullptr, "%s at %s:%d: block %d of a cluster of %zu", where.what, where.file, where.line, cta,
                    blocks_.size());
    BlockState& block = *blocks_[cta];
    if (!block.alive)
        fail_format(self, nullptr, "%s at %s:%d reaches into the shared memory of block %d of the cluster, which has ended",
                    where.what, where.file, where.line, cta);
    return block;
}

inline void* Worker::cluster_map(Thread* self, const void* shared, int cta, const Where& where) {
    require_fibers(self, where);
    return at(neighbour(self, cta, where), place_of(self, shared, 1, "the variable", where));
}

// A thread has arrived at the barrier, or exited, which counts as well.
inline void Worker::cluster_count() {
    if (--cluster_pending_) return;
    ++cluster_phase_;
    cluster_pending_ = alive_;
    for (Thread& thread : threads_) {
        if (!thread.block || thread.state != kInClusterBarrier) continue;
        thread.state = kRunnable;
        runnable_[index_of(&thread) / kWarpSize] |= 1u << thread.lane;
    }
}

inline void Worker::cluster_arrive(Thread* self, const Where& where) {
    require_fibers(self, where);
    ClusterArrival& arrival = cluster_arrivals_[index_of(self)];
    if (arrival.arrived)
        fail_format(self, nullptr, "%s at %s:%d: the thread has arrived already and not waited since", where.what,
                    where.file, where.line);
    arrival = {true, cluster_phase_};
    cluster_count();
}

inline void Worker::cluster_wait(Thread* self, const Where& where) {
    require_fibers(self, where);
    ClusterArrival& arrival = cluster_arrivals_[index_of(self)];
    if (!arrival.arrived)
        fail_format(self, nullptr, "%s at %s:%d: the thread has not arrived", where.what, where.file, where.line);
    if (arrival.phase == cluster_phase_) wait(self, kInClusterBarrier, where, 0, 0);
    arrival.arrived = false;
}

}  // namespace fusegraph_cpu

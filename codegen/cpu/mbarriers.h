// Barriers in shared memory that count arrivals and bytes (PTX: mbarrier).
#pragma once

#include "worker.h"

namespace fusegraph_cpu {

constexpr int kMostArrivals = (1 << 20) - 1;

struct PlaceText {
    char text[64];
};

inline PlaceText describe(Place place) {
    PlaceText where;
    snprintf(where.text, sizeof where.text,
             place & kVariables ? "in a shared variable" : "at byte %u of dynamic shared memory", place);
    return where;
}

// The barrier at a place, if it was made and its memory is intact.
inline Mbarrier& Worker::mbarrier_at(Thread* self, BlockState& block, Place place, const Where& where) {
    for (Mbarrier& barrier : block.mbarriers) {
        if (barrier.place != place) continue;
        unsigned long long word;
        memcpy(&word, at(block, place), sizeof word);
        if (word != barrier.word())
            fail_format(self, nullptr, "%s at %s:%d: the barrier %s was overwritten; it holds 0x%016llx", where.what,
                        where.file, where.line, describe(place).text, word);
        return barrier;
    }
    fail_format(self, nullptr, "%s at %s:%d: the barrier %s%s was not initialised", where.what, where.file, where.line,
                describe(place).text, &block == self->block ? "" : ", in another block of the cluster,");
}

inline void Worker::mbarrier_init(Thread* self, void* barrier, int arrivals, const Where& where) {
    require_fibers(self, where);
    const Place place = place_of(self, barrier, 8, "the barrier", where);
    if (place % 8)
        fail_format(self, nullptr, "%s at %s:%d: the barrier at %p is not aligned to 8 bytes", where.what, where.file,
                    where.line, barrier);
    if (arrivals < 1 || arrivals > kMostArrivals)
        fail_format(self, nullptr, "%s at %s:%d: %d arrivals; 1 to %d are possible", where.what, where.file, where.line,
                    arrivals, kMostArrivals);
    BlockState& block = state_of(self);
    for (const Mbarrier& other : block.mbarriers)
        if (other.place == place)
            fail_format(self, nullptr, "%s at %s:%d: the barrier %s was initialised before", where.what, where.file,
                        where.line, describe(place).text);
    block.mbarriers.push_back(
        Mbarrier{place, unsigned(arrivals), unsigned(arrivals), 0, 0, 0, index_of(self), false});
    const unsigned long long word = block.mbarriers.back().word();
    memcpy(at(block, place), &word, sizeof word);
}

inline void Worker::mbarrier_fence_init(Thread* self) {
    for (Mbarrier& barrier : state_of(self).mbarriers)
        if (barrier.maker == index_of(self)) barrier.fenced = true;
}

// Counts arrivals and bytes.  Completes the phase if these were the last.
inline void Worker::count(Thread* self, BlockState& block, Mbarrier& barrier, unsigned arrivals, long long bytes,
                          const Where& where) {
    if (arrivals > barrier.pending)
        fail_format(self, nullptr, "%s at %s:%d: more than %u arrivals in phase %llu of the barrier %s", where.what,
                    where.file, where.line, barrier.arrivals, barrier.phase, describe(barrier.place).text);
    barrier.pending -= arrivals;
    barrier.bytes += bytes;
    if (barrier.bytes > kMostArrivals || barrier.bytes < -kMostArrivals)
        fail_format(self, nullptr, "%s at %s:%d: the barrier %s cannot count %lld bytes; up to %d are possible",
                    where.what, where.file, where.line, describe(barrier.place).text, barrier.bytes,
                    kMostArrivals);
    if (!barrier.pending && barrier.bytes < 0)
        fail_format(self, nullptr,
                    "%s at %s:%d: phase %llu of the barrier %s got %lld bytes more than barrier_expect announced",
                    where.what, where.file, where.line, barrier.phase, describe(barrier.place).text,
                    -barrier.bytes);
    if (!barrier.pending && !barrier.bytes) {
        ++barrier.phase;
        barrier.pending = barrier.arrivals;
        for (unsigned i = 0; barrier.waiting && i < block.thread_count; ++i) {
            Thread& thread = block.threads[i];
            if (thread.state != kInMbarrier || thread.detail[0] != barrier.place ||
                (barrier.phase & 1) == thread.detail[1])
                continue;
            thread.state = kRunnable;
            runnable_[index_of(&thread) / kWarpSize] |= 1u << thread.lane;
            --barrier.waiting;
        }
    }
    const unsigned long long word = barrier.word();
    memcpy(at(block, barrier.place), &word, sizeof word);
}

inline void Worker::mbarrier_arrive(Thread* self, void* barrier, unsigned expected, const Where& where) {
    require_fibers(self, where);
    BlockState& block = state_of(self);
    Mbarrier& found = mbarrier_at(self, block, place_of(self, barrier, 8, "the barrier", where), where);
    count(self, block, found, 1, expected, where);
}

inline void Worker::mbarrier_arrive_cluster(Thread* self, void* barrier, int cta, const Where& where) {
    require_fibers(self, where);
    const Place place = place_of(self, barrier, 8, "the barrier", where);
    BlockState& block = neighbour(self, cta, where);
    Mbarrier& found = mbarrier_at(self, block, place, where);
    if (&block != self->block && !found.fenced)
        fail_format(self, nullptr, "%s at %s:%d: the barrier %s of block %d was initialised without barrier_fence_init",
                    where.what, where.file, where.line, describe(place).text, cta);
    count(self, block, found, 1, 0, where);
}

inline void Worker::mbarrier_wait(Thread* self, void* barrier, unsigned parity, const Where& where) {
    require_fibers(self, where);
    if (parity > 1)
        fail_format(self, nullptr, "%s at %s:%d: parity %u; 0 or 1 is expected", where.what, where.file, where.line,
                    parity);
    Mbarrier& found = mbarrier_at(self, state_of(self), place_of(self, barrier, 8, "the barrier", where), where);
    if ((found.phase & 1) != parity) return;
    ++found.waiting;
    const Place place = found.place;
    wait(self, kInMbarrier, where, place, parity);
    const Mbarrier& after = mbarrier_at(self, state_of(self), place, where);
    if ((after.phase & 1) == parity)
        fail_format(self, nullptr, "%s at %s:%d: the barrier %s completed phase %llu before the thread saw that the one "
                    "waited for was done: on a GPU it may wait for ever", where.what, where.file, where.line,
                    describe(place).text, after.phase - 1);
}

// " (barrier at byte 64 of dynamic shared memory, phase 3: 1 of 2 arrivals and 512 bytes are missing)"
inline void Worker::describe_mbarrier(const BlockState& block, const Thread& waiting, char* text, size_t bytes) const {
    for (const Mbarrier& barrier : block.mbarriers)
        if (barrier.place == waiting.detail[0])
            snprintf(text, bytes, " (barrier %s, phase %llu: %u of %u arrivals and %lld bytes are missing)",
                     describe(barrier.place).text, barrier.phase, barrier.pending, barrier.arrivals,
                     barrier.bytes);
}

}  // namespace fusegraph_cpu

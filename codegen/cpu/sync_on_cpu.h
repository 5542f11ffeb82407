// Barriers and warp collectives.  Every lane brings an operand on its own stack to a meeting of the warp; the last to
// arrive completes the collective for all, so that one meeting does for one instruction.
#pragma once

#include "abi.h"

#define FUSEGRAPH_WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace fusegraph_cpu {

// bar.sync id, count; and bar.arrive: what device headers call for named barriers.
inline void named_barrier_sync(unsigned id, unsigned count, FUSEGRAPH_WHERE) {
    current->block->runtime->barrier_sync(current, id, count, Where{"bar.sync", file, line});
}

inline void named_barrier_arrive(unsigned id, unsigned count, FUSEGRAPH_WHERE) {
    current->block->runtime->barrier_arrive(current, id, count, Where{"bar.arrive", file, line});
}

// Suspends the calling thread until ready(context): for what becomes true by another thread's doing.
inline void wait_until(bool (*ready)(void*), void* context, const char* what, FUSEGRAPH_WHERE) {
    current->block->runtime->wait_until(current, ready, context, Where{what, file, line});
}

inline void meet(unsigned mask, void* operand, Complete complete, const char* what, const char* file, int line) {
    current->block->runtime->meet(current, mask, operand, complete, Where{what, file, line});
}

template <typename T>
struct Shuffle {
    T value;
    unsigned source;
    T result;
};

template <typename T>
void complete_shuffle(Thread* lanes, unsigned mask) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Shuffle<T>* mine = static_cast<Shuffle<T>*>(lanes[lane].operand);
        mine->result = static_cast<Shuffle<T>*>(lanes[mine->source].operand)->value;
    }
}

template <typename T>
T shuffle(unsigned mask, T value, unsigned source, const char* what, const char* file, int line) {
    if (!((mask & current->warp_lanes) >> source & 1))
        current->block->runtime->fail(
            current, "%s at %s:%d reads lane %u, which does not take part (mask 0x%08x, lanes of the warp 0x%08x)",
            what, file, line, source, mask, current->warp_lanes);
    Shuffle<T> operand{value, source, value};
    meet(mask, &operand, &complete_shuffle<T>, what, file, line);
    return operand.result;
}

struct Vote {
    unsigned predicate, result;
};

inline void complete_vote(Thread* lanes, unsigned mask) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) ballot |= static_cast<Vote*>(lanes[lane].operand)->predicate << lane;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) static_cast<Vote*>(lanes[lane].operand)->result = ballot;
}

inline unsigned vote(unsigned mask, bool predicate, const char* what, const char* file, int line) {
    Vote operand{predicate, 0};
    meet(mask, &operand, &complete_vote, what, file, line);
    return operand.result;
}

}  // namespace fusegraph_cpu

inline void __syncthreads(FUSEGRAPH_WHERE) {
    const fusegraph_cpu::Block* const block = fusegraph_cpu::current->block;
    block->runtime->barrier_sync(fusegraph_cpu::current, 0, block->thread_count, {"__syncthreads", file, line});
}

inline void __syncwarp(unsigned mask = 0xffffffffu, FUSEGRAPH_WHERE) {
    fusegraph_cpu::meet(mask, nullptr, nullptr, "__syncwarp", file, line);
}

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, FUSEGRAPH_WHERE) {
    const unsigned lane = fusegraph_cpu::current->lane, first = lane & ~unsigned(width - 1);
    const unsigned from = first + (unsigned(source) & unsigned(width - 1));
    return fusegraph_cpu::shuffle(mask, value, from, "__shfl_sync", file, line);
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, FUSEGRAPH_WHERE) {
    const unsigned lane = fusegraph_cpu::current->lane, last = lane | unsigned(width - 1);
    const unsigned source = lane ^ unsigned(lane_mask);  // as in CUDA, maybe in an earlier segment, never in a later
    return fusegraph_cpu::shuffle(mask, value, source > last ? lane : source, "__shfl_xor_sync", file, line);
}

template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, FUSEGRAPH_WHERE) {
    const unsigned lane = fusegraph_cpu::current->lane, offset = lane & unsigned(width - 1);
    return fusegraph_cpu::shuffle(mask, value, offset < delta ? lane : lane - delta, "__shfl_up_sync", file, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, FUSEGRAPH_WHERE) {
    return fusegraph_cpu::vote(mask, predicate != 0, "__ballot_sync", file, line);
}

inline int __all_sync(unsigned mask, int predicate, FUSEGRAPH_WHERE) {
    const unsigned present = mask & fusegraph_cpu::current->warp_lanes;
    return fusegraph_cpu::vote(mask, predicate != 0, "__all_sync", file, line) == present;
}

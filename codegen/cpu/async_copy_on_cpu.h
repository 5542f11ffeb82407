// cp.async on the CPU.  Forward, a copy happens as late as a wait allows, and what it will write reads as poison until
// then; in reverse it happens at once.
#pragma once

#include "cuda_on_cpu.h"
#include "queue.h"

namespace fusegraph_cpu {

struct AsyncCopy {
    unsigned char* shared;
    const unsigned char* global;
    unsigned bytes, valid;
    unsigned group;  // of the thread
};

// The copies of a thread that have not landed.
struct AsyncCopies {
    Queue<AsyncCopy> pending;
    unsigned committed;  // groups
};

inline AsyncCopies& async_copies() {
    if (!current->copies) current->copies = current->block->runtime->block_memory(current, sizeof(AsyncCopies));
    return *static_cast<AsyncCopies*>(current->copies);
}

inline void land(const AsyncCopy& copy) {
    memcpy(copy.shared, copy.global, copy.valid);
    memset(copy.shared + copy.valid, 0, copy.bytes - copy.valid);
}

inline void copy_async(void* shared, const void* global, unsigned bytes, int valid, const char* file, int line) {
    const Runtime* runtime = current->block->runtime;
    if (valid < 0 || unsigned(valid) > bytes)
        runtime->fail(current, "copy_async at %s:%d: %d valid bytes of %u", file, line, valid, bytes);
    check_aligned(shared, bytes, file, line);
    check_aligned(global, bytes, file, line);
    if (!runtime->is_shared(current, shared, bytes))
        runtime->fail(current, "copy_async at %s:%d: %u bytes at %p are not in the block's shared memory", file, line,
                      bytes, shared);
    AsyncCopies& copies = async_copies();
    const unsigned char* from = static_cast<const unsigned char*>(global);
    const AsyncCopy copy{static_cast<unsigned char*>(shared), from, bytes, unsigned(valid), copies.committed};
    if (current->block->reverse) return land(copy);
    if (valid) {  // a wild pointer faults here, where it can be told which copy it was
        const volatile unsigned char* probe = from;
        (void)probe[0];
        (void)probe[valid - 1];
    }
    memset(shared, 0xff, bytes);
    copies.pending.push() = copy;
}

inline void copy_async_wait(unsigned pending) {
    AsyncCopies& copies = async_copies();
    for (; !copies.pending.empty() && copies.pending.front().group + pending < copies.committed; copies.pending.pop())
        land(copies.pending.front());
}

}  // namespace fusegraph_cpu

template <int Bytes>
inline void copy_async(void* shared, const void* global, int valid = Bytes, FUSEGRAPH_WHERE) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    fusegraph_cpu::copy_async(shared, global, Bytes, valid, file, line);
}

inline void copy_async_cached(void* shared, const void* global, int valid = 16, FUSEGRAPH_WHERE) {
    fusegraph_cpu::copy_async(shared, global, 16, valid, file, line);
}

inline void copy_async_evict_last(void* shared, const void* global, int valid = 16, FUSEGRAPH_WHERE) {
    fusegraph_cpu::copy_async(shared, global, 16, valid, file, line);
}

inline void copy_async_commit() { ++fusegraph_cpu::async_copies().committed; }

template <int Pending>
inline void copy_async_wait() {
    static_assert(Pending >= 0, "a number of groups");
    fusegraph_cpu::copy_async_wait(Pending);
}

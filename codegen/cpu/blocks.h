// One block of the cluster that a worker runs: its barriers, its shared memory, and what TMA knows of it.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "abi.h"
#include "memory.h"

namespace fusegraph_cpu {

constexpr unsigned kWarpSize = 32, kMostWarps = 32, kBarriers = 16;

class Worker;

struct NamedBarrier {
    unsigned count, arrived;
    unsigned waiting[kMostWarps];  // lanes, by warp
};

// A meeting of all threads of a warpgroup that not all have reached.
struct WarpgroupMeeting {
    unsigned arrived;
    Complete complete;
    Where where;
};

// A place in shared memory, the same in every block of a cluster: a byte of dynamic shared memory, or one of the shared
// variables.
using Place = uint32_t;
constexpr Place kVariables = 1u << 31;

// A barrier in shared memory (PTX: mbarrier).  A phase completes when no arrival is pending and no announced byte.
struct Mbarrier {
    Place place;
    unsigned arrivals, pending;
    long long bytes;         // announced and not yet copied; below 0 if copied before they were announced
    unsigned long long phase;
    unsigned waiting;        // threads in mbarrier_wait
    unsigned maker;          // the thread that made it
    bool fenced;             // its maker has called mbarrier_fence_init

    // What the barrier's memory holds, so that whoever overwrites it is found out.
    unsigned long long word() const {
        return 0xbaull << 56 | (phase & 0x7f) << 49 | (unsigned long long)(pending & 0xfffff) << 28 |
               ((unsigned long long)bytes & 0xfffffff);
    }
};

// Dynamic shared memory as TMA and wgmma see it: what they wrote, and what ordinary stores wrote before a
// fence.  No store is watched; a difference from what was known here tells that there were some.
class AsyncView {
   public:
    static constexpr unsigned kUnit = 16;

    // `poison` is the byte that fills the memory before the block begins, negative if it is left as it is.
    void reset(int poison) { fences_ = 0, known_.clear(), poison_ = poison; }
    void fence() { ++fences_; }

    // The engine wrote or has read these bytes.
    void publish(const unsigned char* shared, unsigned begin, unsigned end, unsigned total) {
        if (known_.empty()) {
            known_.assign((total + kUnit - 1) / kUnit, 0);
            copy_.resize(known_.size() * kUnit);
        }
        memcpy(&copy_[begin], shared + begin, end - begin);
        for (unsigned unit = begin / kUnit; unit < (end + kUnit - 1) / kUnit; ++unit) known_[unit] = fences_ + 1;
    }

    // Whether ordinary stores changed these bytes after the last fence that could have shown them.
    bool unfenced(const unsigned char* shared, unsigned begin, unsigned end) const {
        for (unsigned unit = begin / kUnit; unit < (end + kUnit - 1) / kUnit; ++unit) {
            const uint64_t known = known_.empty() ? 0 : known_[unit];
            const unsigned from = unit * kUnit < begin ? begin : unit * kUnit;
            const unsigned to = (unit + 1) * kUnit < end ? (unit + 1) * kUnit : end;
            if (known && !memcmp(&copy_[from], shared + from, to - from)) continue;
            // What nobody wrote may be read: it makes sums that nobody reads, or poisons the results.
            if (!known && untouched(shared + from, shared + to)) continue;
            if (fences_ + 1 <= (known ? known : 1)) return true;
        }
        return false;
    }

   private:
    bool untouched(const unsigned char* from, const unsigned char* to) const {
        for (; from < to; ++from)
            if (poison_ >= 0 && *from != poison_) return false;
        return true;
    }

    int poison_ = -1;
    uint64_t fences_ = 0;
    std::vector<uint64_t> known_;  // 0, or 1 + the number of fences when a unit was last seen
    std::vector<unsigned char> copy_;
};

struct BlockState : Block {
    BlockState(Worker* worker_, unsigned first_, size_t dynamic_bytes)
        : Block(), worker(worker_), first(first_), dynamic(dynamic_bytes) {}

    Worker* worker;
    unsigned first;      // its first thread among the worker's
    unsigned alive = 0;  // threads that have not exited
    NamedBarrier barriers[kBarriers];
    WarpgroupMeeting warpgroups[kMostWarps / 4];
    unsigned registers[kMostWarps / 4] = {};  // of a thread of each warpgroup; 0: as many as at launch
    Where registers_set = {};                 // where one was the last to be given more
    std::vector<std::unique_ptr<unsigned char[]>> memory;  // that device headers asked for
    DynamicShared dynamic;
    std::unique_ptr<SharedImage> image;  // of the shared variables; null in a cluster of one
    std::vector<Mbarrier> mbarriers;
    AsyncView view;
};

}  // namespace fusegraph_cpu

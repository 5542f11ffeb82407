// One host thread's share of a launch: it takes clusters (of one block, if the kernel has none) one by one and runs the
// threads of all blocks of a cluster together.
#pragma once

#include <setjmp.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "blocks.h"
#include "context.h"
#include "copies.h"
#include "memory.h"

namespace fusegraph_cpu {

enum State { kRunnable, kInBarrier, kInMeeting, kInWarpgroup, kPolling, kInMbarrier, kInClusterBarrier, kExited };

// What the workers of one launch share.
struct Launch {
    const Request& request;
    Report& report;
    uint64_t cluster_count;
    std::atomic<uint64_t> next_cluster{0};
    std::atomic<int> status{kDone};

    // The first problem of a launch is the one reported; it stops the others at their next cluster.  An interrupt comes
    // before any other: its exception must not be lost.
    void stop(Status reason, const char* message, const void* address) {
        std::lock_guard<std::mutex> lock(mutex);
        if (status.load() != kDone && reason != kInterrupted) return;
        snprintf(report.message, sizeof report.message, "%s", message);
        report.has_address = address != nullptr;
        report.address = reinterpret_cast<uintptr_t>(address);
        status.store(reason);
    }

    std::mutex mutex{};
};

// A rendezvous of some lanes of a warp that not all have reached.
struct Meeting {
    unsigned mask, arrived;
    Complete complete;
    Where where;
};

struct WarpState {
    unsigned meeting_count;
    Meeting meetings[kWarpSize];
};

// A thread's arrival at the cluster's barrier that it has not waited for.
struct ClusterArrival {
    bool arrived;
    unsigned long long phase;
};

class Worker {
   public:
    Worker(Launch& launch, bool polls_interrupts);
    ~Worker();

    // Runs clusters until there are none left or the launch has stopped.
    void run();

    // The scheduler, called by threads of the running blocks.
    void barrier_sync(Thread* self, unsigned id, unsigned count, const Where& where);
    void barrier_arrive(Thread* self, unsigned id, unsigned count, const Where& where);
    void meet(Thread* self, unsigned mask, void* operand, Complete complete, const Where& where);
    void meet_warpgroup(Thread* self, void* operand, Complete complete, const Where& where);
    void set_registers(Thread* self, unsigned count, const Where& where);
    void* block_memory(Thread* self, unsigned long long bytes);
    bool is_shared(Thread* self, const void* address, unsigned bytes) const {
        Place place;
        return find_place(state_of(self), address, bytes, place);
    }
    void wait_until(Thread* self, bool (*ready)(void*), void* context, const Where& where);

    // Barriers in shared memory (mbarriers.h).
    void mbarrier_init(Thread* self, void* barrier, int arrivals, const Where& where);
    void mbarrier_fence_init(Thread* self);
    void mbarrier_arrive(Thread* self, void* barrier, unsigned expected, const Where& where);
    void mbarrier_arrive_cluster(Thread* self, void* barrier, int cta, const Where& where);
    void mbarrier_wait(Thread* self, void* barrier, unsigned parity, const Where& where);

    // TMA (engine.h).
    void copy(Thread* self, const Copy& copy, const Where& where);
    void copy_commit(Thread* self) { transfers_[index_of(self)].committed++; }
    void copy_wait(Thread* self, unsigned pending, bool written, const Where& where);
    void fence_async(Thread* self) { state_of(self).view.fence(); }
    void async_read(Thread* self, const void* shared, unsigned bytes, const Where& where);

    // Clusters (clusters.h).
    void cluster_arrive(Thread* self, const Where& where);
    void cluster_wait(Thread* self, const Where& where);
    void* cluster_map(Thread* self, const void* shared, int cta, const Where& where);

    // Ends the launch: leaves the kernel for run().
    [[noreturn]] void fail(const Thread* thread, const void* address, const char* format, va_list arguments);
    bool stopped() const { return launch_.status.load(std::memory_order_relaxed) == kFailed; }
    [[noreturn]] void fail_format(const Thread* thread, const void* address, const char* format, ...)
        __attribute__((format(printf, 4, 5)));

    [[noreturn]] void fault(int signal_number, const siginfo_t* info, const char* access);

    static BlockState& state_of(const Thread* thread) { return *static_cast<BlockState*>(thread->block); }
    static Worker* of(const Thread* thread) { return state_of(thread).worker; }

    // Whether a kernel's code is running on this host thread.
    volatile bool in_kernel = false;

   private:
    unsigned index_of(const Thread* thread) const { return state_of(thread).first + thread->linear; }
    bool has_fibers() const { return launch_.request.kernel->run; }
    bool reverse() const { return launch_.request.order == kReverse; }
    // The lanes of a warp that can go on, if the warp is one that comes late, or is not.
    unsigned runnable(unsigned warp, bool late) const {
        const bool comes_late = launch_.request.order == kLate && warp % warps_a_block_ % 4 == 3;
        return comes_late == late ? runnable_[warp] : 0;
    }

    void prepare_blocks();
    void prepare_threads(BlockState& block);
    void run_cluster(uint64_t number);
    void place_blocks(uint64_t number);
    void poison_shared(BlockState& block);
    void reset_scheduler();
    bool interrupted();

    static void fiber_entry();
    void leave(Thread* self);                         // suspends `self`, runs the next runnable thread
    void resume(Thread* self, unsigned next);         // the same, with the next thread given
    void activate(BlockState& block);                 // its shared variables are now those of the host thread
    bool next_runnable(unsigned from, unsigned& next, bool late = false);
    static unsigned first_of(const unsigned* lanes_by_warp, bool reverse);
    void wait(Thread* self, State state, const Where& where, unsigned detail0, unsigned detail1);
    bool arrive(Thread* self, unsigned id, unsigned count, const Where& where);
    void wake(BlockState& block, NamedBarrier& barrier);
    void poll_waiting();
    void exit_thread(Thread* self);
    void end_block(BlockState& block);
    void check_overrun(const BlockState& block);
    void check_copies(const BlockState& block);
    void check_registers(const BlockState& block);
    void require_fibers(Thread* self, const Where& where);
    [[noreturn]] void deadlock();
    std::string waits(const BlockState& block) const;  // which threads of the block wait where

    // Shared memory by place.
    bool find_place(const BlockState& block, const void* shared, unsigned bytes, Place& place) const;
    Place place_of(Thread* self, const void* shared, unsigned bytes, const char* what, const Where& where);
    unsigned char* at(const BlockState& block, Place place) const;
    BlockState& neighbour(Thread* self, int cta, const Where& where);

    Mbarrier& mbarrier_at(Thread* self, BlockState& block, Place place, const Where& where);
    void count(Thread* self, BlockState& block, Mbarrier& barrier, unsigned arrivals, long long bytes,
               const Where& where);
    void describe_mbarrier(const BlockState& block, const Thread& waiting, char* text, size_t bytes) const;
    void cluster_count();

    unsigned check_copy(Thread* self, const Copy& copy, TensorMapFields& map, const Where& where);
    void finish_load(const Load& load);
    void read_store(Store& store);
    void write_store(Store& store);
    bool advance_copies();
    void publish(BlockState& block, Place begin, unsigned bytes);
    void end_stores(Thread* self);

    Launch& launch_;
    const bool polls_interrupts_;
    std::vector<std::unique_ptr<BlockState>> blocks_;  // of the cluster, by rank
    BlockState* active_ = nullptr;                     // whose shared variables lie in the host thread's
    std::vector<Thread> threads_;                      // block by block, each block's from a multiple of a warp
    std::vector<Context> contexts_;
    std::vector<unsigned char*> stacks_;
    std::unique_ptr<WarpState[]> warps_;
    std::vector<unsigned> runnable_;  // lanes, by warp
    unsigned alive_ = 0, warps_a_block_ = 0, warp_count_ = 0, polling_ = 0;
    std::vector<ClusterArrival> cluster_arrivals_;  // by thread
    unsigned cluster_pending_ = 0;                  // threads that have neither arrived at the cluster's barrier nor exited
    unsigned long long cluster_phase_ = 0;
    std::vector<Transfers> transfers_;  // by thread
    std::vector<Load> loads_;
    std::vector<Store> stores_;
    Thread** slot_ = nullptr;
    unsigned char* static_shared_ = nullptr;
    size_t static_shared_bytes_ = 0;
    Context main_;
    sigjmp_buf escape_;
    std::vector<unsigned char> signal_stack_;
    stack_t old_signal_stack_;
    std::chrono::steady_clock::time_point next_interrupt_check_;
};

// Fatal signals become errors of the launch while one of these lives.
class FaultHandlers {
   public:
    FaultHandlers();
    ~FaultHandlers();
};

// The worker of the calling host thread, for the signal handler.
void set_active_worker(Worker* worker);
Worker* active_worker();

// The range of the thread-local variables of the library that `variable` belongs to, in this host thread.
bool thread_local_segment(const void* variable, unsigned char*& begin, size_t& bytes);

}  // namespace fusegraph_cpu

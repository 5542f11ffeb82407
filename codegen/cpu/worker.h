// One host thread's share of a launch: it takes blocks one by one and runs each block's threads.
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
#include "context.h"
#include "memory.h"

namespace fusegraph_cpu {

constexpr unsigned kWarpSize = 32, kMostWarps = 32, kBarriers = 16;

enum State { kRunnable, kInBarrier, kInMeeting, kPolling, kExited };

// What the workers of one launch share.
struct Launch {
    const Request& request;
    Report& report;
    uint64_t block_count;
    std::atomic<uint64_t> next_block{0};
    std::atomic<int> status{kDone};

    // The first problem of a launch is the one reported; it stops the others at their next block.  An interrupt comes
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

struct Barrier {
    unsigned count, arrived, sum;
    unsigned waiting[kMostWarps];  // lanes, by warp
};

class Worker {
   public:
    Worker(Launch& launch, bool polls_interrupts);
    ~Worker();

    // Runs blocks until there are none left or the launch has stopped.
    void run();

    // The scheduler, called by threads of the running block.
    unsigned barrier_sync(Thread* self, unsigned id, unsigned count, unsigned value, const Where& where);
    void barrier_arrive(Thread* self, unsigned id, unsigned count, const Where& where);
    void meet(Thread* self, unsigned mask, void* operand, Complete complete, const Where& where);
    void wait_until(Thread* self, bool (*ready)(void*), void* context, const Where& where);

    // Ends the launch: leaves the kernel for run().
    [[noreturn]] void fail(const Thread* thread, const void* address, const char* format, va_list arguments);
    [[noreturn]] void fail_format(const Thread* thread, const void* address, const char* format, ...)
        __attribute__((format(printf, 4, 5)));

    [[noreturn]] void fault(int signal_number, const siginfo_t* info, const char* access);

    static Worker* of(const Thread* thread) { return static_cast<BlockOfWorker*>(thread->block)->worker; }

    // Whether a kernel's code is running on this host thread.
    volatile bool in_kernel = false;

   private:
    struct BlockOfWorker : Block {
        Worker* worker;
    };

    void prepare_threads(unsigned count);
    void run_block(uint64_t number);
    void poison_shared();
    void reset_scheduler();
    bool interrupted();

    static void fiber_entry();
    void leave(Thread* self);                         // suspends `self`, runs the next runnable thread
    void resume(Thread* self, unsigned next);         // the same, with the next thread given
    bool next_runnable(unsigned from, unsigned& next);
    unsigned first_of(const unsigned* lanes_by_warp);
    void wait(Thread* self, State state, const Where& where, unsigned detail0, unsigned detail1);
    bool arrive(Thread* self, unsigned id, unsigned count, unsigned value, const Where& where);
    void poll_waiting();
    void require_fibers(Thread* self, const Where& where);
    [[noreturn]] void deadlock();
    std::string waits() const;  // which threads of the block wait where

    Launch& launch_;
    const bool polls_interrupts_;
    BlockOfWorker block_;
    std::vector<Thread> threads_;
    std::vector<Context> contexts_;
    std::vector<unsigned char*> stacks_;
    DynamicShared dynamic_;
    std::unique_ptr<WarpState[]> warps_;
    Barrier barriers_[kBarriers];
    unsigned runnable_[kMostWarps];  // lanes, by warp
    unsigned alive_ = 0, warp_count_ = 0, polling_ = 0;
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

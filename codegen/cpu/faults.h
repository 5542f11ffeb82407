// Fatal signals raised by a kernel's code, as errors of its launch.
#pragma once

#include <signal.h>

#include <mutex>

#include "worker.h"

namespace fusegraph_cpu {

static thread_local Worker* worker_of_host_thread;

inline void set_active_worker(Worker* worker) { worker_of_host_thread = worker; }

// Not inlined: a fiber always runs on the host thread that it was made on, but the compiler need not rely on it.
__attribute__((noinline)) inline Worker* active_worker() { return worker_of_host_thread; }

constexpr int kFatalSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int kFatalSignalCount = sizeof kFatalSignals / sizeof kFatalSignals[0];

struct InstalledHandlers {
    std::mutex mutex;
    int launches = 0;
    struct sigaction previous[kFatalSignalCount];

    static InstalledHandlers& instance() {
        static InstalledHandlers* handlers = new InstalledHandlers;
        return *handlers;
    }
};

inline const char* kind_of_access(const void* context) {
#if defined(__linux__) && defined(__x86_64__)
    // Bit 1 of the page fault's error code: a write.
    constexpr int kErrorRegister = 19;  // REG_ERR, a name that only _GNU_SOURCE has
    return static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[kErrorRegister] & 2 ? "write" : "read";
#else
    (void)context;
    return "access";
#endif
}

inline void on_fatal_signal(int number, siginfo_t* info, void* context) {
    Worker* worker = active_worker();
    if (worker && worker->in_kernel && info->si_code > 0) worker->fault(number, info, kind_of_access(context));
    // Not a kernel's: as if these handlers were not there.  The instruction runs again, or the signal is sent again.
    const InstalledHandlers& handlers = InstalledHandlers::instance();
    for (int i = 0; i < kFatalSignalCount; ++i)
        if (kFatalSignals[i] == number) sigaction(number, &handlers.previous[i], nullptr);
    if (info->si_code <= 0) raise(number);
}

inline FaultHandlers::FaultHandlers() {
    InstalledHandlers& handlers = InstalledHandlers::instance();
    std::lock_guard<std::mutex> lock(handlers.mutex);
    if (handlers.launches++) return;
    struct sigaction action = {};
    action.sa_sigaction = on_fatal_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < kFatalSignalCount; ++i) sigaction(kFatalSignals[i], &action, &handlers.previous[i]);
}

inline FaultHandlers::~FaultHandlers() {
    InstalledHandlers& handlers = InstalledHandlers::instance();
    std::lock_guard<std::mutex> lock(handlers.mutex);
    if (--handlers.launches) return;
    for (int i = 0; i < kFatalSignalCount; ++i) sigaction(kFatalSignals[i], &handlers.previous[i], nullptr);
}

inline void Worker::fault(int number, const siginfo_t* info, const char* access) {
    const Thread* thread = *slot_;
    const unsigned char* address = static_cast<const unsigned char*>(info->si_addr);
    if (number == SIGFPE) fail_format(thread, nullptr, "integer division by zero (or its overflow)");
    if (number == SIGILL) fail_format(thread, nullptr, "illegal instruction: a trap, or code marked unreachable");
    if (number == SIGSEGV && info->si_code != SEGV_MAPERR && info->si_code != SEGV_ACCERR)
        fail_format(thread, nullptr, "a vector access that is not aligned to its size, or through a wild pointer");
    if (number == SIGBUS && info->si_code == BUS_ADRALN)
        fail_format(thread, address, "misaligned %s at %p", access, info->si_addr);
    if (!stacks_.empty()) {
        const unsigned char* stack = stacks_[index_of(thread)];
        if (address < stack && address >= stack - kStackGuardBytes)
            fail_format(thread, nullptr, "stack overflow: a thread has %zu KiB for its local arrays",
                        kStackBytes >> 10);
    }
    for (const auto& block : blocks_) {
        const bool dynamic = block->dynamic.is_near(address);
        if (block->image && !block->alive && (dynamic || block->image->holds(address)))
            fail_format(thread, nullptr, "%s of the shared memory of block %u of the cluster, which has ended", access,
                        block->cluster_rank);
        if (dynamic)
            fail_format(thread, nullptr, "%s out of bounds: byte %td of %u bytes of dynamic shared memory%s", access,
                        address - block->dynamic.begin(), block->dynamic_shared_bytes,
                        block.get() == thread->block ? "" : " of another block of the cluster");
    }
    if (reinterpret_cast<uintptr_t>(address) < 65536)
        fail_format(thread, nullptr, "%s through a null pointer (address %p)%s", access, info->si_addr,
                    thread->block->dynamic_shared_bytes ? "" : ", or of dynamic shared memory, of which this launch has none");
    fail_format(thread, address, "%s out of bounds at address %p", access, info->si_addr);
}

}  // namespace fusegraph_cpu

// Runs kernels that were compiled with cuda_on_cpu.h: the blocks of a grid over host threads, the threads of a block
// as fibers on one host thread (or in a plain loop where the kernel has no barriers).
#include <link.h>

#include <exception>
#include <system_error>
#include <thread>

#include "abi.h"
#include "faults.h"
#include "scheduler.h"
#include "worker.h"

namespace fusegraph_cpu {

namespace {

unsigned runtime_barrier_sync(Thread* self, unsigned id, unsigned count, unsigned value, const Where& where) {
    return Worker::of(self)->barrier_sync(self, id, count, value, where);
}

void runtime_barrier_arrive(Thread* self, unsigned id, unsigned count, const Where& where) {
    Worker::of(self)->barrier_arrive(self, id, count, where);
}

void runtime_meet(Thread* self, unsigned mask, void* operand, Complete complete, const Where& where) {
    Worker::of(self)->meet(self, mask, operand, complete, where);
}

void runtime_wait_until(Thread* self, bool (*ready)(void*), void* context, const Where& where) {
    Worker::of(self)->wait_until(self, ready, context, where);
}

void runtime_fail(Thread* self, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    Worker::of(self)->fail(self, nullptr, format, arguments);
}

constexpr Runtime kRuntime = {runtime_barrier_sync, runtime_barrier_arrive, runtime_meet, runtime_wait_until,
                              runtime_fail};

struct SegmentSearch {
    const unsigned char* variable;
    unsigned char* begin;
    size_t bytes;
};

int search_segment(dl_phdr_info* info, size_t, void* data) {
    SegmentSearch& search = *static_cast<SegmentSearch*>(data);
    unsigned char* begin = static_cast<unsigned char*>(info->dlpi_tls_data);
    if (!begin) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_TLS || search.variable < begin || search.variable >= begin + header.p_memsz) continue;
        search.begin = begin;
        search.bytes = header.p_memsz;
        return 1;
    }
    return 0;
}

}  // namespace

bool thread_local_segment(const void* variable, unsigned char*& begin, size_t& bytes) {
    SegmentSearch search{static_cast<const unsigned char*>(variable), nullptr, 0};
    if (!dl_iterate_phdr(search_segment, &search)) return false;
    begin = search.begin;
    bytes = search.bytes;
    return true;
}

Worker::Worker(Launch& launch, bool polls_interrupts)
    : launch_(launch), polls_interrupts_(polls_interrupts), dynamic_(launch.request.dynamic_shared_bytes) {
    const Request& request = launch.request;
    const unsigned count = request.block[0] * request.block[1] * request.block[2];
    block_.block_index = {0, 0, 0};
    block_.block_dim = dim3(request.block[0], request.block[1], request.block[2]);
    block_.grid_dim = dim3(request.grid[0], request.grid[1], request.grid[2]);
    block_.thread_count = count;
    block_.dynamic_shared_bytes = request.dynamic_shared_bytes;
    block_.dynamic_shared = dynamic_.begin();
    block_.runtime = &kRuntime;
    block_.worker = this;
    slot_ = request.slot();
    if (request.poison >= 0 && !thread_local_segment(slot_, static_shared_, static_shared_bytes_))
        throw std::system_error(std::make_error_code(std::errc::not_supported),
                                "the shared variables of the kernel's library cannot be found");
    prepare_threads(count);
    signal_stack_.resize(64 << 10);
    stack_t stack = {};
    stack.ss_sp = signal_stack_.data();
    stack.ss_size = signal_stack_.size();
    sigaltstack(&stack, &old_signal_stack_);
    set_active_worker(this);
}

Worker::~Worker() {
    set_active_worker(nullptr);
    *slot_ = nullptr;
    sigaltstack(&old_signal_stack_, nullptr);
    StackPool::instance().give_back(stacks_);
}

void Worker::prepare_threads(unsigned count) {
    const bool fibers = launch_.request.kernel->run;
    warp_count_ = (count + kWarpSize - 1) / kWarpSize;
    threads_.resize(fibers ? count : 1);
    block_.threads = threads_.data();
    for (unsigned i = 0; i < threads_.size(); ++i) {
        Thread& thread = threads_[i];
        const dim3& dim = block_.block_dim;
        thread.thread_index = {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
        thread.linear = i;
        thread.lane = i % kWarpSize;
        thread.warp = i / kWarpSize;
        const unsigned lanes = std::min(kWarpSize, count - thread.warp * kWarpSize);
        thread.warp_lanes = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
        thread.block = &block_;
    }
    if (!fibers) return;
    warps_.reset(new WarpState[warp_count_]);
    contexts_.resize(count);
    StackPool::instance().take(stacks_, count);
    // Equal offsets in equally aligned stacks would all fall into the same few sets of the caches.
    for (unsigned i = 0; i < count; ++i)
        context_make(contexts_[i], stacks_[i], kStackBytes - i % 32 * 128, &Worker::fiber_entry);
}

void Worker::reset_scheduler() {
    for (unsigned warp = 0; warp < warp_count_; ++warp) {
        warps_[warp].meeting_count = 0;
        runnable_[warp] = threads_[warp * kWarpSize].warp_lanes;
    }
    for (Barrier& barrier : barriers_) barrier = Barrier();
    alive_ = block_.thread_count;
    polling_ = 0;
}

void Worker::poison_shared() {
    const int byte = launch_.request.poison;
    if (byte < 0) return;
    memset(static_shared_, byte, static_shared_bytes_);
    if (block_.dynamic_shared_bytes) memset(block_.dynamic_shared, byte, block_.dynamic_shared_bytes);
}

void Worker::run_block(uint64_t number) {
    const Request& request = launch_.request;
    if (request.reverse) number = launch_.block_count - 1 - number;
    const dim3& grid = block_.grid_dim;
    block_.block_index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y),
                          unsigned(number / grid.x / grid.y)};
    poison_shared();  // also the slot, which lies among the kernel's shared variables
    *slot_ = &threads_[0];
    if (request.kernel->run) {
        reset_scheduler();
        const unsigned first = request.reverse ? block_.thread_count - 1 : 0;
        Thread& thread = threads_[first];
        runnable_[thread.warp] &= ~(1u << thread.lane);
        *slot_ = &thread;
        in_kernel = true;
        context_switch(main_, contexts_[first]);
    } else {
        in_kernel = true;
        request.kernel->run_block(request.args, request.reverse);
    }
    in_kernel = false;
    if (const size_t overrun = dynamic_.overrun())
        fail_format(nullptr, nullptr, "byte %zu of %u bytes of dynamic shared memory was written", overrun,
                    block_.dynamic_shared_bytes);
}

bool Worker::interrupted() {
    const Interpreter* python = launch_.request.python;
    if (!polls_interrupts_ || !python) return false;
    const auto now = std::chrono::steady_clock::now();
    if (now < next_interrupt_check_) return false;
    next_interrupt_check_ = now + std::chrono::milliseconds(50);
    const int state = python->ensure();
    const bool raised = python->check_signals() != 0;
    void** exception = launch_.report.exception;
    if (raised) python->fetch(&exception[0], &exception[1], &exception[2]);
    python->release(state);
    return raised;
}

void Worker::run() {
    next_interrupt_check_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    // Nothing with a destructor lives between here and the kernel: fail() jumps over all of it.
    if (sigsetjmp(escape_, 1) == 0) {
        while (launch_.status.load(std::memory_order_relaxed) == kDone) {
            const uint64_t number = launch_.next_block.fetch_add(1);
            if (number >= launch_.block_count) break;
            if (interrupted())
                launch_.stop(kInterrupted, "interrupted", nullptr);
            else
                run_block(number);
        }
    }
    in_kernel = false;
}

void Worker::fail(const Thread* thread, const void* address, const char* format, va_list arguments) {
    in_kernel = false;
    char text[3072], message[sizeof(Report::message)];
    vsnprintf(text, sizeof text, format, arguments);
    const uint3 b = block_.block_index;
    const uint3 t = thread ? thread->thread_index : uint3{0, 0, 0};
    int length = snprintf(message, sizeof message, "kernel %s, block (%u, %u, %u)", launch_.request.kernel->name, b.x,
                          b.y, b.z);
    if (thread)
        length += snprintf(message + length, sizeof message - length, ", thread (%u, %u, %u)", t.x, t.y, t.z);
    snprintf(message + length, sizeof message - length, ": %s", text);
    launch_.stop(kFailed, message, address);
    siglongjmp(escape_, 1);
}

void Worker::fail_format(const Thread* thread, const void* address, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail(thread, address, format, arguments);
}

void Worker::deadlock() {
    char text[2560];
    snprintf(text, sizeof text, "%s", waits().c_str());
    fail_format(nullptr, nullptr, "deadlock: no thread can go on (threads by linear index): %s", text);
}

}  // namespace fusegraph_cpu

using namespace fusegraph_cpu;

#define FUSEGRAPH_EXPORT __attribute__((visibility("default")))

// Runs one launch to its end; returns a Status, and in the report what went wrong.  The caller has checked the sizes.
extern "C" FUSEGRAPH_EXPORT int fusegraph_cpu_launch(const Request* request, Report* report) {
    report->has_address = 0;
    report->message[0] = 0;
    Launch launch{*request, *report, uint64_t(request->grid[0]) * request->grid[1] * request->grid[2]};
    const unsigned threads = request->block[0] * request->block[1] * request->block[2];
    uint64_t workers = std::min<uint64_t>(request->host_threads, launch.block_count);
    // A host thread costs about as much to start as this many threads of a small kernel take to run.
    workers = std::min(workers, launch.block_count * threads / (request->kernel->run ? 1024 : 8192) + 1);
    if (request->kernel->run) workers = std::min<uint64_t>(workers, kMostStacks / threads);
    if (launch.block_count == 0) return kDone;

    const auto work = [&launch](bool polls_interrupts) {
        try {
            Worker(launch, polls_interrupts).run();
        } catch (const std::exception& error) {
            char message[512];
            snprintf(message, sizeof message, "kernel %s: the CPU runtime has not enough memory or rights: %s",
                     launch.request.kernel->name, error.what());
            launch.stop(kFailed, message, nullptr);
        }
    };
    const FaultHandlers handlers;
    std::vector<std::thread> helpers;
    try {
        for (uint64_t i = 1; i < workers; ++i) helpers.emplace_back(work, false);
    } catch (const std::exception&) {
        // No more host threads to be had: those there are take all blocks.
    }
    work(true);
    for (std::thread& helper : helpers) helper.join();
    return launch.status.load();
}

// How threads are switched: "x86-64" or "ucontext".
extern "C" FUSEGRAPH_EXPORT const char* fusegraph_cpu_context_kind() { return context_kind(); }

// Runs kernels that were compiled with cuda_on_cpu.h: the clusters of a grid over host threads (blocks, where a kernel
// has no clusters), the threads of a cluster as fibers on one host thread (or in a plain loop where the kernel has no
// barriers).
#include <link.h>

#include <exception>
#include <system_error>
#include <thread>

#include "abi.h"
#include "clusters.h"
#include "faults.h"
#include "mbarriers.h"
#include "engine.h"
#include "scheduler.h"
#include "worker.h"

namespace fusegraph_cpu {

namespace {

void runtime_barrier_sync(Thread* self, unsigned id, unsigned count, const Where& where) {
    Worker::of(self)->barrier_sync(self, id, count, where);
}

void runtime_barrier_arrive(Thread* self, unsigned id, unsigned count, const Where& where) {
    Worker::of(self)->barrier_arrive(self, id, count, where);
}

void runtime_meet(Thread* self, unsigned mask, void* operand, Complete complete, const Where& where) {
    Worker::of(self)->meet(self, mask, operand, complete, where);
}

void runtime_meet_warpgroup(Thread* self, void* operand, Complete complete, const Where& where) {
    Worker::of(self)->meet_warpgroup(self, operand, complete, where);
}

void runtime_set_registers(Thread* self, unsigned count, const Where& where) {
    Worker::of(self)->set_registers(self, count, where);
}

void* runtime_block_memory(Thread* self, unsigned long long bytes) {
    return Worker::of(self)->block_memory(self, bytes);
}

bool runtime_is_shared(Thread* self, const void* address, unsigned bytes) {
    return Worker::of(self)->is_shared(self, address, bytes);
}

void runtime_wait_until(Thread* self, bool (*ready)(void*), void* context, const Where& where) {
    Worker::of(self)->wait_until(self, ready, context, where);
}

void runtime_mbarrier_init(Thread* self, void* barrier, int arrivals, const Where& where) {
    Worker::of(self)->mbarrier_init(self, barrier, arrivals, where);
}

void runtime_mbarrier_fence_init(Thread* self) { Worker::of(self)->mbarrier_fence_init(self); }

void runtime_mbarrier_arrive(Thread* self, void* barrier, unsigned expected, const Where& where) {
    Worker::of(self)->mbarrier_arrive(self, barrier, expected, where);
}

void runtime_mbarrier_arrive_cluster(Thread* self, void* barrier, int cta, const Where& where) {
    Worker::of(self)->mbarrier_arrive_cluster(self, barrier, cta, where);
}

void runtime_mbarrier_wait(Thread* self, void* barrier, unsigned parity, const Where& where) {
    Worker::of(self)->mbarrier_wait(self, barrier, parity, where);
}

void runtime_copy(Thread* self, const Copy& copy, const Where& where) { Worker::of(self)->copy(self, copy, where); }

void runtime_copy_commit(Thread* self) { Worker::of(self)->copy_commit(self); }

void runtime_copy_wait(Thread* self, unsigned pending, bool written, const Where& where) {
    Worker::of(self)->copy_wait(self, pending, written, where);
}

void runtime_fence_async(Thread* self) { Worker::of(self)->fence_async(self); }

void runtime_async_read(Thread* self, const void* shared, unsigned bytes, const Where& where) {
    Worker::of(self)->async_read(self, shared, bytes, where);
}

void runtime_cluster_arrive(Thread* self, const Where& where) { Worker::of(self)->cluster_arrive(self, where); }

void runtime_cluster_wait(Thread* self, const Where& where) { Worker::of(self)->cluster_wait(self, where); }

void* runtime_cluster_map(Thread* self, const void* shared, int cta, const Where& where) {
    return Worker::of(self)->cluster_map(self, shared, cta, where);
}

void runtime_fail(Thread* self, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    Worker::of(self)->fail(self, nullptr, format, arguments);
}

bool runtime_stopped(Thread* self) { return Worker::of(self)->stopped(); }

constexpr Runtime kRuntime = {runtime_barrier_sync,
                              runtime_barrier_arrive,
                              runtime_meet,
                              runtime_meet_warpgroup,
                              runtime_set_registers,
                              runtime_block_memory,
                              runtime_is_shared,
                              runtime_wait_until,
                              runtime_mbarrier_init,
                              runtime_mbarrier_fence_init,
                              runtime_mbarrier_arrive,
                              runtime_mbarrier_arrive_cluster,
                              runtime_mbarrier_wait,
                              runtime_copy,
                              runtime_copy_commit,
                              runtime_copy_wait,
                              runtime_fence_async,
                              runtime_async_read,
                              runtime_cluster_arrive,
                              runtime_cluster_wait,
                              runtime_cluster_map,
                              runtime_fail,
                              runtime_stopped};

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

Worker::Worker(Launch& launch, bool polls_interrupts) : launch_(launch), polls_interrupts_(polls_interrupts) {
    slot_ = launch.request.slot();
    if (!thread_local_segment(slot_, static_shared_, static_shared_bytes_))
        throw std::system_error(std::make_error_code(std::errc::not_supported),
                                "the shared variables of the kernel's library cannot be found");
    prepare_blocks();
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

void Worker::prepare_blocks() {
    const Request& request = launch_.request;
    const unsigned count = request.block[0] * request.block[1] * request.block[2];
    const unsigned blocks = request.cluster[0] * request.cluster[1] * request.cluster[2];
    warps_a_block_ = (count + kWarpSize - 1) / kWarpSize;
    warp_count_ = blocks * warps_a_block_;
    threads_.resize(has_fibers() ? warp_count_ * kWarpSize : 1);
    if (has_fibers()) {
        warps_.reset(new WarpState[warp_count_]);
        runnable_.resize(warp_count_);
        contexts_.resize(threads_.size());
        transfers_.resize(threads_.size());
        cluster_arrivals_.resize(threads_.size());
        StackPool::instance().take(stacks_, threads_.size());
    }
    for (unsigned rank = 0; rank < blocks; ++rank) {
        auto block = std::make_unique<BlockState>(this, rank * warps_a_block_ * kWarpSize, request.dynamic_shared_bytes);
        block->block_index = {0, 0, 0};
        block->block_dim = dim3(request.block[0], request.block[1], request.block[2]);
        block->grid_dim = dim3(request.grid[0], request.grid[1], request.grid[2]);
        block->thread_count = count;
        block->dynamic_shared_bytes = request.dynamic_shared_bytes;
        block->dynamic_shared = block->dynamic.begin();
        block->threads = &threads_[block->first];
        block->runtime = &kRuntime;
        block->cluster_rank = rank;
        block->reverse = reverse();
        if (blocks > 1) block->image = std::make_unique<SharedImage>(static_shared_, static_shared_bytes_);
        prepare_threads(*block);
        blocks_.push_back(std::move(block));
    }
}

void Worker::prepare_threads(BlockState& block) {
    for (unsigned i = 0; i < (has_fibers() ? block.thread_count : 1); ++i) {
        Thread& thread = threads_[block.first + i];
        const dim3& dim = block.block_dim;
        thread.thread_index = {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
        thread.linear = i;
        thread.lane = i % kWarpSize;
        thread.warp = i / kWarpSize;
        const unsigned lanes = std::min(kWarpSize, block.thread_count - thread.warp * kWarpSize);
        thread.warp_lanes = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
        thread.block = &block;
        // Equal offsets in equally aligned stacks would all fall into the same few sets of the caches.
        const unsigned index = block.first + i;
        if (has_fibers())
            context_make(contexts_[index], stacks_[index], kStackBytes - index % 32 * 128, &Worker::fiber_entry);
    }
}

void Worker::reset_scheduler() {
    for (unsigned warp = 0; warp < warp_count_; ++warp) {
        warps_[warp].meeting_count = 0;
        runnable_[warp] = threads_[warp * kWarpSize].warp_lanes;
    }
    for (const auto& block : blocks_) {
        for (NamedBarrier& barrier : block->barriers) barrier = NamedBarrier();
        for (WarpgroupMeeting& meeting : block->warpgroups) meeting = WarpgroupMeeting();
        for (unsigned& registers : block->registers) registers = 0;
        block->registers_set = Where{};
        block->memory.clear();
        block->alive = block->thread_count;
        block->mbarriers.clear();
        block->view.reset(launch_.request.poison);
    }
    for (Thread& thread : threads_) thread.copies = thread.products = nullptr;
    std::fill(transfers_.begin(), transfers_.end(), Transfers());
    std::fill(cluster_arrivals_.begin(), cluster_arrivals_.end(), ClusterArrival());
    loads_.clear();
    stores_.clear();
    cluster_phase_ = 0;
    alive_ = cluster_pending_ = unsigned(blocks_.size()) * blocks_[0]->thread_count;
    polling_ = 0;
}

void Worker::poison_shared(BlockState& block) {
    if (block.image) {
        block.dynamic.allow(true);
        block.image->allow(true);
    }
    const int byte = launch_.request.poison;
    if (byte < 0) return;
    memset(&block == active_ ? static_shared_ : block.image->begin(), byte, static_shared_bytes_);
    if (block.dynamic_shared_bytes) memset(block.dynamic_shared, byte, block.dynamic_shared_bytes);
}

// Gives the blocks of cluster `number` their indices.
void Worker::place_blocks(uint64_t number) {
    const Request& request = launch_.request;
    const unsigned *grid = request.grid, *cluster = request.cluster;
    const uint64_t columns = grid[0] / cluster[0], rows = grid[1] / cluster[1];
    const unsigned x = number % columns * cluster[0], y = number / columns % rows * cluster[1],
                   z = number / columns / rows * cluster[2];
    for (unsigned rank = 0; rank < blocks_.size(); ++rank)
        blocks_[rank]->block_index = {x + rank % cluster[0], y + rank / cluster[0] % cluster[1],
                                      z + rank / cluster[0] / cluster[1]};
}

void Worker::run_cluster(uint64_t number) {
    const Request& request = launch_.request;
    place_blocks(reverse() ? launch_.cluster_count - 1 - number : number);
    BlockState& first_block = reverse() ? *blocks_.back() : *blocks_.front();
    active_ = &first_block;
    for (const auto& block : blocks_) poison_shared(*block);  // also the slot, which lies among the shared variables
    const unsigned first = first_block.first + (reverse() && has_fibers() ? first_block.thread_count - 1 : 0);
    *slot_ = &threads_[first];
    if (has_fibers()) {
        reset_scheduler();
        runnable_[first / kWarpSize] &= ~(1u << first % kWarpSize);
        in_kernel = true;
        context_switch(main_, contexts_[first]);
    } else {
        in_kernel = true;
        request.kernel->run_block(request.args, reverse());
        in_kernel = false;
        check_overrun(first_block);
    }
    in_kernel = false;
}

void Worker::check_overrun(const BlockState& block) {
    if (const size_t overrun = block.dynamic.overrun())
        fail_format(nullptr, nullptr, "byte %zu of %u bytes of dynamic shared memory was written",
                    overrun, block.dynamic_shared_bytes);
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
            const uint64_t number = launch_.next_cluster.fetch_add(1);
            if (number >= launch_.cluster_count) break;
            if (interrupted())
                launch_.stop(kInterrupted, "interrupted", nullptr);
            else
                run_cluster(number);
        }
    }
    in_kernel = false;
}

void Worker::fail(const Thread* thread, const void* address, const char* format, va_list arguments) {
    in_kernel = false;
    char text[3072], message[sizeof(Report::message)];
    vsnprintf(text, sizeof text, format, arguments);
    const uint3 b = thread ? thread->block->block_index : active_->block_index;
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
    std::string text;
    for (const auto& block : blocks_) {
        const uint3 b = block->block_index;
        if (blocks_.size() > 1)
            text += (text.empty() ? "block (" : "; block (") + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " +
                    std::to_string(b.z) + "): ";
        text += waits(*block);
    }
    char copy[2560];
    snprintf(copy, sizeof copy, "%s", text.c_str());
    std::string().swap(text);  // fail_format does not return
    fail_format(nullptr, nullptr, "deadlock: no thread can go on (threads by linear index): %s", copy);
}

}  // namespace fusegraph_cpu

using namespace fusegraph_cpu;

#define FUSEGRAPH_EXPORT __attribute__((visibility("default")))

// Runs one launch to its end; returns a Status, and in the report what went wrong.  The caller has checked the sizes.
extern "C" FUSEGRAPH_EXPORT int fusegraph_cpu_launch(const Request* request, Report* report) {
    report->has_address = 0;
    report->message[0] = 0;
    const auto product = [](const unsigned* v) { return uint64_t(v[0]) * v[1] * v[2]; };
    const uint64_t blocks_a_cluster = product(request->cluster);
    Launch launch{*request, *report, product(request->grid) / blocks_a_cluster};
    const uint64_t threads = product(request->block) * blocks_a_cluster;
    uint64_t workers = std::min<uint64_t>(request->host_threads, launch.cluster_count);
    // A host thread costs about as much to start as this many threads of a small kernel take to run.
    workers = std::min(workers, launch.cluster_count * threads / (request->kernel->run ? 1024 : 8192) + 1);
    if (request->kernel->run) workers = std::min(workers, std::max<uint64_t>(kMostStacks / (threads + 31), 1));
    if (launch.cluster_count == 0) return kDone;

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

// The scheduler of one cluster: fibers run until they wait, in the launch's order.  Where none can go on, copies under
// way are finished, one at a time; what that does not resolve either is a deadlock.
#pragma once

#include "worker.h"

namespace fusegraph_cpu {

// The thread of a block, in the order of the launch, that is the first of these.
inline unsigned Worker::first_of(const unsigned* lanes_by_warp, bool reverse) {
    if (reverse) {
        for (unsigned warp = kMostWarps; warp-- > 0;)
            if (lanes_by_warp[warp]) return warp * kWarpSize + 31 - __builtin_clz(lanes_by_warp[warp]);
    } else {
        for (unsigned warp = 0; warp < kMostWarps; ++warp)
            if (lanes_by_warp[warp]) return warp * kWarpSize + __builtin_ctz(lanes_by_warp[warp]);
    }
    return ~0u;
}

// The runnable thread that follows `from` in the order of the launch, going round.
inline bool Worker::next_runnable(unsigned from, unsigned& next, bool late) {
    unsigned warp = from / kWarpSize;
    const unsigned lane = from % kWarpSize;
    if (reverse()) {
        unsigned lanes = runnable(warp, late) & ((1u << lane) - 1);
        for (unsigned steps = 0; steps <= warp_count_; ++steps) {
            if (lanes) return next = warp * kWarpSize + 31 - __builtin_clz(lanes), true;
            warp = warp ? warp - 1 : warp_count_ - 1;
            lanes = runnable(warp, late);
        }
    } else {
        unsigned lanes = lane == 31 ? 0 : runnable(warp, late) & (~0u << (lane + 1));
        for (unsigned steps = 0; steps <= warp_count_; ++steps) {
            if (lanes) return next = warp * kWarpSize + __builtin_ctz(lanes), true;
            warp = warp + 1 == warp_count_ ? 0 : warp + 1;
            lanes = runnable(warp, late);
        }
    }
    return false;
}

inline void Worker::activate(BlockState& block) {
    if (active_->alive) memcpy(active_->image->begin(), static_shared_, static_shared_bytes_);
    memcpy(static_shared_, block.image->begin(), static_shared_bytes_);
    active_ = &block;
}

inline void Worker::resume(Thread* self, unsigned next) {
    Thread* thread = &threads_[next];
    runnable_[next / kWarpSize] &= ~(1u << thread->lane);
    thread->state = kRunnable;
    if (thread->block != active_) activate(state_of(thread));
    *slot_ = thread;
    if (thread != self) context_switch(contexts_[index_of(self)], contexts_[next]);
}

inline void Worker::poll_waiting() {
    for (Thread& thread : threads_) {
        if (!thread.block || thread.state != kPolling || !thread.ready(thread.ready_context)) continue;
        thread.state = kRunnable;
        --polling_;
        runnable_[index_of(&thread) / kWarpSize] |= 1u << thread.lane;
    }
}

inline void Worker::leave(Thread* self) {
    unsigned next;
    const unsigned own = index_of(self);
    if (next_runnable(own, next)) return resume(self, next);
    do {
        if (polling_) poll_waiting();
        if (next_runnable(own, next)) return resume(self, next);
    } while (advance_copies());
    if (next_runnable(own, next, true)) return resume(self, next);
    if (alive_) deadlock();
    context_switch(contexts_[own], main_);  // the cluster is done; resumed by the worker's next
}

inline void Worker::end_block(BlockState& block) {
    check_copies(block);
    check_registers(block);
    check_overrun(block);
    if (!block.image) return;
    block.dynamic.allow(false);
    block.image->allow(false);
}

inline void Worker::exit_thread(Thread* self) {
    end_stores(self);
    BlockState& block = state_of(self);
    if (--block.alive == 0) end_block(block);
    --alive_;
    self->state = kExited;
    const ClusterArrival& arrival = cluster_arrivals_[index_of(self)];
    if (!arrival.arrived || arrival.phase != cluster_phase_) cluster_count();
}

// Each fiber runs one thread of cluster after cluster.
inline void Worker::fiber_entry() {
    Worker* worker = active_worker();
    Thread* self = *worker->slot_;
    for (;;) {
        worker->launch_.request.kernel->run(worker->launch_.request.args);
        worker->exit_thread(self);
        worker->leave(self);
    }
}

inline void Worker::wait(Thread* self, State state, const Where& where, unsigned detail0, unsigned detail1) {
    self->state = state;
    self->where = where;
    self->detail[0] = detail0;
    self->detail[1] = detail1;
    leave(self);
}

inline void Worker::require_fibers(Thread* self, const Where& where) {
    if (!launch_.request.kernel->run)
        fail_format(self, nullptr, "%s at %s:%d in a kernel that was said to use no barriers (uses_barriers=False)",
                    where.what, where.file, where.line);
}

// Counts an arrival.  True when it was the last: all waiting threads are then runnable.
inline bool Worker::arrive(Thread* self, unsigned id, unsigned count, const Where& where) {
    require_fibers(self, where);
    if (id >= kBarriers)
        fail_format(self, nullptr, "%s at %s:%d: barrier %u; a block has %u", where.what, where.file, where.line, id,
                    kBarriers);
    if (count == 0 || count > self->block->thread_count)
        fail_format(self, nullptr, "%s at %s:%d: barrier %u for %u threads in a block of %u", where.what, where.file,
                    where.line, id, count, self->block->thread_count);
    NamedBarrier& barrier = state_of(self).barriers[id];
    if (barrier.arrived == 0)
        barrier.count = count;
    else if (barrier.count != count)
        fail_format(self, nullptr, "%s at %s:%d: barrier %u is for %u threads here and for %u where others wait",
                    where.what, where.file, where.line, id, count, barrier.count);
    return ++barrier.arrived == count;
}

inline void Worker::barrier_sync(Thread* self, unsigned id, unsigned count, const Where& where) {
    const bool last = arrive(self, id, count, where);
    NamedBarrier& barrier = state_of(self).barriers[id];
    barrier.waiting[self->warp] |= 1u << self->lane;
    if (!last) {
        wait(self, kInBarrier, where, id, count);
        return;
    }
    BlockState& block = state_of(self);
    const unsigned first = first_of(barrier.waiting, reverse());
    wake(block, barrier);
    resume(self, block.first + first);
}

// All that wait at the barrier can go on; it starts anew.
inline void Worker::wake(BlockState& block, NamedBarrier& barrier) {
    for (unsigned warp = 0; warp < warps_a_block_; ++warp)
        runnable_[block.first / kWarpSize + warp] |= barrier.waiting[warp];
    barrier = NamedBarrier();
}

inline void Worker::barrier_arrive(Thread* self, unsigned id, unsigned count, const Where& where) {
    if (arrive(self, id, count, where)) wake(state_of(self), state_of(self).barriers[id]);
}

inline void Worker::meet(Thread* self, unsigned mask, void* operand, Complete complete, const Where& where) {
    require_fibers(self, where);
    const unsigned bit = 1u << self->lane;
    if (!(mask & bit))
        fail_format(self, nullptr, "%s at %s:%d: the mask 0x%08x does not name the calling lane %u", where.what,
                    where.file, where.line, mask, self->lane);
    mask &= self->warp_lanes;
    const unsigned first = index_of(self) - self->lane;
    WarpState& warp = warps_[first / kWarpSize];
    Meeting* meeting = warp.meetings;
    Meeting* const end = warp.meetings + warp.meeting_count;
    while (meeting != end && meeting->mask != mask) ++meeting;
    if (meeting == end) {
        *meeting = Meeting{mask, 0, complete, where};
        ++warp.meeting_count;
    } else if (meeting->complete != complete) {
        fail_format(self, nullptr, "lanes of one warp meet in %s at %s:%d and in %s at %s:%d with one mask, 0x%08x",
                    where.what, where.file, where.line, meeting->where.what, meeting->where.file, meeting->where.line,
                    mask);
    }
    self->operand = operand;
    meeting->arrived |= bit;
    if (meeting->arrived != mask) return wait(self, kInMeeting, where, mask, 0);
    *meeting = warp.meetings[--warp.meeting_count];
    if (complete) complete(&threads_[first], mask);
    runnable_[first / kWarpSize] |= mask;
    const unsigned lane = reverse() ? 31 - __builtin_clz(mask) : __builtin_ctz(mask);
    resume(self, first + lane);
}

inline void Worker::meet_warpgroup(Thread* self, void* operand, Complete complete, const Where& where) {
    require_fibers(self, where);
    constexpr unsigned kThreads = 4 * kWarpSize;
    BlockState& block = state_of(self);
    const unsigned number = self->linear / kThreads;
    if (block.thread_count < (number + 1) * kThreads)
        fail_format(self, nullptr, "%s at %s:%d: the block's last %u threads are no whole warpgroup", where.what,
                    where.file, where.line, block.thread_count % kThreads);
    WarpgroupMeeting& meeting = block.warpgroups[number];
    if (!meeting.arrived)
        meeting = WarpgroupMeeting{0, complete, where};
    else if (meeting.complete != complete)
        fail_format(self, nullptr, "threads of one warpgroup meet in %s at %s:%d and in %s at %s:%d", where.what,
                    where.file, where.line, meeting.where.what, meeting.where.file, meeting.where.line);
    self->operand = operand;
    if (++meeting.arrived != kThreads) return wait(self, kInWarpgroup, where, number, 0);
    meeting.arrived = 0;
    if (complete) complete(&block.threads[number * kThreads], ~0u);
    const unsigned first = block.first + number * kThreads;
    for (unsigned warp = 0; warp < 4; ++warp) runnable_[first / kWarpSize + warp] = ~0u;
    resume(self, reverse() ? first + kThreads - 1 : first);
}

// Registers of a thread at launch: what the compiler may give at most, by whole units of 8.
inline unsigned registers_at_launch(const BlockState& block) {
    constexpr unsigned kRegistersOfMultiprocessor = 65536, kUnit = 8, kMost = 256;
    return std::min(kRegistersOfMultiprocessor / block.thread_count / kUnit * kUnit, kMost);
}

inline void Worker::set_registers(Thread* self, unsigned count, const Where& where) {
    BlockState& block = state_of(self);
    unsigned& registers = block.registers[self->linear / (4 * kWarpSize)];
    if (registers)
        fail_format(self, nullptr, "%s at %s:%d: the warpgroup was given %u registers a thread before, and is once",
                    where.what, where.file, where.line, registers);
    registers = count;
    if (!block.registers_set.what || count > registers_at_launch(block)) block.registers_set = where;
}

// The block ends: its warpgroups took no more registers than there were.
inline void Worker::check_registers(const BlockState& block) {
    if (!block.registers_set.what) return;
    constexpr unsigned kThreads = 4 * kWarpSize;
    const unsigned launched = registers_at_launch(block);
    unsigned taken = 0;
    for (unsigned first = 0; first < block.thread_count; first += kThreads) {
        const unsigned own = block.registers[first / kThreads];
        taken += (own ? own : launched) * std::min(kThreads, block.thread_count - first);
    }
    if (taken > block.thread_count * launched)
        fail_format(nullptr, nullptr, "%s at %s:%d: the block's warpgroups want %u registers together, it has %u at launch: "
                    "on a GPU they wait for ever", block.registers_set.what, block.registers_set.file,
                    block.registers_set.line, taken, block.thread_count * launched);
}

inline void* Worker::block_memory(Thread* self, unsigned long long bytes) {
    BlockState& block = state_of(self);
    block.memory.emplace_back(new unsigned char[bytes]());
    return block.memory.back().get();
}

inline void Worker::wait_until(Thread* self, bool (*ready)(void*), void* context, const Where& where) {
    require_fibers(self, where);
    if (ready(context)) return;
    self->ready = ready;
    self->ready_context = context;
    ++polling_;
    wait(self, kPolling, where, 0, 0);
}

// "threads 0-31 wait in __syncthreads() at softmax.cu:14; threads 32-63 have exited"
inline std::string Worker::waits(const BlockState& block) const {
    std::string text;
    const Thread* const threads = block.threads;
    const unsigned count = block.thread_count;
    std::vector<bool> told(count, false);
    for (unsigned i = 0; i < count; ++i) {
        if (told[i]) continue;
        const Thread& example = threads[i];
        const auto same = [&](const Thread& other) {
            return other.state == example.state &&
                   (example.state == kExited ||
                    (other.where.line == example.where.line && other.where.what == example.where.what &&
                     other.where.file == example.where.file && other.detail[0] == example.detail[0] &&
                     other.detail[1] == example.detail[1]));
        };
        std::string ranges;
        unsigned members = 0;
        for (unsigned j = i; j < count; ++j) {
            if (told[j] || !same(threads[j])) continue;
            unsigned last = j;
            while (last + 1 < count && !told[last + 1] && same(threads[last + 1])) ++last;
            for (unsigned k = j; k <= last; ++k) told[k] = true;
            members += last - j + 1;
            ranges += (ranges.empty() ? "" : ", ") + std::to_string(j);
            if (last > j) ranges += "-" + std::to_string(last);
            j = last;
        }
        char detail[192] = "";
        if (example.state == kInMbarrier) describe_mbarrier(block, example, detail, sizeof detail);
        if (example.state == kInBarrier)
            snprintf(detail, sizeof detail, " (barrier %u, %u of %u threads arrived)", example.detail[0],
                     block.barriers[example.detail[0]].arrived, example.detail[1]);
        else if (example.state == kInWarpgroup)
            snprintf(detail, sizeof detail, " (%u of 128 threads arrived)", block.warpgroups[example.detail[0]].arrived);
        else if (example.state == kInMeeting)
            snprintf(detail, sizeof detail, " (mask 0x%08x of warp %u)", example.detail[0], example.warp);
        text += text.empty() ? "" : "; ";
        text += (members == 1 ? "thread " : "threads ") + ranges;
        if (example.state == kExited)
            text += members == 1 ? " has exited" : " have exited";
        else
            text += std::string(members == 1 ? " waits in " : " wait in ") + example.where.what + " at " +
                    example.where.file + ":" + std::to_string(example.where.line) + detail;
    }
    return text;
}

}  // namespace fusegraph_cpu

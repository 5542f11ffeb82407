// TMA.  In one order of threads a copy is done as late as it may be: loads when no thread can go on
// without one, stores when their thread waits for them; the destination of a load is poisoned meanwhile.  In the other
// order a copy is done as soon as it is started.  A kernel that lacks a wait, or waits for the wrong copy, goes wrong
// in one of them.
#pragma once

#include "worker.h"

namespace fusegraph_cpu {

constexpr unsigned kTileAlignment = 128, kBulkAlignment = 16;
constexpr unsigned char kInFlight = 0xff;  // a NaN in every float type

inline bool is_load(const Copy& copy) {
    return copy.kind == kLoad || copy.kind == kLoadIm2col || copy.kind == kBulkLoad;
}

inline bool is_bulk(const Copy& copy) { return copy.kind == kBulkLoad || copy.kind == kBulkStore; }

// Checks what all copies have in common, and takes the fields out of the map.
inline unsigned Worker::check_copy(Thread* self, const Copy& copy, TensorMapFields& map, const Where& where) {
    require_fibers(self, where);
    const auto refuse = [&](const char* reason) {
        fail_format(self, nullptr, "%s at %s:%d: %s", where.what, where.file, where.line, reason);
    };
    const auto aligned = [&](const void* address, unsigned to, const char* what) {
        if (reinterpret_cast<uintptr_t>(address) % to)
            fail_format(self, nullptr, "%s at %s:%d: the address in %s memory, %p, is not a multiple of %u", where.what,
                        where.file, where.line, what, address, to);
    };
    map = TensorMapFields();
    if (is_bulk(copy)) {
        aligned(copy.shared, kBulkAlignment, "shared");
        aligned(copy.global, kBulkAlignment, "global");
        if (!copy.bytes || copy.bytes % kBulkAlignment) refuse("the number of bytes is not a multiple of 16");
        return copy.bytes;
    }
    memcpy(&map, copy.map, sizeof map);
    if (map.magic != kTensorMapMagic) refuse("the map is no tensor map");
    if (map.im2col != (copy.kind == kLoadIm2col))
        refuse(map.im2col ? "the tensor map is for im2col" : "the tensor map is not for im2col");
    if (map.rank != copy.rank)
        fail_format(self, nullptr, "%s at %s:%d: %d coordinates for a tensor map of %d dimensions", where.what,
                    where.file, where.line, copy.rank, map.rank);
    // Rows of a box begin at multiples of 16 bytes in global memory too, outside the tensor as well.
    const int unit = kBulkAlignment / map.element_bytes;
    if (copy.coordinates[0] % unit)
        fail_format(self, nullptr, "%s at %s:%d: coordinate 0 is %d; it must be a multiple of %d (16 bytes)", where.what,
                    where.file, where.line, copy.coordinates[0], unit);
    if (copy.kind == kStoreAdd && (!map.kind || map.kind == 't')) refuse("elements of this type cannot be added");
    aligned(copy.shared, kTileAlignment, "shared");
    if (map.im2col)
        for (int d = 0; d < map.rank - 2; ++d)
            if (copy.coordinates[1 + d] < map.lower[d] ||
                copy.coordinates[1 + d] > (long long)map.last[1 + d] + map.upper[d])
                fail_format(self, nullptr,
                            "%s at %s:%d: coordinate %d is %d; the corners of the tensor map hold it within %d and %lld",
                            where.what, where.file, where.line, 1 + d, copy.coordinates[1 + d], map.lower[d],
                            (long long)map.last[1 + d] + map.upper[d]);
    return box_bytes(map);
}

inline void Worker::copy(Thread* self, const Copy& copy, const Where& where) {
    TensorMapFields map;
    const unsigned bytes = check_copy(self, copy, map, where);
    // A swizzle moves units within the 128, 64 or 32 bytes that they lie in.
    const unsigned whole = map.swizzle ? (bytes + map.swizzle - 1) / map.swizzle * map.swizzle : bytes;
    const Place shared = place_of(self, copy.shared, whole, "the tile", where);
    if (!is_load(copy)) {
        async_read(self, copy.shared, whole, where);
        stores_.push_back(Store{copy, map, self, where, transfers_[index_of(self)].committed, bytes, {}});
        if (reverse()) {
            read_store(stores_.back());
            write_store(stores_.back());
        }
        return;
    }
    const unsigned own = 1u << self->block->cluster_rank;
    Load load{copy, map, self, where, shared, place_of(self, copy.barrier, 8, "the barrier", where), bytes, whole, 0, {}};
    load.mask = copy.multicast ? copy.mask : own;
    if (!load.mask || load.mask >> blocks_.size())
        fail_format(self, nullptr, "%s at %s:%d: the mask 0x%x names blocks that the cluster of %zu has not, or none",
                    where.what, where.file, where.line, load.mask, blocks_.size());
    for (unsigned cta = 0; cta < blocks_.size(); ++cta) {
        if (!(load.mask >> cta & 1)) continue;
        BlockState& block = neighbour(self, cta, where);
        const Mbarrier& barrier = mbarrier_at(self, block, load.barrier, where);
        if (!barrier.fenced)
            fail_format(self, nullptr, "%s at %s:%d: the barrier was initialised without barrier_fence_init",
                        where.what, where.file, where.line);
        load.phase[cta] = barrier.phase;
        for (const Load& other : loads_)
            if (other.mask >> cta & 1 && other.shared < shared + whole && shared < other.shared + other.whole)
                fail_format(self, nullptr, "%s at %s:%d: the copy started at %s:%d still writes to these bytes",
                            where.what, where.file, where.line, other.where.file, other.where.line);
        if (!reverse()) memset(at(block, shared), kInFlight, whole);
    }
    if (reverse())
        finish_load(load);
    else
        loads_.push_back(load);
}

inline void Worker::finish_load(const Load& load) {
    Thread* const running = *slot_;
    *slot_ = load.thread;  // for the message of a fault
    for (unsigned cta = 0; cta < blocks_.size(); ++cta) {
        if (!(load.mask >> cta & 1)) continue;
        BlockState& block = *blocks_[cta];
        unsigned char* to = at(block, load.shared);
        const auto put_row = [&](const unsigned char* from, unsigned first, unsigned last) {
            alignas(16) unsigned char row[256 * 8] = {};
            const unsigned size = load.map.element_bytes, bytes = load.map.box[0] * size;
            memcpy(row + first * size, from, (last - first) * size);
            if (load.map.kind == 't') round_to_tf32(row, load.map.box[0]);
            for (unsigned unit = 0; unit < bytes; unit += 16)
                memcpy(swizzled(to + unit, load.map.swizzle), row + unit, 16);
            to += bytes;
        };
        if (load.copy.kind == kBulkLoad)
            memcpy(to, load.copy.global, load.bytes);
        else if (load.copy.kind == kLoad)
            for_rows_of_tile(load.map, load.copy.coordinates, put_row);
        else
            for_rows_of_pixels(load.map, load.copy.coordinates, load.copy.offsets, put_row);
        publish(block, load.shared, load.whole);
        Mbarrier& barrier = mbarrier_at(load.thread, block, load.barrier, load.where);
        if (barrier.phase != load.phase[cta])
            fail_format(load.thread, nullptr,
                        "%s at %s:%d: phase %llu of the barrier %s completed before the copy of %u bytes did: "
                        "barrier_expect announced too few",
                        load.where.what, load.where.file, load.where.line, load.phase[cta],
                        describe(barrier.place).text, load.bytes);
        count(load.thread, block, barrier, 0, -(long long)load.bytes, load.where);
    }
    *slot_ = running;
}

// Finishes one load, of those that a thread waits for if there are any.  False if there is none.
inline bool Worker::advance_copies() {
    if (loads_.empty()) return false;
    auto chosen = loads_.begin();
    for (auto load = loads_.begin(); load != loads_.end(); ++load) {
        bool awaited = false;
        for (unsigned cta = 0; cta < blocks_.size(); ++cta)
            if (load->mask >> cta & 1)
                awaited |= mbarrier_at(load->thread, *blocks_[cta], load->barrier, load->where).waiting != 0;
        if (!awaited) continue;
        chosen = load;
        break;
    }
    const Load load = *chosen;
    loads_.erase(chosen);
    finish_load(load);
    return true;
}

inline void Worker::publish(BlockState& block, Place begin, unsigned bytes) {
    if (begin & kVariables) return;
    const unsigned total = block.dynamic_shared_bytes, end = std::min(begin + bytes, total);
    block.view.publish(block.dynamic_shared, begin, end, total);
}

inline void Worker::async_read(Thread* self, const void* shared, unsigned bytes, const Where& where) {
    BlockState& block = state_of(self);
    const Place place = place_of(self, shared, bytes, "the tile", where);
    if (place & kVariables) return;
    if (block.view.unfenced(block.dynamic_shared, place, place + bytes))
        fail_format(self, nullptr,
                    "%s at %s:%d reads shared memory that ordinary stores wrote, without fence_async_shared in between",
                    where.what, where.file, where.line);
    publish(block, place, bytes);
}

inline void Worker::read_store(Store& store) {
    store.data.resize(store.bytes);
    unsigned char* from = static_cast<unsigned char*>(store.copy.shared);
    for (unsigned unit = 0; unit < store.bytes; unit += 16)
        memcpy(&store.data[unit], swizzled(from + unit, store.map.swizzle), 16);
}

inline void Worker::write_store(Store& store) {
    Thread* const running = *slot_;
    *slot_ = store.thread;
    const unsigned char* from = store.data.data();
    if (store.copy.kind == kBulkStore)
        memcpy(store.copy.global, from, store.bytes);
    else
        for_rows_of_tile(store.map, store.copy.coordinates, [&](unsigned char* to, unsigned first, unsigned last) {
            const unsigned size = store.map.element_bytes;
            if (store.copy.kind == kStoreAdd)
                add_elements(store.map, to, from + first * size, last - first);
            else
                memcpy(to, from + first * size, (last - first) * size);
            from += store.map.box[0] * size;
        });
    store.written = true;
    *slot_ = running;
}

inline void Worker::copy_wait(Thread* self, unsigned pending, bool written, const Where& where) {
    require_fibers(self, where);
    const unsigned committed = transfers_[index_of(self)].committed;
    for (Store& store : stores_) {
        if (store.thread != self || store.group + pending >= committed) continue;
        if (store.data.empty()) read_store(store);
        store.waited = true;
        if (written && !store.written) write_store(store);
    }
    const auto done = [](const Store& store) { return store.waited && store.written; };
    stores_.erase(std::remove_if(stores_.begin(), stores_.end(), done), stores_.end());
}

// The thread exits: nothing may read its block's shared memory on its behalf any more.
inline void Worker::end_stores(Thread* self) {
    for (Store& store : stores_) {
        if (store.thread != self) continue;
        if (!store.waited)
            fail_format(self, nullptr, "the thread ends while the %s at %s:%d may still read shared memory: %s must come "
                        "before", store.where.what, store.where.file, store.where.line,
                        store.group < transfers_[index_of(self)].committed ? "tma_wait_read<0>"
                                                                           : "tma_commit and tma_wait_read<0>");
        if (!store.written) write_store(store);
    }
    const auto own = [self](const Store& store) { return store.thread == self; };
    stores_.erase(std::remove_if(stores_.begin(), stores_.end(), own), stores_.end());
}

// The block ends: nothing may be on its way into its shared memory.
inline void Worker::check_copies(const BlockState& block) {
    for (const Load& load : loads_)
        if (load.mask >> block.cluster_rank & 1)
            fail_format(nullptr, nullptr, "the block ends before the copy of %s at %s:%d has arrived", load.where.what,
                        load.where.file, load.where.line);
    for (const Mbarrier& barrier : block.mbarriers)
        if (barrier.bytes)
            fail_format(nullptr, nullptr, "the block ends while the barrier %s, phase %llu, misses %lld bytes",
                        describe(barrier.place).text, barrier.phase, barrier.bytes);
}

}  // namespace fusegraph_cpu

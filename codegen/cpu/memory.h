// Memory with inaccessible pages around it: fiber stacks, pooled over launches, and dynamic shared memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

namespace fusegraph_cpu {

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kStackGuardBytes = 64 << 10;  // wider than a page: a large local array must not step over it

// Every guarded stack costs the kernel two mappings, of which a process may have some 65,000.
constexpr unsigned kMostStacks = 16384;

inline unsigned char* map_memory(size_t bytes, int protection) {
    void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<unsigned char*>(memory);
}

// Stacks outlive launches: their touched pages are what makes the next launch quick.
class StackPool {
   public:
    // Appends `count` stacks (their lowest usable byte) to `stacks`.
    void take(std::vector<unsigned char*>& stacks, size_t count) {
        std::lock_guard<std::mutex> lock(mutex_);
        while (free_.size() < count) {
            unsigned char* memory = map_memory(kStackGuardBytes + kStackBytes, PROT_NONE);
            if (mprotect(memory + kStackGuardBytes, kStackBytes, PROT_READ | PROT_WRITE)) {
                munmap(memory, kStackGuardBytes + kStackBytes);
                throw std::bad_alloc();
            }
            free_.push_back(memory + kStackGuardBytes);
        }
        stacks.insert(stacks.end(), free_.end() - count, free_.end());
        free_.resize(free_.size() - count);
    }

    void give_back(std::vector<unsigned char*>& stacks) {
        std::lock_guard<std::mutex> lock(mutex_);
        free_.insert(free_.end(), stacks.rbegin(), stacks.rend());
        stacks.clear();
    }

    static StackPool& instance() {
        static StackPool* pool = new StackPool;  // never destroyed: a launch may still run while the process exits
        return *pool;
    }

   private:
    std::mutex mutex_;
    std::vector<unsigned char*> free_;
};

// A block's dynamic shared memory: starts at a multiple of 1024, ends (rounded up to that) at an inaccessible page.
// The rounding holds a pattern that is checked after each block.
class DynamicShared {
   public:
    explicit DynamicShared(size_t bytes) : bytes_(bytes) {
        if (!bytes) return;
        const size_t page = sysconf(_SC_PAGESIZE);
        rounded_ = (bytes + 1023) / 1024 * 1024;
        usable_ = (rounded_ + page - 1) / page * page;
        mapped_ = usable_ + 2 * page;
        memory_ = map_memory(mapped_, PROT_NONE);
        if (mprotect(memory_ + page, usable_, PROT_READ | PROT_WRITE)) {
            munmap(memory_, mapped_);
            throw std::bad_alloc();
        }
        begin_ = memory_ + page + usable_ - rounded_;
        guard_ = page;
        for (size_t i = bytes_; i < rounded_; ++i) begin_[i] = kPattern;
    }
    ~DynamicShared() {
        if (memory_) munmap(memory_, mapped_);
    }
    DynamicShared(const DynamicShared&) = delete;
    DynamicShared& operator=(const DynamicShared&) = delete;

    unsigned char* begin() const { return begin_; }

    // Whether accesses are allowed: not to the memory of a block that has ended.
    void allow(bool access) {
        if (memory_) mprotect(memory_ + guard_, usable_, access ? PROT_READ | PROT_WRITE : PROT_NONE);
    }

    // First byte past the end that was written, or 0.
    size_t overrun() const {
        for (size_t i = bytes_; i < rounded_; ++i)
            if (begin_[i] != kPattern) return i;
        return 0;
    }

    bool is_near(const void* address) const {
        const unsigned char* byte = static_cast<const unsigned char*>(address);
        return memory_ && byte >= memory_ && byte < memory_ + mapped_;
    }

   private:
    static constexpr unsigned char kPattern = 0xa5;
    size_t bytes_, rounded_ = 0, usable_ = 0, mapped_ = 0, guard_ = 0;
    unsigned char *memory_ = nullptr, *begin_ = nullptr;
};

// Where a block's shared variables are kept while another block of its cluster runs on the host thread: as far from a
// multiple of a page as the variables themselves, as swizzles look at the bits of addresses.
class SharedImage {
   public:
    SharedImage(const unsigned char* variables, size_t bytes) {
        const size_t page = sysconf(_SC_PAGESIZE);
        const size_t offset = reinterpret_cast<uintptr_t>(variables) % page;
        mapped_ = (offset + bytes + page - 1) / page * page;
        memory_ = map_memory(mapped_, PROT_READ | PROT_WRITE);
        begin_ = memory_ + offset;
    }
    ~SharedImage() { munmap(memory_, mapped_); }
    SharedImage(const SharedImage&) = delete;
    SharedImage& operator=(const SharedImage&) = delete;

    unsigned char* begin() const { return begin_; }
    void allow(bool access) { mprotect(memory_, mapped_, access ? PROT_READ | PROT_WRITE : PROT_NONE); }
    bool holds(const void* address) const {
        const unsigned char* byte = static_cast<const unsigned char*>(address);
        return byte >= memory_ && byte < memory_ + mapped_;
    }

   private:
    size_t mapped_ = 0;
    unsigned char *memory_ = nullptr, *begin_ = nullptr;
};

}  // namespace fusegraph_cpu

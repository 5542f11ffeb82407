// A first-in, first-out queue for device headers: all zero is an empty one, and its memory is the block's.
#pragma once

#include "cuda_on_cpu.h"

namespace fusegraph_cpu {

template <class T>
struct Queue {
    T* items;
    unsigned first, last, capacity;  // they count on; a place is the remainder by the capacity, a power of two

    bool empty() const { return first == last; }
    T& front() { return items[first % capacity]; }
    void pop() { ++first; }

    // A place at the end, which holds what it held when it was last in use, or zeros.
    T& push() {
        if (last - first == capacity) {
            const unsigned grown = capacity ? 2 * capacity : 16;
            T* to = static_cast<T*>(current->block->runtime->block_memory(current, grown * sizeof(T)));
            for (unsigned i = first; i != last; ++i) to[i % grown] = items[i % capacity];
            items = to;
            capacity = grown;
        }
        return items[last++ % capacity];
    }
};

}  // namespace fusegraph_cpu

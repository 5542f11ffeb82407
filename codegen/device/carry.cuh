// The way of results from a tile in shared memory to rows in global memory that begin anywhere.
#pragma once
#include "pipeline.cuh"
#include "unaligned.cuh"

// Writes a word of the first `count` results of a row of a swizzled tile (`store_fragments`) to memory: word number `word`
// from the first multiple of 4 bytes on.  Elements of 1 or 2 bytes before that, and behind the last whole word, go one by
// one.  As many threads as the row has words write all of it.
template <int Columns, class T>
__device__ __forceinline__ void carry_word(T* __restrict__ to, const T* tile, int row, int count, int word) {
    static_assert(sizeof(T) < 4, "larger elements are words");
    constexpr int each = 4 / sizeof(T), words = Columns / each;
    const int head = (each - past_boundary<each>(to)) % each, first = head + word * each;
    union Bits { Vector<T, each> v; uint32 w; } own, next, value;
    own.v = load_results<each, Columns>(tile, row, word * each);
    next.v = load_results<each, Columns>(tile, row, (word + 1) % words * each);
    value.w = funnel_right(own.w, next.w, head * int(sizeof(T)) * 8);
    if (first + each <= count) {
        store(to + first, value.v);
    } else {
#pragma unroll
        for (int i = 0; i < each - 1; ++i)
            if (first + i < count) to[first + i] = value.v[i];
    }
    if (word == 0) {
#pragma unroll
        for (int i = 0; i < each - 1; ++i)
            if (i < head && i < count) to[i] = own.v[i];
    }
}

// The way between a tile in shared memory and rows in global memory that begin anywhere.
#pragma once
#include "pipeline.cuh"
#include "unaligned.cuh"

// Writes the first `count` results of a row of a swizzled tile (`store_fragments`) to memory.  As many lanes as the row has
// pieces of 16 bytes do it together: each 16 aligned bytes of memory, shifted out of two pieces of the tile, and then, one
// by one, elements at both ends.
template <int Columns, class T>
__device__ __forceinline__ void carry_row(T* __restrict__ to, const T* tile, int row, uint32 count, uint32 lane) {
    constexpr uint32 N = 16 / sizeof(T), lanes = Columns / N;
    uint32 head = (N - past_boundary<int(N)>(to)) % N;
    const uint32 first = head + lane * N;
    if (first + N <= count) {
        union { Vector<T, N> v[2]; uint32 w[8]; };
        v[0] = load_results<N, Columns>(tile, row, lane * N);
        v[1] = load_results<N, Columns>(tile, row, (lane + 1) % lanes * N);
        Unaligned<T, N> u;
#pragma unroll
        for (int i = 0; i < 8; ++i) u.words[i] = w[i];
        u.shift = head * uint32(sizeof(T));
        store(to + first, u.elements());
    }
    if (head > count) head = count;
    const uint32 tail = (count - head) % N, rest = head + tail;
#pragma unroll 1
    for (uint32 i = lane; i < rest; i += lanes) {
        const uint32 at = i < head ? i : count - rest + i;
        to[at] = load_results<1, Columns>(tile, row, at)[0];
    }
}

// Brings the first elements of a row, those before `size` of an array from position `at` on, to a row of such a tile: as
// many lanes as the row has pieces of 16 bytes do it together.
template <int Columns, class T, class I>
__device__ __forceinline__ void fetch_row(T* tile, int row, const T* __restrict__ array, I at, I size, int lane) {
    constexpr int N = 16 / sizeof(T);
    const Vector<T, N> v = load_unaligned<N>(array, at + lane * N, size).elements();
    unsigned char* const base = reinterpret_cast<unsigned char*>(tile);
    const int offset = row * Columns * int(sizeof(T)) + lane * 16;
    store_shared(reinterpret_cast<T*>(base + swizzle<Columns * int(sizeof(T))>(offset)), v);
}

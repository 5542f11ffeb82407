// The way between a tile in shared memory and rows in global memory that begin anywhere.
#pragma once
#include "pipeline.cuh"
#include "unaligned.cuh"

// How many elements of a row come before the first 16 aligned bytes of memory.
template <class T>
__device__ __forceinline__ uint32 carried_head(const T* to) {
    constexpr uint32 N = 16 / sizeof(T);
    return (N - past_boundary<int(N)>(to)) % N;
}

// Writes the first `count` results of a row of a swizzled tile (`store_fragments`) to memory, as far as they are whole
// aligned 16 bytes of it, each of which is shifted out of two pieces of the tile.  As many lanes as the row has pieces
// of 16 bytes do it together.
template <int Columns, class T>
__device__ __forceinline__ void carry_row(T* __restrict__ to, const T* tile, int row, uint32 count, uint32 lane) {
    constexpr uint32 N = 16 / sizeof(T), lanes = Columns / N;
    const uint32 head = carried_head(to), first = head + lane * N;
    if (first + N > count) return;
    union { Vector<T, N> v[2]; uint32 w[8]; };
    v[0] = load_results<N, Columns>(tile, row, lane * N);
    v[1] = load_results<N, Columns>(tile, row, (lane + 1) % lanes * N);
    Unaligned<T, N> u;
#pragma unroll
    for (int i = 0; i < 8; ++i) u.words[i] = w[i];
    u.shift = head * uint32(sizeof(T));
    store(to + first, u.elements());
}

// Writes what carry_row leaves at an end of the row (0: the first one, 1: the last one), one by one.
template <int Columns, class T>
__device__ __forceinline__ void carry_end(T* __restrict__ to, const T* tile, int row, uint32 count, uint32 end) {
    constexpr uint32 N = 16 / sizeof(T);
    const uint32 head = min(carried_head(to), count), tail = (count - head) % N;
    const uint32 first = end ? count - tail : 0, rest = end ? tail : head;
    T values[N - 1];
#pragma unroll
    for (uint32 e = 0; e < N - 1; ++e)
        if (e < rest) values[e] = load_results<1, Columns>(tile, row, first + e)[0];
#pragma unroll
    for (uint32 e = 0; e < N - 1; ++e)
        if (e < rest) to[first + e] = values[e];
}

// Brings the first elements of a row, those before `size` of an array from position `at` on, to a row of such a tile:
// as many lanes as the row has pieces of 16 bytes do it together.
template <int Columns, class T, class I>
__device__ __forceinline__ void fetch_row(T* tile, int row, const T* array, I at, I size, int lane) {
    constexpr int N = 16 / sizeof(T);
    const Vector<T, N> v = load_unaligned<N>(array, at + lane * N, size).elements();
    unsigned char* const base = reinterpret_cast<unsigned char*>(tile);
    const int offset = row * Columns * int(sizeof(T)) + lane * 16;
    store_shared(reinterpret_cast<T*>(base + swizzle<Columns * int(sizeof(T))>(offset)), v);
}

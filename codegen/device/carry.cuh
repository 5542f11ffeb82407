// The way of results from a tile in shared memory to rows in global memory that begin anywhere.
#pragma once
#include "pipeline.cuh"
#include "unaligned.cuh"

// N elements of a row of a swizzled tile (`store_fragments`) from any column on: the 16-byte pieces they lie in.
template <int N, int Columns, class T>
__device__ __forceinline__ Unaligned<T, N> load_results_unaligned(const T* tile, int row, int column) {
    static_assert(sizeof(T) * N == 16, "one piece, or two neighbours");
    const int first = column / N * N, second = column % N ? first + N : first;
    union { Vector<T, N> v[2]; uint32 w[8]; };
    v[0] = load_results<N, Columns>(tile, row, first);
    v[1] = load_results<N, Columns>(tile, row, second);
    Unaligned<T, N> u;
#pragma unroll
    for (int i = 0; i < 8; ++i) u.words[i] = w[i];
    u.shift = column % N * uint32(sizeof(T));
    return u;
}

// Writes `count` neighbours of a row of such a tile, from `column` on, to memory.  Lanes 0, 1, ... (as many as the row has
// pieces of 16 bytes) do it together: 16 aligned bytes each, then, one by one, what is left at both ends.
template <int Columns, class T>
__device__ __forceinline__ void carry_row(T* __restrict__ to, const T* tile, int row, int column, int count, int lane) {
    constexpr int N = 16 / sizeof(T), lanes = Columns / N;
    int head = (N - int(past_boundary<N>(to))) % N;
    if (head > count) head = count;
    const int tail = (count - head) % N;
    if (head + lane * N <= count - N) {
        const int at = head + lane * N;
        store(to + at, load_results_unaligned<N, Columns>(tile, row, column + at).elements());
    }
#pragma unroll 1
    for (int i = lane; i < head + tail; i += lanes) {
        const int at = i < head ? i : count - tail + i - head;
        to[at] = load_results<1, Columns>(tile, row, column + at)[0];
    }
}

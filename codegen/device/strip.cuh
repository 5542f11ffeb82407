// Parts of image rows in registers: N neighbouring elements with a few to the left and right of them.
#pragma once
#include "memory.cuh"

template <class T, int L, int N, int R>
struct Strip {
    T left[L ? L : 1];
    Vector<T, N> middle;
    T right[R ? R : 1];

    // Element i of L + N + R, from the left; i is a constant once loops are unrolled.
    __device__ __forceinline__ T operator[](int i) const {
        return i < L ? left[i < L ? i : 0] : i < L + N ? middle[i < L ? 0 : i < L + N ? i - L : 0] : right[i < L + N ? 0 : i - L - N];
    }
};

// The strip whose middle starts at column `col` (a multiple of N) of a row of `width` elements (a multiple of N as well);
// what lies outside the row is zero.
template <int L, int N, int R, class T, class Index>
__device__ __forceinline__ Strip<T, L, N, R> load_strip(const T* __restrict__ row, Index col, Index width) {
    Strip<T, L, N, R> strip = {};
    if (col < width) strip.middle = load<N>(row + col);
#pragma unroll
    for (int i = 0; i < L; ++i)
        if (col + i >= L && col + i < width + L) strip.left[i] = row[col + i - L];
#pragma unroll
    for (int i = 0; i < R; ++i)
        if (col + N + i < width) strip.right[i] = row[col + N + i];
    return strip;
}

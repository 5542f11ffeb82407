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
        if (i < L) return left[i < L ? i : 0];
        if (i < L + N) return middle[i < L || i >= L + N ? 0 : i - L];
        return right[i < L + N ? 0 : i - L - N];
    }
};

// One row of a plane's strip.  Its middle starts at column `col`, a multiple of N, as is the plane's width; what lies outside
// the plane is zero.  Reads without branches, from inside the plane, so that the loads of many rows are in flight together.
template <int L, int N, int R, class T, class Index>
__device__ __forceinline__ Strip<T, L, N, R> load_strip(
    const T* __restrict__ plane, Index pitch, Index row, Index height, Index col, Index width) {
    const bool inside = row >= 0 && row < height;
    const T* from = plane + (inside ? row : 0) * pitch;
    Strip<T, L, N, R> strip;
    const bool whole = inside && col < width;
    strip.middle = kept(load<N>(from + (whole ? col : 0)), whole);
#pragma unroll
    for (int i = 0; i < L; ++i) {
        const bool there = inside && col + i >= L && col + i < width + L;
        strip.left[i] = kept(from[there ? col + i - L : 0], there);
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const bool there = inside && col + N + i < width;
        strip.right[i] = kept(from[there ? col + N + i : 0], there);
    }
    return strip;
}

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

// N elements if they are there, else zeros: one load without a branch.  It is no `ld.global.nc`: ptxas would move such
// a load to its first use, behind the stores of other rows; these all come before the first store, and are in flight
// together.
#ifdef FUSEGRAPH_CPU

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_if(bool there, const T* from) {
    return there ? load<N>(from) : Vector<T, N>{};
}

#else

__device__ __forceinline__ void load_word(unsigned char& word, bool there, const void* from) {
    unsigned short wide = 0;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; @p ld.global.u8 %0, [%2]; }" : "+h"(wide) : "r"(int(there)), "l"(from));
    word = static_cast<unsigned char>(wide);
}
__device__ __forceinline__ void load_word(unsigned short& word, bool there, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; @p ld.global.u16 %0, [%2]; }"
        : "+h"(word) : "r"(int(there)), "l"(from));
}
__device__ __forceinline__ void load_word(unsigned int& word, bool there, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; @p ld.global.u32 %0, [%2]; }"
        : "+r"(word) : "r"(int(there)), "l"(from));
}
__device__ __forceinline__ void load_word(uint2& word, bool there, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.v2.u32 {%0, %1}, [%3]; }"
        : "+r"(word.x), "+r"(word.y) : "r"(int(there)), "l"(from));
}
__device__ __forceinline__ void load_word(uint4& word, bool there, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%5]; }"
        : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w) : "r"(int(there)), "l"(from));
}

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_if(bool there, const T* from) {
    typedef typename Word<sizeof(T) * N>::type word;
    static_assert(sizeof(word) == sizeof(T) * N, "one word");
    union { Vector<T, N> v; word w; };
    w = word{};
    load_word(w, there, from);
    return v;
}

#endif

// The strip of one row whose middle starts at `from`: column `col` of `width`, a multiple of N as the width is.  What
// lies outside the row, or in a row that does not exist, is zero and not read.
template <int L, int N, int R, class T, class Index>
__device__ __forceinline__ Strip<T, L, N, R> load_strip(bool exists, const T* from, Index col, Index width) {
    Strip<T, L, N, R> strip;
    strip.middle = load_if<N>(exists && col < width, from);
#pragma unroll
    for (int i = 0; i < L; ++i)
        strip.left[i] = load_if<1>(exists && col + i >= L && col + i < width + L, from + (i - L))[0];
#pragma unroll
    for (int i = 0; i < R; ++i) strip.right[i] = load_if<1>(exists && col + N + i < width, from + (N + i))[0];
    return strip;
}

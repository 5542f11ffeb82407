// Fragments of a warp for mma in the forms in which kernels hold them.
#pragma once
#include "memory.cuh"
#include "mma.cuh"

// Two fragments of B side by side: 16 columns of 32 bytes.
__device__ __forceinline__ void load_matrices(uint32 (&r)[2][2], const void* row) {
    uint32 both[4];
    load_matrices(both, row);
    r[0][0] = both[0], r[0][1] = both[1], r[1][0] = both[2], r[1][1] = both[3];
}
__device__ __forceinline__ void load_matrices_transposed(uint32 (&r)[2][2], const void* row) {
    uint32 both[4];
    load_matrices_transposed(both, row);
    r[0][0] = both[0], r[0][1] = both[1], r[1][0] = both[2], r[1][1] = both[3];
}

// Fragments of rows of A (of columns of B) whose terms lie in chunks of 8 bytes, anywhere in shared memory: each lane
// gives the addresses of its own ones.  What is chunk c of a row of A must be chunk c of B's columns.
__device__ __forceinline__ void load_chunks(uint32 (&a)[4], const void* upper, const void* lower) {
    const auto x = load_shared<2>(static_cast<const uint32*>(upper));
    const auto y = load_shared<2>(static_cast<const uint32*>(lower));
    a[0] = x[0], a[1] = y[0], a[2] = x[1], a[3] = y[1];
}
__device__ __forceinline__ void load_chunks(uint32 (&b)[2], const void* column) {
    const auto x = load_shared<2>(static_cast<const uint32*>(column));
    b[0] = x[0], b[1] = x[1];
}

// Fragments of A, or two of B side by side, of 32-bit elements that lie across the sum: each term has a row of 128 bytes
// of `tile`, swizzled.  Lane l gives the place of term l % 4 * 2 of the fragment's line l / 4; what mma takes for terms t
// and t + 4 are terms 2 t and 2 t + 1, in A as in B, so that the lanes of a warp read different banks.
__device__ __forceinline__ uint32 load_word(const unsigned char* tile, int lane, int lower, int odd) {
    return *reinterpret_cast<const uint32*>(tile + (lane ^ (lower * 32 + odd * 16)) + odd * 128);
}
__device__ __forceinline__ void load_words(uint32 (&a)[4], const unsigned char* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = load_word(tile, lane, i % 2, i / 2);
}
__device__ __forceinline__ void load_words(uint32 (&b)[2][2], const unsigned char* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = load_word(tile, lane, i / 2, i % 2);
}

// The same number, of which the compiler does not know that: what follows from it is computed again, and not kept.
__device__ __forceinline__ int anew(int x) {
#ifndef FUSEGRAPH_CPU
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// A fragment of rows of A whose terms lie in words anywhere in shared memory: each lane gives where two rows begin, and
// how many bytes from there on its first and its second word lie.
__device__ __forceinline__ void load_words(uint32 (&a)[4], const unsigned char* upper, const unsigned char* lower,
                                           const Vector<int, 2>& reach) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        a[2 * i] = *reinterpret_cast<const uint32*>(upper + reach[i]);
        a[2 * i + 1] = *reinterpret_cast<const uint32*>(lower + reach[i]);
    }
}
// Keeps some bits of these words; the others become zero.
__device__ __forceinline__ void keep_bits(uint32 (&a)[4], const Vector<uint32, 2>& kept) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] &= kept[i / 2];
}

// Rounds a fragment of floats to tf32.
__device__ __forceinline__ void round_to_tf32(uint32 (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = to_tf32(bits_float(r[i]));
}
__device__ __forceinline__ void round_to_tf32(uint32 (&r)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) r[i] = to_tf32(bits_float(r[i]));
}
__device__ __forceinline__ void round_to_tf32(uint32 (&r)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i / 2][i % 2] = to_tf32(bits_float(r[i / 2][i % 2]));
}

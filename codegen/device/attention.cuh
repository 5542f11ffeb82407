// The softmax of attention, one tile of keys after the other, on scores as mma and wgmma leave them.
//
// A thread has scores of two rows, lane / 4 and eight below: score[4 * j + 2 * f + e] is that of row f and of key
// 8 * j + 2 * (lane % 4) + e of the tile.  The four lanes of a row have the same largest score, and each a share of the
// sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
#pragma once
#include "extent.cuh"
#include "math.cuh"
#include "mma.cuh"
#include "reduce.cuh"

namespace attention {

// What is known of a thread's two rows after some tiles: the largest score, and of the sum of 2^(unit * (score -
// largest)) the thread's share.
struct Rows {
    float largest[2] = {-infinity<float>(), -infinity<float>()};
    float total[2] = {};
};

// A tile of queries, by its number, and how many tiles of keys it may meet, from which key on.
struct Span {
    int work, base, tiles;
};

// Two floats in the 16-bit type T, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32 pair(float first, float second);
#ifdef FUSEGRAPH_CPU
template <class T>
__device__ __forceinline__ uint32 pair(float first, float second) {
    const T both[2] = {convert<T>(first), convert<T>(second)};
    uint32 word;
    __builtin_memcpy(&word, both, 4);
    return word;
}
#else
template <>
__device__ __forceinline__ uint32 pair<bfloat16>(float first, float second) {
    uint32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
template <>
__device__ __forceinline__ uint32 pair<float16>(float first, float second) {
    uint32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
#endif

// Updates the largest score of each row with those of a tile.  Gives the shift, which is subtracted from scores before
// they become exponentials, and the factor by which earlier sums are to be multiplied (rescale).  As there are few
// warps to switch between, maxima are computed in Chains that do not wait for each other.  Masks in memory are often the
// least float, which overflows in other units: if scores may be so Low, and a row has no larger one, the largest is
// subtracted from them here.
template <int Chains, bool Low = false, int N>
__device__ __forceinline__ void largest(float (&score)[N], Rows& rows, float unit, float (&shift)[2],
                                        float (&rescale)[2]) {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
        float most[Chains];
#pragma unroll
        for (int c = 0; c < Chains; ++c) most[c] = rows.largest[f];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) most[i % Chains] = fmaxf(most[i % Chains], score[i / 2 * 4 + 2 * f + i % 2]);
#pragma unroll
        for (int c = 1; c < Chains; ++c) most[0] = fmaxf(most[0], most[c]);
        float found = fmaxf(most[0], __shfl_xor_sync(0xffffffffu, most[0], 1));
        found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 2));
        shift[f] = found == -infinity<float>() ? 0.0f : unit * found;
        rescale[f] = math::fast_exp2(unit * rows.largest[f] - shift[f]);
        if (Low && shift[f] == -infinity<float>()) {
            shift[f] = 0.0f;
            rescale[f] = math::fast_exp2(unit * (rows.largest[f] - found));
#pragma unroll
            for (int i = 0; i < N / 2; ++i) score[i / 2 * 4 + 2 * f + i % 2] -= found;
        }
        rows.largest[f] = found;
    }
}

// Replaces the scores of a tile by their exponentials, and adds these to the sums of their rows, in Chains as well.  If
// T has 16 bits, they are rounded to it first: T is then the type in which they are multiplied, so that a row is
// divided by the sum of the very factors of its values, and these weights add up to one.
template <int Chains, class T = float, int N>
__device__ __forceinline__ void exponentials(float (&score)[N], Rows& rows, float unit, const float (&shift)[2],
                                             const float (&rescale)[2], float lift = 0.0f) {
    constexpr bool rounds = sizeof(T) == 2;
    float sum[2][Chains] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int f = i / 2 % 2;
        score[i] = math::fast_exp2(unit * score[i] - (shift[f] - lift));
        if constexpr (!rounds) sum[f][(i / 4 * 2 + i % 2) % Chains] += score[i];
    }
    if constexpr (rounds) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const uint32 word = pair<T>(score[i], score[i + 1]);
            const T* both = reinterpret_cast<const T*>(&word);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                score[i + e] = convert<float>(both[e]);
                sum[i / 2 % 2][(i / 4 * 2 + e) % Chains] += score[i + e];
            }
        }
    }
#pragma unroll
    for (int f = 0; f < 2; ++f) {
#pragma unroll
        for (int c = 1; c < Chains; ++c) sum[f][0] += sum[f][c];
        rows.total[f] = rows.total[f] * rescale[f] + sum[f][0];
    }
}

// Replaces the scores of a tile by 2^(unit * (score - largest)), and updates the largest scores and the sums of their
// rows; earlier results are to be multiplied by rescale.  A row of nothing but minus infinity has minus infinity as its
// largest score and the sum 0; any other row has a sum of at least 1, or NaN if there is NaN or infinity among its
// scores.  All exponentials, and their sums, are 2^lift times as large.
template <int Chains, class T = float, bool Low = false, int N>
__device__ __forceinline__ void softmax(float (&score)[N], Rows& rows, float unit, float (&rescale)[2],
                                        float lift = 0.0f) {
    float shift[2];
    largest<Chains, Low>(score, rows, unit, shift, rescale);
    exponentials<Chains, T>(score, rows, unit, shift, rescale, lift);
}

// Makes exponentials operand A of the products with the values: words[i] is the fragment of the 16 keys from 16 * i on.
template <class T, int N>
__device__ __forceinline__ void round_to_fragments(const float (&score)[N], uint32 (&words)[N / 8][4]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words[i / 4][i % 4] = pair<T>(score[2 * i], score[2 * i + 1]);
}

// Four floats in the 8-bit type T, the first in the lowest byte; infinity saturates.
template <class T>
__device__ __forceinline__ uint32 four(float a, float b, float c, float d) {
    const T every[4] = {convert<T>(saturating<T>(a)), convert<T>(saturating<T>(b)), convert<T>(saturating<T>(c)),
                        convert<T>(saturating<T>(d))};
    return uint32(every[0].bits) | uint32(every[1].bits) << 8 | uint32(every[2].bits) << 16 | uint32(every[3].bits) << 24;
}
#if !defined(FUSEGRAPH_CPU) && __CUDA_ARCH__ >= 890
#define FUSEGRAPH_FOUR(T, NAME)                                                       \
    template <>                                                                       \
    __device__ __forceinline__ uint32 four<T>(float a, float b, float c, float d) {   \
        uint16 low, high;                                                             \
        asm("cvt.rn.satfinite." NAME "x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));  \
        asm("cvt.rn.satfinite." NAME "x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c)); \
        return uint32(low) | uint32(high) << 16;                                      \
    }
FUSEGRAPH_FOUR(float8_e4m3, "e4m3")
FUSEGRAPH_FOUR(float8_e5m2, "e5m2")
#undef FUSEGRAPH_FOUR
#endif

// The same of 8-bit floats, words[i] being that of keys 32 * i to 32 * i + 31.  A lane needs four neighbouring keys.
// It has them where the keys of a tile lie in quads: of each four, two are in the first half of the tile and two in the
// second.
template <class T, int N>
__device__ __forceinline__ void round_quads_to_fragments(const float (&score)[N], uint32 (&words)[N / 16][4]) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        const float* s = &score[i / 2 * 4 + i % 2 * 2];
        words[i / 4][i % 4] = four<T>(s[0], s[1], s[N / 2], s[N / 2 + 1]);
    }
}
// Where keys lie in their order, two lanes have two of them each.
template <class T, int N>
__device__ __forceinline__ void round_to_fragments(const float (&score)[N], uint32 (&words)[N / 16][4]) {
    const int lane = threadIdx.x % 32, from = lane / 4 * 4 + lane % 2 * 2;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        const float* s = &score[i / 2 * 8 + i % 2 * 2];  // of 16 keys of a row
        const uint32 own = four<T>(s[0], s[1], s[4], s[5]);  // keys 2 * (lane % 4) and the next, and those 8 behind
        const uint32 first = __shfl_sync(0xffffffffu, own, from), second = __shfl_sync(0xffffffffu, own, from + 1);
        words[i / 4][i % 4] = lane % 4 < 2 ? first & 0xffffu | second << 16 : first >> 16 | second & 0xffff0000u;
    }
}

// Four neighbouring sums, those of a fragment of mma.
template <int N>
__device__ __forceinline__ float (&part(float (&sum)[N], int first))[4] {
    return *reinterpret_cast<float(*)[4]>(&sum[first]);
}

// Writes sums to a tile of rows of 32 floats, swizzled by 128 bytes, turned: a column of the sums is a row of the tile,
// from `row`, the place of the thread's first row of the sums, on.
template <int N>
__device__ __forceinline__ void store_turned(float* tile, int row, const float (&sum)[N]) {
    const int column = threadIdx.x % 4 * 2;
    int first = column * 32 + (row ^ column * 4);
#ifndef FUSEGRAPH_CPU
    asm volatile("" : "+r"(first));  // the places are not kept in registers from one time to the next
#endif
#pragma unroll
    for (int i = 0; i < N; ++i) tile[(first ^ (i / 2 % 2 * 8 + i % 2 * 36)) + i / 4 * 256] = sum[i];
}

// Multiplies the sums of two rows.
template <int N>
__device__ __forceinline__ void scale(float (&sum)[N], const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] *= by[i / 2 % 2];
}

// Returns what is subtracted from scores before they become exponentials: the logarithm of a sum.  If that sum is 0, it
// is infinity, so that all exponentials are 0.
template <class T>
__device__ __forceinline__ T lse(T log_sum) {
    return log_sum == -infinity<T>() ? infinity<T>() : log_sum;
}

// Sets the sums of row f to zero.
template <int N>
__device__ __forceinline__ void clear(float (&sum)[N], int f) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i / 2 % 2 == f) sum[i] = 0;
}

// sum = sum * by + part, by being that of each of two rows.
template <int N>
__device__ __forceinline__ void add(float (&sum)[N], const float (&by)[2], const float (&part)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = math::fma(sum[i], by[i / 2 % 2], part[i]);
}

// Adds up the shares of the sums.
__device__ __forceinline__ void finish(Rows& rows) {
#pragma unroll
    for (int f = 0; f < 2; ++f) rows.total[f] = reduce::lanes<reduce::Add, 4>(rows.total[f]);
}

}  // namespace attention

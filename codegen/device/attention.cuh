// The softmax of attention, one tile of keys after the other, on scores as mma and wgmma leave them.
//
// A thread has scores of two rows, lane / 4 and eight below: score[4 * j + 2 * f + e] is that of row f and of key
// 8 * j + 2 * (lane % 4) + e of the tile.  The four lanes of a row have the same largest score, and each a share of the
// sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
#pragma once
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

// Takes a tile's scores, which become 2^(unit * (score - largest)), in.  What was summed up before is to be multiplied by
// rescale.  As long as a score is not more than 2^Slack times the largest, in terms of the exponentials, that remains what
// it is, and rescale 1.  A row of nothing but minus infinity has the largest score minus infinity and the sum 0; NaN and
// infinity make the sum NaN.
template <int Slack, int N>
__device__ __forceinline__ void softmax(float (&score)[N], Rows& rows, float unit, float (&rescale)[2]) {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
        const float before = rows.largest[f];
        float most = before;
#pragma unroll
        for (int j = 0; j < N; j += 4) most = fmaxf(most, fmaxf(score[j + 2 * f], score[j + 2 * f + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        if (Slack > 0 && unit * (most - before) <= float(Slack)) most = before;
        const float shift = most == -infinity<float>() ? 0.0f : unit * most;
        rescale[f] = math::fast_exp2(unit * before - shift);
        rows.largest[f] = most;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j += 4) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& s = score[j + 2 * f + e];
                s = math::fast_exp2(unit * s - shift);
                sum += s;
            }
        }
        rows.total[f] = rows.total[f] * rescale[f] + sum;
    }
}

// Exponentials as the first factor of the products with the values: words[i] is the fragment of keys 16 * i to 16 * i +
// 15.
template <class T, int N>
__device__ __forceinline__ void round_to_fragments(const float (&score)[N], uint32 (&words)[N / 8][4]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words[i / 4][i % 4] = pair<T>(score[2 * i], score[2 * i + 1]);
}

// Four neighbouring sums, those of a fragment of mma.
template <int N>
__device__ __forceinline__ float (&part(float (&sum)[N], int first))[4] {
    return *reinterpret_cast<float(*)[4]>(&sum[first]);
}

// Multiplies the sums of two rows, where one of the warp's has a factor other than 1.
template <int N>
__device__ __forceinline__ void scale(float (&sum)[N], const float (&by)[2]) {
    if (!__any_sync(0xffffffffu, by[0] != 1.0f || by[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] *= by[i / 2 % 2];
}

// Adds up the shares of the sums.
__device__ __forceinline__ void finish(Rows& rows) {
#pragma unroll
    for (int f = 0; f < 2; ++f) rows.total[f] = reduce::lanes<reduce::Add, 4>(rows.total[f]);
}

}  // namespace attention

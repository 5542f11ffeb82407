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

// 2^x for x of at most 0 by multiply-adds alone, which the unit for 2^x leaves idle; of the relative error 2^-13, with
// Degree 4 2^-18.  2^-126 is the least result.  Of NaN it makes a number.
template <int Degree>
__device__ __forceinline__ float exp2_of_polynomial(float x) {
    const float limited = fmaxf(x, -126.0f);
    const float moved = limited + 12582912.0f;  // 1.5 * 2^23: the lower bits are the nearest integer
    const float rest = limited - (moved - 12582912.0f);
    float y = Degree == 3 ? 0.0551716685f : 0.00957010220f * rest + 0.0559178628f;
    y = y * rest + (Degree == 3 ? 0.242611125f : 0.240247443f);
    y = y * rest + (Degree == 3 ? 0.693260968f : 0.693121791f);
    y = y * rest + (Degree == 3 ? 0.999928057f : 0.999999285f);
    return bits_float(float_bits(y) + (float_bits(moved) << 23));
}

// Takes a tile's scores, which become 2^(unit * (score - largest)), in.  Returns whether what was summed up before is to
// be multiplied by rescale: as long as no score of the warp is more than 2^Slack times the largest, in terms of the
// exponentials, that remains what it is.  Of four exponentials of neighbouring columns Polynomial are polynomials of a
// Degree.  A row of nothing but minus infinity has the largest score minus infinity; NaN and infinity make the sum NaN.
template <int Slack, int Polynomial, int Degree, int N>
__device__ __forceinline__ bool softmax(float (&score)[N], Rows& rows, float unit, float (&rescale)[2]) {
    float largest[2];
    bool grows = false;
#pragma unroll
    for (int f = 0; f < 2; ++f) {
        float most = rows.largest[f];
#pragma unroll
        for (int j = 0; j < N; j += 4) most = math::maximum(most, math::maximum(score[j + 2 * f], score[j + 2 * f + 1]));
        most = math::maximum(most, __shfl_xor_sync(0xffffffffu, most, 1));
        largest[f] = math::maximum(most, __shfl_xor_sync(0xffffffffu, most, 2));
        grows = grows || !(unit * (largest[f] - rows.largest[f]) <= float(Slack));
    }
    grows = __any_sync(0xffffffffu, grows);
    if (grows) {
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            rescale[f] = largest[f] == rows.largest[f] ? 1.0f : math::fast_exp2(unit * (rows.largest[f] - largest[f]));
            rows.total[f] *= rescale[f];
            rows.largest[f] = largest[f];
        }
    }
#pragma unroll
    for (int f = 0; f < 2; ++f) {
        const float most = rows.largest[f];
        const float shift = most == -infinity<float>() ? 0.0f : most == infinity<float>() ? quiet_nan<float>() : unit * most;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j += 4) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& s = score[j + 2 * f + e];
                const float x = unit * s - shift;
                s = j / 4 % 4 < Polynomial ? exp2_of_polynomial<Degree>(x) : math::fast_exp2(x);
                sum += s;
            }
        }
        rows.total[f] += sum;
    }
    return grows;
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

// Multiplies the sums of two rows.
template <int N>
__device__ __forceinline__ void scale(float (&sum)[N], const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] *= by[i / 2 % 2];
}

// Adds up the shares of the sums.
__device__ __forceinline__ void finish(Rows& rows) {
#pragma unroll
    for (int f = 0; f < 2; ++f) rows.total[f] = reduce::lanes<reduce::Add, 4>(rows.total[f]);
}

}  // namespace attention

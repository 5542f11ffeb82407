// float as the sum of three bfloat16 parts, for products on tensor cores.
//
// The first part has the upper 8 significant bits, cut off so that it cannot overflow, the second the next 8, rounded
// to nearest, the third what is left, exactly.  Below 2^-110 the third loses what is under 2^-133, the least bfloat16.
// From 2^17 on the second part is cut off, too: then all have one sign, and products of parts that overflow, too.
// What is not finite becomes +-1, 0 and itself: of the products that are made, of parts i and j with i + j <= 2, each
// factor of an infinity then is the first part of the other operand, or, of another infinity, its sign.
#pragma once
#include "memory.cuh"

#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ uint32 bfloat16_pair(float low, float high) {
    return convert<bfloat16>(low).bits | uint32(convert<bfloat16>(high).bits) << 16;
}
__device__ __forceinline__ uint32 upper_halves(float low, float high) {
    return float_bits(low) >> 16 | (float_bits(high) & 0xffff0000u);
}
#else
// Two floats rounded to bfloat16.
__device__ __forceinline__ uint32 bfloat16_pair(float low, float high) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// The same, cut off.
__device__ __forceinline__ uint32 upper_halves(float low, float high) {
    return __byte_perm(float_bits(low), float_bits(high), 0x7632);
}
#endif

// The upper half of a float's bits, as a float.
__device__ __forceinline__ float cut_off(float x) { return bits_float(float_bits(x) & 0xffff0000u); }

// The sum of magnitudes: below 2^17 elements can be split by rounding.
template <int N>
__device__ __forceinline__ float magnitude(const Vector<float, N>& x) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < N; e += 2) sum += abs(x[e]) + abs(x[e + 1]);
    return sum;
}

template <int N>
__device__ __forceinline__ void split_rounded(const Vector<float, N>& x, Vector<bfloat16, N> (&parts)[3]) {
    static_assert(N % 2 == 0, "pairs");
    union { Vector<bfloat16, N> v; uint32 words[N / 2]; } made[3];
#pragma unroll
    for (int e = 0; e < N; e += 2) {
        made[0].words[e / 2] = upper_halves(x[e], x[e + 1]);
        const float low = x[e] - cut_off(x[e]), high = x[e + 1] - cut_off(x[e + 1]);
        const uint32 pair = bfloat16_pair(low, high);
        made[1].words[e / 2] = pair;
        made[2].words[e / 2] = upper_halves(low - bits_float(pair << 16), high - bits_float(pair & 0xffff0000u));
    }
#pragma unroll
    for (int part = 0; part < 3; ++part) parts[part] = made[part].v;
}

template <int N>
__device__ __forceinline__ void split_cut_off(const Vector<float, N>& x, Vector<bfloat16, N> (&parts)[3]) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
        const bool finite = abs(x[e]) < infinity<float>();
        const float first = finite ? cut_off(x[e]) : x[e] < 0 ? -1.0f : 1.0f;
        const float second = finite ? cut_off(x[e] - first) : 0.0f;
        const float third = finite ? x[e] - first - second : x[e] == x[e] ? x[e] : quiet_nan<float>();
        parts[0][e].bits = uint16(float_bits(first) >> 16);
        parts[1][e].bits = uint16(float_bits(second) >> 16);
        parts[2][e].bits = uint16(float_bits(third) >> 16);
    }
}

template <int N>
__device__ __forceinline__ void split(const Vector<float, N>& x, Vector<bfloat16, N> (&parts)[3]) {
    if (magnitude(x) < 0x1p17f) return split_rounded(x, parts);
    split_cut_off(x, parts);
}

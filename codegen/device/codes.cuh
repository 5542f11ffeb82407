// Pairs of 16-bit floats from codes of 8 and 4 bits: integers lie in the mantissa of a power of two, which is subtracted;
// so do the bits of short floats, in a float too small by a power of two.
//
// C::pair<T>(word, r) is elements 2 r and 2 r + 1 of a word of four bytes.  Of 4 bits, the lower half of a byte comes
// first.
#pragma once
#include "memory.cuh"
#include "packed.cuh"

// Bytes 2 r and 2 r + 1, each in the lower half of 16 bits; halves of byte r likewise.
__device__ __forceinline__ uint32 two_bytes(uint32 word, int r) {
#ifdef FUSEGRAPH_CPU
    return (word >> 16 * r & 0xffu) | (word >> (16 * r + 8) & 0xffu) << 16;
#else
    return __byte_perm(word, 0, r ? 0x4342 : 0x4140);
#endif
}
__device__ __forceinline__ uint32 two_halves(uint32 word, int r) {
    const uint32 byte = word >> 8 * r;
    return (byte & 0xfu) | (byte << 12 & 0xf0000u);
}

// Powers of two whose mantissa has room for 7 or 10 bits; short floats are multiplied by the other one.
template <class T>
struct Room;
template <>
struct Room<bfloat16> {
    static constexpr uint32 one = 0x43004300u, shift = 6, scale = 0x7e807e80u;
};
template <>
struct Room<float16> {
    static constexpr uint32 one = 0x64006400u, shift = 9, scale = 0x74007400u;
};

struct Int8Codes {
    static constexpr int each = 1;
    template <class T>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) {
        const uint32 bytes = two_bytes(word, r), one = Room<T>::one;
        if constexpr (Room<T>::shift > 7) return Pair<T>((bytes ^ 0x00800080u) | one) - Pair<T>(one + 0x00800080u);
        // 128 + x % 128, minus 128 or, where the sign is set, 256.
        return Pair<T>((bytes & 0x007f007fu) | one) - Pair<T>((bytes & 0x00800080u) | one);
    }
};
struct Uint8Codes {
    static constexpr int each = 1;
    template <class T>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) {
        const uint32 bytes = two_bytes(word, r), one = Room<T>::one;
        if constexpr (Room<T>::shift > 7) return Pair<T>(bytes | one) - Pair<T>(one);
        return Pair<T>((bytes & 0x007f007fu) | one) - Pair<T>((~bytes & 0x00800080u) | one) + Pair<T>(one);
    }
};
struct Uint4Codes {
    static constexpr int each = 2;
    template <class T>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) {
        return Pair<T>(two_halves(word, r) | Room<T>::one) - Pair<T>(Room<T>::one);
    }
};
struct Int4Codes {
    static constexpr int each = 2;
    template <class T>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) {
        return Pair<T>((two_halves(word, r) ^ 0x00080008u) | Room<T>::one) - Pair<T>(Room<T>::one + 0x00080008u);
    }
};
struct Float4Codes {
    static constexpr int each = 2;
    template <class T>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) {
        const uint32 halves = two_halves(word, r);
        const uint32 bits = (halves & 0x00070007u) << Room<T>::shift | (halves & 0x00080008u) << 12;
        return Pair<T>(bits) * Pair<T>(Room<T>::scale);
    }
};
// Two 8-bit floats as 16-bit ones.
template <class T, class F>
__device__ __forceinline__ uint32 two_floats(uint32 word, int r) {
    return convert<T>(F{uint8(word >> 16 * r)}).bits | uint32(convert<T>(F{uint8(word >> (16 * r + 8))}).bits) << 16;
}
#ifndef FUSEGRAPH_CPU
// Two float16 as bfloat16.
__device__ __forceinline__ uint32 as_bfloat16(uint32 halves) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(pair) : "f"(widen(float16{uint16(halves >> 16)})), "f"(widen(float16{uint16(halves)})));
    return pair;
}
template <>
__device__ __forceinline__ uint32 two_floats<bfloat16, float8_e5m2>(uint32 word, int r) {
    return as_bfloat16(two_bytes(word, r) << 8);
}
#if __CUDA_ARCH__ >= 890
template <>
__device__ __forceinline__ uint32 two_floats<bfloat16, float8_e4m3>(uint32 word, int r) {
    uint32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16(word >> 16 * r)));
    return as_bfloat16(halves);
}
template <>
__device__ __forceinline__ uint32 two_floats<float16, float8_e4m3>(uint32 word, int r) {
    uint32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16(word >> 16 * r)));
    return halves;
}
#endif
#endif

template <class F>
struct Float8Codes {
    static constexpr int each = 1;
    template <class T>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) { return Pair<T>(two_floats<T, F>(word, r)); }
};

// All elements of a vector of bytes.
template <class T, class C, class B, int N>
__device__ __forceinline__ Vector<Pair<T>, N * C::each / 2> decoded(const Packed<B, N>& bytes) {
    static_assert(N % 4 == 0, "words");
    Vector<Pair<T>, N * C::each / 2> pairs;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
#pragma unroll
        for (int r = 0; r < 2 * C::each; ++r) pairs[2 * C::each * i + r] = C::template pair<T>(bytes.words[i], r);
    return pairs;
}

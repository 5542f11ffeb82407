// Pairs of 16-bit floats from codes of 8 and 4 bits: integers lie in the mantissa of a power of two, which is subtracted;
// so do the bits of short floats, in a float too small by a power of two.
//
// C::pair<T, OFFSET>(word, r) is two elements of a word of four bytes, plus an integer of at most 120 either way.  Of 4
// bits, the lower half of a byte comes first.  The elements of a pair are `apart` from each other (`ordered`): those
// of 4 bits come from opposite halves of the word, where one mask takes both.
#pragma once
#include "memory.cuh"
#include "packed.cuh"

// Bytes 2 r and 2 r + 1, each in the lower half of 16 bits; above them is the byte HIGH.
template <uint32 HIGH = 0>
__device__ __forceinline__ uint32 two_bytes(uint32 word, int r) {
#ifdef FUSEGRAPH_CPU
    return (word >> 16 * r & 0xffu) | (word >> (16 * r + 8) & 0xffu) << 16 | HIGH * 0x01000100u;
#else
    return __byte_perm(word, HIGH, r ? 0x4342 : 0x4140);
#endif
}

// A constant that stays in a register: the compiler would write it before each instruction that has another one, too.
template <uint32 BITS>
__device__ __forceinline__ uint32 in_register() {
#ifdef FUSEGRAPH_CPU
    return BITS;
#else
    uint32 below, above;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
    asm("mov.u32 %0, %%lanemask_gt;" : "=r"(above));
    return (below & above) + BITS;
#endif
}

// A power of two whose mantissa has room for 7 or 10 bits, as bits of a pair and its upper byte; short floats are
// multiplied by the other one.
template <class T>
struct Room;
template <>
struct Room<bfloat16> {
    static constexpr int value = 128;
    static constexpr uint32 one = 0x43004300u, high = 0x43, shift = 6, scale = 0x7e807e80u;
};
template <>
struct Room<float16> {
    static constexpr int value = 1024;
    static constexpr uint32 one = 0x64006400u, high = 0x64, shift = 9, scale = 0x74007400u;
};

struct Int8Codes {
    static constexpr int each = 1, apart = 1;
    template <class T, int OFFSET>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) {
        if constexpr (Room<T>::value > 128) {
            const Pair<T> moved(two_bytes<Room<T>::high>(word ^ 0x80808080u, r));
            return moved - Pair<T>(float(Room<T>::value + 128 - OFFSET));
        }
        // 128 + x % 128, minus 128 or, where the sign is set, 256.
        const uint32 bytes = two_bytes(word, r), one = in_register<Room<T>::one>();
        const Pair<T> x = Pair<T>((bytes & 0x007f007fu) | one) - Pair<T>((bytes & 0x00800080u) | one);
        return OFFSET ? x + Pair<T>(float(OFFSET)) : x;
    }
};
struct Uint8Codes {
    static constexpr int each = 1, apart = 1;
    template <class T, int OFFSET>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) {
        const Pair<T> moved(two_bytes<Room<T>::high>(word, r));
        const Pair<T> small = moved - Pair<T>(float(Room<T>::value - OFFSET));
        if constexpr (Room<T>::value > 128) return small;
        // From 128 on the highest bit is one of the exponent, and the number 2 x.
        return Pair<T>::minimum(small, Pair<T>::fma(moved, Pair<T>(0.5f), Pair<T>(float(OFFSET))));
    }
};
// Four bits of each half of a word as integers plus OFFSET; of FLIPPED bits, zeros and ones are exchanged.
template <class T, int OFFSET, uint32 FLIPPED>
__device__ __forceinline__ Pair<T> two_halves(uint32 word, int r) {
    constexpr uint32 one = Room<T>::one ^ FLIPPED * 0x10001u;
    constexpr int more = int(FLIPPED) - OFFSET;
    if (Room<T>::value > 128 && r % 2)  // there is room four bits higher: 16 times the number
        return Pair<T>::fma(Pair<T>((word >> 4 * (r - 1) & in_register<0x00f000f0u>()) ^ (Room<T>::one ^ FLIPPED * 0x100010u)),
                            Pair<T>(in_register<0x2c002c00>()), Pair<T>(-float(Room<T>::value / 16 + more)));
    return Pair<T>((word >> 4 * r & in_register<0x000f000fu>()) ^ one) - Pair<T>(float(Room<T>::value + more));
}
struct Uint4Codes {
    static constexpr int each = 2, apart = 4;
    template <class T, int OFFSET>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) { return two_halves<T, OFFSET, 0>(word, r); }
};
struct Int4Codes {
    static constexpr int each = 2, apart = 4;
    template <class T, int OFFSET>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) { return two_halves<T, OFFSET, 8>(word, r); }
};
struct Float4Codes {
    static constexpr int each = 2, apart = 4;
    template <class T, int OFFSET>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) {
        const int up = int(Room<T>::shift) - 4 * r;
        const uint32 number = (up < 0 ? word >> -up : word << up) & 0x00070007u << Room<T>::shift;
        return Pair<T>(number | (word << (12 - 4 * r) & 0x80008000u)) * Pair<T>(Room<T>::scale);
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
    static constexpr int each = 1, apart = 1;
    template <class T, int OFFSET>
    static __device__ __forceinline__ Pair<T> pair(uint32 word, int r) { return Pair<T>(two_floats<T, F>(word, r)); }
};

// Pair r of a vector of bytes, of those that are APART from each other.
template <class T, class C, int APART, int OFFSET = 0, class B, int N>
__device__ __forceinline__ Pair<T> decoded(const Packed<B, N>& bytes, int r) {
    static_assert(N % 4 == 0 && (C::apart == APART || C::apart == 1), "words, or neighbours");
    const auto pair = [&](int n) -> uint32 {
        return C::template pair<T, OFFSET>(bytes.words[n / (2 * C::each)], n % (2 * C::each)).bits;
    };
    if constexpr (C::apart == APART) return Pair<T>(pair(r));
    return Pair<T>(ordered<APART>(r, pair));
}

// Pairs of 16-bit floats in one register: an instruction computes both.
//
// Every operation rounds its exact result once, to nearest even.  NaN is 0x7fff; maximum and minimum are NaN where
// either operand is, and -0 is smaller than +0.
#pragma once
#include "math.cuh"
#include "memory.cuh"

template <class T>
struct PairOf;

#ifdef FUSEGRAPH_CPU

// The sum of two doubles rounded to odd: rounding that to 16 bits is rounding the exact sum.
inline double add_to_odd(double a, double b) {
    const double sum = a + b, of_b = sum - a, error = (a - (sum - of_b)) + (b - of_b);
    uint64 bits = reinterpret<uint64>(sum);
    if (!(sum - sum == 0) || error == 0 || bits & 1) return sum;
    bits += (error > 0) == (sum > 0) ? 1 : -1;
    return bits_double(bits);
}

template <class T>
struct PairOf {
    template <class Operation>
    static uint32 each(uint32 a, uint32 b, uint32 c, Operation operation) {
        uint32 result = 0;
        for (int i = 0; i < 32; i += 16) {
            const T x{uint16(a >> i)}, y{uint16(b >> i)}, z{uint16(c >> i)};
            result |= uint32(convert<T>(double(operation(widen(x), widen(y), widen(z)))).bits) << i;
        }
        return result;
    }
    static uint32 fma(uint32 a, uint32 b, uint32 c) {
        return each(a, b, c, [](double x, double y, double z) { return add_to_odd(x * y, z); });
    }
    static uint32 multiply(uint32 a, uint32 b) {
        return each(a, b, 0, [](double x, double y, double) { return x * y; });
    }
    static uint32 add(uint32 a, uint32 b) {
        return each(a, b, 0, [](double x, double y, double) { return add_to_odd(x, y); });
    }
    static uint32 subtract(uint32 a, uint32 b) { return add(a, b ^ 0x80008000u); }
    static uint32 maximum(uint32 a, uint32 b) {
        return each(a, b, 0, [](float x, float y, float) { return math::maximum(x, y); });
    }
    static uint32 minimum(uint32 a, uint32 b) {
        return each(a, b, 0, [](float x, float y, float) { return math::minimum(x, y); });
    }
};

#else

#define PAIR_OPERATION(NAME, INSTRUCTION)                                       \
    static __device__ __forceinline__ uint32 NAME(uint32 a, uint32 b) {         \
        uint32 y;                                                               \
        asm(INSTRUCTION " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));             \
        return y;                                                               \
    }
#define PAIR_SUMS(TYPE)                                                         \
    PAIR_OPERATION(multiply, "mul.rn." TYPE)                                    \
    PAIR_OPERATION(add, "add.rn." TYPE)                                         \
    PAIR_OPERATION(subtract, "sub.rn." TYPE)
#if __CUDA_ARCH__ >= 900
#define PAIR_SUMS_OF_BFLOAT16 PAIR_SUMS("bf16x2")
#else  // there is only fma
#define PAIR_SUMS_OF_BFLOAT16                                                   \
    static __device__ __forceinline__ uint32 multiply(uint32 a, uint32 b) { return fma(a, b, 0x80008000u); } \
    static __device__ __forceinline__ uint32 add(uint32 a, uint32 b) { return fma(a, 0x3f803f80u, b); } \
    static __device__ __forceinline__ uint32 subtract(uint32 a, uint32 b) { return fma(b, 0xbf80bf80u, a); }
#endif
#define PAIR_OF(T, TYPE, SUMS)                                                  \
    template <>                                                                 \
    struct PairOf<T> {                                                          \
        PAIR_OPERATION(maximum, "max.NaN." TYPE)                                \
        PAIR_OPERATION(minimum, "min.NaN." TYPE)                                \
        static __device__ __forceinline__ uint32 fma(uint32 a, uint32 b, uint32 c) { \
            uint32 y;                                                           \
            asm("fma.rn." TYPE " %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c)); \
            return y;                                                           \
        }                                                                       \
        SUMS                                                                    \
    };
PAIR_OF(bfloat16, "bf16x2", PAIR_SUMS_OF_BFLOAT16)
PAIR_OF(float16, "f16x2", PAIR_SUMS("f16x2"))
#undef PAIR_OF
#undef PAIR_SUMS_OF_BFLOAT16
#undef PAIR_SUMS
#undef PAIR_OPERATION

#endif

// The same 16 bits in both halves of a word.
__device__ __forceinline__ uint32 twice(uint16 bits) {
#ifdef FUSEGRAPH_CPU
    return bits * 0x10001u;
#else
    return __byte_perm(bits, 0, 0x1010);
#endif
}

// Element i of a pair, 0 or 1.
template <class T>
__device__ __forceinline__ T element_of(uint32 pair, int i) {
    T element;
    element.bits = uint16(pair >> i * 16);
    return element;
}

template <class T>
struct Pair {
    uint32 bits;
    Pair() = default;
    explicit __device__ __forceinline__ Pair(uint32 word) : bits(word) {}
    __device__ __forceinline__ Pair(T both) : bits(twice(both.bits)) {}
    __device__ __forceinline__ Pair(float both) : bits(convert<T>(both).bits * 0x10001u) {}

    friend __device__ __forceinline__ Pair operator*(Pair a, Pair b) { return Pair(PairOf<T>::multiply(a.bits, b.bits)); }
    friend __device__ __forceinline__ Pair operator+(Pair a, Pair b) { return Pair(PairOf<T>::add(a.bits, b.bits)); }
    friend __device__ __forceinline__ Pair operator-(Pair a, Pair b) { return Pair(PairOf<T>::subtract(a.bits, b.bits)); }
    friend __device__ __forceinline__ Pair operator-(Pair a) { return Pair(a.bits ^ 0x80008000u); }
    static __device__ __forceinline__ Pair abs(Pair a) { return Pair(a.bits & 0x7fff7fffu); }
    static __device__ __forceinline__ Pair maximum(Pair a, Pair b) { return Pair(PairOf<T>::maximum(a.bits, b.bits)); }
    static __device__ __forceinline__ Pair minimum(Pair a, Pair b) { return Pair(PairOf<T>::minimum(a.bits, b.bits)); }
    static __device__ __forceinline__ Pair relu(Pair a) { return Pair(PairOf<T>::maximum(a.bits, 0)); }
    // a * b + c
    static __device__ __forceinline__ Pair fma(Pair a, Pair b, Pair c) {
        return Pair(PairOf<T>::fma(a.bits, b.bits, c.bits));
    }
};

// The lower or the upper halves of two words.
__device__ __forceinline__ uint32 halves_of(uint32 a, uint32 b, int upper) {
#ifdef FUSEGRAPH_CPU
    return upper ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
#else
    return __byte_perm(a, b, upper ? 0x7632 : 0x5410);
#endif
}

// Word r of a piece whose pairs are APART from each other: of each 2 APART elements, pair n has n and n + APART.  WORD
// gives the words of neighbours.
template <int APART, class Word>
__device__ __forceinline__ uint32 ordered(int r, Word word) {
    if constexpr (APART == 1) return word(r);
    const int n = r % APART, run = r - n;
    return halves_of(word(run + n / 2), word(run + (n + APART) / 2), n % 2);
}
template <int APART, class T, int N>
__device__ __forceinline__ uint32 ordered(const Packed<T, N>& piece, int r) {
    return ordered<APART>(r, [&](int n) -> uint32 { return piece.words[n]; });
}

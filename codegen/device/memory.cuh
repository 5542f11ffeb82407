// Vectors of elements and their accesses to global memory: 16 bytes at a time where the pointer's alignment allows.
#pragma once
#include "types.cuh"

// N elements of T, aligned as one access of up to 16 bytes needs it.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
    T values[N];
    __device__ __forceinline__ T& operator[](int i) { return values[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return values[i]; }
};

// Elements are taken from the vector's words anew after this: the compiler would keep what they were converted to, in
// more registers than the words.
template <class T, int N>
__device__ __forceinline__ void reread(Vector<T, N>& v) {
#ifndef FUSEGRAPH_CPU
    static_assert(sizeof v % 4 == 0, "words");
    uint32* const words = reinterpret_cast<uint32*>(&v);
#pragma unroll
    for (int i = 0; i < int(sizeof v / 4); ++i) asm volatile("" : "+r"(words[i]));
#endif
}

template <int B> struct PackedWord { typedef uint32 type; };
template <> struct PackedWord<2> { typedef uint16 type; };
template <> struct PackedWord<8> { typedef uint64 type; };

#ifdef FUSEGRAPH_CPU

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
    fusegraph_cpu::check_aligned(from, alignof(Vector<T, N>));
    Vector<T, N> v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_once(const T* from) {
    return load<N>(from);
}

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_evict_last(const T* from) {
    return load<N>(from);
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Vector<T, N>& v) {
    fusegraph_cpu::check_aligned(to, alignof(Vector<T, N>));
    __builtin_memcpy(to, &v, sizeof v);
}

#else

// The widest word that divides B bytes.
template <int B> struct Word { typedef typename Word<(B % 2 ? 1 : B % 4 ? 2 : B % 8 ? 4 : B % 16 ? 8 : 16)>::type type; };
template <> struct Word<1> { typedef unsigned char type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef unsigned int type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

// How words are read: as usual; once, which leaves the L1 cache as it is; or so that the L2 cache evicts them last, after
// what is written meanwhile.
struct ReadUsual {};
struct ReadOnce {};
struct ReadEvictLast {};

template <class W, class How>
__device__ __forceinline__ W load_word(const W* from, How) {
    return *from;
}
__device__ __forceinline__ uint2 load_word(const uint2* from, ReadOnce) {
    uint2 w;
    asm volatile(
        "ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
        : "=r"(w.x), "=r"(w.y) : "l"(__cvta_generic_to_global(from)));
    return w;
}
__device__ __forceinline__ uint4 load_word(const uint4* from, ReadOnce) {
    uint4 w;
    asm volatile(
        "ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(__cvta_generic_to_global(from)));
    return w;
}
__device__ __forceinline__ uint2 load_word(const uint2* from, ReadEvictLast) {
    uint2 w;
    asm volatile(
        "{ .reg .b64 p; createpolicy.fractional.L2::evict_last.b64 p, 1.0;"
        " ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], p; }"
        : "=r"(w.x), "=r"(w.y) : "l"(__cvta_generic_to_global(from)));
    return w;
}
__device__ __forceinline__ uint4 load_word(const uint4* from, ReadEvictLast) {
    uint4 w;
    asm volatile(
        "{ .reg .b64 p; createpolicy.fractional.L2::evict_last.b64 p, 1.0;"
        " ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], p; }"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(__cvta_generic_to_global(from)));
    return w;
}

template <int N, class T, class How>
__device__ __forceinline__ Vector<T, N> load_vector(const T* from, How how) {
    typedef typename Word<sizeof(T) * N>::type word;
    constexpr int words = sizeof(T) * N / sizeof(word);
    union { Vector<T, N> v; word w[words]; };
#pragma unroll
    for (int i = 0; i < words; ++i) w[i] = load_word(reinterpret_cast<const word*>(from) + i, how);
    return v;
}

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
    return load_vector<N>(from, ReadUsual());
}

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_once(const T* from) {
    return load_vector<N>(from, ReadOnce());
}

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_evict_last(const T* from) {
    return load_vector<N>(from, ReadEvictLast());
}

// One word to global memory in one access: the compiler may split what it sees as a structure of 4 bytes each.
template <class W>
__device__ __forceinline__ void store_word(W* to, W w) {
    *to = w;
}
__device__ __forceinline__ void store_word(uint2* to, uint2 w) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(w.x), "r"(w.y) : "memory");
}
__device__ __forceinline__ void store_word(uint4* to, uint4 w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}

template <class T, int N>
__device__ __forceinline__ void store(T* __restrict__ to, const Vector<T, N>& value) {
    typedef typename Word<sizeof(T) * N>::type word;
    constexpr int words = sizeof(T) * N / sizeof(word);
    union { Vector<T, N> v; word w[words]; };
    v = value;
#pragma unroll
    for (int i = 0; i < words; ++i) store_word(reinterpret_cast<word*>(to) + i, w[i]);
}

#endif

// N elements in the words they came in, to be kept in registers for a while.  Of a Vector of elements of 1 or 2 bytes
// that is loaded under a condition the compiler keeps every element in a register of its own: it takes the words apart
// before it issues the next load, and so waits for each.  An element is a shift of its word, so that widening a
// bfloat16 in an upper half is a mask.
template <class T, int N>
struct Packed {
    static constexpr int each = sizeof(T) * N % 4 ? N : sizeof(T) < 4 ? 4 / sizeof(T) : 1;  // elements of a word
    typedef typename PackedWord<sizeof(T) * each>::type word;
    word words[N / each];
    Packed() = default;
    __device__ __forceinline__ Packed(const Vector<T, N>& vector) {
        union { Vector<T, N> v; word w[N / each]; };
        v = vector;
#pragma unroll
        for (int i = 0; i < N / each; ++i) words[i] = w[i];
    }
    __device__ __forceinline__ T operator[](int i) const {
        union { typename PackedWord<sizeof(T)>::type bits; T t; };
        bits = words[i / each] >> i % each * 8 * int(sizeof(T));
        return t;
    }
};

// The words of a vector.
template <class T, int N, int W>
__device__ __forceinline__ void words_of(const Vector<T, N>& vector, uint32 (&words)[W]) {
    static_assert(sizeof(T) * N == 4 * W, "words");
    union { Vector<T, N> v; uint32 w[W]; };
    v = vector;
#pragma unroll
    for (int i = 0; i < W; ++i) words[i] = w[i];
}
template <class T, int N, int W>
__device__ __forceinline__ void words_of(const Packed<T, N>& packed, uint32 (&words)[W]) {
    static_assert(sizeof(T) * N == 4 * W, "words");
#pragma unroll
    for (int i = 0; i < W; ++i) words[i] = packed.words[i];
}

// N neighbouring elements of shared memory, at an address as aligned as the vector.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_shared(const T* from) {
    return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <class T, int N>
__device__ __forceinline__ void store_shared(T* to, const Vector<T, N>& v) {
    *reinterpret_cast<Vector<T, N>*>(to) = v;
}

// A value, or zero.
template <class T>
__device__ __forceinline__ T kept(T value, bool keep) {
    return keep ? value : T{};
}

// A vector, or zeros: decided for whole words.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> kept(const Vector<T, N>& value, bool keep) {
    constexpr int bytes = sizeof(T) * N, words = bytes % 4 ? 0 : bytes / 4;
    if (words == 0) return keep ? value : Vector<T, N>{};
    union { Vector<T, N> v; uint32 w[words ? words : 1]; };
    v = value;
#pragma unroll
    for (int i = 0; i < words; ++i) w[i] = keep ? w[i] : 0;
    return v;
}

// The first `count` of N elements (all of them if count >= N); the others are zero.
template <int N, class T, class Count>
__device__ __forceinline__ Vector<T, N> load(const T* from, Count count) {
    if (count >= N) return load<N>(from);
    Vector<T, N> v = {};
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) v[i] = from[i];
    return v;
}

// Brings 128 bytes of global memory, those around an address, to the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) {
#ifndef FUSEGRAPH_CPU
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
#endif
}

// `load` as Packed words.
template <int N, class T>
__device__ __forceinline__ Packed<T, N> load_packed(const T* from) {
    return load<N>(from);
}
template <int N, class T>
__device__ __forceinline__ Packed<T, N> load_packed_once(const T* from) {
    return load_once<N>(from);
}
template <int N, class T, class Count>
__device__ __forceinline__ Packed<T, N> load_packed(const T* from, Count count) {
    if (count >= N) return load<N>(from);
    return load<N>(from, count);
}

// Writes the first `count` of N elements.
template <class T, int N, class Count>
__device__ __forceinline__ void store(T* __restrict__ to, const Vector<T, N>& v, Count count) {
    if (count >= N) {
        store(to, v);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) to[i] = v[i];
}

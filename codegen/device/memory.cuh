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

#ifdef FUSEGRAPH_CPU

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
    fusegraph_cpu::check_aligned(from, alignof(Vector<T, N>));
    Vector<T, N> v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
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

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load(const T* __restrict__ from) {
    typedef typename Word<sizeof(T) * N>::type word;
    constexpr int words = sizeof(T) * N / sizeof(word);
    union { Vector<T, N> v; word w[words]; };
#pragma unroll
    for (int i = 0; i < words; ++i) w[i] = __ldg(reinterpret_cast<const word*>(from) + i);
    return v;
}

template <class T, int N>
__device__ __forceinline__ void store(T* __restrict__ to, const Vector<T, N>& value) {
    typedef typename Word<sizeof(T) * N>::type word;
    constexpr int words = sizeof(T) * N / sizeof(word);
    union { Vector<T, N> v; word w[words]; };
    v = value;
#pragma unroll
    for (int i = 0; i < words; ++i) reinterpret_cast<word*>(to)[i] = w[i];
}

#endif

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
__device__ __forceinline__ Vector<T, N> load(const T* __restrict__ from, Count count) {
    if (count >= N) return load<N>(from);
    Vector<T, N> v = {};
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) v[i] = from[i];
    return v;
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

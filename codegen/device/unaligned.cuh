// Vectors whose elements begin anywhere: the aligned words around them are read, and shifted into place.
//
// `at` is the position of the first element in an array of `size` elements.  Elements outside of the array are neither
// read nor written: those before it have positions that wrapped around.
#pragma once
#include "memory.cuh"

// How many elements a pointer is past a multiple of N elements or 16 bytes, whichever is less.
template <int N, class T>
__device__ __forceinline__ uint32 past_boundary(const T* p) {
    constexpr uint32 bytes = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
    return uint32(uint64(p)) % bytes / uint32(sizeof(T));
}

// N elements (4 bytes or more) as they lie in the aligned words around them.
template <class T, int N>
struct Unaligned {
    static constexpr int bytes = sizeof(T) * N, word = bytes < 16 ? bytes : 16;  // of all elements, of one access
    uint32 words[(bytes + word) / 4];
    uint32 shift;  // bytes before the first element

    // The elements: words move by 8 and by 4 bytes, then bits by bytes.
    __device__ __forceinline__ Vector<T, N> elements() const {
        constexpr int count = (bytes + word) / 4;
        uint32 moved[count];
#pragma unroll
        for (int i = 0; i < count; ++i) moved[i] = words[i];
#pragma unroll
        for (int step = word / 8; step > 0; step /= 2)
            if (sizeof(T) <= 4 * step && shift & 4 * step)
#pragma unroll
                for (int i = 0; i + step < count; ++i) moved[i] = moved[i + step];
        union { Vector<T, N> v; uint32 w[bytes / 4]; };
#pragma unroll
        for (int i = 0; i < bytes / 4; ++i)
            w[i] = sizeof(T) < 4 ? __funnelshift_r(moved[i], moved[i + 1], shift % 4 * 8) : moved[i];
        return v;
    }
};

// The bits of an element of 1 or 2 bytes.
template <class T>
__device__ __forceinline__ uint32 element_bits(T value) {
    union { T element; uint8 byte; uint16 half; };
    element = value;
    return sizeof(T) == 1 ? byte : half;
}

// N elements of an array, one by one; zero outside of it.  Small ones enter at the top of the words, which move down:
// this is rare, and short code that needs no memory.
template <int N, class T, class I>
__device__ __forceinline__ Packed<T, N> load_each(const T* array, I at, I size) {
    if constexpr (sizeof(T) >= 4) {
        Vector<T, N> v = {};
#pragma unroll
        for (int e = 0; e < N; ++e)
            if (at + e < size) v[e] = array[at + e];
        return v;
    } else {
        constexpr int count = sizeof(T) * N / 4, bits = sizeof(T) * 8;
        Packed<T, N> p = Vector<T, N>{};
#pragma unroll 1
        for (int e = 0; e < N; ++e) {
            const uint32 next = at + e < size ? element_bits(array[at + e]) : 0;
#pragma unroll
            for (int i = 0; i < count; ++i)
                p.words[i] = __funnelshift_r(p.words[i], i + 1 < count ? p.words[i + 1] : next, bits);
        }
        return p;
    }
}

// N elements of an array from any position on.
template <int N, class T, class I, class Size>
__device__ __forceinline__ Unaligned<T, N> load_unaligned(const T* array, I at, Size extent) {
    typedef Unaligned<T, N> Words;
    constexpr int all = N + Words::word / sizeof(T), each = Words::word / 4;  // elements read, words of an access
    const I size = extent, before = past_boundary<N>(array + at), first = at - before;
    Words u;
    if (size >= all && first <= size - all) {  // false as well where first is before the array
        const uint32* from = reinterpret_cast<const uint32*>(array + first);
#pragma unroll
        for (int i = 0; i < all * int(sizeof(T)) / Words::word; ++i) {
            const Vector<uint32, each> w = load<each>(from + i * each);
#pragma unroll
            for (int j = 0; j < each; ++j) u.words[i * each + j] = w[j];
        }
        u.shift = before * uint32(sizeof(T));
    } else {
        union { Packed<T, N> p; uint32 w[Words::bytes / 4]; };
        p = load_each<N>(array, at, size);
#pragma unroll
        for (int i = 0; i < (Words::bytes + Words::word) / 4; ++i) u.words[i] = i < Words::bytes / 4 ? w[i] : 0;
        u.shift = 0;
    }
    return u;
}

// N elements of an array from an aligned position on.
template <int N, class T, class I, class Size>
__device__ __forceinline__ Packed<T, N> load_within(const T* array, I at, Size extent) {
    const I size = extent;
    if (size >= N && at <= size - N) return load<N>(array + at);
    return load_each<N>(array, at, size);
}

// Writes N elements to an array from an aligned position on.
template <class T, int N, class I, class Size>
__device__ __forceinline__ void store_within(T* __restrict__ array, I at, Size extent, const Vector<T, N>& v) {
    const I size = extent;
    if (size >= N && at <= size - N) {
        store(array + at, v);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (at + i < size) array[at + i] = v[i];
}

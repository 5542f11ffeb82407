// Operands A of wgmma that are computed in registers: reads fragments of the tiles that they are computed from.
//
// A warp has 16 rows, of which it multiplies 16 elements along the sum at a time.  A thread has eight of these: element
// e is in row lane / 4 + e / 2 % 2 * 8 and column lane % 4 * 2 + e / 4 * 8 + e % 2.  Tiles are swizzled as TMA leaves
// them.
#pragma once
#include "packed.cuh"
#include "pipeline.cuh"

// They are kept in the words that they come in: of a Vector the compiler takes each word apart by two instructions.
template <class T>
struct Fragment {
    union { Vector<T, 8> elements; uint32 words[2 * sizeof(T)]; };
    __device__ __forceinline__ T operator[](int e) const {
        if (sizeof(T) != 2) return elements[e];
        union { uint16 bits; T element; };
        bits = uint16(words[e / 2] >> e % 2 * 16);
        return element;
    }
    // Four pairs: elements 2 r and 2 r + 1.
    __device__ __forceinline__ Vector<Pair<T>, 4> pairs() const {
        Vector<Pair<T>, 4> v;
#pragma unroll
        for (int r = 0; r < 4; ++r) v[r] = Pair<T>(words[r]);
        return v;
    }
};

// Where a thread begins to read fragments of 16 rows from `row` on of a tile: rows of Width bytes run along the sum.
// That of the next 16 columns begins at this number ^ 16 * sizeof(T), and so on through the row.
template <class T, int Width>
__device__ __forceinline__ int fragment_at(int row) {
    const int lane = threadIdx.x % 32;
    if (sizeof(T) == 2) return swizzle<Width>((row + lane % 16) * Width + lane / 16 * 16);
    return swizzle<Width>((row + lane / 4) * Width + lane % 4 * 2 * int(sizeof(T)));
}

template <class T, int Width>
__device__ __forceinline__ Fragment<T> load_fragment(const void* tile, int at) {
    const unsigned char* const base = static_cast<const unsigned char*>(tile);
    Fragment<T> fragment;
    if constexpr (sizeof(T) == 2) {
        load_matrices(fragment.words, base + at);
    } else {
        union { Vector<T, 8> v; Vector<T, 2> pairs[4]; };
#pragma unroll
        for (int r = 0; r < 4; ++r)
            pairs[r] = *reinterpret_cast<const Vector<T, 2>*>(base + (at ^ r / 2 * 8 * int(sizeof(T))) + r % 2 * 8 * Width);
        fragment.elements = v;
    }
    return fragment;
}

// The same of a tile whose rows run across the sum, 64 elements of 2 bytes of the operand's rows; the next 16 columns
// are 2048 bytes behind.
__device__ __forceinline__ int fragment_at_across(int row) {
    const int lane = threadIdx.x % 32;
    return swizzle<128>((lane % 8 + lane / 16 * 8) * 128 + row * 2 + lane / 8 % 2 * 16);
}

template <class T>
__device__ __forceinline__ Fragment<T> load_fragment_across(const void* tile, int at) {
    Fragment<T> fragment;
    load_matrices_transposed(fragment.words, static_cast<const unsigned char*>(tile) + at);
    return fragment;
}

// What all rows have in common: columns c, c + 1, c + 8 and c + 9 of 16, with c = lane % 4 * 2.
template <class T>
__device__ __forceinline__ Vector<T, 4> load_columns(const T* columns) {
    union { Vector<T, 4> v; Vector<T, 2> pairs[2]; };
    columns += threadIdx.x % 4 * 2;
    pairs[0] = load_shared<2>(columns);
    pairs[1] = load_shared<2>(columns + 8);
    return v;
}

// The same in pairs.
template <class T>
__device__ __forceinline__ Vector<Pair<T>, 2> load_column_pairs(const T* columns) {
    const unsigned char* const first = reinterpret_cast<const unsigned char*>(columns + threadIdx.x % 4 * 2);
    Vector<Pair<T>, 2> pairs;
    pairs[0] = Pair<T>(*reinterpret_cast<const uint32*>(first));
    pairs[1] = Pair<T>(*reinterpret_cast<const uint32*>(first + 16));
    return pairs;
}

// Puts a fragment into the registers from which wgmma reads it; rows that are not kept are zeros.
template <class T>
__device__ __forceinline__ void put_fragment(uint32 (&registers)[4], const Vector<T, 8>& fragment) {
    union { Vector<T, 8> v; uint32 words[4]; };
    v = fragment;
#pragma unroll
    for (int r = 0; r < 4; ++r) registers[r] = words[r];
}
template <class T>
__device__ __forceinline__ void put_fragment(uint32 (&registers)[4], const Vector<T, 8>& fragment, const bool (&keep)[2]) {
    union { Vector<T, 8> v; uint32 words[4]; };
    v = fragment;
#pragma unroll
    for (int r = 0; r < 4; ++r) registers[r] = keep[r % 2] ? words[r] : 0;
}

// Copies of TMA: which bytes of a tensor go where in shared memory, and copies that are under way.
//
// Tiled and im2col modes and the swizzles are those of the CUDA driver's cuTensorMapEncodeTiled and
// cuTensorMapEncodeIm2col and of PTX's cp.async.bulk.tensor.
#pragma once

#include <cstring>
#include <vector>

#include "abi.h"
#include "blocks.h"

namespace fusegraph_cpu {

// A load that has been started.
struct Load {
    Copy copy;
    TensorMapFields map;
    Thread* thread;
    Where where;
    Place shared, barrier;
    unsigned bytes, whole;         // of the box; with the bytes that the swizzle may reach
    unsigned short mask;           // destination blocks
    unsigned long long phase[16];  // of each destination's barrier when the load was started
};

// A store that has been started.
struct Store {
    Copy copy;
    TensorMapFields map;
    Thread* thread;
    Where where;
    unsigned group;                   // of the thread
    unsigned bytes;                   // of the box
    std::vector<unsigned char> data;  // the box, dense, once it has been read
    bool waited = false;              // its thread knows that
    bool written = false;
};

// Groups of stores of one thread.
struct Transfers {
    unsigned committed;
};

// Where TMA puts what lies at `address` in a box without a swizzle: units of 16 bytes change places by the
// address bits above 7.
inline unsigned char* swizzled(unsigned char* address, unsigned swizzle) {
    const uintptr_t bits = reinterpret_cast<uintptr_t>(address);
    const uintptr_t mask = swizzle ? (swizzle / 16 - 1) * 16 : 0;
    return address + (ptrdiff_t(bits ^ (bits >> 3 & mask)) - ptrdiff_t(bits));
}

inline unsigned box_bytes(const TensorMapFields& map) {
    unsigned elements = 1;
    for (unsigned d = 0; d < (map.im2col ? 2u : map.rank); ++d) elements *= map.box[d];
    return elements * map.element_bytes;
}

// Calls row(global, first, last) for every row of the box, in the order of shared memory: elements [first, last) of the
// row lie in the tensor, from `global` on; the others lie outside.
template <class Row>
void for_rows_of_tile(const TensorMapFields& map, const int* coordinates, Row row) {
    const long long start = coordinates[0], size = (long long)map.last[0] + 1, box = map.box[0];
    const long long first = start < 0 ? -start : 0, end = size - start;
    const long long last = end < box ? end : box;
    int index[5] = {};
    for (;;) {
        bool inside = first < last;
        unsigned long long address = map.address + (unsigned long long)(start + first) * map.element_bytes;
        for (unsigned d = 1; d < map.rank; ++d) {
            const long long at = (long long)coordinates[d] + (long long)index[d] * map.steps[d];
            inside = inside && at >= 0 && at <= map.last[d];
            address += (unsigned long long)at * map.strides[d - 1];
        }
        row(reinterpret_cast<unsigned char*>(address), unsigned(inside ? first : 0), unsigned(inside ? last : 0));
        unsigned d = 1;
        while (d < map.rank && ++index[d] == map.box[d]) index[d++] = 0;
        if (d == map.rank) return;
    }
}

// The same for im2col: a row is the channels of one pixel.  coordinates are (c, w, [h, [d,]] n).
template <class Row>
void for_rows_of_pixels(const TensorMapFields& map, const int* coordinates, const unsigned short* offsets, Row row) {
    const unsigned spatial = map.rank - 2u;
    const long long start = coordinates[0], size = (long long)map.last[0] + 1, box = map.box[0];
    const long long first = start < 0 ? -start : 0, end = size - start;
    const long long last = end < box ? end : box;
    long long at[4];  // filter origin in the spatial dimensions, then the image
    for (unsigned d = 0; d <= spatial; ++d) at[d] = coordinates[1 + d];
    for (unsigned pixel = 0; pixel < map.box[1]; ++pixel) {
        bool inside = first < last;
        unsigned long long address = map.address + (unsigned long long)(start + first) * map.element_bytes;
        for (unsigned d = 0; d <= spatial; ++d) {
            const long long position = at[d] + (d < spatial ? offsets[d] : 0);
            inside = inside && position >= 0 && position <= map.last[1 + d];
            address += (unsigned long long)position * map.strides[d];
        }
        row(reinterpret_cast<unsigned char*>(address), unsigned(inside ? first : 0), unsigned(inside ? last : 0));
        unsigned d = 0;
        while (d < spatial && (at[d] += map.steps[1 + d]) > (long long)map.last[1 + d] + map.upper[d]) {
            at[d] = map.lower[d];
            ++d;
        }
        if (d == spatial) ++at[d];
    }
}

inline float float_of(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline unsigned bits_of(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline float from_half(unsigned short half) {
    const unsigned sign = (half & 0x8000u) << 16, magnitude = (half & 0x7fffu) << 13;
    if (magnitude >= 0x7c00u << 13) return float_of(sign | 0x7f800000u | magnitude);
    return float_of(sign | bits_of(float_of(magnitude) * 0x1p112f));
}

inline unsigned short to_half(float value) {
    const unsigned bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    // Below the smallest normal, the adder rounds: a place of 0.5 is the format's.
    if (magnitude < 0x38800000u) return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
    return sign | ((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

inline unsigned short to_bfloat(float value) {
    const unsigned bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// What a load of a map of tf32 does to a row: rounds to 10 bits of mantissa, ties to the even one, subnormal numbers
// too; what is too large becomes infinite, every NaN the same one.
inline void round_to_tf32(unsigned char* row, unsigned count) {
    for (unsigned i = 0; i < count; ++i) {
        unsigned bits;
        memcpy(&bits, row + 4 * i, 4);
        if ((bits & 0x7fffffffu) > 0x7f800000u)
            bits = 0x7fffffffu;
        else
            bits += 0xfffu + (bits >> 13 & 1u);
        bits &= 0xffffe000u;
        memcpy(row + 4 * i, &bits, 4);
    }
}

template <class Bits, class Sum>
void add_atomically(unsigned char* to, const unsigned char* from, Sum sum) {
    Bits value, seen = __atomic_load_n(reinterpret_cast<Bits*>(to), __ATOMIC_RELAXED);
    memcpy(&value, from, sizeof value);
    while (!__atomic_compare_exchange_n(reinterpret_cast<Bits*>(to), &seen, sum(seen, value), false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
}

// Adds `count` elements.  The sum of two 16-bit floats is exact enough in float for its rounding to be the right one.
inline void add_elements(const TensorMapFields& map, unsigned char* to, const unsigned char* from, unsigned count) {
    for (unsigned i = 0; i < count; ++i, to += map.element_bytes, from += map.element_bytes) {
        if (map.kind == 'f')
            add_atomically<unsigned>(to, from, [](unsigned a, unsigned b) { return bits_of(float_of(a) + float_of(b)); });
        else if (map.kind == 'h')
            add_atomically<unsigned short>(
                to, from, [](unsigned short a, unsigned short b) { return to_half(from_half(a) + from_half(b)); });
        else if (map.kind == 'b')
            add_atomically<unsigned short>(to, from, [](unsigned short a, unsigned short b) {
                return to_bfloat(float_of(unsigned(a) << 16) + float_of(unsigned(b) << 16));
            });
        else if (map.element_bytes == 4)
            add_atomically<unsigned>(to, from, [](unsigned a, unsigned b) { return a + b; });
        else
            add_atomically<unsigned long long>(
                to, from, [](unsigned long long a, unsigned long long b) { return a + b; });
    }
}

}  // namespace fusegraph_cpu

// ldmatrix, stmatrix and mma.sync on the CPU: every lane brings its registers to a meeting of the warp.
//
// Products of floats are formed and added in float, one after the other along the sum.  The tensor cores add the
// products of one instruction and the accumulator at once, aligned to the largest of them and cut off: so it is done
// for
// fp8, of whose sums some keep 14 bits.  NaN and infinity propagate.  Integers wrap around.
#pragma once

#include "cuda_on_cpu.h"

namespace fusegraph_cpu {

// ---- operands of products

// Bytes of an element, the type in which products are summed, and the value of the element at `bytes`.
template <class T>
struct MmaOperand {
    static constexpr int size = sizeof(T);
    typedef float sum;
    static float value(const unsigned char* bytes) {
        T element;
        memcpy(&element, bytes, sizeof element);
        return widen(element);
    }
};
template <>
struct MmaOperand<tf32> {
    static constexpr int size = 4;
    typedef float sum;
    static float value(const unsigned char* bytes) {
        uint32 bits;
        memcpy(&bits, bytes, 4);
        return bits_float(bits & 0xffffe000u);
    }
};
template <>
struct MmaOperand<int8> {
    static constexpr int size = 1;
    typedef int32 sum;
    static int32 value(const unsigned char* bytes) { return int8(*bytes); }
};
template <>
struct MmaOperand<uint8> {
    static constexpr int size = 1;
    typedef int32 sum;
    static int32 value(const unsigned char* bytes) { return *bytes; }
};

template <class A, class B>
struct MatrixProduct {
    static_assert(MmaOperand<A>::size == MmaOperand<B>::size && (MmaOperand<A>::size == 1 || __is_same(A, B)),
                  "the tensor cores multiply equal types, or two of 8 bits");
    static_assert(__is_same(typename MmaOperand<A>::sum, typename MmaOperand<B>::sum), "a float and an integer");
    typedef typename MmaOperand<A>::sum sum;
};

// The sum of 32 products and of what was summed up before, as tensor cores make it that keep 14 bits: from the first
// one of the largest of them on, and of the sum; for one element of vectors of them.
template <class Vector>
float sum_of_14_bits(const Vector (&products)[32], int element, float before) {
    float largest = __builtin_fabsf(before), plain = before;
    for (const Vector& product : products) {
        const float size = __builtin_fabsf(product[element]);
        largest = largest > size ? largest : size;
        plain += product[element];
    }
    if (!(__builtin_fabsf(plain) < __builtin_inff()) || largest == 0) return plain;
    const auto last_bit = [](float x) {  // that is kept; no product of fp8 is as small as 2^-100
        const uint32 exponent = float_bits(x) >> 23 & 0xff;
        return bits_float(((exponent > 27 ? exponent : 27) - 13) << 23);
    };
    const auto cut = [](float x, float unit) { return float(int32(x / unit)) * unit; };
    const float unit = last_bit(largest);
    float sum = cut(before, unit);
    for (const Vector& product : products) sum += cut(product[element], unit);
    return cut(sum, last_bit(sum));
}

// d += a b, where a's rows and b's columns are 32 bytes each; d is stored by rows, of a multiple of 4 columns.
//
// Most of the time of emulated tensor cores is spent here, so four columns are added at once: in vectors spelled out,
// which are as fast in code that is hardly optimised.
template <class A, class B, class D>
void multiply(D* d, const unsigned char (*a)[32], const unsigned char (*b)[32], int rows, int columns) {
    constexpr int inner = 32 / MmaOperand<A>::size, most = 256;
    constexpr bool fp8 = inner == 32 && __is_same(D, float);
    typedef D Four __attribute__((vector_size(4 * sizeof(D))));
    Four by_rows[inner][most / 4];
    for (int n = 0; n < columns; ++n)
        for (int k = 0; k < inner; ++k) by_rows[k][n / 4][n % 4] = MmaOperand<B>::value(b[n] + k * MmaOperand<B>::size);
    for (int m = 0; m < rows; ++m) {
        D operands[inner];
        for (int k = 0; k < inner; ++k) operands[k] = MmaOperand<A>::value(a[m] + k * MmaOperand<A>::size);
        for (int n = 0; n < columns; n += 4) {
            Four sums;
            memcpy(&sums, &d[m * columns + n], sizeof sums);
            if constexpr (fp8) {
                Four products[inner];
                for (int k = 0; k < inner; ++k) products[k] = operands[k] * by_rows[k][n / 4];
                for (int i = 0; i < 4; ++i) sums[i] = sum_of_14_bits(products, i, sums[i]);
            } else {
                for (int k = 0; k < inner; ++k) sums += operands[k] * by_rows[k][n / 4];
            }
            memcpy(&d[m * columns + n], &sums, sizeof sums);
        }
    }
}

// ---- mma

template <class D>
struct Mma {
    D* d;
    const uint32 *a, *b;
};

template <class A, class B, class D>
void complete_mma(Thread* lanes, unsigned) {
    unsigned char a[16][32], b[8][32];
    D d[16 * 8];
    const auto of = [&](unsigned lane) { return static_cast<Mma<D>*>(lanes[lane].operand); };
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned r = 0; r < 4; ++r) memcpy(&a[g + 8 * (r & 1)][4 * t + 16 * (r >> 1)], &of(lane)->a[r], 4);
        for (unsigned r = 0; r < 2; ++r) memcpy(&b[g][4 * t + 16 * r], &of(lane)->b[r], 4);
        for (unsigned i = 0; i < 4; ++i) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = of(lane)->d[i];
    }
    multiply<A, B>(d, a, b, 16, 8);
    for (unsigned lane = 0; lane < 32; ++lane)
        for (unsigned i = 0; i < 4; ++i) of(lane)->d[i] = d[(lane / 4 + 8 * (i >> 1)) * 8 + 2 * (lane % 4) + (i & 1)];
}

// ---- ldmatrix and stmatrix

struct MatrixRow {
    unsigned char* row;
    uint32* r;
};

inline void check_row(const void* row, int count, const char* what, const char* file, int line) {
    if (current->warp_lanes != ~0u)
        current->block->runtime->fail(current, "%s at %s:%d in a warp of fewer than 32 threads", what, file, line);
    if (int(current->lane) >= 8 * count) return;  // these addresses are not used
    check_aligned(row, 16, file, line);
    if (!current->block->runtime->is_shared(current, row, 16))
        current->block->runtime->fail(current, "%s at %s:%d: the row at %p is not in the block's shared memory", what,
                                      file, line, row);
}

// The bytes of element (row, column) of matrix i, elements of two bytes.
inline unsigned char* matrix_element(Thread* lanes, int i, int row, int column) {
    return static_cast<MatrixRow*>(lanes[8 * i + row].operand)->row + 2 * column;
}

template <int Count, bool Transposed, bool Store>
void complete_matrices(Thread* lanes, unsigned) {
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < Count; ++i)
            for (int half = 0; half < 2; ++half) {
                const int g = lane / 4, t = 2 * (lane % 4) + half;
                unsigned char* element = Transposed ? matrix_element(lanes, i, t, g) : matrix_element(lanes, i, g, t);
                unsigned char* in_register =
                    reinterpret_cast<unsigned char*>(&static_cast<MatrixRow*>(lanes[lane].operand)->r[i]) + 2 * half;
                Store ? memcpy(element, in_register, 2) : memcpy(in_register, element, 2);
            }
}

template <int Count, bool Transposed, bool Store>
void move_matrices(const void* row, const uint32* r, const char* what, const char* file, int line) {
    check_row(row, Count, what, file, line);
    MatrixRow operand{static_cast<unsigned char*>(const_cast<void*>(row)), const_cast<uint32*>(r)};
    meet(~0u, &operand, &complete_matrices<Count, Transposed, Store>, what, file, line);
}

}  // namespace fusegraph_cpu

template <int Count>
inline void load_matrices(uint32 (&r)[Count], const void* row, FUSEGRAPH_WHERE) {
    static_assert(Count == 4 || Count == 2, "two or four matrices");
    fusegraph_cpu::move_matrices<Count, false, false>(row, r, "load_matrices", file, line);
}

template <int Count>
inline void load_matrices_transposed(uint32 (&r)[Count], const void* row, FUSEGRAPH_WHERE) {
    static_assert(Count == 4 || Count == 2, "two or four matrices");
    fusegraph_cpu::move_matrices<Count, true, false>(row, r, "load_matrices_transposed", file, line);
}

template <int Count>
inline void store_matrices(void* row, const uint32 (&r)[Count], FUSEGRAPH_WHERE) {
    static_assert(Count == 4 || Count == 2, "two or four matrices");
    fusegraph_cpu::move_matrices<Count, false, true>(row, r, "store_matrices", file, line);
}

template <int Count>
inline void store_matrices_transposed(void* row, const uint32 (&r)[Count], FUSEGRAPH_WHERE) {
    static_assert(Count == 4 || Count == 2, "two or four matrices");
    fusegraph_cpu::move_matrices<Count, true, true>(row, r, "store_matrices_transposed", file, line);
}

template <class A, class B, class D>
inline void mma(D (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2], FUSEGRAPH_WHERE) {
    static_assert(__is_same(D, typename fusegraph_cpu::MatrixProduct<A, B>::sum), "d is float, for integers int32");
    fusegraph_cpu::Mma<D> operand{d, a, b};
    fusegraph_cpu::meet(~0u, &operand, &fusegraph_cpu::complete_mma<A, B, D>, "mma", file, line);
}

// Matrix fragments of a warp: loads and stores of 8x8 matrices (ldmatrix, stmatrix) and their product (mma.sync).
//
// Every lane of the warp takes part.  A register is four bytes of one row: two elements of 16 bits, four of 8, one of
// 32.  With g = lane / 4 and t = lane % 4, the fragments of mma are
//   a[r]   row g + 8 * (r & 1), bytes 4 * t + 16 * (r >> 1) of that row of A (16 rows of 32 bytes)
//   b[r]   column g, bytes 4 * t + 16 * r of that column of B (8 columns of 32 bytes)
//   d[i]   row g + 8 * (i >> 1), column 2 * t + (i & 1)
// load_matrices gives lane l row l / 4, bytes 4 * (l % 4) of every matrix, so that a's four registers are the matrices
// (rows 0-7, left half), (rows 8-15, left), (rows 0-7, right), (rows 8-15, right).
#pragma once
#include "shared.cuh"
#include "types.cuh"

struct tf32 {};  // names an operand type of 32 bits of which the tensor cores read the upper 19, see to_tf32

// Rounds to the nearest tf32 (10 bits of mantissa), ties away from zero, as far as tensor cores see: they leave out the
// other 13 bits, which cvt.rna.tf32 takes an instruction more to clear.
__device__ __forceinline__ uint32 to_tf32(float x) {
    const uint32 y = float_bits(x);
    return abs(x) < infinity<float>() ? y + 0x1000 : y;
}

#ifdef FUSEGRAPH_CPU
#include "mma_on_cpu.h"
#else

// What PTX calls the extent along the sum, and the types, of a product of A and B.
template <class A, class B>
struct MatrixProduct;
#define MATRIX_PRODUCT(A, B, K, TYPES)                          \
    template <>                                                 \
    struct MatrixProduct<A, B> {                                \
        static constexpr char k[] = K, types[] = TYPES;         \
    };
MATRIX_PRODUCT(bfloat16, bfloat16, "k16", ".f32.bf16.bf16")
MATRIX_PRODUCT(float16, float16, "k16", ".f32.f16.f16")
MATRIX_PRODUCT(tf32, tf32, "k8", ".f32.tf32.tf32")
MATRIX_PRODUCT(float8_e4m3, float8_e4m3, "k32", ".f32.e4m3.e4m3")
MATRIX_PRODUCT(float8_e4m3, float8_e5m2, "k32", ".f32.e4m3.e5m2")
MATRIX_PRODUCT(float8_e5m2, float8_e4m3, "k32", ".f32.e5m2.e4m3")
MATRIX_PRODUCT(float8_e5m2, float8_e5m2, "k32", ".f32.e5m2.e5m2")
MATRIX_PRODUCT(int8, int8, "k32", ".s32.s8.s8")
MATRIX_PRODUCT(int8, uint8, "k32", ".s32.s8.u8")
MATRIX_PRODUCT(uint8, int8, "k32", ".s32.u8.s8")
MATRIX_PRODUCT(uint8, uint8, "k32", ".s32.u8.u8")
#undef MATRIX_PRODUCT

// Matrices of 8 rows of 16 bytes in shared memory: lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(uint32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices(uint32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
// Every matrix of 8x8 16-bit elements transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// The inverse of load_matrices (sm_90 and later).
__device__ __forceinline__ void store_matrices(void* row, const uint32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void store_matrices(void* row, const uint32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
                 "r"(r[0]), "r"(r[1])
                 : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
                 "r"(r[0]), "r"(r[1])
                 : "memory");
}

// d += A B for 16 rows, 8 columns and 32 bytes of each along the sum: 16 elements of 16 bits, 8 of tf32, 32 of 8 bits.
// A and B are bfloat16, float16, tf32, an 8-bit float each (sm_89 and later) or an 8-bit integer each; D is float, for
// integers int32, which wraps around.  A is stored by rows, B by columns.
#define MMA(D, REGISTER, RESULT)                                                                            \
    template <class A, class B>                                                                             \
    __device__ __forceinline__ void mma(D (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {            \
        asm volatile(                                                                                       \
            "mma.sync.aligned.m16n8%10.row.col%11" RESULT                                                   \
            " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                              \
            : REGISTER(d[0]), REGISTER(d[1]), REGISTER(d[2]), REGISTER(d[3])                                \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "C"(MatrixProduct<A, B>::k), \
              "C"(MatrixProduct<A, B>::types));                                                             \
    }
MMA(float, "+f", ".f32")
MMA(int32, "+r", ".s32")
#undef MMA

#endif

// d += A B for pieces of the reduction that lie in registers: of each row of A (or column of B) lane 4 g + t has the same
// W words, those of rows g, g + 8, ... of A and of columns g, g + 8, ... of B.  Which terms these are does not matter,
// as long as they are the same.
template <class A, class B, class D, int M, int N, int W>
__device__ __forceinline__ void multiply_pieces(D (&d)[M / 2][N][4], const uint32 (&a)[M][W], const uint32 (&b)[N][W]) {
#pragma unroll
    for (int w = 0; w < W; w += 2)
#pragma unroll
        for (int i = 0; i < M; i += 2)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const uint32 left[4] = {a[i][w], a[i + 1][w], a[i][w + 1], a[i + 1][w + 1]};
                const uint32 right[2] = {b[j][w], b[j][w + 1]};
                mma<A, B>(d[i / 2][j], left, right);
            }
}

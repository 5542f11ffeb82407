// Fragments of a warp for mma in the forms in which kernels hold them.
#pragma once
#include "mma.cuh"

// Two fragments of B side by side: 16 columns of 32 bytes.
__device__ __forceinline__ void load_matrices(uint32 (&r)[2][2], const void* row) {
    uint32 both[4];
    load_matrices(both, row);
    r[0][0] = both[0], r[0][1] = both[1], r[1][0] = both[2], r[1][1] = both[3];
}
__device__ __forceinline__ void load_matrices_transposed(uint32 (&r)[2][2], const void* row) {
    uint32 both[4];
    load_matrices_transposed(both, row);
    r[0][0] = both[0], r[0][1] = both[1], r[1][0] = both[2], r[1][1] = both[3];
}

// Rounds a fragment of floats to tf32.
__device__ __forceinline__ void round_to_tf32(uint32 (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = to_tf32(bits_float(r[i]));
}
__device__ __forceinline__ void round_to_tf32(uint32 (&r)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i / 2][i % 2] = to_tf32(bits_float(r[i / 2][i % 2]));
}

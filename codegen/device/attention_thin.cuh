// Attention of a few queries, whose keys and values lie in registers as they came from memory.
#pragma once
#include "attention.cuh"
#include "memory.cuh"

namespace attention {

// Products of 16 queries with a tile of keys that lie in registers.  Piece c of a lane's key 8 * j + lane / 4 are the
// elements 32 * c + 8 * (lane % 4) and seven behind it; of the queries lane / 4 and eight below likewise.  What is the
// k-th term of an instruction is the same element on both sides.
template <class T, int N, int C>
__device__ __forceinline__ void multiply_keys(float (&score)[N], const Packed<T, 8> (&queries)[2][C],
                                              const Packed<T, 8> (&keys)[N / 4][C]) {
#pragma unroll
    for (int i = 0; i < N; ++i) score[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
        for (int h = 0; h < 4; h += 2) {
            const Packed<T, 8>&first = queries[0][c], &second = queries[1][c];
            const uint32 a[4] = {first.words[h], second.words[h], first.words[h + 1], second.words[h + 1]};
#pragma unroll
            for (int j = 0; j < N / 4; ++j) {
                const uint32 b[2] = {keys[j][c].words[h], keys[j][c].words[h + 1]};
                mma<T, T>(part(score, 4 * j), a, b);
            }
        }
}

// Adds the products of exponentials with the values of their keys, which lie in registers.  Of 16 keys from 16 * i on, a
// lane has those that it has exponentials of; piece c of one are the elements 64 * c + 8 * (lane / 4) and seven behind
// it: so column g of the e-th matrix of a piece is its element 8 * g + e.
template <class T, int N, int I, int C>
__device__ __forceinline__ void add_values(float (&sum)[N], const uint32 (&weights)[I][4],
                                           const Packed<T, 8> (&values)[I][4][C]) {
#pragma unroll
    for (int i = 0; i < I; ++i)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                uint32 b[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint32 one = values[i][2 * h][c].words[e / 2], other = values[i][2 * h + 1][c].words[e / 2];
                    b[h] = e % 2 ? one >> 16 | (other & 0xffff0000u) : (one & 0xffffu) | other << 16;
                }
                mma<T, T>(part(sum, (c * 8 + e) * 4), weights[i], b);
            }
}

// Writes a thread's part of row f of such sums to that row: of each piece, the elements of columns 2 * (lane % 4) and the
// next.
template <int N>
__device__ __forceinline__ void store_values(float* row, const float (&sum)[N], int f) {
#pragma unroll
    for (int c = 0; c < N / 32; ++c)
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            Vector<float, 4> four;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int at = (c * 8 + h % 2 * 4 + e) * 4 + h / 2;
                four[e] = f ? sum[at + 2] : sum[at];
            }
            store_shared(row + c * 64 + threadIdx.x % 4 * 16 + h * 4, four);
        }
}

}  // namespace attention

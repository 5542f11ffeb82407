// causal_attention_o_kernel: 19 nodes in one kernel
//     o products = matmul(o queries, o keys turned, dtype=float32)
//     o scaled = mul(o products, 0.0883883461356163)
//     o row = gen_index(o scaled, axis=3)
//     o key = gen_index(o scaled, axis=4)
//     o right of band = cmp_le(o key, o row)
//     o masked = binary_select(o scaled, -inf, o right of band)
//     o largest = reduction(o masked, mode='max', axes=(4,))
//     o alone = cmp_eq(o largest, -inf)
//     o shift = binary_select(0.0, o largest, o alone)
//     o shifted = sub(o masked, o shift)
//     o exponentials = exp(o shifted)
//     o sum = reduction(o exponentials, axes=(4,))
//     o none = cmp_eq(o sum, 0.0)
//     o divisor = binary_select(1.0, o sum, o none)
//     o inverse = reciprocal(o divisor)
//     o probabilities = mul(o exponentials, o inverse)
//     o rounded = narrow(o probabilities, dtype=bfloat16)
//     o attended = matmul(o rounded, o values, dtype=bfloat16)
//     o = reshape(o attended, shape=(1, 16, 2048, 128))
// 16 x 2048 queries and 2048 keys of 128 elements, values of 128, bfloat16
// 64 queries a block, 16 a warp, tiles of 64 keys in 2 stages (cp.async)
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "async_copy.cuh"
#include "attention.cuh"
#include "fragments.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128) causal_attention_o_kernel(
    const bfloat16* __restrict__ o_queries,
    const bfloat16* __restrict__ o_keys_turned,
    const bfloat16* __restrict__ o_values,
    bfloat16* __restrict__ o_2)
{
    struct Shared {
        alignas(16) bfloat16 queries[64][136];
        alignas(16) bfloat16 keys[2][64][136];
        alignas(16) bfloat16 values[2][64][136];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const int row = warp * 16 + lane / 4;  // of a thread's first result in the tile
    const Tile at = tile_at<16, 32, 16>(blockIdx.x);
    const int m0 = (31 - at.col) * 64;
    const int32 b0 = at.row / 4;
    const int32 b1 = at.row % 4;
    const int first = 0, last = min(32, max(0, (m0 + 63) + 64) / 64);  // tiles of keys that the queries may meet
    const float unit = 0.12751743f;  // of a score, to base 2
    float o[64] = {};
    attention::Rows rows;
    float s[32], rescale[2];
    uint32 probability[4][4];
    const auto scores = [&](int tile) {
        const int n0 = tile * 64;
        if ((m0 + warp * 16) - n0 - 63 >= 0) {
            return;  // the products are the scores
        }
        #pragma unroll
        for (int j = 0; j < 32; j += 4) {
            #pragma unroll
            for (int f = 0; f < 2; ++f) {
                const int32 m = m0 + row + f * 8, n = n0 + j * 2 + lane % 4 * 2;
                Vector<float, 2> score;
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool o_right_of_band = int32(n + e) <= int32(m);
                    score[e] = o_right_of_band ? s[j + f * 2 + e] : -infinity<float>();
                }
                s[j + f * 2] = score[0];
                s[j + f * 2 + 1] = score[1];
            }
        }
    };
    const auto fill = [&](int tile, int stage) {
        const int n0 = tile * 64;
        #pragma unroll
        for (int i = t; i < 1024; i += 128) {
            const int r = i / 16, d = i % 16 * 8;
            copy_async<16>(&shared.keys[stage][r][d], o_keys_turned + b0 * 262144 + (int32(n0 + r)) * 128 + d);
        }
        #pragma unroll
        for (int i = t; i < 1024; i += 128) {
            const int r = i / 16, d = i % 16 * 8;
            copy_async<16>(&shared.values[stage][r][d], o_values + b0 * 262144 + (int32(n0 + r)) * 128 + d);
        }
    };
    #pragma unroll
    for (int i = t; i < 1024; i += 128) {
        const int r = i / 16, d = i % 16 * 8;
        copy_async<16>(&shared.queries[r][d], o_queries + b0 * 1048576 + b1 * 262144 + (int32(m0 + r)) * 128 + d);
    }
    if (first < last) fill(last - 1, 0);
    copy_async_commit();
    int stage = 0;
    for (int tile = last - 1; tile >= first; --tile, stage ^= 1) {
        if (tile > first) fill(tile - 1, stage ^ 1);
        copy_async_commit();
        copy_async_wait<1>();  // this tile is there, the next one is on its way
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = 0.0f;
        #pragma unroll
        for (int kk = 0; kk < 128; kk += 16) {
            uint32 a[4];
            load_matrices(a, &shared.queries[warp * 16 + lane % 16][kk + lane / 16 * 8]);
            #pragma unroll
            for (int j = 0; j < 64; j += 16) {
                uint32 b[2][2];
                load_matrices(b, &shared.keys[stage][j + lane / 16 * 8 + lane % 8][kk + lane / 8 % 2 * 8]);
                mma<bfloat16, bfloat16>(attention::part(s, j / 2), a, b[0]);
                mma<bfloat16, bfloat16>(attention::part(s, j / 2 + 4), a, b[1]);
            }
        }
        scores(tile);
        attention::softmax<2>(s, rows, unit, rescale);
        attention::scale(o, rescale);
        attention::round_to_fragments<bfloat16>(s, probability);
        #pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            #pragma unroll
            for (int j = 0; j < 128; j += 16) {
                uint32 b[2][2];
                load_matrices_transposed(b, &shared.values[stage][kk * 16 + lane % 16][j + lane / 16 * 8]);
                mma<bfloat16, bfloat16>(attention::part(o, j / 2), probability[kk], b[0]);
                mma<bfloat16, bfloat16>(attention::part(o, j / 2 + 4), probability[kk], b[1]);
            }
        }
        __syncthreads();  // the tile has been used
    }
    attention::finish(rows);
    float inverse[2];
    #pragma unroll
    for (int f = 0; f < 2; ++f) {
        const bool met = rows.total[f] != 0.0f;  // whether there is a key, if only one of NaN
        inverse[f] = met ? 1.0f / rows.total[f] : 0.0f;
        if (!met) attention::clear(o, f);  // zeros, whatever the values of the keys are
    }
    #pragma unroll
    for (int i = 0; i < 64; i += 2) {
        const int32 m = m0 + row + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2;
        Vector<bfloat16, 2> v;
        v[0] = convert<bfloat16>(o[i] * inverse[i / 2 % 2]);
        v[1] = convert<bfloat16>(o[i + 1] * inverse[i / 2 % 2]);
        store(o_2 + b0 * 1048576 + b1 * 262144 + m * 128 + n, v);
    }
}

// gradients_dQ_by_queries_kernel: 23 nodes in one kernel
//     dQ products = matmul(dQ queries, dQ keys turned, dtype=float32)
//     dQ scaled = mul(dQ products, 0.125)
//     dQ row = gen_index(dQ scaled, axis=3)
//     dQ key = gen_index(dQ scaled, axis=4)
//     dQ right of band = cmp_le(dQ key, dQ row)
//     dQ masked = binary_select(dQ scaled, -inf, dQ right of band)
//     dQ by probabilities = matmul(dQ gradient of result, dQ values turned, dtype=float32)
//     dQ shifted = sub(dQ masked, dQ lse)
//     dQ probabilities = exp(dQ shifted)
//     dQ by probabilities less row_dot = sub(dQ by probabilities, dQ row_dot)
//     dQ by scores = mul(dQ probabilities, dQ by probabilities less row_dot)
//     dQ by products = mul(dQ by scores, 0.125)
//     dQ rounded = narrow(dQ probabilities, dtype=bfloat16)
//     dQ rounded by products = narrow(dQ by products, dtype=bfloat16)
//     dQ by queries = matmul(dQ rounded by products, dQ keys, dtype=bfloat16)
//     dQ by keys weights = transpose(dQ rounded by products, perm=(0, 1, 2, 4, 3))
//     dQ by keys of heads = matmul(dQ by keys weights, dQ queries, dtype=float32)
//     dQ by keys of groups = reduction(dQ by keys of heads, axes=(2,))
//     dQ rounded by keys = narrow(dQ by keys of groups, dtype=bfloat16)
//     dQ by values weights = transpose(dQ rounded, perm=(0, 1, 2, 4, 3))
//     dQ by values of heads = matmul(dQ by values weights, dQ gradient of result, dtype=float32)
//     dQ by values of groups = reduction(dQ by values of heads, axes=(2,))
//     dQ rounded by values = narrow(dQ by values of groups, dtype=bfloat16)
// 4 x 1024 queries and 1024 keys of 64 elements, values of 64, bfloat16
// for 64 queries a block, 16 a warp, tiles of 64 of the others in 2 stages (cp.async)
#include "async_copy.cuh"
#include "attention.cuh"
#include "fragments.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "types.cuh"
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(128) gradients_dQ_by_queries_kernel(
    const bfloat16* dQ_queries,
    const bfloat16* dQ_keys_turned,
    const bfloat16* dQ_values,
    const bfloat16* dQ_gradient_of_result,
    const float* dQ_log_sums,
    const float* dQ_row_dot,
    bfloat16* __restrict__ dQ_by_queries)
{
    grid_dependency_wait();
    struct Shared {
        alignas(16) bfloat16 queries[64][72];
        alignas(16) bfloat16 losses[64][72];
        alignas(16) bfloat16 keys[2][64][72];
        alignas(16) bfloat16 values[2][64][72];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const int row = warp * 16 + lane / 4;  // of a thread's first result in the tile
    const Tile at = tile_at<4, 16, 4>(blockIdx.x);
    const int r0 = (15 - at.col) * 64;
    const int32 b1 = at.row / 2;
    const int32 b2 = at.row % 2;
    const float unit = 0.18033688f;  // of a score, to base 2
    float by_s[32] = {};
    float s[32], d[32];
    uint32 factor[4][4];
    float lse[2], row_dot[2];
    #pragma unroll
    for (int f = 0; f < 2; ++f) {
        const int32 m = r0 + row + f * 8;
        lse[f] = attention::lse(1.442695f * dQ_log_sums[b1 * 2048 + b2 * 1024 + m]);
        row_dot[f] = dQ_row_dot[b1 * 2048 + b2 * 1024 + m];
    }
    #pragma unroll
    for (int i = t; i < 512; i += 128) {
        const int r = i / 8, x = i % 8 * 8;
        copy_async<16>(&shared.queries[r][x], dQ_queries + b1 * 131072 + b2 * 65536 + (int32(r0 + r)) * 64 + x);
    }
    #pragma unroll
    for (int i = t; i < 512; i += 128) {
        const int r = i / 8, x = i % 8 * 8;
        copy_async<16>(&shared.losses[r][x], dQ_gradient_of_result + b1 * 131072 + b2 * 65536 + (int32(r0 + r)) * 64 + x);
    }
    const int first = 0, last = min(16, max(0, (r0 + 63) + 64) / 64);  // tiles of keys that the queries may meet
    const auto scores = [&](int tile) {
        const int c0 = tile * 64;
        if ((r0 + warp * 16) - c0 - 63 >= 0) {
            return;  // the products are the scores
        }
        #pragma unroll
        for (int j = 0; j < 32; j += 4) {
            #pragma unroll
            for (int f = 0; f < 2; ++f) {
                const int32 m = r0 + row + f * 8, n = c0 + j * 2 + lane % 4 * 2;
                Vector<float, 2> score;
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool dQ_right_of_band = int32(n + e) <= int32(m);
                    score[e] = dQ_right_of_band ? s[j + f * 2 + e] : -infinity<float>();
                }
                s[j + f * 2] = score[0];
                s[j + f * 2 + 1] = score[1];
            }
        }
    };
    const auto fill = [&](int tile, int stage) {
        const int c0 = tile * 64;
        #pragma unroll
        for (int i = t; i < 512; i += 128) {
            const int r = i / 8, x = i % 8 * 8;
            copy_async<16>(&shared.keys[stage][r][x], dQ_keys_turned + b1 * 65536 + (int32(c0 + r)) * 64 + x);
        }
        #pragma unroll
        for (int i = t; i < 512; i += 128) {
            const int r = i / 8, x = i % 8 * 8;
            copy_async<16>(&shared.values[stage][r][x], dQ_values + b1 * 65536 + (int32(c0 + r)) * 64 + x);
        }
    };
    if (first < last) fill(first, 0);
    copy_async_commit();
    int stage = 0;
    for (int tile = first; tile < last; ++tile, stage ^= 1) {
        if (tile + 1 < last) fill(tile + 1, stage ^ 1);
        copy_async_commit();
        copy_async_wait<1>();  // this tile is there, the next one is on its way
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = 0.0f;
        #pragma unroll
        for (int kk = 0; kk < 64; kk += 16) {
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
        #pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = math::fast_exp2(unit * s[i] - lse[i / 2 % 2]);
        #pragma unroll
        for (int i = 0; i < 32; ++i) d[i] = 0.0f;
        #pragma unroll
        for (int kk = 0; kk < 64; kk += 16) {
            uint32 a[4];
            load_matrices(a, &shared.losses[warp * 16 + lane % 16][kk + lane / 16 * 8]);
            #pragma unroll
            for (int j = 0; j < 64; j += 16) {
                uint32 b[2][2];
                load_matrices(b, &shared.values[stage][j + lane / 16 * 8 + lane % 8][kk + lane / 8 % 2 * 8]);
                mma<bfloat16, bfloat16>(attention::part(d, j / 2), a, b[0]);
                mma<bfloat16, bfloat16>(attention::part(d, j / 2 + 4), a, b[1]);
            }
        }
        #pragma unroll
        for (int i = 0; i < 32; ++i) d[i] = s[i] * (d[i] - row_dot[i / 2 % 2]);
        attention::round_to_fragments<bfloat16>(d, factor);
        #pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            #pragma unroll
            for (int j = 0; j < 64; j += 16) {
                uint32 b[2][2];
                load_matrices_transposed(b, &shared.keys[stage][kk * 16 + lane % 16][j + lane / 16 * 8]);
                mma<bfloat16, bfloat16>(attention::part(by_s, j / 2), factor[kk], b[0]);
                mma<bfloat16, bfloat16>(attention::part(by_s, j / 2 + 4), factor[kk], b[1]);
            }
        }
        __syncthreads();  // the tile has been used
    }
    #pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const int32 m = r0 + row + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2;
        Vector<bfloat16, 2> v;
        v[0] = convert<bfloat16>(0.125f * by_s[i]);
        v[1] = convert<bfloat16>(0.125f * by_s[i + 1]);
        store(dQ_by_queries + b1 * 131072 + b2 * 65536 + m * 64 + n, v);
    }
}

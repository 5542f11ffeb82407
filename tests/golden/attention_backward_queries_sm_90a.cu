// gradients_dQ_by_queries_kernel: 29 nodes in one kernel
//     dQ products = matmul(dQ queries, dQ keys turned, dtype=float32)
//     dQ scaled = mul(dQ products, 0.125)
//     dQ share = mul(dQ scaled, 0.03333333507180214)
//     dQ tanh = tanh(dQ share)
//     dQ capped = mul(dQ tanh, 30.0)
//     dQ row = gen_index(dQ capped, axis=3)
//     dQ key = gen_index(dQ capped, axis=4)
//     dQ right of band = cmp_le(dQ key, dQ row)
//     dQ masked = binary_select(dQ capped, -inf, dQ right of band)
//     dQ by probabilities = matmul(dQ gradient of result, dQ values turned, dtype=float32)
//     dQ shifted = sub(dQ masked, dQ lse)
//     dQ probabilities = exp(dQ shifted)
//     dQ by probabilities less row_dot = sub(dQ by probabilities, dQ row_dot)
//     dQ by scores = mul(dQ probabilities, dQ by probabilities less row_dot)
//     dQ square = mul(dQ tanh, dQ tanh)
//     dQ slope = sub(1.0, dQ square)
//     dQ by capped = mul(dQ by scores, dQ slope)
//     dQ by products = mul(dQ by capped, 0.125)
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
// for 128 queries a block, tiles of 96 of the others in 3 stages filled by TMA, 2 consumer warpgroups
#include "attention.cuh"
#include "math.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
#include "order.cuh"
FUSEGRAPH_WGMMA(96)
FUSEGRAPH_WGMMA(64)

extern "C" __global__ void __launch_bounds__(384, 1) gradients_dQ_by_queries_kernel(
    const __grid_constant__ TensorMap dQ_queries_map,
    const __grid_constant__ TensorMap dQ_keys_turned_map,
    const __grid_constant__ TensorMap dQ_values_map,
    const __grid_constant__ TensorMap dQ_gradient_of_result_map,
    const float* dQ_log_sums,
    const float* dQ_row_dot,
    const __grid_constant__ TensorMap dQ_by_queries_map)
{
    grid_dependency_wait();
    struct Shared {
        alignas(1024) bfloat16 queries[1][1][128][64];  // panels of 128 bytes, swizzled
        alignas(1024) bfloat16 losses[1][1][128][64];  // panels of 128 bytes, swizzled
        alignas(1024) bfloat16 keys[3][1][96][64];
        alignas(1024) bfloat16 values[3][1][96][64];
        Barrier held_full[1];
        Barrier held_empty[1];
        Barrier full[3];
        Barrier empty[3];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        for (int i = 0; i < 1; ++i) {
            barrier_init(shared.held_full[i], 1);
            barrier_init(shared.held_empty[i], 2);
        }
        for (int i = 0; i < 3; ++i) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], 2);
        }
        barrier_fence_init();
    }
    __syncthreads();

    if (group < 0) {
        registers_decrease<40>();
        Ring<3> stage;
        Ring<1> held;
        if (threadIdx.x == 0) {
            for (int work = blockIdx.x; work < 32; work += gridDim.x, ++held) {
                const Tile at = tile_at<4, 8, 4>(work);
                const int r0 = (7 - at.col) * 128;
                const int32 b1 = at.row / 2;
                const int32 b2 = at.row % 2;
                barrier_wait(shared.held_empty[held.index], held.parity ^ 1);
                barrier_expect(shared.held_full[held.index], 32768);
                tma_load(shared.queries[held.index][0], dQ_queries_map, shared.held_full[held.index], 0, r0, b1, b2);
                tma_load(shared.losses[held.index][0], dQ_gradient_of_result_map, shared.held_full[held.index], 0, r0, b1, b2);
                const int first = 0, last = min(11, max(0, (r0 + 127) + 96) / 96);  // tiles of keys that the queries may meet
                for (int tile = first; tile < last; ++tile, ++stage) {
                    barrier_wait(shared.empty[stage.index], stage.parity ^ 1);
                    barrier_expect(shared.full[stage.index], 24576);
                    tma_load(shared.keys[stage.index][0], dQ_keys_turned_map, shared.full[stage.index], 0, tile * 96, b1);
                    tma_load(shared.values[stage.index][0], dQ_values_map, shared.full[stage.index], 0, tile * 96, b1);
                }
            }
        }
    } else {
        registers_increase<232>();
        const int t = threadIdx.x % 128, lane = t % 32;
        const int row = group * 64 + t / 32 * 16 + lane / 4;  // of a thread's first result in the tile
        const float unit = 43.28085f;  // of a score, to base 2
        Ring<3> stage;
        Ring<1> held;
        for (int work = blockIdx.x; work < 32; work += gridDim.x, ++held) {
            const Tile at = tile_at<4, 8, 4>(work);
            const int r0 = (7 - at.col) * 128;
            const int32 b1 = at.row / 2;
            const int32 b2 = at.row % 2;
            float by_s[32] = {};
            float s[48], d[48], slope[48];
            uint32 factor[6][4];
            float lse[2], row_dot[2];
            #pragma unroll
            for (int f = 0; f < 2; ++f) {
                const int32 m = r0 + row + f * 8;
                lse[f] = attention::lse(1.442695f * dQ_log_sums[b1 * 2048 + b2 * 1024 + m]);
                row_dot[f] = dQ_row_dot[b1 * 2048 + b2 * 1024 + m];
            }
            barrier_wait(shared.held_full[held.index], held.parity);
            const int first = 0, last = min(11, max(0, (r0 + 127) + 96) / 96);  // tiles of keys that the queries may meet
            const auto scores = [&](int tile) {
                const int c0 = tile * 96;
                if (c0 + 96 <= 1024 && (r0 + group * 64) - c0 - 95 >= 0) {
                    #pragma unroll
                    for (int j = 0; j < 48; j += 4) {
                        #pragma unroll
                        for (int f = 0; f < 2; ++f) {
                            const int32 m = r0 + row + f * 8, n = c0 + j * 2 + lane % 4 * 2;
                            Vector<float, 2> score;
                            Vector<float, 2> slope_of;
                            #pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const float dQ_scaled_2 = s[j + f * 2 + e] * 0.125f;
                                const float dQ_share_2 = dQ_scaled_2 * 0.033333335f;
                                const float dQ_tanh_2 = math::tanh(dQ_share_2);
                                const float dQ_square_2 = dQ_tanh_2 * dQ_tanh_2;
                                score[e] = dQ_tanh_2;
                                slope_of[e] = 1.0f - dQ_square_2;
                            }
                            s[j + f * 2] = score[0];
                            s[j + f * 2 + 1] = score[1];
                            slope[j + f * 2] = slope_of[0];
                            slope[j + f * 2 + 1] = slope_of[1];
                        }
                    }
                } else {
                    #pragma unroll
                    for (int j = 0; j < 48; j += 4) {
                        #pragma unroll
                        for (int f = 0; f < 2; ++f) {
                            const int32 m = r0 + row + f * 8, n = c0 + j * 2 + lane % 4 * 2;
                            Vector<float, 2> score = {{-infinity<float>(), -infinity<float>()}};
                            Vector<float, 2> slope_of = {};
                            #pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                if (n + e >= 1024) continue;
                                const float dQ_scaled = s[j + f * 2 + e] * 0.125f;
                                const float dQ_share = dQ_scaled * 0.033333335f;
                                const float dQ_tanh = math::tanh(dQ_share);
                                const bool dQ_right_of_band = int32(n + e) <= int32(m);
                                const float dQ_square = dQ_tanh * dQ_tanh;
                                score[e] = dQ_right_of_band ? dQ_tanh : -infinity<float>();
                                slope_of[e] = 1.0f - dQ_square;
                            }
                            s[j + f * 2] = score[0];
                            s[j + f * 2 + 1] = score[1];
                            slope[j + f * 2] = slope_of[0];
                            slope[j + f * 2 + 1] = slope_of[1];
                        }
                    }
                }
            };
            Ring<3> previous = stage;
            for (int tile = first; tile < last; ++tile) {
                barrier_wait(shared.full[stage.index], stage.parity);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    wgmma<bfloat16, bfloat16, 96>(
                        s, matrix_descriptor<128>(&shared.queries[held.index][kk / 4][group * 64][kk % 4 * 16], 16, 1024),
                        matrix_descriptor<128>(&shared.keys[stage.index][kk / 4][0][kk % 4 * 16], 16, 1024), kk > 0);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the sums of the tile before are made
                if (t == 0 && tile > first) barrier_arrive(shared.empty[previous.index]);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    wgmma<bfloat16, bfloat16, 96>(
                        d, matrix_descriptor<128>(&shared.losses[held.index][kk / 4][group * 64][kk % 4 * 16], 16, 1024),
                        matrix_descriptor<128>(&shared.values[stage.index][kk / 4][0][kk % 4 * 16], 16, 1024), kk > 0);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the products of queries and keys are there
                wgmma_hold(s);
                scores(tile);
                #pragma unroll
                for (int i = 0; i < 48; ++i) s[i] = math::fast_exp2(unit * s[i] - lse[i / 2 % 2]);
                wgmma_wait<0>();  // those with the loss are there
                wgmma_hold(d);
                #pragma unroll
                for (int i = 0; i < 48; ++i) d[i] = s[i] * (d[i] - row_dot[i / 2 % 2]);
                #pragma unroll
                for (int i = 0; i < 48; ++i) d[i] *= slope[i];
                attention::round_to_fragments<bfloat16>(d, factor);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 6; ++kk) {
                    wgmma<bfloat16, bfloat16, 64, 1>(
                        by_s, factor[kk], matrix_descriptor<128>(&shared.keys[stage.index][0][kk * 16][0], 12288, 1024), true);
                }
                wgmma_commit();
                previous = stage;
                ++stage;
            }
            wgmma_wait<0>();
            if (t == 0 && first < last) barrier_arrive(shared.empty[previous.index]);
            wgmma_hold(by_s);
            // The results take the place of what the block kept, of which nothing is left to multiply.
            #pragma unroll
            for (int j = 0; j < 64; j += 16) {
                Vector<bfloat16, 2> v[4];
                #pragma unroll
                for (int i = 0; i < 8; ++i) v[i / 2][i % 2] = convert<bfloat16>(0.125f * by_s[j / 2 + i]);
                store_fragments<64>(&shared.queries[held.index][j / 64][group * 64][0], t / 32 * 16, j % 64, v);
            }
            fence_async_shared();
            named_barrier_sync(1 + group, 128);
            if (t == 0) {
                #pragma unroll
                for (int i = 0; i < 1; ++i) {
                    tma_store(dQ_by_queries_map, shared.queries[held.index][i][group * 64], i * 64, r0 + group * 64, b1, b2);
                }
                tma_commit();
                tma_wait_read<0>();
                barrier_arrive(shared.held_empty[held.index]);
            }
        }
    }
}

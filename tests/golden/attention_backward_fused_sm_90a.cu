// gradients_dQ_by_queries_sums_kernel: 23 nodes in one kernel
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
// for 128 keys a block, tiles of 64 of the others in 2 stages filled by TMA, 2 consumer warpgroups
#include "attention.cuh"
#include "math.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "tma.cuh"
#include "turns.cuh"
#include "types.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
#include "order.cuh"
FUSEGRAPH_WGMMA(64)
FUSEGRAPH_WGMMA(32)

extern "C" __global__ void __launch_bounds__(384, 1) gradients_dQ_by_queries_sums_kernel(
    const __grid_constant__ TensorMap dQ_queries_map,
    const __grid_constant__ TensorMap dQ_keys_turned_map,
    const __grid_constant__ TensorMap dQ_values_map,
    const __grid_constant__ TensorMap dQ_gradient_of_result_map,
    const float* dQ_log_sums,
    const float* dQ_row_dot,
    const __grid_constant__ TensorMap dQ_rounded_by_keys_map,
    const __grid_constant__ TensorMap dQ_rounded_by_values_map,
    const __grid_constant__ TensorMap dQ_by_queries_sums_map,
    int32* __restrict__ dQ_by_queries_order)
{
    grid_dependency_wait();
    grid_dependency_launch();
    struct Shared {
        alignas(1024) bfloat16 keys[1][1][128][64];  // panels of 128 bytes, swizzled
        alignas(1024) bfloat16 values[1][1][128][64];  // panels of 128 bytes, swizzled
        alignas(1024) bfloat16 queries[2][1][64][64];
        alignas(1024) bfloat16 losses[2][1][64][64];
        alignas(1024) bfloat16 gradients[2][2][64][64];  // by scores, in turn
        alignas(1024) float sums[2][2][64][32];  // on their way to those of queries
        Barrier sums_empty[2];
        int number;
        alignas(16) float numbers[2][2][64];  // lse and row_dot of a tile's queries, and of the next one's
        Barrier held_full[1];
        Barrier held_empty[1];
        Barrier full[2];
        Barrier empty[2];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        for (int i = 0; i < 1; ++i) {
            barrier_init(shared.held_full[i], 1);
            barrier_init(shared.held_empty[i], 2);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], 2);
        }
        for (int i = 0; i < 2; ++i) barrier_init(shared.sums_empty[i], 1);
        shared.number = take_number(dQ_by_queries_order);
        barrier_fence_init();
    }
    __syncthreads();

    const Tile at = tile_at<2, 8, 1>(shared.number);
    const int r0 = (7 - at.col) * 128;
    const int32 b1 = at.row;

    if (group < 0) {
        registers_decrease<40>();
        Ring<2> stage;
        Ring<1> held;
        if (threadIdx.x == 0) {
            barrier_wait(shared.held_empty[held.index], held.parity ^ 1);
            barrier_expect(shared.held_full[held.index], 32768);
            tma_load(shared.keys[held.index][0], dQ_keys_turned_map, shared.held_full[held.index], 0, r0, b1);
            tma_load(shared.values[held.index][0], dQ_values_map, shared.held_full[held.index], 0, r0, b1);
            for (int32 b2 = 0; b2 < 2; ++b2) {
                const int first = max(0, r0) / 64, last = 16;  // tiles of queries that the keys may meet
                for (int tile = first; tile < last; ++tile, ++stage) {
                    barrier_wait(shared.empty[stage.index], stage.parity ^ 1);
                    barrier_expect(shared.full[stage.index], 16384);
                    tma_load(shared.queries[stage.index][0], dQ_queries_map, shared.full[stage.index], 0, tile * 64, b1, b2);
                    tma_load(shared.losses[stage.index][0], dQ_gradient_of_result_map, shared.full[stage.index], 0, tile * 64, b1, b2);
                }
            }
        } else if (threadIdx.x / 32 == 1) {
            for (int32 b2 = 0; b2 < 2; ++b2) {
                const int first = max(0, r0) / 64, last = 16;  // tiles of queries that the keys may meet
                for (int tile = first; tile < last; ++tile) {
                    #pragma unroll 4
                    for (int i = threadIdx.x % 32; i < 128; i += 32) {
                        const int32 x = tile * 64 + i % 64;
                        shared.numbers[tile % 2][i / 64][i % 64] = i < 64 ? attention::lse(1.442695f * dQ_log_sums[b1 * 2048 + b2 * 1024 + x]) : dQ_row_dot[b1 * 2048 + b2 * 1024 + x];
                    }
                    named_barrier_sync(4, 288);
                }
                if (first < last) named_barrier_sync(4, 288);  // those of the last one are no longer needed
            }
        } else if (threadIdx.x >= 64) {
            const int writer = (threadIdx.x - 64) / 32;
            Ring<2> sent;
            for (int32 b2 = 0; b2 < 2; ++b2) {
                const int first = max(0, r0) / 64, last = 16;  // tiles of queries that the keys may meet
                for (int tile = first; tile < last; ++tile, ++sent) {
                    if (sent.index != writer) continue;
                    named_barrier_sync(5 + writer, 288);
                    if (threadIdx.x % 32 == 0) {
                        int32* const turns = dQ_by_queries_order + b1 * 32 + b2 * 16 + tile + 1;
                        const int turn = min(8, max(0, (tile * 64 + 63) + 128) / 128) - 1 - r0 / 128;  // blocks of keys that the queries meet come before
                        turn_wait(turns, turn);
                        for (int i = 0; i < 2; ++i) {
                            if (turn == 0) {
                                tma_store(dQ_by_queries_sums_map, shared.sums[writer][i], i * 32, tile * 64, b1, b2);
                            } else {
                                tma_store_add(dQ_by_queries_sums_map, shared.sums[writer][i], i * 32, tile * 64, b1, b2);
                            }
                        }
                        tma_commit();
                        tma_wait_read<0>();
                        barrier_arrive(shared.sums_empty[writer]);
                        tma_wait<0>();
                        turn_end(turns);
                    }
                    __syncwarp();
                }
            }
        }
    } else {
        registers_increase<232>();
        const int t = threadIdx.x % 128, lane = t % 32;
        const int row = group * 64 + t / 32 * 16 + lane / 4;  // of a thread's first result in the tile
        const float unit = 0.18033688f;  // of a score, to base 2
        Ring<2> stage;
        Ring<1> held;
        Ring<2> sent;  // places of gradients and of their products with the keys
        float by_s[32] = {};
        float by_p[32] = {};
        float s[32], d[32], by_k[16];
        uint32 factor[4][4], g_factor[4][4];
        barrier_wait(shared.held_full[held.index], held.parity);
        for (int32 b2 = 0; b2 < 2; ++b2) {
            const int first = max(0, r0) / 64, last = 16;  // tiles of queries that the keys may meet
            const auto scores = [&](int tile) {
                const int c0 = tile * 64;
                if (c0 - (r0 + group * 64) - 63 >= 0) {
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
                            const bool dQ_right_of_band = int32(m) <= int32(n + e);
                            score[e] = dQ_right_of_band ? s[j + f * 2 + e] : -infinity<float>();
                        }
                        s[j + f * 2] = score[0];
                        s[j + f * 2 + 1] = score[1];
                    }
                }
            };
            if (first < last) named_barrier_sync(4, 288);
            for (int tile = first; tile < last; ++tile, ++stage, ++sent) {
                barrier_wait(shared.full[stage.index], stage.parity);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    wgmma<bfloat16, bfloat16, 64>(
                        s, matrix_descriptor<128>(&shared.keys[held.index][kk / 4][group * 64][kk % 4 * 16], 16, 1024),
                        matrix_descriptor<128>(&shared.queries[stage.index][kk / 4][0][kk % 4 * 16], 16, 1024), kk > 0);
                }
                wgmma_commit();
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    wgmma<bfloat16, bfloat16, 64>(
                        d, matrix_descriptor<128>(&shared.values[held.index][kk / 4][group * 64][kk % 4 * 16], 16, 1024),
                        matrix_descriptor<128>(&shared.losses[stage.index][kk / 4][0][kk % 4 * 16], 16, 1024), kk > 0);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the products of queries and keys are there
                wgmma_hold(s);
                scores(tile);
                #pragma unroll
                for (int j = 0; j < 32; j += 4) {
                    const auto x = load_shared<2>(&shared.numbers[tile % 2][0][0] + j * 2 + lane % 4 * 2);
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) s[j + i] = math::fast_exp2(unit * s[j + i] - x[i % 2]);
                }
                attention::round_to_fragments<bfloat16>(s, factor);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    wgmma<bfloat16, bfloat16, 64, 1>(
                        by_p, factor[kk], matrix_descriptor<128>(&shared.losses[stage.index][0][kk * 16][0], 8192, 1024), true);
                }
                wgmma_commit();
                wgmma_wait<1>();  // those with the loss are there
                wgmma_hold(d);
                #pragma unroll
                for (int j = 0; j < 32; j += 4) {
                    const auto x = load_shared<2>(&shared.numbers[tile % 2][1][0] + j * 2 + lane % 4 * 2);
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) d[j + i] = s[j + i] * (d[j + i] - x[i % 2]);
                }
                attention::round_to_fragments<bfloat16>(d, g_factor);
                auto& by_scores = shared.gradients[sent.index];
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    store_words_turned<64>(&by_scores[group][0][0], t / 32 * 16, j * 16, g_factor[j]);
                }
                fence_async_shared();
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    wgmma<bfloat16, bfloat16, 64, 1>(
                        by_s, g_factor[kk], matrix_descriptor<128>(&shared.queries[stage.index][0][kk * 16][0], 8192, 1024), true);
                }
                wgmma_commit();
                named_barrier_sync(4, 288);  // those of all keys are there, and the numbers of the next queries
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 8; ++kk) {
                    wgmma<bfloat16, bfloat16, 32, 1>(
                        by_k, matrix_descriptor<128>(&shared.keys[held.index][0][kk * 16][0], 16384, 1024),
                        matrix_descriptor<128>(&by_scores[kk / 4][group * 32][kk % 4 * 16], 16, 1024), kk > 0);
                }
                wgmma_commit();
                wgmma_wait<0>();
                if (t == 0) barrier_arrive(shared.empty[stage.index]);
                wgmma_hold(by_k);
                barrier_wait(shared.sums_empty[sent.index], sent.parity ^ 1);
                attention::store_turned(&shared.sums[sent.index][t / 64][group * 32][0], (t / 32 * 16 + lane / 4) % 32, by_k);
                fence_async_shared();
                named_barrier_arrive(5 + sent.index, 288);
            }
        }
        wgmma_hold(by_s);
        wgmma_hold(by_p);
        named_barrier_sync(4, 256);  // no keys are needed by the other warpgroup
        // The results take the place of what the block kept, of which nothing is left to multiply.
        #pragma unroll
        for (int j = 0; j < 64; j += 16) {
            Vector<bfloat16, 2> v[4];
            #pragma unroll
            for (int i = 0; i < 8; ++i) v[i / 2][i % 2] = convert<bfloat16>(0.125f * by_s[j / 2 + i]);
            store_fragments<64>(&shared.keys[held.index][j / 64][group * 64][0], t / 32 * 16, j % 64, v);
        }
        #pragma unroll
        for (int j = 0; j < 64; j += 16) {
            Vector<bfloat16, 2> v[4];
            #pragma unroll
            for (int i = 0; i < 8; ++i) v[i / 2][i % 2] = convert<bfloat16>(by_p[j / 2 + i]);
            store_fragments<64>(&shared.values[held.index][j / 64][group * 64][0], t / 32 * 16, j % 64, v);
        }
        fence_async_shared();
        named_barrier_sync(1 + group, 128);
        if (t == 0) {
            #pragma unroll
            for (int i = 0; i < 1; ++i) {
                tma_store(dQ_rounded_by_keys_map, shared.keys[held.index][i][group * 64], i * 64, r0 + group * 64, b1);
            }
            #pragma unroll
            for (int i = 0; i < 1; ++i) {
                tma_store(dQ_rounded_by_values_map, shared.values[held.index][i][group * 64], i * 64, r0 + group * 64, b1);
            }
            tma_commit();
            tma_wait_read<0>();
            barrier_arrive(shared.held_empty[held.index]);
        }
    }
}

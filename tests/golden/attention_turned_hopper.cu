// turned_queries_out0_kernel: 27 nodes in one kernel
//     slice = slice(q, stops=(1, 16, 2048, 32))
//     slice_2 = slice(q, starts=(0, 0, 0, 32))
//     mul = mul(q, cos)
//     neg = neg(slice_2)
//     concatenate = concatenate(neg, slice, axis=3)
//     mul_8 = mul(concatenate, sin)
//     add = add(mul, mul_8)
//     out0 queries = reshape(add, shape=(1, 4, 4, 2048, 64))
//     out0 products = matmul(out0 queries, out0 keys turned, dtype=float32)
//     out0 scaled = mul(out0 products, 0.125)
//     out0 row = gen_index(out0 scaled, axis=3)
//     out0 key = gen_index(out0 scaled, axis=4)
//     out0 right of band = cmp_le(out0 key, out0 row)
//     out0 masked = binary_select(out0 scaled, -inf, out0 right of band)
//     out0 largest = reduction(out0 masked, mode='max', axes=(4,))
//     out0 alone = cmp_eq(out0 largest, -inf)
//     out0 shift = binary_select(0.0, out0 largest, out0 alone)
//     out0 shifted = sub(out0 masked, out0 shift)
//     out0 exponentials = exp(out0 shifted)
//     out0 sum = reduction(out0 exponentials, axes=(4,))
//     out0 none = cmp_eq(out0 sum, 0.0)
//     out0 divisor = binary_select(1.0, out0 sum, out0 none)
//     out0 inverse = reciprocal(out0 divisor)
//     out0 probabilities = mul(out0 exponentials, out0 inverse)
//     out0 rounded = narrow(out0 probabilities, dtype=bfloat16)
//     out0 attended = matmul(out0 rounded, out0 values, dtype=bfloat16)
//     out0 = reshape(out0 attended, shape=(1, 16, 2048, 64))
// 16 x 2048 queries and 2048 keys of 64 elements, values of 64, bfloat16
// 128 queries a block, tiles of 128 keys in 3 stages filled by TMA, 2 consumer warpgroups (m64n128k16, m64n64...
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "attention.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
FUSEGRAPH_WGMMA(128)
FUSEGRAPH_WGMMA(64)

extern "C" __global__ void __launch_bounds__(384, 1) turned_queries_out0_kernel(
    const __grid_constant__ TensorMap out0_keys_turned_map,
    const __grid_constant__ TensorMap out0_values_map,
    const bfloat16* __restrict__ q,
    const bfloat16* __restrict__ cos,
    const bfloat16* __restrict__ sin,
    const bfloat16* __restrict__ slice_2,
    const bfloat16* __restrict__ slice,
    const __grid_constant__ TensorMap out0_map)
{
    struct Shared {
        alignas(1024) bfloat16 queries[2][1][128][64];  // panels of 128 bytes, swizzled
        alignas(1024) bfloat16 keys[3][1][128][64];
        alignas(1024) bfloat16 values[3][1][128][64];
        Barrier keys_full[3];
        Barrier keys_empty[3];
        Barrier values_full[3];
        Barrier values_empty[3];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        for (int i = 0; i < 3; ++i) {
            barrier_init(shared.keys_full[i], 1);
            barrier_init(shared.keys_empty[i], 2);
            barrier_init(shared.values_full[i], 1);
            barrier_init(shared.values_empty[i], 2);
        }
        barrier_fence_init();
    }
    __syncthreads();

    // What kernels launched before write is read from here on.
    if (group < 0) {
        registers_decrease<24>();
        if (threadIdx.x == 0) {
            Ring<3> stage;
            for (int work = blockIdx.x; work < 256; work = back_and_forth(work)) {
                const Tile at = tile_at<16, 16, 16>(work);
                const int m0 = (15 - at.col) * 128;
                const int32 b0 = at.row / 4;
                const int32 b1 = at.row % 4;
                const int first = 0, last = max(first + 1, min(16, max(0, (m0 + 127) + 128) / 128));  // tiles of keys that the queries may meet
                for (int tile = last - 1; tile >= first; --tile, ++stage) {
                    const int n0 = tile * 128;
                    barrier_wait(shared.keys_empty[stage.index], stage.parity ^ 1);
                    barrier_expect(shared.keys_full[stage.index], 16384);
                    tma_load(shared.keys[stage.index][0], out0_keys_turned_map, shared.keys_full[stage.index], 0, n0, b0);
                    barrier_wait(shared.values_empty[stage.index], stage.parity ^ 1);
                    barrier_expect(shared.values_full[stage.index], 16384);
                    tma_load(shared.values[stage.index][0], out0_values_map, shared.values_full[stage.index], 0, n0, b0);
                }
            }
            // What is left to do needs little of memory.
        }
    } else {
        registers_increase<240>();
        const int t = threadIdx.x % 128, lane = t % 32;
        const int row = group * 64 + t / 32 * 16 + lane / 4;  // of a thread's first result in the tile
        Ring<3> stage;
        Ring<2> query;
        const float unit = 0.18033688f;  // of a score, to base 2
        const auto compute_queries = [&](int work, int index) {
            const Tile at = tile_at<16, 16, 16>(work);
            const int m0 = (15 - at.col) * 128;
            const int32 b0 = at.row / 4;
            const int32 b1 = at.row % 4;
            Vector<bfloat16, 8> out0_queries_held[4];
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                const int i = t + u * 128;
                const int r = i / 8, d = i % 8 * 8;
                const int32 m = m0 + group * 64 + r;
                Vector<bfloat16, 8> out0_queries_v;
                const Packed<bfloat16, 8> q_v = load_packed<8>(q + b0 * 524288 + b1 * 131072 + m * 64 + d);
                const Packed<bfloat16, 8> cos_v = load_packed<8>(cos + m * 64 + d);
                const Packed<bfloat16, 8> sin_v = load_packed<8>(sin + m * 64 + d);
                const bool neg_inside = int32(d) < 32;
                const bool slice_inside = int32(d) >= 32;
                const Packed<bfloat16, 8> slice_2_v = neg_inside ? load_packed<8>(slice_2 + int32(b0 * 524288 + b1 * 131072 + m * 64 + d)) : Packed<bfloat16, 8>{};
                const Packed<bfloat16, 8> slice_v = slice_inside ? load_packed<8>(slice + int32(b0 * 524288 + b1 * 131072 + m * 64 + d) - 32) : Packed<bfloat16, 8>{};
                #pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const float mul = convert<float>(q_v[e]) * convert<float>(cos_v[e]);
                    const float neg = -convert<float>(slice_2_v[e]);
                    const float concatenate = neg_inside ? neg : convert<float>(slice_v[e]);
                    const float mul_8 = concatenate * convert<float>(sin_v[e]);
                    out0_queries_v[e] = convert<bfloat16>(mul + mul_8);
                }
                out0_queries_held[u] = out0_queries_v;
            }
            if (t == 0) tma_wait_read<0>();  // what lay there has left
            named_barrier_sync(3 + group, 128);  // and has been multiplied by all warps
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                const int i = t + u * 128;
                const int r = i / 8, d = i % 8 * 8;
                store_row<64>(&shared.queries[index][d / 64][group * 64][0], r, d % 64, out0_queries_held[u]);
            }
            fence_async_shared();
            named_barrier_sync(3 + group, 128);  // the consumer's rows are there
        };
        const auto prefetch_queries = [&](int work) {
            if (work >= 256) return;
            const Tile at = tile_at<16, 16, 16>(work);
            const int m0 = (15 - at.col) * 128;
            const int32 b0 = at.row / 4;
            const int32 b1 = at.row % 4;
            for (int i = t; i < 64; i += 128) {
                const int32 m = m0 + group * 64 + i;
                prefetch(q + b0 * 524288 + b1 * 131072 + m * 64);
            }
        };
        if (group == 1) named_barrier_arrive(1, 256);  // consumer 0 begins
        float s[64], rescale[2];
        uint32 probability[8][4];
        compute_queries(blockIdx.x, query.index);
        barrier_wait(shared.keys_full[stage.index], stage.parity);
        named_barrier_sync(1 + group, 256);  // this consumer's turn
        {
            const uint64 queries = matrix_descriptor<128>(shared.queries[query.index][0][group * 64], 16, 1024);
            const uint64 keys = matrix_descriptor<128>(shared.keys[stage.index][0][0], 16, 1024);
            wgmma_fence();
            #pragma unroll
            for (int kk = 0; kk < 4; ++kk) {
                wgmma<bfloat16, bfloat16, 128>(
                    s, matrix_behind(queries, kk * 32), matrix_behind(keys, kk * 32), kk > 0);
            }
            wgmma_commit();
        }
        named_barrier_arrive(2 - group, 256);
        for (int work = blockIdx.x; work < 256; work = back_and_forth(work)) {
            const Tile at = tile_at<16, 16, 16>(work);
            const int m0 = (15 - at.col) * 128;
            const int32 b0 = at.row / 4;
            const int32 b1 = at.row % 4;
            const int first = 0, last = max(first + 1, min(16, max(0, (m0 + 127) + 128) / 128));  // tiles of keys that the queries may meet
            float o[32] = {};
            attention::Rows rows;
            const auto scores = [&](int tile) {
                const int n0 = tile * 128;
                if ((m0 + group * 64) - n0 - 127 >= 0) {
                    return;  // the products are the scores
                }
                #pragma unroll
                for (int j = 0; j < 64; j += 4) {
                    #pragma unroll
                    for (int f = 0; f < 2; ++f) {
                        const int32 m = m0 + row + f * 8, n = n0 + j * 2 + lane % 4 * 2;
                        Vector<float, 2> score;
                        #pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const bool out0_right_of_band = int32(n + e) <= int32(m);
                            score[e] = out0_right_of_band ? s[j + f * 2 + e] : -infinity<float>();
                        }
                        s[j + f * 2] = score[0];
                        s[j + f * 2 + 1] = score[1];
                    }
                }
            };
            prefetch_queries(back_and_forth(work));
            wgmma_wait<0>();
            if (t == 0) barrier_arrive(shared.keys_empty[stage.index]);
            scores(last - 1);
            attention::softmax<4>(s, rows, unit, rescale);
            attention::round_to_fragments<bfloat16>(s, probability);
            for (int tile = last - 2; tile >= first; --tile) {
                const Ring<3> previous = stage;
                ++stage;
                barrier_wait(shared.keys_full[stage.index], stage.parity);
                named_barrier_sync(1 + group, 256);  // this consumer's turn
                {
                    const uint64 queries = matrix_descriptor<128>(shared.queries[query.index][0][group * 64], 16, 1024);
                    const uint64 keys = matrix_descriptor<128>(shared.keys[stage.index][0][0], 16, 1024);
                    wgmma_fence();
                    #pragma unroll
                    for (int kk = 0; kk < 4; ++kk) {
                        wgmma<bfloat16, bfloat16, 128>(
                            s, matrix_behind(queries, kk * 32), matrix_behind(keys, kk * 32), kk > 0);
                    }
                    wgmma_commit();
                }
                barrier_wait(shared.values_full[previous.index], previous.parity);
                {
                    const uint64 values = matrix_descriptor<128>(shared.values[previous.index][0][0], 16384, 1024);
                    wgmma_fence();
                    #pragma unroll
                    for (int kk = 0; kk < 8; ++kk) {
                        wgmma<bfloat16, bfloat16, 64, 1>(
                            o, probability[kk], matrix_behind(values, kk * 2048), true);
                    }
                    wgmma_commit();
                }
                named_barrier_arrive(2 - group, 256);
                wgmma_wait<1>();  // the scores are there
                if (t == 0) barrier_arrive(shared.keys_empty[stage.index]);
                scores(tile);
                wgmma_wait<0>();
                if (t == 0) barrier_arrive(shared.values_empty[previous.index]);
                attention::softmax<4>(s, rows, unit, rescale);
                attention::scale(o, rescale);
                attention::round_to_fragments<bfloat16>(s, probability);
            }
            barrier_wait(shared.values_full[stage.index], stage.parity);
            {
                const uint64 values = matrix_descriptor<128>(shared.values[stage.index][0][0], 16384, 1024);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 8; ++kk) {
                    wgmma<bfloat16, bfloat16, 64, 1>(
                        o, probability[kk], matrix_behind(values, kk * 2048), true);
                }
                wgmma_commit();
            }
            const Ring<3> previous = stage;
            ++stage;
            Ring<2> next = query;
            ++next;
            if (back_and_forth(work) < 256) {
                compute_queries(back_and_forth(work), next.index);
                barrier_wait(shared.keys_full[stage.index], stage.parity);
                named_barrier_sync(1 + group, 256);  // this consumer's turn
                {
                    const uint64 queries = matrix_descriptor<128>(shared.queries[next.index][0][group * 64], 16, 1024);
                    const uint64 keys = matrix_descriptor<128>(shared.keys[stage.index][0][0], 16, 1024);
                    wgmma_fence();
                    #pragma unroll
                    for (int kk = 0; kk < 4; ++kk) {
                        wgmma<bfloat16, bfloat16, 128>(
                            s, matrix_behind(queries, kk * 32), matrix_behind(keys, kk * 32), kk > 0);
                    }
                    wgmma_commit();
                }
                named_barrier_arrive(2 - group, 256);
                wgmma_wait<1>();  // the results are there
            } else {
                wgmma_wait<0>();
            }
            if (t == 0) barrier_arrive(shared.values_empty[previous.index]);
            attention::finish(rows);
            float inverse[2];
            #pragma unroll
            for (int f = 0; f < 2; ++f) {
                const bool met = rows.total[f] != 0.0f;  // whether there is a key, if only one of NaN
                inverse[f] = met ? 1.0f / rows.total[f] : 0.0f;
                if (!met) attention::clear(o, f);  // zeros, whatever the values of the keys are
            }
            // The results take the place of the queries, of which nothing is left to multiply.
            #pragma unroll
            for (int j = 0; j < 64; j += 16) {
                Vector<bfloat16, 2> v[4];
                #pragma unroll
                for (int i = 0; i < 8; ++i) {
                    v[i / 2][i % 2] = convert<bfloat16>(o[j / 2 + i] * inverse[i / 2 % 2]);
                }
                store_fragments<64>(&shared.queries[query.index][j / 64][group * 64][0], t / 32 * 16, j % 64, v);
            }
            fence_async_shared();
            named_barrier_sync(3 + group, 128);
            if (t == 0) {
                #pragma unroll
                for (int i = 0; i < 1; ++i) {
                    tma_store(out0_map, shared.queries[query.index][i][group * 64], i * 64, m0 + group * 64, b0, b1);
                }
                tma_commit();
            }
            query = next;
        }
        wgmma_wait<0>();  // nothing is in flight, but the compiler cannot know
        if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it
    }
}

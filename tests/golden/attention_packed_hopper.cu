// packed_attention_o_kernel: 24 nodes in one kernel
//     o products = matmul(o queries, o keys turned, dtype=float32)
//     o scaled = mul(o products, 0.0883883461356163)
//     o row = gen_index(o scaled, axis=3)
//     o key = gen_index(o scaled, axis=4)
//     o diagonal = add(o row, o ahead)
//     o right of band = cmp_le(o key, o diagonal)
//     o begun_54 = cmp_ge(o key, o first key)
//     o not ended = cmp_lt(o key, o last key)
//     o admitted = logical_and(o right of band, o begun_54)
//     o admitted_57 = logical_and(o admitted, o not ended)
//     o masked = binary_select(o scaled, -inf, o admitted_57)
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
//     o = reshape(o attended, shape=(1, 16, 16384, 128))
// 16 x 16384 queries and 16384 keys of 128 elements, values of 128, bfloat16
// 128 queries a block, tiles of 128 keys in 2 stages filled by TMA, 2 consumer warpgroups (m64n128k16, m64n12...
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "attention.cuh"
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
FUSEGRAPH_WGMMA(128)

extern "C" __global__ void __launch_bounds__(384, 1) packed_attention_o_kernel(
    const __grid_constant__ TensorMap o_queries_map,
    const __grid_constant__ TensorMap o_keys_turned_map,
    const __grid_constant__ TensorMap o_values_map,
    const int32* o_ahead,
    const int32* o_first_key,
    const int32* o_last_key,
    const __grid_constant__ TensorMap o_map,
    int32* __restrict__ o_order)
{
    struct Shared {
        alignas(1024) bfloat16 queries[2][2][128][64];  // panels of 128 bytes, swizzled
        alignas(1024) bfloat16 keys[2][2][128][64];
        alignas(1024) bfloat16 values[2][2][128][64];
        Barrier queries_full[2];
        Barrier queries_empty[2];
        Barrier keys_full[2];
        Barrier keys_empty[2];
        Barrier values_full[2];
        Barrier values_empty[2];
        Barrier spans_full[2];
        Barrier spans_empty[2];
        attention::Span spans[2];  // of queries to come, and the end; who reads one says so
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared.queries_full[i], 1);
            barrier_init(shared.queries_empty[i], 2);
            barrier_init(shared.spans_full[i], 1);
            barrier_init(shared.spans_empty[i], 257);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared.keys_full[i], 1);
            barrier_init(shared.keys_empty[i], 2);
            barrier_init(shared.values_full[i], 1);
            barrier_init(shared.values_empty[i], 2);
        }
        barrier_fence_init();
    }
    __syncthreads();

    grid_dependency_wait();
    // What kernels launched before write is read from here on.
    if (group < 0) {
        registers_decrease<40>();
        if (threadIdx.x == 0) {
            Ring<2> stage;
            Ring<2> query;
            while (true) {
                barrier_wait(shared.spans_full[query.index], query.parity);
                const attention::Span span = shared.spans[query.index];
                barrier_arrive(shared.spans_empty[query.index]);
                if (span.work >= 2048) break;
                const Tile at = tile_at<16, 128, 16>(span.work);
                const int m0 = (127 - at.col) * 128;
                const int32 b0 = at.row / 4;
                const int32 b1 = at.row % 4;
                for (int tile = span.tiles - 1; tile >= 0; --tile, ++stage) {
                    const int n0 = span.base + tile * 128;
                    barrier_wait(shared.keys_empty[stage.index], stage.parity ^ 1);
                    barrier_expect(shared.keys_full[stage.index], 32768);
                    #pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        tma_load(shared.keys[stage.index][i], o_keys_turned_map, shared.keys_full[stage.index], i * 64, n0, b0);
                    }
                    if (tile == span.tiles - 1) {
                        barrier_wait(shared.queries_empty[query.index], query.parity ^ 1);
                        barrier_expect(shared.queries_full[query.index], 32768);
                        #pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            tma_load(shared.queries[query.index][i], o_queries_map, shared.queries_full[query.index], i * 64, m0, b0, b1);
                        }
                    }
                    barrier_wait(shared.values_empty[stage.index], stage.parity ^ 1);
                    barrier_expect(shared.values_full[stage.index], 32768);
                    #pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        tma_load(shared.values[stage.index][i], o_values_map, shared.values_full[stage.index], i * 64, n0, b0);
                    }
                }
                ++query;
            }
            // What is left to do needs little of memory.
        } else if (threadIdx.x / 32 == 1) {
            const int lane = threadIdx.x % 32;
            Ring<2> query;
            int work = blockIdx.x;
            while (work < 2048) {
                const Tile at = tile_at<16, 128, 16>(work);
                const int m0 = (127 - at.col) * 128;
                const int32 b0 = at.row / 4;
                const int32 b1 = at.row % 4;
                attention::Extent<int64> rows0;
                attention::Extent<int> rows1;
                attention::Extent<int> rows2;
                #pragma unroll 8
                for (int m = m0 + lane; m < m0 + 128; m += 32) {
                    rows0.add(int64(m) + int64(o_ahead[m]));
                    rows1.add(int(o_first_key[m]));
                    rows2.add(int(o_last_key[m]));
                }
                rows0.over_lanes();
                rows1.over_lanes();
                rows2.over_lanes();
                int low = 0, high = 16384;  // keys that some of the queries may meet
                high = min(high, int(min(max(int64(rows0.most) + 1, int64(0)), int64(16384))));
                low = max(low, int(min(max(int64(rows1.least), int64(0)), int64(16384))));
                high = min(high, int(min(max(int64(rows2.most), int64(0)), int64(16384))));
                const int base = low, tiles = max(1, (high - base + 127) / 128);
                barrier_wait(shared.queries_empty[query.index], query.parity ^ 1);
                barrier_wait(shared.spans_empty[query.index], query.parity ^ 1);
                if (lane == 0) {
                    shared.spans[query.index] = {work, base, tiles};
                    barrier_arrive(shared.spans_full[query.index]);
                }
                ++query;
                // Who is behind takes no more; of those that are done soon the next one is looked at early.
                if (tiles > 8) barrier_wait(shared.queries_empty[query.index], query.parity ^ 1);
                if (lane == 0) work = gridDim.x + take_number(o_order);
                work = __shfl_sync(0xffffffffu, work, 0);
            }
            barrier_wait(shared.queries_empty[query.index], query.parity ^ 1);
            barrier_wait(shared.spans_empty[query.index], query.parity ^ 1);
            if (lane == 0) {
                shared.spans[query.index] = {work, 0, 0};
                barrier_arrive(shared.spans_full[query.index]);
            }
        }
    } else {
        registers_increase<232>();
        const int t = threadIdx.x % 128, lane = t % 32;
        const int row = group * 64 + t / 32 * 16 + lane / 4;  // of a thread's first result in the tile
        Ring<2> stage;
        Ring<2> query;
        const float unit = 0.12751743f;  // of a score, to base 2
        if (group == 1) named_barrier_arrive(1, 256);  // consumer 0 begins
        float s[64], rescale[2];
        uint32 probability[8][4];
        barrier_wait(shared.spans_full[query.index], query.parity);
        attention::Span span = shared.spans[query.index];
        barrier_arrive(shared.spans_empty[query.index]);
        barrier_wait(shared.queries_full[query.index], query.parity);
        barrier_wait(shared.keys_full[stage.index], stage.parity);
        named_barrier_sync(1 + group, 256);  // this consumer's turn
        {
            const uint64 queries = matrix_descriptor<128>(shared.queries[query.index][0][group * 64], 16, 1024);
            const uint64 keys = matrix_descriptor<128>(shared.keys[stage.index][0][0], 16, 1024);
            wgmma_fence();
            #pragma unroll
            for (int kk = 0; kk < 8; ++kk) {
                wgmma<bfloat16, bfloat16, 128>(
                    s, matrix_behind(queries, kk / 4 * 16384 + kk % 4 * 32),
                    matrix_behind(keys, kk / 4 * 16384 + kk % 4 * 32), kk > 0);
            }
            wgmma_commit();
        }
        named_barrier_arrive(2 - group, 256);
        while (span.work < 2048) {
            const Tile at = tile_at<16, 128, 16>(span.work);
            const int m0 = (127 - at.col) * 128;
            const int32 b0 = at.row / 4;
            const int32 b1 = at.row % 4;
            float o[64] = {};
            attention::Rows rows;
            int begin[2], end[2];  // the keys that a row meets are those from begin to end - 1
            #pragma unroll
            for (int f = 0; f < 2; ++f) {
                const int m = m0 + row + f * 8;
                begin[f] = 0;
                end[f] = 16384;
                end[f] = min(end[f], int(min(max(int64(m) + int64(o_ahead[m]) + 1, int64(0)), int64(16384))));
                begin[f] = max(begin[f], int(min(max(int64(o_first_key[m]), int64(0)), int64(16384))));
                end[f] = min(end[f], int(min(max(int64(o_last_key[m]), int64(0)), int64(16384))));
            }
            const auto scores = [&](int tile) {
                const int n0 = span.base + tile * 128;
                const bool meets = max(begin[0], begin[1]) <= n0 && n0 + 128 <= min(end[0], end[1]);
                if (__all_sync(0xffffffffu, meets)) {
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
                            score[e] = s[j + f * 2 + e];
                        }
                        #pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            score[e] = begin[f] <= n + e && n + e < end[f] ? score[e] : -infinity<float>();
                        }
                        s[j + f * 2] = score[0];
                        s[j + f * 2 + 1] = score[1];
                    }
                }
            };
            wgmma_wait<0>();
            if (t == 0) barrier_arrive(shared.keys_empty[stage.index]);
            scores(span.tiles - 1);
            attention::softmax<2>(s, rows, unit, rescale);
            if (t == 0 && span.work != blockIdx.x) {
                tma_wait_read<0>();
                barrier_arrive(shared.queries_empty[query.index ^ 1]);
            }
            attention::round_to_fragments<bfloat16>(s, probability);
            for (int tile = span.tiles - 2; tile >= 0; --tile) {
                const Ring<2> previous = stage;
                ++stage;
                barrier_wait(shared.keys_full[stage.index], stage.parity);
                named_barrier_sync(1 + group, 256);  // this consumer's turn
                {
                    const uint64 queries = matrix_descriptor<128>(shared.queries[query.index][0][group * 64], 16, 1024);
                    const uint64 keys = matrix_descriptor<128>(shared.keys[stage.index][0][0], 16, 1024);
                    wgmma_fence();
                    #pragma unroll
                    for (int kk = 0; kk < 8; ++kk) {
                        wgmma<bfloat16, bfloat16, 128>(
                            s, matrix_behind(queries, kk / 4 * 16384 + kk % 4 * 32),
                            matrix_behind(keys, kk / 4 * 16384 + kk % 4 * 32), kk > 0);
                    }
                    wgmma_commit();
                }
                barrier_wait(shared.values_full[previous.index], previous.parity);
                {
                    const uint64 values = matrix_descriptor<128>(shared.values[previous.index][0][0], 16384, 1024);
                    wgmma_fence();
                    #pragma unroll
                    for (int kk = 0; kk < 8; ++kk) {
                        wgmma<bfloat16, bfloat16, 128, 1>(
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
                attention::softmax<2>(s, rows, unit, rescale);
                attention::scale(o, rescale);
                attention::round_to_fragments<bfloat16>(s, probability);
            }
            barrier_wait(shared.values_full[stage.index], stage.parity);
            {
                const uint64 values = matrix_descriptor<128>(shared.values[stage.index][0][0], 16384, 1024);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 8; ++kk) {
                    wgmma<bfloat16, bfloat16, 128, 1>(
                        o, probability[kk], matrix_behind(values, kk * 2048), true);
                }
                wgmma_commit();
            }
            const Ring<2> previous = stage;
            ++stage;
            Ring<2> next = query;
            ++next;
            barrier_wait(shared.spans_full[next.index], next.parity);
            const attention::Span following = shared.spans[next.index];
            barrier_arrive(shared.spans_empty[next.index]);
            if (following.work < 2048) {
                barrier_wait(shared.queries_full[next.index], next.parity);
                barrier_wait(shared.keys_full[stage.index], stage.parity);
                named_barrier_sync(1 + group, 256);  // this consumer's turn
                {
                    const uint64 queries = matrix_descriptor<128>(shared.queries[next.index][0][group * 64], 16, 1024);
                    const uint64 keys = matrix_descriptor<128>(shared.keys[stage.index][0][0], 16, 1024);
                    wgmma_fence();
                    #pragma unroll
                    for (int kk = 0; kk < 8; ++kk) {
                        wgmma<bfloat16, bfloat16, 128>(
                            s, matrix_behind(queries, kk / 4 * 16384 + kk % 4 * 32),
                            matrix_behind(keys, kk / 4 * 16384 + kk % 4 * 32), kk > 0);
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
            for (int j = 0; j < 128; j += 16) {
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
                for (int i = 0; i < 2; ++i) {
                    tma_store(o_map, shared.queries[query.index][i][group * 64], i * 64, m0 + group * 64, b0, b1);
                }
                tma_commit();
            }
            query = next;
            span = following;
        }
        wgmma_wait<0>();  // nothing is in flight, but the compiler cannot know
        if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it
    }
}

// layer_8192_8192_8192_bfloat16_False_bias_0_y_ker: 3 nodes in one kernel
//     matmul = sparse_matmul(sparse_2_4 values, x, sparse_2_4 words, dtype=bfloat16, origin='matmul')
//     add = add(matmul, bias)
//     y = gelu(add)
// 8192 x 8192 sums of 8192 products of bfloat16
// tile 256 x 192 x 64 a block, 4 stages filled by TMA, 2 consumer warpgroups (m64n192k32)
// sparse_2_4 values has two of every four terms: the others are not multiplied
// each consumer multiplies 128 rows
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "math.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
FUSEGRAPH_WGMMA(192)

extern "C" __global__ void __launch_bounds__(384, 1) layer_8192_8192_8192_bfloat16_False_bias_0_y_ker(
    const __grid_constant__ TensorMap sparse_2_4_values_map,
    const __grid_constant__ TensorMap sparse_2_4_values_metadata_map,
    const __grid_constant__ TensorMap x_map,
    const bfloat16* __restrict__ bias,
    const __grid_constant__ TensorMap y_map)
{
    struct Shared {
        alignas(1024) bfloat16 a[4][256][32];  // tiles of sparse_2_4_values: stages first, rows swizzled
        alignas(1024) bfloat16 b[4][192][64];
        alignas(128) uint32 metadata[4][4][128];  // which terms sparse_2_4_values has
        alignas(1024) bfloat16 y_out[2][2][64][64];  // results on their way out
        Barrier full[4];
        Barrier empty[4];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        tma_prefetch(sparse_2_4_values_map);
        tma_prefetch(sparse_2_4_values_metadata_map);
        tma_prefetch(x_map);
        tma_prefetch(y_map);
        for (int i = 0; i < 4; ++i) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], 2);
        }
        barrier_fence_init();
    }
    __syncthreads();

    // What kernels launched before write is read from here on.
    if (group < 0) {
        registers_decrease<40>();
        if (threadIdx.x == 0) {
            Ring<4> stage;
            for (int tile = blockIdx.x; tile < 1376; tile += gridDim.x) {
                const Tile at = tile_at<32, 43, 8>(tile);
                const int m0 = at.row * 256, n0 = at.col * 192;
                for (int k = 0; k < 128; ++k, ++stage) {
                    Barrier& full = shared.full[stage.index];
                    barrier_wait(shared.empty[stage.index], stage.parity ^ 1);
                    barrier_expect(full, 43008);
                    const int c = k * 64;
                    tma_load(shared.a[stage.index], sparse_2_4_values_map, full, c / 2, m0);
                    tma_load(shared.metadata[stage.index], sparse_2_4_values_metadata_map, full, 0, m0 / 64, c / 64);
                    tma_load(shared.b[stage.index], x_map, full, c, n0);
                }
            }
            // What is left to do needs little of memory.
        }
    } else {
        registers_increase<232>();
        const int t = threadIdx.x % 128, lane = t % 32;
        const int row = t / 32 * 16 + lane / 4;  // of a thread's first result of 64 rows
        Ring<4> stage;
        int buffer = 0;
        for (int tile = blockIdx.x; tile < 1376; tile += gridDim.x) {
            const Tile at = tile_at<32, 43, 8>(tile);
            const int m0 = at.row * 256, n0 = at.col * 192;
            float sum[2][96];
            #pragma unroll 1
            for (int k = 0; k < 128; ++k, ++stage) {
                barrier_wait(shared.full[stage.index], stage.parity);
                uint32 kept[2];  // the metadata of a thread
                #pragma unroll
                for (int p = 0; p < 2; ++p) {
                    kept[p] = sparse_metadata(shared.metadata[stage.index][(group * 2 + p)][t]);
                }
                wgmma_fence();
                #pragma unroll
                for (int p = 0; p < 2; ++p) {
                    wgmma_sparse<bfloat16, bfloat16, 192, 0>(
                        sum[p], matrix_descriptor<64>(&shared.a[stage.index][(group * 2 + p) * 64][0], 16, 512),
                        matrix_descriptor<128>(&shared.b[stage.index][0][0], 16, 1024), kept[p], k > 0);
                }
                #pragma unroll
                for (int p = 0; p < 2; ++p) {
                    wgmma_sparse<bfloat16, bfloat16, 192, 1>(
                        sum[p], matrix_descriptor<64>(&shared.a[stage.index][(group * 2 + p) * 64][16], 16, 512),
                        matrix_descriptor<128>(&shared.b[stage.index][0][32], 16, 1024), kept[p], true);
                }
                wgmma_commit();
                wgmma_wait<0>();  // nothing is written to the metadata before
                if (t == 0) barrier_arrive(shared.empty[stage.index]);
            }

            #pragma unroll
            for (int p = 0; p < 2; ++p) {
                #pragma unroll
                for (int chunk = 0; chunk < 3; ++chunk, buffer ^= 1) {
                    if (n0 + chunk * 64 >= 8192) break;
                    if (t == 0) tma_wait_read<1>();  // the copies out of this buffer have read it
                    named_barrier_sync(group + 1, 128);
                    #pragma unroll
                    for (int j = 0; j < 64; j += 16) {
                        Vector<bfloat16, 2> y_v[4];
                        #pragma unroll
                        for (int f = 0; f < 4; ++f) {
                            const int32 m = m0 + (group * 2 + p) * 64 + row + f % 2 * 8;
                            const int32 n = min(n0 + chunk * 64 + j + f / 2 * 8 + lane % 4 * 2, 8190);
                            #pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const float bias_e = convert<float>(bias[m]);
                                const float add = sum[p][(chunk * 64 + j) / 2 + f / 2 * 4 + f % 2 * 2 + e] + bias_e;
                                y_v[f][e] = convert<bfloat16>(math::gelu(add));
                            }
                        }
                        store_fragments_turned<64>(&shared.y_out[group][buffer][0][0], t / 32 * 16, j, y_v);
                    }
                    fence_async_shared();
                    named_barrier_sync(group + 1, 128);
                    if (t == 0) {
                        tma_store(y_map, shared.y_out[group][buffer], m0 + (group * 2 + p) * 64, n0 + chunk * 64);
                        tma_commit();
                    }
                }
            }
        }
        if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it
    }
}

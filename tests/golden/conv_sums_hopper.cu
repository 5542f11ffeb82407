// convolved_sums_parts_kernel: 4 nodes in one kernel
//     conv_fprop = conv_fprop(x, w, padding=((1, 1), (1, 1)))
//     add = add(conv_fprop, bias)
//     y = relu(add)
//     sums parts = reduction_partial(y, axes=(0, 2, 3), chunk=64, dtype=float32)
// 200704 x 64 sums of 576 products of bfloat16
// tile 128 x 64 x 64 a block, 8 stages filled by TMA, 2 consumer warpgroups (m64n64k16)
// ping-pong consumers: each computes every second tile of the block
#include "math.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "reduce.cuh"
#include "shared.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
#include "order.cuh"
FUSEGRAPH_WGMMA(64)

extern "C" __global__ void __launch_bounds__(384, 1) convolved_sums_parts_kernel(
    const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap w_map,
    const bfloat16* __restrict__ bias,
    const __grid_constant__ TensorMap y_map,
    float* __restrict__ sums_parts)
{
    struct Shared {
        alignas(1024) bfloat16 a[8][128][64];  // tiles of x: stages first, rows swizzled
        alignas(1024) bfloat16 b[8][64][64];
        alignas(1024) bfloat16 y_out[2][2][64][64];  // results on their way out
        float sums_parts_of_warps[2][4][64];  // what each warp has of a chunk of columns
        Barrier full[8];
        Barrier empty[8];
        Barrier turn[2];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        tma_prefetch(x_map);
        tma_prefetch(w_map);
        tma_prefetch(y_map);
        for (int i = 0; i < 8; ++i) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], 1);
        }
        for (int i = 0; i < 2; ++i) barrier_init(shared.turn[i], 1);
        barrier_fence_init();
    }
    __syncthreads();

    // What kernels launched before write is read from here on.
    if (group < 0) {
        registers_decrease<40>();
        if (threadIdx.x == 0) {
            Ring<8> stage;
            for (int tile = blockIdx.x; tile < 1568; tile += gridDim.x) {
                const Tile at = tile_at<1568, 1, 8>(tile);
                const int m0 = at.row * 128, n0 = at.col * 64;
                const int m_0 = m0 / 3136;
                const int m_1 = m0 / 56 % 56;
                const int m_2 = m0 % 56;
                for (int k = 0; k < 9; ++k, ++stage) {
                    Barrier& full = shared.full[stage.index];
                    barrier_wait(shared.empty[stage.index], stage.parity ^ 1);
                    barrier_expect(full, 24576);
                    const int t0 = k / 3;
                    const int t1 = k % 3;
                    const int c = 0;
                    tma_load_im2col(shared.a[stage.index], x_map, full,
                                    c, m_2 - 1, m_1 - 1, m_0, uint16(t1), uint16(t0));
                    tma_load(shared.b[stage.index], w_map, full, c, t1, t0, n0);
                }
            }
            // What is left to do needs little of memory.
            grid_dependency_launch();
        }
    } else {
        registers_increase<232>();
        const int t = threadIdx.x % 128, lane = t % 32;
        const int row = t / 32 * 16 + lane / 4;  // of a thread's first result of 64 rows
        Ring<8> stage;
        int buffer = 0;
        uint32 turn = 1 - group;  // consumer 0 begins: the phase before the first counts as completed
        if (group == 1) stage += 9;  // the stages of the other's first tile
        for (int tile = blockIdx.x + group * gridDim.x; tile < 1568; tile += 2 * gridDim.x, stage += 9) {
            const Tile at = tile_at<1568, 1, 8>(tile);
            const int m0 = at.row * 128, n0 = at.col * 64;
            float sum[2][32];
            int previous = 0;
            barrier_wait(shared.turn[group], turn);
            turn ^= 1;
            #pragma unroll 1
            for (int k = 0; k < 9; ++k, ++stage) {
                barrier_wait(shared.full[stage.index], stage.parity);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    #pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        wgmma<bfloat16, bfloat16, 64>(
                            sum[p], matrix_descriptor<128>(&shared.a[stage.index][p * 64][kk * 16], 16, 1024),
                            matrix_descriptor<128>(&shared.b[stage.index][0][kk * 16], 16, 1024), k > 0 || kk > 0);
                    }
                }
                wgmma_commit();
                if (k > 0) {
                    wgmma_wait<1>();  // the products of the previous stage are done
                    if (t == 0) barrier_arrive(shared.empty[previous]);
                }
                previous = stage.index;
            }
            if (t == 0) barrier_arrive(shared.turn[1 - group]);  // the stages that follow are the other's
            wgmma_wait<0>();
            if (t == 0) barrier_arrive(shared.empty[previous]);

            #pragma unroll
            for (int p = 0; p < 2; ++p) {
                #pragma unroll
                for (int chunk = 0; chunk < 1; ++chunk, buffer ^= 1) {
                    if (t == 0) tma_wait_read<1>();  // the copies out of this buffer have read it
                    named_barrier_sync(group + 1, 128);
                    float sums_parts_own[4][4] = {};
                    #pragma unroll
                    for (int j = 0; j < 64; j += 16) {
                        Vector<bfloat16, 2> y_v[4];
                        #pragma unroll
                        for (int f = 0; f < 4; ++f) {
                            const int32 m = m0 + p * 64 + row + f % 2 * 8;
                            const int32 n = n0 + chunk * 64 + j + f / 2 * 8 + lane % 4 * 2;
                            const auto bias_v = load<2>(bias + n);
                            #pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const float bias_e = convert<float>(bias_v[e]);
                                const float add = sum[p][(chunk * 64 + j) / 2 + f / 2 * 4 + f % 2 * 2 + e] + bias_e;
                                const float y = math::relu(add);
                                y_v[f][e] = convert<bfloat16>(y);
                                reduce::into<reduce::Add>(sums_parts_own[j / 16][f / 2 * 2 + e], y);
                            }
                        }
                        store_fragments<64>(&shared.y_out[group][buffer][0][0], t / 32 * 16, j, y_v);
                    }
                    #pragma unroll
                    for (int j = 0; j < 64; j += 16) {
                        const float sums_parts_of_warps = reduce::columns<reduce::Add>(sums_parts_own[j / 16]);
                        if (lane % 8 < 4) {
                            shared.sums_parts_of_warps[group][t / 32][j + reduce::column_of_lane(lane)] = sums_parts_of_warps;
                        }
                    }
                    fence_async_shared();
                    named_barrier_sync(group + 1, 128);
                    if (t == 0) {
                        tma_store(y_map, shared.y_out[group][buffer], n0 + chunk * 64, m0 + p * 64);
                        tma_commit();
                    }
                    if (t < 64) {
                        const int32 col = n0 + chunk * 64 + t, place = m0 / 64 + p;
                        float sums_parts_own = shared.sums_parts_of_warps[group][0][t];
                        #pragma unroll
                        for (int q = 1; q < 4; ++q) reduce::into<reduce::Add>(sums_parts_own, shared.sums_parts_of_warps[group][q][t]);
                        sums_parts[place * 64 + col] = sums_parts_own;
                    }
                }
            }
        }
        if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it
    }
}

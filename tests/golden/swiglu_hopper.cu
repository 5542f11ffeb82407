// products_kernel: 4 nodes in one kernel
//     matmul = matmul(x, w0)
//     matmul_4 = matmul(x, w1)
//     swish = swish(matmul)
//     y = mul(swish, matmul_4)
// 2 times 4096 x 14336 sums of 4096 products of bfloat16
// tile 128 x 128 x 64 a block, 4 stages filled by TMA, 2 consumer warpgroups (m64n256k16)
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
FUSEGRAPH_WGMMA(256)

extern "C" __global__ void __launch_bounds__(384, 1) products_kernel(
    const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap w0_map,
    const __grid_constant__ TensorMap w1_map,
    const __grid_constant__ TensorMap y_map)
{
    struct Shared {
        alignas(1024) bfloat16 a[4][128][64];  // tiles of x: stages first, rows swizzled
        alignas(1024) bfloat16 b[4][4][64][64];  // 128 columns of each of w0, w1
        alignas(1024) bfloat16 y_out[2][2][64][64];  // results on their way out
        Barrier full[4];
        Barrier empty[4];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        tma_prefetch(x_map);
        tma_prefetch(w0_map);
        tma_prefetch(w1_map);
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
            for (int tile = blockIdx.x; tile < 3584; tile += gridDim.x) {
                const Tile at = tile_at<32, 112, 8>(tile);
                const int m0 = at.row * 128, n0 = at.col * 128;
                for (int k = 0; k < 64; ++k, ++stage) {
                    Barrier& full = shared.full[stage.index];
                    barrier_wait(shared.empty[stage.index], stage.parity ^ 1);
                    barrier_expect(full, 49152);
                    const int c = k * 64;
                    tma_load(shared.a[stage.index], x_map, full, c, m0);
                    #pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        tma_load(shared.b[stage.index][i], w0_map, full, n0 + i * 64, c);
                    }
                    #pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        tma_load(shared.b[stage.index][i + 2], w1_map, full, n0 + i * 64, c);
                    }
                }
            }
            // What is left to do needs little of memory.
        }
    } else {
        registers_increase<232>();
        const int t = threadIdx.x % 128, lane = t % 32;
        const int row = group * 64 + t / 32 * 16 + lane / 4;  // of a thread's first result in the tile
        Ring<4> stage;
        int buffer = 0;
        for (int tile = blockIdx.x; tile < 3584; tile += gridDim.x) {
            const Tile at = tile_at<32, 112, 8>(tile);
            const int m0 = at.row * 128, n0 = at.col * 128;
            float sum[128];
            int previous = 0;
            #pragma unroll 1
            for (int k = 0; k < 64; ++k, ++stage) {
                barrier_wait(shared.full[stage.index], stage.parity);
                wgmma_fence();
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    wgmma<bfloat16, bfloat16, 256, 0, 1>(
                        sum, matrix_descriptor<128>(&shared.a[stage.index][group * 64][kk * 16], 16, 1024),
                        matrix_descriptor<128>(shared.b[stage.index][0][kk * 16], 8192, 1024), k > 0 || kk > 0);
                }
                wgmma_commit();
                if (k > 0) {
                    wgmma_wait<1>();  // the products of the previous stage are done
                    if (t == 0) barrier_arrive(shared.empty[previous]);
                }
                previous = stage.index;
            }
            wgmma_wait<0>();
            if (t == 0) barrier_arrive(shared.empty[previous]);

            #pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk, buffer ^= 1) {
                if (t == 0) tma_wait_read<1>();  // the copies out of this buffer have read it
                named_barrier_sync(group + 1, 128);
                #pragma unroll
                for (int j = 0; j < 64; j += 16) {
                    Vector<bfloat16, 2> y_v[4];
                    #pragma unroll
                    for (int f = 0; f < 4; ++f) {
                        const int32 m = m0 + row + f % 2 * 8;
                        const int32 n = n0 + chunk * 64 + j + f / 2 * 8 + lane % 4 * 2;
                        #pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const float swish = math::swish(sum[(chunk * 64 + j) / 2 + f / 2 * 4 + f % 2 * 2 + e]);
                            y_v[f][e] = convert<bfloat16>(swish * sum[64 + (chunk * 64 + j) / 2 + f / 2 * 4 + f % 2 * 2 + e]);
                        }
                    }
                    store_fragments<64>(&shared.y_out[group][buffer][0][0], t / 32 * 16, j, y_v);
                }
                fence_async_shared();
                named_barrier_sync(group + 1, 128);
                if (t == 0) {
                    tma_store(y_map, shared.y_out[group][buffer], n0 + chunk * 64, m0 + group * 64);
                    tma_commit();
                }
            }
        }
        if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it
    }
}

// conv_dgrad_phases_kernel: 1 node
//     dx = conv_dgrad(loss, w, size=(56, 56), stride=(2, 2), padding=((1, 1), (1, 1)))
// 4 x 50176 x 256 sums of 2048 products of bfloat16
// tile 128 x 256 x 64 a block, 4 stages filled by TMA, 2 consumer warpgroups (m64n256k16)
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "mbarrier.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"
FUSEGRAPH_WGMMA(256)

extern "C" __global__ void __launch_bounds__(384, 1) conv_dgrad_phases_kernel(
    const __grid_constant__ TensorMap loss_map,
    const __grid_constant__ TensorMap w_map,
    bfloat16* __restrict__ dx)
{
    struct Shared {
        alignas(1024) bfloat16 a[4][128][64];  // tiles of loss: stages first, rows swizzled
        alignas(1024) bfloat16 b[4][4][64][64];
        alignas(1024) bfloat16 dx_out[2][64][128];  // results on their way out
        Barrier full[4];
        Barrier empty[4];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        tma_prefetch(loss_map);
        tma_prefetch(w_map);
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
            for (int tile = blockIdx.x; tile < 1568; tile += gridDim.x) {
                const Tile at = tile_at<392, 1, 8>(tile);
                const int m0 = at.row * 128, n0 = at.col * 256;
                const int b1 = at.batch / 2;
                const int b2 = at.batch % 2;
                const int skip0 = (2 - b1) / 2;  // first taps that the phase does not have
                const int skip1 = (2 - b2) / 2;  // first taps that the phase does not have
                const int last = (2 - skip0) * (2 - skip1) * 8;
                const int m_0 = m0 / 784;
                const int m_1 = m0 / 28 % 28;
                const int m_2 = m0 % 28;
                for (int k = 0; k < last; ++k, ++stage) {
                    Barrier& full = shared.full[stage.index];
                    barrier_wait(shared.empty[stage.index], stage.parity ^ 1);
                    barrier_expect(full, 49152);
                    const int t1 = k / 8 % (2 - skip1) + skip1;
                    const int t0 = k / 8 / (2 - skip1) + skip0;
                    const int c = k % 8 * 64;
                    tma_load_im2col(shared.a[stage.index], loss_map, full,
                                    c, m_2 - 1, m_1 - 1, m_0, uint16(t1 + b2), uint16(t0 + b1));
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        tma_load(shared.b[stage.index][i], w_map, full, n0 + i * 64, c, 3 - b2 - t1 * 2, 3 - b1 - t0 * 2);
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
        for (int tile = blockIdx.x; tile < 1568; tile += gridDim.x) {
            const Tile at = tile_at<392, 1, 8>(tile);
            const int m0 = at.row * 128, n0 = at.col * 256;
            const int b1 = at.batch / 2;
            const int b2 = at.batch % 2;
            const int skip0 = (2 - b1) / 2;  // first taps that the phase does not have
            const int skip1 = (2 - b2) / 2;  // first taps that the phase does not have
            const int last = (2 - skip0) * (2 - skip1) * 8;
            float sum[128] = {};
            int previous = 0;
            #pragma unroll 1
            for (int k = 0; k < last; ++k, ++stage) {
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
            if (last > 0 && t == 0) barrier_arrive(shared.empty[previous]);

            #pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                __syncwarp();  // the warp has carried out what the buffer held
                #pragma unroll
                for (int j = 0; j < 128; j += 16) {
                    Vector<bfloat16, 2> dx_v[4];
                    #pragma unroll
                    for (int f = 0; f < 4; ++f) {
                        const int32 m = m0 + row + f % 2 * 8;
                        const int32 m_0 = m / 784;
                        const int32 m_1 = m / 28 % 28;
                        const int32 m_2 = m % 28;
                        const int32 h1 = b1 + m_1 * 2;
                        const int32 h2 = b2 + m_2 * 2;
                        const int32 n = n0 + chunk * 128 + j + f / 2 * 8 + lane % 4 * 2;
                        #pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            dx_v[f][e] = convert<bfloat16>(sum[(chunk * 128 + j) / 2 + f / 2 * 4 + f % 2 * 2 + e]);
                        }
                    }
                    store_fragments<128>(&shared.dx_out[group][0][0], t / 32 * 16, j, dx_v);
                }
                __syncwarp();  // a warp carries out its own rows
                #pragma unroll 4
                for (int i = lane; i < 256; i += 32) {
                    const int r = t / 32 * 16 + i / 16, c = i % 16 * 8;
                    const int32 m = m0 + group * 64 + r;
                    const int32 m_0 = m / 784;
                    const int32 m_1 = m / 28 % 28;
                    const int32 m_2 = m % 28;
                    const int32 h1 = b1 + m_1 * 2;
                    const int32 h2 = b2 + m_2 * 2;
                    const int32 n = n0 + chunk * 128 + c;
                    store(dx + m_0 * 802816 + h1 * 14336 + h2 * 256 + n, load_results<8, 128>(&shared.dx_out[group][0][0], r, c));
                }
            }
        }
    }
}

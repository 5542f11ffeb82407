// image_kernel: 5 nodes in one kernel
//     mul = mul(x, x_scale)
//     add = add(mul, x_bias)
//     relu = relu(add)
//     identity = identity(relu, dtype=bfloat16)
//     y = conv_fprop(identity, w)
// 200704 x 256 sums of 256 products of bfloat16
// tile 128 x 256 x 64 a block, 4 stages filled by TMA, 2 consumer warpgroups (m64n256k16)
// the consumers compute identity in registers
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "computed.cuh"
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

extern "C" __global__ void __launch_bounds__(384, 1) image_kernel(
    const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap x_scale_map,
    const __grid_constant__ TensorMap x_bias_map,
    const __grid_constant__ TensorMap w_map,
    const __grid_constant__ TensorMap y_map)
{
    struct Shared {
        alignas(1024) bfloat16 x_in[4][128][64];  // tiles of x: stages first, rows swizzled
        alignas(1024) bfloat16 b[4][256][64];
        alignas(1024) bfloat16 y_out[2][2][64][64];  // results on their way out
        alignas(128) float x_scale_in[4][64];  // of x_scale: one for all rows
        alignas(128) float x_bias_in[4][64];  // of x_bias: one for all rows
        Barrier full[4];
        Barrier empty[4];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1;  // a warpgroup: consumers count from 0
    if (threadIdx.x == 0) {
        tma_prefetch(x_map);
        tma_prefetch(x_scale_map);
        tma_prefetch(x_bias_map);
        tma_prefetch(w_map);
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
            for (int tile = blockIdx.x; tile < 1568; tile += gridDim.x) {
                const Tile at = tile_at<1568, 1, 8>(tile);
                const int m0 = at.row * 128, n0 = at.col * 256;
                for (int k = 0; k < 4; ++k, ++stage) {
                    Barrier& full = shared.full[stage.index];
                    barrier_wait(shared.empty[stage.index], stage.parity ^ 1);
                    barrier_expect(full, 49664);
                    const int c = k * 64;
                    tma_load(shared.x_in[stage.index], x_map, full, c, m0);
                    tma_load(shared.x_scale_in[stage.index], x_scale_map, full, c, 0);
                    tma_load(shared.x_bias_in[stage.index], x_bias_map, full, c, 0);
                    tma_load(shared.b[stage.index], w_map, full, c, n0);
                }
            }
            // What is left to do needs little of memory.
        }
    } else {
        registers_increase<232>();
        const int t = threadIdx.x % 128, lane = t % 32;
        const int row = group * 64 + t / 32 * 16 + lane / 4;  // of a thread's first result in the tile
        Ring<4> stage;
        const int x_place = fragment_at<bfloat16, 128>(group * 64 + t / 32 * 16);
        uint32 part[2][4];  // fragments of operand A: one is multiplied, the next is made
        int buffer = 0;
        for (int tile = blockIdx.x; tile < 1568; tile += gridDim.x) {
            const Tile at = tile_at<1568, 1, 8>(tile);
            const int m0 = at.row * 128, n0 = at.col * 256;
            float sum[128];
            int previous = 0;
            for (int k = 0; k < 4; ++k, ++stage) {
                barrier_wait(shared.full[stage.index], stage.parity);
                #pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    const auto x_v = load_fragment<bfloat16, 128>(shared.x_in[stage.index], x_place ^ kk * 32);
                    const auto x_scale_v = load_columns(shared.x_scale_in[stage.index] + kk * 16);
                    const auto x_bias_v = load_columns(shared.x_bias_in[stage.index] + kk * 16);
                    Vector<bfloat16, 8> made;
                    #pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float x_e = convert<float>(x_v[e]);
                        const float mul = x_e * x_scale_v[e / 4 * 2 + e % 2];
                        const float add = mul + x_bias_v[e / 4 * 2 + e % 2];
                        made[e] = convert<bfloat16>(math::relu(add));
                    }
                    put_fragment(part[kk % 2], made);
                    wgmma_fence();
                    wgmma<bfloat16, bfloat16, 256>(
                        sum, part[kk % 2], matrix_descriptor<128>(&shared.b[stage.index][0][kk * 16], 16, 1024),
                        k > 0 || kk > 0);
                    wgmma_commit();
                    wgmma_wait<1>();  // the product before is done: its fragment, and at first its stage, are free
                    if (kk == 0 && k > 0 && t == 0) barrier_arrive(shared.empty[previous]);
                }
                previous = stage.index;
            }
            wgmma_wait<0>();
            if (t == 0) barrier_arrive(shared.empty[previous]);

            #pragma unroll
            for (int chunk = 0; chunk < 4; ++chunk, buffer ^= 1) {
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
                            y_v[f][e] = convert<bfloat16>(sum[(chunk * 64 + j) / 2 + f / 2 * 4 + f % 2 * 2 + e]);
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

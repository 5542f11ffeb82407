// depthwise_planes_kernel: 2 nodes in one kernel
//     conv = conv_fprop(x, w, padding=((1, 1), (1, 1)))
//     y = relu(conv, upper_clip=6.0)
// direct convolution, 3 x 3 taps; a block 16 planes, a thread slides down over 7 rows of 7 columns
#include "async_copy.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "shared.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(64, 10) depthwise_planes_kernel(
    const float* __restrict__ x,
    const float* __restrict__ w,
    float* __restrict__ y)
{
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    float* const tile = reinterpret_cast<float*>(shared);
    float* const out0 = reinterpret_cast<float*>(shared + 12544);
    const int32 plane0 = int32(blockIdx.x) * 16;
    #pragma unroll 4
    for (int at = threadIdx.x; at < 784; at += 64) {
        copy_async<16>(tile + at * 4, x + plane0 * 196 + at * 4);
    }
    copy_async_commit();
    const int own = threadIdx.x / 4;
    const int row = threadIdx.x / 2 % 2 * 7;
    const int col = threadIdx.x % 2 * 7;
    const int32 plane = plane0 + own;
    const int32 image = plane / 256;
    const int32 group = plane % 256;
    float weights[1][3][3][1];
    #pragma unroll
    for (int kr = 0; kr < 3; ++kr) {
        #pragma unroll
        for (int ks = 0; ks < 3; ++ks) {
            weights[0][kr][ks][0] = w[group * 9 + kr * 3 + ks];
        }
    }
    copy_async_wait<0>();
    __syncthreads();  // the planes are there
    const int in_h = row - 1, in_w = col - 1;
    const float* const image_plane = tile + own * 196;
    float sum[7][7][1];
    #pragma unroll
    for (int iy = 0; iy < 9; ++iy) {
        if (iy <= 6) {
            #pragma unroll
            for (int q = 0; q < 7; ++q) {
                sum[iy][q][0] = 0;
            }
        }
        float under[1][9][1];
        const bool row_exists = uint32(in_h + iy) < 14;
        #pragma unroll
        for (int ix = 0; ix < 9; ++ix) {
            under[0][ix][0] = 0;
            if (row_exists && (1 <= ix && ix < 8 || uint32(in_w + ix) < 14)) under[0][ix][0] = image_plane[in_h * 14 + iy * 14 + in_w + ix];
        }
        #pragma unroll
        for (int kr = 0; kr < 3; ++kr) {
            if (iy - kr < 0 || iy - kr > 6) continue;
            #pragma unroll
            for (int ks = 0; ks < 3; ++ks) {
                #pragma unroll
                for (int q = 0; q < 7; ++q) {
                    sum[iy - kr][q][0] += weights[0][kr][ks][0] * under[0][q + ks][0];
                }
            }
        }
        if (iy >= 2) {
            const int p = iy - 2;
            float row0[7];
            #pragma unroll
            for (int q = 0; q < 7; ++q) {
                row0[q] = math::minimum(math::relu(sum[p][q][0]), 6.0f);
            }
            #pragma unroll
            for (int q = 0; q < 7; ++q) {
                out0[own * 196 + (row + p) * 14 + col + q] = row0[q];
            }
        }
    }
    __syncthreads();  // the results are there
    for (int at = threadIdx.x * 4; at < 3136; at += 256) {
        store(y + plane0 * 196 + at, load_shared<4>(out0 + at));
    }
}

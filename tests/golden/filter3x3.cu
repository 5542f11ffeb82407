// filter3x3_kernel: 2 nodes in one kernel
//     filtered = conv_fprop(photo, weights, padding=((1, 1), (1, 1)), mode='convolution')
//     y = clamp(filtered, min=0.0, max=1.0)
// direct convolution, 3 x 3 taps; a block 32 x 128 outputs, a thread 4 x 4
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) filter3x3_kernel(
    const float* __restrict__ photo,
    const float* __restrict__ weights_2,
    float* __restrict__ y)
{
    const int32 block = blockIdx.x;
    const int32 image = block / 510;
    const int32 row0 = block / 15 % 34 * 32;
    const int32 col0 = block % 15 * 128;
    const int t = threadIdx.x;
    const int ty = t / 32;
    const int tx = t % 32;

    __shared__ __align__(16) float tile[1][1][34][132];
    __shared__ float weights[1][1][1][3][3];
    for (int at = t; at < 9; at += 256) {
        (&weights[0][0][0][0][0])[at] = weights_2[(2 - (at / 3)) * 3 + (2 - (at % 3))];
    }
    for (int line = t / 32; line < 34; line += 8) {
        const int32 in_h = row0 + line - 1;
        const bool inside = uint32(in_h) < 1080;
        #pragma unroll 4
        for (int ix = t % 32; ix < 130; ix += 32) {
            const int32 in_w = col0 + ix - 1;
            tile[0][0][line][ix] = inside && uint32(in_w) < 1920 ? photo[image * 2073600 + in_h * 1920 + in_w] : float(0);
        }
    }
    __syncthreads();

    const int32 row = row0 + ty * 4;
    const int32 col = col0 + tx * 4;
    if (row >= 1080) return;
    float sum[1][4][4] = {};
    #pragma unroll
    for (int iy = 0; iy < 6; ++iy) {
        float under[8];  // the part of the row under this thread's patch
        #pragma unroll
        for (int ix = 0; ix < 8; ix += 4) {
            const auto vec = load_shared<4>(&tile[0][0][ty * 4 + iy][tx * 4 + ix]);
            #pragma unroll
            for (int e = 0; e < 4; ++e) under[ix + e] = vec[e];
        }
        #pragma unroll
        for (int p = 0; p < 4; ++p) {
            if (!(iy - p >= 0 && iy - p < 3)) continue;  // no tap of output row p meets this row
            const int kr = iy - p;
            #pragma unroll
            for (int ks = 0; ks < 3; ++ks) {
                #pragma unroll
                for (int q = 0; q < 4; ++q) {
                    sum[0][p][q] += weights[0][0][0][kr][ks] * under[q + ks];
                }
            }
        }
    }

    #pragma unroll
    for (int p = 0; p < 4; ++p) {
        Vector<float, 4> y_v;
        #pragma unroll
        for (int q = 0; q < 4; ++q) {
            y_v[q] = math::clamp(sum[0][p][q], 0.0f, 1.0f);
        }
        store(y + image * 2073600 + (row + p) * 1920 + col, y_v);
    }
}

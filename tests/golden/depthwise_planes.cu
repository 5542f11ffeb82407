// depthwise_planes_kernel: 2 nodes in one kernel
//     conv = conv_fprop(x, w, padding=((1, 1), (1, 1)))
//     y = relu(conv, upper_clip=6.0)
// direct convolution, 3 x 3 taps; a block 16 planes of 16 x 16 outputs, a thread 4 x 4
#include "math.cuh"
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) depthwise_planes_kernel(
    const float* __restrict__ x,
    const float* __restrict__ w,
    float* __restrict__ y)
{
    const int32 plane0 = int32(blockIdx.x) * 16;
    const int t = threadIdx.x;
    const int tz = t / 16;
    const int ty = t / 4 % 4;
    const int tx = t % 4;

    __shared__ __align__(16) float tile[16][1][1][18][20];
    __shared__ float weights[16][1][1][1][3][3];
    for (int at = t; at < 144; at += 256) {
        (&weights[0][0][0][0][0][0])[at] = w[((plane0 + (at / 9)) % 256) * 9 + (at / 3 % 3) * 3 + (at % 3)];
    }
    #pragma unroll 4
    for (int line = t / 32; line < 288; line += 8) {
        const int z = line / 18;
        const int iy = line % 18;
        const int32 plane = plane0 + z;
        const int32 image = plane / 256;
        const int32 group = plane % 256;
        const int32 in_h = iy - 1;
        const bool inside = uint32(in_h) < 14;
        for (int ix = t % 32; ix < 18; ix += 32) {
            const int32 in_w = ix - 1;
            tile[z][0][0][iy][ix] = inside && uint32(in_w) < 14 ? x[image * 50176 + group * 196 + in_h * 14 + in_w] : float(0);
        }
    }
    __syncthreads();

    const int32 plane = plane0 + tz;
    const int32 image = plane / 256;
    const int32 group = plane % 256;
    const int32 row = ty * 4;
    const int32 col = tx * 4;
    if (row >= 14 || col >= 14) return;
    float sum[1][4][4] = {};
    #pragma unroll
    for (int iy = 0; iy < 6; ++iy) {
        float under[8];  // the part of the row under this thread's patch
        #pragma unroll
        for (int ix = 0; ix < 8; ix += 4) {
            const auto vec = load_shared<4>(&tile[tz][0][0][ty * 4 + iy][tx * 4 + ix]);
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
                    sum[0][p][q] += weights[tz][0][0][0][kr][ks] * under[q + ks];
                }
            }
        }
    }

    #pragma unroll
    for (int p = 0; p < 4; ++p) {
        if (row + p >= 14) break;
        #pragma unroll
        for (int q = 0; q < 4; ++q) {
            if (col + q >= 14) continue;
            y[image * 50176 + group * 196 + (row + p) * 14 + col + q] = math::minimum(math::relu(sum[0][p][q]), 6.0f);
        }
    }
}

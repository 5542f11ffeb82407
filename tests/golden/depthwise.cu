// depthwise_kernel: 3 nodes in one kernel
//     conv = conv_fprop(x, w, padding=((1, 1), (1, 1)))
//     add = add(conv, bias)
//     y = swish(add)
// direct convolution, 3 x 3 taps; a thread slides down over 7 rows of 3 columns of 2 channels, 3 ahead
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "math.cuh"
#include "memory.cuh"
#include "strip.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128) depthwise_kernel(
    const bfloat16* __restrict__ x,
    const bfloat16* __restrict__ w,
    const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ y)
{
    const int32 at = int32(blockIdx.x) * 128 + threadIdx.x;
    const int32 image = at / 9728;
    const int32 row = at / 1216 % 8 * 7;
    const int32 channel0 = at / 608 % 2 * 64;
    const int32 col = at / 32 % 19 * 3;
    const int32 lane = at % 32 * 2;
    const int32 group = channel0 + lane;
    const int32 in_h = row - 1, in_w = col - 1;
    const bfloat16* corner = x + image * 401408 + group + in_h * 7168 + in_w * 128;
    Packed<bfloat16, 2> line[3][1][5];
    const auto fetch = [&](Packed<bfloat16, 2> (&into)[1][5], int iy) {
        const bool row_exists = uint32(in_h + iy) < 56 && iy < 9;
        #pragma unroll
        for (int ix = 0; ix < 5; ++ix) {
            into[0][ix] = load_if<2>(row_exists && (1 <= ix && ix < 3 || uint32(in_w + ix) < 56), corner + iy * 7168 + ix * 128);
        }
    };
    #pragma unroll
    for (int iy = 0; iy < 3; ++iy) fetch(line[iy], iy);
    float weights[1][3][3][2];
    Vector<bfloat16, 2> filters[9];
    #pragma unroll
    for (int i = 0; i < 9; ++i) filters[i] = load<2>(w + group * 9 + i * 2);
    #pragma unroll
    for (int kr = 0; kr < 3; ++kr) {
        #pragma unroll
        for (int ks = 0; ks < 3; ++ks) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                weights[0][kr][ks][e] = convert<float>(filters[(e * 9 + kr * 3 + ks) / 2][(e * 9 + kr * 3 + ks) % 2]);
            }
        }
    }
    const auto bias_c = load<2>(bias + group);
    float sum[7][3][2];
    #pragma unroll
    for (int iy = 0; iy < 9; ++iy) {
        if (iy <= 6) {
            #pragma unroll
            for (int q = 0; q < 3; ++q) {
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    sum[iy][q][e] = 0;
                }
            }
        }
        float under[1][5][2];
        #pragma unroll
        for (int ix = 0; ix < 5; ++ix) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                under[0][ix][e] = convert<float>(line[iy % 3][0][ix][e]);
            }
        }
        fetch(line[iy % 3], iy + 3);
        #pragma unroll
        for (int kr = 0; kr < 3; ++kr) {
            if (iy - kr < 0 || iy - kr > 6) continue;
            #pragma unroll
            for (int ks = 0; ks < 3; ++ks) {
                #pragma unroll
                for (int q = 0; q < 3; ++q) {
                    #pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        sum[iy - kr][q][e] += weights[0][kr][ks][e] * under[0][q + ks][e];
                    }
                }
            }
        }
        if (iy >= 2) {
            const int p = iy - 2;
            #pragma unroll
            for (int q = 0; q < 3; ++q) {
                if (col + q >= 56) break;
                Vector<bfloat16, 2> y_v;
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float bias_e = convert<float>(bias_c[e]);
                    const float add = sum[p][q][e] + bias_e;
                    y_v[e] = convert<bfloat16>(math::swish(add));
                }
                store(y + image * 401408 + group + (row + p) * 7168 + (col + q) * 128, y_v);
            }
        }
    }
}

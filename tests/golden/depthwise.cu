// depthwise_kernel: 3 nodes in one kernel
//     conv = conv_fprop(x, w, padding=((1, 1), (1, 1)))
//     add = add(conv, bias)
//     y = swish(add)
// direct convolution, 3 x 3 taps; a block 8 x 28 outputs of 32 channels, a thread 8 x 1 of 4
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"

extern "C" __global__ void __launch_bounds__(224, 3) depthwise_kernel(
    const bfloat16* __restrict__ x,
    const bfloat16* __restrict__ w,
    const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ y)
{
    const int32 block = blockIdx.x;
    const int32 image = block / 56;
    const int32 channel0 = block / 14 % 4 * 32;
    const int32 row0 = block / 2 % 7 * 8;
    const int32 col0 = block % 2 * 28;

    __shared__ __align__(16) bfloat16 tile[1][10][30][32];
    #pragma unroll 4
    for (int at = threadIdx.x; at < 1200; at += 224) {
        const int iy = at / 120;
        const int ix = at / 4 % 30;
        const int strip = (at % 4) * 8;
        const int32 in_h = row0 + iy - 1, in_w = col0 + ix - 1;
        Vector<bfloat16, 8> value = {};
        if (uint32(in_h) < 56 && uint32(in_w) < 56) value = load<8>(x + image * 401408 + channel0 + strip + in_h * 7168 + in_w * 128);
        store_shared(&tile[0][iy][ix][strip], value);
    }
    __syncthreads();

    const int lane = (threadIdx.x % 8) * 4;
    const int tx = threadIdx.x / 8;
    const int32 group = channel0 + lane;
    const int32 col = col0 + tx;
    float sum[8][4] = {};
    #pragma unroll
    for (int ks = 0; ks < 3; ++ks) {
        float column[3][4];
        #pragma unroll
        for (int kr = 0; kr < 3; ++kr) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                column[kr][e] = convert<float>(w[(group + e) * 9 + kr * 3 + ks]);
            }
        }
        #pragma unroll
        for (int iy = 0; iy < 10; ++iy) {
            const auto vec = load_shared<4>(&tile[0][iy][tx + ks][lane]);
            #pragma unroll
            for (int p = 0; p < 8; ++p) {
                if (!(iy - p >= 0 && iy - p < 3)) continue;  // no tap of output row p meets this row
                const int kr = iy - p;
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sum[p][e] += column[kr][e] * convert<float>(vec[e]);
                }
            }
        }
    }

    #pragma unroll
    for (int p = 0; p < 8; ++p) {
        const auto bias_v = load<4>(bias + group);
        Vector<bfloat16, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float bias_e = convert<float>(bias_v[e]);
            const float add = sum[p][e] + bias_e;
            y_v[e] = convert<bfloat16>(math::swish(add));
        }
        store(y + image * 401408 + group + (row0 + p) * 7168 + col * 128, y_v);
    }
}

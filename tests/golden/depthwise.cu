// depthwise_kernel: 3 nodes in one kernel
//     conv = conv_fprop(x, w, padding=((1, 1), (1, 1)))
//     add = add(conv, bias)
//     y = swish(add)
// direct convolution, 3 x 3 taps; a block walks down by 4 x 8 outputs of 128 channels, a thread 4 x 2 of 4
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "async_copy.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "shared.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128) depthwise_kernel(
    const bfloat16* __restrict__ x,
    const bfloat16* __restrict__ w,
    const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ y)
{
    const int32 block = blockIdx.x;
    const int32 image = block / 49;
    const int32 row0 = block / 7 % 7 * 8;
    const int32 col0 = block % 7 * 8;
    const int lane = (threadIdx.x % 32) * 4;
    const int tx = (threadIdx.x / 32) * 2;
    const int32 col = col0 + tx;

    FUSEGRAPH_DYNAMIC_SHARED(shared);
    auto& ring = *reinterpret_cast<bfloat16(*)[10][10][128]>(shared);  // rows of the input
    int put = 0;  // where in the ring the next row goes
    int32 in_h = row0 - 1;
    const auto fetch = [&] {
        const bool inside = uint32(in_h) < 56;
        const int strip = (threadIdx.x % 16) * 8;
        const bfloat16* row = x + image * 401408 + in_h * 7168 + strip;
        #pragma unroll
        for (int ix = threadIdx.x / 16; ix < 10; ix += 8) {
            const int32 in_w = col0 + ix - 1;
            copy_async<16>(&ring[put][ix][strip], row + in_w * 128, inside && uint32(in_w) < 56 ? 16 : 0);
        }
        put = put + 1 < 10 ? put + 1 : put + 1 - 10;
        ++in_h;
    };
    for (int k = 0; k < 6; ++k) fetch();
    copy_async_commit();

    float weights[3][3][4];
    #pragma unroll
    for (int kr = 0; kr < 3; ++kr) {
        #pragma unroll
        for (int ks = 0; ks < 3; ++ks) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                weights[kr][ks][e] = convert<float>(w[(lane + e) * 9 + kr * 3 + ks]);
            }
        }
    }

    int first = 0;  // where in the ring the rows under the outputs begin
    #pragma unroll 1
    for (int32 step = 0; step < 2; ++step) {
        copy_async_wait<0>();
        __syncthreads();  // the rows are there for all, and all are done with those before
        if (step + 1 < 2) for (int k = 0; k < 4; ++k) fetch();
        copy_async_commit();
        float sum[4][2][4] = {};
        #pragma unroll
        for (int ix = 0; ix < 4; ++ix) {
            #pragma unroll
            for (int iy = 0; iy < 6; ++iy) {
                const int slot = first + iy < 10 ? first + iy : first + iy - 10;
                const auto vec = load_shared<4>(&ring[slot][tx + ix][lane]);
                #pragma unroll
                for (int p = 0; p < 4; ++p) {
                    if (!(iy - p >= 0 && iy - p < 3)) continue;  // no tap of output row p meets this row
                    const int kr = iy - p;
                    #pragma unroll
                    for (int q = 0; q < 2; ++q) {
                        if (!(ix - q >= 0 && ix - q < 3)) continue;  // no tap of output column q meets this column
                        const int ks = ix - q;
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            sum[p][q][e] += weights[kr][ks][e] * convert<float>(vec[e]);
                        }
                    }
                }
            }
        }
        #pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int32 row = row0 + step * 4 + p;
            #pragma unroll
            for (int q = 0; q < 2; ++q) {
                const auto bias_v = load<4>(bias + lane);
                Vector<bfloat16, 4> y_v;
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float bias_e = convert<float>(bias_v[e]);
                    const float add = sum[p][q][e] + bias_e;
                    y_v[e] = convert<bfloat16>(math::swish(add));
                }
                store(y + image * 401408 + lane + row * 7168 + (col + q) * 128, y_v);
            }
        }
        first = first + 4 < 10 ? first + 4 : first + 4 - 10;
    }
}

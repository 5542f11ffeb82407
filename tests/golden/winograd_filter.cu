// winograd_conv_filter_kernel: 1 node
//     conv filter = winograd_filter(w, tile=4, flip=False, exchange=False)
// Winograd F(4x4,3x3), filter transform: 3 x 3 -> 6 x 6, a tile of a channel a thread
#include "types.cuh"
#include "winograd.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) winograd_conv_filter_kernel(
    const float* __restrict__ w,
    float* __restrict__ conv_filter)
{
    const int32 t = blockIdx.x * 256 + threadIdx.x;
    const int32 filter = t / 256;
    const int32 channel = t % 256;

    const int32 base = filter * 2304 + channel;
    float patch[3][3];
    #pragma unroll
    for (int i = 0; i < 3; ++i) {
        #pragma unroll
        for (int j = 0; j < 3; ++j) {
            patch[i][j] = w[base + i * 768 + j * 256];
        }
    }

    float result[6][6];
    winograd::filter(patch, result);

    #pragma unroll
    for (int i = 0; i < 6; ++i) {
        #pragma unroll
        for (int j = 0; j < 6; ++j) {
            conv_filter[filter * 256 + channel + i * 393216 + j * 65536] = result[i][j];
        }
    }
}

// winograd_conv_input_kernel: 1 node
//     conv input = winograd_input(x, tile=4, before=(1, 1), results=(56, 56))
// Winograd F(4x4,3x3), input transform: 6 x 6 -> 6 x 6, a tile of a channel a thread
#include "types.cuh"
#include "winograd.cuh"
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) winograd_conv_input_kernel(
    const float* x,
    float* __restrict__ conv_input)
{
    grid_dependency_wait();
    const int32 t = blockIdx.x * 256 + threadIdx.x;
    const int32 image = t / 50176;
    const int32 row = t / 3584 % 14;
    const int32 col = t / 256 % 14;
    const int32 channel = t % 256;

    const int32 row0 = row * 4 - 1;
    const int32 col0 = col * 4 - 1;
    const int32 base = image * 802816 + channel + row * 57344 + col * 1024 - 14592;
    float patch[6][6];
    #pragma unroll
    for (int i = 0; i < 6; ++i) {
        #pragma unroll
        for (int j = 0; j < 6; ++j) {
            const bool inside = uint32(row0 + i) < 56 && uint32(col0 + j) < 56;
            patch[i][j] = inside ? x[base + i * 14336 + j * 256] : 0.0f;
        }
    }

    float result[6][6];
    winograd::input(patch, result);

    #pragma unroll
    for (int i = 0; i < 6; ++i) {
        #pragma unroll
        for (int j = 0; j < 6; ++j) {
            conv_input[image * 50176 + channel + row * 3584 + col * 256 + i * 19267584 + j * 3211264] = result[i][j];
        }
    }
}

// winograd_y_kernel: 3 nodes in one kernel
//     conv = winograd_output(conv products, tile=4, shape=(64, 256, 56, 56), dtype=float32)
//     add = add(conv, bias)
//     y = relu(add)
// Winograd F(4x4,3x3), output transform: 6 x 6 -> 4 x 4, a tile of a channel a thread
#include "math.cuh"
#include "types.cuh"
#include "winograd.cuh"
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) winograd_y_kernel(
    const float* conv_products,
    const float* bias,
    float* __restrict__ y)
{
    grid_dependency_wait();
    const int32 t = blockIdx.x * 256 + threadIdx.x;
    const int32 image = t / 50176;
    const int32 row = t / 3584 % 14;
    const int32 col = t / 256 % 14;
    const int32 channel = t % 256;

    const int32 base = image * 50176 + channel + row * 3584 + col * 256;
    float patch[6][6];
    #pragma unroll
    for (int i = 0; i < 6; ++i) {
        #pragma unroll
        for (int j = 0; j < 6; ++j) {
            patch[i][j] = conv_products[base + i * 19267584 + j * 3211264];
        }
    }

    float result[4][4];
    winograd::output(patch, result);

    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float bias_e = bias[channel];
            const float add = result[i][j] + bias_e;
            y[image * 802816 + channel + row * 57344 + col * 1024 + i * 14336 + j * 256] = math::relu(add);
        }
    }
}

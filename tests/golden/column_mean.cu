// column_mean_kernel: 1 node
//     y = reduction(x, mode='avg', axes=(0,), keepdims=False)
// 512 rows of 4096 elements, read once a stage; 32 threads a row
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(1024) column_mean_kernel(
    const float* __restrict__ x,
    float* __restrict__ y)
{
    const uint32 row = blockIdx.x * 32 + threadIdx.x % 32;
    const uint32 lane = threadIdx.x / 32;
    float y_add_part = 0.0f;
    #pragma unroll 4
    for (uint32 col = lane; col < 4096; col += 32) {
        const float x_v = x[row + col * 512];
        y_add_part += x_v;
    }
    __shared__ float y_add_parts[1024];
    const float y_add = reduce::across<reduce::Add, 32, 32>(y_add_part, y_add_parts);
    if (lane == 0) {
        y[row] = y_add / 4096.0f;
    }
}

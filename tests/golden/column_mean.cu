// column_mean_kernel: 1 node
//     y = reduction(x, mode='avg', axes=(0,), keepdims=False)
// 512 rows of 4096 elements, read once a stage; 512 threads a row
#include "memory.cuh"
#include "reduce.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(1024, 1) column_mean_kernel(
    const float* __restrict__ x,
    float* __restrict__ y)
{
    const uint32 row = blockIdx.x * 8 + threadIdx.x % 2 * 4;
    const uint32 lane = threadIdx.x / 2;
    float y_add_part[4];
    #pragma unroll
    for (int e = 0; e < 4; ++e) y_add_part[e] = 0.0f;
    #pragma unroll 4
    for (uint32 col = lane; col < 4096; col += 512) {
        const Vector<float, 4> x_v = load_once<4>(x + row + col * 512);
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            y_add_part[e] += x_v[e];
        }
    }
    __shared__ float float_parts[256];
    reduce::across<reduce::Add, 2, 512>(y_add_part, float_parts);
    if (lane == 0) {
        Vector<float, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            y_v[e] = y_add_part[e] / 4096.0f;
        }
        store(y + row, y_v);
    }
}

// column_norm_kernel: 2 nodes in one kernel
//     reduction = reduction(x, mode='norm2', axes=(0,))
//     y = div(x, reduction)
// 4096 rows of 4096 elements, read once a stage; 256 threads a row
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(512, 2) column_norm_kernel(
    const bfloat16* __restrict__ x,
    bfloat16* __restrict__ y)
{
    const uint32 row = blockIdx.x * 16 + threadIdx.x % 2 * 8;
    const uint32 lane = threadIdx.x / 2;
    float reduction_add_part[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) reduction_add_part[e] = 0.0f;
    #pragma unroll 4
    for (uint32 col = lane; col < 4096; col += 256) {
        const Vector<bfloat16, 8> x_v = load<8>(x + row + col * 4096);
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float reduction_square = convert<float>(x_v[e]) * convert<float>(x_v[e]);
            reduction_add_part[e] += reduction_square;
        }
    }
    __shared__ float float_parts[256];
    reduce::across<reduce::Add, 2, 256>(reduction_add_part, float_parts);
    float reduction_r[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        reduction_r[e] = math::sqrt(reduction_add_part[e]);
    }
    #pragma unroll 4
    for (uint32 col = lane; col < 4096; col += 256) {
        const Vector<bfloat16, 8> x_v = load<8>(x + row + col * 4096);
        Vector<bfloat16, 8> y_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_v[e] = convert<bfloat16>(math::divide(convert<float>(x_v[e]), reduction_r[e]));
        }
        store(y + row + col * 4096, y_v);
    }
}

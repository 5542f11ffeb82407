// column_norm_kernel: 2 nodes in one kernel
//     reduction = reduction(x, mode='norm2', axes=(0,))
//     y = div(x, reduction)
// 16384 rows of 512 elements, kept in registers; 64 threads a row
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(512) column_norm_kernel(
    const bfloat16* __restrict__ x,
    bfloat16* __restrict__ y)
{
    const uint32 row = blockIdx.x * 64 + threadIdx.x % 8 * 8;
    const uint32 lane = threadIdx.x / 8;
    Vector<bfloat16, 8> x_v[8];
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = u * 64 + lane;
        x_v[u] = load_once<8>(x + row + col * 16384);
    }
    float reduction_add_part[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) reduction_add_part[e] = 0.0f;
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = u * 64 + lane;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float reduction_square = convert<float>(x_v[u][e]) * convert<float>(x_v[u][e]);
            reduction_add_part[e] += reduction_square;
        }
    }
    __shared__ float float_parts[1024];
    reduce::across<reduce::Add, 8, 64>(reduction_add_part, float_parts);
    float reduction_r[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        reduction_r[e] = math::sqrt(reduction_add_part[e]);
    }
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = u * 64 + lane;
        Vector<bfloat16, 8> y_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_v[e] = convert<bfloat16>(math::divide(convert<float>(x_v[u][e]), reduction_r[e]));
        }
        store(y + row + col * 16384, y_v);
    }
}

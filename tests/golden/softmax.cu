// softmax_kernel: 8 nodes in one kernel
//     y in = identity(x, dtype=float32)
//     y max = reduction(y in, mode='max', axes=(1,))
//     y shifted = sub(y in, y max)
//     y exp = exp(y shifted)
//     y sum = reduction(y exp, axes=(1,))
//     y scale = reciprocal(y sum)
//     y value = mul(y exp, y scale)
//     y = narrow(y value, dtype=bfloat16)
// 8192 rows of 8192 elements, kept in registers; 128 threads a row
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128) softmax_kernel(
    const bfloat16* __restrict__ x,
    bfloat16* __restrict__ y)
{
    const uint32 row = blockIdx.x;
    const uint32 lane = threadIdx.x;
    Vector<bfloat16, 8> x_v[8];
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = (u * 128 + lane) * 8;
        x_v[u] = load_evict_last<8>(x + row * 8192 + col);
    }
    float y_max_part = -infinity<float>();
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_max_part = math::maximum(y_max_part, convert<float>(x_v[u][e]));
        }
    }
    __shared__ float y_max_parts[4];
    const float y_max = reduce::block<reduce::Max, 4>(y_max_part, y_max_parts);
    float y_sum_part = 0.0f;
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float y_shifted = convert<float>(x_v[u][e]) - y_max;
            const float y_exp = math::exp(y_shifted);
            y_sum_part += y_exp;
        }
    }
    __shared__ float y_sum_parts[4];
    const float y_sum = reduce::block<reduce::Add, 4>(y_sum_part, y_sum_parts);
    const float y_scale = math::reciprocal(y_sum);
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = (u * 128 + lane) * 8;
        Vector<bfloat16, 8> y_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float y_shifted = convert<float>(x_v[u][e]) - y_max;
            const float y_exp = math::exp(y_shifted);
            y_v[e] = convert<bfloat16>(y_exp * y_scale);
        }
        store(y + row * 8192 + col, y_v);
    }
}

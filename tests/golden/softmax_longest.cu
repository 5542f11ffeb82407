// softmax_longest_kernel: 6 nodes in one kernel
//     y max = reduction(x, mode='max', axes=(1,))
//     y shifted = sub(x, y max)
//     y exp = exp(y shifted)
//     y sum = reduction(y exp, axes=(1,))
//     y scale = reciprocal(y sum)
//     y = mul(y exp, y scale)
// 192 rows of 1048576 elements, read once a stage; 512 threads a row
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(512) softmax_longest_kernel(
    const float* __restrict__ x,
    float* __restrict__ y)
{
    const uint32 row = blockIdx.x;
    const uint32 lane = threadIdx.x;
    float y_max_part = -infinity<float>();
    float y_sum_part = 0.0f;
    #pragma unroll 4
    for (uint32 u = 0; u < 512; ++u) {
        const uint32 col = (u * 512 + lane) * 4;
        const Vector<float, 4> x_v = load<4>(x + row * 1048576 + col);
        const float y_max_before = y_max_part;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            y_max_part = math::maximum(y_max_part, x_v[e]);
        }
        const float y_max_shift = reduce::shift(y_max_part);
        y_sum_part *= math::exp(y_max_before - y_max_shift);
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float y_shifted = x_v[e] - y_max_shift;
            const float y_exp = math::exp(y_shifted);
            y_sum_part += y_exp;
        }
    }
    __shared__ float y_max_parts[16], y_sum_parts[16];
    reduce::exp_block<16>(y_max_part, y_sum_part, y_max_parts, y_sum_parts);
    const float y_max = y_max_part;
    const float y_sum = y_sum_part * math::exp(y_max - y_max);  // NaN where the maximum is infinite
    const float y_scale = math::reciprocal(y_sum);
    #pragma unroll 4
    for (uint32 u = 0; u < 512; ++u) {
        const uint32 col = (u * 512 + lane) * 4;
        const Vector<float, 4> x_v = load<4>(x + row * 1048576 + col);
        Vector<float, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float y_shifted = x_v[e] - y_max;
            const float y_exp = math::exp(y_shifted);
            y_v[e] = y_exp * y_scale;
        }
        store(y + row * 1048576 + col, y_v);
    }
}

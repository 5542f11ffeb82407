// softmax_long_kernel: 6 nodes in one kernel
//     y max = reduction(x, mode='max', axes=(1,))
//     y shifted = sub(x, y max)
//     y exp = exp(y shifted)
//     y sum = reduction(y exp, axes=(1,))
//     y scale = reciprocal(y sum)
//     y = mul(y exp, y scale)
// 2048 rows of 65536 elements, kept in shared memory; 512 threads a row in each of 4 blocks
#include "async_copy.cuh"
#include "cluster.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "reduce_cluster.cuh"
#include "shared.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(512) softmax_long_kernel(
    const float* __restrict__ x,
    float* __restrict__ y)
{
    cluster_arrive();
    const uint32 row = blockIdx.x / 4;
    const uint32 lane = cluster_rank() * 512 + threadIdx.x;
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    float* const x_s = reinterpret_cast<float*>(shared);
    // A thread reads back what it wrote itself.
    #pragma unroll
    for (uint32 u = 0; u < 8; ++u) {
        const uint32 col = (u * 2048 + lane) * 4;
        const uint32 at = (u * 512 + threadIdx.x) * 4;
        copy_async_evict_last(x_s + at, x + row * 65536 + col);
    }
    copy_async_commit();
    copy_async_wait<0>();
    float y_max_part = -infinity<float>();
    float y_sum_part = 0.0f;
    #pragma unroll 4
    for (uint32 u = 0; u < 8; ++u) {
        const uint32 at = (u * 512 + threadIdx.x) * 4;
        const Vector<float, 4> x_v = load_shared<4>(x_s + at);
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
    cluster_wait();  // all blocks have begun: their shared memory can be written
    __shared__ float y_max_parts[64], y_sum_parts[64];
    reduce::exp_cluster<16, 4>(y_max_part, y_sum_part, y_max_parts, y_sum_parts);
    const float y_max = y_max_part;
    const float y_sum = y_sum_part * math::exp(y_max - y_max);  // NaN where the maximum is infinite
    const float y_scale = math::reciprocal(y_sum);
    #pragma unroll 4
    for (uint32 u = 0; u < 8; ++u) {
        const uint32 col = (u * 2048 + lane) * 4;
        const uint32 at = (u * 512 + threadIdx.x) * 4;
        const Vector<float, 4> x_v = load_shared<4>(x_s + at);
        Vector<float, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float y_shifted = x_v[e] - y_max;
            const float y_exp = math::exp(y_shifted);
            y_v[e] = y_exp * y_scale;
        }
        store(y + row * 65536 + col, y_v);
    }
}

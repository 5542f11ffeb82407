// softmax_long_kernel: 6 nodes in one kernel
//     y max = reduction(x, mode='max', axes=(1,))
//     y shifted = sub(x, y max)
//     y exp = exp(y shifted)
//     y sum = reduction(y exp, axes=(1,))
//     y scale = reciprocal(y sum)
//     y = mul(y exp, y scale)
// 2048 rows of 65536 elements, kept in registers; 1024 threads a row in each of 2 blocks
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "cluster.cuh"
#include "reduce_cluster.cuh"

extern "C" __global__ void __launch_bounds__(1024) softmax_long_kernel(
    const float* __restrict__ x,
    float* __restrict__ y)
{
    cluster_arrive();
    const uint32 row = blockIdx.x / 2;
    const uint32 lane = cluster_rank() * 1024 + threadIdx.x;
    Vector<float, 4> x_v[8];
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = (u * 2048 + lane) * 4;
        x_v[u] = load<4>(x + row * 65536 + col);
    }
    float y_max_part = -infinity<float>();
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            y_max_part = math::maximum(y_max_part, x_v[u][e]);
        }
    }
    cluster_wait();  // all blocks have begun: their shared memory can be written
    __shared__ float y_max_parts[64];
    const float y_max = reduce::cluster<reduce::Max, 32, 2>(y_max_part, y_max_parts);
    float y_sum_part = 0.0f;
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float y_shifted = x_v[u][e] - y_max;
            const float y_exp = math::exp(y_shifted);
            y_sum_part += y_exp;
        }
    }
    __shared__ float y_sum_parts[64];
    const float y_sum = reduce::cluster<reduce::Add, 32, 2>(y_sum_part, y_sum_parts);
    const float y_scale = math::reciprocal(y_sum);
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = (u * 2048 + lane) * 4;
        Vector<float, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float y_shifted = x_v[u][e] - y_max;
            const float y_exp = math::exp(y_shifted);
            y_v[e] = y_exp * y_scale;
        }
        store(y + row * 65536 + col, y_v);
    }
}

// walked_2048_65536_bfloat16_kernel: 8 nodes in one kernel
//     y0 in = identity(x, dtype=float32)
//     y0 max = reduction(y0 in, mode='max', axes=(1,))
//     y0 shifted = sub(y0 in, y0 max)
//     y0 exp = exp(y0 shifted)
//     y0 sum = reduction(y0 exp, axes=(1,))
//     y0 scale = reciprocal(y0 sum)
//     y0 value = mul(y0 exp, y0 scale)
//     y0 = narrow(y0 value, dtype=bfloat16)
// 2048 rows of 65536 elements, kept in registers; 1024 threads a row in each of 2 blocks
// The blocks of a cluster walk 32 rows, 3 of them on their way.
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "async_copy.cuh"
#include "cluster.cuh"
#include "reduce_cluster.cuh"

extern "C" __global__ void __launch_bounds__(1024, 1) walked_2048_65536_bfloat16_kernel(
    const bfloat16* __restrict__ x,
    bfloat16* __restrict__ y0_)
{
    const uint32 lane = cluster_rank() * 1024 + threadIdx.x;
    const uint32 part = blockIdx.x / 2;
    const uint32 begin = part * 32;
    const uint32 end = begin + 32;
    __shared__ float y0_max_parts[2][64];
    __shared__ float y0_sum_parts[2][64];
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    bfloat16* const x_s = reinterpret_cast<bfloat16*>(shared);
    cluster_sync();  // all blocks have begun: their shared memory can be written
    // A thread reads back what it copied itself.
    for (uint32 step = 0; step < 3; ++step) {
        const uint32 fetched = begin + step;
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            const uint32 col = (u * 2048 + lane) * 8;
            if (step < end - begin) {
                copy_async<16>(x_s + step % 3 * 32768 + (u * 1024 + threadIdx.x) * 8, x + fetched * 65536 + col);
            }
            copy_async_commit();
        }
    }
    #pragma unroll 1
    for (uint32 step = 0; step < end - begin; ++step) {
        const uint32 row = begin + step;
        const uint32 turn = step % 2;
        Vector<bfloat16, 8> x_v[4];
        const uint32 at = step % 3 * 32768;
        const uint32 fetched = begin + step + 3;
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            const uint32 col = (u * 2048 + lane) * 8;
            copy_async_wait<11>();
            x_v[u] = load_shared<8>(x_s + at + (u * 1024 + threadIdx.x) * 8);
            if (step + 3 < end - begin) {
                copy_async<16>(x_s + at + (u * 1024 + threadIdx.x) * 8, x + fetched * 65536 + col);
            }
            copy_async_commit();
        }
        float y0_max_part = -infinity<float>();
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                y0_max_part = math::maximum(y0_max_part, convert<float>(x_v[u][e]));
            }
        }
        const float y0_max = reduce::cluster<reduce::Max, 32, 2>(y0_max_part, y0_max_parts[turn]);
        float y0_sum_part = 0.0f;
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float y0_shifted = convert<float>(x_v[u][e]) - y0_max;
                const float y0_exp = math::exp(y0_shifted);
                y0_sum_part += y0_exp;
            }
        }
        const float y0_sum = reduce::cluster<reduce::Add, 32, 2>(y0_sum_part, y0_sum_parts[turn]);
        const float y0_scale = math::reciprocal(y0_sum);
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            const uint32 col = (u * 2048 + lane) * 8;
            Vector<bfloat16, 8> y0_v;
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float y0_shifted = convert<float>(x_v[u][e]) - y0_max;
                const float y0_exp = math::exp(y0_shifted);
                y0_v[e] = convert<bfloat16>(y0_exp * y0_scale);
            }
            store(y0_ + row * 65536 + col, y0_v);
        }
    }
}

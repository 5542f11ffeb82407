// embedding_kernel: 2 nodes in one kernel
//     gather = gather(table, tokens)
//     y = mul(gather, 22.625)
// 2048 x 512 elements, 8 a vector, 1 vector in flight a thread
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) embedding_kernel(
    const int32* __restrict__ tokens,
    const float16* __restrict__ table,
    float16* __restrict__ y)
{
    const uint32 i = (blockIdx.x * 256 + threadIdx.x) * 8;
    const uint32 i0 = i / 512;
    const int32 tokens_v = tokens[i0];
    const uint32 i1 = i % 512;
    const int32 tokens_at = tokens_v < 0 ? 0 : tokens_v > 31999 ? 31999 : tokens_v;
    const Vector<float16, 8> table_v = load<8>(table + tokens_at * 512 + int32(i1));
    Vector<float16, 8> y_v;
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        y_v[e] = convert<float16>(convert<float>(table_v[e]) * 22.625f);
    }
    store(y + i, y_v);
}

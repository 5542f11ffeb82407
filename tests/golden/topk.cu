// topk_64_1000_10_1_bfloat16_kernel: 2 nodes in one kernel
//     values = topk(x, k=10)
//     index = topk_index(x, k=10)
// 64 rows of 1000 elements, sorted, the 10 largest of each kept; 8 elements a thread
#include "sort.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) topk_64_1000_10_1_bfloat16_kernel(
    const bfloat16* __restrict__ x,
    bfloat16* __restrict__ values,
    int32* __restrict__ index)
{
    __shared__ uint64 words[2176];
    const uint32 row = blockIdx.x * 2 + threadIdx.x / 128;
    const uint32 lane = threadIdx.x % 128;
    uint64 own[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const uint32 at = e * 128 + lane;
        own[e] = sort::last<uint64>();
        if (at < 1000) {
            const float x_e = convert<float>(x[row * 1000 + at]);
            own[e] = sort::word(~sort::key(x_e), at);
        }
    }
    sort::lanes<128>(own, words, 10);
    for (uint32 rank = lane; rank < 10; rank += 128) {
        const uint32 at = sort::position(words[sort::place(threadIdx.x / 128 * 1024 + rank)]);
        values[row * 10 + rank] = x[row * 1000 + at];
        index[row * 10 + rank] = int32(at);
    }
}

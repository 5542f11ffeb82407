// sort_64_10000_1_float32_values_order_4_kernel: 1 node
//     values order_4 = merged_runs(x, values order, axis=1, descending=False, run=8192, keep=8192)
// 64 rows of 10000 elements, merged in runs of 8192, the smallest first; 8 elements a thread
#include "sort.cuh"
#include "types.cuh"
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(256) sort_64_10000_1_float32_values_order_4_kernel(
    const float* x,
    const int32* values_order,
    int32* __restrict__ values_order_4)
{
    grid_dependency_wait();
    __shared__ uint64 words[2176];
    __shared__ uint32 bounds[2];
    const uint32 block = blockIdx.x;
    const uint32 row = block / 8;
    const uint32 part = block / 4 % 2;
    const uint32 tile = block % 4;
    const uint32 first = part * 8192;
    const uint32 middle = min(first + 4096, uint32(10000));
    const uint32 last = min(first + 8192, uint32(10000));
    const uint32 begin = tile * 2048, end = min(begin + 2048, min(last - first, uint32(8192)));
    if (begin >= end) return;
    const auto word = [&](uint32 entry) {
        const uint32 at = values_order[row * 10000 + entry];
        const float x_e = x[row * 10000 + at];
        return sort::word(sort::key(x_e), at);
    };
    sort::runs<256, 8>(words, bounds, word, first, middle, last, begin, end);
    for (uint32 i = threadIdx.x; i < end - begin; i += 256) {
        const uint32 at = sort::position(words[sort::place(i)]);
        const uint32 rank = part * 8192 + begin + i;
        values_order_4[row * 10000 + rank] = int32(at);
    }
}

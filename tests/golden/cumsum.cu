// cumsum_64_10000_1_bfloat16_kernel: 1 node
//     y = cumsum(x)
// 64 rows of 10000 elements; 256 threads a row
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "memory.cuh"
#include "reduce.cuh"
#include "scan.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) cumsum_64_10000_1_bfloat16_kernel(
    const bfloat16* __restrict__ x,
    bfloat16* __restrict__ y)
{
    const uint32 row = blockIdx.x;
    const uint32 lane = threadIdx.x;
    __shared__ float parts[8];
    float carry = 0.0f;
    for (uint32 first = 0; first < 10000; first += 2048) {
        const uint32 col = first + lane * 8;
        Vector<bfloat16, 8> x_v;
        if (col < 10000) {
            x_v = load<8>(x + row * 10000 + col);
        }
        float y_sums[8];
        float y_total = 0.0f;
        if (col < 10000) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                y_total += convert<float>(x_v[e]);
                y_sums[e] = y_total;
            }
        }
        const float before = scan::block<reduce::Add, 8>(y_total, carry, 0.0f, parts);
        Vector<bfloat16, 8> y_v;
        if (col < 10000) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float y_2 = before + y_sums[e];
                y_v[e] = convert<bfloat16>(y_2);
            }
        }
        if (col < 10000) {
            store(y + row * 10000 + col, y_v);
        }
    }
}

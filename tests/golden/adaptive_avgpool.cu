// adaptive_avgpool_kernel: 1 node
//     y = adaptive_avg_pool(x, size=(5, 5))
// windows of 4 x 4; a thread takes a window
#include "types.cuh"
#include "math.cuh"
#include "strip.cuh"

extern "C" __global__ void __launch_bounds__(256) adaptive_avgpool_kernel(
    const float* __restrict__ x,
    float* __restrict__ y)
{
    const uint32 at = blockIdx.x * 256 + threadIdx.x;
    const int32 outer = at / 25;
    const int32 row = at / 5 % 5;
    const int32 col = at % 5;
    float y_sum = 0.0f;
    #pragma unroll 1
    for (int32 in_row = (row * 14) / 5; in_row < (row * 14 + 18) / 5; ++in_row) {
        #pragma unroll 4
        for (int32 in_col = (col * 14) / 5; in_col < (col * 14 + 18) / 5; ++in_col) {
            const float x_v = x[outer * 196 + in_row * 14 + in_col];
            y_sum += x_v;
        }
    }
    const int32 y_count = int32(((int32(row) + 1) * 14 + 4) / 5 - int32(row) * 14 / 5);
    const int32 y_count_2 = int32(((int32(col) + 1) * 14 + 4) / 5 - int32(col) * 14 / 5);
    const float y_weight = 1.0f / float(y_count * y_count_2);
    y[outer * 25 + row * 5 + col] = y_sum * y_weight;
}

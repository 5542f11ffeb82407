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
    float x_under[4][4];
    const int32 in_row_begin = (row * 14) / 5;
    const int32 in_row_end = (row * 14 + 18) / 5;
    #pragma unroll
    for (int ky = 0; ky < 4; ++ky) {
        const int32 in_row = in_row_begin + ky;
        const int32 in_col_begin = (col * 14) / 5;
        const int32 in_col_end = (col * 14 + 18) / 5;
        #pragma unroll
        for (int kx = 0; kx < 4; ++kx) {
            const int32 in_col = in_col_begin + kx;
            const bool inside = in_row < in_row_end && in_col < in_col_end;
            x_under[ky][kx] = load_if<1>(inside, x + outer * 196 + in_row * 14 + in_col)[0];
        }
    }
    #pragma unroll
    for (int ky = 0; ky < 4; ++ky) {
        const int32 in_row = in_row_begin + ky;
        const int32 in_col_begin = (col * 14) / 5;
        const int32 in_col_end = (col * 14 + 18) / 5;
        #pragma unroll
        for (int kx = 0; kx < 4; ++kx) {
            const int32 in_col = in_col_begin + kx;
            const bool inside = in_row < in_row_end && in_col < in_col_end;
            if (inside) {
                const float x_e = x_under[ky][kx];
                y_sum += x_e;
            }
        }
    }
    const int32 y_count = int32(((int32(row) + 1) * 14 + 4) / 5 - int32(row) * 14 / 5);
    const int32 y_count_2 = int32(((int32(col) + 1) * 14 + 4) / 5 - int32(col) * 14 / 5);
    const float y_weight = 1.0f / float(y_count * y_count_2);
    y[outer * 25 + row * 5 + col] = y_sum * y_weight;
}

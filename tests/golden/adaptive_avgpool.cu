// adaptive_avgpool_kernel: 1 node
//     y = adaptive_avg_pool(x, size=(13, 13))
// windows of 4 x 4; a block folds 2 planes, columns first
#include "memory.cuh"
#include "strip.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) adaptive_avgpool_kernel(
    const float* __restrict__ x,
    float* __restrict__ y)
{
    x += blockIdx.x * 1568;
    y += blockIdx.x * 338;
    __shared__ __align__(16) float y_sum_of_columns[728];
    for (uint32 at = threadIdx.x; at < 182; at += 256) {
        const int32 plane = at / 91;
        const int32 row = at / 7 % 13;
        const int32 col = (at % 7) * 4;
        float y_sum[4] = {};
        Vector<float, 4> x_under[4];
        const int32 in_row_begin = (row * 28) / 13;
        const int32 in_row_end = (row * 28 + 40) / 13;
        #pragma unroll
        for (int ky = 0; ky < 4; ++ky) {
            const int32 in_row = in_row_begin + ky;
            x_under[ky] = load_if<4>(in_row < in_row_end, x + plane * 784 + col + in_row * 28);
        }
        #pragma unroll
        for (int ky = 0; ky < 4; ++ky) {
            const int32 in_row = in_row_begin + ky;
            if (in_row < in_row_end) {
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float x_e = x_under[ky][e];
                    y_sum[e] += x_e;
                }
            }
        }
        Vector<float, 4> y_sum_of_columns_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            y_sum_of_columns_v[e] = y_sum[e];
        }
        store_shared(y_sum_of_columns + plane * 364 + row * 28 + col, y_sum_of_columns_v);
    }
    __syncthreads();
    for (uint32 at = threadIdx.x; at < 338; at += 256) {
        const int32 plane = at / 169;
        const int32 row = at / 13 % 13;
        const int32 col = at % 13;
        float y_sum_2 = 0.0f;
        const int32 in_col_begin = (col * 28) / 13;
        const int32 in_col_end = (col * 28 + 40) / 13;
        #pragma unroll
        for (int kx = 0; kx < 4; ++kx) {
            const int32 in_col = in_col_begin + kx;
            if (in_col < in_col_end) {
                const float y_sum_of_columns_2_v = y_sum_of_columns[plane * 364 + row * 28 + in_col];
                y_sum_2 += y_sum_of_columns_2_v;
            }
        }
        const int32 y_count = int32(((int32(row) + 1) * 28 + 12) / 13 - int32(row) * 28 / 13);
        const int32 y_count_2 = int32(((int32(col) + 1) * 28 + 12) / 13 - int32(col) * 28 / 13);
        const float y_weight = 1.0f / float(y_count * y_count_2);
        y[plane * 169 + row * 13 + col] = y_sum_2 * y_weight;
    }
}

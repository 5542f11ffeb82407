// maxpool_index_kernel: 3 nodes in one kernel
//     relu = relu(x)
//     y = max_pool(relu, window=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)))
//     index = max_pool_index(relu, window=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)))
// windows of 3 x 3; a thread takes 2 windows
#include "math.cuh"
#include "memory.cuh"
#include "strip.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) maxpool_index_kernel(
    const float* __restrict__ x,
    float* __restrict__ y,
    int32* __restrict__ index)
{
    const uint32 at = blockIdx.x * 256 + threadIdx.x;
    const int32 outer = at / 392;
    const int32 row = at / 14 % 28;
    const int32 col = (at % 14) * 2;
    float y_max[2];
    int32 index_at[2];
    #pragma unroll
    for (int q = 0; q < 2; ++q) {
        y_max[q] = -infinity<float>();
        index_at[q] = -1;
    }
    Strip<float, 1, 4, 0> x_strips[3];
    #pragma unroll
    for (int ky = 0; ky < 3; ++ky) {
        const int32 in_row = row * 2 + ky - 1;
        x_strips[ky] = load_strip<1, 4, 0>(in_row >= 0, x + outer * 3136 + in_row * 56 + col * 2, int32(col * 2), int32(56));
    }
    #pragma unroll
    for (int ky = 0; ky < 3; ++ky) {
        const int32 in_row = row * 2 + ky - 1;
        #pragma unroll
        for (int ix = 0; ix < 5; ++ix) {
            const int32 in_col = col * 2 + ix - 1;
            const bool inside = in_row >= 0 && in_col >= 0;
            if (inside) {
                const float x_e = x_strips[ky][ix];
                const float relu = math::relu(x_e);
                #pragma unroll
                for (int q = 0; q < 2; ++q) {
                    if (ix - q * 2 < 0 || ix - q * 2 >= 3) continue;  // not in window q
                    if (index_at[q] < 0 || relu > y_max[q] || relu != relu) {
                        y_max[q] = relu;
                        index_at[q] = int32(in_row * 56 + in_col);
                    }
                }
            }
        }
    }
    Vector<float, 2> y_v;
    Vector<int32, 2> index_v;
    #pragma unroll
    for (int q = 0; q < 2; ++q) {
        y_v[q] = y_max[q];
        index_v[q] = index_at[q];
    }
    store(y + outer * 784 + row * 28 + col, y_v);
    store(index + outer * 784 + row * 28 + col, index_v);
}

// maxpool_kernel: 1 node
//     y = max_pool(x, window=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)))
// windows of 3 x 3; a thread takes 2 windows of 8 neighbours
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "math.cuh"
#include "memory.cuh"
#include "strip.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) maxpool_kernel(
    const bfloat16* __restrict__ x,
    bfloat16* __restrict__ y)
{
    const uint32 at = blockIdx.x * 256 + threadIdx.x;
    const int32 outer = at / 12544;
    const int32 row = (at / 1792 % 7) * 4 + (at / 32 % 4);
    const int32 col = (at / 128 % 14) * 2;
    const int32 inner = (at % 32) * 8;
    float y_max[2][8];
    #pragma unroll
    for (int q = 0; q < 2; ++q) {
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_max[q][e] = -infinity<float>();
        }
    }
    Vector<bfloat16, 8> x_under[3][5];
    #pragma unroll
    for (int ky = 0; ky < 3; ++ky) {
        const int32 in_row = row * 2 + ky - 1;
        #pragma unroll
        for (int ix = 0; ix < 5; ++ix) {
            const int32 in_col = col * 2 + ix - 1;
            const bool inside = in_row >= 0 && in_col >= 0;
            x_under[ky][ix] = load_if<8>(inside, x + outer * 802816 + inner + in_row * 14336 + in_col * 256);
        }
    }
    #pragma unroll
    for (int ky = 0; ky < 3; ++ky) {
        const int32 in_row = row * 2 + ky - 1;
        #pragma unroll
        for (int ix = 0; ix < 5; ++ix) {
            const int32 in_col = col * 2 + ix - 1;
            const bool inside = in_row >= 0 && in_col >= 0;
            if (inside) {
                #pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const float x_e = convert<float>(x_under[ky][ix][e]);
                    #pragma unroll
                    for (int q = 0; q < 2; ++q) {
                        if (ix - q * 2 < 0 || ix - q * 2 >= 3) continue;  // not in window q
                        y_max[q][e] = math::maximum(y_max[q][e], x_e);
                    }
                }
            }
        }
    }
    #pragma unroll
    for (int q = 0; q < 2; ++q) {
        Vector<bfloat16, 8> y_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_v[e] = convert<bfloat16>(y_max[q][e]);
        }
        store(y + outer * 200704 + row * 7168 + (col + q) * 256 + inner, y_v);
    }
}

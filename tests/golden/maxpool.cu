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
    const int32 outer = at / 14336;
    const int32 row = (at / 3584 % 4) * 8 + (at / 32 % 4) * 2;
    const int32 col = at / 128 % 28;
    const int32 inner = (at % 32) * 8;
    if (row >= 28) return;
    float y_max[2][8];
    #pragma unroll
    for (int p = 0; p < 2; ++p) {
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_max[p][e] = -infinity<float>();
        }
    }
    Vector<bfloat16, 8> x_under[5][3];
    #pragma unroll
    for (int iy = 0; iy < 5; ++iy) {
        const int32 in_row = row * 2 + iy - 1;
        #pragma unroll
        for (int kx = 0; kx < 3; ++kx) {
            const int32 in_col = col * 2 + kx - 1;
            const bool inside = in_row >= 0 && in_col >= 0;
            x_under[iy][kx] = load_if<8>(inside, x + outer * 802816 + inner + in_row * 14336 + in_col * 256);
        }
    }
    #pragma unroll
    for (int iy = 0; iy < 5; ++iy) {
        const int32 in_row = row * 2 + iy - 1;
        #pragma unroll
        for (int kx = 0; kx < 3; ++kx) {
            const int32 in_col = col * 2 + kx - 1;
            const bool inside = in_row >= 0 && in_col >= 0;
            if (inside) {
                #pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const float x_e = convert<float>(x_under[iy][kx][e]);
                    #pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        if (iy - p * 2 < 0 || iy - p * 2 >= 3) continue;  // not in window p
                        y_max[p][e] = math::maximum(y_max[p][e], x_e);
                    }
                }
            }
        }
    }
    #pragma unroll
    for (int p = 0; p < 2; ++p) {
        Vector<bfloat16, 8> y_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_v[e] = convert<bfloat16>(y_max[p][e]);
        }
        store(y + outer * 200704 + (row + p) * 7168 + col * 256 + inner, y_v);
    }
}

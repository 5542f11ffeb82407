// avgpool_backward_kernel: 1 node
//     y = avg_pool_backward(loss, size=(56, 56), window=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)), coun...
// windows of 2 x 2; a thread takes 4 windows of 8 neighbours
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "memory.cuh"
#include "strip.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) avgpool_backward_kernel(
    const bfloat16* __restrict__ loss,
    bfloat16* __restrict__ y)
{
    const uint32 at = blockIdx.x * 256 + threadIdx.x;
    const int32 outer = at / 25088;
    const int32 row = (at / 1792 % 14) * 4 + (at / 32 % 4);
    const int32 col = (at / 128 % 14) * 4;
    const int32 inner = (at % 32) * 8;
    float y_sum[4][8] = {};
    Vector<bfloat16, 8> loss_under[2][4];
    #pragma unroll
    for (int ky = 0; ky < 2; ++ky) {
        const int32 in_row = (row + 1) / 2 - ky;
        const bool row_holds = uint32(in_row) < 28 && row - in_row * 2 + 1 < 3;
        #pragma unroll
        for (int ix = 0; ix < 4; ++ix) {
            const int32 in_col = col / 2 + ix - 1;
            const bool inside = row_holds && uint32(in_col) < 28;
            loss_under[ky][ix] = load_if<8>(inside, loss + outer * 200704 + inner + in_row * 7168 + in_col * 256);
        }
    }
    #pragma unroll
    for (int ky = 0; ky < 2; ++ky) {
        const int32 in_row = (row + 1) / 2 - ky;
        const bool row_holds = uint32(in_row) < 28 && row - in_row * 2 + 1 < 3;
        #pragma unroll
        for (int ix = 0; ix < 4; ++ix) {
            const int32 in_col = col / 2 + ix - 1;
            const bool inside = row_holds && uint32(in_col) < 28;
            if (inside) {
                #pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const float loss_e = convert<float>(loss_under[ky][ix][e]);
                    const int32 y_count = min(int32(in_row) * 2 + 3, 57) - max(int32(in_row) * 2, 1);
                    const int32 y_count_2 = min(int32(in_col) * 2 + 3, 57) - max(int32(in_col) * 2, 1);
                    const float y_weight = 1.0f / float(y_count * y_count_2);
                    const float y_share = loss_e * y_weight;
                    #pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        if (q - ix * 2 + 3 < 0 || q - ix * 2 + 3 >= 3) continue;  // not in window q
                        y_sum[q][e] += y_share;
                    }
                }
            }
        }
    }
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
        Vector<bfloat16, 8> y_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_v[e] = convert<bfloat16>(y_sum[q][e]);
        }
        store(y + outer * 802816 + row * 14336 + (col + q) * 256 + inner, y_v);
    }
}

// gradient_result_parts_kernel: 1 node
//     result parts = conv_wgrad_bands(image, loss, taps=(3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dila...
// filter gradient, 3 x 3 taps; a thread sums up 2 x 3 taps of 1 channels, 4 x 7 positions at a time
#include "memory.cuh"
#include "strip.cuh"
#include "types.cuh"
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) gradient_result_parts_kernel(
    const bfloat16* __restrict__ image_2,
    const bfloat16* __restrict__ loss,
    float* __restrict__ result_parts)
{
    grid_dependency_launch();
    const int32 block = blockIdx.x;
    const int32 part = block / 4;
    const int32 tap_row = block / 2 % 2 * 2;
    const int32 lane0 = block % 2 * 32;
    const int warp = threadIdx.x / 32;
    const int walker = warp;
    const int lane = threadIdx.x % 32;
    const int32 at = lane0 + lane;
    const int32 group = at;
    const bfloat16* const images = image_2 + group;
    const bfloat16* const losses = loss + group;
    float sum[6][1] = {};
    const int32 end = (part + 1) * 8;
    #pragma unroll 1
    for (int32 patch = part * 8 + walker; patch < end; patch += 8) {
        const int32 image = patch / 8;
        const int32 down = patch / 2 % 4;
        const int32 across = patch % 2;
        const int32 row = down * 4, col = across * 7;
        const int32 front = 0;
        const int32 top = row + tap_row - 1;
        const int32 left = col - 1;
        const bfloat16* const corner = images + image * 12544 + top * 896 + left * 64;
        const bfloat16* const first_loss = losses + image * 12544 + row * 896 + col * 64;
        Packed<bfloat16, 1> loaded[4][7];
        #pragma unroll
        for (int b = 0; b < 4; ++b) {
            #pragma unroll
            for (int u = 0; u < 7; ++u) {
                loaded[b][u] = load_if<1>(!(row + b >= 14), first_loss + b * 896 + u * 64);
            }
        }
        float loss_at[4][7][1];
        #pragma unroll
        for (int b = 0; b < 4; ++b) {
            #pragma unroll
            for (int u = 0; u < 7; ++u) {
                loss_at[b][u][0] = convert<float>(loaded[b][u][0]);
            }
        }
        #pragma unroll
        for (int i = 0; i < 5; ++i) {
            Packed<bfloat16, 1> line[9];
            const bool row_there = (uint32(top + i) < 14);
            #pragma unroll
            for (int j = 0; j < 9; ++j) {
                line[j] = load_if<1>(row_there && (j >= 1 && j < 8 || uint32(left + j) < 14), corner + i * 896 + j * 64);
            }
            float under[9][1];
            #pragma unroll
            for (int j = 0; j < 9; ++j) {
                under[j][0] = convert<float>(line[j][0]);
            }
            #pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int over = i - b;
                if (over < 0 || over >= 2) continue;
                if (row + b >= 14) continue;
                #pragma unroll
                for (int u = 0; u < 7; ++u) {
                    #pragma unroll
                    for (int tap = 0; tap < 3; ++tap) {
                        sum[over * 3 + tap][0] += loss_at[b][u][0] * under[u + tap][0];
                    }
                }
            }
        }
    }

    __shared__ float exchange[8][6][1][32];
    #pragma unroll
    for (int k = 0; k < 6; ++k) {
        exchange[warp][k][0][lane] = sum[k][0];
    }
    __syncthreads();
    for (int n = threadIdx.x; n < 6 * 32; n += 256) {
        const int from = n % 32;
        const int k = n / 32;
        const int tap = k;
        const int32 tap_row_at = tap_row + tap / 3;
        if (tap_row_at >= 3) continue;
        const int32 tap_col_at = tap % 3;
        float total = exchange[0][k][0][from];
        #pragma unroll
        for (int other = 1; other < 8; ++other) total += exchange[other][k][0][from];
        const int32 at_own = lane0 + from;
        const int32 group_own = at_own;
        result_parts[part * 576 + group_own + tap_row_at * 192 + tap_col_at * 64] = total;
    }
}

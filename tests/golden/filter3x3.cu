// filter3x3_kernel: 2 nodes in one kernel
//     filtered = conv_fprop(photo, weights, padding=((1, 1), (1, 1)), mode='convolution')
//     y = clamp(filtered, min=0.0, max=1.0)
// direct convolution, 3 x 3 taps; a thread 8 x 4 outputs
#include "math.cuh"
#include "memory.cuh"
#include "strip.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128) filter3x3_kernel(
    const float* __restrict__ photo,
    const float* __restrict__ weights_2,
    float* __restrict__ y)
{
    const int32 at = int32(blockIdx.x) * 128 + threadIdx.x;
    if (at >= 194400) return;
    const int32 image = at / 64800;
    const int32 row = at / 480 % 135 * 8;
    const int32 col = at % 480 * 4;
    float weights[1][3][3];
    #pragma unroll
    for (int kr = 0; kr < 3; ++kr) {
        #pragma unroll
        for (int ks = 0; ks < 3; ++ks) {
            weights[0][kr][ks] = weights_2[(2 - kr) * 3 + (2 - ks)];
        }
    }

    const float* corner = photo + image * 2073600 + row * 1920 + col;
    Strip<float, 1, 4, 1> line[10];
    #pragma unroll
    for (int iy = 0; iy < 10; ++iy) {
        line[iy] = load_strip<1, 4, 1>(uint32(row + iy - 1) < 1080, corner + (iy - 1) * 1920, int32(col), int32(1920));
    }

    float sum[1][8][4] = {};
    #pragma unroll
    for (int iy = 0; iy < 10; ++iy) {
        float under[6];
        #pragma unroll
        for (int ix = 0; ix < 6; ++ix) {
            under[ix] = line[iy][ix];
        }
        #pragma unroll
        for (int p = 0; p < 8; ++p) {
            if (!(iy - p >= 0 && iy - p < 3)) continue;  // no tap of output row p meets this row
            const int kr = iy - p;
            #pragma unroll
            for (int ks = 0; ks < 3; ++ks) {
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sum[0][p][e] += weights[0][kr][ks] * under[e + ks];
                }
            }
        }
        if (iy < 2) continue;
        const int p = iy - 2;
        Vector<float, 4> y_v;
        #pragma unroll
        for (int q = 0; q < 4; ++q) {
            y_v[q] = math::clamp(sum[0][p][q], 0.0f, 1.0f);
        }
        store(y + image * 2073600 + (row + p) * 1920 + col, y_v);
    }
}

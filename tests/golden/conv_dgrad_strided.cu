// conv_dgrad_strided_kernel: 3 nodes in one kernel
//     upsampled = conv_dgrad(loss, w, size=(28, 28), stride=(2, 2), padding=((1, 1), (1, 1)))
//     add = add(upsampled, bias)
//     y = relu(add)
// 4 x 392 x 24 sums of 64 products in float; tile 32 x 32 x 16 a block, 4 x 4 a thread
#include "math.cuh"
#include "memory.cuh"
#include "product.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(64, 1) conv_dgrad_strided_kernel(
    const float* __restrict__ loss,
    const float* __restrict__ w,
    const float* __restrict__ bias,
    float* __restrict__ y)
{
    const int32 block = blockIdx.x;
    const int32 batch = block / 13;
    const int32 row0 = block % 13 * 32;
    const int32 b0 = batch / 2;
    const int32 b1 = batch % 2;
    const int t = threadIdx.x;

    __shared__ __align__(16) float a_tile[2][16][36];
    __shared__ __align__(16) float b_tile[2][16][36];

    const int a_k = t % 16, a_m = t / 16;  // this thread's part of a tile of loss
    int32 a_base[8], a_start0[8], a_start1[8];
    bool a_inside[8];
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int32 m = row0 + a_m + i * 4;
        const int32 m0 = m / 196;
        const int32 m1 = m / 14 % 14;
        const int32 m2 = m % 14;
        a_base[i] = b0 * 224 + b1 * 16 + m0 * 3136 + m1 * 224 + m2 * 16 - 240;
        a_start0[i] = b0 + m1 - 1;
        a_start1[i] = b1 + m2 - 1;
        a_inside[i] = m < 392;
    }

    const int b_n = t % 32, b_k = t / 32;  // this thread's part of a tile of w
    const int32 b_base = -b0 * 72 - b1 * 24 + b_n + 288;
    const bool b_inside = b_n < 24;

    float sum[4][4] = {};
    const int warp = t / 32, lane = t % 32;
    const int tx = lane / 2 % 8;  // pairs of threads side by side take neighbouring columns
    const int ty = warp * 4 + (lane / 16) * 2 + lane % 2;

    float a_next[8], b_next[8];
    const auto fetch = [&](int32 k0) {
        {
            const int32 k = k0 + a_k;
            const int32 r0 = k / 32;
            const int32 r1 = k / 16 % 2;
            const int32 r2 = k % 16;
            const bool term = uint32(-b0 - r0 * 2 + 3) < 3 && uint32(-b1 - r1 * 2 + 3) < 3;  // whether there is a product
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool inside = a_inside[i] && uint32(a_start0[i] + r0) < 14 && uint32(a_start1[i] + r1) < 14 && term;
                a_next[i] = inside ? loss[a_base[i] + r0 * 224 + r1 * 16 + r2] : float(0);
            }
        }
        {
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int32 k = k0 + b_k + i * 2;
                const int32 r0 = k / 32;
                const int32 r1 = k / 16 % 2;
                const int32 r2 = k % 16;
                const bool term = uint32(-b0 - r0 * 2 + 3) < 3 && uint32(-b1 - r1 * 2 + 3) < 3;  // whether there is a product
                const bool inside = b_inside && term;
                b_next[i] = inside ? w[b_base - r0 * 144 - r1 * 48 + r2 * 216] : float(0);
            }
        }
    };
    fetch(0);
    int stage = 0;
    for (int32 k0 = 0; k0 < 64; k0 += 16, stage ^= 1) {
        #pragma unroll
        for (int i = 0; i < 8; ++i) a_tile[stage][a_k][a_m + i * 4] = a_next[i];
        #pragma unroll
        for (int i = 0; i < 8; ++i) b_tile[stage][b_k + i * 2][b_n] = b_next[i];
        __syncthreads();  // one a tile is enough: the other stage was last read before the previous one
        if (k0 < 48) fetch(k0 + 16);
        #pragma unroll
        for (int kk = 0; kk < 16; ++kk) {
            const auto a_part = load_shared<4>(&a_tile[stage][kk][ty * 4]);
            const auto b_part = load_shared<4>(&b_tile[stage][kk][tx * 4]);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                #pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][j] = multiply_add(a_part[i], b_part[j], sum[i][j]);
            }
        }
    }

    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int32 m = row0 + ty * 4 + i;
        if (m >= 392) continue;
        const int32 m0 = m / 196;
        const int32 m1 = m / 14 % 14;
        const int32 m2 = m % 14;
        const int32 h1 = b0 + m1 * 2;
        const int32 h2 = b1 + m2 * 2;
        const int32 n = tx * 4;
        if (n >= 24) continue;
        const auto bias_v = load<4>(bias + n);
        Vector<float, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float bias_e = bias_v[e];
            const float add = sum[i][e] + bias_e;
            y_v[e] = math::relu(add);
        }
        store(y + m0 * 18816 + h1 * 672 + h2 * 24 + n, y_v);
    }
}

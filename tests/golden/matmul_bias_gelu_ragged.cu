// matmul_bias_gelu_ragged_kernel: 3 nodes in one kernel
//     product = matmul(a, b)
//     add = add(product, bias)
//     y = gelu(add)
// 3 x 65 x 127 sums of 33 products in float; tile 32 x 32 x 16 a block, 4 x 4 a thread
#include "math.cuh"
#include "memory.cuh"
#include "product.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(64, 1) matmul_bias_gelu_ragged_kernel(
    const float* __restrict__ a,
    const float* __restrict__ b,
    const float* __restrict__ bias,
    float* __restrict__ y)
{
    const int32 block = blockIdx.x;
    const int32 batch = block / 12;
    const int32 col0 = block / 3 % 4 * 32;
    const int32 row0 = block % 3 * 32;
    const int t = threadIdx.x;

    __shared__ __align__(16) float a_tile[2][16][36];
    __shared__ __align__(16) float b_tile[2][16][36];

    const int a_k = t % 16, a_m = t / 16;  // this thread's part of a tile of a
    int32 a_base[8];
    bool a_inside[8];
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int32 m = row0 + a_m + i * 4;
        a_base[i] = batch * 2145 + m * 33;
        a_inside[i] = m < 65;
    }

    const int b_n = t % 32, b_k = t / 32;  // this thread's part of a tile of b
    const int32 b_at = col0 + b_n;
    const int32 b_base = batch * 4191 + b_at;
    const bool b_inside = b_at < 127;

    float sum[4][4] = {};
    const int warp = t / 32, lane = t % 32;
    const int tx = lane / 2 % 8;  // pairs of threads side by side take neighbouring columns
    const int ty = warp * 4 + (lane / 16) * 2 + lane % 2;

    float a_next[8], b_next[8];
    const auto fetch = [&](int32 k0) {
        {
            const int32 k = k0 + a_k;
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool inside = k < 33 && a_inside[i];
                a_next[i] = inside ? a[a_base[i] + k] : float(0);
            }
        }
        {
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int32 k = k0 + b_k + i * 2;
                const bool inside = k < 33 && b_inside;
                b_next[i] = inside ? b[b_base + k * 127] : float(0);
            }
        }
    };
    fetch(0);
    int stage = 0;
    for (int32 k0 = 0; k0 < 48; k0 += 16, stage ^= 1) {
        #pragma unroll
        for (int i = 0; i < 8; ++i) a_tile[stage][a_k][a_m + i * 4] = a_next[i];
        #pragma unroll
        for (int i = 0; i < 8; ++i) b_tile[stage][b_k + i * 2][b_n] = b_next[i];
        __syncthreads();  // one a tile is enough: the other stage was last read before the previous one
        if (k0 < 32) fetch(k0 + 16);
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
        if (m >= 65) continue;
        Vector<float, 4> bias_v[1];
        {
            const int32 n = col0 + tx * 4;
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                bias_v[0][e] = bias[min(n + e, 126)];
            }
        }
        const int32 n = col0 + tx * 4;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (n + e >= 127) continue;
            const float bias_e = bias_v[0][e];
            const float add = sum[i][e] + bias_e;
            y[batch * 8255 + m * 127 + n + e] = math::gelu(add);
        }
    }
}

// matmul_bias_gelu_kernel: 3 nodes in one kernel
//     product = matmul(a, b)
//     add = add(product, bias)
//     y = gelu(add)
// 2048 x 4096 sums of 1024 products in float; tile 128 x 128 x 8 a block, 8 x 8 a thread
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) matmul_bias_gelu_kernel(
    const bfloat16* __restrict__ a,
    const bfloat16* __restrict__ b,
    const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ y)
{
    const int32 block = blockIdx.x;
    const int32 col0 = block / 16 * 128;
    const int32 row0 = block % 16 * 128;
    const int t = threadIdx.x;

    __shared__ __align__(16) float a_tile[2][8][132];
    __shared__ __align__(16) float b_tile[2][8][132];

    const int a_k = t % 8, a_m = t / 8;  // this thread's part of a tile of a
    int32 a_base[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int32 m = row0 + a_m + i * 32;
        a_base[i] = m * 1024;
    }

    const int b_n = t % 128, b_k = t / 128;  // this thread's part of a tile of b
    const int32 b_base = col0 + b_n;

    float sum[8][8] = {};
    const int tx = t % 16, ty = t / 16;  // threads side by side take neighbouring columns

    float a_next[4], b_next[4];
    const auto fetch = [&](int32 k0) {
        {
            const int32 k = k0 + a_k;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                a_next[i] = convert<float>(a[a_base[i] + k]);
            }
        }
        {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int32 k = k0 + b_k + i * 2;
                b_next[i] = convert<float>(b[b_base + k * 4096]);
            }
        }
    };
    fetch(0);
    int stage = 0;
    for (int32 k0 = 0; k0 < 1024; k0 += 8, stage ^= 1) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) a_tile[stage][a_k][a_m + i * 32] = a_next[i];
        #pragma unroll
        for (int i = 0; i < 4; ++i) b_tile[stage][b_k + i * 2][b_n] = b_next[i];
        __syncthreads();  // one a tile is enough: the other stage was last read before the previous one
        if (k0 < 1016) fetch(k0 + 8);
        #pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            const Vector<float, 4> a_part[2] = {
                load_shared<4>(&a_tile[stage][kk][ty * 4]),
                load_shared<4>(&a_tile[stage][kk][ty * 4 + 64]),
            };
            const Vector<float, 4> b_part[2] = {
                load_shared<4>(&b_tile[stage][kk][tx * 4]),
                load_shared<4>(&b_tile[stage][kk][tx * 4 + 64]),
            };
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                #pragma unroll
                for (int j = 0; j < 8; ++j) sum[i][j] += a_part[i / 4][i % 4] * b_part[j / 4][j % 4];
            }
        }
    }

    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int32 m = row0 + ty * 4 + i / 4 * 64 + i % 4;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int32 n = col0 + tx * 4 + c * 64;
            const auto bias_v = load<4>(bias + n);
            Vector<bfloat16, 4> y_v;
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float bias_e = convert<float>(bias_v[e]);
                const float add = sum[i][c * 4 + e] + bias_e;
                y_v[e] = convert<bfloat16>(math::gelu(add));
            }
            store(y + m * 4096 + n, y_v);
        }
    }
}

// conv_bias_relu_kernel: 4 nodes in one kernel
//     conv = conv_fprop(x, w, padding=((1, 1), (1, 1)))
//     add = add(conv, bias)
//     add_6 = add(add, residual)
//     y = relu(add_6)
// 25088 x 64 sums of 576 products in float; tile 64 x 64 x 16 a block, 4 x 4 a thread
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) conv_bias_relu_kernel(
    const bfloat16* __restrict__ x,
    const bfloat16* __restrict__ w,
    const bfloat16* __restrict__ residual,
    const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ y)
{
    const int32 row0 = int32(blockIdx.x) * 64;
    const int t = threadIdx.x;

    __shared__ __align__(16) float a_tile[2][16][68];
    __shared__ __align__(16) float b_tile[2][16][68];

    const int a_k = t % 16, a_m = t / 16;  // this thread's part of a tile of x
    int32 a_base[4], a_start0[4], a_start1[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int32 m = row0 + a_m + i * 16;
        const int32 m0 = m / 3136;
        const int32 m1 = m / 56 % 56;
        const int32 m2 = m % 56;
        a_base[i] = m0 * 200704 + m1 * 3584 + m2 * 64 - 3648;
        a_start0[i] = m1 - 1;
        a_start1[i] = m2 - 1;
    }

    const int b_k = t % 16, b_n = t / 16;  // this thread's part of a tile of w
    int32 b_base[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int32 n = b_n + i * 16;
        b_base[i] = n * 576;
    }

    float sum[4][4] = {};
    const int tx = t % 16, ty = t / 16;  // threads side by side take neighbouring columns

    float a_next[4], b_next[4];
    const auto fetch = [&](int32 k0) {
        {
            const int32 k = k0 + a_k;
            const int32 r0 = k / 192;
            const int32 r1 = k / 64 % 3;
            const int32 r2 = k % 64;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool inside = uint32(a_start0[i] + r0) < 56 && uint32(a_start1[i] + r1) < 56;
                a_next[i] = inside ? convert<float>(x[a_base[i] + r0 * 3584 + r1 * 64 + r2]) : float(0);
            }
        }
        {
            const int32 k = k0 + b_k;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                b_next[i] = convert<float>(w[b_base[i] + k]);
            }
        }
    };
    fetch(0);
    int stage = 0;
    for (int32 k0 = 0; k0 < 576; k0 += 16, stage ^= 1) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) a_tile[stage][a_k][a_m + i * 16] = a_next[i];
        #pragma unroll
        for (int i = 0; i < 4; ++i) b_tile[stage][b_k][b_n + i * 16] = b_next[i];
        __syncthreads();  // one a tile is enough: the other stage was last read before the previous one
        if (k0 < 560) fetch(k0 + 16);
        #pragma unroll
        for (int kk = 0; kk < 16; ++kk) {
            const auto a_part = load_shared<4>(&a_tile[stage][kk][ty * 4]);
            const auto b_part = load_shared<4>(&b_tile[stage][kk][tx * 4]);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                #pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][j] += a_part[i] * b_part[j];
            }
        }
    }

    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int32 m = row0 + ty * 4 + i;
        const int32 m0 = m / 3136;
        const int32 m1 = m / 56 % 56;
        const int32 m2 = m % 56;
        const int32 n = tx * 4;
        const auto residual_v = load<4>(residual + m0 * 200704 + m1 * 3584 + m2 * 64 + n);
        const auto bias_v = load<4>(bias + n);
        Vector<bfloat16, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float residual_e = convert<float>(residual_v[e]);
            const float bias_e = convert<float>(bias_v[e]);
            const float add = sum[i][e] + bias_e;
            const float add_6 = add + residual_e;
            y_v[e] = convert<bfloat16>(math::relu(add_6));
        }
        store(y + m0 * 200704 + m1 * 3584 + m2 * 64 + n, y_v);
    }
}

// matmul_bias_gelu_ragged_kernel: 3 nodes in one kernel
//     product = matmul(a, b)
//     add = add(product, bias)
//     y = gelu(add)
// 3 x 65 x 127 sums of 33 products in float
// a thread has 1 columns of the large operand, and 16 of the other one; 8 warps share the reduction
#include "math.cuh"
#include "memory.cuh"
#include "product.cuh"
#include "shared.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) matmul_bias_gelu_ragged_kernel(
    const float* __restrict__ a,
    const float* __restrict__ b,
    const float* __restrict__ bias,
    float* __restrict__ y)
{
    const int32 block = blockIdx.x;
    const int32 batch = block / 20;
    const int32 col0 = block / 5 % 4 * 32;
    const int32 row0 = block % 5 * 16;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    struct Shared {
        alignas(16) float few[36][16];
        alignas(16) float parts[8][16][1][32];
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int32 col = col0 + lane;
    const bool inside = col < 127;
    const int32 b_base = batch * 4191 + col;
    const int32 begin = (warp % 8) * 4;
    Vector<float, 1> b_next_ahead[4] = {};
    const auto fetch = [&](int32 first) {
        if (inside) {
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                b_next_ahead[u] = first + u < 33 ? load<1>(b + b_base + (first + u) * 127) : Vector<float, 1>{};
            }
        }
    };
    if (begin < 36) fetch(begin);

    #pragma unroll 4
    for (int i = t; i < 576; i += 256) {
        const int32 k = i % 36, r = i / 36;
        float value = 0;
        if (k < 33 && row0 + r < 65) {
            const int32 a_base = batch * 2145 + (row0 + r) * 33;
            value = a[a_base + k];
        }
        shared.few[k][r] = value;
    }
    __syncthreads();

    float sum[16][1] = {};
    for (int32 k0 = begin; k0 < 36; k0 += 32) {
        Vector<float, 1> b_next[4];
        #pragma unroll
        for (int u = 0; u < 4; ++u) b_next[u] = b_next_ahead[u];
        if (k0 + 32 < 36) fetch(k0 + 32);  // on its way while these are multiplied
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int32 k = k0 + u;
            float few[16];
            #pragma unroll
            for (int n = 0; n < 4; ++n) {
                const auto chunk = load_shared<4>(&shared.few[k][n * 4]);
                #pragma unroll
                for (int e = 0; e < 4; ++e) few[n * 4 + e] = chunk[e];
            }
            const float value = b_next[u][0];
            #pragma unroll
            for (int r = 0; r < 16; ++r) sum[r][0] = multiply_add(few[r], value, sum[r][0]);
        }
    }

    #pragma unroll
    for (int r = 0; r < 16; ++r) {
        #pragma unroll
        for (int v = 0; v < 1; ++v) {
            shared.parts[warp][r][v][lane] = sum[r][v];
        }
    }
    __syncthreads();
    if (!inside) return;
    for (int r = warp % 8; r < 16; r += 8) {
        if (row0 + r >= 65) continue;
        float whole[1] = {};
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int v = 0; v < 1; ++v) whole[v] += shared.parts[n][r][v][lane];
        }
        const float bias_e = bias[col];
        const float add = whole[0] + bias_e;
        y[batch * 8255 + (row0 + r) * 127 + col] = math::gelu(add);
    }
}

// layernorm_kernel: 9 nodes in one kernel
//     y mean = reduction(x, mode='avg', axes=(1,))
//     y centred = sub(x, y mean)
//     y square = mul(y centred, y centred)
//     y variance = reduction(y square, mode='avg', axes=(1,))
//     y shifted = add(y variance, 9.999999747378752e-06)
//     y inverse = rsqrt(y shifted)
//     y normal = mul(y centred, y inverse)
//     y scaled = mul(y normal, scale)
//     y = add(y scaled, bias)
// 16384 rows of 1000 elements, kept in registers; 32 threads a row
#include "math.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128, 6) layernorm_kernel(
    const float* __restrict__ x,
    const float* __restrict__ scale,
    const float* __restrict__ bias,
    float* __restrict__ y)
{
    const uint32 row = blockIdx.x * 4 + threadIdx.x / 32;
    const uint32 lane = threadIdx.x % 32;
    Vector<float, 4> x_v[8];
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = min((u * 32 + lane) * 4, uint32(996));
        x_v[u] = load_evict_last<4>(x + row * 1000 + col);
    }
    float y_mean_add_part = 0.0f;
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = (u * 32 + lane) * 4;
        if (u < 7 || col < 1000) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                y_mean_add_part += x_v[u][e];
            }
        }
    }
    const float y_mean_add = reduce::lanes<reduce::Add, 32>(y_mean_add_part);
    const float y_mean = y_mean_add / 1000.0f;
    float y_variance_add_part = 0.0f;
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = (u * 32 + lane) * 4;
        if (u < 7 || col < 1000) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float y_centred = x_v[u][e] - y_mean;
                const float y_square = y_centred * y_centred;
                y_variance_add_part += y_square;
            }
        }
    }
    const float y_variance_add = reduce::lanes<reduce::Add, 32>(y_variance_add_part);
    const float y_variance = y_variance_add / 1000.0f;
    const float y_shifted = y_variance + (1.0e-5f);
    const float y_inverse = math::rsqrt(y_shifted);
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32 col = (u * 32 + lane) * 4;
        if (u < 7 || col < 1000) {
            const Vector<float, 4> scale_v = load<4>(scale + col);
            const Vector<float, 4> bias_v = load<4>(bias + col);
            Vector<float, 4> y_v;
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float y_centred = x_v[u][e] - y_mean;
                const float y_normal = y_centred * y_inverse;
                const float y_scaled = y_normal * scale_v[e];
                y_v[e] = y_scaled + bias_v[e];
            }
            store(y + row * 1000 + col, y_v);
        }
    }
}

// gelu_bias_kernel: 5 nodes in one kernel
//     add = add(a, bias)
//     gelu = gelu(add)
//     tanh = tanh(b)
//     mul = mul(gelu, tanh)
//     y = add(mul, a)
// 4096 x 1024 elements, 8 a vector, 4 vectors in flight a thread
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"

extern "C" __global__ void __launch_bounds__(256) gelu_bias_kernel(
    const bfloat16* __restrict__ a,
    const bfloat16* __restrict__ bias,
    const bfloat16* __restrict__ b,
    bfloat16* __restrict__ y)
{
    const uint32 v = blockIdx.x * 256 + threadIdx.x;
    const uint32 col = v % 128 * 8;
    const uint32 row0 = v / 128 * 4;
    const Vector<bfloat16, 8> bias_v = load<8>(bias + col);
    Vector<bfloat16, 8> a_v[4];
    Vector<bfloat16, 8> b_v[4];
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = row0 + u;
        a_v[u] = load<8>(a + row * 1024 + col);
        b_v[u] = load<8>(b + row * 1024 + col);
    }
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = row0 + u;
        Vector<bfloat16, 8> y_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float a_e = convert<float>(a_v[u][e]);
            const float add = a_e + convert<float>(bias_v[e]);
            const float gelu = math::gelu(add);
            const float tanh_ = math::tanh(convert<float>(b_v[u][e]));
            const float mul = gelu * tanh_;
            y_v[e] = convert<bfloat16>(mul + a_e);
        }
        store(y + row * 1024 + col, y_v);
    }
}

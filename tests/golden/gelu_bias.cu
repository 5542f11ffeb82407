// gelu_bias_kernel: 5 nodes in one kernel
//     add = add(a, bias)
//     gelu = gelu(add)
//     tanh = tanh(b)
//     mul = mul(gelu, tanh)
//     y = add(mul, a)
// 4096 x 1024 elements, 8 a vector, 1 vector in flight a thread
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "math.cuh"
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) gelu_bias_kernel(
    const bfloat16* __restrict__ a,
    const bfloat16* __restrict__ bias,
    const bfloat16* __restrict__ b,
    bfloat16* __restrict__ y)
{
    const uint32 i = (blockIdx.x * 256 + threadIdx.x) * 8;
    const Vector<bfloat16, 8> a_v = load_once<8>(a + i);
    const uint32 i1 = i % 1024;
    const Vector<bfloat16, 8> bias_v = load<8>(bias + i1);
    const Vector<bfloat16, 8> b_v = load_once<8>(b + i);
    Vector<bfloat16, 8> y_v;
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float a_e = convert<float>(a_v[e]);
        const float add = a_e + convert<float>(bias_v[e]);
        const float gelu = math::gelu(add);
        const float tanh = math::tanh(convert<float>(b_v[e]));
        const float mul = gelu * tanh;
        y_v[e] = convert<bfloat16>(mul + a_e);
    }
    store(y + i, y_v);
}

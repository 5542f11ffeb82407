// sigmoid_fma_kernel: 3 nodes in one kernel
//     mul = mul(b, c)
//     add = add(a, mul)
//     y = sigmoid(add)
// 1048576 elements, 4 a vector, 1 vector in flight a thread
#include "math.cuh"
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) sigmoid_fma_kernel(
    const float* __restrict__ a,
    const float* __restrict__ b,
    const float* __restrict__ c,
    float* __restrict__ y)
{
    const uint32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
    const Vector<float, 4> a_v = load_once<4>(a + i);
    const Vector<float, 4> b_v = load_once<4>(b + i);
    const Vector<float, 4> c_v = load_once<4>(c + i);
    Vector<float, 4> y_v;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float mul = b_v[e] * c_v[e];
        const float add = a_v[e] + mul;
        y_v[e] = math::sigmoid(add);
    }
    store(y + i, y_v);
}

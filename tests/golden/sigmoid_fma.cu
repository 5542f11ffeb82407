// sigmoid_fma_kernel: 3 nodes in one kernel
//     mul = mul(b, c)
//     add = add(a, mul)
//     y = sigmoid(add)
// 1048576 elements, 4 a vector, 2 vectors in flight a thread
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"

extern "C" __global__ void __launch_bounds__(256) sigmoid_fma_kernel(
    const float* __restrict__ a,
    const float* __restrict__ b,
    const float* __restrict__ c,
    float* __restrict__ y)
{
    const uint32 first = (blockIdx.x * 512 + threadIdx.x) * 4;
    Vector<float, 4> a_v[2];
    Vector<float, 4> b_v[2];
    Vector<float, 4> c_v[2];
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
        const uint32 i = first + u * 1024;
        a_v[u] = load<4>(a + i);
        b_v[u] = load<4>(b + i);
        c_v[u] = load<4>(c + i);
    }
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
        const uint32 i = first + u * 1024;
        Vector<float, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float mul = b_v[u][e] * c_v[u][e];
            const float add = a_v[u][e] + mul;
            y_v[e] = math::sigmoid(add);
        }
        store(y + i, y_v);
    }
}

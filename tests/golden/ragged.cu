// ragged_kernel: 3 nodes in one kernel
//     mul = mul(a, column)
//     add = add(mul, b)
//     y = relu(add)
// 1023 x 1021 elements, 4 a vector, 2 vectors in flight a thread
#include "types.cuh"
#include "math.cuh"
#include "memory.cuh"

extern "C" __global__ void __launch_bounds__(256) ragged_kernel(
    const float* __restrict__ a,
    const float* __restrict__ column,
    const float* __restrict__ b,
    float* __restrict__ y)
{
    constexpr uint32 size = 1044483;
    const uint32 first = (blockIdx.x * 512 + threadIdx.x) * 4;
    Vector<float, 4> a_v[2];
    Vector<float, 4> column_v[2];
    Vector<float, 4> b_v[2];
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
        const uint32 i = first + u * 1024;
        if (i < size) {
            a_v[u] = load<4>(a + i, size - i);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32 o = i + e;
                if (o < size) {
                    const uint32 o0 = o / 1021;
                    column_v[u][e] = column[o0];
                }
            }
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32 o = i + e;
                if (o < size) {
                    const uint32 o1 = o % 1021;
                    b_v[u][e] = b[o1];
                }
            }
        }
    }
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
        const uint32 i = first + u * 1024;
        if (i < size) {
            Vector<float, 4> y_v;
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float mul = a_v[u][e] * column_v[u][e];
                const float add = mul + b_v[u][e];
                y_v[e] = math::relu(add);
            }
            store(y + i, y_v, size - i);
        }
    }
}

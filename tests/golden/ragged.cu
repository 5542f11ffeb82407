// ragged_kernel: 3 nodes in one kernel
//     mul = mul(a, column)
//     add = add(mul, b)
//     y = relu(add)
// 1023 x 1021 elements, 4 a vector, 1 vector in flight a thread
#include "math.cuh"
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) ragged_kernel(
    const float* __restrict__ a,
    const float* __restrict__ column,
    const float* __restrict__ b,
    float* __restrict__ y)
{
    constexpr uint32 size = 1044483;
    const uint32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= size) return;
    const Vector<float, 4> a_v = load<4>(a + i, size - i);
    const uint32 i0 = i / 1021;
    const uint32 last = i + 3 < size ? i + 3 : size - 1;
    const uint32 last0 = last / 1021;
    const Vector<float, 2> column_v = {column[i0], column[last0]};
    Vector<float, 4> b_v;
    const uint32 i1 = i % 1021;
    const uint32 left = 1021 - i1;
    #pragma unroll
    for (int e = 0; e < 4; ++e) if (i + e < size) b_v[e] = b[(e < left ? i1 : i1 - 1021) + e];
    Vector<float, 4> y_v;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float mul = a_v[e] * (e < left ? column_v[0] : column_v[1]);
        const float add = mul + b_v[e];
        y_v[e] = math::relu(add);
    }
    store(y + i, y_v, size - i);
}

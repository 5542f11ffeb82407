// images_kernel: 4 nodes in one kernel
//     mul = mul(x, scale)
//     add = add(mul, shift)
//     y = relu(add, upper_clip=6.0)
//     mask = cmp_gt(y, 0.0)
// 6272 x 64 elements, 16 a vector, 1 vector in flight a thread
#include "math.cuh"
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) images_kernel(
    const float16* __restrict__ x,
    const float* __restrict__ scale,
    const float* __restrict__ shift,
    float* __restrict__ y,
    bool* __restrict__ mask)
{
    const uint32 i = (blockIdx.x * 256 + threadIdx.x) * 16;
    const Vector<float16, 16> x_v = load_once<16>(x + i);
    const uint32 i1 = i % 64;
    const Vector<float, 16> scale_v = load<16>(scale + i1);
    const Vector<float, 16> shift_v = load<16>(shift + i1);
    Vector<float, 16> y_v;
    Vector<bool, 16> mask_v;
    #pragma unroll
    for (int e = 0; e < 16; ++e) {
        const float mul = convert<float>(x_v[e]) * scale_v[e];
        const float add = mul + shift_v[e];
        const float y_2 = math::minimum(math::relu(add), 6.0f);
        y_v[e] = y_2;
        mask_v[e] = y_2 > 0.0f;
    }
    store(y + i, y_v);
    store(mask + i, mask_v);
}

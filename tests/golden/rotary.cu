// rotary_kernel: 7 nodes in one kernel
//     slice = slice(x, stops=(4, 512, 64))
//     slice_4 = slice(x, starts=(0, 0, 64))
//     mul = mul(x, cos)
//     neg = neg(slice_4)
//     concatenate = concatenate(neg, slice, axis=2)
//     mul_8 = mul(concatenate, sin)
//     y = add(mul, mul_8)
// 4 x 512 x 128 elements, 8 a vector, 1 vector in flight a thread
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) rotary_kernel(
    const bfloat16* __restrict__ x,
    const bfloat16* __restrict__ cos,
    const bfloat16* __restrict__ sin,
    const bfloat16* __restrict__ slice_4,
    const bfloat16* __restrict__ slice,
    bfloat16* __restrict__ y)
{
    const uint32 i = (blockIdx.x * 256 + threadIdx.x) * 8;
    const Vector<bfloat16, 8> x_v = load_once<8>(x + i);
    const uint32 i1 = i / 128 % 512;
    const uint32 i2 = i % 128;
    const Vector<bfloat16, 8> cos_v = load<8>(cos + i1 * 128 + i2);
    const Vector<bfloat16, 8> sin_v = load<8>(sin + i1 * 128 + i2);
    const bool neg_inside = int32(i2) < 64;
    const bool slice_inside = int32(i2) >= 64;
    const Vector<bfloat16, 8> slice_4_v = neg_inside ? load<8>(slice_4 + int32(i)) : Vector<bfloat16, 8>{};
    const Vector<bfloat16, 8> slice_v = slice_inside ? load<8>(slice + int32(i) - 64) : Vector<bfloat16, 8>{};
    Vector<bfloat16, 8> y_v;
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float mul = convert<float>(x_v[e]) * convert<float>(cos_v[e]);
        const float neg = -convert<float>(slice_4_v[e]);
        const float concatenate = neg_inside ? neg : convert<float>(slice_v[e]);
        const float mul_8 = concatenate * convert<float>(sin_v[e]);
        y_v[e] = convert<bfloat16>(mul + mul_8);
    }
    store(y + i, y_v);
}

// gated_kernel: 4 nodes in one kernel
//     slice = slice(h, stops=(512, 1024))
//     slice_2 = slice(h, starts=(0, 1024))
//     swish = swish(slice)
//     y = mul(swish, slice_2)
// 512 x 1024 elements, 8 a vector, 1 vector in flight a thread
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "math.cuh"
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) gated_kernel(
    const bfloat16* __restrict__ slice,
    const bfloat16* __restrict__ slice_2,
    bfloat16* __restrict__ y)
{
    const uint32 i = (blockIdx.x * 256 + threadIdx.x) * 8;
    const uint32 i0 = i / 1024;
    const uint32 i1 = i % 1024;
    const Vector<bfloat16, 8> slice_v = load_once<8>(slice + i0 * 2048 + i1);
    const Vector<bfloat16, 8> slice_2_v = load_once<8>(slice_2 + i0 * 2048 + i1);
    Vector<bfloat16, 8> y_v;
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float swish = math::swish(convert<float>(slice_v[e]));
        y_v[e] = convert<bfloat16>(swish * convert<float>(slice_2_v[e]));
    }
    store(y + i, y_v);
}

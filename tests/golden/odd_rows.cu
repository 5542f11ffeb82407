// odd_rows_kernel: 1 node
//     y = add(a, b)
// 4096 x 4095 elements, 16 a vector, 1 vector in flight a thread
// rows begin anywhere: vectors are aligned in y
#include "math.cuh"
#include "memory.cuh"
#include "types.cuh"
#include "unaligned.cuh"

extern "C" __global__ void __launch_bounds__(256) odd_rows_kernel(
    const int8* __restrict__ a,
    const int8* __restrict__ b,
    int8* __restrict__ y)
{
    const uint32 v = blockIdx.x * 256 + threadIdx.x;
    const uint32 row = v / 257;
    const uint32 skew = row * 4097 % 16;  // elements of the row's first vector before the row
    const uint32 col = v % 257 * 16 - skew;
    const Packed<int8, 16> a_v = load_within<16>(a, row * 4097 + col, 16781310);
    const Unaligned<int8, 16> b_w = load_unaligned<16>(b, row * 4099 + col, 16789500);
    const Vector<int8, 16> b_v = b_w.elements();
    Vector<int8, 16> y_v;
    #pragma unroll
    for (int e = 0; e < 16; ++e) {
        y_v[e] = math::wrapping_add(a_v[e], b_v[e]);
    }
    store_within(y + row * 4097, col, 4095, y_v);
}

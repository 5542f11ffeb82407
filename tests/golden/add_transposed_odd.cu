// add_transposed_odd_kernel: 1 node
//     y = add(a, b)
// 8191 x 8193 elements in tiles of 64 x 128, 8 a vector
// b: across the tiles in memory, turned in shared memory
// rows begin anywhere: vectors are aligned in y
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "memory.cuh"
#include "types.cuh"
#include "unaligned.cuh"

extern "C" __global__ void __launch_bounds__(256) add_transposed_odd_kernel(
    const bfloat16* __restrict__ a,
    const bfloat16* __restrict__ b,
    bfloat16* __restrict__ y)
{
    __shared__ __align__(16) bfloat16 b_tile[9280];
    const uint32 block = blockIdx.x;
    const uint32 row0 = block / 65 * 64;
    const uint32 col0 = block % 65 * 128;
    Unaligned<bfloat16, 8> b_v[5];
    #pragma unroll
    for (int u = 0; u < 5; ++u) {
        const uint32 row = threadIdx.x / 4 % 8 * 8, col = threadIdx.x % 4 + threadIdx.x / 32 * 4 + u * 32;
        if (col < 136) {
            b_v[u] = load_unaligned<8>(b, row0 + row + min(col0 + col - 8, uint32(8192)) * 8191, 67108863);
        }
    }
    Packed<bfloat16, 8> a_v[4];
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 16 + u * 16, col = threadIdx.x % 16 * 8;
        if (row0 + row < 8191) {
            const uint32 skew = (row0 + row) * 8193 % 8;
            a_v[u] = load_within<8>(a, (row0 + row) * 8193 + col0 + col - skew, 67108863);
        }
    }
    #pragma unroll
    for (int u = 0; u < 5; ++u) {
        const uint32 row = threadIdx.x / 4 % 8 * 8, col = threadIdx.x % 4 + threadIdx.x / 32 * 4 + u * 32;
        if (col < 136) {
            const uint32 at = row * 144 + row / 8 * 8 + col;
            const uint32 skew = (row0 + row) * 8193 % 8;
            const Vector<bfloat16, 8> b_e = b_v[u].elements();
            #pragma unroll
            for (int e = 0; e < 8; ++e) b_tile[at + e * 144 + (skew + e * 8193) % 8] = b_e[e];
        }
    }
    __syncthreads();
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 16 + u * 16, col = threadIdx.x % 16 * 8;
        if (row0 + row < 8191) {
            const uint32 skew = (row0 + row) * 8193 % 8;
            const Vector<bfloat16, 8> b_t = load_shared<8>(b_tile + row * 144 + row / 8 * 8 + col + 8);
            Vector<bfloat16, 8> y_v;
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                y_v[e] = convert<bfloat16>(convert<float>(a_v[u][e]) + convert<float>(b_t[e]));
            }
            store_within(y + (row0 + row) * 8193, col0 + col - skew, 8193, y_v);
        }
    }
}

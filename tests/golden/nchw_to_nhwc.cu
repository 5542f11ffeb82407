// nchw_to_nhwc_kernel: 1 node
//     y = identity(x)
// 64 x 3136 x 256 elements in tiles of 64 x 128, 8 a vector
// x: across the tiles in memory, turned in shared memory
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) nchw_to_nhwc_kernel(
    const bfloat16* __restrict__ x,
    bfloat16* __restrict__ y)
{
    __shared__ __align__(16) bfloat16 x_tile[8256];
    const uint32 block = blockIdx.x;
    const uint32 i0 = block / 98;
    const uint32 row0 = block / 2 % 49 * 64;
    const uint32 col0 = block % 2 * 128;
    Vector<bfloat16, 8> x_v[4];
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 4 % 8 * 8, col = threadIdx.x % 4 + threadIdx.x / 32 * 4 + u * 32;
        x_v[u] = load_once<8>(x + i0 * 802816 + row0 + row + (col0 + col) * 3136);
    }
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 4 % 8 * 8, col = threadIdx.x % 4 + threadIdx.x / 32 * 4 + u * 32;
        const uint32 at = row * 128 + row / 8 * 8 + col;
        #pragma unroll
        for (int e = 0; e < 8; ++e) x_tile[at + e * 128] = x_v[u][e];
    }
    __syncthreads();
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 16 + u * 16, col = threadIdx.x % 16 * 8;
        const Vector<bfloat16, 8> x_t = load_shared<8>(x_tile + row * 128 + row / 8 * 8 + col);
        Vector<bfloat16, 8> y_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            y_v[e] = convert<bfloat16>(convert<float>(x_t[e]));
        }
        store(y + i0 * 802816 + (row0 + row) * 256 + col0 + col, y_v);
    }
}

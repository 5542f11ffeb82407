// add_transposed_kernel: 1 node
//     y = add(a, b)
// 8192 x 8192 elements in tiles of 64 x 64, 4 a vector
// b: across the tiles in memory, turned in shared memory
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) add_transposed_kernel(
    const float* __restrict__ a,
    const float* __restrict__ b,
    float* __restrict__ y)
{
    __shared__ __align__(16) float b_tile[4160];
    const uint32 block = blockIdx.x;
    const uint32 row0 = block / 128 * 64;
    const uint32 col0 = block % 128 * 64;
    Vector<float, 4> b_v[4];
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 4 % 16 * 4, col = threadIdx.x % 4 + threadIdx.x / 64 * 4 + u * 16;
        b_v[u] = load_once<4>(b + row0 + row + (col0 + col) * 8192);
    }
    Vector<float, 4> a_v[4];
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 16 + u * 16, col = threadIdx.x % 16 * 4;
        a_v[u] = load_once<4>(a + (row0 + row) * 8192 + col0 + col);
    }
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 4 % 16 * 4, col = threadIdx.x % 4 + threadIdx.x / 64 * 4 + u * 16;
        const uint32 at = row * 64 + row / 4 * 4 + col;
        #pragma unroll
        for (int e = 0; e < 4; ++e) b_tile[at + e * 64] = b_v[u][e];
    }
    __syncthreads();
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        const uint32 row = threadIdx.x / 16 + u * 16, col = threadIdx.x % 16 * 4;
        const Vector<float, 4> b_t = load_shared<4>(b_tile + row * 64 + row / 4 * 4 + col);
        Vector<float, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            y_v[e] = a_v[u][e] + b_t[e];
        }
        store(y + (row0 + row) * 8192 + col0 + col, y_v);
    }
}

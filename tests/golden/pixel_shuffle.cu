// pixel_shuffle_kernel: 4 nodes in one kernel
//     relu = relu(x)
//     reshape = reshape(relu, shape=(8, 16, 2, 2, 32, 32))
//     transpose = transpose(reshape, perm=(0, 1, 4, 2, 5, 3))
//     y = reshape(transpose, shape=(8, 16, 64, 64))
// 128 x 32 x 2 x 32 x 2 elements in tiles of 512 x 2, 4 a vector
// x: across the tiles in memory, turned in shared memory
#include "math.cuh"
#include "memory.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) pixel_shuffle_kernel(
    const float* __restrict__ x,
    float* __restrict__ y)
{
    __shared__ __align__(16) float x_tile[1536];
    const uint32 block = blockIdx.x;
    const uint32 i0 = block / 4;
    const uint32 row0 = block % 4 * 512;
    Vector<float, 4> x_v;
    {
        const uint32 row = threadIdx.x / 2 * 4, col = threadIdx.x % 2;
        const uint32 r = row0 + row;
        const uint32 r0 = r / 64;
        const uint32 r1 = r / 32 % 2;
        const uint32 r2 = r % 32;
        x_v = load_once<4>(x + i0 * 4096 + r0 * 32 + r1 * 2048 + r2 + col * 1024);
    }
    {
        const uint32 row = threadIdx.x / 2 * 4, col = threadIdx.x % 2;
        const uint32 at = row * 2 + row / 4 * 4 + col;
        #pragma unroll
        for (int e = 0; e < 4; ++e) x_tile[at + e * 2] = x_v[e];
    }
    __syncthreads();
    {
        const uint32 t = threadIdx.x * 4;
        const Vector<float, 4> x_t = load_shared<4>(x_tile + t + t / 8 * 4);
        Vector<float, 4> y_v;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            y_v[e] = math::relu(x_t[e]);
        }
        store(y + i0 * 4096 + row0 * 2 + t, y_v);
    }
}

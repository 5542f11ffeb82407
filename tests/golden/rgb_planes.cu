// rgb_planes_kernel: 2 nodes in one kernel
//     sub = sub(pixels, mean)
//     planes = div(sub, 255.0)
// 16 x 3 x 50625 elements in tiles of 48 x 64, 1 a vector
// pixels: across the tiles in memory, turned in shared memory
#include "math.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) rgb_planes_kernel(
    const uint8* __restrict__ pixels,
    const float* __restrict__ mean,
    float* __restrict__ planes)
{
    __shared__ __align__(16) uint8 pixels_tile[3264];
    const uint32 col0 = uint32(blockIdx.x) * 64;
    uint8 pixels_v[12];
    #pragma unroll
    for (int u = 0; u < 12; ++u) {
        const uint32 k = threadIdx.x + u * 256;
        const uint32 row = k / 16 % 48, col = k % 16 + k / 768 * 16;
        const uint32 r0 = row / 3;
        const uint32 r1 = row % 3;
        pixels_v[u] = pixels[r0 * 151875 + r1 + min(col0 + col, uint32(50624)) * 3];
    }
    float mean_v[12];
    #pragma unroll
    for (int u = 0; u < 12; ++u) {
        const uint32 row = threadIdx.x / 64 + u * 4, col = threadIdx.x % 64;
        const uint32 r1 = row % 3;
        mean_v[u] = mean[r1];
    }
    #pragma unroll
    for (int u = 0; u < 12; ++u) {
        const uint32 k = threadIdx.x + u * 256;
        const uint32 row = k / 16 % 48, col = k % 16 + k / 768 * 16;
        const uint32 at = row * 64 + row * 4 + col;
        pixels_tile[at] = pixels_v[u];
    }
    __syncthreads();
    #pragma unroll
    for (int u = 0; u < 12; ++u) {
        const uint32 row = threadIdx.x / 64 + u * 4, col = threadIdx.x % 64;
        if (col0 + col < 50625) {
            const uint32 r0 = row / 3;
            const uint32 r1 = row % 3;
            const float sub = convert<float>(pixels_tile[row * 64 + row * 4 + col]) - mean_v[u];
            planes[r0 * 151875 + r1 * 50625 + col0 + col] = math::divide(sub, 255.0f);
        }
    }
}

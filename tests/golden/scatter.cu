// scatter_add_float32_y_scale_kernel: 2 nodes in one kernel
//     y exponent = exponent(updates)
//     y scale = accumulate(index, y exponent, size=100, axis=0, combine='most')
// 64000 updates of 100 places
#include "scatter.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) scatter_add_float32_y_scale_kernel(
    const int64* __restrict__ index,
    const float* __restrict__ updates,
    int32* __restrict__ y_scale)
{
    const uint32 i = blockIdx.x * 256 + threadIdx.x;
    const uint32 i0 = i / 64;
    const uint32 i1 = i % 64;
    const int64 index_v = index[i0];
    const float updates_v = updates[i0 * 64 + i1];
    const int64 place = index_v;
    if (place >= 0 && place < 100) {
        scatter::most(y_scale + i1 + (uint32(place)) * 64, scatter::exponent(updates_v));
    }
}

// scatter_add_float32_y_sum_kernel: 4 nodes in one kernel
//     y own scale line = reshape(index, shape=(1000,))
//     y own scale = gather(y scale, y own scale line)
//     y fixed sum = fixed(updates, y own scale, places=52)
//     y sum = accumulate(index, y fixed sum, size=100, axis=0, combine='add')
// 64000 updates of 100 places
#include "scatter.cuh"
#include "types.cuh"
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(256) scatter_add_float32_y_sum_kernel(
    const int64* index,
    const float* updates,
    const int32* y_scale,
    int64* __restrict__ y_sum)
{
    grid_dependency_wait();
    grid_dependency_launch();
    const uint32 i = blockIdx.x * 256 + threadIdx.x;
    const uint32 i0 = i / 64;
    const uint32 i1 = i % 64;
    const int64 index_v = index[i0];
    const float updates_v = updates[i0 * 64 + i1];
    const int32 y_own_scale_line_at = int32(index_v < 0 ? 0 : index_v > 99 ? 99 : index_v);
    const int32 y_scale_e = y_scale[y_own_scale_line_at * 64 + int32(i1)];
    const int64 place = index_v;
    if (place >= 0 && place < 100) {
        scatter::add(y_sum + i1 + (uint32(place)) * 64, scatter::fixed(updates_v, y_scale_e, 52));
    }
}

// scatter_add_float32_y_kernel: 1 node
//     y = floating(x, y scale, y sum, places=52)
// 6400 elements, 4 a vector, 1 vector in flight a thread
#include "memory.cuh"
#include "scatter.cuh"
#include "types.cuh"
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(256) scatter_add_float32_y_kernel(
    const float* x,
    const int32* y_scale,
    const int64* y_sum,
    float* __restrict__ y)
{
    grid_dependency_wait();
    constexpr uint32 size = 6400;
    const uint32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= size) return;
    const Vector<float, 4> x_v = load_once<4>(x + i);
    const Vector<int32, 4> y_scale_v = load_once<4>(y_scale + i);
    const Vector<int64, 4> y_sum_v = load_once<4>(y_sum + i);
    Vector<float, 4> y_v;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        y_v[e] = x_v[e] + scatter::floating(y_scale_v[e], 52, y_sum_v[e]);
    }
    store(y + i, y_v);
}

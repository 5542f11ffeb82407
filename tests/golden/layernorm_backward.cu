// layernorm_backward_16384_4096_bfloat16_dx_kernel: 17 nodes in one kernel
//     dx in = identity(loss, dtype=float32)
//     dx in_7 = identity(x, dtype=float32)
//     dx in_8 = identity(scale, dtype=float32)
//     dx centred = sub(dx in_7, mean)
//     dx normal = mul(dx centred, inverse)
//     dx product = mul(dx in, dx normal)
//     dx g = mul(dx in, dx in_8)
//     dx g product = mul(dx g, dx normal)
//     dx product mean = reduction(dx g product, mode='avg', axes=(1,))
//     dx g mean = reduction(dx g, mode='avg', axes=(1,))
//     dx across = mul(dx normal, dx product mean)
//     dx along = sub(dx g, dx across)
//     dx inner = sub(dx along, dx g mean)
//     dx value = mul(dx inner, inverse)
//     dx dscale parts = reduction_partial(dx product, axes=(0,), chunk=125, dtype=float32)
//     dx dbias parts = reduction_partial(dx in, axes=(0,), chunk=125, dtype=float32)
//     dx = narrow(dx value, dtype=bfloat16)
// 16384 rows of 4096 elements, kept in registers; 256 threads a row
// A block walks 125 rows, 132 apart, combining their columns meanwhile, 2 side by side, 4 of them on their way.
#include "async_copy.cuh"
#include "memory.cuh"
#include "reduce.cuh"
#include "shared.cuh"
#include "types.cuh"
#include "warpgroup.cuh"
#include "order.cuh"

extern "C" __global__ void __launch_bounds__(512, 1) layernorm_backward_16384_4096_bfloat16_dx_kernel(
    const bfloat16* __restrict__ loss,
    const bfloat16* __restrict__ x,
    const float* __restrict__ mean,
    const float* __restrict__ inverse,
    const bfloat16* __restrict__ scale,
    float* __restrict__ dx_dscale_parts,
    float* __restrict__ dx_dbias_parts,
    bfloat16* __restrict__ dx)
{
    grid_dependency_launch();
    const uint32 lane = threadIdx.x % 256, sub = threadIdx.x / 256;
    const uint32 part = blockIdx.x;
    const uint32 count = (uint32(16515) - part) / 132;
    // A row's own values are read while the row before is worked on.
    const uint32 first = part + min(sub, count - 1) * 132;
    float mean_next = mean[first];
    float inverse_next = inverse[first];
    Vector<bfloat16, 8> scale_v[2];
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
        const uint32 col = (u * 256 + lane) * 8;
        scale_v[u] = load<8>(scale + col);
    }
    float dx_dscale_parts_own[2][8] = {};
    float dx_dbias_parts_own[2][8] = {};
    __shared__ float dx_product_mean_add_parts[2][16];
    __shared__ float dx_g_mean_add_parts[2][16];
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    bfloat16* const loss_s = reinterpret_cast<bfloat16*>(shared);
    bfloat16* const x_s = reinterpret_cast<bfloat16*>(shared + 32768);
    const uint32 steps = (count + 1) / 2;
    // A thread reads back what it copied itself.
    for (uint32 step = 0; step < 2; ++step) {
        const uint32 fetched = part + min(step * 2 + sub, count - 1) * 132;
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            const uint32 col = (u * 256 + lane) * 8;
            if (step < steps) {
                copy_async<16>(loss_s + (step % 2 * 2 + sub) * 4096 + col, loss + fetched * 4096 + col);
                copy_async<16>(x_s + (step % 2 * 2 + sub) * 4096 + col, x + fetched * 4096 + col);
            }
            copy_async_commit();
        }
    }
    #pragma unroll 1
    for (uint32 step = 0; step < steps; ++step) {
        const bool inside = step * 2 + sub < count;
        const uint32 row = part + (inside ? step * 2 + sub : count - 1) * 132;
        const uint32 turn = step % 2;
        const float mean_r = mean_next;
        const float inverse_r = inverse_next;
        const uint32 after = part + min((step + 1) * 2 + sub, count - 1) * 132;
        mean_next = mean[after];
        inverse_next = inverse[after];
        Vector<bfloat16, 8> loss_v[2];
        Vector<bfloat16, 8> x_v[2];
        const uint32 at = (step % 2 * 2 + sub) * 4096;
        const uint32 fetched = part + min((step + 2) * 2 + sub, count - 1) * 132;
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            const uint32 col = (u * 256 + lane) * 8;
            copy_async_wait<3>();
            loss_v[u] = load_shared<8>(loss_s + at + col);
            x_v[u] = load_shared<8>(x_s + at + col);
            if (step + 2 < steps) {
                copy_async<16>(loss_s + at + col, loss + fetched * 4096 + col);
                copy_async<16>(x_s + at + col, x + fetched * 4096 + col);
            }
            copy_async_commit();
        }
        float dx_product_mean_add_part = 0.0f;
        float dx_g_mean_add_part = 0.0f;
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float loss_e = convert<float>(loss_v[u][e]);
                const float dx_centred = convert<float>(x_v[u][e]) - mean_r;
                const float dx_normal = dx_centred * inverse_r;
                const float dx_product = loss_e * dx_normal;
                const float dx_g = loss_e * convert<float>(scale_v[u][e]);
                const float dx_g_product = dx_g * dx_normal;
                dx_product_mean_add_part += dx_g_product;
                dx_g_mean_add_part += dx_g;
                if (inside) dx_dscale_parts_own[u][e] += dx_product;
                if (inside) dx_dbias_parts_own[u][e] += loss_e;
            }
        }
        reduce::give<reduce::Add>(dx_product_mean_add_part, dx_product_mean_add_parts[turn]);
        reduce::give<reduce::Add>(dx_g_mean_add_part, dx_g_mean_add_parts[turn]);
        named_barrier_sync(1 + sub, 256);
        const float dx_product_mean_add = reduce::take<reduce::Add, 8>(dx_product_mean_add_parts[turn] + sub * 8);
        const float dx_g_mean_add = reduce::take<reduce::Add, 8>(dx_g_mean_add_parts[turn] + sub * 8);
        const float dx_product_mean = dx_product_mean_add / 4096.0f;
        const float dx_g_mean = dx_g_mean_add / 4096.0f;
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            const uint32 col = (u * 256 + lane) * 8;
            Vector<bfloat16, 8> dx_v;
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float dx_centred = convert<float>(x_v[u][e]) - mean_r;
                const float dx_normal = dx_centred * inverse_r;
                const float dx_g = convert<float>(loss_v[u][e]) * convert<float>(scale_v[u][e]);
                const float dx_across = dx_normal * dx_product_mean;
                const float dx_along = dx_g - dx_across;
                const float dx_inner = dx_along - dx_g_mean;
                dx_v[e] = convert<bfloat16>(dx_inner * inverse_r);
            }
            if (inside) store(dx + row * 4096 + col, dx_v);
        }
    }
    // What the rows side by side have of each column.
    __shared__ float float_columns[4096];
    #pragma unroll
    for (int u = 0; u < 2; ++u) reduce::across<reduce::Add, 256, 2>(dx_dscale_parts_own[u], float_columns);
    #pragma unroll
    for (int u = 0; u < 2; ++u) reduce::across<reduce::Add, 256, 2>(dx_dbias_parts_own[u], float_columns);
    if (sub > 0) return;
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
        const uint32 col = (u * 256 + lane) * 8;
        Vector<float, 8> dx_dscale_parts_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) dx_dscale_parts_v[e] = dx_dscale_parts_own[u][e];
        store(dx_dscale_parts + part * 4096 + col, dx_dscale_parts_v);
        Vector<float, 8> dx_dbias_parts_v;
        #pragma unroll
        for (int e = 0; e < 8; ++e) dx_dbias_parts_v[e] = dx_dbias_parts_own[u][e];
        store(dx_dbias_parts + part * 4096 + col, dx_dbias_parts_v);
    }
}

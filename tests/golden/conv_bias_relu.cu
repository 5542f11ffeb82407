// conv_bias_relu_kernel: 4 nodes in one kernel
//     conv = conv_fprop(x, w, padding=((1, 1), (1, 1)))
//     add = add(conv, bias)
//     add_6 = add(add, residual)
//     y = relu(add_6)
// 25088 x 64 sums of 576 products of bfloat16
// tile 128 x 64 x 64 a block, 3 stages; 2 x 2 warps, each 64 x 32
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "async_copy.cuh"
#include "fragments.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128, 1) conv_bias_relu_kernel(
    const bfloat16* __restrict__ x,
    const bfloat16* __restrict__ w,
    const bfloat16* __restrict__ residual,
    const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ y)
{
    struct Shared {
        alignas(128) unsigned char a[3][16384];  // stages of 128 rows of 64 bfloat16; swizzled
        alignas(128) unsigned char b[3][8192];  // stages of 64 columns of 64 bfloat16; swizzled
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int t = threadIdx.x, lane = t % 32;
    const int warp_row = t / 32 / 2 * 64, warp_col = t / 32 % 2 * 32;  // of the warp's part of the tile
    const Tile tile = tile_at<196, 1, 8>(blockIdx.x);
    const int32 m0 = int32(tile.row) * 128, n0 = int32(tile.col) * 64;

    const int a_piece = t % 8, a_row = t / 8;  // this thread's pieces of a tile of x: rows 16 apart
    const int a_at = swizzle<128>(a_row * 128 + a_piece * 16);
    int32 a_base[8], a_start0[8], a_start1[8];
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int32 m = m0 + a_row + i * 16;
        const int32 m_0 = m / 3136;
        const int32 m_1 = m / 56 % 56;
        const int32 m_2 = m % 56;
        a_base[i] = m_0 * 200704 + m_1 * 3584 + m_2 * 64 - 3648;
        a_start0[i] = m_1 - 1;
        a_start1[i] = m_2 - 1;
    }

    const int b_piece = t % 8, b_col = t / 8;  // this thread's pieces of a tile of w: columns 16 apart
    const int b_at = swizzle<128>(b_col * 128 + b_piece * 16);
    int32 b_base[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int32 n = n0 + b_col + i * 16;
        b_base[i] = n * 576;
    }

    const auto fetch = [&](int32 k, int stage) {
        {
            const int32 k0 = k * 64;
            const int32 k_0 = k0 / 192;
            const int32 k_1 = k0 / 64 % 3;
            const int32 k_2 = k0 % 64;
            const int32 along = k_0 * 3584 + k_1 * 64 + (k_2 + a_piece * 8);
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool inside = uint32(a_start0[i] + k_0) < 56 && uint32(a_start1[i] + k_1) < 56;
                copy_async<16>(shared.a[stage] + a_at + i * 2048, x + (a_base[i] + along), inside ? 16 : 0);
            }
        }
        {
            const int32 k0 = k * 64 + b_piece * 8;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                copy_async<16>(shared.b[stage] + b_at + i * 2048, w + (b_base[i] + k0));
            }
        }
    };

    // Which of the rows of the warp's first fragment a lane gives ldmatrix the address of.
    const int a_lane = swizzle<128>((warp_row + lane % 16) * 128 + lane / 16 * 16);
    // Which of the columns of the warp's first fragment a lane gives ldmatrix the address of.
    const int b_lane = swizzle<128>((warp_col + lane % 8 + lane / 16 * 8) * 128 + lane / 8 % 2 * 16);
    uint32 a_part[2][4][4], b_part[2][2][2][2];  // of two steps in turn
    const auto load_parts = [&](int stage, int kk) {
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            load_matrices(a_part[kk % 2][i], shared.a[stage] + i * 2048 + (a_lane ^ kk * 32));
        #pragma unroll
        for (int j = 0; j < 2; ++j)
            load_matrices(b_part[kk % 2][j], shared.b[stage] + j * 2048 + (b_lane ^ kk * 32));
    };

    // While a stage is multiplied the next 2 are on the way.
    float sum[4][4][4] = {};
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        fetch(i, i);
        copy_async_commit();
    }
    copy_async_wait<1>();
    __syncthreads();
    load_parts(0, 0);
    int stage = 0, filling = 2;
    for (int32 k = 0; k < 9; ++k) {
        const int next = stage + 1 < 3 ? stage + 1 : 0;
        #pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            if (kk + 1 < 4) {
                load_parts(stage, kk + 1);
            } else if (k + 1 < 9) {
                copy_async_wait<1>();
                __syncthreads();
                load_parts(next, 0);
            }
            if (kk == 0) {
                if (k + 2 < 9) fetch(k + 2, filling);
                copy_async_commit();
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int j = 0; j < 4; ++j)
                    mma<bfloat16, bfloat16>(sum[i][j], a_part[kk % 2][i], b_part[kk % 2][j / 2][j % 2]);
        }
        filling = stage;
        stage = next;
    }
    __syncthreads();  // the ring is free for the sums

    auto& staged = *reinterpret_cast<float (*)[128][72]>(memory);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
            #pragma unroll
            for (int f = 0; f < 4; ++f) {
                const int row = warp_row + i * 16 + lane / 4 + f % 2 * 8;
                const int col = warp_col + j * 16 + lane % 4 * 2 + f / 2 * 8;
                const float left = sum[i][j * 2 + f / 2][f % 2 * 2], right = sum[i][j * 2 + f / 2][f % 2 * 2 + 1];
                store_shared(&staged[row][col], Vector<float, 2>{{left, right}});
            }
        }
    }
    __syncthreads();
    #pragma unroll 1
    for (int start = 0; start < 1024; start += 512) {
        Vector<bfloat16, 8> residual_v[4];
        Vector<bfloat16, 8> bias_v[4];
        #pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int i = start + q * 128 + t;
            const int r = i / 8, c = i % 8 * 8;
            const int32 m = m0 + r, n = n0 + c;
            residual_v[q] = load<8>(residual + m * 64 + n);
            bias_v[q] = load<8>(bias + n);
        }
        #pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int i = start + q * 128 + t;
            const int r = i / 8, c = i % 8 * 8;
            const int32 m = m0 + r, n = n0 + c;
            const auto sums = load_shared<8>(&staged[r][c]);
            Vector<bfloat16, 8> y_v;
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float residual_e = convert<float>(residual_v[q][e]);
                const float bias_e = convert<float>(bias_v[q][e]);
                const float add = sums[e] + bias_e;
                const float add_6 = add + residual_e;
                y_v[e] = convert<bfloat16>(math::relu(add_6));
            }
            store(y + m * 64 + n, y_v);
        }
    }
}

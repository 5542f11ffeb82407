// matmul_bias_gelu_kernel: 3 nodes in one kernel
//     product = matmul(a, b)
//     add = add(product, bias)
//     y = gelu(add)
// 2048 x 4096 sums of 1024 products of bfloat16
// tile 128 x 128 x 64 a block, 2 stages; 2 x 2 warps, each 64 x 64
#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer
#include "async_copy.cuh"
#include "fragments.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "pipeline.cuh"
#include "shared.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128, 1) matmul_bias_gelu_kernel(
    const bfloat16* __restrict__ a,
    const bfloat16* __restrict__ b,
    const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ y)
{
    struct Shared {
        alignas(128) unsigned char a[2][16384];  // stages of 128 rows of 64 bfloat16; swizzled
        alignas(128) unsigned char b[2][16384];  // stages of 64 x 128 columns of bfloat16, in panels of 64; swizzled
    };
    FUSEGRAPH_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int t = threadIdx.x, lane = t % 32;
    const int warp_row = t / 32 / 2 * 64, warp_col = t / 32 % 2 * 64;  // of the warp's part of the tile
    const Tile tile = tile_at<16, 32, 8>(blockIdx.x);
    const int32 m0 = int32(tile.row) * 128, n0 = int32(tile.col) * 128;

    const int a_piece = t % 8, a_row = t / 8;  // this thread's pieces of a tile of a: rows 16 apart
    const int a_at = swizzle<128>(a_row * 128 + a_piece * 16);
    int32 a_base[8];
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int32 m = m0 + a_row + i * 16;
        a_base[i] = m * 1024;
    }

    const int b_piece = t % 16, b_k = t / 16;  // this thread's pieces of a tile of b: 8 apart along the sum
    const int b_at = b_piece / 8 * 8192 + swizzle<128>(b_k * 128 + b_piece % 8 * 16);
    const int32 b_base = n0 + b_piece * 8;

    const auto fetch = [&](int32 k, int stage) {
        {
            const int32 k0 = k * 64 + a_piece * 8;
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                copy_async<16>(shared.a[stage] + a_at + i * 2048, a + (a_base[i] + k0));
            }
        }
        {
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int32 k0 = k * 64 + b_k + i * 8;
                copy_async<16>(shared.b[stage] + b_at + i * 1024, b + (b_base + k0 * 4096));
            }
        }
    };

    // Which of the rows of the warp's first fragment a lane gives ldmatrix the address of.
    const int a_lane = swizzle<128>((warp_row + lane % 16) * 128 + lane / 16 * 16);
    // Which of the columns of the warp's first fragment a lane gives ldmatrix the address of.
    const int b_lane = warp_col / 64 * 8192 + swizzle<128>(lane % 16 * 128 + warp_col % 64 * 2 + lane / 16 * 16);
    uint32 a_part[2][4][4], b_part[2][4][2][2];  // of two steps in turn
    const auto load_parts = [&](int stage, int kk) {
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            load_matrices(a_part[kk % 2][i], shared.a[stage] + i * 2048 + (a_lane ^ kk * 32));
        #pragma unroll
        for (int j = 0; j < 4; ++j)
            load_matrices_transposed(b_part[kk % 2][j], shared.b[stage] + kk * 2048 + (b_lane ^ j * 32));
    };

    // While a stage is multiplied the next is on the way.
    float sum[4][8][4] = {};
    fetch(0, 0);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    load_parts(0, 0);
    int stage = 0, filling = 1;
    for (int32 k = 0; k < 16; ++k) {
        const int next = stage + 1 < 2 ? stage + 1 : 0;
        #pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            if (kk + 1 < 4) {
                load_parts(stage, kk + 1);
            } else if (k + 1 < 16) {
                copy_async_wait<0>();
                __syncthreads();
                load_parts(next, 0);
            }
            if (kk == 0) {
                if (k + 1 < 16) fetch(k + 1, filling);
                copy_async_commit();
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int j = 0; j < 8; ++j)
                    mma<bfloat16, bfloat16>(sum[i][j], a_part[kk % 2][i], b_part[kk % 2][j / 2][j % 2]);
        }
        filling = stage;
        stage = next;
    }
    __syncthreads();  // the ring is free for the sums

    auto& staged = *reinterpret_cast<float (*)[128][136]>(memory);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
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
    for (int start = 0; start < 2048; start += 512) {
        Vector<bfloat16, 8> bias_v[4];
        #pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int i = start + q * 128 + t;
            const int r = i / 16, c = i % 16 * 8;
            const int32 m = m0 + r, n = n0 + c;
            bias_v[q] = load<8>(bias + n);
        }
        #pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int i = start + q * 128 + t;
            const int r = i / 16, c = i % 16 * 8;
            const int32 m = m0 + r, n = n0 + c;
            const auto sums = load_shared<8>(&staged[r][c]);
            Vector<bfloat16, 8> y_v;
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float bias_e = convert<float>(bias_v[q][e]);
                const float add = sums[e] + bias_e;
                y_v[e] = convert<bfloat16>(math::gelu(add));
            }
            store(y + m * 4096 + n, y_v);
        }
    }
}

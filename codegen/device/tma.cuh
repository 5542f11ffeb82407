// Copies by TMA (sm_90): boxes of a tensor that a tensor map describes, and plain runs of bytes.
//
// One thread starts a copy for all.  Loads report their bytes to a Barrier, always those of the whole box; what lies
// outside the tensor arrives as zeros.  Stores are gathered in groups of the calling thread (tma_commit); what lies
// outside the tensor is not written.  Coordinates count elements, innermost dimension first; the first is a multiple of
// 16 bytes, or the instruction is illegal.  A box is dense in shared memory, innermost dimension first, at a multiple
// of 128 bytes; the swizzle of the map then permutes units of 16 bytes by the bits of their shared-memory address.
#pragma once
#include "mbarrier.cuh"
#include "types.cuh"

// CUtensorMap; a kernel's parameter is `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    uint64 opaque[16];
};

#ifdef FUSEGRAPH_CPU
#include "tma_on_cpu.h"
#else

// Fetches the map itself, so that the first copy need not wait for it.
__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Shows what the calling thread wrote to shared memory by ordinary stores to TMA and to wgmma.  Due after
// the stores and before the synchronisation with the thread that starts the copy.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define FUSEGRAPH_LIST(...) __VA_ARGS__
#define FUSEGRAPH_TO_BARRIER ".mbarrier::complete_tx::bytes"

// tma_load(shared, map, barrier, c0, c1, ...) loads the box at these coordinates.
// tma_load_multicast(..., mask) loads it into every block of the cluster whose bit is set in the mask, at the same
// place of its shared memory, and reports to the barrier at the same place.
// tma_prefetch_box(map, c0, c1, ...) has it brought to the L2 cache.
// tma_store(map, shared, c0, c1, ...) stores the box; tma_store_add adds it to what is there, atomically.
#define FUSEGRAPH_TMA_TILED(rank, parameters, coordinates, barrier_, mask_, values)                                    \
    __device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, Barrier& barrier, parameters) {       \
        asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.tile" FUSEGRAPH_TO_BARRIER                  \
                     " [%0], [%1, {" coordinates "}], [" barrier_ "];" ::"r"(shared_address(shared)), "l"(&map),       \
                     values, "r"(shared_address(&barrier)) : "memory");                                                \
    }                                                                                                                  \
    __device__ __forceinline__ void tma_load_multicast(void* shared, const TensorMap& map, Barrier& barrier,           \
                                                       parameters, uint16 mask) {                                      \
        asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.tile" FUSEGRAPH_TO_BARRIER                  \
                     ".multicast::cluster [%0], [%1, {" coordinates "}], [" barrier_ "], " mask_ ";" ::"r"(            \
                         shared_address(shared)), "l"(&map), values, "r"(shared_address(&barrier)), "h"(mask)          \
                     : "memory");                                                                                      \
    }                                                                                                                  \
    __device__ __forceinline__ void tma_prefetch_box(const TensorMap& map, parameters) {                               \
        asm volatile("cp.async.bulk.prefetch.tensor." rank ".L2.global.tile [%0, {" coordinates "}];" ::"l"(&map),     \
                     "r"(0), values : "memory");                                                                      \
    }                                                                                                                  \
    __device__ __forceinline__ void tma_store(const TensorMap& map, const void* shared, parameters) {                  \
        asm volatile("cp.async.bulk.tensor." rank ".global.shared::cta.tile.bulk_group [%1, {" coordinates "}], [%0];" \
                     ::"r"(shared_address(shared)), "l"(&map), values : "memory");                                     \
    }                                                                                                                  \
    __device__ __forceinline__ void tma_store_add(const TensorMap& map, const void* shared, parameters) {              \
        asm volatile("cp.reduce.async.bulk.tensor." rank ".global.shared::cta.add.tile.bulk_group [%1, {" coordinates  \
                     "}], [%0];" ::"r"(shared_address(shared)), "l"(&map), values : "memory");                         \
    }

FUSEGRAPH_TMA_TILED("2d", FUSEGRAPH_LIST(int c0, int c1), "%2, %3", "%4", "%5", FUSEGRAPH_LIST("r"(c0), "r"(c1)))
FUSEGRAPH_TMA_TILED("3d", FUSEGRAPH_LIST(int c0, int c1, int c2), "%2, %3, %4", "%5", "%6",
                    FUSEGRAPH_LIST("r"(c0), "r"(c1), "r"(c2)))
FUSEGRAPH_TMA_TILED("4d", FUSEGRAPH_LIST(int c0, int c1, int c2, int c3), "%2, %3, %4, %5", "%6", "%7",
                    FUSEGRAPH_LIST("r"(c0), "r"(c1), "r"(c2), "r"(c3)))
FUSEGRAPH_TMA_TILED("5d", FUSEGRAPH_LIST(int c0, int c1, int c2, int c3, int c4), "%2, %3, %4, %5, %6", "%7", "%8",
                    FUSEGRAPH_LIST("r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)))

// tma_load_im2col(shared, map, barrier, c, w, [h, [d,]] n, offset_w, [offset_h, [offset_d]]) loads the map's channels
// of as many pixels as the map says: those whose filter origins follow (w, h, d, n), W fastest, then H, D and images,
// within the corners of the map and in its steps, each displaced by the offsets.
#define FUSEGRAPH_TMA_IM2COL(rank, parameters, coordinates, barrier_, offsets, mask_, values, offset_values)           \
    __device__ __forceinline__ void tma_load_im2col(void* shared, const TensorMap& map, Barrier& barrier,              \
                                                    parameters) {                                                      \
        asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.im2col" FUSEGRAPH_TO_BARRIER                \
                     " [%0], [%1, {" coordinates "}], [" barrier_ "], {" offsets "};" ::"r"(shared_address(shared)),   \
                     "l"(&map), values, "r"(shared_address(&barrier)), offset_values : "memory");                      \
    }                                                                                                                  \
    __device__ __forceinline__ void tma_load_im2col_multicast(void* shared, const TensorMap& map, Barrier& barrier,    \
                                                              parameters, uint16 mask) {                               \
        asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.im2col" FUSEGRAPH_TO_BARRIER                \
                     ".multicast::cluster [%0], [%1, {" coordinates "}], [" barrier_ "], {" offsets "}, " mask_ ";"    \
                     ::"r"(shared_address(shared)), "l"(&map), values, "r"(shared_address(&barrier)), offset_values,   \
                     "h"(mask) : "memory");                                                                            \
    }

FUSEGRAPH_TMA_IM2COL("3d", FUSEGRAPH_LIST(int c, int w, int n, uint16 offset_w), "%2, %3, %4", "%5", "%6", "%7",
                     FUSEGRAPH_LIST("r"(c), "r"(w), "r"(n)), "h"(offset_w))
FUSEGRAPH_TMA_IM2COL("4d", FUSEGRAPH_LIST(int c, int w, int h, int n, uint16 offset_w, uint16 offset_h),
                     "%2, %3, %4, %5", "%6", "%7, %8", "%9", FUSEGRAPH_LIST("r"(c), "r"(w), "r"(h), "r"(n)),
                     FUSEGRAPH_LIST("h"(offset_w), "h"(offset_h)))
FUSEGRAPH_TMA_IM2COL("5d",
                     FUSEGRAPH_LIST(int c, int w, int h, int d, int n, uint16 offset_w, uint16 offset_h,
                                    uint16 offset_d),
                     "%2, %3, %4, %5, %6", "%7", "%8, %9, %10", "%11",
                     FUSEGRAPH_LIST("r"(c), "r"(w), "r"(h), "r"(d), "r"(n)),
                     FUSEGRAPH_LIST("h"(offset_w), "h"(offset_h), "h"(offset_d)))

#undef FUSEGRAPH_TMA_IM2COL
#undef FUSEGRAPH_TMA_TILED
#undef FUSEGRAPH_TO_BARRIER
#undef FUSEGRAPH_LIST

// Loads `bytes` bytes; they and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32 bytes, Barrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

// Stores `bytes` bytes; they and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

// Ends the calling thread's group of stores.
__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most the Pending latest groups of the calling thread are still being read from shared memory.
template <int Pending>
__device__ __forceinline__ void tma_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Waits until at most the Pending latest groups of the calling thread are not yet written to global memory.
template <int Pending>
__device__ __forceinline__ void tma_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

#endif

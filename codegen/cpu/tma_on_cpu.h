// tma.cuh for the CPU.  Copies are done as late or as early as they may be (engine.h).  Errors: misaligned addresses
// and coordinates, a box that does not fit the shared memory, a map of another rank or mode, a barrier that is not
// ready for TMA, a wrong number of bytes, two copies into the same bytes, a block or thread that ends before its
// copies, and ordinary stores to shared memory that a store copies without fence_async_shared in between (seen only if
// no thread of the block has fenced since the bytes were last copied).
#pragma once

#include "sync_on_cpu.h"

namespace fusegraph_cpu {

inline void start(const Copy& copy, const char* what, const char* file, int line) {
    current->block->runtime->copy(current, copy, Where{what, file, line});
}

// Copies of tiles: (c0, c1, ...) are the coordinates.
template <class... C>
inline Copy tile(CopyKind kind, const void* shared, const TensorMap& map, Barrier* barrier, C... c) {
    return Copy{kind, const_cast<void*>(shared), &map, nullptr, 0, barrier, int(sizeof...(C)), {c...}, {}, false, 0};
}

inline Copy to_blocks(Copy copy, uint16 mask) {
    copy.multicast = true;
    copy.mask = mask;
    return copy;
}

inline Copy displaced(Copy copy, uint16 w, uint16 h, uint16 d) {
    copy.offsets[0] = w, copy.offsets[1] = h, copy.offsets[2] = d;
    return copy;
}

}  // namespace fusegraph_cpu

inline void tma_prefetch(const TensorMap&) {}

inline void fence_async_shared() { fusegraph_cpu::current->block->runtime->fence_async(fusegraph_cpu::current); }

#define FUSEGRAPH_LIST(...) __VA_ARGS__

#define FUSEGRAPH_TMA_TILED(parameters, coordinates)                                                                  \
    inline void tma_load(void* shared, const TensorMap& map, Barrier& barrier, parameters, FUSEGRAPH_WHERE) {         \
        using namespace fusegraph_cpu;                                                                                \
        start(tile(kLoad, shared, map, &barrier, coordinates), "tma_load", file, line);                               \
    }                                                                                                                 \
    inline void tma_load_multicast(void* shared, const TensorMap& map, Barrier& barrier, parameters, uint16 mask,     \
                                   FUSEGRAPH_WHERE) {                                                                 \
        using namespace fusegraph_cpu;                                                                                \
        start(to_blocks(tile(kLoad, shared, map, &barrier, coordinates), mask), "tma_load_multicast", file, line);    \
    }                                                                                                                 \
    inline void tma_prefetch_box(const TensorMap&, parameters) {}                                                     \
    inline void tma_store(const TensorMap& map, const void* shared, parameters, FUSEGRAPH_WHERE) {                    \
        using namespace fusegraph_cpu;                                                                                \
        start(tile(kStore, shared, map, nullptr, coordinates), "tma_store", file, line);                              \
    }                                                                                                                 \
    inline void tma_store_add(const TensorMap& map, const void* shared, parameters, FUSEGRAPH_WHERE) {                \
        using namespace fusegraph_cpu;                                                                                \
        start(tile(kStoreAdd, shared, map, nullptr, coordinates), "tma_store_add", file, line);                       \
    }

FUSEGRAPH_TMA_TILED(FUSEGRAPH_LIST(int c0, int c1), FUSEGRAPH_LIST(c0, c1))
FUSEGRAPH_TMA_TILED(FUSEGRAPH_LIST(int c0, int c1, int c2), FUSEGRAPH_LIST(c0, c1, c2))
FUSEGRAPH_TMA_TILED(FUSEGRAPH_LIST(int c0, int c1, int c2, int c3), FUSEGRAPH_LIST(c0, c1, c2, c3))
FUSEGRAPH_TMA_TILED(FUSEGRAPH_LIST(int c0, int c1, int c2, int c3, int c4), FUSEGRAPH_LIST(c0, c1, c2, c3, c4))

#define FUSEGRAPH_TMA_IM2COL(parameters, coordinates, offsets)                                                        \
    inline void tma_load_im2col(void* shared, const TensorMap& map, Barrier& barrier, parameters, FUSEGRAPH_WHERE) {  \
        using namespace fusegraph_cpu;                                                                                \
        start(displaced(tile(kLoadIm2col, shared, map, &barrier, coordinates), offsets), "tma_load_im2col", file,     \
              line);                                                                                                  \
    }                                                                                                                 \
    inline void tma_load_im2col_multicast(void* shared, const TensorMap& map, Barrier& barrier, parameters,           \
                                          uint16 mask, FUSEGRAPH_WHERE) {                                             \
        using namespace fusegraph_cpu;                                                                                \
        start(to_blocks(displaced(tile(kLoadIm2col, shared, map, &barrier, coordinates), offsets), mask),             \
              "tma_load_im2col_multicast", file, line);                                                               \
    }

FUSEGRAPH_TMA_IM2COL(FUSEGRAPH_LIST(int c, int w, int n, uint16 offset_w), FUSEGRAPH_LIST(c, w, n),
                     FUSEGRAPH_LIST(offset_w, 0, 0))
FUSEGRAPH_TMA_IM2COL(FUSEGRAPH_LIST(int c, int w, int h, int n, uint16 offset_w, uint16 offset_h),
                     FUSEGRAPH_LIST(c, w, h, n), FUSEGRAPH_LIST(offset_w, offset_h, 0))
FUSEGRAPH_TMA_IM2COL(FUSEGRAPH_LIST(int c, int w, int h, int d, int n, uint16 offset_w, uint16 offset_h,
                                    uint16 offset_d),
                     FUSEGRAPH_LIST(c, w, h, d, n), FUSEGRAPH_LIST(offset_w, offset_h, offset_d))

#undef FUSEGRAPH_TMA_IM2COL
#undef FUSEGRAPH_TMA_TILED
#undef FUSEGRAPH_LIST

inline void bulk_load(void* shared, const void* global, uint32 bytes, Barrier& barrier, FUSEGRAPH_WHERE) {
    using namespace fusegraph_cpu;
    start(Copy{kBulkLoad, shared, nullptr, const_cast<void*>(global), bytes, &barrier, 0, {}, {}, false, 0},
          "bulk_load", file, line);
}

inline void bulk_store(void* global, const void* shared, uint32 bytes, FUSEGRAPH_WHERE) {
    using namespace fusegraph_cpu;
    start(Copy{kBulkStore, const_cast<void*>(shared), nullptr, global, bytes, nullptr, 0, {}, {}, false, 0},
          "bulk_store", file, line);
}

inline void tma_commit() { fusegraph_cpu::current->block->runtime->copy_commit(fusegraph_cpu::current); }

template <int Pending>
inline void tma_wait_read(FUSEGRAPH_WHERE) {
    fusegraph_cpu::current->block->runtime->copy_wait(fusegraph_cpu::current, Pending, false,
                                                      {"tma_wait_read", file, line});
}

template <int Pending>
inline void tma_wait(FUSEGRAPH_WHERE) {
    fusegraph_cpu::current->block->runtime->copy_wait(fusegraph_cpu::current, Pending, true, {"tma_wait", file, line});
}

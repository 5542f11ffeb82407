// What kernels that multiply tiles on tensor cores have in common: rings of stages, the order of tiles, and the way of
// results from the registers of a warp to a tile in shared memory.
#pragma once
#include "async_copy.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "mma.cuh"

// A position in a ring of N stages: the stage, and the parity of the phase that its barriers are in.
template <int N>
struct Ring {
    int index = 0;
    uint32 parity = 0;
    __device__ __forceinline__ void operator++() {
        if (++index == N) {
            index = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void operator+=(int stages) {
        index += stages;
        parity ^= index / N & 1;
        index %= N;
    }
};

// Rounds four floats at `piece` in shared memory to tf32: tensor cores that read them there would cut them off.
__device__ __forceinline__ void round_to_tf32(unsigned char* piece) {
    float* const floats = reinterpret_cast<float*>(piece);
    Vector<float, 4> v = load_shared<4>(floats);
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = bits_float(to_tf32(v[e]));
    store_shared(floats, v);
}

// Arrives at a barrier once all copies (copy_async) that the thread has started have landed.
__device__ __forceinline__ void copy_async_arrive(Barrier& barrier) {
#ifdef FUSEGRAPH_CPU
    copy_async_commit();
    copy_async_wait<0>();
    barrier_arrive(barrier);
#else
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
#endif
}

// What a block works on after the n-th work, where each block has one in every round and every other round is in
// reverse.
__device__ __forceinline__ int back_and_forth(int n) {
    const int blocks = gridDim.x;
    return (n / blocks * 2 + 2) * blocks - 1 - n;
}

struct Tile {
    int row, col, batch;
};

// The n-th of rows x cols tiles a batch.  They come in raster groups of `group` rows of tiles, column after column
// within a group, so that blocks at work at the same time share the tiles of both operands in the L2 cache.
__device__ __forceinline__ Tile tile_at(int n, int rows, int cols, int group) {
    const int batch = n / (rows * cols), within = n % (rows * cols);
    const int first = within / (group * cols) * group;
    const int height = rows - first < group ? rows - first : group;
    const int rest = within - first * cols;
    return {first + rest % height, rest / height, batch};
}

template <int Rows, int Cols, int Group>
__device__ __forceinline__ Tile tile_at(int n) {
    return tile_at(n, Rows, Cols, Group);
}

// Returns where byte `offset` of a tile lies whose rows have `Bytes` bytes, a multiple of 16.  With 32, 64 or 128 bytes
// this is the swizzle of that width: the 16-byte pieces of a row are permuted by the row's number, so that a column is
// spread over all banks.  With other lengths, the pieces of every 128 bytes are permuted by the number of these.
template <int Bytes>
__device__ __forceinline__ int swizzle(int offset) {
    if (Bytes == 256) return offset ^ ((offset >> 4) & 112);  // a row has all banks twice
    if (Bytes > 128 || (Bytes & (Bytes - 1))) return offset ^ ((offset >> 3) & 112);
    return Bytes == 16 ? offset : offset ^ ((offset >> 3) & (Bytes - 16));
}

// Four pairs of 16-bit elements as the words that store_matrices takes.
template <class T>
union FragmentWords {
    Vector<T, 2> pairs[4];
    uint32 words[4];
    __device__ __forceinline__ FragmentWords(const Vector<T, 2> (&v)[4]) {
#pragma unroll
        for (int f = 0; f < 4; ++f) pairs[f] = v[f];
    }
};

// Writes 16 x 16 results of a warp to a swizzled tile from (row, column) on.  A thread's results are four pairs of
// neighbours along a row: v[0] in row lane / 4 and column lane % 4 * 2, v[1] eight rows below, v[2] and v[3] eight
// columns to the right of these, as mma and wgmma leave them.
template <int Columns, class T>
__device__ __forceinline__ void store_fragments(T* tile, int row, int column, const Vector<T, 2> (&v)[4]) {
    constexpr int bytes = Columns * sizeof(T);
    const int lane = threadIdx.x % 32;
    unsigned char* const base = reinterpret_cast<unsigned char*>(tile);
#if defined(FUSEGRAPH_CPU) || __CUDA_ARCH__ >= 900
    if (sizeof(T) == 2) {
        const int offset = (row + lane % 16) * bytes + (column + lane / 16 * 8) * int(sizeof(T));
        const FragmentWords<T> registers(v);
        store_matrices(base + swizzle<bytes>(offset), registers.words);
        return;
    }
#endif
#pragma unroll
    for (int f = 0; f < 4; ++f) {
        const int offset = (row + lane / 4 + f % 2 * 8) * bytes + (column + lane % 4 * 2 + f / 2 * 8) * int(sizeof(T));
        *reinterpret_cast<Vector<T, 2>*>(base + swizzle<bytes>(offset)) = v[f];
    }
}

// The same with the tile turned: Rows results of a column are neighbours, rows of the tile are columns of the results.
// The four pairs are words, of 16-bit elements.
template <int Rows>
__device__ __forceinline__ void store_words_turned(void* tile, int row, int column, const uint32 (&words)[4]) {
    constexpr int bytes = Rows * 2;
    const int lane = threadIdx.x % 32;
    const int part = lane / 8;  // the fragment whose rows the lane's address is one of
    const int offset = (part / 2 * 8 + lane % 8) * bytes + (row + part % 2 * 8) * 2;
    store_matrices_transposed(static_cast<unsigned char*>(tile) + column * bytes + swizzle<bytes>(offset), words);
}

template <int Rows, class T>
__device__ __forceinline__ void store_fragments_turned(T* tile, int row, int column, const Vector<T, 2> (&v)[4]) {
    constexpr int bytes = Rows * sizeof(T);
    const int lane = threadIdx.x % 32;
    unsigned char* const base = reinterpret_cast<unsigned char*>(tile);
#if defined(FUSEGRAPH_CPU) || __CUDA_ARCH__ >= 900
    if (sizeof(T) == 2) {
        const FragmentWords<T> registers(v);
        return store_words_turned<Rows>(base, row, column, registers.words);
    }
#endif
#pragma unroll
    for (int f = 0; f < 4; ++f) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int offset = (column + lane % 4 * 2 + f / 2 * 8 + e) * bytes +
                               (row + lane / 4 + f % 2 * 8) * int(sizeof(T));
            *reinterpret_cast<T*>(base + swizzle<bytes>(offset)) = v[f][e];
        }
    }
}

// Writes N neighbours of a row of a swizzled tile from a column on, which is a multiple of N.
template <int Columns, class T, int N>
__device__ __forceinline__ void store_row(T* tile, int row, int column, const Vector<T, N>& v) {
    constexpr int bytes = Columns * sizeof(T);
    unsigned char* const base = reinterpret_cast<unsigned char*>(tile);
    store_shared(reinterpret_cast<T*>(base + swizzle<bytes>(row * bytes + column * int(sizeof(T)))), v);
}

// N results from (row, column) of such a tile; N divides the column, and is at most 16 bytes.
template <int N, int Columns, class T>
__device__ __forceinline__ Vector<T, N> load_results(const T* tile, int row, int column) {
    constexpr int bytes = Columns * sizeof(T);
    const unsigned char* const base = reinterpret_cast<const unsigned char*>(tile);
    return *reinterpret_cast<const Vector<T, N>*>(base + swizzle<bytes>(row * bytes + column * int(sizeof(T))));
}

// The same of N neighbours in memory that an asynchronous copy brings.
template <int N, int Columns, class T>
__device__ __forceinline__ void copy_row(T* tile, int row, int column, const T* from) {
    constexpr int bytes = Columns * sizeof(T);
    unsigned char* const base = reinterpret_cast<unsigned char*>(tile);
    copy_async<N * int(sizeof(T))>(base + swizzle<bytes>(row * bytes + column * int(sizeof(T))), from);
}

// A thread's pair of neighbours along a row of such a tile turned: Rows results of a column are neighbours.
template <int Rows, class T>
__device__ __forceinline__ Vector<T, 2> load_pair_turned(const T* tile, int row, int column) {
    return {{load_results<1, Rows>(tile, column, row)[0], load_results<1, Rows>(tile, column + 1, row)[0]}};
}

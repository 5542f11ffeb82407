// Reductions across the lanes of a warp and the threads of a block.  Every thread gets the result; the order is fixed, so
// the same inputs give the same bits.
#pragma once
#include "math.cuh"

namespace reduce {

struct Add {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
    static __device__ __forceinline__ double of(double a, double b) { return a + b; }
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return math::wrapping_add(a, b); }
};
struct Mul {
    static __device__ __forceinline__ float of(float a, float b) { return a * b; }
    static __device__ __forceinline__ double of(double a, double b) { return a * b; }
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return math::wrapping_mul(a, b); }
};
struct Max {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return math::maximum(a, b); }
};
struct Min {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return math::minimum(a, b); }
};

// Over Lanes neighbouring lanes, a power of two up to 32.  All lanes of the warp take part.
template <class Op, int Lanes, class T>
__device__ __forceinline__ T lanes(T value) {
#pragma unroll
    for (int distance = Lanes / 2; distance > 0; distance /= 2)
        value = Op::of(value, T(__shfl_xor_sync(0xffffffffu, value, distance)));
    return value;
}

// Over all threads of a block of Warps warps, a power of two up to 32.  parts: Warps elements of shared memory for this
// reduction alone, so that one barrier is enough.
template <class Op, int Warps, class T>
__device__ __forceinline__ T block(T value, T* parts) {
    value = lanes<Op, 32>(value);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    return lanes<Op, Warps>(parts[threadIdx.x % Warps]);
}

// Over the Lanes threads that are Side apart: thread lane * Side + i has parts of V rows, and gets their totals in place.
// Side and Lanes are powers of two, Lanes * Side is 32 or more.  parts: V * Side elements of shared memory for every warp,
// or for every Side threads if those are more; one array may serve several reductions.
template <class Op, int Side, int Lanes, int V, class T>
__device__ __forceinline__ void across(T (&part)[V], T* parts) {
    constexpr int group = Side < 32 ? 32 : Side, groups = Side * Lanes / group, size = Side * V;
#pragma unroll
    for (int distance = 16; distance >= Side; distance /= 2)
#pragma unroll
        for (int e = 0; e < V; ++e) part[e] = Op::of(part[e], T(__shfl_xor_sync(0xffffffffu, part[e], distance)));
    if (groups == 1) return;
    const int mine = threadIdx.x % Side;
    __syncthreads();
    if (threadIdx.x % group < Side)
#pragma unroll
        for (int e = 0; e < V; ++e) parts[threadIdx.x / group * size + e * Side + mine] = part[e];
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += Side * Lanes) {
        T total = parts[i];
#pragma unroll
        for (int g = 1; g < groups; ++g) total = Op::of(total, parts[g * size + i]);
        parts[i] = total;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < V; ++e) part[e] = parts[e * Side + mine];
}

}  // namespace reduce

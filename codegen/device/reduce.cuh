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

// Over the Parts threads that are Rows apart: thread part * Rows + row has a part of the row.  parts: Rows * Parts
// elements of shared memory for this reduction alone.
template <class Op, int Rows, int Parts, class T>
__device__ __forceinline__ T across(T value, T* parts) {
    parts[threadIdx.x] = value;
#pragma unroll
    for (int half = Parts / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half * Rows)
            parts[threadIdx.x] = Op::of(parts[threadIdx.x], parts[threadIdx.x + half * Rows]);
    }
    __syncthreads();
    return parts[threadIdx.x % Rows];
}

}  // namespace reduce

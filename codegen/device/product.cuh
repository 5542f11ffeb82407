// Sums of products, rounded once a product on a GPU, whatever compilers are told of multiply-adds elsewhere.
#pragma once
#include "types.cuh"

// Returns sum + a * b.
template <class T>
__device__ __forceinline__ T multiply_add(T a, T b, T sum) { return sum + a * b; }
#ifndef FUSEGRAPH_CPU
__device__ __forceinline__ float multiply_add(float a, float b, float sum) { return __fmaf_rn(a, b, sum); }
__device__ __forceinline__ double multiply_add(double a, double b, double sum) { return __fma_rn(a, b, sum); }
#endif

// Winograd's minimal filtering of 3-tap filters (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks",
// 2016): M neighbouring results y of a filter g over N = M + 2 elements d are  A^T [(G g) * (B^T d)]  with N products
// instead of 3 M; of M x M results the matrices are applied to columns and rows.
//
// M = 2: points 0, 1, -1, infinity.
// M = 4: points 0, +-3/4, +-3/2, infinity, whose errors are a third of those of 0, +-1, +-2 (Barabasz, Anderson,
// Soodhalter and Gregg, "Error Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks",
// 2020).
//
// No result is rounded more than 5 times for each dimension; all coefficients but those of filters for M = 4 are exact.
#pragma once
#include "types.cuh"

namespace winograd {

// B^T d
template <class T>
__device__ __forceinline__ void input_line(const T (&d)[4], T (&v)[4]) {
    v[0] = d[0] - d[2];
    v[1] = d[1] + d[2];
    v[2] = d[2] - d[1];
    v[3] = d[3] - d[1];
}

template <class T>
__device__ __forceinline__ void input_line(const T (&d)[6], T (&v)[6]) {
    const T a = T(0.75), b = T(1.5), aa = a * a, bb = b * b;
    v[0] = d[4] - (aa + bb) * d[2] + aa * bb * d[0];
    const T even_a = d[4] - bb * d[2], odd_a = a * (d[3] - bb * d[1]);
    v[1] = even_a + odd_a;
    v[2] = even_a - odd_a;
    const T even_b = d[4] - aa * d[2], odd_b = b * (d[3] - aa * d[1]);
    v[3] = even_b + odd_b;
    v[4] = even_b - odd_b;
    v[5] = d[5] - (aa + bb) * d[3] + aa * bb * d[1];
}

// G g
template <class T>
__device__ __forceinline__ void filter_line(const T (&g)[3], T (&u)[4]) {
    const T even = g[0] + g[2];
    u[0] = g[0];
    u[1] = T(0.5) * (even + g[1]);
    u[2] = T(0.5) * (even - g[1]);
    u[3] = g[2];
}

template <class T>
__device__ __forceinline__ void filter_line(const T (&g)[3], T (&u)[6]) {
    const T a = T(0.75), b = T(1.5), aa = a * a, bb = b * b;
    const T even_a = g[0] + aa * g[2], odd_a = a * g[1];
    const T even_b = g[0] + bb * g[2], odd_b = b * g[1];
    u[0] = T(64.0 / 81.0) * g[0];
    u[1] = T(-128.0 / 243.0) * (even_a + odd_a);
    u[2] = T(-128.0 / 243.0) * (even_a - odd_a);
    u[3] = T(32.0 / 243.0) * (even_b + odd_b);
    u[4] = T(32.0 / 243.0) * (even_b - odd_b);
    u[5] = g[2];
}

// A^T m
template <class T>
__device__ __forceinline__ void output_line(const T (&m)[4], T (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] + m[3];
}

template <class T>
__device__ __forceinline__ void output_line(const T (&m)[6], T (&y)[4]) {
    const T a = T(0.75), b = T(1.5), aa = a * a, bb = b * b;
    const T even_a = m[1] + m[2], odd_a = a * (m[1] - m[2]);
    const T even_b = m[3] + m[4], odd_b = b * (m[3] - m[4]);
    y[0] = m[0] + even_a + even_b;
    y[1] = odd_a + odd_b;
    y[2] = aa * even_a + bb * even_b;
    y[3] = aa * odd_a + bb * odd_b + m[5];
}

// A transform of the columns of a patch, then of the rows of what that gives.
template <class T, int N, int R, class Transform>
__device__ __forceinline__ void both(const T (&from)[N][N], T (&to)[R][R], Transform transform) {
    T half[R][N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
        T column[N], result[R];
#pragma unroll
        for (int i = 0; i < N; ++i) column[i] = from[i][j];
        transform(column, result);
#pragma unroll
        for (int i = 0; i < R; ++i) half[i][j] = result[i];
    }
#pragma unroll
    for (int i = 0; i < R; ++i) transform(half[i], to[i]);
}

template <class T, int N>
__device__ __forceinline__ void input(const T (&d)[N][N], T (&v)[N][N]) {
    both(d, v, [](const T (&x)[N], T (&y)[N]) { input_line(x, y); });
}

template <class T, int N>
__device__ __forceinline__ void filter(const T (&g)[3][3], T (&u)[N][N]) {
    both(g, u, [](const T (&x)[3], T (&y)[N]) { filter_line(x, y); });
}

template <class T, int N>
__device__ __forceinline__ void output(const T (&m)[N][N], T (&y)[N - 2][N - 2]) {
    both(m, y, [](const T (&x)[N], T (&z)[N - 2]) { output_line(x, z); });
}

}  // namespace winograd

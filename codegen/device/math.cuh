// Scalar functions of the pointwise ops, for float and double, and integers where the op takes them.
//
// NaN in gives NaN out unless a comparison is documented to decide.  At infinity a function gives what its formula gives in
// IEEE arithmetic (swish(-infinity) is -infinity * 0, NaN), though no function overflows on the way to a finite result.
// With APPROXIMATE_MATH defined, some float versions are shorter (math_approximate.cuh).
#pragma once
#include "integer.cuh"
#include "types.cuh"

#ifdef FUSEGRAPH_CPU
#define C_LIBRARY(function) __builtin_##function
#else
#define C_LIBRARY(function) ::function
#endif
#define UNARY_MATH(name, function)                                                                  \
  __device__ __forceinline__ float name(float x) { return C_LIBRARY(function##f)(x); }              \
  __device__ __forceinline__ double name(double x) { return C_LIBRARY(function)(x); }
#define BINARY_MATH(name, function)                                                                 \
  __device__ __forceinline__ float name(float a, float b) { return C_LIBRARY(function##f)(a, b); }  \
  __device__ __forceinline__ double name(double a, double b) { return C_LIBRARY(function)(a, b); }

namespace math {

// ---- the C library's functions

UNARY_MATH(abs, fabs)
UNARY_MATH(ceil, ceil)
UNARY_MATH(cos, cos)
UNARY_MATH(erf, erf)
UNARY_MATH(erfc, erfc)
UNARY_MATH(exp2, exp2)
UNARY_MATH(expm1, expm1)
UNARY_MATH(floor, floor)
UNARY_MATH(log, log)
UNARY_MATH(log1p, log1p)
UNARY_MATH(log2, log2)
UNARY_MATH(round, rint)  // halfway cases to even
UNARY_MATH(sin, sin)
UNARY_MATH(tan, tan)
UNARY_MATH(tanh, tanh)
BINARY_MATH(fmod, fmod)
BINARY_MATH(pow, pow)

__device__ __forceinline__ float fma(float a, float b, float c) { return C_LIBRARY(fmaf)(a, b, c); }
__device__ __forceinline__ double fma(double a, double b, double c) { return C_LIBRARY(fma)(a, b, c); }
__device__ __forceinline__ double exp(double x) { return C_LIBRARY(exp)(x); }
__device__ __forceinline__ double sqrt(double x) { return C_LIBRARY(sqrt)(x); }
__device__ __forceinline__ double reciprocal(double x) { return 1 / x; }
__device__ __forceinline__ double divide(double a, double b) { return a / b; }
#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ float rsqrt(float x) { return float(1 / __builtin_sqrt(double(x))); }
__device__ __forceinline__ double rsqrt(double x) { return 1 / __builtin_sqrt(x); }
#else
__device__ __forceinline__ float rsqrt(float x) { return ::rsqrtf(x); }
__device__ __forceinline__ double rsqrt(double x) { return ::rsqrt(x); }
#endif

// ---- comparisons

// The larger (smaller) number, NaN where either is NaN; -0 is smaller than +0.
#ifdef FUSEGRAPH_CPU
#define MAXIMUM_AND_MINIMUM(T)                               \
  __device__ __forceinline__ T maximum(T a, T b) {           \
    if (a == b) return __builtin_signbit(a) ? b : a;         \
    return a > b ? a : b > a ? b : a + b;                    \
  }                                                          \
  __device__ __forceinline__ T minimum(T a, T b) {           \
    if (a == b) return __builtin_signbit(a) ? a : b;         \
    return a < b ? a : b < a ? b : a + b;                    \
  }
MAXIMUM_AND_MINIMUM(float)
MAXIMUM_AND_MINIMUM(double)
#undef MAXIMUM_AND_MINIMUM
#else
__device__ __forceinline__ float maximum(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float minimum(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// PTX's min and max know the sign of zero, but no .NaN for doubles.
__device__ __forceinline__ double maximum(double a, double b) { return a != a || b != b ? a + b : ::fmax(a, b); }
__device__ __forceinline__ double minimum(double a, double b) { return a != a || b != b ? a + b : ::fmin(a, b); }
#endif
template <class T>
__device__ __forceinline__ T clamp(T x, T low, T high) {
  return x < low ? low : x > high ? high : x;
}
template <class T>
__device__ __forceinline__ T sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;
}
__device__ __forceinline__ uint8 sign(uint8 x) { return uint8(x != 0); }

// ---- sigmoid and its relatives

#ifndef APPROXIMATE_MATH
__device__ __forceinline__ float exp(float x) { return C_LIBRARY(expf)(x); }
__device__ __forceinline__ float sqrt(float x) { return C_LIBRARY(sqrtf)(x); }
__device__ __forceinline__ float reciprocal(float x) { return 1 / x; }
__device__ __forceinline__ float divide(float a, float b) { return a / b; }
#else
}  // namespace math
#include "math_approximate.cuh"
namespace math {
#endif

// log(1 + exp(x)) for x <= 0
template <class T>
__device__ __forceinline__ T log1p_exp(T x) {
  return log1p(exp(x));
}
// 1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow.
template <class T>
__device__ __forceinline__ T sigmoid(T x) {
  const T e = exp(-abs(x));
  return divide(x < 0 ? e : T(1), 1 + e);
}
// The derivative of sigmoid, sigmoid(x) * sigmoid(-x).
template <class T>
__device__ __forceinline__ T sigmoid_slope(T x) {
  const T e = exp(-abs(x));
  return divide(e, (1 + e) * (1 + e));
}
template <class T>
__device__ __forceinline__ T sigmoid_backward(T loss, T x) {
  return loss * sigmoid_slope(x);
}
// 1 - tanh(x)^2
template <class T>
__device__ __forceinline__ T tanh_backward(T loss, T x) {
  return loss * (4 * sigmoid_slope(2 * x));
}
// x * sigmoid(beta * x)
template <class T>
__device__ __forceinline__ T swish(T x, T beta = 1) {
  return x * sigmoid(beta * x);
}
template <class T>
__device__ __forceinline__ T swish_backward(T loss, T x, T beta = 1) {
  return loss * (sigmoid(beta * x) + beta * (x * sigmoid_slope(beta * x)));
}
// log(1 + exp(beta * x)) / beta = max(x, 0) + log(1 + exp(-beta * |x|)) / beta
template <class T>
__device__ __forceinline__ T softplus(T x, T beta = 1) {
  return maximum(x, T(0)) + divide(log1p_exp(-beta * abs(x)), beta);
}
template <class T>
__device__ __forceinline__ T softplus_backward(T loss, T x, T beta = 1) {
  return loss * sigmoid(beta * x);
}
// x * tanh(softplus(x)); with w = exp(x), tanh(log(1 + w)) is w (w + 2) / (w (w + 2) + 2), which is 1 well before x = 40.
template <class T>
__device__ __forceinline__ T mish(T x) {
  const T w = exp(minimum(x, T(40))), n = w * (w + 2);
  return x * divide(n, n + 2);
}

// ---- GELU

// What rounding sqrt(1/2) to the argument's type leaves out.
__device__ __forceinline__ float sqrt_half_rest(float) { return 1.2101617e-8f; }
__device__ __forceinline__ double sqrt_half_rest(double) { return -4.8336466567264567e-17; }

// Distribution function of the normal distribution, erfc(z) / 2 with z = -x / sqrt(2).  erfc falls so steeply that the
// rounding error r of z would show: d/dz log(erfc(z)) is about -2z for z > 0.
template <class T>
__device__ __forceinline__ T normal_cdf(T x) {
  const T sqrt_half = T(0.70710678118654752), z = -x * sqrt_half;
  const T r = fma(-x, sqrt_half, -z) - x * sqrt_half_rest(x);
  const T p = T(0.5) * erfc(z);
  return z > 0 && z < 30 ? fma(p, -2 * z * r, p) : p;
}
template <class T>
__device__ __forceinline__ T normal_density(T x) {
  return T(0.3989422804014327) * exp(T(-0.5) * x * x);
}
template <class T>
__device__ __forceinline__ T gelu(T x) {
  return x * normal_cdf(x);
}
template <class T>
__device__ __forceinline__ T gelu_backward(T loss, T x) {
  return loss * (normal_cdf(x) + x * normal_density(x));
}
// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), by (1 + tanh(u)) / 2 = sigmoid(2u)
template <class T>
__device__ __forceinline__ T gelu_approx_tanh(T x) {
  return x * sigmoid(x * fma(T(0.07135481627260025), x * x, T(1.5957691216057308)));
}
template <class T>
__device__ __forceinline__ T gelu_approx_tanh_backward(T loss, T x) {
  const T square = minimum(x * x, T(1e4));  // beyond it sigmoid_slope is 0, and 0 * infinity would be NaN
  const T u = x * fma(T(0.07135481627260025), square, T(1.5957691216057308));
  const T slope = fma(T(0.21406444881780075), square, T(1.5957691216057308));
  return loss * (sigmoid(u) + x * sigmoid_slope(u) * slope);
}

// ---- piecewise activations

template <class T>
__device__ __forceinline__ T relu(T x) {
  return maximum(x, T(0));
}
template <class T>
__device__ __forceinline__ T leaky_relu(T x, T slope, T corner = 0) {
  return x > corner ? x : corner + slope * (x - corner);
}
template <class T>
__device__ __forceinline__ T relu_backward(T loss, T x, T corner = 0) {
  return x > corner ? loss : T(0);
}
template <class T>
__device__ __forceinline__ T leaky_relu_backward(T loss, T x, T slope, T corner = 0) {
  return x > corner ? loss : slope * loss;
}
template <class T>
__device__ __forceinline__ T elu(T x, T alpha) {
  return x > 0 ? x : alpha * expm1(x);
}
template <class T>
__device__ __forceinline__ T elu_backward(T loss, T x, T alpha) {
  return x > 0 ? loss : loss * (alpha * exp(x));
}
template <class T>
__device__ __forceinline__ T hardsigmoid(T x) {
  return clamp(x + 3, T(0), T(6)) * T(1.0 / 6.0);
}
template <class T>
__device__ __forceinline__ T hardswish(T x) {
  return x * hardsigmoid(x);
}

}  // namespace math

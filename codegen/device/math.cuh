// Scalar functions of the pointwise ops, for float and double, and integers where the op takes them.
//
// NaN in gives NaN out unless a comparison is documented to decide.  At infinity a function gives what its formula
// gives in IEEE arithmetic (swish(-infinity) is -infinity * 0, NaN), though no function overflows on the way to a
// finite result.
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
UNARY_MATH(acos, acos)
UNARY_MATH(acosh, acosh)
UNARY_MATH(asin, asin)
UNARY_MATH(asinh, asinh)
UNARY_MATH(atan, atan)
UNARY_MATH(atanh, atanh)
UNARY_MATH(ceil, ceil)
UNARY_MATH(cos, cos)
UNARY_MATH(cosh, cosh)
UNARY_MATH(exp2, exp2)
UNARY_MATH(floor, floor)
UNARY_MATH(log, log)
UNARY_MATH(log1p, log1p)
UNARY_MATH(log2, log2)
UNARY_MATH(round, rint)  // halfway cases to even
UNARY_MATH(sin, sin)
UNARY_MATH(sinh, sinh)
UNARY_MATH(tan, tan)
UNARY_MATH(trunc, trunc)
BINARY_MATH(fmod, fmod)
BINARY_MATH(pow, pow)

__device__ __forceinline__ float fma(float a, float b, float c) { return C_LIBRARY(fmaf)(a, b, c); }
__device__ __forceinline__ double fma(double a, double b, double c) { return C_LIBRARY(fma)(a, b, c); }
__device__ __forceinline__ float copysign(float x, float y) { return C_LIBRARY(copysignf)(x, y); }
__device__ __forceinline__ double erf(double x) { return C_LIBRARY(erf)(x); }
__device__ __forceinline__ double erfc(double x) { return C_LIBRARY(erfc)(x); }
__device__ __forceinline__ double exp(double x) { return C_LIBRARY(exp)(x); }
__device__ __forceinline__ double expm1(double x) { return C_LIBRARY(expm1)(x); }
__device__ __forceinline__ double tanh(double x) { return C_LIBRARY(tanh)(x); }
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
__device__ __forceinline__ uint16 sign(uint16 x) { return uint16(x != 0); }
__device__ __forceinline__ uint32 sign(uint32 x) { return uint32(x != 0); }
__device__ __forceinline__ uint64 sign(uint64 x) { return uint64(x != 0); }

// ---- approximate instructions

// Results below 2^-126 are 0.  On the CPU the two are rounded correctly, but flush as on a GPU.
#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ float flushed(float y) { return y < 0x1p-126f ? 0.0f : y; }
__device__ __forceinline__ float fast_exp2(float x) { return flushed(__builtin_exp2f(x)); }
__device__ __forceinline__ float fast_reciprocal(float x) { return flushed(1 / x); }
#else
// 2^x, 2 ulps
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x for x >= 1, 1 ulp
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
__device__ __forceinline__ double fast_reciprocal(double x) { return 1 / x; }

// a < b ? yes : no, with both computed: a compiler may make a branch of the operator, and half a warp would wait.
#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ float select_less(float a, float b, float yes, float no) { return a < b ? yes : no; }
#else
__device__ __forceinline__ float select_less(float a, float b, float yes, float no) {
  float y;
  asm("{ .reg .pred less; setp.lt.f32 less, %1, %2; selp.f32 %0, %3, %4, less; }"
      : "=f"(y) : "f"(a), "f"(b), "f"(yes), "f"(no));
  return y;
}
#endif
__device__ __forceinline__ double select_less(double a, double b, double yes, double no) { return a < b ? yes : no; }

// ---- float functions without branches: the same steps on a GPU and on a CPU
//
// Largest errors in ulps, measured with correctly rounded instructions over each float from 2^-13 to 110 and every 61st
// elsewhere (and with instructions as inexact as PTX allows, over every 61st float): erf 1.5 (2.5), tanh 1.8 (3.3),
// expm1_negative 1 (1), sigmoid 2.9 (7.4), swish 3.5 (8.2), softplus 3.2 (7.8), mish 4.8 (9), gelu 5.3 (10.1).
// Polynomials and quotients are fitted to the least maximum of the relative error, their coefficients rounded one after
// another and the rest fitted again.

// The value of a polynomial of x, whose coefficients are given from that of the highest power on.
__device__ __forceinline__ float polynomial(float, float last) { return last; }
template <class... Rest>
__device__ __forceinline__ float polynomial(float x, float first, float second, Rest... rest) {
  return polynomial(x, fma(first, x, second), rest...);
}

#ifdef APPROXIMATE_MATH
}  // namespace math
#include "math_approximate.cuh"
namespace math {
#else
__device__ __forceinline__ float exp(float x) { return C_LIBRARY(expf)(x); }
__device__ __forceinline__ float expm1(float x) { return C_LIBRARY(expm1f)(x); }
__device__ __forceinline__ float sqrt(float x) { return C_LIBRARY(sqrtf)(x); }
__device__ __forceinline__ float reciprocal(float x) { return 1 / x; }
__device__ __forceinline__ float divide(float a, float b) { return a / b; }

// exp(x) - 1 for x <= 0.  With x = n log(2) + f, n an integer, it is 2^n (exp(f) - 1) + (2^n - 1).  Adding 1.5 * 2^23
// rounds to an integer and leaves it in the lowest bits.
__device__ __forceinline__ float expm1_negative(float x) {
  const float low = maximum(x, -32.0f);  // where the result is -1
  const float shifted = fma(low, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;
  const float f = fma(n, 1.90465421e-9f, fma(n, -0.693147182f, low));
  float p = polynomial(f, 0.00138825225f, 0.00836651959f, 0.0416672006f, 0.166665435f, 0.49999997f);
  p = fma(f * f, p, f);
  const float power = bits_float((float_bits(shifted) << 23) + 0x3f800000u);
  return copysign(fma(p, power, power - 1), x);
}
// log(1 + exp(x)) for x <= 0: with e = exp(x), twice the series of artanh(e / (2 + e)).
__device__ __forceinline__ float log1p_exp(float x) {
  const float e = exp(x), s = e * fast_reciprocal(2 + e), square = s * s;
  const float p = polynomial(square, 0.28011945f, 0.280018151f, 0.400215268f, 0.666664183f);
  return fma(s * square, p, 2 * s);
}
// A polynomial near 0, 1 - 2 / (1 + exp(2 |x|)) elsewhere.
__device__ __forceinline__ float tanh(float x) {
  const float square = x * x;
  const float p = polynomial(square, 0.0164376106f, -0.0526718311f, 0.133207247f, -0.333329469f);
  const float near_zero = fma(x * square, p, x);
  const float r = fast_reciprocal(1 + fast_exp2(2.88539008f * abs(x)));
  return copysign(select_less(abs(x), 0.55f, near_zero, fma(-2.0f, r, 1.0f)), x);  // -0 too
}
// A polynomial near 0, elsewhere 1 - erfc(|x|), whose logarithm is a polynomial.
__device__ __forceinline__ float erf(float x) {
  const float square = x * x;
  const float p = polynomial(square, 0.00461861119f, -0.02670892f, 0.11282102f, -0.376125753f, 0.128379166f);
  const float near_zero = fma(x, p, x);
  const float a = minimum(abs(x), 4.0f);  // where the result is 1
  const float q = polynomial(a, 3.22234497e-4f, -4.75307321e-3f, 3.34122106e-2f, -0.152530298f, -0.916532755f,
                             -1.62838554f, 5.05422177e-5f);
  return select_less(abs(x), 0.55f, near_zero, copysign(1 - fast_exp2(q), x));
}
#endif
__device__ __forceinline__ double expm1_negative(double x) { return expm1(x); }
__device__ __forceinline__ double log1p_exp(double x) { return log1p(exp(x)); }

// ---- sigmoid and its relatives

// 1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow.
template <class T>
__device__ __forceinline__ T sigmoid(T x) {
  const T e = exp(-abs(x)), r = fast_reciprocal(1 + e);
  return x < 0 ? e * r : r;
}
// The derivative of sigmoid, sigmoid(x) * sigmoid(-x).
template <class T>
__device__ __forceinline__ T sigmoid_slope(T x) {
  const T e = exp(-abs(x)), r = fast_reciprocal(1 + e);
  return e * r * r;
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
  const T u = beta * x, e = exp(-abs(u)), r = fast_reciprocal(1 + e);
  return loss * ((u < 0 ? e * r : r) + beta * (x * (e * r * r)));
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
// x * tanh(softplus(x)); with w = exp(x), tanh(log(1 + w)) is w (w + 2) / (w (w + 2) + 2), which is 1 before x = 40.
template <class T>
__device__ __forceinline__ T mish(T x) {
  const T w = exp(minimum(x, T(40))), n = w * (w + 2);
  return x * (n * fast_reciprocal(n + 2));
}

// ---- GELU

// exp(-x^2 / 2)
__device__ __forceinline__ double gaussian(double x) { return exp(-0.5 * x * x); }
// Distribution function of the normal distribution, erfc(z) / 2 with z = -x / sqrt(2).  erfc falls so steeply that the
// rounding error r of z would show: d/dz log(erfc(z)) is about -2z for z > 0.
__device__ __forceinline__ double normal_cdf(double x) {
  const double sqrt_half = 0.70710678118654752, z = -x * sqrt_half;
  const double r = fma(-x, sqrt_half, -z) + x * 4.8336466567264567e-17;
  const double p = 0.5 * erfc(z);
  return z > 0 && z < 30 ? fma(p, -2 * z * r, p) : p;
}
#ifndef APPROXIMATE_MATH
// exp(-x^2 / 2), as 2^(scale * x^2).  The exponent is large, so what rounding it leaves out is made good.
__device__ __forceinline__ float gaussian(float x) {
  const float a = C_LIBRARY(fminf)(abs(x), 15.0f);  // where the result is 0
  const float scale = -0.72134752f, half = scale * a, exponent = half * a;
  const float rest = fma(fma(a, scale, -half), a, fma(half, a, -exponent));
  const float power = exp2(exponent);
  return fma(power, 0.693147182f * rest, power);
}
// Distribution function of the normal distribution.  For a = |x|, normal_cdf(-a) / gaussian(a) is
// 1 / (sqrt(2 pi) a + n / m) with polynomials n and m, fitted for a <= 14 with an error of 2^-26.7; the fit makes good
// that `scale` is rounded.  Far out n is small beside the other term, and the rounding errors of m cancel.
__device__ __forceinline__ float normal_cdf(float x) {
  const float a = C_LIBRARY(fminf)(abs(x), 15.0f);
  const float m = polynomial(a, 8.25080834e-3f, 8.16389769e-2f, 0.367997676f, 0.879396856f, 1.0f);
  const float n = polynomial(a, 7.4073082e-6f, 2.04453375e-2f, 0.208224192f, 0.847934663f, 2.0f);
  const float tail = gaussian(x) * (m * fast_reciprocal(fma(2.50662827f * a, m, n)));
  return x < 0 ? tail : 1 - tail;
}
#endif
template <class T>
__device__ __forceinline__ T gelu(T x) {
  return x * normal_cdf(x);
}
// The second term is the density of the normal distribution times x.
template <class T>
__device__ __forceinline__ T gelu_backward(T loss, T x) {
  const T density = T(0.3989422804014327) * gaussian(x);
  return loss * (normal_cdf(x) + x * density);
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
  const T e = exp(-abs(u)), r = fast_reciprocal(1 + e);
  return loss * ((u < 0 ? e * r : r) + x * (e * r * r) * slope);
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
  return select_less(T(0), x, x, alpha * expm1_negative(x));
}
template <class T>
__device__ __forceinline__ T elu_backward(T loss, T x, T alpha) {
  return select_less(T(0), x, loss, loss * (alpha * exp(x)));
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

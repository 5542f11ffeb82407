// Float functions for kernels that store floats of 16 bits or fewer only: shorter, still more exact than the stores.
//
// u is 2^-24, and no error is above 2^-15 = 512u, an eighth of what rounding to float16 may change and a sixty-fourth
// of what rounding to bfloat16 may; that of tanh.approx, 2^-11, would show.  The bounds are relative and hold for
// results of at least 2^-119; smaller ones may become 0.  NaN and infinity are as in math.cuh.  Rounding x * log2(e)
// makes the error of exp grow with |x|.
#pragma once

namespace math {

#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ float fast_log2(float x) { return __builtin_log2f(x); }
__device__ __forceinline__ float sqrt(float x) { return __builtin_sqrtf(x); }
__device__ __forceinline__ float reciprocal(float x) { return 1 / x; }
__device__ __forceinline__ float divide(float a, float b) { return a / b; }
#else
// log2(x), error 2^-22 absolute in [0.5, 2], relative elsewhere
__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// error 2u
__device__ __forceinline__ float sqrt(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// error 2u
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// error 4u
__device__ __forceinline__ float divide(float a, float b) {
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
#endif

// error (4 + 2 |x|) u
__device__ __forceinline__ float exp(float x) { return fast_exp2(1.44269504f * x); }
// error 160u.  The first terms of the series where the difference would cancel.
__device__ __forceinline__ float expm1(float x) {
  const float near_zero = x * fma(x, fma(x, 0.166666667f, 0.5f), 1.0f);
  return select_less(abs(x), 0.03125f, near_zero, exp(x) - 1);
}
__device__ __forceinline__ float expm1_negative(float x) { return expm1(x); }
// error 80u, as expm1
__device__ __forceinline__ float tanh(float x) {
  const float near_zero = x * fma(x * x, -0.333333333f, 1.0f);
  const float r = fast_reciprocal(1 + fast_exp2(2.88539008f * x));
  return select_less(abs(x), 0.0625f, near_zero, fma(-2.0f, r, 1.0f));
}
// As the exact one with shorter polynomials, error 104u.
__device__ __forceinline__ float erf(float x) {
  const float square = x * x, a = abs(x);
  const float near_zero = x * polynomial(square, 0.105010375f, -0.375537306f, 1.12837255f);
  const float q = polynomial(a, -2.54951091e-3f, 2.74982583e-2f, -0.144563749f, -0.922216177f, -1.62634563f,
                             -2.38204739e-4f);
  return select_less(a, 0.45f, near_zero, copysign(1 - fast_exp2(q), x));
}
// error (8 + 2 |x|) u for x < 0, 8u for x > 0
__device__ __forceinline__ float sigmoid(float x) { return fast_reciprocal(1 + fast_exp2(-1.44269504f * x)); }
// log(1 + exp(x)) for x <= 0, error (192 + 2 |x|) u.  A series where the argument of fast_log2 would be close to 1.
__device__ __forceinline__ float log1p_exp(float x) {
  const float e = exp(x);
  const float series = e * fma(e, fma(e, 0.333333333f, -0.5f), 1.0f);
  return select_less(e, 0.03125f, series, 0.693147182f * fast_log2(1 + e));
}
__device__ __forceinline__ float softplus(float x, float beta = 1) {
  return fma(log1p_exp(-beta * abs(x)), 1 / beta, maximum(x, 0.0f));
}
// exp(-x^2 / 2), error (4 + 2 x^2) u
__device__ __forceinline__ float gaussian(float x) { return fast_exp2(-0.72134752f * x * x); }
// Distribution function of the normal distribution.  For a = |x|, log2(normal_cdf(-a)) is nearly a polynomial: this one
// is fitted for a <= 12.8 and falls from there on.  Error 384u for |x| < 6, 472u beyond, half that of rounding the
// logarithm.
__device__ __forceinline__ float normal_cdf(float x) {
  const float a = abs(x);
  const float q = polynomial(a, -1.94310545e-9f, 1.41208446e-7f, -4.51765982e-6f, 8.42224399e-5f, -1.02444156e-3f,
                             8.67896806e-3f, -5.39782979e-2f, -0.458774298f, -1.15098453f, -1.0000304f);
  const float tail = fast_exp2(q);
  return x < 0 ? tail : 1 - tail;
}
// As in math.cuh, with log2(e) in the coefficients of the polynomial.
__device__ __forceinline__ float gelu_approx_tanh(float x) {
  return x * fast_reciprocal(1 + fast_exp2(x * fma(-0.102943239f, x * x, -2.3022082f)));
}

}  // namespace math

// Float functions for kernels that store floats of 16 bits or fewer only: shorter, still far more exact than the stores.
//
// u is 2^-24.  The bounds are relative and hold for results of at least 2^-126; smaller ones become 0 on a GPU.  NaN and
// infinity are as in math.cuh.  Rounding x * log2(e) makes the error of exp grow with |x|.
#pragma once

namespace math {

#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ float fast_exp2(float x) { return __builtin_exp2f(x); }
__device__ __forceinline__ float fast_log2(float x) { return __builtin_log2f(x); }
__device__ __forceinline__ float fast_reciprocal(float x) { return 1 / x; }
__device__ __forceinline__ float sqrt(float x) { return __builtin_sqrtf(x); }
__device__ __forceinline__ float reciprocal(float x) { return 1 / x; }
__device__ __forceinline__ float divide(float a, float b) { return a / b; }
#else
// 2^x, error 2u
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(x), error 2^-22 absolute in [0.5, 2], relative elsewhere
__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x for 1 <= |x| < 2^126, error 2u
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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
__device__ __forceinline__ float exp(float x) { return fast_exp2(1.4426950408889634f * x); }
// error (8 + 2 |x|) u for x < 0, 8u for x > 0
__device__ __forceinline__ float sigmoid(float x) { return fast_reciprocal(1 + exp(-x)); }
// error (12 + 2 |x|) u
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float e = exp(-abs(x)), r = fast_reciprocal(1 + e);
  return e * r * r;
}
// log(1 + exp(x)) for x <= 0, error (128 + 2 |x|) u.  A series where the argument of fast_log2 would be close to 1.
__device__ __forceinline__ float log1p_exp(float x) {
  const float e = exp(x);
  const float series = e * fma(e, fma(e, fma(e, -0.25f, 0.33333333f), -0.5f), 1.0f);
  return e < 0.0625f ? series : 0.69314718f * fast_log2(1 + e);
}
// Distribution function of the normal distribution.  For a = |x|, exp(a^2 / 2) * normal_cdf(-a) is t * P(t) with
// t = 1 / (1 + 0.305 a); P is the least-maximum fit of degree 7 for a <= 14.2, 1.6u off.  Error (16 + 2 x^2) u for x < 0.
__device__ __forceinline__ float normal_cdf(float x) {
  const float t = fast_reciprocal(fma(0.305f, abs(x), 1.0f));
  float p = 0.036710875f;
  p = fma(p, t, -0.15303916f);
  p = fma(p, t, 0.1858089f);
  p = fma(p, t, -0.03806601f);
  p = fma(p, t, 0.12107154f);
  p = fma(p, t, 0.10340485f);
  p = fma(p, t, 0.12246954f);
  p = fma(p, t, 0.12163954f);
  const float tail = exp(-0.5f * x * x) * (t * p);
  return x < 0 ? tail : 1 - tail;
}

}  // namespace math

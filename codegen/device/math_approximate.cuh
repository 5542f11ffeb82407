// Float functions for kernels that store floats of 16 bits or fewer only: shorter, still far more exact than the stores.
//
// u is 2^-24.  The bounds are relative and hold for results of at least 2^-126; smaller ones become 0.  NaN and infinity
// are as in math.cuh.  Arguments of exp grow its error: |x| u is what rounding x * log2(e) costs.
#pragma once

namespace math {

// 2^x, error 2u
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x for 1 <= |x| < 2^126, error u
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// error (3 + |x|) u
__device__ __forceinline__ float exp(float x) { return fast_exp2(1.4426950408889634f * x); }
// error 2u
__device__ __forceinline__ float sqrt(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// error u
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

// error (6 + |x|) u for x < 0, 6u for x > 0
__device__ __forceinline__ float sigmoid(float x) { return fast_reciprocal(1 + exp(-x)); }
// error (8 + |x|) u
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float e = exp(-abs(x)), r = fast_reciprocal(1 + e);
  return e * r * r;
}
// log(1 + exp(x)), error (128 + |x|) u: the logarithm is 4u off where its argument is close to 1, so a series takes over.
__device__ __forceinline__ float softplus(float x) {
  const float e = exp(-abs(x));
  float binary;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(binary) : "f"(1 + e));
  const float series = e * fma(e, fma(e, fma(e, -0.25f, 0.33333333f), -0.5f), 1.0f);
  return maximum(x, 0.0f) + (e < 0.0625f ? series : 0.69314718f * binary);
}
// Distribution function of the normal distribution.  For a = |x|, exp(a^2 / 2) * normal_cdf(-a) is t * P(t) with
// t = 1 / (1 + 0.305 a); P is the least-maximum fit of degree 7 for a <= 14.2, 1.6u off.  Error (12 + x^2) u for x < 0.
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

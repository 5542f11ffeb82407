// Philox4x32-10: random numbers from a counter and a key (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011).  The same bits on every machine, in any order of computing them.
//
// Element i of a tensor takes word i % 4 of the four that belong to counter (i / 4, above, offset) and key seed, above
// being 0 but for tensors of 2^31 elements and more.  Neighbouring elements of a vector share their four words: a
// compiler that sees i as a multiple of 4 plus a constant computes them once.
#pragma once
#include "math.cuh"

namespace philox {

struct Words {
  uint32 a, b, c, d;
};

__device__ __forceinline__ Words words(Words counter, uint32 key_low, uint32 key_high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32 first = 0xd2511f53u, second = 0xcd9e8d57u;
    counter = {__umulhi(second, counter.c) ^ counter.b ^ key_low, second * counter.c,
               __umulhi(first, counter.a) ^ counter.d ^ key_high, first * counter.a};
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
  return counter;
}
__device__ __forceinline__ Words words(uint32 element, uint32 above, uint64 seed, uint64 offset) {
  return words({element / 4, above, uint32(offset), uint32(offset >> 32)}, uint32(seed), uint32(seed >> 32));
}

// A multiple of 2^-24 in [0, 1)
template <class T>
__device__ __forceinline__ T fraction(uint32 word) {
  return T(word >> 8) * T(0x1p-24);
}
// The element's own word
__device__ __forceinline__ uint32 word(uint32 element, uint32 above, uint64 seed, uint64 offset) {
  const Words four = words(element, above, seed, offset);
  const uint32 low = element & 1 ? four.b : four.a, high = element & 1 ? four.d : four.c;
  return element & 2 ? high : low;
}
// Uniform in [0, 1)
template <class T>
__device__ __forceinline__ T uniform(uint32 element, uint32 above, uint64 seed, uint64 offset) {
  return fraction<T>(word(element, above, seed, offset));
}
// Whether that is at least `multiple` * 2^-24
__device__ __forceinline__ bool at_least(uint32 element, uint32 above, uint64 seed, uint64 offset, uint32 multiple) {
  return word(element, above, seed, offset) >> 8 >= multiple;
}
// What a pair of normal numbers is made of, for floats without a branch, so that a compiler sees what neighbours share:
// their words, their radius, and both polynomials of their angle.  These are fitted to the least maximum of the
// relative error.
//
// sqrt(-2 log(x)) for a multiple of 2^-24 in (0, 1].  With x = 2^n (1 + f), |f| <= 1/3, log(x) is n log(2) + f - f^2 /
// 2 + f^3 p(f), 1.2 ulps.
__device__ __forceinline__ float radius(float x) {
  const uint32 power = (float_bits(x) - 0x3f2aaaabu) & 0xff800000u;  // n in the place of an exponent
  const float f = bits_float(float_bits(x) - power) - 1;
  float p = 0.138209209f;
  p = math::fma(p, f, -0.151222005f);
  p = math::fma(p, f, 0.140421525f);
  p = math::fma(p, f, -0.164723232f);
  p = math::fma(p, f, 0.200079307f);
  p = math::fma(p, f, -0.250042379f);
  p = math::fma(p, f, 0.333332658f);
  p = math::fma(p, f, -0.5f);
  p = math::fma(p, f * f, f);
  const float square = -2 * math::fma(float(int32(power)), 0.693147182f * 0x1p-23f, p);
  return square * math::rsqrt(math::maximum(square, 0x1p-100f));  // 0 for 0
}
__device__ __forceinline__ double radius(double x) { return math::sqrt(-2.0 * math::log(x)); }
// Returns the sine or the cosine of a 24-bit fraction of a turn, with an error of at most 2 ulps: whole quarters of a
// turn are taken off, which is exact.
template <class T>
__device__ __forceinline__ T turned(uint32 fraction, bool sine);
template <>
__device__ __forceinline__ float turned<float>(uint32 fraction, bool sine) {
  const uint32 quarters = (fraction + 0x200000u) >> 22;
  const float x = float(int32(fraction - (quarters << 22))) * 3.74507039e-7f, square = x * x;
  float s = -1.95182918e-4f;
  s = math::fma(s, square, 8.33218917e-3f);
  s = math::fma(s, square, -0.166666552f);
  s = math::fma(s, x * square, x);
  float c = 2.44323273e-5f;
  c = math::fma(c, square, -1.38873095e-3f);
  c = math::fma(c, square, 0.0416666456f);
  c = math::fma(c, square, -0.5f);
  c = math::fma(c, square, 1.0f);
  const float magnitude = ((quarters & 1) != 0) == sine ? c : s;
  return ((sine ? quarters : quarters + 1) & 2) != 0 ? -magnitude : magnitude;
}
template <>
__device__ __forceinline__ double turned<double>(uint32 fraction, bool sine) {
  const double angle = 6.283185307179586 * 0x1p-24 * fraction;
  return sine ? math::sin(angle) : math::cos(angle);
}
// Normal with mean 0 and variance 1: Box and Muller's cosine for the first of a pair of elements, their sine for the
// other.
template <class T>
__device__ __forceinline__ T normal(uint32 element, uint32 above, uint64 seed, uint64 offset) {
  const Words four = words(element, above, seed, offset);
  const T first = fraction<T>(element & 2 ? four.c : four.a) + T(0x1p-24);  // in (0, 1]
  return radius(first) * turned<T>((element & 2 ? four.d : four.b) >> 8, (element & 1) != 0);
}

}  // namespace philox

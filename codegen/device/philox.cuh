// Philox4x32-10: random numbers from a counter and a key (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011).  The same bits on every machine, in any order of computing them.
//
// Element i of a tensor takes word i % 4 of the four that belong to counter (i / 4, above, offset) and key seed, above being
// 0 but for tensors of 2^31 elements and more.  Neighbouring elements of a vector share their four words: a compiler that
// sees i as a multiple of 4 plus a constant computes them once.
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
// Uniform in [0, 1)
template <class T>
__device__ __forceinline__ T uniform(uint32 element, uint32 above, uint64 seed, uint64 offset) {
  const Words four = words(element, above, seed, offset);
  const uint32 low = element & 1 ? four.b : four.a, high = element & 1 ? four.d : four.c;
  return fraction<T>(element & 2 ? high : low);
}
// Normal with mean 0 and variance 1: Box and Muller's cosine for the first of a pair of elements, their sine for the other.
template <class T>
__device__ __forceinline__ T normal(uint32 element, uint32 above, uint64 seed, uint64 offset) {
  const Words four = words(element, above, seed, offset);
  const T first = fraction<T>(element & 2 ? four.c : four.a) + T(0x1p-24);  // in (0, 1]
  const T angle = T(6.283185307179586) * fraction<T>(element & 2 ? four.d : four.b);
  return math::sqrt(T(-2) * math::log(first)) * (element & 1 ? math::sin(angle) : math::cos(angle));
}

}  // namespace philox

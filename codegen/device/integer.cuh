// Integer arithmetic that wraps around (two's complement) instead of C's undefined overflow.  All arguments have one
// type.
#pragma once
#include "types.cuh"

namespace math {

// Unsigned type in which a type's arithmetic is done; narrower types compute in 32 bits and are cut off.
template <class T>
struct Modular {
  typedef uint32 type;
};
template <>
struct Modular<int64> {
  typedef uint64 type;
};
template <>
struct Modular<uint64> {
  typedef uint64 type;
};

template <class T>
__device__ __forceinline__ T wrapping_add(T a, T b) {
  typedef typename Modular<T>::type U;
  return T(U(a) + U(b));
}
template <class T>
__device__ __forceinline__ T wrapping_sub(T a, T b) {
  typedef typename Modular<T>::type U;
  return T(U(a) - U(b));
}
template <class T>
__device__ __forceinline__ T wrapping_mul(T a, T b) {
  typedef typename Modular<T>::type U;
  return T(U(a) * U(b));
}
template <class T>
__device__ __forceinline__ T wrapping_neg(T x) {
  return wrapping_sub(T(0), x);
}
template <class T>
__device__ __forceinline__ T wrapping_abs(T x) {  // the most negative number is its own absolute value
  return x < T(0) ? wrapping_neg(x) : x;
}
__device__ __forceinline__ uint8 wrapping_abs(uint8 x) { return x; }
__device__ __forceinline__ uint16 wrapping_abs(uint16 x) { return x; }
__device__ __forceinline__ uint32 wrapping_abs(uint32 x) { return x; }
__device__ __forceinline__ uint64 wrapping_abs(uint64 x) { return x; }
// C's remainder, which has the dividend's sign; 0 where b is 0.
template <class T>
__device__ __forceinline__ T remainder(T a, T b) {
  const bool minus_one = T(-1) < T(0) && b == T(-1);  // the most negative number % -1 is undefined
  return b == T(0) || minus_one ? T(0) : T(a % b);
}
// C's quotient, rounded towards zero; 0 where b is 0.
template <class T>
__device__ __forceinline__ T quotient(T a, T b) {
  const bool minus_one = T(-1) < T(0) && b == T(-1);  // the most negative number / -1 is undefined
  return b == T(0) ? T(0) : minus_one ? wrapping_neg(a) : T(a / b);
}
// a << b, 0 where b is not one of the type's bits.
template <class T>
__device__ __forceinline__ T shift_left(T a, T b) {
  typedef typename Modular<T>::type U;
  return U(b) < U(8 * sizeof(T)) ? T(U(a) << int(b)) : T(0);  // a negative b is a large U
}
// a >> b, which keeps the sign; where b is not one of the type's bits as if all were shifted out.
template <class T>
__device__ __forceinline__ T shift_right(T a, T b) {
  typedef typename Modular<T>::type U;
  const int most = 8 * int(sizeof(T)) - 1;
  const bool is_signed = T(-1) < T(0);
  return U(b) <= U(most) ? T(a >> int(b)) : is_signed ? T(a >> most) : T(0);
}
template <class T>
__device__ __forceinline__ T maximum(T a, T b) {
  return a > b ? a : b;
}
template <class T>
__device__ __forceinline__ T minimum(T a, T b) {
  return a < b ? a : b;
}
}  // namespace math

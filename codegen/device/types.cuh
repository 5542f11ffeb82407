// Storage types of tensors and conversions between them.
//
// convert<To>(x) has one meaning on every architecture and on the CPU (FUSEGRAPH_CPU), bit for bit:
//   to a float    rounds to nearest even, once, from the exact source value.  What is too large becomes infinity in
//                 float16, bfloat16, float and double, the largest number in the 8-bit floats.  Infinity stays, but in
//                 types without one becomes the largest number.  NaN stays NaN.  (Casts with another rule limit their
//                 argument first: saturating, overflowing.)
//   to an integer from a float: truncates, saturates, NaN gives 0.  From an integer: wraps around.
//   to bool       is x != 0, so NaN gives true.
#pragma once

typedef signed char int8;
typedef unsigned char uint8;
typedef short int16;
typedef unsigned short uint16;
typedef int int32;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;

// The smaller and the larger of two numbers of which one at least has 64 bits, in the type of their sum: CUDA's own are
// ambiguous for a position of 64 bits and a literal.
template <bool, class T>
struct If {};
template <class T>
struct If<true, T> {
  typedef T type;
};
template <class A, class B, class T = typename If<sizeof(A) == 8 || sizeof(B) == 8, decltype(A() + B())>::type>
__device__ __forceinline__ T min(A a, B b) { return T(b) < T(a) ? T(b) : T(a); }
template <class A, class B, class T = typename If<sizeof(A) == 8 || sizeof(B) == 8, decltype(A() + B())>::type>
__device__ __forceinline__ T max(A a, B b) { return T(a) < T(b) ? T(b) : T(a); }

struct float16 {
  uint16 bits;
};
struct bfloat16 {
  uint16 bits;
};
struct float8_e4m3 {  // 4 exponent bits, no infinity, NaN is 0x7f, largest 448
  uint8 bits;
};
struct float8_e5m2 {  // the upper half of a float16, largest 57344
  uint8 bits;
};
// Without infinity and negative zero, whose pattern 0x80 is NaN; the bias is one more than in the types above.
struct float8_e4m3fnuz {  // largest 240
  uint8 bits;
};
struct float8_e5m2fnuz {  // largest 57344
  uint8 bits;
};

// The number of a storage type that has the bits of another, of the same size.
template <class To, class From>
__device__ __forceinline__ To reinterpret(From x) {
  static_assert(sizeof(To) == sizeof(From), "numbers of one size");
  union {
    From from;
    To to;
  } bits = {x};
  return bits.to;
}

#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ uint32 float_bits(float x) { return reinterpret<uint32>(x); }
__device__ __forceinline__ float bits_float(uint32 bits) { return reinterpret<float>(bits); }
__device__ __forceinline__ double bits_double(uint64 bits) { return reinterpret<double>(bits); }
#else
__device__ __forceinline__ uint32 float_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float bits_float(uint32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ double bits_double(uint64 bits) { return __longlong_as_double(int64(bits)); }
#endif

template <class T>
__device__ __forceinline__ T infinity();
template <>
__device__ __forceinline__ float infinity<float>() { return bits_float(0x7f800000u); }
template <>
__device__ __forceinline__ double infinity<double>() { return bits_double(0x7ff0000000000000ull); }
template <class T>
__device__ __forceinline__ T quiet_nan();
template <>
__device__ __forceinline__ float quiet_nan<float>() { return bits_float(0x7fffffffu); }
template <>
__device__ __forceinline__ double quiet_nan<double>() { return bits_double(0x7ff8000000000000ull); }

// ---- widen: the compute type's value of a stored one, always exact ----

#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ float widen(float16 x) {
  const uint32 sign = (x.bits & 0x8000u) << 16, magnitude = (x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x7c00u << 13) return bits_float(sign | 0x7f800000u | magnitude);
  return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));  // the product normalises subnormals
}
#else
__device__ __forceinline__ float widen(float16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
#endif
__device__ __forceinline__ float widen(bfloat16 x) { return bits_float(uint32(x.bits) << 16); }
__device__ __forceinline__ float widen(float8_e5m2 x) { return widen(float16{uint16(x.bits << 8)}); }
#if defined(FUSEGRAPH_CPU) || __CUDA_ARCH__ < 890
__device__ __forceinline__ float widen(float8_e4m3 x) {
  const uint32 sign = (x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return bits_float(0x7fffffffu);
  return bits_float(sign | float_bits(bits_float(magnitude << 20) * 0x1p120f));
}
#else
__device__ __forceinline__ float widen(float8_e4m3 x) {
  uint32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16(x.bits)));
  return widen(float16{uint16(pair)});
}
#endif
template <int mantissa, int bias>
__device__ __forceinline__ float widen_fnuz(uint32 bits) {
  const uint32 sign = (bits & 0x80u) << 24, magnitude = (bits & 0x7fu) << (23 - mantissa);
  if (bits == 0x80u) return bits_float(0x7fffffffu);
  return bits_float(sign | float_bits(bits_float(magnitude) * bits_float(uint32(254 - bias) << 23)));
}
__device__ __forceinline__ float widen(float8_e4m3fnuz x) { return widen_fnuz<3, 8>(x.bits); }
__device__ __forceinline__ float widen(float8_e5m2fnuz x) { return widen_fnuz<2, 16>(x.bits); }
template <class T>
__device__ __forceinline__ T widen(T x) { return x; }

// ---- float -> narrower float ----

// Bits of a non-negative, non-NaN float rounded to nearest even in a format of `mantissa` stored bits and this bias, as
// if its exponent were unbounded above; the caller saturates.  Below the smallest normal, adding a power of two whose
// last place is the format's lets the adder round.
template <int mantissa, int bias>
__device__ __forceinline__ uint32 round_magnitude(uint32 magnitude) {
  const uint32 smallest_normal = uint32(128 - bias) << 23;
  if (magnitude < smallest_normal) {
    const uint32 aligner = uint32(128 - bias + 23 - mantissa) << 23;
    return float_bits(bits_float(magnitude) + bits_float(aligner)) - aligner;
  }
  const int dropped = 23 - mantissa;
  const uint32 odd = magnitude >> dropped & 1u;
  return (magnitude - (uint32(127 - bias) << 23) + (1u << (dropped - 1)) - 1u + odd) >> dropped;
}

// An 8-bit float T: the stored bits of its mantissa, its bias, the patterns of its largest finite value, infinity (0:
// there is none) and NaN.
template <class T>
struct Format;
template <>
struct Format<float8_e4m3> {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr uint32 largest = 0x7e, infinite = 0, nan = 0x7f;
};
template <>
struct Format<float8_e5m2> {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr uint32 largest = 0x7b, infinite = 0x7c, nan = 0x7f;
};
template <>
struct Format<float8_e4m3fnuz> {
  static constexpr int mantissa = 3, bias = 8;
  static constexpr uint32 largest = 0x7f, infinite = 0, nan = 0x80;
};
template <>
struct Format<float8_e5m2fnuz> {
  static constexpr int mantissa = 2, bias = 16;
  static constexpr uint32 largest = 0x7f, infinite = 0, nan = 0x80;
};
// The bits of that largest value as a float, and of the smallest float that would round to something larger: halfway to
// the next one, which goes to the even of the two.
template <class T>
struct Limit {
  typedef Format<T> F;
  static constexpr uint32 largest = (F::largest << (23 - F::mantissa)) + (uint32(127 - F::bias) << 23);
  static constexpr uint32 beyond = largest + (1u << (22 - F::mantissa)) + (F::largest & 1u ? 0u : 1u);
};

template <class T>
__device__ __forceinline__ uint8 round_float8(float x) {
  typedef Format<T> F;
  const uint32 bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return F::nan;
  const uint32 sign = bits >> 24 & 0x80u;
  if (magnitude == 0x7f800000u) return uint8(sign | (F::infinite != 0 ? F::infinite : F::largest));
  const uint32 rounded = round_magnitude<F::mantissa, F::bias>(magnitude);
  if (F::nan == 0x80u && rounded == 0) return 0;
  return uint8(sign | (rounded < F::largest ? rounded : F::largest));
}

#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ float16 round_float16(float x) {
  const uint32 bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return float16{0x7fff};
  const uint32 rounded = magnitude >= 0x47800000u ? 0x7c00u : round_magnitude<10, 15>(magnitude);
  return float16{uint16((bits >> 16 & 0x8000u) | rounded)};
}
__device__ __forceinline__ bfloat16 round_bfloat16(float x) {
  const uint32 bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bfloat16{0x7fff};
  return bfloat16{uint16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
#else
__device__ __forceinline__ float16 round_float16(float x) {
  float16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ __forceinline__ bfloat16 round_bfloat16(float x) {
  bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
#endif
#if defined(FUSEGRAPH_CPU) || __CUDA_ARCH__ < 890
__device__ __forceinline__ float8_e4m3 round_e4m3(float x) { return float8_e4m3{round_float8<float8_e4m3>(x)}; }
__device__ __forceinline__ float8_e5m2 round_e5m2(float x) { return float8_e5m2{round_float8<float8_e5m2>(x)}; }
#else
__device__ __forceinline__ float8_e4m3 round_e4m3(float x) {
  uint16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return float8_e4m3{uint8(pair)};
}
__device__ __forceinline__ float8_e5m2 round_e5m2(float x) {
  uint16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  const bool infinite = (float_bits(x) & 0x7fffffffu) == 0x7f800000u;  // which the instruction makes the largest, 0x7b
  return float8_e5m2{uint8(pair + (infinite ? 1 : 0))};
}
#endif

// A float close to a wider magnitude such that rounding the float to 16 or 8 bits rounds the magnitude correctly: where
// the magnitude is no float, the neighbour with an odd last bit ("round to odd", Boldo and Melquiond, 2008).
template <class Wide>
__device__ __forceinline__ float round_to_odd(Wide magnitude) {
  const float nearest = float(magnitude);
  const Wide back = Wide(nearest);
  uint32 bits = float_bits(nearest);
  if (back != magnitude && !(bits & 1u)) bits += magnitude > back ? 1u : ~0u;
  return bits_float(bits);
}
template <class Exact>
__device__ __forceinline__ float narrow(Exact x) {
  static_assert(sizeof(Exact) <= 2 || Exact(0.5f) != Exact(0), "every value is a float");
  return x;
}
__device__ __forceinline__ float narrow(double x) { return x < 0 ? -round_to_odd(-x) : round_to_odd(x); }
__device__ __forceinline__ float narrow(uint32 x) { return round_to_odd(x); }
__device__ __forceinline__ float narrow(uint64 x) { return round_to_odd(x); }
__device__ __forceinline__ float narrow(int32 x) {
  return x < 0 ? -round_to_odd(0u - uint32(x)) : round_to_odd(uint32(x));
}
__device__ __forceinline__ float narrow(int64 x) {
  return x < 0 ? -round_to_odd(uint64(0) - uint64(x)) : round_to_odd(uint64(x));
}

// The argument of a cast to an 8-bit float T that saturates: infinity is T's largest number.  (What else is too large
// becomes it by being converted.)
template <class T, class From>
__device__ __forceinline__ float saturating(From x) {
  const float y = narrow(x);
  const uint32 bits = float_bits(y);
  return (bits & 0x7fffffffu) == 0x7f800000u ? bits_float((bits & 0x80000000u) | Limit<T>::largest) : y;
}
// That of a cast to T that overflows: what would round to more than the largest number is infinity, or NaN if T has
// none.
template <class T, class From>
__device__ __forceinline__ float overflowing(From x) {
  const float y = narrow(x);
  const uint32 bits = float_bits(y), magnitude = bits & 0x7fffffffu;
  if (magnitude < Limit<T>::beyond || magnitude > 0x7f800000u) return y;
  return Format<T>::infinite != 0 ? bits_float((bits & 0x80000000u) | 0x7f800000u) : quiet_nan<float>();
}

// ---- float -> integer ----

#ifdef FUSEGRAPH_CPU
__device__ __forceinline__ int32 truncate_int32(double x) {
  if (!(x > -0x1p31)) return x != x ? 0 : -2147483647 - 1;
  return x >= 0x1p31 ? 2147483647 : int32(x);
}
__device__ __forceinline__ int64 truncate_int64(double x) {
  if (!(x > -0x1p63)) return x != x ? 0 : -9223372036854775807ll - 1;
  return x >= 0x1p63 ? 9223372036854775807ll : int64(x);
}
__device__ __forceinline__ uint64 truncate_uint64(double x) {
  if (!(x > 0)) return 0;
  return x >= 0x1p64 ? ~uint64(0) : uint64(x);
}
#else  // cvt.rzi saturates; what it makes of NaN depends on the widths
#define FUSEGRAPH_TRUNCATE(To, From, TYPES, TO, FROM)            \
  __device__ __forceinline__ To truncate_##To(From x) {         \
    To y;                                                       \
    asm("cvt.rzi." TYPES " %0, %1;" : "=" TO(y) : FROM(x));     \
    return x != x ? 0 : y;                                      \
  }
FUSEGRAPH_TRUNCATE(int32, float, "s32.f32", "r", "f")
FUSEGRAPH_TRUNCATE(int32, double, "s32.f64", "r", "d")
FUSEGRAPH_TRUNCATE(int64, float, "s64.f32", "l", "f")
FUSEGRAPH_TRUNCATE(int64, double, "s64.f64", "l", "d")
FUSEGRAPH_TRUNCATE(uint64, float, "u64.f32", "l", "f")
FUSEGRAPH_TRUNCATE(uint64, double, "u64.f64", "l", "d")
#undef FUSEGRAPH_TRUNCATE
#endif
__device__ __forceinline__ uint32 truncate_uint32(double x) {  // exact for every float
  const int64 y = truncate_int64(x);
  return y < 0 ? 0u : y > 0xffffffffll ? 0xffffffffu : uint32(y);
}
__device__ __forceinline__ int32 saturate(int32 x, int32 low, int32 high) { return x < low ? low : x > high ? high : x; }

// ---- convert ----

template <class To>
struct Converter;

#define FUSEGRAPH_CONVERTER(To, CONVERTED)                                    \
  template <>                                                                 \
  struct Converter<To> {                                                      \
    template <class From>                                                     \
    static __device__ __forceinline__ To from(From x) { return CONVERTED; }   \
  };
FUSEGRAPH_CONVERTER(double, double(x))
FUSEGRAPH_CONVERTER(float, float(x))
FUSEGRAPH_CONVERTER(float16, round_float16(narrow(x)))
FUSEGRAPH_CONVERTER(bfloat16, round_bfloat16(narrow(x)))
FUSEGRAPH_CONVERTER(float8_e4m3, round_e4m3(narrow(x)))
FUSEGRAPH_CONVERTER(float8_e5m2, round_e5m2(narrow(x)))
FUSEGRAPH_CONVERTER(float8_e4m3fnuz, float8_e4m3fnuz{round_float8<float8_e4m3fnuz>(narrow(x))})
FUSEGRAPH_CONVERTER(float8_e5m2fnuz, float8_e5m2fnuz{round_float8<float8_e5m2fnuz>(narrow(x))})
FUSEGRAPH_CONVERTER(bool, x != From(0))
#undef FUSEGRAPH_CONVERTER
// Integers: those of fewer than 32 bits saturate after a conversion to int32.
#define FUSEGRAPH_INTEGER(T, LIMITED)                                            \
  template <>                                                                    \
  struct Converter<T> {                                                          \
    template <class From>                                                        \
    static __device__ __forceinline__ T from(From x) { return T(x); }            \
    static __device__ __forceinline__ T from(float x) { return T(LIMITED); }     \
    static __device__ __forceinline__ T from(double x) { return T(LIMITED); }    \
  };
FUSEGRAPH_INTEGER(int8, saturate(truncate_int32(x), -128, 127))
FUSEGRAPH_INTEGER(uint8, saturate(truncate_int32(x), 0, 255))
FUSEGRAPH_INTEGER(int16, saturate(truncate_int32(x), -32768, 32767))
FUSEGRAPH_INTEGER(uint16, saturate(truncate_int32(x), 0, 65535))
FUSEGRAPH_INTEGER(int32, truncate_int32(x))
FUSEGRAPH_INTEGER(uint32, truncate_uint32(x))
FUSEGRAPH_INTEGER(int64, truncate_int64(x))
FUSEGRAPH_INTEGER(uint64, truncate_uint64(x))
#undef FUSEGRAPH_INTEGER

template <class To, class From>
__device__ __forceinline__ To convert(From x) { return Converter<To>::from(widen(x)); }

// The value of x rounded to a storage type, still in its compute type: what storing it and reading it back gives.
template <class Storage, class Compute>
__device__ __forceinline__ Compute round_to(Compute x) { return Compute(widen(convert<Storage>(x))); }
#ifndef FUSEGRAPH_CPU
// The upper half of a pair is a float already.
template <>
__device__ __forceinline__ float round_to<bfloat16, float>(float x) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
  return bits_float(pair);
}
#endif

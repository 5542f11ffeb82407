// Scatters whose result does not depend on the order of the updates: integers are combined atomically, and everything
// else is written as integers first.
#pragma once
#include "math.cuh"

namespace scatter {

// ---- into memory.  Sums wrap around; `most` keeps the largest of unsigned integers.
__device__ __forceinline__ void add(int32* to, int32 value) { atomicAdd(reinterpret_cast<uint32*>(to), uint32(value)); }
__device__ __forceinline__ void add(int64* to, int64 value) { atomicAdd(reinterpret_cast<uint64*>(to), uint64(value)); }
__device__ __forceinline__ void most(int32* to, int32 value) { atomicMax(reinterpret_cast<uint32*>(to), uint32(value)); }
__device__ __forceinline__ void most(int64* to, int64 value) { atomicMax(reinterpret_cast<uint64*>(to), uint64(value)); }

// ---- numbers as unsigned integers in the same order, NaN being the largest.  0 stands for none: of floats it is no
// number, of integers it is the least.
__device__ __forceinline__ int32 order(int32 x) { return x ^ (-2147483647 - 1); }
__device__ __forceinline__ int64 order(int64 x) { return x ^ (-9223372036854775807ll - 1); }
__device__ __forceinline__ int32 order(float x) {
    const uint32 bits = float_bits(x);
    return x != x ? -1 : int32(bits & 0x80000000u ? ~bits : bits | 0x80000000u);
}
__device__ __forceinline__ int64 order(double x) {
    const uint64 bits = uint64(__double_as_longlong(x)), sign = 0x8000000000000000ull;
    return x != x ? -1 : int64(bits & sign ? ~bits : bits | sign);
}

// The number that is written so; of none the least.
template <class T>
__device__ __forceinline__ T ordered(int32 key);
template <class T>
__device__ __forceinline__ T ordered(int64 key);
template <>
__device__ __forceinline__ int32 ordered<int32>(int32 key) { return order(key); }
template <>
__device__ __forceinline__ int64 ordered<int64>(int64 key) { return order(key); }
template <>
__device__ __forceinline__ float ordered<float>(int32 key) {
    const uint32 bits = uint32(key);
    return bits == 0 ? -infinity<float>() : bits_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}
template <>
__device__ __forceinline__ double ordered<double>(int64 key) {
    const uint64 bits = uint64(key), sign = 0x8000000000000000ull;
    return bits == 0 ? -infinity<double>() : bits_double(bits & sign ? bits ^ sign : ~bits);
}

// The same in the opposite order, in which NaN is the largest, too, and none is the greatest number.
__device__ __forceinline__ int32 order_down(int32 x) { return ~order(x); }
__device__ __forceinline__ int64 order_down(int64 x) { return ~order(x); }
__device__ __forceinline__ int32 order_down(float x) { return order(-x); }
__device__ __forceinline__ int64 order_down(double x) { return order(-x); }
template <class T, class Key>
__device__ __forceinline__ T ordered_down(Key key) {
    const T number = ordered<T>(T(0.5) == T(0) ? Key(~key) : key);  // integers are complemented, floats negated
    return T(0.5) == T(0) ? number : T(-number);
}

// ---- floats as integers in units of what the largest of them has as its last place
//
// The scale of some floats is the largest of their exponents, as they are stored.  That is 255 (of doubles: 2047) if
// one of them is infinite, and 256 (2048) if one is NaN.  A float becomes an integer of at most 2**places for this
// scale, rounded to nearest; the sum of these is exact.  A double becomes two integers, the second one in units of
// 2**-places of the first.  Where the scale is that of infinity, integers count infinite numbers: positive ones in the
// lower half, negative ones in the upper.
__device__ __forceinline__ int32 exponent(float x) {
    if (x != x) return 256;
    const int32 field = int32(float_bits(x) >> 23 & 0xffu);
    return field < 1 ? 1 : field;
}
__device__ __forceinline__ int32 exponent(double x) {
    if (x != x) return 2048;
    const int32 field = int32(uint64(__double_as_longlong(x)) >> 52 & 0x7ffu);
    return field < 64 ? 64 : field;  // smaller ones need no finer units
}

// 2**n, a normal number.
__device__ __forceinline__ double power_of_two(int n) { return bits_double(uint64(1023 + n) << 52); }

template <class T>
__device__ __forceinline__ int64 infinities(T x, bool nan) {
    return nan ? 0 : x == infinity<T>() ? 1 : x == -infinity<T>() ? 1ll << 32 : 0;
}
__device__ __forceinline__ int64 fixed(float x, int32 scale, int places) {
    if (scale >= 255) return infinities(x, scale > 255);
    return __double2ll_rn(double(x) * power_of_two(places + 126 - scale));
}
__device__ __forceinline__ int64 fixed(double x, int32 scale, int places) {
    if (scale >= 2047) return infinities(x, scale > 2047);
    return __double2ll_rn(x * power_of_two(places + 1022 - scale));
}
__device__ __forceinline__ int64 fixed_rest(double x, int32 scale, int places) {
    if (scale >= 2047) return 0;
    const double whole = x * power_of_two(places + 1022 - scale);
    return __double2ll_rn((whole - rint(whole)) * power_of_two(places));
}

template <class T>
__device__ __forceinline__ T sum_of_infinities(int64 count, bool nan) {
    if (nan || (uint32(count) != 0 && count >> 32 != 0)) return quiet_nan<T>();
    return uint32(count) != 0 ? infinity<T>() : -infinity<T>();
}
// The sum of floats of a scale, which are integers with so many places.
__device__ __forceinline__ float floating(int32 scale, int places, int64 sum) {
    if (scale >= 255) return sum_of_infinities<float>(sum, scale > 255);
    return float(double(sum) * power_of_two(scale - 126 - places));
}
__device__ __forceinline__ double floating(int32 scale, int places, int64 sum, int64 rest) {
    if (scale >= 2047) return sum_of_infinities<double>(sum, scale > 2047);
    const double units = double(sum) + double(rest) * power_of_two(-places);
    return units * power_of_two((scale < 64 ? 64 : scale) - 1022 - places);
}

}  // namespace scatter

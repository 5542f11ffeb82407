// The mathematics that NVRTC has built in, over the host's C library: C names (expf), C++ overloads (exp(float)), and
// CUDA's intrinsics.  Intrinsics that are approximate on a GPU are exact here.
#pragma once

#define FUSEGRAPH_MATH1(name)                         \
    extern "C" double name(double) noexcept;          \
    extern "C" float name##f(float) noexcept;         \
    inline float name(float x) { return name##f(x); }

#define FUSEGRAPH_MATH2(name)                                        \
    extern "C" double name(double, double) noexcept;                 \
    extern "C" float name##f(float, float) noexcept;                 \
    inline float name(float x, float y) { return name##f(x, y); }

FUSEGRAPH_MATH1(acos)
FUSEGRAPH_MATH1(acosh)
FUSEGRAPH_MATH1(asin)
FUSEGRAPH_MATH1(asinh)
FUSEGRAPH_MATH1(atan)
FUSEGRAPH_MATH1(atanh)
FUSEGRAPH_MATH1(cbrt)
FUSEGRAPH_MATH1(ceil)
FUSEGRAPH_MATH1(cos)
FUSEGRAPH_MATH1(cosh)
FUSEGRAPH_MATH1(erf)
FUSEGRAPH_MATH1(erfc)
FUSEGRAPH_MATH1(exp)
FUSEGRAPH_MATH1(exp2)
FUSEGRAPH_MATH1(expm1)
FUSEGRAPH_MATH1(fabs)
FUSEGRAPH_MATH1(floor)
FUSEGRAPH_MATH1(lgamma)
FUSEGRAPH_MATH1(log)
FUSEGRAPH_MATH1(log10)
FUSEGRAPH_MATH1(log1p)
FUSEGRAPH_MATH1(log2)
FUSEGRAPH_MATH1(logb)
FUSEGRAPH_MATH1(nearbyint)
FUSEGRAPH_MATH1(rint)
FUSEGRAPH_MATH1(round)
FUSEGRAPH_MATH1(sin)
FUSEGRAPH_MATH1(sinh)
FUSEGRAPH_MATH1(sqrt)
FUSEGRAPH_MATH1(tan)
FUSEGRAPH_MATH1(tanh)
FUSEGRAPH_MATH1(tgamma)
FUSEGRAPH_MATH1(trunc)
FUSEGRAPH_MATH2(atan2)
FUSEGRAPH_MATH2(copysign)
FUSEGRAPH_MATH2(fdim)
FUSEGRAPH_MATH2(fmax)
FUSEGRAPH_MATH2(fmin)
FUSEGRAPH_MATH2(fmod)
FUSEGRAPH_MATH2(hypot)
FUSEGRAPH_MATH2(nextafter)
FUSEGRAPH_MATH2(pow)
FUSEGRAPH_MATH2(remainder)

extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" double frexp(double, int*) noexcept;
extern "C" float frexpf(float, int*) noexcept;
extern "C" double modf(double, double*) noexcept;
extern "C" float modff(float, float*) noexcept;
extern "C" long long llrint(double) noexcept;
extern "C" long long llrintf(float) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float ldexp(float x, int e) { return ldexpf(x, e); }
inline float frexp(float x, int* e) { return frexpf(x, e); }
inline float modf(float x, float* whole) { return modff(x, whole); }

inline void sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline void sincos(double x, double* s, double* c) { *s = sin(x), *c = cos(x); }
inline float exp10f(float x) { return powf(10.0f, x); }
inline double exp10(double x) { return pow(10.0, x); }
inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rcbrtf(float x) { return float(1.0 / cbrt(double(x))); }
inline double rcbrt(double x) { return 1.0 / cbrt(x); }
inline float normcdff(float x) { return float(0.5 * erfc(-double(x) * 0.70710678118654752440)); }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }

extern "C" int abs(int) noexcept;
extern "C" long labs(long) noexcept;
extern "C" long long llabs(long long) noexcept;
inline long abs(long x) { return labs(x); }
inline long long abs(long long x) { return llabs(x); }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }

#define FUSEGRAPH_MIN_MAX(T)                        \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
FUSEGRAPH_MIN_MAX(int)
FUSEGRAPH_MIN_MAX(unsigned int)
FUSEGRAPH_MIN_MAX(long)
FUSEGRAPH_MIN_MAX(unsigned long)
FUSEGRAPH_MIN_MAX(long long)
FUSEGRAPH_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }  // as in CUDA: the other operand where one is NaN
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Bits of one type as another.
#define FUSEGRAPH_BITS(function, From, To)          \
    inline To function(From value) {                \
        static_assert(sizeof(From) == sizeof(To));  \
        To bits;                                    \
        __builtin_memcpy(&bits, &value, sizeof bits); \
        return bits;                                \
    }
FUSEGRAPH_BITS(__float_as_int, float, int)
FUSEGRAPH_BITS(__float_as_uint, float, unsigned int)
FUSEGRAPH_BITS(__int_as_float, int, float)
FUSEGRAPH_BITS(__uint_as_float, unsigned int, float)
FUSEGRAPH_BITS(__double_as_longlong, double, long long)
FUSEGRAPH_BITS(__longlong_as_double, long long, double)

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0

// Conversions saturate and send NaN to 0, as a GPU's do; a C cast on the host does not.
namespace fusegraph_cpu {
template <typename To>
inline To saturate(double whole, double low, double high, To lowest, To highest) {
    return whole != whole ? To(0) : whole <= low ? lowest : whole >= high ? highest : To(whole);
}
inline int to_int(double x) { return saturate<int>(x, -2147483648.0, 2147483647.0, -2147483647 - 1, 2147483647); }
inline unsigned to_uint(double x) { return saturate<unsigned>(x, 0.0, 4294967295.0, 0u, 4294967295u); }
inline long long to_longlong(double x) {
    return saturate<long long>(x, -9223372036854775808.0, 9223372036854775808.0, -9223372036854775807ll - 1,
                               9223372036854775807ll);
}
}  // namespace fusegraph_cpu

inline int __float2int_rn(float x) { return fusegraph_cpu::to_int(rint(double(x))); }
inline int __float2int_rz(float x) { return fusegraph_cpu::to_int(trunc(double(x))); }
inline int __float2int_rd(float x) { return fusegraph_cpu::to_int(floor(double(x))); }
inline int __float2int_ru(float x) { return fusegraph_cpu::to_int(ceil(double(x))); }
inline unsigned int __float2uint_rn(float x) { return fusegraph_cpu::to_uint(rint(double(x))); }
inline unsigned int __float2uint_rz(float x) { return fusegraph_cpu::to_uint(trunc(double(x))); }
inline int __double2int_rn(double x) { return fusegraph_cpu::to_int(rint(x)); }
inline int __double2int_rz(double x) { return fusegraph_cpu::to_int(trunc(x)); }
inline long long __float2ll_rn(float x) { return fusegraph_cpu::to_longlong(rint(double(x))); }
inline long long __float2ll_rz(float x) { return fusegraph_cpu::to_longlong(trunc(double(x))); }
inline long long __double2ll_rn(double x) { return fusegraph_cpu::to_longlong(rint(x)); }
inline long long __double2ll_rz(double x) { return fusegraph_cpu::to_longlong(trunc(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned int x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }

inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned int __brev(unsigned int x) {
    unsigned int reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}
inline unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int shift) {
    return unsigned((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
    return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}

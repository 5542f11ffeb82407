// What kernels call of CUDA's mathematics, over the host's compiler: the device library takes the rest of it from the
// compiler itself (C_LIBRARY in math.cuh).
#pragma once

inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline double fmax(double a, double b) { return __builtin_fmax(a, b); }
inline double fmin(double a, double b) { return __builtin_fmin(a, b); }
inline double rint(double x) { return __builtin_rint(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

#define FUSEGRAPH_MIN_MAX(T)                        \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
FUSEGRAPH_MIN_MAX(int)
FUSEGRAPH_MIN_MAX(unsigned int)
FUSEGRAPH_MIN_MAX(long)
FUSEGRAPH_MIN_MAX(unsigned long)
FUSEGRAPH_MIN_MAX(long long)
FUSEGRAPH_MIN_MAX(unsigned long long)
// As in CUDA: the other operand where one is NaN.
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }

inline long long __double_as_longlong(double value) {
    long long bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Saturates and sends NaN to 0, as a GPU does; a C cast on the host does not.
inline long long __double2ll_rn(double x) {
    const double whole = rint(x);
    if (!(whole > -0x1p63)) return whole != whole ? 0 : -9223372036854775807ll - 1;
    return whole >= 0x1p63 ? 9223372036854775807ll : (long long)whole;
}

inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
    return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}

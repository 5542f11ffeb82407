// CUDA's built-in vector types, with CUDA's alignments (the compiler may use aligned vector instructions on them, so
// that a misaligned access faults here as it does on a GPU).
#pragma once

#define FUSEGRAPH_VECTORS(T, name)                                                          \
    struct name##1 {                                                                        \
        T x;                                                                                \
    };                                                                                      \
    struct __align__(2 * sizeof(T)) name##2 {                                               \
        T x, y;                                                                             \
    };                                                                                      \
    struct __align__(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 {                     \
        T x, y, z, w;                                                                       \
    };                                                                                      \
    inline name##1 make_##name##1(T x) { return {x}; }                                      \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                              \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

#define FUSEGRAPH_VECTORS3(T, name)                                                         \
    struct name##3 {                                                                        \
        T x, y, z;                                                                          \
    };                                                                                      \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }

FUSEGRAPH_VECTORS(signed char, char)
FUSEGRAPH_VECTORS(unsigned char, uchar)
FUSEGRAPH_VECTORS(short, short)
FUSEGRAPH_VECTORS(unsigned short, ushort)
FUSEGRAPH_VECTORS(int, int)
FUSEGRAPH_VECTORS(unsigned int, uint)
FUSEGRAPH_VECTORS(long long, longlong)
FUSEGRAPH_VECTORS(unsigned long long, ulonglong)
FUSEGRAPH_VECTORS(float, float)
FUSEGRAPH_VECTORS(double, double)
FUSEGRAPH_VECTORS3(int, int)
FUSEGRAPH_VECTORS3(float, float)
FUSEGRAPH_VECTORS3(double, double)

inline uint3 make_uint3(unsigned int x, unsigned int y, unsigned int z) { return {x, y, z}; }

// CUDA's atomics, as relaxed atomics of the host: the blocks of a launch run on several host threads.
#pragma once

namespace fusegraph_cpu {

// Applies `change` to *address and returns what was there.  T is 4 or 8 bytes; Bits an unsigned integer of its size.
template <typename Bits, typename T, typename Change>
inline T atomic_change(T* address, Change change) {
    static_assert(sizeof(Bits) == sizeof(T));
    Bits seen = __atomic_load_n(reinterpret_cast<Bits*>(address), __ATOMIC_RELAXED);
    for (;;) {
        T old, next;
        Bits wanted;
        __builtin_memcpy(&old, &seen, sizeof(T));
        next = change(old);
        __builtin_memcpy(&wanted, &next, sizeof(T));
        if (__atomic_compare_exchange_n(reinterpret_cast<Bits*>(address), &seen, wanted, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
            return old;
    }
}

}  // namespace fusegraph_cpu

#define FUSEGRAPH_ATOMIC_INTEGER(T)                                                                              \
    inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }                         \
    inline T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }                       \
    inline T atomicAnd(T* p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }                         \
    inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }                           \
    inline T atomicXor(T* p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); }                         \
    inline T atomicMax(T* p, T v) { return fusegraph_cpu::atomic_change<T>(p, [v](T o) { return o > v ? o : v; }); } \
    inline T atomicMin(T* p, T v) { return fusegraph_cpu::atomic_change<T>(p, [v](T o) { return o < v ? o : v; }); } \
    inline T atomicCAS(T* p, T expected, T v) {                                                                  \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                 \
        return expected;                                                                                         \
    }

FUSEGRAPH_ATOMIC_INTEGER(int)
FUSEGRAPH_ATOMIC_INTEGER(unsigned int)
FUSEGRAPH_ATOMIC_INTEGER(long long)
FUSEGRAPH_ATOMIC_INTEGER(unsigned long long)

inline int atomicSub(int* p, int v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }
inline unsigned int atomicSub(unsigned int* p, unsigned int v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }

inline float atomicAdd(float* p, float v) {
    return fusegraph_cpu::atomic_change<unsigned int>(p, [v](float old) { return old + v; });
}

inline double atomicAdd(double* p, double v) {
    return fusegraph_cpu::atomic_change<unsigned long long>(p, [v](double old) { return old + v; });
}

inline float atomicExch(float* p, float v) {
    return fusegraph_cpu::atomic_change<unsigned int>(p, [v](float) { return v; });
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

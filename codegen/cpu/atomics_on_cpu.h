// CUDA's atomics, as relaxed atomics of the host: the blocks of a launch run on several host threads.
#pragma once

#define FUSEGRAPH_ATOMIC_INTEGER(T)                                                      \
    inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); } \
    inline T atomicMax(T* p, T v) {                                                      \
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                    \
        while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} \
        return old;                                                                      \
    }
FUSEGRAPH_ATOMIC_INTEGER(int)
FUSEGRAPH_ATOMIC_INTEGER(unsigned int)
FUSEGRAPH_ATOMIC_INTEGER(long long)
FUSEGRAPH_ATOMIC_INTEGER(unsigned long long)

// One of several values: the first whose number, behind it, is greater than `at`; the last one if none is.  All values
// are at hand, so that threads of a warp that choose differently need not take turns.
#pragma once
#include "types.cuh"

template <class T, class I>
__device__ __forceinline__ T choose(I, T last) {
    return last;
}
template <class T, class I, class... More>
__device__ __forceinline__ T choose(I at, T first, I end, More... more) {
    const T rest = choose<T, I>(at, more...);
    return at < end ? first : rest;
}

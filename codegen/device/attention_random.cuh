// Random numbers of attention's probabilities, as the fragments of `attention.cuh` have them.
#pragma once
#include "philox.cuh"

namespace attention {

// The random words of sixteen neighbouring keys of a row, the first of which is this element of the scores, a multiple of
// 4: words[2 * h + e] is that of key 8 * h + 2 * (lane % 4) + e.  Four neighbours have one counter, and two lanes two of
// these counters together: each computes the words of one, and they exchange halves.
__device__ __forceinline__ void random_words(uint32 element, int lane, uint64 seed, uint64 offset, uint32 (&words)[4]) {
    const bool odd = lane % 2 != 0;
    const philox::Words four = philox::words(element + (odd ? 8 : 0) + lane / 2 % 2 * 4, 0, seed, offset);
    const uint32 first = __shfl_xor_sync(0xffffffffu, odd ? four.a : four.c, 1);
    const uint32 second = __shfl_xor_sync(0xffffffffu, odd ? four.b : four.d, 1);
    words[0] = odd ? first : four.a;
    words[1] = odd ? second : four.b;
    words[2] = odd ? four.c : first;
    words[3] = odd ? four.d : second;
}

}  // namespace attention

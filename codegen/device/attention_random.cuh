// Random numbers of attention's probabilities, as the fragments of `attention.cuh` have them.
#pragma once
#include "philox.cuh"

namespace attention {

// The random words of sixteen neighbouring keys of a query, the first of which is this element of the scores, a
// multiple of 4: words[2 * h + e] is that of key 8 * h + 2 * (lane % 4) + e.  Four neighbours have one counter, and two
// lanes two of these counters together: each computes the words of one, and they exchange halves.
__device__ __forceinline__ void random_words(uint32 element, uint32 above, int lane, uint64 seed, uint64 offset,
                                             uint32 (&words)[4]) {
    const bool odd = lane % 2 != 0;
    const philox::Words four = philox::words(element + (odd ? 8 : 0) + lane / 2 % 2 * 4, above, seed, offset);
    const uint32 first = __shfl_xor_sync(0xffffffffu, odd ? four.a : four.c, 1);
    const uint32 second = __shfl_xor_sync(0xffffffffu, odd ? four.b : four.d, 1);
    words[0] = odd ? first : four.a;
    words[1] = odd ? second : four.b;
    words[2] = odd ? four.c : first;
    words[3] = odd ? four.d : second;
}

// The same of fragments whose rows are keys, for sixteen of these and eight queries, whose elements are `step` apart:
// words[2 * f + e] is that of key lane / 4 + 8 * f and query 2 * (lane % 4) + e.  Four lanes with neighbouring keys
// have the same four counters: each computes the words of one, and they are transposed among the lanes.
__device__ __forceinline__ void random_words_of_columns(uint32 element, uint32 step, uint32 above, int lane, uint64 seed,
                                                        uint64 offset, uint32 (&words)[4]) {
    const int own = lane / 4 % 4;
    const philox::Words four = philox::words(
        element + (lane % 4 * 2 + own % 2) * step + (lane / 16 * 4 + own / 2 * 8), above, seed, offset);
    words[0] = four.a;
    words[1] = four.b;
    words[2] = four.c;
    words[3] = four.d;
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool second = (own & distance) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            const uint32 other = __shfl_xor_sync(0xffffffffu, second ? words[i] : words[i + distance], 4 * distance);
            words[i] = second ? other : words[i];
            words[i + distance] = second ? words[i + distance] : other;
        }
    }
}

}  // namespace attention

// Sorting by merging: in the registers of a thread, then between neighbouring threads in shared memory, then runs in
// device memory.  What is sorted are words: a key, which is an unsigned number in the order of the elements, and below
// it the position that the element comes from.  No two words are equal, so that equal elements stay in their order.
#pragma once
#include "types.cuh"

namespace sort {

// ---- keys ----

template <class T>
struct Unsigned {
    typedef uint32 type;
};
template <>
struct Unsigned<int64> {
    typedef uint64 type;
};
template <>
struct Unsigned<uint64> {
    typedef uint64 type;
};

// Integers, and bool: the sign turned over.
template <class T>
__device__ __forceinline__ typename Unsigned<T>::type key(T x) {
    typedef typename Unsigned<T>::type U;
    const U sign = T(-1) < T(0) ? U(1) << (8 * sizeof(U) - 1) : U(0);
    return U(x) ^ sign;
}
// Floats: the bits of negative ones turned over.  Zeros are one key, NaN are the last.
__device__ __forceinline__ uint32 key(float x) {
    const uint32 bits = float_bits(x), magnitude = bits & 0x7fffffffu, sign = 0x80000000u;
    if (magnitude > 0x7f800000u) return 0xffffffffu;
    return magnitude == 0 ? sign : bits & sign ? ~bits : bits | sign;
}
__device__ __forceinline__ uint64 key(double x) {
    const uint64 bits = uint64(__double_as_longlong(x)), sign = 1ull << 63, magnitude = bits & ~sign;
    if (magnitude > 0x7ffull << 52) return ~0ull;
    return magnitude == 0 ? sign : bits & sign ? ~bits : bits | sign;
}

// ---- words ----

struct Wide {
    uint64 key;
    uint32 position;
};
__device__ __forceinline__ uint64 word(uint32 key, uint32 position) { return uint64(key) << 32 | position; }
__device__ __forceinline__ Wide word(uint64 key, uint32 position) { return Wide{key, position}; }

__device__ __forceinline__ uint32 position(uint64 word) { return uint32(word); }
__device__ __forceinline__ uint32 position(const Wide& word) { return word.position; }

__device__ __forceinline__ bool less(uint64 a, uint64 b) { return a < b; }
__device__ __forceinline__ bool less(const Wide& a, const Wide& b) {
    return a.key < b.key || (a.key == b.key && a.position < b.position);
}

// What comes behind every word of an element.
template <class Word>
__device__ __forceinline__ Word last();
template <>
__device__ __forceinline__ uint64 last<uint64>() { return ~0ull; }
template <>
__device__ __forceinline__ Wide last<Wide>() { return Wide{~0ull, ~0u}; }

// Where a word lies in shared memory: a gap behind every 16 keeps the threads of a warp, which read runs of words each,
// to banks of their own.
__device__ __forceinline__ uint32 place(uint32 number) { return number + number / 16; }

// ---- merging ----

// How many of the first `count` words of two merged runs are from the left one, of which left(i) and right(i) are the
// i-th words, for i below `lefts` and `rights`.
template <class Left, class Right>
__device__ __forceinline__ uint32 from_left(Left left, uint32 lefts, Right right, uint32 rights, uint32 count) {
    uint32 least = count > rights ? count - rights : 0, most = count < lefts ? count : lefts;
    while (least < most) {
        const uint32 middle = (least + most) / 2;
        if (less(left(middle), right(count - 1 - middle)))
            least = middle + 1;
        else
            most = middle;
    }
    return least;
}

// The Items words from the first-th on of two runs in shared memory, [a, b) and [b, end), merged.
template <int Items, class Word>
__device__ __forceinline__ void merge(Word (&own)[Items], const Word* words, uint32 a, uint32 b, uint32 end, uint32 first) {
    const uint32 middle = b;
    const auto left = [=](uint32 i) { return words[place(a + i)]; };
    const auto right = [=](uint32 i) { return words[place(middle + i)]; };
    const uint32 taken = from_left(left, b - a, right, end - b, first);
    a += taken;
    b += first - taken;
    Word next_left = a < middle ? words[place(a)] : last<Word>(), next_right = b < end ? words[place(b)] : last<Word>();
#pragma unroll
    for (int e = 0; e < Items; ++e) {
        if (less(next_left, next_right)) {
            own[e] = next_left;
            next_left = ++a < middle ? words[place(a)] : last<Word>();
        } else {
            own[e] = next_right;
            next_right = ++b < end ? words[place(b)] : last<Word>();
        }
    }
}

// Sorts a thread's words: neighbours are compared, of even and of odd number by turns.
template <int Items, class Word>
__device__ __forceinline__ void thread(Word (&own)[Items]) {
#pragma unroll
    for (int turn = 0; turn < Items; ++turn) {
#pragma unroll
        for (int e = turn % 2; e + 1 < Items; e += 2) {
            const Word a = own[e], b = own[e + 1];
            const bool turned = less(b, a);
            own[e] = turned ? b : a;
            own[e + 1] = turned ? a : b;
        }
    }
}

// Writes a thread's words to shared memory, those of thread t from t * Items on.
template <int Items, class Word>
__device__ __forceinline__ void put(const Word (&own)[Items], Word* words) {
#pragma unroll
    for (int e = 0; e < Items; ++e) words[place(threadIdx.x * Items + e)] = own[e];
}

// Sorts the words of every Lanes neighbouring threads, a power of two; all threads of the block take part.  The first
// `keep` are in `words` then, in order from the first thread's place on: of two runs no more than these are merged.
template <int Lanes, int Items, class Word>
__device__ __forceinline__ void lanes(Word (&own)[Items], Word* words, uint32 keep) {
    thread(own);
    put(own, words);
    const uint32 lane = threadIdx.x % Lanes, begin = (threadIdx.x - lane) * Items;
#pragma unroll 1
    for (uint32 width = 1; width < Lanes; width *= 2) {
        __syncthreads();
        const uint32 first = lane / (2 * width) * (2 * width), a = begin + first * Items, b = a + width * Items;
        const bool kept = (lane - first) * Items < keep;
        if (kept) merge(own, words, a, b, b + width * Items, (lane - first) * Items);
        __syncthreads();
        if (kept) put(own, words);
    }
    if (Lanes > 1) __syncthreads();
}

// Merges two runs of device memory, of which word(i) is the i-th word: [first, middle) and [middle, last_one).  The
// block makes the words from `begin` to `end` of the merged run, at most Items for each of its Threads threads, and
// leaves them in `words`.  bounds: two numbers of shared memory.
template <int Threads, int Items, class Word, class Source>
__device__ __forceinline__ void runs(
    Word* words, uint32* bounds, Source word, uint32 first, uint32 middle, uint32 last_one, uint32 begin, uint32 end) {
    if (threadIdx.x < 2) {
        const auto left = [&](uint32 i) { return word(first + i); };
        const auto right = [&](uint32 i) { return word(middle + i); };
        const uint32 count = threadIdx.x ? end : begin;
        bounds[threadIdx.x] = from_left(left, middle - first, right, last_one - middle, count);
    }
    __syncthreads();
    const uint32 left = bounds[0], right = begin - left, lefts = bounds[1] - left, count = end - begin;
    for (uint32 i = threadIdx.x; i < count; i += Threads)
        words[place(i)] = word(i < lefts ? first + left + i : middle + right + (i - lefts));
    __syncthreads();
    Word own[Items];
    const uint32 mine = threadIdx.x * Items;
    merge(own, words, 0, lefts, count, mine < count ? mine : count);
    __syncthreads();
    put(own, words);
    __syncthreads();
}

}  // namespace sort

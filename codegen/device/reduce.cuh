// Reductions across the lanes of a warp and the threads of a block.  Every thread gets the result; the order is fixed,
// so the same inputs give the same bits.
#pragma once
#include "math.cuh"

namespace reduce {

struct Add {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
    static __device__ __forceinline__ double of(double a, double b) { return a + b; }
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return math::wrapping_add(a, b); }
};
struct Mul {
    static __device__ __forceinline__ float of(float a, float b) { return a * b; }
    static __device__ __forceinline__ double of(double a, double b) { return a * b; }
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return math::wrapping_mul(a, b); }
};
struct Max {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return math::maximum(a, b); }
};
struct Min {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return math::minimum(a, b); }
};
// The logarithm of the sum of two exponentials, neither of which overflows.
struct Logaddexp {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) {
        const T most = math::maximum(a, b), least = math::minimum(a, b);
        return math::abs(most) < infinity<T>() ? most + math::log1p(math::exp(least - most)) : most;
    }
};

// Combines a value with what there is.
template <class Op, class T>
__device__ __forceinline__ void into(T& total, T value) { total = Op::of(total, value); }

// Makes all elements the same.
template <class T, int N>
__device__ __forceinline__ void fill(T (&values)[N], T value) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = value;
}
template <class T, int M, int N>
__device__ __forceinline__ void fill(T (&values)[M][N], T value) {
#pragma unroll
    for (int i = 0; i < M; ++i) fill(values[i], value);
}

// Over Lanes neighbouring lanes, a power of two up to 32.  All lanes of the warp take part.
template <class Op, int Lanes, class T>
__device__ __forceinline__ T lanes(T value) {
#pragma unroll
    for (int distance = Lanes / 2; distance > 0; distance /= 2)
        value = Op::of(value, T(__shfl_xor_sync(0xffffffffu, value, distance)));
    return value;
}

// Down the columns of a fragment, of which a lane has some rows combined: columns lane % 4 * 2 + {0, 1, 8, 9}.  Each
// lane gets the result of one column, `column_of_lane`; lanes that differ in bit 2 get the same one.
template <class Op, class T>
__device__ __forceinline__ T columns(const T (&value)[4]) {
    const bool right = threadIdx.x & 16, odd = threadIdx.x & 8;  // which of its columns a lane keeps
    const T first = Op::of(right ? value[2] : value[0], T(__shfl_xor_sync(0xffffffffu, right ? value[0] : value[2], 16)));
    const T second = Op::of(right ? value[3] : value[1], T(__shfl_xor_sync(0xffffffffu, right ? value[1] : value[3], 16)));
    const T mine = Op::of(odd ? second : first, T(__shfl_xor_sync(0xffffffffu, odd ? first : second, 8)));
    return Op::of(mine, T(__shfl_xor_sync(0xffffffffu, mine, 4)));
}
__device__ __forceinline__ int column_of_lane(int lane) { return lane % 4 * 2 + lane / 8 % 2 + lane / 16 * 8; }

// Over all threads of a block of Warps warps, a power of two up to 32.  parts: Warps elements of shared memory for this
// reduction alone, so that one barrier is enough.
template <class Op, int Warps, class T>
__device__ __forceinline__ T block(T value, T* parts) {
    value = lanes<Op, 32>(value);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    return lanes<Op, Warps>(parts[threadIdx.x % Warps]);
}

// The same in two halves, so that several reductions share a barrier: `give` a warp's part, and after the barrier
// `take` the total.
template <class Op, class T>
__device__ __forceinline__ void give(T value, T* parts) {
    value = lanes<Op, 32>(value);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
}
template <class Op, int Warps, class T>
__device__ __forceinline__ T take(const T* parts) {
    return lanes<Op, Warps>(parts[threadIdx.x % Warps]);
}

// ---- sums of exponentials of elements whose maximum is not known yet
//
// A thread has `most`, the greatest of its elements x, and `sum`, the sum of exp(x - shift(most)); without elements,
// they are minus infinity and 0.  Combined, they are those of all elements (Milakov and Gimelshein, 2018).

// What is taken off before the exponential: the greatest element, or 0 where that is infinite, for infinity less
// infinity would be NaN.
template <class T>
__device__ __forceinline__ T shift(T most) { return math::abs(most) < infinity<T>() ? most : T(0); }

// Over Lanes neighbouring lanes, as `lanes`.
template <int Lanes, class T>
__device__ __forceinline__ void exp_lanes(T& most, T& sum) {
    const T all = lanes<Max, Lanes>(most);
    sum = lanes<Add, Lanes>(sum * math::exp(most - shift(all)));
    most = all;
}

// Over all threads of a block, as `block`, with Warps elements of shared memory for each of the two.
template <int Warps, class T>
__device__ __forceinline__ void exp_block(T& most, T& sum, T* most_parts, T* sum_parts) {
    exp_lanes<32>(most, sum);
    if (threadIdx.x % 32 == 0) most_parts[threadIdx.x / 32] = most, sum_parts[threadIdx.x / 32] = sum;
    __syncthreads();
    most = most_parts[threadIdx.x % Warps], sum = sum_parts[threadIdx.x % Warps];
    exp_lanes<Warps>(most, sum);
}

// exp(x) of an x <= 0 that was rounded: so is the product here, and the result is as exact.
__device__ __forceinline__ float exp_of_less(float x) { return math::fast_exp2(1.44269504f * x); }
__device__ __forceinline__ double exp_of_less(double x) { return math::exp(x); }

// The logarithm of the sum of exponentials of a thread's elements: each takes one exponential.  Elements are added one
// after the other; or, which takes fewer instructions, all are looked at before all are taken.
template <class T>
struct Exponentials {
    T most = -infinity<T>(), sum = 0;  // of exp(x - most)

    __device__ __forceinline__ void add(T x) {
        const T e = exp_of_less(x == most ? T(0) : -math::abs(x - most));  // no branch: one infinity less another is NaN
        sum = x > most ? sum * e + 1 : sum + e;
        most = x > most ? x : most;
    }
    __device__ __forceinline__ void look(T x) { most = Max::of(most, x); }
    __device__ __forceinline__ void take(T x) { sum += exp_of_less(x - shift(most)); }
    __device__ __forceinline__ operator T() const { return most + math::log(sum); }
};
template <class Op, class T>
__device__ __forceinline__ void into(Exponentials<T>& total, T value) { total.add(value); }
template <class Op, class T>
__device__ __forceinline__ void look(Exponentials<T>& total, T value) { total.look(value); }
template <class Op, class T>
__device__ __forceinline__ void take(Exponentials<T>& total, T value) { total.take(value); }
template <class Op, int Lanes, class T>
__device__ __forceinline__ T lanes(Exponentials<T> own) {
    exp_lanes<Lanes>(own.most, own.sum);
    return own;
}
template <class Op, class T>
__device__ __forceinline__ T columns(const Exponentials<T> (&own)[4]) {
    const T value[4] = {own[0], own[1], own[2], own[3]};
    return columns<Op>(value);
}

// The last step of `across` and `across_cluster`: `all` has the totals of Groups, V * Side of each, and `parts` gets
// those of all of them.
template <class Op, int Side, int Lanes, int Groups, int V, class T>
__device__ __forceinline__ void across_groups(T (&part)[V], const T* all, T* parts) {
    constexpr int size = Side * V;
    for (int i = threadIdx.x; i < size; i += Side * Lanes) {
        T total = all[i];
#pragma unroll
        for (int g = 1; g < Groups; ++g) total = Op::of(total, all[g * size + i]);
        parts[i] = total;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < V; ++e) part[e] = parts[e * Side + threadIdx.x % Side];
}

// Over the Lanes threads that are Side apart: thread lane * Side + i has parts of V rows, and gets their totals in
// place.  Side and Lanes are powers of two, Lanes * Side is 32 or more.  parts: V * Side elements of shared memory for
// every warp, or for every Side threads if those are more; one array may serve several reductions.
template <class Op, int Side, int Lanes, int V, class T>
__device__ __forceinline__ void across(T (&part)[V], T* parts) {
    constexpr int group = Side < 32 ? 32 : Side, groups = Side * Lanes / group, size = Side * V;
#pragma unroll
    for (int distance = 16; distance >= Side; distance /= 2)
#pragma unroll
        for (int e = 0; e < V; ++e) part[e] = Op::of(part[e], T(__shfl_xor_sync(0xffffffffu, part[e], distance)));
    if (groups == 1) return;
    const int mine = threadIdx.x % Side;
    __syncthreads();
    if (threadIdx.x % group < Side)
#pragma unroll
        for (int e = 0; e < V; ++e) parts[threadIdx.x / group * size + e * Side + mine] = part[e];
    __syncthreads();
    across_groups<Op, Side, Lanes, groups>(part, parts, parts);
}

}  // namespace reduce

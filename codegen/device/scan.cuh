// Running sums (or products, extremes) across the lanes of a warp and the threads of a block, as an operation of
// reduce.cuh combines; ``none`` changes nothing when it is combined.  The order is fixed, so the same inputs give the
// same bits; a thread's result depends on no later thread, so a NaN leaves what comes before it alone.
#pragma once
#include "reduce.cuh"

namespace scan {

// carry + what the lanes before this one have, of every Lanes neighbouring lanes; carry becomes what all of them have
// more.  Lanes is a power of two up to 32; all lanes of the warp take part.
template <class Op, int Lanes, class T>
__device__ __forceinline__ T lanes(T value, T& carry) {
  const int lane = threadIdx.x % Lanes;
  T sum = value;
#pragma unroll
  for (int distance = 1; distance < Lanes; distance *= 2) {
    const T other = T(__shfl_up_sync(0xffffffffu, sum, distance, Lanes));
    if (lane >= distance) sum = Op::of(other, sum);
  }
  const T earlier = T(__shfl_up_sync(0xffffffffu, sum, 1, Lanes));
  const T before = lane == 0 ? carry : Op::of(carry, earlier);
  carry = Op::of(carry, T(__shfl_sync(0xffffffffu, sum, Lanes - 1, Lanes)));
  return before;
}

// The same over all threads of a block of Warps warps.  parts: Warps elements of shared memory.
template <class Op, int Warps, class T>
__device__ __forceinline__ T block(T value, T& carry, T none, T* parts) {
  T own = none;
  const T before = lanes<Op, 32>(value, own);
  const int warp = threadIdx.x / 32;
  __syncthreads();  // the parts of the call before have been read
  if (threadIdx.x % 32 == 0) parts[warp] = own;
  __syncthreads();
  T ahead = carry;
#pragma unroll
  for (int other = 0; other < Warps; ++other) {
    if (other < warp) ahead = Op::of(ahead, parts[other]);
    carry = Op::of(carry, parts[other]);
  }
  return Op::of(ahead, before);
}

}  // namespace scan

// Running sums across the lanes of a warp and the threads of a block.  The order is fixed, so the same inputs give the same
// bits; a thread's result depends on no later thread, so a NaN leaves what comes before it alone.
#pragma once
#include "reduce.cuh"

namespace scan {

// carry + what the lanes before this one have, of every Lanes neighbouring lanes; carry becomes what all of them have
// more.  Lanes is a power of two up to 32; all lanes of the warp take part.
template <int Lanes, class T>
__device__ __forceinline__ T lanes(T value, T& carry) {
  const int lane = threadIdx.x % Lanes;
  T sum = value;
#pragma unroll
  for (int distance = 1; distance < Lanes; distance *= 2) {
    const T other = T(__shfl_up_sync(0xffffffffu, sum, distance, Lanes));
    if (lane >= distance) sum = reduce::Add::of(other, sum);
  }
  const T earlier = T(__shfl_up_sync(0xffffffffu, sum, 1, Lanes));
  const T before = lane == 0 ? carry : reduce::Add::of(carry, earlier);
  carry = reduce::Add::of(carry, T(__shfl_sync(0xffffffffu, sum, Lanes - 1, Lanes)));
  return before;
}

// The same over all threads of a block of Warps warps.  parts: Warps elements of shared memory.
template <int Warps, class T>
__device__ __forceinline__ T block(T value, T& carry, T* parts) {
  T own = T(0);
  const T before = lanes<32>(value, own);
  const int warp = threadIdx.x / 32;
  __syncthreads();  // the parts of the call before have been read
  if (threadIdx.x % 32 == 0) parts[warp] = own;
  __syncthreads();
  T ahead = carry;
#pragma unroll
  for (int other = 0; other < Warps; ++other) {
    if (other < warp) ahead = reduce::Add::of(ahead, parts[other]);
    carry = reduce::Add::of(carry, parts[other]);
  }
  return reduce::Add::of(ahead, before);
}

}  // namespace scan

// The extent of integers of a tile's queries or keys: what attention compares of a tile as a whole.
#pragma once
#include "reduce.cuh"

namespace attention {

// The least and the largest of some numbers; of none the least is larger than the largest.
template <class T>
struct Extent {
    T least = greatest, most = ~greatest;
    __device__ __forceinline__ void add(T number) {
        least = min(least, number);
        most = max(most, number);
    }
    // The extent of all lanes' numbers.
    __device__ __forceinline__ void over_lanes() {
        least = reduce::lanes<reduce::Min, 32>(least);
        most = reduce::lanes<reduce::Max, 32>(most);
    }

 private:
    static constexpr T greatest = sizeof(T) == 4 ? T(0x7fffffff) : T(int64(1) << 40);  // further than sums of ints
};

}  // namespace attention

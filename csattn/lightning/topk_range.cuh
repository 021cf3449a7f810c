// Entries from low to last, in bins of 2 ** shift values.
#pragma once

#include "topk_common.cuh"

struct Range {
    u64 low, last;
    int shift;

    __device__ __forceinline__ Range(u64 low_, u64 last_) : low(low_), last(last_) {
        const u64 width = last - low;
        shift = width < BINS ? 0 : 53 - __clzll(width);
    }
    __device__ __forceinline__ bool holds(u64 entry) const { return entry >= low && entry <= last; }
    __device__ __forceinline__ Range of_bin(u32 bin) const {
        const u64 first = low + (static_cast<u64>(bin) << shift);
        return Range(first, min(last, first + ((1ull << shift) - 1)));
    }
};
static_assert(BINS == 1 << 11, "a width of n bits leaves bins of n - 11 bits");

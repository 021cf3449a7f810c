// Sums over warps and blocks, words of four, and histogram bins. Defined by the caller: THREADS.
#pragma once

#include "intrinsics.cuh"

constexpr int WARPS = THREADS / 32;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ u32 word_of(uint4 words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

__device__ __forceinline__ float sum_over_warp(float value) {
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

__device__ __forceinline__ u32 sum_up_to_lane(u32 value) {
    for (int step = 1; step < 32; step <<= 1) {
        const u32 other = __shfl_up_sync(ALL_LANES, value, step);
        if (threadIdx.x % 32 >= step) value += other;
    }
    return value;
}

// The number of lanes below `lane` that are set in the ballot.
__device__ __forceinline__ int lanes_before(u32 ballot, u32 lane) { return __popc(ballot & ((1u << lane) - 1)); }

// The sum of the first `num` of up to 32 values. Called by whole warps, after a barrier.
template <class T> __device__ __forceinline__ T sum_of_first(const T* values, u32 num, u32 lane) {
    return __reduce_add_sync(ALL_LANES, lane < num ? values[lane] : 0);
}

// Exclusive prefix sum over the block's threads. All threads call it. scratch: [WARPS], no longer read by any thread.
__device__ __forceinline__ u32 sum_before(u32 value, u32* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 up_to = sum_up_to_lane(value);
    if (lane == 31) scratch[warp] = up_to;
    __syncthreads();
    return sum_of_first(scratch, warp, lane) + up_to - value;
}

// The same for repeated calls with one scratch; `total` is the sum over all threads.
__device__ __forceinline__ u32 sum_before(u32 value, u32* scratch, u32& total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 up_to = sum_up_to_lane(value);
    __syncthreads();
    if (lane == 31) scratch[warp] = up_to;
    __syncthreads();
    const u32 of_warp = lane < WARPS ? scratch[lane] : 0;
    const u32 before = __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
    total = __reduce_add_sync(ALL_LANES, of_warp);
    return before + up_to - value;
}

// Where the wanted-th largest is in a histogram.
struct Boundary {
    u32 bin, above, inside;  // its bin; the counts in all higher bins, and in this bin
};

// Write `found` if the wanted-th largest (from 1 on) is in these neighbouring bins, the first of which has the number `first`;
// `above` are counted in higher bins. So one thread of the block finds it.
template <int NUM>
__device__ __forceinline__ void find_among(const u32 (&bins)[NUM], u32 first, u32 above, u32 wanted, Boundary& found) {
#pragma unroll
    for (int i = NUM - 1; i >= 0; --i) {
        if (above < wanted && wanted <= above + bins[i]) found = {first + i, above, bins[i]};
        above += bins[i];
    }
}

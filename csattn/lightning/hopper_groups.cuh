// What the three warpgroups of a block do: two score, and of the third one warp fetches. Compiled for STAGES and THREADS,
// which is 3 * 128.
#pragma once

#include "hopper_sums.cuh"

constexpr int FETCHING_REGISTERS = 40, SCORING_REGISTERS = 232;
static_assert(STAGES % 2 == 0 && THREADS == 3 * GROUP, "a place in the ring belongs to one group");
static_assert(2 * SCORING_REGISTERS + FETCHING_REGISTERS <= 3 * 168, "a block starts with 168 for each thread");

// To be called when thread 0 has made the barriers. fetch(): one warp; score(group): two groups.
template <class Fetch, class Score> __device__ __forceinline__ void divide_work(const Fetch& fetch, const Score& score) {
    __syncthreads();
    wait_then_let_next_start();
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / GROUP, 0);  // lets the compiler know that a warp has one
    if (group == 2) {
        leave_registers<FETCHING_REGISTERS>();
        if (threadIdx.x % GROUP < 32) fetch();
    } else {
        take_registers<SCORING_REGISTERS>();
        score(group);
    }
}

// For `find`: the bin of the top_k-th group score, and the marks above it.
#pragma once

#include "choice.cuh"

// The counts of a thread's neighbouring bins; thread 0 has the highest bins.
struct BinCounts {
    static constexpr int EACH = NUM_BINS / THREADS;
    static_assert(NUM_BINS % THREADS == 0 && EACH % 4 == 0, "threads share out the bins, and read them four at a time");
    u32 counts[EACH];

    __device__ __forceinline__ static int first() { return NUM_BINS - (threadIdx.x + 1) * EACH; }

    __device__ __forceinline__ BinCounts(const u32* bins) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(bins + first() + i);
            counts[i] = four.x;
            counts[i + 1] = four.y;
            counts[i + 2] = four.z;
            counts[i + 3] = four.w;
        }
    }
};

// The bin that holds the `wanted`-th largest group score; inside is 0 if fewer are counted. scratch: [WARPS].
__device__ Boundary find_bin(const BinCounts& bin_counts, u32 wanted, u32* scratch) {
    __shared__ Boundary found;
    u32 sum = 0, total;
#pragma unroll
    for (int i = 0; i < BinCounts::EACH; ++i) sum += bin_counts.counts[i];
    const u32 above = sum_before(sum, scratch, total);
    if (threadIdx.x == 0 && total < wanted) found = {0, total, 0};
    find_among(bin_counts.counts, BinCounts::first(), above, wanted, found);
    __syncthreads();
    return found;
}

// The least shift with which a range of width + 1 group scores takes at most NUM_BINS bins.
__device__ __forceinline__ u32 shift_for(u32 width) { return width < NUM_BINS ? 0 : 1 + __clz(NUM_BINS) - __clz(width); }

// One block chooses by itself, by a radix select of as many passes as it takes: if too many keys are in the bin of the top_k-th, as
// when group scores tie, or if it is in none of the first bins.
template <typename GroupScores>  // indexed by unit: uint4
__device__ void select_in_one_block(GroupScores group_scores, int num_units, u32 wanted, Range range, Boundary boundary, u32* bins,
                             u32* scratch, int* chosen) {
    u32 above = boundary.above;
    while (boundary.inside == 0 || (above + boundary.inside != wanted && range.last != range.low)) {
        range.shift = shift_for(range.last - range.low);
        __syncthreads();
        for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
        for (int unit = threadIdx.x; unit < num_units; unit += THREADS) range.count(group_scores[unit], bins);
        __syncthreads();
        boundary = find_bin(bins, wanted - above, scratch);
        above += boundary.above;
        range = range.of(boundary);
    }
    const u32 quota = wanted - above;
    u32 inside_before = 0, written = 0;
    for (int first = 0; first < num_units; first += THREADS) {
        const int unit = first + threadIdx.x;
        const uint4 group_score = unit < num_units ? group_scores[unit] : make_uint4(0, 0, 0, 0);
        const u32 inside = keys_inside(group_score, range);
        u32 total, taken = keys_above(group_score, range), rank = inside_before + sum_before(__popc(inside), scratch, total);
        inside_before += total;
        for (int i = 0; i < UNIT_KEYS; ++i)
            if (inside >> i & 1 && rank++ < quota) taken |= 1u << i;
        u32 at = written + sum_before(__popc(taken), scratch, total);
        written += total;
        for (int i = 0; i < UNIT_KEYS; ++i)
            if (taken >> i & 1) chosen[at++] = unit * UNIT_KEYS + i;
    }
}

// Mark the part's keys above the range, and list those in it. Returns how many of the thread's keys are above.
__device__ u32 mark_part(const uint4* group_scores, const Part& part, const Range& range, u32* marks, Choice& choice) {
    u32 above = 0;
    for (int key = threadIdx.x * UNIT_KEYS; key < part.num_keys; key += THREADS * UNIT_KEYS) {
        const uint4 group_score = group_scores[(part.first_key + key) / UNIT_KEYS];
        const u32 words[UNIT_KEYS] = {group_score.x, group_score.y, group_score.z, group_score.w};
        const u32 inside = keys_inside(group_score, range);
        u32 mark = keys_above(group_score, range);
        above += __popc(mark);
        for (int i = 0; i < UNIT_KEYS; ++i) {
            if (inside >> i & 1) {
                const u32 at = atomicAdd(&choice.num_candidates, 1u);
                choice.group_scores[at] = words[i];
                choice.keys[at] = part.first_key + key + i;
            }
        }
        mark <<= threadIdx.x % 8 * 4;  // eight threads share a word
        for (int step = 1; step < 8; step <<= 1) mark |= __shfl_xor_sync(ALL_LANES, mark, step);
        if (threadIdx.x % 8 == 0) marks[(part.first_key + key) / 32] = mark;
    }
    return above;
}

// Group scores over lists, as bits that order keys: the sum of a key's shares in the query rows' softmaxes, times 2 ** HEADROOM
// (the scale of csattn.search.group_scores); for a single query row, the key's score. 0: the key may not be chosen.
//
// The top_k keys are chosen exactly: group score descending, then key ascending. `combine` makes a histogram of all group scores;
// `find` takes the bin of the top_k-th, marks the keys above it, and lists those in it, the candidates; `write` ranks these, and writes.
#pragma once

#include "common.cuh"

constexpr float HEADROOM = 94;
constexpr float LEAST_EXPONENT = HEADROOM - 216;  // log2 of reference.LEAST_SHARE, scaled by 2 ** HEADROOM
constexpr u32 NUM_BINS = 4096;
constexpr u32 MAX_CANDIDATES = 512;               // keys in the bin of the top_k-th that are compared one by one
constexpr u32 MAX_BLOCKS = 256;                   // blocks that share the keys of a slot
constexpr u32 CHOSEN_BY_ONE_BLOCK = 0xffffffffu;  // a quota that says: one block has chosen by itself
constexpr int UNIT_KEYS = 4;                      // group scores are read and written four at a time
constexpr int CHUNK_KEYS = 1024;                  // the blocks of a slot share out whole chunks

constexpr int TILE_KEYS = CHUNK_KEYS;  // keys of a warp's statistics
constexpr float NOT_LISTED = -0.0f;    // in place of a score if no list holds the key; no sum of scores is -0.0

__device__ __forceinline__ bool is_listed(float score) { return __float_as_uint(score) != 0x80000000u; }

struct TileStatistics {
    float top;    // largest score of a listed key
    float total;  // sum over listed keys of 2 ** (slope * (score - top)); for a single query row, the least score
};

// By the whole warp, from the lanes' scores: score i is that of key `key` + 32 i. For a single query row, only from keys that may be
// chosen: there the statistics only bound where the top_k-th score is looked for.
template <int NUM>
__device__ __forceinline__ TileStatistics tile_statistics(float (&scores)[NUM], int key, float slope, const Context& context) {
    float top = -1.0f / 0.0f, bottom = 1.0f / 0.0f, total = 0;
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        const bool may_be_chosen = key + 32 * i >= context.sink_end && key + 32 * i < context.window_start;
        if (GROUP_SIZE == 1 && !may_be_chosen) scores[i] = NOT_LISTED;
        if (is_listed(scores[i])) top = fmaxf(top, scores[i]), bottom = fminf(bottom, scores[i]);
    }
    for (int step = 16; step > 0; step >>= 1) {
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        if (GROUP_SIZE == 1) bottom = fminf(bottom, __shfl_xor_sync(ALL_LANES, bottom, step));
    }
    if (GROUP_SIZE == 1) return {top, bottom};
#pragma unroll
    for (int i = 0; i < NUM; ++i)
        if (is_listed(scores[i])) total += exp2_approx(slope * (scores[i] - top));
    return {top, sum_over_warp(total)};
}

// What the launches leave for each other, for one slot. The first one clears the counts.
struct alignas(16) Choice {
    u32 bins[NUM_BINS];
    u32 num_listed;  // keys that may be chosen: eligible and listed, or all that are eligible if top_k covers them
    u32 num_candidates;
    u32 quota;               // how many of the candidates fit
    float bottom, top;       // for a single query row: the least and the largest score of keys that may be chosen
    u32 above[MAX_BLOCKS];   // keys above the bin, by block
    u32 group_scores[MAX_CANDIDATES];
    u32 keys[MAX_CANDIDATES];
};

// Clear the counts: each of num_parts blocks, one part.
__device__ __forceinline__ void clear_counts(Choice& choice, int part, int num_parts) {
    uint4* bins = reinterpret_cast<uint4*>(choice.bins);
    for (int i = part * THREADS + threadIdx.x; i < NUM_BINS / 4; i += num_parts * THREADS) bins[i] = make_uint4(0, 0, 0, 0);
    if (part == 0 && threadIdx.x == 0) choice.num_listed = choice.num_candidates = 0;
}

// Group scores from `low` to `last`, counted in NUM_BINS bins of 2 ** shift; the last bin also counts those past the bins.
struct Range {
    u32 low, last, shift;

    __device__ __forceinline__ bool holds(u32 group_score) const { return group_score >= low && group_score <= last; }

    __device__ __forceinline__ void count(u32 group_score, u32* bins) const {
        if (holds(group_score)) atomicAdd(&bins[min((group_score - low) >> shift, NUM_BINS - 1)], 1u);
    }

    __device__ __forceinline__ void count(uint4 four, u32* bins) const {
        count(four.x, bins);
        count(four.y, bins);
        count(four.z, bins);
        count(four.w, bins);
    }

    // The group scores in the boundary's bin, or below all bins.
    __device__ __forceinline__ Range of(const Boundary& boundary) const {
        if (boundary.inside == 0) return {1, low - 1, 0};
        const u32 first = low + (boundary.bin << shift);
        return {first, boundary.bin == NUM_BINS - 1 ? last : min(last, first + (1u << shift) - 1), 0};
    }
};

// Positive floats order like their bits and negative ones backwards: bits that order all of them.
__device__ __forceinline__ u32 ordered_bits(float score) {
    const u32 bits = __float_as_uint(score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(u32 ordered) {
    return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// The bins in which the top_k-th group score is looked for first; if it is in none, one block looks further.
//
// For several query rows, the group scores of all keys sum up to GROUP_SIZE (before scaling), so the top_k-th is at most GROUP_SIZE / top_k: the bins
// cover 32 octaves below that, 1/128 octave each. A single query row's scores lie on both sides of zero: bins of equal width cover
// them from the least to the largest.
struct FirstBins {
    Range of_group;
    float bottom, per_unit;
    u32 lowest, highest;

    // bottom, top: for a single query row, the least and the largest score of keys that may be chosen
    __device__ __forceinline__ FirstBins(const Context& context, float bottom, float top)
        : bottom(bottom), per_unit((NUM_BINS - 1) / (top - bottom)), lowest(ordered_bits(bottom)), highest(ordered_bits(top)) {
        const u32 largest = __float_as_uint(exp2f(HEADROOM) * (1.01f * GROUP_SIZE) / context.top_k);
        of_group = {((largest >> 16) - (NUM_BINS - 2)) << 16, 0xffffffffu, 16};
    }

    __device__ __forceinline__ void count(uint4 four, u32* bins) const {
        if (GROUP_SIZE > 1) return of_group.count(four, bins);
        const u32 words[UNIT_KEYS] = {four.x, four.y, four.z, four.w};
        for (int i = 0; i < UNIT_KEYS; ++i)
            if (words[i] >= lowest && words[i] > 0) atomicAdd(&bins[bin_of(words[i])], 1u);
    }

    // The group scores in the boundary's bin, or below all bins.
    __device__ __forceinline__ Range of(const Boundary& boundary) const {
        if (GROUP_SIZE > 1) return of_group.of(boundary);
        if (boundary.inside == 0) return {1, lowest - 1, 0};
        return {first_of(boundary.bin), boundary.bin == NUM_BINS - 1 ? 0xffffffffu : first_of(boundary.bin + 1) - 1, 0};
    }

    // For a single query row; grows with the score.
    __device__ __forceinline__ u32 bin_of(u32 group_score) const {
        if (group_score >= highest) return NUM_BINS - 1;
        return static_cast<u32>(fminf(fmaxf((score_of(group_score) - bottom) * per_unit, 0.0f), NUM_BINS - 1));
    }
    // The least group score in that bin or in a higher one.
    __device__ __forceinline__ u32 first_of(u32 bin) const {
        u32 low = lowest, high = highest;
        while (low < high) {
            const u32 middle = low + (high - low) / 2;
            if (bin_of(middle) >= bin) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};

// The group scores of four keys, 0 for those that may not be chosen; key: the first of them, in the context.
__device__ __forceinline__ uint4 eligible_only(uint4 four, int key, const Context& context) {
    if (key >= context.sink_end && key + 3 < context.window_start) return four;
    auto eligible = [&](int k) { return k >= context.sink_end && k < context.window_start; };
    return make_uint4(eligible(key) ? four.x : 0, eligible(key + 1) ? four.y : 0, eligible(key + 2) ? four.z : 0,
                      eligible(key + 3) ? four.w : 0);
}

// A bit for each of four keys: whether it is above the range, or in it.
__device__ __forceinline__ u32 keys_above(uint4 four, const Range& range) {
    return (four.x > range.last) | (four.y > range.last) << 1 | (four.z > range.last) << 2 | (four.w > range.last) << 3;
}
__device__ __forceinline__ u32 keys_inside(uint4 four, const Range& range) {
    return range.holds(four.x) | range.holds(four.y) << 1 | range.holds(four.z) << 2 | range.holds(four.w) << 3;
}

// The chunks of keys of a block: `find` and `write` divide them alike.
struct Part {
    int first_key, num_keys;  // the last part may reach into the padding

    __device__ __forceinline__ Part(int num_keys_in_all) {
        const int chunks = (num_keys_in_all + CHUNK_KEYS - 1) / CHUNK_KEYS, each = (chunks + gridDim.x - 1) / gridDim.x;
        const int first = min(chunks, static_cast<int>(blockIdx.x) * each);
        first_key = first * CHUNK_KEYS;
        num_keys = (min(chunks, first + each) - first) * CHUNK_KEYS;
    }
};

// How many keys to choose: top_k, or all that may be chosen if they are fewer.
__device__ __forceinline__ int num_wanted(const Context& context, const Choice& choice) {
    return min(context.top_k, static_cast<int>(choice.num_listed));
}

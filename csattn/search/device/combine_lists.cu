// Third launch over lists: the keys' group scores, from the sums that score_lists leaves, and their histogram.

#include "choice.cuh"

// Turns a query row's scores into shares.
struct Softmax {
    float top;     // the largest score of all listed keys
    float offset;  // HEADROOM - log2(total over all listed keys)
};

// By one warp: the softmax over all tiles of a query row, in fixed order.
__device__ Softmax merge_tiles(const TileStatistics* tiles, int num_tiles, float slope) {
    float top = -1.0f / 0.0f, total = 0;
    for (int t = threadIdx.x % 32; t < num_tiles; t += 32) top = fmaxf(top, tiles[t].top);
    for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    for (int t = threadIdx.x % 32; t < num_tiles; t += 32)
        if (tiles[t].total > 0) total += tiles[t].total * exp2_approx(slope * (tiles[t].top - top));
    return {top, HEADROOM - log2f(sum_over_warp(total))};
}

// By one warp: the least and the largest score of a single query row.
__device__ float2 merge_ends(const TileStatistics* tiles, int num_tiles) {
    float bottom = 1.0f / 0.0f, top = -1.0f / 0.0f;
    for (int t = threadIdx.x % 32; t < num_tiles; t += 32) bottom = fminf(bottom, tiles[t].total), top = fmaxf(top, tiles[t].top);
    for (int step = 16; step > 0; step >>= 1) {
        bottom = fminf(bottom, __shfl_xor_sync(ALL_LANES, bottom, step));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    }
    return make_float2(bottom, top);
}

// The group score of a key: 0 where no row lists it.
__device__ __forceinline__ u32 list_score(const float* scores, long long plane, float slope, const Softmax* rows) {
    if (GROUP_SIZE == 1) return is_listed(*scores) ? ordered_bits(*scores) : 0;
    float group_score = 0;
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const float score = scores[g * plane];
        if (is_listed(score))
            group_score += exp2_approx(fmaxf(fmaf(slope, score - rows[g].top, rows[g].offset), LEAST_EXPONENT));
    }
    return __float_as_uint(group_score);
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_lists(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len,
    double softmax_scale,
    const float* scores,               // as score_lists leaves them
    const TileStatistics* statistics,  // as score_lists leaves them
    uint4* group_scores,               // [batch_size, num_index_heads, max_keys / UNIT_KEYS], written
    long long max_keys,                // whole chunks
    Choice* choices                    // [batch_size, num_index_heads], counts added to
) {
    __shared__ Softmax rows[GROUP_SIZE];
    __shared__ float2 ends;  // for a single query row
    __shared__ u32 bins[NUM_BINS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const float slope = static_cast<float>(softmax_scale * LOG2_E);
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
    wait_then_let_next_start();
    if (context.top_k == 0) return;
    const int num_tiles = (context.num_keys + TILE_KEYS - 1) / TILE_KEYS;
    for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
        const TileStatistics* tiles = statistics + (static_cast<size_t>(slot) * GROUP_SIZE + g) * (max_keys / TILE_KEYS);
        if (GROUP_SIZE == 1) {
            const float2 both = merge_ends(tiles, num_tiles);
            if (threadIdx.x == 0) ends = both;
            continue;
        }
        const Softmax softmax = merge_tiles(tiles, num_tiles, slope);
        if (threadIdx.x % 32 == 0) rows[g] = softmax;
    }
    __syncthreads();
    scores += static_cast<size_t>(slot) * GROUP_SIZE * max_keys;
    group_scores += slot * (max_keys / UNIT_KEYS);
    if (GROUP_SIZE == 1 && blockIdx.x == 0 && threadIdx.x == 0) choices[slot].bottom = ends.x, choices[slot].top = ends.y;
    const FirstBins first = GROUP_SIZE == 1 ? FirstBins(context, ends.x, ends.y) : FirstBins(context, 0, 1);
    const bool takes_all = context.top_k == context.window_start - context.sink_end;  // then unlisted keys are chosen, too
    u32 listed = 0;
    for (int unit = blockIdx.x * THREADS + threadIdx.x; unit < num_tiles * TILE_KEYS / UNIT_KEYS; unit += gridDim.x * THREADS) {
        u32 four[UNIT_KEYS];
        for (int i = 0; i < UNIT_KEYS; ++i) four[i] = list_score(scores + unit * UNIT_KEYS + i, max_keys, slope, rows);
        if (takes_all)
            for (int i = 0; i < UNIT_KEYS; ++i) four[i] = max(four[i], 1u);
        const uint4 group_score = eligible_only(make_uint4(four[0], four[1], four[2], four[3]), unit * UNIT_KEYS, context);
        first.count(group_score, bins);
        listed += (group_score.x > 0) + (group_score.y > 0) + (group_score.z > 0) + (group_score.w > 0);
        group_scores[unit] = group_score;
    }
    const u32 of_warp = __reduce_add_sync(ALL_LANES, listed);
    if (threadIdx.x % 32 == 0 && of_warp) atomicAdd(&choices[slot].num_listed, of_warp);
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&choices[slot].bins[i], bins[i]);
}

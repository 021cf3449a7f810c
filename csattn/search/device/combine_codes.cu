// Third launch of a search over a sketch: from scores to the group's scores, counted in bins.

// What turns a query's scores into shares.
struct Softmax {
    float slope;
    float offset;  // HEADROOM - log2(total over all keys)
};

// One warp: all tiles of a query, in fixed order.
__device__ Softmax merge_tiles(const float2* tiles, int num_tiles, float slope) {
    float top = -1e30f, total = 0;
#pragma unroll 4
    for (int t = threadIdx.x % 32; t < num_tiles; t += 32) top = fmaxf(top, __ldcg(tiles + t).x);
    for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
#pragma unroll 4
    for (int t = threadIdx.x % 32; t < num_tiles; t += 32) {
        const float2 tile = __ldcg(tiles + t);
        total += tile.y * power_of_two(tile.x - top);
    }
    return {slope, HEADROOM - log2f(sum_over_warp(total)) - top};
}

// A key's score of 16 bits with the group's query, or the sum of its shares with all of them: [8] keys.
__device__ __forceinline__ void group_scores(const uint4* scores, long long plane, const Softmax* rows, u32 (&worths)[8]) {
    float shares[8] = {};
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const uint4 eight = __ldcg(scores + g * plane);
        const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 score = words[i / 2] >> i % 2 * 16 & 0xffffu;
            if (GROUP_SIZE == 1) worths[i] = score;
            shares[i] += power_of_two(fmaxf(fmaf(rows[g].slope, number_of(score | 0x4b000000u), rows[g].offset), LEAST_EXPONENT));
        }
    }
    for (int i = 0; GROUP_SIZE > 1 && i < 8; ++i) worths[i] = __float_as_uint(shares[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) combine_codes(
    const int* context_lens,  // [num_contexts]
    const int* top_ks,        // [num_contexts]
    const int* context_ids,   // [batch_size], -1: idle
    long long sink_len, long long window_len,
    const uint4* scores, const float2* statistics, long long max_tiles,  // as score_codes writes them
    const float* slopes,      // of `Queries`
    uint4* worths,            // [batch_size, num_index_heads, max_keys / UNIT_KEYS], written
    long long max_keys,       // whole chunks
    Choice* choices           // [batch_size, num_index_heads], counted up
) {
    __shared__ Softmax rows[GROUP_SIZE];
    __shared__ u32 bins[NUM_BINS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids[blockIdx.z], sink_len, window_len);
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
    wait_for_earlier();
    if (context.top_k == 0) return;
    const int num_tiles = (context.num_keys + TILE_KEYS - 1) / TILE_KEYS;
    for (int g = threadIdx.x / 32; GROUP_SIZE > 1 && g < GROUP_SIZE; g += WARPS) {
        const int query = slot * GROUP_SIZE + g;
        const Softmax softmax = merge_tiles(statistics + query * max_tiles, num_tiles, slopes[query]);
        if (threadIdx.x % 32 == 0) rows[g] = softmax;
    }
    __syncthreads();
    scores += static_cast<long long>(slot) * GROUP_SIZE * (max_keys / 8);
    worths += slot * (max_keys / UNIT_KEYS);
    const Range range = first_range(context);
    const int num_units = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * (CHUNK_KEYS / 8);  // padding is worth 0
    for (int unit = blockIdx.x * THREADS + threadIdx.x; unit < num_units; unit += gridDim.x * THREADS) {
        u32 eight[8] = {};
        if (unit * 8 < context.window_start) group_scores(scores + unit, max_keys / 8, rows, eight);
        const uint4 low = eligible_only(make_uint4(eight[0], eight[1], eight[2], eight[3]), unit * 8, context);
        const uint4 high = eligible_only(make_uint4(eight[4], eight[5], eight[6], eight[7]), unit * 8 + 4, context);
        range.count(low, bins);
        range.count(high, bins);
        worths[2 * unit] = low;
        worths[2 * unit + 1] = high;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&choices[slot].bins[i], bins[i]);
}

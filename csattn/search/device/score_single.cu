// Where an index head has one query: a sum makes the key's worth, and is counted here. There is nothing to combine.

constexpr int LANE_SUMS = SUM_KEYS / 2;

// The first of the lane's four sums in the end: 0, 1 and those of the four keys that follow.
__device__ __forceinline__ int first_sum(int lane) { return SCORE_BITS == 4 ? lane / 16 * 8 + lane / 8 % 2 * 2 : lane / 16 * 4; }

// One of two sums is the lane's; the other lane's part of it comes for the lane's part of the other.
__device__ __forceinline__ u32 exchange(bool second, u32 a, u32 b, int lanes_apart) {
    return (second ? b : a) + __shfl_xor_sync(ALL_LANES, second ? a : b, lanes_apart);
}

// For the whole warp: from mixed sums of each lane's rows to sums of all rows, shared out to the lanes of a column.
__device__ __forceinline__ void share_out(const u32 (&mixed)[SUMS], u32 excess, u32 (&mine)[LANE_SUMS]) {
    const int lane = threadIdx.x % 32;
    u32 half[SUMS / 2];
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) half[i] = exchange(lane & 16, mixed[i], mixed[SUMS / 2 + i], 16);
    separate<2>(half);
#pragma unroll
    for (int i = 0; i < LANE_SUMS; ++i) {
        if (SCORE_BITS == 4) {
            const int at = i / 2 * 4 + i % 2;
            mine[i] = exchange(lane & 8, half[at], half[at + 2], 8);
        } else {
            mine[i] = half[i];
        }
        mine[i] -= excess * 0x00010001u;
    }
}

// Worths of eight neighbouring keys; 0 for those that may not be chosen.
__device__ __forceinline__ uint4 eligible_sums(uint4 sums, int key, const Context& context) {
    if (key >= context.sink_end && key + SUM_KEYS <= context.window_start) return sums;
    u32 words[4] = {0, 0, 0, 0};
    for_each_sum(sums, [&](int i, u32 worth) {
        if (key + i >= context.sink_end && key + i < context.window_start) words[i / 2] |= worth << i % 2 * 16;
    });
    return make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, MANY_KEYS ? 2 : 3) score_single(
    const LayerTable* tables,  // [num_contexts], of this layer
    const int* context_lens, const int* top_ks, const int* context_ids, long long sink_len, long long window_len,
    const Match* matches,      // as match_centroids writes them
    uint4* worths,             // [batch_size, num_index_heads, max_keys / SUM_KEYS], written
    long long max_keys,        // whole chunks
    Choice* choices            // [batch_size, num_index_heads], counted up
) {
    extern __shared__ uint4 ring[];  // [WARPS][STAGES][STEP_COPIES][32]
    __shared__ QueryRow rows[1];
    __shared__ Matches of_query;
    __shared__ u32 bins[NUM_BINS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y, lane = threadIdx.x % 32, context_id = context_ids[blockIdx.z];
    const Context context = context_of(context_lens, top_ks, context_id, sink_len, window_len);
    const int num_tiles = (context.num_keys + TILE_KEYS - 1) / TILE_KEYS;
    if (context.top_k == 0 || static_cast<int>(blockIdx.x) >= num_tiles) return wait_for_earlier();
    const LayerTable table = tables[context_id];
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
    wait_for_earlier(table.low_bits());
    of_query.read(matches + slot * SUBSPACES, rows);

    worths += slot * (max_keys / SUM_KEYS);
    const Range range = first_range(context);
    auto weigh = [&] { of_query.weigh(1.0, rows); };
    for_each_piece(table.scores, num_tiles, rows, ring, weigh, [&](int, int tile, int column, const u32 (&mixed)[SUMS]) {
        u32 mine[LANE_SUMS];
        share_out(mixed, rows[0].total_weight - 1, mine);
        const int key = tile * TILE_KEYS + first_key(column, first_sum(lane));
        const uint4 in_order = make_uint4(__byte_perm(mine[0], mine[1], 0x5410), __byte_perm(mine[0], mine[1], 0x7632),
                                          __byte_perm(mine[2], mine[3], 0x5410), __byte_perm(mine[2], mine[3], 0x7632));
        const uint4 eight = eligible_sums(in_order, key, context);
        worths[key / SUM_KEYS] = eight;
        for_each_sum(eight, [&](int, u32 worth) {
            if (worth >= range.low) atomicAdd(&bins[(worth - range.low) >> range.shift], 1u);
        });
    });
    if (blockIdx.x == 0) {  // what is left of the last chunk is worth nothing
        const int end = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS;
        for (int key = num_tiles * TILE_KEYS + threadIdx.x * SUM_KEYS; key < end; key += THREADS * SUM_KEYS)
            worths[key / SUM_KEYS] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&choices[slot].bins[i], bins[i]);
}

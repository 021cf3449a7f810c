// Where an index head has one query: a sum is the key's worth, and is counted here. There is nothing to combine.

extern "C" __global__ void __launch_bounds__(THREADS, 1) score_single(
    const LayerTable* tables,  // [num_contexts], of this layer
    const int* context_lens, const int* top_ks, const int* context_ids, long long sink_len, long long window_len,
    const Match* matches,      // as match_centroids writes them
    uint4* worths,             // [batch_size, num_index_heads, max_keys / UNIT_KEYS], written
    long long max_keys,        // whole chunks
    Choice* choices            // [batch_size, num_index_heads], counted up
) {
    extern __shared__ uint4 ring[];  // [WARPS][STAGES][STEP_ROWS][32]
    __shared__ QueryRow rows[1];
    __shared__ u32 bins[NUM_BINS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y, lane = threadIdx.x % 32, context_id = context_ids[blockIdx.z];
    const Context context = context_of(context_lens, top_ks, context_id, sink_len, window_len);
    const int num_tiles = (context.num_keys + TILE_KEYS - 1) / TILE_KEYS;
    if (context.top_k == 0 || static_cast<int>(blockIdx.x) >= num_tiles) return wait_for_earlier();
    const LayerTable table = tables[context_id];
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
    wait_for_earlier();
    make_weights(matches + slot * SUBSPACES, 1.0, rows);

    worths += slot * (max_keys / UNIT_KEYS);
    const Range range = first_range(context);
    for_each_tile(table.scores, num_tiles, rows, ring, [&](int, int tile, const u32 (&sums)[SUMS]) {
#pragma unroll
        for (int s = 0; s < SUMS; s += 2) {  // two sums have four neighbouring keys
            const int key = tile * TILE_KEYS + first_key(lane, s);
            uint4 unit = make_uint4((sums[s] & 0xffffu) + 1, (sums[s + 1] & 0xffffu) + 1, (sums[s] >> 16) + 1, (sums[s + 1] >> 16) + 1);
            unit = eligible_only(unit, key, context);
            range.count(unit, bins);
            worths[key / UNIT_KEYS] = unit;
        }
    });
    if (blockIdx.x == 0) {  // what is left of the last chunk is worth nothing
        const int end = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS;
        for (int key = num_tiles * TILE_KEYS + threadIdx.x * UNIT_KEYS; key < end; key += THREADS * UNIT_KEYS)
            worths[key / UNIT_KEYS] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&choices[slot].bins[i], bins[i]);
}

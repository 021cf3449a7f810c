// Where several queries share an index head: sums are kept, with what their softmaxes need.

// For the whole warp: statistics of a tile of which keys_left keys exist.
__device__ __forceinline__ TileStatistics tile_statistics(const u32 (&sums)[SUMS], int column, int keys_left, float slope) {
    u32 packed = 0;
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
        u32 pair = sums[s];
        if (keys_left < TILE_KEYS) {
            pair = first_key(column, s) < keys_left ? pair : 0;
            pair = first_key(column, s) + 2 < keys_left ? pair : pair & 0xffffu;
        }
        packed = __vmaxu2(packed, pair);
    }
    const u32 top = __reduce_max_sync(ALL_LANES, max(packed & 0xffffu, packed >> 16));
    const float below_top = below(top);
    float total = 0;
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
        const float low = power_of_two(slope * distance(sums[s] & 0xffffu, below_top));
        const float high = power_of_two(slope * distance(sums[s] >> 16, below_top));
        if (keys_left >= TILE_KEYS || first_key(column, s) < keys_left) total += low;
        if (keys_left >= TILE_KEYS || first_key(column, s) + 2 < keys_left) total += high;
    }
    return {top, sum_over_warp(total)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) score_group(
    const LayerTable* tables,  // [num_contexts], of this layer
    const int* context_lens,   // [num_contexts]
    const int* context_ids,    // [batch_size], -1: idle
    const Match* matches,      // as match_centroids writes them
    double softmax_scale,
    uint4* quads,                // [batch_size, num_index_heads, GROUP_SIZE, max_tiles, QUADS, TILE_COLUMNS], written
    TileStatistics* statistics,  // [batch_size, num_index_heads, GROUP_SIZE, max_tiles], written
    float* slopes,               // [batch_size, num_index_heads, GROUP_SIZE], written
    long long max_tiles
) {
    extern __shared__ uint4 ring[];  // [WARPS][STAGES][STEP_COPIES][32]
    __shared__ QueryRow rows[GROUP_SIZE];
    __shared__ Matches of_group;
    const int slot = blockIdx.z * gridDim.y + blockIdx.y, lane = threadIdx.x % 32, context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_for_earlier();
    const int num_keys = context_lens[context_id], num_tiles = (num_keys + TILE_KEYS - 1) / TILE_KEYS;
    if (static_cast<int>(blockIdx.x) >= num_tiles) return wait_for_earlier();
    const LayerTable table = tables[context_id];
    wait_for_earlier(table.low_bits());
    of_group.read(matches + slot * GROUP_SIZE * SUBSPACES, rows);

    quads += static_cast<size_t>(slot) * GROUP_SIZE * max_tiles * QUADS * TILE_COLUMNS;
    statistics += static_cast<size_t>(slot) * GROUP_SIZE * max_tiles;
    auto weigh = [&] {
        of_group.weigh(softmax_scale, rows);
        if (blockIdx.x == 0 && threadIdx.x < GROUP_SIZE) slopes[slot * GROUP_SIZE + threadIdx.x] = rows[threadIdx.x].slope;
    };
    for_each_piece(table.scores, num_tiles, rows, ring, weigh, [&](int g, int tile, int, u32 (&sums)[SUMS]) {
        separate<4>(sums);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] -= rows[g].total_weight * 0x00010001u;
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad)
            quads[quad_place(g, tile, quad, lane, max_tiles)] =
                make_uint4(sums[4 * quad], sums[4 * quad + 1], sums[4 * quad + 2], sums[4 * quad + 3]);
        const TileStatistics mine = tile_statistics(sums, lane, num_keys - tile * TILE_KEYS, rows[g].slope);
        if (lane == 0) statistics[g * max_tiles + tile] = mine;
    });
}

// Third launch of a search over rows, where several queries share an index head: from sums to worths, counted in bins.

// What turns a query row's sums into shares.
struct Softmax {
    float slope;
    float below_top;  // of the largest of all keys' sums
    float offset;     // HEADROOM - log2(total over all keys)
};

// One warp: all tiles of query row g, in fixed order.
__device__ Softmax merge_tiles(const TileStatistics* tiles, int num_tiles, float slope) {
    TileStatistics mine{0, 0};
#pragma unroll 4
    for (int t = threadIdx.x % 32; t < num_tiles; t += 32) {
        const TileStatistics tile = tiles[t];
        const u32 top = max(mine.top, tile.top);
        mine.total = mine.total * power_of_two(-slope * static_cast<float>(top - mine.top)) +
                     tile.total * power_of_two(-slope * static_cast<float>(top - tile.top));
        mine.top = top;
    }
    const u32 top = __reduce_max_sync(ALL_LANES, mine.top);
    const float total = sum_over_warp(mine.total * power_of_two(-slope * static_cast<float>(top - mine.top)));
    return {slope, below(top), HEADROOM - log2f(total)};
}

__device__ __forceinline__ float share(u32 sum, const Softmax& row) {
    return power_of_two(fmaxf(fmaf(row.slope, distance(sum, row.below_top), row.offset), LEAST_EXPONENT));
}

__device__ __forceinline__ void add_shares(float4& low, float4& high, uint4 sums, const Softmax& row) {
    low.x += share(sums.x & 0xffffu, row);
    low.y += share(sums.y & 0xffffu, row);
    low.z += share(sums.x >> 16, row);
    low.w += share(sums.y >> 16, row);
    high.x += share(sums.z & 0xffffu, row);
    high.y += share(sums.w & 0xffffu, row);
    high.z += share(sums.z >> 16, row);
    high.w += share(sums.w >> 16, row);
}

__device__ __forceinline__ uint4 bits_of(float4 value) {
    return make_uint4(__float_as_uint(value.x), __float_as_uint(value.y), __float_as_uint(value.z), __float_as_uint(value.w));
}

// The worths of a quad's eight keys: `low` those of its first four keys, `high` those of the four that go with them.
__device__ __forceinline__ void quad_worths(const uint4* quads, size_t plane, const Softmax* rows, uint4& low, uint4& high) {
    uint4 sums[GROUP_SIZE];
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g) sums[g] = __ldg(quads + g * plane);
    float4 low_shares = make_float4(0, 0, 0, 0), high_shares = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g) add_shares(low_shares, high_shares, sums[g], rows[g]);
    low = bits_of(low_shares);
    high = bits_of(high_shares);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) combine_rows(
    const int* context_lens,           // [num_contexts]
    const int* top_ks,                 // [num_contexts]
    const int* context_ids,            // [batch_size], -1: idle
    long long sink_len, long long window_len,
    const uint4* quads,                // as score_group writes them
    const TileStatistics* statistics,  // likewise
    const float* slopes,               // likewise
    long long max_tiles,
    uint4* worths,                     // [batch_size, num_index_heads, max_keys / UNIT_KEYS], written
    long long max_keys,                // whole chunks
    Choice* choices                    // [batch_size, num_index_heads], counted up
) {
    __shared__ Softmax rows[GROUP_SIZE];
    __shared__ u32 bins[NUM_BINS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids[blockIdx.z], sink_len, window_len);
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
    wait_for_earlier();
    if (context.top_k == 0) return;
    const int num_tiles = (context.num_keys + TILE_KEYS - 1) / TILE_KEYS;
    for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
        const int row = slot * GROUP_SIZE + g;
        const Softmax softmax = merge_tiles(statistics + row * max_tiles, num_tiles, slopes[row]);
        if (threadIdx.x % 32 == 0) rows[g] = softmax;
    }
    __syncthreads();
    constexpr int TILE_QUADS = QUADS * TILE_COLUMNS, TILES_AT_ONCE = THREADS / TILE_QUADS;
    static_assert(TILES_AT_ONCE >= 1 && THREADS % TILE_QUADS == 0, "a thread has a quad of a tile");
    quads += static_cast<size_t>(slot) * GROUP_SIZE * max_tiles * TILE_QUADS;
    worths += slot * (max_keys / UNIT_KEYS);
    const Range range = first_range(context);
    // neighbouring threads have neighbouring quads of a column: what they write lies side by side
    const int quad = threadIdx.x % QUADS, column = threadIdx.x / QUADS % TILE_COLUMNS;
    const int last_tile = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * (CHUNK_KEYS / TILE_KEYS);  // padding is worth 0
    for (int tile = blockIdx.x * TILES_AT_ONCE + threadIdx.x / TILE_QUADS; tile < last_tile; tile += gridDim.x * TILES_AT_ONCE) {
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (tile < num_tiles)
            quad_worths(quads + quad_place(0, tile, quad, column, max_tiles), max_tiles * TILE_QUADS, rows, low, high);
        const int key = tile * TILE_KEYS + first_key(column, 4 * quad), high_key = tile * TILE_KEYS + first_key(column, 4 * quad + 2);
        low = eligible_only(low, key, context);
        high = eligible_only(high, high_key, context);
        range.count(low, bins);
        range.count(high, bins);
        worths[key / UNIT_KEYS] = low;
        worths[high_key / UNIT_KEYS] = high;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&choices[slot].bins[i], bins[i]);
}

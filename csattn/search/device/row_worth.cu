// Worths from the sums of dense rows.

// One warp per query row: the block's own part, told to all blocks.
__device__ void share_statistics(const u32* tops, const float* totals, int num_tiles, const QueryRow* rows, u32 rank,
                                 Statistics& all) {
    const int lane = threadIdx.x % 32;
    for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
        u32 top = 0;
        for (int t = lane; t < num_tiles; t += 32) top = max(top, tops[g * num_tiles + t]);
        top = __reduce_max_sync(ALL_LANES, top);
        float total = 0;
        for (int t = lane; t < num_tiles; t += 32) {
            const float below = static_cast<float>(top - tops[g * num_tiles + t]);
            total += totals[g * num_tiles + t] * power_of_two(-rows[g].slope * below);
        }
        total = sum_over_warp(total);
        if (lane < CLUSTER) {
            write_word(&all.tops[rank][g], lane, top);
            write_word(&all.totals[rank][g], lane, __float_as_uint(total));
        }
    }
}

__device__ void merge_statistics(const Statistics& all, int g, QueryRow& row) {
    row.top = 0;
    for (int r = 0; r < CLUSTER; ++r) row.top = max(row.top, all.tops[r][g]);
    float total = 0;
    for (int r = 0; r < CLUSTER; ++r)
        total += all.totals[r][g] * exp2f(-row.slope * static_cast<float>(row.top - all.tops[r][g]));
    row.offset = HEADROOM - log2f(total);
}

__device__ __forceinline__ float share(u32 sum, const QueryRow& row, float minus_top) {
    return power_of_two(fmaxf(fmaf(row.slope, exact_float(sum) + minus_top, row.offset), LEAST_EXPONENT));
}

__device__ __forceinline__ void add_shares(float (&low)[4], float (&high)[4], uint4 sums, const QueryRow& row) {
    const float minus_top = -static_cast<float>(row.top);
    low[0] += share(sums.x & 0xffffu, row, minus_top);
    low[1] += share(sums.y & 0xffffu, row, minus_top);
    low[2] += share(sums.x >> 16, row, minus_top);
    low[3] += share(sums.y >> 16, row, minus_top);
    high[0] += share(sums.z & 0xffffu, row, minus_top);
    high[1] += share(sums.w & 0xffffu, row, minus_top);
    high[2] += share(sums.z >> 16, row, minus_top);
    high[3] += share(sums.w >> 16, row, minus_top);
}

__device__ __forceinline__ uint4 eligible_only(uint4 worth, int key, const Context& context) {
    if (key >= context.sink_end && key + 3 < context.window_start) return worth;
    auto eligible = [&](int k) { return k >= context.sink_end && k < context.window_start; };
    return make_uint4(eligible(key) ? worth.x : 0, eligible(key + 1) ? worth.y : 0, eligible(key + 2) ? worth.z : 0,
                      eligible(key + 3) ? worth.w : 0);
}

__device__ __forceinline__ void count(uint4 worth, const Range& range, u32* counts) {
    if (range.holds(worth.x)) atomicAdd(&counts[range.bin(worth.x)], 1u);
    if (range.holds(worth.y)) atomicAdd(&counts[range.bin(worth.y)], 1u);
    if (range.holds(worth.z)) atomicAdd(&counts[range.bin(worth.z)], 1u);
    if (range.holds(worth.w)) atomicAdd(&counts[range.bin(worth.w)], 1u);
}

// Turn sums into worths, in place, and count them. A quad's eight sums in each of the group's planes become eight worths:
// keys first ... first + 3 in plane 0, and the four keys SECOND_HALF further in plane 1.
constexpr int SECOND_HALF = SCORE_BITS == 4 ? 32 : 4;
constexpr int QUAD_KEYS = SCORE_BITS == 4 ? 4 : 8;  // from a quad's first key to that of the next

__device__ void combine_group(const QueryRow* rows, const Cells& cells, int first_column, int num_columns,
                              const Context& context, const Range& range, u32* counts) {
    for (int work = threadIdx.x; work < num_columns * QUADS; work += THREADS) {
        const int quad = work % QUADS, column = work / QUADS;
        const int block = (first_column + column) / BLOCK_COLUMNS, place = (first_column + column) % BLOCK_COLUMNS;
        const int key = block * KEYS_PER_BLOCK + place * 16 + quad * QUAD_KEYS;
        uint4 low, high;
        if (GROUP_SIZE == 1) {
            const uint4 s = *cells.at(0, quad, column);
            low = make_uint4((s.x & 0xffffu) + 1, (s.y & 0xffffu) + 1, (s.x >> 16) + 1, (s.y >> 16) + 1);
            high = make_uint4((s.z & 0xffffu) + 1, (s.w & 0xffffu) + 1, (s.z >> 16) + 1, (s.w >> 16) + 1);
        } else {
            float low_shares[4] = {0, 0, 0, 0}, high_shares[4] = {0, 0, 0, 0};
#pragma unroll
            for (int g = 0; g < GROUP_SIZE; ++g) add_shares(low_shares, high_shares, *cells.at(g, quad, column), rows[g]);
            low = make_uint4(__float_as_uint(low_shares[0]), __float_as_uint(low_shares[1]), __float_as_uint(low_shares[2]),
                             __float_as_uint(low_shares[3]));
            high = make_uint4(__float_as_uint(high_shares[0]), __float_as_uint(high_shares[1]),
                              __float_as_uint(high_shares[2]), __float_as_uint(high_shares[3]));
        }
        low = eligible_only(low, key, context);
        high = eligible_only(high, key + SECOND_HALF, context);
        count(low, range, counts);
        count(high, range, counts);
        *cells.at(0, quad, column) = low;
        *cells.at(1, quad, column) = high;
    }
}

// The worth of the keys of the block's part, counted from the part's first key.
struct RowWorths {
    const Cells& cells;

    __device__ __forceinline__ u32 operator[](int key) const {
        const int block = key / KEYS_PER_BLOCK, j = key % KEYS_PER_BLOCK;
        const int plane = SCORE_BITS == 4 ? j / 32 : j % 8 / 4;
        const int column = block * BLOCK_COLUMNS + (SCORE_BITS == 4 ? j % 32 / 16 : j / 16);
        return reinterpret_cast<const u32*>(cells.at(plane, j % 16 / QUAD_KEYS, column))[j % 4];
    }
};

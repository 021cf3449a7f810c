// Second launch over a sketch: one pass over the codes. Kept of it are (SCORES) biased scores of 16 bits and, for every tile
// of keys, what a softmax over them needs; and (REST) sums of weights and of weighted codes over the rows that may be chosen.
//
// All rows of the batch with the same context and all query heads of a group read the codes once, as far as they fit into 16
// rows of a product. The warps of the device share out the tiles. What becomes of a tile depends on nothing beside it.

// Of a tile of keys and a query: weights are 2 ** (slope * score - exponent).
struct TileStatistics {
    float exponent, total;
};

// What a warp has of a tile so far. The exponent is such that the weights of its first keys are at most 1; it rises when a
// weight would exceed 2 ** SPARE.
//
// TWINS: four queries at most. Rows 4 to 7 of a product are rows 0 to 3 again, and their lanes have the second half of a block.
template <int OCTETS, bool TWINS> struct Tile {
    static constexpr float SPARE = 60;
    float exponents[OCTETS], totals[OCTETS];
    u32 limits[OCTETS];  // twice, side by side: the largest score of 16 bits that needs no other exponent
    ValueSums<OCTETS> values;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) exponents[o] = -1e30f, totals[o] = 0, limits[o] = 0;
        if (REST) values.clear();
    }

    // top: of the lane's scores in the octet, of 16 bits
    __device__ __forceinline__ void raise(int o, u32 top, float slope) {
        for (int step = 1; step < 4; step <<= 1) top = max(top, __shfl_xor_sync(ALL_LANES, top, step));
        if (TWINS) {  // a tile's first exponent is that of the first half of its first block, with twins or without
            const u32 others = __shfl_xor_sync(ALL_LANES, top, 16);
            top = limits[o] ? max(top, others) : threadIdx.x % 32 < 16 ? top : others;
        }
        const bool rises = top > (limits[o] & 0xffff);
        const float exponent = rises ? ceilf(slope * (static_cast<float>(top) - BIAS)) : exponents[o];
        const float factor = power_of_two(exponents[o] - exponent);
        exponents[o] = exponent;
        totals[o] *= factor;
        const float limit = fminf(65535.0f, (exponent + SPARE) / slope + BIAS);  // infinite where the slope is 0
        limits[o] = static_cast<u32>(limit) * 0x00010001u;
        if (!REST) return;
        const int c = threadIdx.x % 4;
        const float first = __shfl_sync(ALL_LANES, factor, 8 * c), second = __shfl_sync(ALL_LANES, factor, 8 * c + 4);
        values.for_each_of(o, [&](float& sum, int e) { sum *= e ? second : first; });
    }
};

// Keys key, ..., key + 7 of [first, end): a bit for each.
__device__ __forceinline__ u32 keys_of(int key, int first, int end) {
    const int from = min(max(first - key, 0), 8), to = min(max(end - key, 0), 8);
    return to > from ? (1u << to) - (1u << from) : 0;
}

// What the lanes know of the rows of a group: of each octet, whether the lane's row is there, and where its results lie.
struct RowPlaces {
    bool there[2];
    long long query[2];  // slot * GROUP_SIZE + g

    __device__ __forceinline__ RowPlaces(const RowGroup& group, int head, bool twins) {
#pragma unroll
        for (int o = 0; o < 2; ++o) {
            const int r = threadIdx.x % 32 / 4;
            query[o] = query_of(group, head, 8 * o + (twins ? r % 4 : r), there[o]);
        }
    }
    __device__ __forceinline__ static long long query_of(const RowGroup& group, int head, int row, bool& there) {
        there = row < group.num_rows * GROUP_SIZE;
        return there ? (group.rows[row / GROUP_SIZE] * NUM_HEADS + head) * GROUP_SIZE + row % GROUP_SIZE : 0;
    }
};

struct Kept {
    uint4* scores;               // [slots, GROUP_SIZE, max_keys / 8]: eight scores of 16 bits
    TileStatistics* statistics;  // [slots, GROUP_SIZE, max_tiles]
    float* sums;                 // [slots, GROUP_SIZE, max_tiles, SUMS]
    long long max_keys, max_tiles;
};

// Eight scores of each octet into the sums; weights two by two, for `ValueSums`. EDGE: not all keys are in the context and may
// be chosen.
template <int OCTETS, bool TWINS, bool EDGE>
__device__ __forceinline__ void weigh(const u32 (&scores)[OCTETS][8], const QueryRows& rows, const RowPlaces& places, int key,
                                      const Context& context, Tile<OCTETS, TWINS>& tile, const Kept& kept, u32 (&weights)[OCTETS][4]) {
    const u32 counted = EDGE ? keys_of(key, 0, context.num_keys) : 0xff;
    const u32 in_rest = EDGE ? keys_of(key, context.sink_end, context.window_start) : 0xff;
#pragma unroll
    for (int o = 0; o < OCTETS; ++o) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = __byte_perm(scores[o][2 * i], scores[o][2 * i + 1], 0x5410);
            if (EDGE) pairs[i] &= (counted >> 2 * i & 1) * 0xffffu | (counted >> (2 * i + 1) & 1) * 0xffff0000u;
        }
        if (SCORES && places.there[o])
            kept.scores[(places.query[o] * kept.max_keys + key) / 8] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        const u32 top = __vmaxu2(__vmaxu2(pairs[0], pairs[1]), __vmaxu2(pairs[2], pairs[3]));
        while (__any_sync(ALL_LANES, __vmaxu2(top, tile.limits[o]) != tile.limits[o])) tile.raise(o, max(top & 0xffff, top >> 16), rows.slopes[o]);
        float mine[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            mine[i] = weight_of(scores[o][i], rows.slopes[o], tile.exponents[o]);
            if (EDGE && !(counted >> i & 1)) mine[i] = 0;
            if (SCORES) tile.totals[o] += mine[i];
            if (EDGE && !(in_rest >> i & 1)) mine[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[o][i] = pack_bf16(mine[2 * i], mine[2 * i + 1]);
    }
}

template <int OCTETS>
__device__ __forceinline__ void score_piece(const uint4* half, const QueryRows& rows, u32 (&scores)[OCTETS][8]) {
    uint4 words[WORD_GROUPS];
#pragma unroll
    for (int i = 0; i < WORD_GROUPS; ++i) words[i] = half[2 * i * CHUNK + place_of(threadIdx.x % 32)];
    score_half<OCTETS>(words, rows, scores);
}

template <int OCTETS, bool TWINS, bool EDGE>
__device__ __forceinline__ void add_block(const uint4* block, const QueryRows& rows, const RowPlaces& places, int first_key,
                                          const Context& context, Tile<OCTETS, TWINS>& tile, const Kept& kept) {
    const int lane = threadIdx.x % 32, key = first_key + 8 * (lane % 4);
    u32 scores[OCTETS][8], weights[OCTETS][4];
    if (TWINS) {
        const bool second = lane >= 16;
        u32 others[OCTETS][8];
        score_piece<OCTETS>(block, rows, scores);
        score_piece<OCTETS>(block + CHUNK, rows, others);
#pragma unroll
        for (int i = 0; i < 8; ++i) scores[0][i] = second ? others[0][i] : scores[0][i];
        weigh<OCTETS, TWINS, EDGE>(scores, rows, places, key + second * HALF_KEYS, context, tile, kept, weights);
        if (!REST) return;
        tile.values.add(block, 2 * CHUNK, weights);
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[0][i] = __shfl_xor_sync(ALL_LANES, weights[0][i], 16);
        tile.values.add(block + CHUNK, 2 * CHUNK, weights);
        return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        score_piece<OCTETS>(block + half * CHUNK, rows, scores);
        weigh<OCTETS, TWINS, EDGE>(scores, rows, places, key + half * HALF_KEYS, context, tile, kept, weights);
        if (REST) tile.values.add(block + half * CHUNK, 2 * CHUNK, weights);
    }
}

template <int OCTETS, bool TWINS>
__device__ __forceinline__ void finish_tile(const Tile<OCTETS, TWINS>& tile, const RowPlaces& places, const Walk& at, const Kept& kept) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int o = 0; o < OCTETS; ++o) {
        float total = tile.totals[o];
        for (int step = 1; step < 4; step <<= 1) total += __shfl_xor_sync(ALL_LANES, total, step);
        if (TWINS) total += __shfl_xor_sync(ALL_LANES, total, 16);
        if (c == 0 && places.there[o]) kept.statistics[places.query[o] * kept.max_tiles + at.tile] = {tile.exponents[o], total};
#pragma unroll
        for (int e = 0; REST && e < 2; ++e) {
            bool there;
            const long long query = RowPlaces::query_of(*at.group, at.head, 8 * o + 2 * c + e, there);
            if (there) tile.values.store(o, e, kept.sums + (query * kept.max_tiles + at.tile) * SUMS);
        }
    }
}

// The queries that a warp multiplies codes with, as long as it stays with them.
struct Loaded {
    const RowGroup* group = nullptr;
    int head = -1, segment_end = 0;
    QueryRows rows;

    __device__ __forceinline__ void load(const Walk& at, const Sketch* sketches, const Queries& queries, const RowPlaces& places) {
        const int key = at.tile * TILE_KEYS;
        if (at.group == group && at.head == head && key < segment_end) return;
        group = at.group, head = at.head;
        const Sketch& sketch = sketches[group->context_id];
        const int segment = sketch.segment_of(key);
        segment_end = sketch.segment_end(segment, group->num_keys);
#pragma unroll
        for (int o = 0; o < 2; ++o) {
            const int query = static_cast<int>(places.query[places.there[o] ? o : 0]);
            rows.load(o, queries, query / GROUP_SIZE, query % GROUP_SIZE, segment);
        }
    }
};

template <int OCTETS, bool TWINS>
__device__ __forceinline__ void add_tile(Ring& ring, Source& source, const Walk& at, const Context& context, const QueryRows& rows,
                                         const RowPlaces& places, const Kept& kept) {
    Tile<OCTETS, TWINS> tile;
    tile.clear();
    const int first_key = at.tile * TILE_KEYS, end_key = first_key + at.num_blocks() * BLOCK_KEYS;
#pragma unroll 1
    for (int key = first_key; key < end_key; key += BLOCK_KEYS) {
        source.copy_next(ring.at(ring.stage == 0 ? STAGES - 1 : ring.stage - 1));
        wait_for_copies<STAGES - 1>();
        __syncwarp();  // lanes read what others have copied
        const uint4* block = ring.at(ring.stage);
        if (key >= context.sink_end && key + BLOCK_KEYS <= context.window_start)
            add_block<OCTETS, TWINS, false>(block, rows, places, key, context, tile, kept);
        else
            add_block<OCTETS, TWINS, true>(block, rows, places, key, context, tile, kept);
        __syncwarp();  // before the next copy into what was read
        ring.next();
    }
    finish_tile(tile, places, at, kept);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) score_codes(
    const Sketch* sketches,   // [num_contexts], of this layer
    const int* context_lens,  // [num_contexts]
    const int* context_ids,   // [batch_size], -1: idle
    long long sink_len, long long window_len,
    const u32* multipliers, const int* offsets, const float* slopes, long long max_segments,  // `Queries`
    uint4* scores, TileStatistics* statistics, float* sums, long long max_keys, long long max_tiles  // `Kept`, written
) {
    extern __shared__ uint4 memory[];  // [WARPS][STAGES][BLOCK_CHUNKS][CHUNK]
    __shared__ RowGroup groups[BATCH + 1];
    const int num_groups = find_groups(context_ids, context_lens, groups);
    const long long warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, num_warps = static_cast<long long>(gridDim.x) * WARPS;
    const long long num_tiles = groups[num_groups].first_tile;
    const int first = static_cast<int>(warp * num_tiles / num_warps), end = static_cast<int>((warp + 1) * num_tiles / num_warps);
    Walk at(groups, first, end);
    Source source(at, sketches);
    Ring ring{memory + threadIdx.x / 32 * (STAGES * BLOCK_CHUNKS * CHUNK), 0};
    for (int s = 0; s < STAGES - 1; ++s) source.copy_next(ring.at(s));
    wait_for_earlier();
    const Queries queries{multipliers, offsets, slopes, max_segments};
    const Kept kept{scores, statistics, sums, max_keys, max_tiles};
    Loaded loaded;
    for (; at.goes_on(); at.next()) {
        const int num_queries = at.group->num_rows * GROUP_SIZE;
        const RowPlaces places(*at.group, at.head, num_queries <= 4);
        loaded.load(at, sketches, queries, places);
        const int num_keys = at.group->num_keys, sink_end = min(static_cast<int>(sink_len), num_keys);
        const Context context{num_keys, 0, sink_end, max(sink_end, num_keys - static_cast<int>(window_len))};
        if (num_queries <= 4)
            add_tile<1, true>(ring, source, at, context, loaded.rows, places, kept);
        else if (num_queries <= 8)
            add_tile<1, false>(ring, source, at, context, loaded.rows, places, kept);
        else
            add_tile<2, false>(ring, source, at, context, loaded.rows, places, kept);
    }
    wait_for_copies<0>();
}

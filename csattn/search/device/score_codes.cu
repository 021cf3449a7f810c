// Second launch over a sketch: one pass over the codes. It leaves (SCORES) biased scores in 16 bits, and counts by octave of the
// greatest of every eight; and (REST), for every tile of keys, sums of weights and of weighted codes over the rows that may be
// chosen.
//
// All rows of the batch with the same context and all query heads of a group read the codes once, as far as they fit into the 16
// rows of a product. The warps of the device divide the tiles. A tile's results do not depend on other tiles or other queries.

#include "tiles.cuh"

// A warp's sums over a tile so far, as in online softmax. The exponent is such that the weights of the first keys are at most 1; it
// rises when a weight would exceed 2 ** SPARE.
//
// TWINS: at most four queries. Rows 4 to 7 of a product are rows 0 to 3 again, and their lanes have the second half of a block.
template <int OCTETS, bool TWINS> struct Tile {
    static constexpr float SPARE = 60;
    uint4* scores[OCTETS];  // where the lane's next ones go
    float exponents[OCTETS];
    u32 limits[OCTETS];  // in both halves: the largest score that leaves the exponent as it is
    ValueSums<OCTETS> values;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) exponents[o] = -1e30f, limits[o] = 0;
        if (REST) values.clear();
    }

    // top: the greatest of the lane's scores in the octet, in 16 bits
    __device__ __forceinline__ void raise(int o, u32 top, float slope) {
        for (int step = 1; step < 4; step <<= 1) top = max(top, __shfl_xor_sync(ALL_LANES, top, step));
        if (TWINS) {  // a tile's first exponent is that of the first half of its first block, with twins or without
            const u32 others = __shfl_xor_sync(ALL_LANES, top, 16);
            top = limits[o] ? max(top, others) : threadIdx.x % 32 < 16 ? top : others;
        }
        const bool rises = top > (limits[o] & 0xffff);
        const float exponent = rises ? ceilf(slope * (static_cast<float>(top) - BIAS)) : exponents[o];
        const float factor = exp2_approx(exponents[o] - exponent);
        exponents[o] = exponent;
        const float limit = fminf(65535.0f, (exponent + SPARE) / slope + BIAS);
        limits[o] = static_cast<u32>(limit) * 0x00010001u;
        if (!REST) return;
        const int c = threadIdx.x % 4;
        const float first = __shfl_sync(ALL_LANES, factor, 8 * c), second = __shfl_sync(ALL_LANES, factor, 8 * c + 4);
        values.for_each_of(o, [&](float& sum, int e) { sum *= e ? second : first; });
    }
};

// A bit for each of the keys key, ..., key + 7 that is in [first, end).
__device__ __forceinline__ u32 keys_of(int key, int first, int end) {
    const int from = min(max(first - key, 0), 8), to = min(max(end - key, 0), 8);
    return to > from ? (1u << to) - (1u << from) : 0;
}

// A lane's row in each octet of a group's queries: whether there is one, and where its results go.
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

struct Outputs {
    uint4* scores;     // [slots, GROUP_SIZE, max_keys / 8]: eight scores of 16 bits
    u32* octaves;      // [slots, GROUP_SIZE, NUM_OCTAVES], added to: counts by octave of the greatest scores of eight keys
    float* exponents;  // [slots, GROUP_SIZE, max_tiles]: weights in the sums are 2 ** (slope * score - exponent)
    float* sums;       // [slots, GROUP_SIZE, max_tiles, SUMS]
    long long max_keys, max_tiles;
};

// The queries that a warp multiplies codes with, loaded when they change, and its counts of their scores.
struct Rows {
    const RowGroup* group = nullptr;
    int head = -1, segment = -1, segment_end = 0;
    LanePlaces lanes;
    Unit units[2];  // for each octet: its slot's
    QueryRows queries;
    TwinRows twins;  // for at most four queries
    u32* octaves;    // [MOST_QUERIES][NUM_OCTAVES]: the warp's counts
    u32 first_row;   // the lane's row of the first octet

    __device__ __forceinline__ explicit Rows(u32* all_octaves) : octaves(all_octaves + threadIdx.x / 32 * (MOST_QUERIES * NUM_OCTAVES)) {
        static_assert(NUM_OCTAVES == 4 * 32, "a lane has four of a query's octaves");
#pragma unroll 4
        for (int row = 0; COUNTS && row < MOST_QUERIES; ++row) four_octaves(row) = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ uint4& four_octaves(int row) const {
        return reinterpret_cast<uint4*>(octaves + row * NUM_OCTAVES)[threadIdx.x % 32];
    }

    // For the first tile this is called before the first `load`, while the kernel before this one still runs.
    __device__ __forceinline__ void find_segment(const TileIterator& at, const Sketch* sketches) {
        const Sketch& sketch = sketches[at.group->context_id];
        segment = sketch.segment_of(at.tile * TILE_KEYS);
        segment_end = sketch.segment_end(segment, at.group->num_keys);
    }

    __device__ __forceinline__ void load(const TileIterator& at, const Sketch* sketches, const Queries& all,
                                         const RowPlaces& places, const Outputs& outputs) {
        const int key = at.tile * TILE_KEYS;
        const bool is_first = head < 0, stays = at.group == group && at.head == head;
        if (stays && key < segment_end) return;
        if (!stays) flush_counts(outputs);
        if (!is_first) find_segment(at, sketches);
        group = at.group, head = at.head;
        const int num_queries = group->num_rows * GROUP_SIZE;
        first_row = threadIdx.x % 32 / 4 % (num_queries <= 4 ? 4 : 8);
#pragma unroll
        for (int o = 0; o < 2; ++o) {
            const int query = static_cast<int>(places.query[places.there[o] ? o : 0]);
            if (o == 0 || (MOST_QUERIES > 8 && num_queries > 8)) {
                if (!stays) units[o] = Unit(all, query / GROUP_SIZE);
                queries.load(o, all, units[o], query / GROUP_SIZE, query % GROUP_SIZE, segment);
            } else
                queries.clear_second();
        }
        if (num_queries <= 4) twins.load(queries);
    }

    // Count, by its octave, a query's greatest score of eight keys, in 16 bits.
    __device__ __forceinline__ void count(int o, u32 greatest) const {
        const int place = min(octave_of(greatest, queries.exponents[o]) - LEAST_OCTAVE, NUM_OCTAVES - 1);
        atomicAdd(&octaves[(first_row + 8 * o) * NUM_OCTAVES + place], 1u);
    }

    // Add the warp's counts to those of all warps, and clear them.
    __device__ __forceinline__ void flush_counts(const Outputs& outputs) const {
        if (!COUNTS || head < 0) return;
        __syncwarp();
#pragma unroll 1
        for (int row = 0; row < group->num_rows * GROUP_SIZE; ++row) {
            bool there;
            const long long query = RowPlaces::query_of(*group, head, row, there);
            u32* all = outputs.octaves + query * NUM_OCTAVES + threadIdx.x % 32 * 4;
            const uint4 four = four_octaves(row);
            four_octaves(row) = make_uint4(0, 0, 0, 0);
            for (int i = 0; i < 4; ++i)
                if (const u32 count = word_of(four, i)) atomicAdd(all + i, count);
        }
        __syncwarp();
    }
};

// Store eight scores for each octet, from `key` on, and turn them into weights, in pairs, for `ValueSums`. EDGE: some of the keys may
// be outside of the context, or may not be chosen.
template <int OCTETS, bool TWINS, bool EDGE>
__device__ __forceinline__ void compute_weights(const u32 (&scores)[OCTETS][8], const Rows& rows, const RowPlaces& places, int key,
                                                const Context& context, Tile<OCTETS, TWINS>& tile, int half,
                                                u32 (&weights)[OCTETS][4]) {
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
            tile.scores[o][half * (HALF_KEYS / 8)] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        const u32 top = __vmaxu2(__vmaxu2(pairs[0], pairs[1]), __vmaxu2(pairs[2], pairs[3]));
        if (COUNTS && places.there[o] && (!EDGE || counted)) rows.count(o, max(top & 0xffff, top >> 16));
        while (REST && __any_sync(ALL_LANES, __vmaxu2(top, tile.limits[o]) != tile.limits[o]))
            tile.raise(o, max(top & 0xffff, top >> 16), rows.queries.slopes[o]);
        if (!REST) continue;
        float own_weights[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            own_weights[i] = weight_of(scores[o][i], rows.queries.slopes[o], tile.exponents[o]);
            if (EDGE && !(in_rest >> i & 1)) own_weights[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[o][i] = pack_bf16(own_weights[2 * i], own_weights[2 * i + 1]);
    }
}

// Read a lane's words of half a block.
__device__ __forceinline__ void read_words(const uint4* half, const LanePlaces& lanes, uint4 (&words)[WORD_GROUPS]) {
#pragma unroll
    for (int i = 0; i < WORD_GROUPS; ++i) words[i] = lanes.read(half, lanes.own[i]);
}

template <int OCTETS, bool TWINS, bool EDGE>
__device__ __forceinline__ void add_block(const uint4* block, const Rows& rows, const RowPlaces& places, int first_key,
                                          const Context& context, Tile<OCTETS, TWINS>& tile) {
    const int lane = threadIdx.x % 32, key = first_key + 8 * (lane % 4);
    uint4 words[WORD_GROUPS];
    u32 scores[OCTETS][8], weights[OCTETS][4];
    if constexpr (TWINS) {
        uint4 others[WORD_GROUPS];
        read_words(block, rows.lanes, words);
        read_words(block + HALF_PIECES, rows.lanes, others);
        rows.twins.score(words, others, scores);
        compute_weights<OCTETS, TWINS, EDGE>(scores, rows, places, key + lane / 16 * HALF_KEYS, context, tile, 0, weights);
        if (!REST) return;
        tile.values.add(block, rows.lanes, weights);
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[0][i] = __shfl_xor_sync(ALL_LANES, weights[0][i], 16);
        tile.values.add(block + HALF_PIECES, rows.lanes, weights);
    } else {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            read_words(block + half * HALF_PIECES, rows.lanes, words);
            score_half<OCTETS>(words, rows.queries, scores);
            compute_weights<OCTETS, TWINS, EDGE>(scores, rows, places, key + half * HALF_KEYS, context, tile, half, weights);
            if (REST) tile.values.add(block + half * HALF_PIECES, rows.lanes, weights);
        }
    }
}

template <int OCTETS, bool TWINS>
__device__ __forceinline__ void finish_tile(const Tile<OCTETS, TWINS>& tile, const RowPlaces& places, const TileIterator& at,
                                            const Outputs& outputs) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int o = 0; o < OCTETS; ++o) {
        if (REST && c == 0 && places.there[o])
            outputs.exponents[places.query[o] * outputs.max_tiles + at.tile] = tile.exponents[o];
#pragma unroll
        for (int e = 0; REST && e < 2; ++e) {
            bool there;
            const long long query = RowPlaces::query_of(*at.group, at.head, 8 * o + 2 * c + e, there);
            if (there) tile.values.store(o, e, outputs.sums + (query * outputs.max_tiles + at.tile) * SUMS);
        }
    }
}

template <int OCTETS, bool TWINS>
__device__ __forceinline__ void add_tile(Ring& ring, BlockStream& stream, const TileIterator& at, const Context& context,
                                         const Rows& rows, const RowPlaces& places, const Outputs& outputs) {
    const int first_key = at.tile * TILE_KEYS, end_key = first_key + at.num_blocks() * BLOCK_KEYS, lane = threadIdx.x % 32;
    Tile<OCTETS, TWINS> tile;
    tile.clear();
#pragma unroll
    for (int o = 0; o < OCTETS; ++o)
        tile.scores[o] = outputs.scores + (places.query[o] * outputs.max_keys + first_key) / 8 + lane % 4 +
                         TWINS * (lane / 16) * (HALF_KEYS / 8);
#pragma unroll 1
    for (int key = first_key; key < end_key; key += BLOCK_KEYS) {
        ring.fill(ring.last_read(), stream);
        const uint4* block = ring.wait();
        if (key >= context.sink_end && key + BLOCK_KEYS <= context.window_start)
            add_block<OCTETS, TWINS, false>(block, rows, places, key, context, tile);
        else
            add_block<OCTETS, TWINS, true>(block, rows, places, key, context, tile);
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) tile.scores[o] += BLOCK_KEYS / 8;
        __syncwarp();  // before the next copy overwrites what was read
        ring.next();
    }
    finish_tile(tile, places, at, outputs);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) score_codes(
    const Sketch* sketches,   // [num_contexts], of this layer
    const int* context_lens,  // [num_contexts]
    const int* context_ids,   // [batch_size], -1: idle
    long long sink_len, long long window_len,
    const float* coordinates, const float* means, const u8* unit_exponents, long long max_segments,  // `Queries`
    uint4* scores, u32* octaves, float* exponents, float* sums, long long max_keys, long long max_tiles  // `Outputs`, written
) {
    // [WARPS][STAGES][BLOCK_PIECES]; then, if (COUNTS), [WARPS][MOST_QUERIES][NUM_OCTAVES] counts
    extern __shared__ uint4 memory[];
    __shared__ RowGroup groups[BATCH + 1];
    __shared__ u64 arrived[WARPS * STAGES];
    Rows rows(reinterpret_cast<u32*>(memory + WARPS * STAGES * BLOCK_PIECES));
    Ring ring(memory + threadIdx.x / 32 * (STAGES * BLOCK_PIECES), arrived + threadIdx.x / 32 * STAGES);
    const int num_groups = find_groups(context_ids, context_lens, groups);
    const u32 warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, num_warps = gridDim.x * WARPS;
    const u32 num_tiles = groups[num_groups].first_tile, each = num_tiles / num_warps, left = num_tiles % num_warps;
    const int first = warp * each + warp * left / num_warps, end = (warp + 1) * each + (warp + 1) * left / num_warps;
    TileIterator at(groups, first, end);
    BlockStream stream(at, sketches);
    if (at.has_tile()) rows.find_segment(at, sketches);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) ring.fill(s, stream);
    wait_then_let_next_start(static_cast<u32>(rows.segment_end));
    const Queries queries{coordinates, means, unit_exponents, max_segments};
    const Outputs outputs{scores, octaves, exponents, sums, max_keys, max_tiles};
    for (; at.has_tile(); at.next()) {
        const int num_queries = at.group->num_rows * GROUP_SIZE;
        const RowPlaces places(*at.group, at.head, num_queries <= 4);
        rows.load(at, sketches, queries, places, outputs);
        const int num_keys = at.group->num_keys, sink_end = min(static_cast<int>(sink_len), num_keys);
        const Context context{num_keys, 0, sink_end, max(sink_end, num_keys - static_cast<int>(window_len))};
        if (num_queries <= 4)
            add_tile<1, true>(ring, stream, at, context, rows, places, outputs);
        else if (MOST_QUERIES > 4 && num_queries <= 8)
            add_tile<1, false>(ring, stream, at, context, rows, places, outputs);
        else if (MOST_QUERIES > 8)
            add_tile<2, false>(ring, stream, at, context, rows, places, outputs);
    }
    rows.flush_counts(outputs);
}

// Scores of all keys from dense rows of codes, and each query row's softmax total over them.
//
// A score is the integer sum over subspaces of W * code. Two keys share a 32-bit sum of W * (code + largest): both lie in
// [0, 65534] by choice of W, so that neither reaches into the other. A lane adds up one column, 16 bytes of every row.

constexpr u32 LARGEST_CODE = SCORE_BITS == 4 ? 7 : 127;
constexpr int KEYS_PER_BLOCK = 64;
constexpr int COLUMN_KEYS = 128 / SCORE_BITS;
constexpr int BLOCK_COLUMNS = KEYS_PER_BLOCK / COLUMN_KEYS;
constexpr int QUADS = COLUMN_KEYS / 8;  // a quad: four sums of two keys, 16 bytes
constexpr int SUMS = COLUMN_KEYS / 2;
constexpr int PLANES = GROUP_SIZE > 2 ? GROUP_SIZE : 2;  // two planes have room for a float per key

struct Row {
    u32 offset;  // of the chosen row within the head's rows
    u32 weight;  // W
};

// What a block knows of one query row.
struct QueryRow {
    Row rows[SUBSPACES];
    u32 total_weight;
    float slope;   // a key's logit, base 2, grows by it with each unit of score
    u32 top;       // largest sum of all keys
    float offset;  // HEADROOM - log2(total), total = sum over keys of 2 ** (slope * (sum - top))
};

// The sums of the block's own columns: the first `shared_columns` in shared memory, the rest in global memory.
struct Cells {
    uint4* shared;
    uint4* spilled;
    int shared_columns;
    int shared_stride;   // in columns: shared_columns + 2, so that a warp that walks along keys meets each bank once
    int spilled_stride;  // in columns

    __device__ __forceinline__ uint4* at(int plane, int quad, int column) const {
        if (column < shared_columns) return shared + (plane * QUADS + quad) * shared_stride + column;
        return spilled + static_cast<size_t>(plane * QUADS + quad) * spilled_stride + (column - shared_columns);
    }
};

// W from the scaled weights, as csattn.search.weights.integer_weights makes them; one thread per query row.
__device__ void make_weights(const Match& match, int g, double softmax_scale, u32 row_bytes, QueryRow& row) {
    double total = 0;
    for (int b = 0; b < SUBSPACES; ++b) total += read_double(&match.scaled[g][b], b % CLUSTER);
    const double unit = total * LARGEST_CODE / (32767 - 1 - LARGEST_CODE * SUBSPACES / 2.0);
    const bool usable = unit > 0 && unit < 1.0 / 0.0;
    row.total_weight = 0;
    for (int b = 0; b < SUBSPACES; ++b) {
        const u32 centroid = read_word(&match.centroid[g][b], b % CLUSTER);
        const u32 weight = usable ? static_cast<u32>(rint(read_double(&match.scaled[g][b], b % CLUSTER) / unit)) : 0;
        row.rows[b] = {(b * CENTROIDS + centroid) * row_bytes, weight};
        row.total_weight += weight;
    }
    row.slope = usable ? static_cast<float>(softmax_scale * unit * 1.4426950408889634) : 0.0f;
}

// Add `weight` times the codes of 16 bytes to the sums: sum 4 * w + s holds the keys of word w that `first_key` names.
__device__ __forceinline__ void add_codes(u32 (&sums)[SUMS], uint4 codes, u32 weight) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if (SCORE_BITS == 4) {
            sums[4 * w + 0] += (words[w] & 0x000f000fu) * weight;
            sums[4 * w + 1] += ((words[w] >> 8) & 0x000f000fu) * weight;
            sums[4 * w + 2] += ((words[w] >> 4) & 0x000f000fu) * weight;
            sums[4 * w + 3] += ((words[w] >> 12) & 0x000f000fu) * weight;
        } else {
            const u32 biased = words[w] ^ 0x80808080u;
            sums[2 * w + 0] += (biased & 0x00ff00ffu) * weight;
            sums[2 * w + 1] += ((biased >> 8) & 0x00ff00ffu) * weight;
        }
    }
}

// The lower key of sum `s` within its column's block of 64; the upper one is two keys further.
__device__ __forceinline__ int first_key(int column, int s) {
    const int of_column = column % BLOCK_COLUMNS * 16;
    return SCORE_BITS == 4 ? of_column + s / 4 * 4 + s % 2 + s % 4 / 2 * 32 : of_column + s / 2 * 4 + s % 2;
}

__device__ __forceinline__ float exact_float(u32 below_2_23) { return __uint_as_float(below_2_23 | 0x4b000000u) - 8388608.0f; }

// Largest sum and total over one column of keys for the whole warp. keys_left: keys from the column's block on.
__device__ __forceinline__ void column_statistics(const u32 (&sums)[SUMS], int column, int keys_left, float slope,
                                                  u32& top, float& total) {
    u32 packed = 0;
    if (keys_left >= KEYS_PER_BLOCK) {
#pragma unroll
        for (int s = 0; s < SUMS; ++s) packed = __vmaxu2(packed, sums[s]);
    } else {
#pragma unroll
        for (int s = 0; s < SUMS; ++s) {
            const u32 low = first_key(column, s) < keys_left ? sums[s] & 0xffffu : 0;
            const u32 high = first_key(column, s) + 2 < keys_left ? sums[s] & 0xffff0000u : 0;
            packed = __vmaxu2(packed, low | high);
        }
    }
    top = __reduce_max_sync(ALL_LANES, max(packed & 0xffffu, packed >> 16));
    float sum = 0;
    const float start = -static_cast<float>(top);
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
        const float low = power_of_two(slope * (exact_float(sums[s] & 0xffffu) + start));
        const float high = power_of_two(slope * (exact_float(sums[s] >> 16) + start));
        if (first_key(column, s) < keys_left) sum += low;
        if (first_key(column, s) + 2 < keys_left) sum += high;
    }
    total = sum_over_warp(sum);
}

// Score the block's columns for the whole group: cells hold the sums; tops and totals [GROUP_SIZE][num_tiles] the
// statistics of each 32 columns.
__device__ void score_rows(const u8* head_rows, const QueryRow* query_rows, int first_column, int num_columns, int num_keys,
                           const Cells& cells, u32* tops, float* totals) {
    const int lane = threadIdx.x % 32;
    const int num_tiles = (num_columns + 31) / 32;
    for (int work = threadIdx.x / 32; work < num_tiles * GROUP_SIZE; work += WARPS) {
        const int g = work % GROUP_SIZE, tile = work / GROUP_SIZE, column = tile * 32 + lane;
        const QueryRow& row = query_rows[g];
        u32 sums[SUMS];
#pragma unroll
        for (int s = 0; s < SUMS; ++s) sums[s] = 0u - row.total_weight * 0x00010001u;
        int keys_left = 0;
        if (column < num_columns) {
            const u8* start = head_rows + static_cast<size_t>(first_column + column) * 16;
#pragma unroll 8
            for (int b = 0; b < SUBSPACES; ++b)
                add_codes(sums, __ldg(reinterpret_cast<const uint4*>(start + row.rows[b].offset)), row.rows[b].weight);
#pragma unroll
            for (int quad = 0; quad < QUADS; ++quad)
                *cells.at(g, quad, column) =
                    make_uint4(sums[4 * quad], sums[4 * quad + 1], sums[4 * quad + 2], sums[4 * quad + 3]);
            keys_left = num_keys - (first_column + column) / BLOCK_COLUMNS * KEYS_PER_BLOCK;
        }
        u32 top;
        float total;
        column_statistics(sums, column, keys_left, row.slope, top, total);
        if (lane == 0) {
            tops[g * num_tiles + tile] = top;
            totals[g * num_tiles + tile] = total;
        }
    }
}

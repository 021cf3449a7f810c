// Products of queries with the codes of a sketch's keys: see csattn.sketch.codes for how codes lie in memory.
//
// Compiled for FINE and COARSE, the words of a key, and TILE_KEYS, those that are summed up together.
//
// On tensor cores: rows are up to 16 queries, in two octets, columns are keys; of both, a lane has row r = lane / 4 (of each
// octet) and, in its registers, what c = lane % 4 says. A lane reads, of 32 keys, words c, c + 4, ... of the four keys 4 r ...,
// and gets scores of the eight keys 8 c ...

constexpr int BLOCK_KEYS = 64, HALF_KEYS = 32;
static_assert(1024 % TILE_KEYS == 0 && TILE_KEYS % BLOCK_KEYS == 0, "segments begin where tiles do");
constexpr int WORDS = FINE + COARSE, COORDS = 8 * FINE + 16 * COARSE;
constexpr int FINE_GROUPS = (FINE + 3) / 4, COARSE_GROUPS = (COARSE + 3) / 4;  // of four words, one for each c
constexpr int WORD_GROUPS = FINE_GROUPS + COARSE_GROUPS;
constexpr int PRODUCTS = FINE_GROUPS + 2 * COARSE_GROUPS;  // of 32 coordinates each
constexpr int SUMS = 32 * FINE_GROUPS + 4;  // of a query over keys: see `ValueSums`
constexpr int BIAS = 32768;                 // scores are stored without sign, in 16 bits
constexpr int SCORE_BITS = 0x4b000000 + BIAS;  // of a score of 0: as a float, it is 2 ** 23 + BIAS + score

// A context's sketch of one layer. Addresses come from a table in device memory, so that a captured graph follows them when
// another context takes the place.
struct Sketch {
    const u32* codes;               // [num_heads, num_blocks, WORDS, BLOCK_KEYS]
    const int* segment_starts;      // [num_segments]
    const float* key_mean;          // [num_heads, num_segments, HEAD_DIM]
    const u16* query_transform;     // [num_heads, num_segments, HEAD_DIM, COORDS] halves
    const float* value_mean;        // [num_heads, num_segments, HEAD_DIM]
    const u16* value_transform;     // [num_heads, num_segments, COORDS, HEAD_DIM] halves
    long long num_segments;

    // For `wait_for_earlier`: the table has been read.
    __device__ __forceinline__ u32 low_bits() const { return static_cast<u32>(reinterpret_cast<u64>(codes)); }

    // For the whole warp: the segment that a key lies in.
    __device__ __forceinline__ int segment_of(int key) const {
        int found = 0;
        for (int first = 0; first < num_segments; first += 32) {
            const int segment = first + threadIdx.x % 32;
            found += __popc(__ballot_sync(ALL_LANES, segment < num_segments && segment_starts[segment] <= key));
        }
        return found - 1;
    }
    __device__ __forceinline__ int segment_end(int segment, int num_keys) const {
        return segment + 1 < num_segments ? segment_starts[segment + 1] : num_keys;
    }
};

// The queries of a batch in integers, as make_integers leaves them.
struct Queries {
    const u32* multipliers;  // [slots, max_segments, GROUP_SIZE, COORDS / 4]: signed bytes
    const int* offsets;      // [slots, max_segments, GROUP_SIZE]: of scores as `score_half` gives them
    const float* slopes;     // [slots, GROUP_SIZE]: a logit, base 2, grows by it with each unit of score
    long long max_segments;
};

// Up to 16 queries.
struct QueryRows {
    u32 multipliers[PRODUCTS][4];
    int offsets[4];  // in each octet, twice
    float slopes[2];

    // The first of the lane's eight neighbouring coordinates in a product; COORDS where it has none.
    __device__ __forceinline__ static int coordinate(int product) {
        const int c = threadIdx.x % 4;
        if (product < FINE_GROUPS) return 4 * product + c < FINE ? 8 * (4 * product + c) : COORDS;
        const int group = (product - FINE_GROUPS) / 2, word = 4 * group + c;
        return word < COARSE ? 8 * FINE + 16 * word + (product - FINE_GROUPS) % 2 * 8 : COORDS;
    }

    // The lane's row of an octet in a segment; any query where it has none. Words come one by one: of two that are loaded
    // together, neither could stay where products want it.
    __device__ __forceinline__ void load(int octet, const Queries& queries, int slot, int g, int segment) {
        const long long of_segment = (slot * queries.max_segments + segment) * GROUP_SIZE + g;
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            const bool there = coordinate(i) < COORDS;
            const u32* words = queries.multipliers + (of_segment * COORDS + (there ? coordinate(i) : 0)) / 4;
            multipliers[i][octet] = there ? __ldcg(words) : 0;
            multipliers[i][octet + 2] = there ? __ldcg(words + 1) : 0;
        }
        offsets[2 * octet] = __ldcg(queries.offsets + of_segment);
        offsets[2 * octet + 1] = __ldcg(queries.offsets + of_segment);
        slopes[octet] = queries.slopes[slot * GROUP_SIZE + g];
    }
};

__device__ __forceinline__ u32 word_of(uint4 words, int t) {
    return t == 0 ? words.x : t == 1 ? words.y : t == 2 ? words.z : words.w;
}

// Scores of 32 keys, as SCORE_BITS + score: scores[o][i] is that of key 8 c + i with the lane's row of octet o.
template <int OCTETS>
__device__ __forceinline__ void score_half(const uint4 (&words)[WORD_GROUPS], const QueryRows& rows, u32 (&scores)[OCTETS][8]) {
    constexpr u32 FINE_MASK = 0x1e1e1e1e, COARSE_MASK = 0x06060606;  // codes come doubled
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        int d[4];
#pragma unroll
        for (int i = 0; i < FINE_GROUPS; ++i) {
            const u32 word = word_of(words[i], t), low = word << 1 & FINE_MASK, high = word >> 3 & FINE_MASK;
            if (i == 0)
                multiply_codes(d, rows.multipliers[i], low, high, rows.offsets);
            else
                multiply_codes(d, rows.multipliers[i], low, high, d);
        }
#pragma unroll
        for (int i = 0; i < COARSE_GROUPS; ++i) {
            const u32 word = word_of(words[FINE_GROUPS + i], t);
            const u32 codes[4] = {word << 1 & COARSE_MASK, word >> 1 & COARSE_MASK, word >> 3 & COARSE_MASK,
                                  word >> 5 & COARSE_MASK};
            multiply_codes(d, rows.multipliers[FINE_GROUPS + 2 * i], codes[0], codes[1], d);
            multiply_codes(d, rows.multipliers[FINE_GROUPS + 2 * i + 1], codes[2], codes[3], d);
        }
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) scores[o][t] = d[2 * o], scores[o][4 + t] = d[2 * o + 1];
    }
}

// A score's number, exactly.
__device__ __forceinline__ float number_of(u32 score) { return __uint_as_float(score) - (8388608.0f + BIAS); }

__device__ __forceinline__ float weight_of(u32 score, float slope, float exponent) {
    return power_of_two(fmaf(slope, number_of(score), -exponent));
}

// Where a lane keeps the 16 bytes that it has loaded of a group of words: another reads them without bank conflicts.
__device__ __forceinline__ int place_of(int lane) { return lane ^ lane >> 3; }

// Sums over keys of weights and of weights times codes, by query: bfloat16 products on tensor cores. A code u comes as
// 128 + u. The rows of a product are coordinates, its columns the queries of an octet: a lane has those of queries 2 c and
// 2 c + 1. Of a query, number 32 v + 4 r + i is the sum of coordinate `coordinate_of(...)`, the first after them that of weights.
template <int OCTETS> struct ValueSums {
    float of_codes[OCTETS][FINE_GROUPS][2][4], of_ones[OCTETS][4];

    __device__ __forceinline__ void clear() {
        for_each([](float& sum, int) { sum = 0; });
    }
    // use(sum, 0 or 1): of the lane's first or second query
    template <typename Use> __device__ __forceinline__ void for_each_of(int o, Use use) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int v = 0; v < FINE_GROUPS; ++v)
                for (int tile = 0; tile < 2; ++tile) use(of_codes[o][v][tile][k], k % 2);
            use(of_ones[o][k], k % 2);
        }
    }
    template <typename Use> __device__ __forceinline__ void for_each(Use use) {
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) for_each_of(o, use);
    }

    // words: of 32 keys, as lanes have placed them, by group; weights[o]: of the lane's eight keys and row, two by two.
    __device__ __forceinline__ void add(const uint4* words, int to_next_group, const u32 (&weights)[OCTETS][4]) {
        const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        const u32 half_of_two = r % 2 ? 0x7632 : 0x5410;
#pragma unroll
        for (int v = 0; v < FINE_GROUPS; ++v) {
            const uint4 x = words[v * to_next_group + place_of(8 * c + r / 2)];
            const uint4 y = words[v * to_next_group + place_of(8 * c + 4 + r / 2)];
            const u32 pairs[4] = {__byte_perm(x.x, x.y, half_of_two), __byte_perm(x.z, x.w, half_of_two),
                                  __byte_perm(y.x, y.y, half_of_two), __byte_perm(y.z, y.w, half_of_two)};
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const u32 a = pairs[2 * step] >> 8 * tile, b = pairs[2 * step + 1] >> 8 * tile;
                    const u32 codes[4] = {code_pair(a), code_pair(a >> 4), code_pair(b), code_pair(b >> 4)};
#pragma unroll
                    for (int o = 0; o < OCTETS; ++o)
                        multiply_values(of_codes[o][v][tile], codes, weights[o][2 * step], weights[o][2 * step + 1]);
                }
        }
        constexpr u32 ONES[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
#pragma unroll
        for (int o = 0; o < OCTETS; ++o)
            for (int step = 0; step < 2; ++step) multiply_values(of_ones[o], ONES, weights[o][2 * step], weights[o][2 * step + 1]);
    }

    // Of the lane's query 2 c + e of an octet: [SUMS].
    __device__ __forceinline__ void store(int o, int e, float* sums) const {
        const int r = threadIdx.x % 32 / 4;
#pragma unroll
        for (int v = 0; v < FINE_GROUPS; ++v)
            *reinterpret_cast<float4*>(sums + 32 * v + 4 * r) = make_float4(of_codes[o][v][0][e], of_codes[o][v][0][2 + e],
                                                                             of_codes[o][v][1][e], of_codes[o][v][1][2 + e]);
        if (r == 0) sums[32 * FINE_GROUPS] = of_ones[o][e];
    }

    // One operation, where the compiler keeps a mask in a register.
    __device__ __forceinline__ static u32 code_pair(u32 pair) { return and_or(pair, 0x000f000fu, 0x43004300u); }
};

// The coordinate of a query's sum number i; it may lie beyond the fine ones.
__device__ __forceinline__ int coordinate_of(int i) {
    const int r = i % 32 / 4, nibble = i % 4;
    return 8 * (i / 32 * 4 + r / 2) + r % 2 * 2 + nibble % 2 * 4 + nibble / 2;
}

// Products of queries with the codes of a sketch's keys, on tensor cores. csattn.sketch.codes defines how codes lie in memory,
// `place_of_piece` in which order a device has them.
//
// Compiled for FINE and COARSE, the words of 4-bit and of 2-bit codes of a key, and TILE_KEYS, the keys that are summed together.
//
// The rows of a product are up to 16 queries, in two octets; its columns are keys. A lane holds operands of row r = lane / 4 (of each
// octet) and of column r; c = lane % 4 says which. Of 32 keys it reads words c, c + 4, ... of the four keys from 4 r on, and gets the
// scores of the eight keys from 8 c on.
#pragma once

#include "common.cuh"

constexpr int BLOCK_KEYS = 64, HALF_KEYS = 32;
static_assert(1024 % TILE_KEYS == 0 && TILE_KEYS % BLOCK_KEYS == 0, "segments begin where tiles do");
constexpr int WORDS = FINE + COARSE, COORDS = 8 * FINE + 16 * COARSE;
constexpr int FINE_GROUPS = (FINE + 3) / 4, COARSE_GROUPS = (COARSE + 3) / 4;  // of four words, one for each c
constexpr int WORD_GROUPS = FINE_GROUPS + COARSE_GROUPS;
constexpr int PRODUCTS = FINE_GROUPS + 2 * COARSE_GROUPS;  // of 32 coordinates each
constexpr int SUMS = 32 * FINE_GROUPS + 4;  // sums of a query over keys: see `ValueSums`
constexpr int LEAST_OCTAVE = -32;  // of reference.normaliser
constexpr int NUM_OCTAVES = 128;   // in which scores are counted: the last one also has those above it
constexpr int BIAS = 32768;                 // added to scores, which are stored unsigned, in 16 bits
constexpr int SCORE_BITS = 0x4b000000 + BIAS;  // the bits of a score of 0: as a float, a score is 2 ** 23 + BIAS + score

// The addresses of a context's sketch of one layer. They are read from a table in device memory, so that a captured graph follows
// them when another context takes the place.
struct Sketch {
    const u32* codes;               // [num_heads, num_blocks, WORDS, BLOCK_KEYS]: see `place_of_piece`
    const int* segment_starts;      // [num_segments]
    const float* key_mean;          // [num_heads, num_segments, HEAD_DIM]
    const u16* query_transform;     // [num_heads, num_segments, HEAD_DIM, COORDS] halves
    const float* value_mean;        // [num_heads, num_segments, HEAD_DIM]
    const u16* value_transform;     // [num_heads, num_segments, COORDS, HEAD_DIM] halves
    const u8* marks;                // [num_heads, num_blocks, BLOCK_KEYS / 8]
    long long num_segments;

    // For `wait_then_let_next_start`: depends on the table having been read.
    __device__ __forceinline__ u32 low_bits() const { return static_cast<u32>(reinterpret_cast<u64>(codes)); }

    // By the whole warp: the segment of a key.
    __device__ __forceinline__ int segment_of(int key) const {
        int found = 0;
#pragma unroll 1
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

// The queries of a batch, in octaves, as project_queries leaves them.
struct Queries {
    const float* coordinates;  // [slots, max_segments, GROUP_SIZE, COORDS]: what a step of a code adds to a logit
    const float* means;        // [slots, max_segments, GROUP_SIZE]: products with the mean keys
    const u8* unit_exponents;  // [slots, GROUP_SIZE, max_segments]: of required units, + LARGEST_EXPONENT; or NO_UNIT
    long long max_segments;    // a multiple of 16
};
constexpr int LARGEST_EXPONENT = 15;  // of a unit of score; the least is its negative
constexpr u8 NO_UNIT = 255;           // of a query that is not finite or too large: the unit ignores it, its scores are 0

// In each half, the greatest of `halves` and the half's two bytes.
__device__ __forceinline__ u32 greatest_bytes(u32 bytes, u32 halves) {
    return __vmaxu2(halves, __vmaxu2(bytes & 0x00ff00ffu, bytes >> 8 & 0x00ff00ffu));
}

// The unit of a group's scores, and which of its queries fit it.
struct Unit {
    int exponent = 0;
    u32 fits = 0;  // a bit for each query

    Unit() = default;
    // By every four neighbouring lanes; all lanes of the warp take part.
    __device__ __forceinline__ Unit(const Queries& queries, int slot) {
        const int num_pieces = static_cast<int>(queries.max_segments / 16);
        const uint4* exponents = reinterpret_cast<const uint4*>(queries.unit_exponents) + slot * GROUP_SIZE * num_pieces;
        u32 halves[GROUP_SIZE] = {};
#pragma unroll 1
        for (int i = threadIdx.x % 4; i < num_pieces; i += 4) {
            uint4 pieces[GROUP_SIZE];
#pragma unroll
            for (int g = 0; g < GROUP_SIZE; ++g) pieces[g] = __ldcg(exponents + g * num_pieces + i);
#pragma unroll
            for (int g = 0; g < GROUP_SIZE; ++g) {
                const u32 two = greatest_bytes(pieces[g].x, greatest_bytes(pieces[g].y, halves[g]));
                halves[g] = greatest_bytes(pieces[g].z, greatest_bytes(pieces[g].w, two));
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP_SIZE; ++g) {
            for (int step = 1; step < 4; step <<= 1) halves[g] = __vmaxu2(halves[g], __shfl_xor_sync(ALL_LANES, halves[g], step));
            const int greatest = static_cast<int>(max(halves[g] & 0xffff, halves[g] >> 16));
            if (greatest != NO_UNIT) exponent = max(exponent, greatest), fits |= 1u << g;
        }
        exponent -= LARGEST_EXPONENT;
    }
    __device__ __forceinline__ float octaves() const { return __int_as_float(127 + exponent << 23); }
    __device__ __forceinline__ float per_octave() const { return __int_as_float(127 - exponent << 23); }
};

// Up to 16 queries as integers.
struct QueryRows {
    u32 multipliers[PRODUCTS][4];
    int offsets[4];    // twice for each octet
    float slopes[2];   // octaves of a unit of score, a power of two
    int exponents[2];  // its exponent

    // The first of the lane's eight neighbouring coordinates in a product; COORDS where it has none.
    __device__ __forceinline__ static int coordinate(int product) {
        const int c = threadIdx.x % 4;
        if (product < FINE_GROUPS) return 4 * product + c < FINE ? 8 * (4 * product + c) : COORDS;
        const int group = (product - FINE_GROUPS) / 2, word = 4 * group + c;
        return word < COARSE ? 8 * FINE + 16 * word + (product - FINE_GROUPS) % 2 * 8 : COORDS;
    }

    // Four numbers times factor, rounded to signed bytes.
    __device__ __forceinline__ static u32 rounded(float4 x, float factor) {
        const u32 low = __byte_perm(__float2int_rn(x.x * factor), __float2int_rn(x.y * factor), 0x0040);
        const u32 high = __byte_perm(__float2int_rn(x.z * factor), __float2int_rn(x.w * factor), 0x0040);
        return __byte_perm(low, high, 0x5410);
    }
    // The sum of four signed bytes.
    __device__ __forceinline__ static int sum_of_bytes(u32 bytes) { return __dp4a(static_cast<int>(bytes), 0x01010101, 0); }

    // Load the lane's row of an octet for a segment; if it has none, any query. unit: of the slot. All lanes of the warp take part.
    __device__ __forceinline__ void load(int octet, const Queries& queries, const Unit& unit, int slot, int g, int segment) {
        const long long of_slot = slot * queries.max_segments * GROUP_SIZE, of_segment = of_slot + segment * GROUP_SIZE + g;
        const float4* row = reinterpret_cast<const float4*>(queries.coordinates + of_segment * COORDS);
        float4 fours[PRODUCTS][2];  // all loads are issued before any result is used
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            const int first = coordinate(i) < COORDS ? coordinate(i) / 4 : 0;
            fours[i][0] = __ldcg(row + first), fours[i][1] = __ldcg(row + first + 1);
        }
        const float mean = __ldcg(queries.means + of_segment), first_mean = __ldcg(queries.means + of_slot + g);
        const float per_octave = unit.fits >> g & 1 ? unit.per_octave() : 0.0f;
        int excess = 0;  // twice what a key with all codes 0 would subtract: a code u stands for u - 7.5 or u - 1.5
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            const float factor = coordinate(i) < COORDS ? per_octave : 0.0f;
            multipliers[i][octet] = factor == 0 ? 0 : rounded(fours[i][0], factor);
            multipliers[i][octet + 2] = factor == 0 ? 0 : rounded(fours[i][1], factor);
            const int sum = sum_of_bytes(multipliers[i][octet]) + sum_of_bytes(multipliers[i][octet + 2]);
            excess += sum * (i < FINE_GROUPS ? 15 : 3);
        }
        for (int step = 1; step < 4; step <<= 1) excess += __shfl_xor_sync(ALL_LANES, excess, step);
        const double difference = static_cast<double>(mean) - static_cast<double>(first_mean);
        const int shift = per_octave == 0 ? 0 : static_cast<int>(rint(difference * per_octave));
        offsets[2 * octet] = offsets[2 * octet + 1] = SCORE_BITS + shift - (excess >> 1);
        slopes[octet] = unit.octaves(), exponents[octet] = unit.exponent;
    }
    // If there are no queries in the second octet.
    __device__ __forceinline__ void clear_second() {
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) multipliers[i][1] = multipliers[i][3] = 0;
        offsets[2] = offsets[3] = SCORE_BITS;
        slopes[1] = slopes[0], exponents[1] = exponents[0];
    }
};

// d = c + the products of the rows with word t of each group: those of one of the lane's four keys.
__device__ __forceinline__ void multiply_words(int (&d)[4], const u32 (&multipliers)[PRODUCTS][4], const uint4 (&words)[WORD_GROUPS], int t,
                                               const int (&c)[4]) {
    constexpr u32 FINE_MASK = 0x0f0f0f0f, COARSE_MASK = 0x03030303;
#pragma unroll
    for (int i = 0; i < FINE_GROUPS; ++i) {
        const u32 word = word_of(words[i], t), low = word & FINE_MASK, high = word >> 4 & FINE_MASK;
        if (i == 0)
            multiply_codes(d, multipliers[i], low, high, c);
        else
            multiply_codes(d, multipliers[i], low, high, d);
    }
#pragma unroll
    for (int i = 0; i < COARSE_GROUPS; ++i) {
        const u32 word = word_of(words[FINE_GROUPS + i], t);
        const u32 codes[4] = {word & COARSE_MASK, word >> 2 & COARSE_MASK, word >> 4 & COARSE_MASK,
                              word >> 6 & COARSE_MASK};
        multiply_codes(d, multipliers[FINE_GROUPS + 2 * i], codes[0], codes[1], d);
        multiply_codes(d, multipliers[FINE_GROUPS + 2 * i + 1], codes[2], codes[3], d);
    }
}

// The scores of 32 keys, as SCORE_BITS + score: scores[o][i] is that of key 8 c + i with the lane's row of octet o.
template <int OCTETS>
__device__ __forceinline__ void score_half(const uint4 (&words)[WORD_GROUPS], const QueryRows& rows, u32 (&scores)[OCTETS][8]) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        int d[4];
        multiply_words(d, rows.multipliers, words, t, rows.offsets);
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) scores[o][t] = d[2 * o], scores[o][4 + t] = d[2 * o + 1];
    }
}

// Up to four rows, each twice in an octet, 16 lanes apart: the first copies score 32 keys, the second copies 32 others. Multipliers
// of 0 cancel the keys that are the other copy's.
struct TwinRows {
    u32 first[PRODUCTS][4], second[PRODUCTS][4];
    int offsets[4];

    __device__ __forceinline__ void load(const QueryRows& rows) {
        const bool is_second = threadIdx.x % 32 >= 16;
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 multiplier = k % 2 ? 0 : rows.multipliers[i][k];
                first[i][k] = in_register(is_second ? 0 : multiplier), second[i][k] = in_register(is_second ? multiplier : 0);
            }
#pragma unroll
        for (int k = 0; k < 4; ++k) offsets[k] = static_cast<int>(in_register(static_cast<u32>(rows.offsets[0])));
    }
    // A product takes four neighbouring registers. Equal or constant numbers the compiler would keep once, and copy every time.
    __device__ __forceinline__ static u32 in_register(u32 x) { return __shfl_sync(ALL_LANES, x, threadIdx.x % 32); }
    __device__ __forceinline__ void score(const uint4 (&words)[WORD_GROUPS], const uint4 (&others)[WORD_GROUPS],
                                          u32 (&scores)[1][8]) const {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            int d[4];
            multiply_words(d, first, words, t, offsets);
            multiply_words(d, second, others, t, d);
            scores[0][t] = d[0], scores[0][4 + t] = d[1];
        }
    }
};

// The octave of a score in 16 bits.
__device__ __forceinline__ int octave_of(u32 score, int exponent) {
    const int octave = (static_cast<int>(score) - BIAS) * (1 << max(exponent, 0)) >> max(-exponent, 0);
    return max(octave, LEAST_OCTAVE);
}

// The exact value of a score that comes as SCORE_BITS + score.
__device__ __forceinline__ float number_of(u32 score) { return __uint_as_float(score) - (8388608.0f + BIAS); }

__device__ __forceinline__ float weight_of(u32 score, float slope, float exponent) {
    return exp2_approx(fmaf(slope, number_of(score), -exponent));
}

constexpr int PIECE_KEYS = 4, WORD_PIECES = BLOCK_KEYS / PIECE_KEYS, HALF_PIECES = WORD_PIECES / 2;  // of 16 bytes

// Where a block's piece of a word lies among the word's pieces: lanes that read the same pieces of different words then read different
// banks of shared memory. See `place_codes` of indexes.py.
__device__ __forceinline__ int place_of_piece(int word, int piece) { return piece ^ 2 * (word % 4); }

// The word of a group that lanes with that c have; the last of its kind if there is none.
__device__ __forceinline__ int word_in_group(int group, int c) {
    return group < FINE_GROUPS ? min(4 * group + c, FINE - 1) : FINE + min(4 * (group - FINE_GROUPS) + c, COARSE - 1);
}

// The byte offsets of what a lane reads in the first half of a block: its own words, and those that its sums are made of.
struct LanePlaces {
    u32 own[WORD_GROUPS], summed[FINE_GROUPS];

    __device__ __forceinline__ LanePlaces() {
        const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll
        for (int i = 0; i < WORD_GROUPS; ++i) own[i] = keep_in_register(in_block(word_in_group(i, c), r));
#pragma unroll
        for (int v = 0; v < FINE_GROUPS; ++v) summed[v] = keep_in_register(in_block(word_in_group(v, r / 2), 2 * c));
    }
    __device__ __forceinline__ static u32 in_block(int word, int piece) { return 16 * (word * WORD_PIECES + place_of_piece(word, piece)); }
    __device__ __forceinline__ static uint4 read(const uint4* words, u32 place) {
        return *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(words) + place);
    }
};

// Sums over keys of weights, and of weights times codes, by query: bfloat16 products on tensor cores. A code u comes as 128 + u. The
// rows of a product are coordinates, its columns the queries of an octet: a lane has those of queries 2 c and 2 c + 1. A query's sum
// number 32 v + 4 r + i is that of coordinate `coordinate_of(number)`; the first after these is that of weights.
template <int OCTETS> struct ValueSums {
    float of_codes[OCTETS][FINE_GROUPS][2][4], of_ones[OCTETS][4];

    __device__ __forceinline__ void clear() {
        for_each([](float& sum, int) { sum = 0; });
    }
    // use(sum, 0 or 1), for sums of the lane's first or second query
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

    // half: 32 keys of a block; weights[o]: of the lane's eight keys and row, in pairs.
    __device__ __forceinline__ void add(const uint4* half, const LanePlaces& places, const u32 (&weights)[OCTETS][4]) {
        const u32 half_of_two = threadIdx.x / 4 % 2 ? 0x7632 : 0x5410;
#pragma unroll
        for (int v = 0; v < FINE_GROUPS; ++v) {
            const uint4 x = places.read(half, places.summed[v]), y = places.read(half, places.summed[v] + 16);
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

    // Write the sums [SUMS] of the lane's query 2 c + e of an octet.
    __device__ __forceinline__ void store(int o, int e, float* sums) const {
        const int r = threadIdx.x % 32 / 4;
#pragma unroll
        for (int v = 0; v < FINE_GROUPS; ++v)
            *reinterpret_cast<float4*>(sums + 32 * v + 4 * r) = make_float4(of_codes[o][v][0][e], of_codes[o][v][0][2 + e],
                                                                             of_codes[o][v][1][e], of_codes[o][v][1][2 + e]);
        if (r == 0) sums[32 * FINE_GROUPS] = of_ones[o][e];
    }

    // One instruction, if the compiler keeps a mask in a register.
    __device__ __forceinline__ static u32 code_pair(u32 pair) { return and_or(pair, 0x000f000fu, 0x43004300u); }
};

// The coordinate of a query's sum number i; it may be past the fine ones.
__device__ __forceinline__ int coordinate_of(int i) {
    const int r = i % 32 / 4, nibble = i % 4;
    return 8 * (i / 32 * 4 + r / 2) + r % 2 * 2 + nibble % 2 * 4 + nibble / 2;
}

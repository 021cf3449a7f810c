// After a search: attention by codes to the rows that are neither resident nor chosen, in parts that attend_step merges.
//
// score_codes has summed over all rows that may be chosen. Here the chosen ones are subtracted again: the same functions make their
// weights and codes, so that what is subtracted is what was added, to the bit. A block has the tiles of one part.

#include "codes.cuh"

constexpr int PART = HEAD_DIM + 4;   // floats of a part: the unnormalised output, then its exponent and the sum of its weights
constexpr int OCTETS = GROUP_SIZE > 8 ? 2 : 1;
constexpr int NUM_SUMS = SUMS - 3, WEIGHTS_AT = 32 * FINE_GROUPS;  // sums of a query, and where that of its weights is
constexpr int TRANSFORM_UNITS = STAGED ? COORDS * HEAD_DIM / 8 : 0;  // of 16 bytes: in shared memory, if there is room
constexpr float LEAST_LEFT = 1.0f / (1 << 18);  // of a sum of weights: a remainder below this share is rounding error

struct Part {
    int first_tile, end_tile;
};

struct Bounds {
    int first, end;
};

// By the whole block: which of `num` ascending ids lie in [first_key, end_key). scratch: [WARPS].
__device__ Bounds bounds_of(const int* ids, int num, int first_key, int end_key, u32* scratch) {
    int first = 0, end = 0, step = num;  // both bounds are at most a step further
#pragma unroll 1
    while (step > 0) {
        const int each = (step + THREADS - 1) / THREADS;
        const int at = (threadIdx.x + 1) * each - 1;
        u32 before = 0, passed;
        if (at < step) {
            before |= first + at < num && ids[first + at] < first_key ? 1u : 0u;
            before |= end + at < num && ids[end + at] < end_key ? 0x10000u : 0u;
        }
        sum_before(before, scratch, passed);
        first += (passed & 0xffff) * each;
        end += (passed >> 16) * each;
        step = each - 1;
    }
    return {first, end};
}

// A lane's four of 32 chosen keys; `load` loads their words as score_half takes them.
struct ChosenKeys {
    int ids[4];

    __device__ __forceinline__ ChosenKeys(const int* chosen, int first, int end) {
        const int r = threadIdx.x % 32 / 4;
#pragma unroll
        for (int t = 0; t < 4; ++t) ids[t] = chosen[min(first + 4 * r + t, end - 1)];
    }
    __device__ __forceinline__ void load(const Sketch& sketch, long long first_block, uint4 (&words)[WORD_GROUPS]) const {
        const int c = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < WORD_GROUPS; ++i) {
            const int word = word_in_group(i, c);
            auto of_key = [&](int t) {
                const u32* block = sketch.codes + (first_block + ids[t] / BLOCK_KEYS) * (WORDS * BLOCK_KEYS);
                const int key = ids[t] % BLOCK_KEYS;
                return block[word * BLOCK_KEYS + place_of_piece(word, key / PIECE_KEYS) * PIECE_KEYS + key % PIECE_KEYS];
            };
            words[i] = make_uint4(of_key(0), of_key(1), of_key(2), of_key(3));
        }
    }
};

// By each warp: sum over its share of the chosen rows of a segment. of_warp: [GROUP_SIZE][SUMS], written.
__device__ __forceinline__ void sum_chosen(const Sketch& sketch, const QueryRows& rows, int head, int num_keys, const int* ids,
                                           const Bounds& chosen, const float* exponents, uint4* tray, float* of_warp) {
    constexpr int STEP = WARPS * HALF_KEYS, AHEAD = 2;  // words are loaded so many steps ahead, keys one more
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    const long long first_block = static_cast<long long>(head) * ((num_keys + BLOCK_KEYS - 1) / BLOCK_KEYS);
    const LanePlaces places;
    ValueSums<OCTETS> values;
    values.clear();
    int first = chosen.first + threadIdx.x / 32 * HALF_KEYS;
    uint4 next_words[AHEAD][WORD_GROUPS];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) ChosenKeys(ids, first + a * STEP, chosen.end).load(sketch, first_block, next_words[a]);
    ChosenKeys next_keys(ids, first + AHEAD * STEP, chosen.end);
    auto add_step = [&](uint4 (&next_words)[WORD_GROUPS]) {
        uint4 words[WORD_GROUPS];
        u32 scores[OCTETS][8], weights[OCTETS][4];
#pragma unroll
        for (int i = 0; i < WORD_GROUPS; ++i) words[i] = next_words[i];
        if (first + AHEAD * STEP < chosen.end) {
            next_keys.load(sketch, first_block, next_words);
            next_keys = ChosenKeys(ids, first + (AHEAD + 1) * STEP, chosen.end);
        }
        __syncwarp();  // all lanes have read the words before
#pragma unroll
        for (int i = 0; i < FINE_GROUPS; ++i) tray[places.own[i] / 16] = words[i];
        __syncwarp();
        score_half<OCTETS>(words, rows, scores);
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) {
            const float exponent = exponents[min(8 * o + r, GROUP_SIZE - 1)];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = first + 8 * c + 2 * i;
                const float low = weight_of(scores[o][2 * i], rows.slopes[o], exponent);
                const float high = weight_of(scores[o][2 * i + 1], rows.slopes[o], exponent);
                weights[o][i] = pack_bf16(at < chosen.end ? low : 0.0f, at + 1 < chosen.end ? high : 0.0f);
            }
        }
        values.add(tray, places, weights);
        first += STEP;
    };
#pragma unroll 1
    while (first < chosen.end)
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)  // words stay in their registers: copying those that are on their way would wait for them
            if (first < chosen.end) add_step(next_words[a]);
#pragma unroll
    for (int o = 0; o < OCTETS; ++o)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (8 * o + 2 * c + e < GROUP_SIZE) values.store(o, e, of_warp + (8 * o + 2 * c + e) * SUMS);
}

// A part's exponents: the greatest of its tiles'. A warp for each query.
__device__ void find_exponents(const float* tile_exponents, long long max_tiles, const Part& part, float* exponents) {
    for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
        float top = -1e30f;
#pragma unroll 1
        for (int t = part.first_tile + threadIdx.x % 32; t < part.end_tile; t += 32)
            top = fmaxf(top, __ldcg(tile_exponents + g * max_tiles + t));
        for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        if (threadIdx.x % 32 == 0) exponents[g] = top;
    }
}

// Add up the sums of neighbouring tiles, rescaled to the part's exponents: all [GROUP_SIZE][SUMS]. Warps divide the tiles, lanes the
// sums, four at a time. scratch: [WARPS][GROUP_SIZE][SUMS].
__device__ void sum_tiles(const float* sums, const float* tile_exponents, long long max_tiles, int first_tile, int end_tile,
                          const float* exponents, float* scratch, float (*all)[SUMS]) {
    constexpr int FOURS = GROUP_SIZE * (SUMS / 4), EACH = (FOURS + 31) / 32, TOGETHER = EACH < 6 ? EACH : 6;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = lane; first < FOURS; first += 32 * TOGETHER) {
        float4 sum[TOGETHER] = {};
#pragma unroll 2
        for (int t = first_tile + warp; t < end_tile; t += WARPS) {
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) {
                const int i = min(first + 32 * k, FOURS - 1), g = i / (SUMS / 4), j = i % (SUMS / 4) * 4;
                const float4 four = __ldcg(reinterpret_cast<const float4*>(sums + (g * max_tiles + t) * SUMS + j));
                const float factor = exp2_approx(__ldcg(tile_exponents + g * max_tiles + t) - exponents[g]);
                sum[k].x += four.x * factor, sum[k].y += four.y * factor, sum[k].z += four.z * factor, sum[k].w += four.w * factor;
            }
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k)
            if (first + 32 * k < FOURS) reinterpret_cast<float4*>(scratch)[warp * FOURS + first + 32 * k] = sum[k];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP_SIZE * NUM_SUMS; i += THREADS) {
        const int at = i / NUM_SUMS * SUMS + i % NUM_SUMS;
        float sum = 0;
        for (int w = 0; w < WARPS; ++w) sum += scratch[w * GROUP_SIZE * SUMS + at];
        all[i / NUM_SUMS][i % NUM_SUMS] = sum;
    }
    __syncthreads();
}

// Subtract the warps' sums over chosen rows; a remaining weight that is only rounding error becomes 0.
__device__ void subtract_chosen(const float* chosen_sums, int num_warps, float (*left)[SUMS]) {
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP_SIZE * NUM_SUMS; i += THREADS) {
        const int g = i / NUM_SUMS, j = i % NUM_SUMS;
        const float all = left[g][j];
        float sum = all;
#pragma unroll 1
        for (int w = 0; w < num_warps; ++w) sum -= chosen_sums[(w * GROUP_SIZE + g) * SUMS + j];
        left[g][j] = j == WEIGHTS_AT && !(sum > LEAST_LEFT * all) ? 0.0f : sum;
    }
}

// Predicts values from a segment's sums, in shared memory that a block's segments use one after the other.
struct Segment {
    static constexpr int TOGETHER = GROUP_SIZE < 4 ? GROUP_SIZE : 4;  // queries that a thread multiplies by what it has read
    uint4* transform;  // [COORDS][HEAD_DIM] halves, if STAGED, then a mean value
    float (*left)[SUMS];
    float (*codes)[COORDS];
    const u16* there;  // these halves in global memory

    // Start what does not need the choice: copies, and coarse codes, which are predicted from the query (reference.attend_rest).
    __device__ __forceinline__ void begin(const Sketch& sketch, int head, int segment, const float* coordinates) const {
        const long long here = head * sketch.num_segments + segment;
        const uint4* columns = reinterpret_cast<const uint4*>(there);
        const uint4* mean = reinterpret_cast<const uint4*>(sketch.value_mean + here * HEAD_DIM);
#pragma unroll 1
        for (int i = threadIdx.x; i < TRANSFORM_UNITS; i += THREADS) start_copy(transform + i, columns + i);
#pragma unroll 1
        for (int i = threadIdx.x; i < HEAD_DIM / 4; i += THREADS) start_copy(transform + TRANSFORM_UNITS + i, mean + i);
        end_copy_group();
#pragma unroll 1
        for (int i = threadIdx.x; i < GROUP_SIZE * 16 * COARSE; i += THREADS) {
            const int g = i / (16 * COARSE), j = 8 * FINE + i % (16 * COARSE);
            codes[g][j] = static_cast<float>(1 / LOG2_E) * coordinates[g * COORDS + j];
        }
    }

    // sums[k] += the products of codes [first, end) of TOGETHER queries with two columns; a missing query repeats the last one.
    __device__ __forceinline__ static void add_products(const u32* columns, const float (*codes)[COORDS], int num_queries, int first,
                                                        int end, float (&sums)[TOGETHER][2]) {
#pragma unroll 4
        for (int j = first; j < end; j += 4) {
            float4 of[TOGETHER];
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) of[k] = *reinterpret_cast<const float4*>(codes[min(k, num_queries - 1)] + j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 both = columns[(j + i) * (HEAD_DIM / 2)];
                const float low = half_as_float(static_cast<u16>(both)), high = half_as_float(static_cast<u16>(both >> 16));
#pragma unroll
                for (int k = 0; k < TOGETHER; ++k) {
                    const float code = reinterpret_cast<const float*>(of + k)[i];
                    sums[k][0] = fmaf(code, low, sums[k][0]);
                    sums[k][1] = fmaf(code, high, sums[k][1]);
                }
            }
        }
    }

    // Add the weighted values of the rest to out [GROUP_SIZE][HEAD_DIM], and their weights to `weights`.
    __device__ __forceinline__ void add(float (*out)[HEAD_DIM], float* weights) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < GROUP_SIZE * 32 * FINE_GROUPS; i += THREADS) {
            const int g = i / (32 * FINE_GROUPS), number = i % (32 * FINE_GROUPS), j = coordinate_of(number);
            const float weight = left[g][WEIGHTS_AT];
            if (j < 8 * FINE) codes[g][j] = weight == 0 ? 0 : left[g][number] - 128 * weight;  // codes u were summed as 128 + u
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < GROUP_SIZE * 16 * COARSE; i += THREADS) {
            const int g = i / (16 * COARSE), j = 8 * FINE + i % (16 * COARSE);
            const float weight = left[g][WEIGHTS_AT];
            codes[g][j] = weight == 0 ? 0 : codes[g][j] * weight;
        }
        wait_for_copies<0>();
        __syncthreads();
        const u32* columns = STAGED ? reinterpret_cast<const u32*>(transform) : reinterpret_cast<const u32*>(there);  // two dimensions each
        const float* mean = reinterpret_cast<const float*>(transform + TRANSFORM_UNITS);
        constexpr int PAIRS = HEAD_DIM / 2, ITEMS = (GROUP_SIZE + TOGETHER - 1) / TOGETHER * PAIRS;  // pairs of dimensions of all queries
        constexpr int SHARES = ITEMS * 2 <= THREADS ? 2 : 1;  // of the coordinates, each for other threads
        static_assert(COORDS % 8 == 0, "a share is whole fours");
#pragma unroll 1
        for (int first = 0; first < ITEMS * SHARES; first += THREADS) {
            const int i = first + threadIdx.x, d = i % PAIRS * 2, g0 = i % ITEMS / PAIRS * TOGETHER, share = i / ITEMS;
            float sums[TOGETHER][2] = {};
            const int begin = share * (COORDS / SHARES), end = begin + COORDS / SHARES;
            if (share < SHARES) add_products(columns + d / 2, codes + g0, GROUP_SIZE - g0, begin, end, sums);
#pragma unroll
            for (int s = 0; s < SHARES; ++s) {
#pragma unroll
                for (int k = 0; k < TOGETHER; ++k) {
                    const int g = g0 + k;
                    if (s != share || g >= GROUP_SIZE) continue;
                    const float weight = s == 0 ? left[g][WEIGHTS_AT] : 0.0f;
                    out[g][d] += fmaf(weight, mean[d], sums[k][0]);
                    out[g][d + 1] += fmaf(weight, mean[d + 1], sums[k][1]);
                }
                if (SHARES > 1) __syncthreads();
            }
        }
#pragma unroll 1
        for (int g = threadIdx.x; g < GROUP_SIZE; g += THREADS) weights[g] += left[g][WEIGHTS_AT];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) attend_rest(
    const Sketch* sketches,   // [num_contexts], of this layer
    const int* context_lens,  // [num_contexts]
    const int* context_ids,   // [batch_size], -1: idle
    const float* coordinates, const float* means, const u8* unit_exponents, long long max_segments,  // `Queries`
    const float* tile_exponents, const float* sums, long long max_tiles,  // as score_codes writes them
    const int* kv_indices,    // [batch_size, num_heads, max_top_k]: the chosen keys, ascending
    const int* valid_len,     // [batch_size, num_heads]
    long long max_top_k,
    float* posted,            // [slots, shares, num_parts, unit_heads, PART]: the last REST_PARTS parts are written
    long long num_parts,
    long long unit_heads      // query heads of a share, of the group's GROUP_SIZE
) {
    // `Segment::transform`, then [WARPS][FINE][WORD_PIECES], the fine words of a block, then floats [WARPS][GROUP_SIZE][SUMS]
    extern __shared__ uint4 memory[];
    __shared__ float exponents[GROUP_SIZE], weights[GROUP_SIZE], left[GROUP_SIZE][SUMS];
    alignas(16) __shared__ float codes[GROUP_SIZE][COORDS];
    __shared__ float out[GROUP_SIZE][HEAD_DIM];
    __shared__ u32 scratch[WARPS];
    const int warp = threadIdx.x / 32, head = blockIdx.y, slot = blockIdx.z * gridDim.y + head;
    const int context_id = context_ids[blockIdx.z];
    const int num_keys = context_id < 0 ? 0 : context_lens[context_id], num_tiles = (num_keys + TILE_KEYS - 1) / TILE_KEYS;
    const Part part{static_cast<int>(num_tiles * blockIdx.x / REST_PARTS),
                    static_cast<int>(num_tiles * (blockIdx.x + 1) / REST_PARTS)};
    const Queries queries{coordinates, means, unit_exponents, max_segments};
    uint4* tray = memory + TRANSFORM_UNITS + HEAD_DIM / 4 + warp * FINE * WORD_PIECES;
    float* chosen_sums = reinterpret_cast<float*>(memory + TRANSFORM_UNITS + HEAD_DIM / 4 + WARPS * FINE * WORD_PIECES);
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP_SIZE * HEAD_DIM; i += THREADS) out[i / HEAD_DIM][i % HEAD_DIM] = 0;
#pragma unroll 1
    for (int g = threadIdx.x; g < GROUP_SIZE; g += THREADS) weights[g] = exponents[g] = 0;
    __syncthreads();
    // after a search, what score_codes has left is complete before the search's last launch begins
    bool waited = !AFTER_SEARCH;
    if (waited || part.first_tile == part.end_tile) wait_then_let_next_start();
    tile_exponents += slot * GROUP_SIZE * max_tiles;
    sums += slot * GROUP_SIZE * max_tiles * SUMS;
    kv_indices += slot * max_top_k;
    const Unit unit = part.first_tile < part.end_tile ? Unit(queries, slot) : Unit();
    find_exponents(tile_exponents, max_tiles, part, exponents);
    __syncthreads();
#pragma unroll 1
    for (int tile = part.first_tile, end_tile; tile < part.end_tile; tile = end_tile) {
        const Sketch& sketch = sketches[context_id];
        const int segment = sketch.segment_of(tile * TILE_KEYS);
        end_tile = min(part.end_tile, (sketch.segment_end(segment, num_keys) + TILE_KEYS - 1) / TILE_KEYS);
        const u16* there = sketch.value_transform + (head * sketch.num_segments + segment) * (COORDS * HEAD_DIM);
        const Segment values{memory, left, codes, there};
        const long long of_segment = (slot * max_segments + segment) * GROUP_SIZE;
        values.begin(sketch, head, segment, coordinates + of_segment * COORDS);
        QueryRows rows;
        for (int o = 0; o < OCTETS; ++o)
            rows.load(o, queries, unit, slot, min(8 * o + static_cast<int>(threadIdx.x) % 32 / 4, GROUP_SIZE - 1), segment);
        if (OCTETS == 1) rows.clear_second();
        sum_tiles(sums, tile_exponents, max_tiles, tile, end_tile, exponents, chosen_sums, left);
        // Turn 0, before the choice arrives, sums over a dummy key, only to warm the instruction cache.
        int num_warps;
#pragma unroll 1
        for (int turn = waited ? 1 : 0; turn < 2; ++turn) {
            const int* ids = sketch.segment_starts;
            Bounds chosen{0, 1};
            if (turn == 1) {
                if (!waited) wait_then_let_next_start();
                waited = true;
                ids = kv_indices;
                chosen = bounds_of(ids, valid_len[slot], tile * TILE_KEYS, end_tile * TILE_KEYS, scratch);
            }
            num_warps = min(WARPS, (chosen.end - chosen.first + HALF_KEYS - 1) / HALF_KEYS);
            if (warp < num_warps)
                sum_chosen(sketch, rows, head, num_keys, ids, chosen, exponents, tray, chosen_sums + warp * GROUP_SIZE * SUMS);
        }
        __syncthreads();
        subtract_chosen(chosen_sums, num_warps, left);
        __syncthreads();
        values.add(out, weights);
        __syncthreads();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP_SIZE * (PART / 4); i += THREADS) {
        const int g = i / (PART / 4), d = i % (PART / 4) * 4;
        float4 four = make_float4(__uint_as_float(0xff800000u), 0, 0, 0);  // -inf: no rows
        if (d < HEAD_DIM)
            four = make_float4(out[g][d], out[g][d + 1], out[g][d + 2], out[g][d + 3]);
        else if (weights[g] > 0) {
            four = make_float4(exponents[g] + means[slot * max_segments * GROUP_SIZE + g], weights[g], 0, 0);
        }
        const long long unit = slot * (GROUP_SIZE / unit_heads) + g / unit_heads;
        const long long at = unit * num_parts + num_parts - REST_PARTS + blockIdx.x;
        store_relaxed(posted + (at * unit_heads + g % unit_heads) * PART + d, four);
    }
}

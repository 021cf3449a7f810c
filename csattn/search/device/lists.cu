// Scores of the keys that the chosen lists hold, summed by key, and group scores of the sums, counted in bins.
//
// A list is a bit for each key of the context, and the scores of those whose bit is set, in the order of keys. A warp has a
// query's chunk of CHUNK_KEYS keys; a lane has one key of each word of 32, and adds up, in a register, what each subspace's
// list has of it: every sum is built in the order of the subspaces.

#include "list_index.cuh"

constexpr int CHUNK_WORDS = CHUNK_KEYS / 32;
static_assert(CHUNK_WORDS == 32, "a lane loads one");

__device__ __forceinline__ void add_list(const ListIndex& index, size_t list, int chunk, int num_chunks, float weight,
                                         float (&sums)[CHUNK_WORDS]) {
    const int lane = threadIdx.x % 32;
    const size_t place = list * num_chunks + chunk;
    const u32 listed = index.listed[place * CHUNK_WORDS + lane], before = sum_up_to_lane(__popc(listed)) - __popc(listed);
    const u16* scores = index.scores + list * index.list_len + index.starts[place];
    u16 halves[CHUNK_WORDS];  // all are asked for before the first is needed
#pragma unroll
    for (int word = 0; word < CHUNK_WORDS; ++word) {
        const u32 bits = __shfl_sync(ALL_LANES, listed, word), first = __shfl_sync(ALL_LANES, before, word);
        halves[word] = NO_SCORE;
        if (bits >> lane & 1) halves[word] = __ldg(scores + first + lanes_before(bits, lane));
    }
#pragma unroll
    for (int word = 0; word < CHUNK_WORDS; ++word) {
        // two roundings, as the definition has them: product, then sum; adding 0.0 turns a product of -0.0 into 0.0
        const float product = __fadd_rn(__fmul_rn(weight, half_as_float(halves[word])), 0.0f);
        if (halves[word] != NO_SCORE) sums[word] = __fadd_rn(sums[word], product);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) score_lists(
    const ListIndex* indexes,  // [num_contexts], of this layer
    const int* context_lens,
    const int* context_ids,  // [batch_size], -1: idle
    const Match* matches,    // as match_centroids writes them
    double softmax_scale,
    float* scores,  // [batch_size, num_index_heads, GROUP_SIZE, max_keys], written
    long long max_keys,
    TileStatistics* statistics  // [batch_size, num_index_heads, GROUP_SIZE, max_keys / TILE_KEYS], written
) {
    const int head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_then_let_next_start();
    const ListIndex index = indexes[context_id];
    const int num_chunks = (context_lens[context_id] + CHUNK_KEYS - 1) / CHUNK_KEYS;
    const float slope = static_cast<float>(softmax_scale * LOG2_E);
    wait_then_let_next_start(static_cast<u32>(index.list_len) + num_chunks);
    for (int work = blockIdx.x * WARPS + threadIdx.x / 32; work < num_chunks * GROUP_SIZE; work += gridDim.x * WARPS) {
        const int chunk = work % num_chunks;
        const size_t row = static_cast<size_t>(slot) * GROUP_SIZE + work / num_chunks;
        float sums[CHUNK_WORDS];
#pragma unroll
        for (int word = 0; word < CHUNK_WORDS; ++word) sums[word] = NOT_LISTED;
#pragma unroll 1
        for (int b = 0; b < SUBSPACES; ++b) {
            const Match match = matches[row * SUBSPACES + b];
            const size_t list = static_cast<size_t>(head * SUBSPACES + b) * CENTROIDS + match.centroid;
            add_list(index, list, chunk, num_chunks, static_cast<float>(match.weight), sums);
        }
        float* to = scores + row * max_keys + chunk * CHUNK_KEYS + threadIdx.x % 32;
#pragma unroll
        for (int word = 0; word < CHUNK_WORDS; ++word) to[32 * word] = sums[word];
        if (GROUP_SIZE == 1) continue;
        const TileStatistics tile = tile_statistics(sums, slope);
        if (threadIdx.x % 32 == 0) statistics[row * (max_keys / TILE_KEYS) + chunk] = tile;
    }
}

// What turns a query row's scores into shares.
struct Softmax {
    float top;     // of all listed keys' scores
    float offset;  // HEADROOM - log2(total over all listed keys)
};

// One warp: all tiles of a query row, in fixed order.
__device__ Softmax merge_tiles(const TileStatistics* tiles, int num_tiles, float slope) {
    float top = -1.0f / 0.0f, total = 0;
    for (int t = threadIdx.x % 32; t < num_tiles; t += 32) top = fmaxf(top, tiles[t].top);
    for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    for (int t = threadIdx.x % 32; t < num_tiles; t += 32)
        if (tiles[t].total > 0) total += tiles[t].total * exp2_approx(slope * (tiles[t].top - top));
    return {top, HEADROOM - log2f(sum_over_warp(total))};
}

// The group score of a key: 0 where no row lists it. Of a single row's scores, positive ones order like their bits and negative
// ones backwards.
__device__ __forceinline__ u32 list_score(const float* scores, long long plane, float slope, const Softmax* rows) {
    if (GROUP_SIZE == 1) {
        const u32 bits = __float_as_uint(*scores);
        if (!is_listed(*scores)) return 0;
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    float group_score = 0;
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const float score = scores[g * plane];
        if (is_listed(score))
            group_score += exp2_approx(fmaxf(fmaf(slope, score - rows[g].top, rows[g].offset), LEAST_EXPONENT));
    }
    return __float_as_uint(group_score);
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_lists(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len,
    double softmax_scale,
    const float* scores,               // as score_lists leaves them
    const TileStatistics* statistics,  // likewise; of no interest to a single query row
    uint4* group_scores,               // [batch_size, num_index_heads, max_keys / UNIT_KEYS], written
    long long max_keys,                // whole chunks
    Choice* choices                    // [batch_size, num_index_heads], counted up
) {
    __shared__ Softmax rows[GROUP_SIZE];
    __shared__ u32 bins[NUM_BINS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const float slope = static_cast<float>(softmax_scale * LOG2_E);
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
    wait_then_let_next_start();
    if (context.top_k == 0) return;
    const int num_tiles = (context.num_keys + TILE_KEYS - 1) / TILE_KEYS;
    for (int g = threadIdx.x / 32; GROUP_SIZE > 1 && g < GROUP_SIZE; g += WARPS) {
        const TileStatistics* tiles = statistics + (static_cast<size_t>(slot) * GROUP_SIZE + g) * (max_keys / TILE_KEYS);
        const Softmax softmax = merge_tiles(tiles, num_tiles, slope);
        if (threadIdx.x % 32 == 0) rows[g] = softmax;
    }
    __syncthreads();
    scores += static_cast<size_t>(slot) * GROUP_SIZE * max_keys;
    group_scores += slot * (max_keys / UNIT_KEYS);
    const Range range = first_range(context);
    u32 listed = 0;
    for (int unit = blockIdx.x * THREADS + threadIdx.x; unit < num_tiles * TILE_KEYS / UNIT_KEYS; unit += gridDim.x * THREADS) {
        u32 four[UNIT_KEYS];
        for (int i = 0; i < UNIT_KEYS; ++i) four[i] = list_score(scores + unit * UNIT_KEYS + i, max_keys, slope, rows);
        const uint4 group_score = eligible_only(make_uint4(four[0], four[1], four[2], four[3]), unit * UNIT_KEYS, context);
        range.count(group_score, bins);
        listed += (group_score.x > 0) + (group_score.y > 0) + (group_score.z > 0) + (group_score.w > 0);
        group_scores[unit] = group_score;
    }
    const u32 of_warp = __reduce_add_sync(ALL_LANES, listed);
    if (threadIdx.x % 32 == 0 && of_warp) atomicAdd(&choices[slot].num_listed, of_warp);
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&choices[slot].bins[i], bins[i]);
}

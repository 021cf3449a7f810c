// Scores of the keys that the chosen lists hold, summed by key in global memory, one launch for each subspace.
//
// A key occurs once in a list, so the additions of one launch never meet, and launches follow each other: every sum is
// built in the order of the subspaces. -0.0 marks a key that no list holds; no stored score is -0.0. `combine_lists` makes
// group scores of the sums, counted in bins.

#include "list_index.cuh"

constexpr u32 NOT_LISTED = 0x80000000u;
constexpr int TILE_KEYS = 1024;  // keys of which a warp makes the statistics
static_assert(TILE_KEYS == CHUNK_KEYS, "tiles end where chunks do");

struct TileStatistics {
    float top;    // largest score of a listed key
    float total;  // sum over listed keys of 2 ** (slope * (score - top))
};

__device__ __forceinline__ bool is_listed(float score) { return __float_as_uint(score) != NOT_LISTED; }

extern "C" __global__ void __launch_bounds__(THREADS) clear_scores(
    const int* context_lens, const int* context_ids,
    float* scores,     // [batch_size, num_index_heads, GROUP_SIZE, max_keys], written
    long long max_keys
) {
    const int slot = blockIdx.z * gridDim.y + blockIdx.y, context_id = context_ids[blockIdx.z];
    wait_then_let_next_start();
    if (context_id < 0) return;
    const int num_keys = (context_lens[context_id] + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS;
    for (int g = 0; g < GROUP_SIZE; ++g)
        for (int key = blockIdx.x * THREADS + threadIdx.x; key < num_keys; key += gridDim.x * THREADS)
            scores[(static_cast<size_t>(slot) * GROUP_SIZE + g) * max_keys + key] = -0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) add_list(
    const ListIndex* indexes,  // [num_contexts], of this layer
    const int* context_ids,    // [batch_size], -1: idle
    const Match* matches,      // as match_centroids writes them
    long long subspace,
    float* scores, long long max_keys
) {
    const int head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_then_let_next_start();
    const ListIndex index = indexes[context_id];
    const int list_len = static_cast<int>(index.list_len);
    wait_then_let_next_start();
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const Match match = matches[(slot * GROUP_SIZE + g) * SUBSPACES + subspace];
        const float weight = static_cast<float>(match.weight);
        const size_t list = (static_cast<size_t>(head * SUBSPACES + subspace) * CENTROIDS + match.centroid) * list_len;
        const int* indices = index.indices + list;
        const u16* halves = index.scores + list;
        float* row = scores + (static_cast<size_t>(slot) * GROUP_SIZE + g) * max_keys;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < list_len; i += gridDim.x * THREADS) {
            // two roundings, as the definition has them: product, then sum; adding 0.0 turns a product of -0.0 into 0.0
            const float product = __fadd_rn(__fmul_rn(weight, half_as_float(halves[i])), 0.0f);
            row[indices[i]] = __fadd_rn(row[indices[i]], product);
        }
    }
}

// For the whole warp: scores start, start + 32, ... of a tile.
__device__ TileStatistics tile_statistics(const float* tile, float slope) {
    float top = -1.0f / 0.0f, total = 0;
    for (int key = threadIdx.x % 32; key < TILE_KEYS; key += 32)
        if (is_listed(tile[key])) top = fmaxf(top, tile[key]);
    for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    for (int key = threadIdx.x % 32; key < TILE_KEYS; key += 32)
        if (is_listed(tile[key])) total += exp2_approx(slope * (tile[key] - top));
    return {top, sum_over_warp(total)};
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_tiles(
    const int* context_lens, const int* context_ids, double softmax_scale,
    const float* scores, long long max_keys,
    TileStatistics* statistics  // [batch_size, num_index_heads, GROUP_SIZE, max_keys / TILE_KEYS], written
) {
    const int slot = blockIdx.z * gridDim.y + blockIdx.y, context_id = context_ids[blockIdx.z];
    const float slope = static_cast<float>(softmax_scale * LOG2_E);
    wait_then_let_next_start();
    if (context_id < 0) return;
    const int num_tiles = (context_lens[context_id] + TILE_KEYS - 1) / TILE_KEYS;
    for (int work = blockIdx.x * WARPS + threadIdx.x / 32; work < num_tiles * GROUP_SIZE; work += gridDim.x * WARPS) {
        const size_t row = static_cast<size_t>(slot) * GROUP_SIZE + work % GROUP_SIZE;
        const int tile = work / GROUP_SIZE;
        const TileStatistics mine = tile_statistics(scores + row * max_keys + tile * TILE_KEYS, slope);
        if (threadIdx.x % 32 == 0) statistics[row * (max_keys / TILE_KEYS) + tile] = mine;
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
        if (bits == NOT_LISTED) return 0;
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
    const float* scores,               // as add_list leaves them
    const TileStatistics* statistics,  // as sum_tiles writes them; of no interest to a single query row
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

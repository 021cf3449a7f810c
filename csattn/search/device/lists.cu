// Scores of the keys that the chosen lists hold, summed by key in global memory, one launch for each subspace.
//
// A key occurs once in a list, so the additions of one launch never meet, and launches follow each other: every sum is
// built in the order of the subspaces. -0.0 marks a key that no list holds; no stored score is -0.0.

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
    wait_for_earlier();
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
    if (context_id < 0) return wait_for_earlier();
    const ListIndex index = indexes[context_id];
    const int list_len = static_cast<int>(index.list_len);
    wait_for_earlier();
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
        if (is_listed(tile[key])) total += power_of_two(slope * (tile[key] - top));
    return {top, sum_over_warp(total)};
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_tiles(
    const int* context_lens, const int* context_ids, double softmax_scale,
    const float* scores, long long max_keys,
    TileStatistics* statistics  // [batch_size, num_index_heads, GROUP_SIZE, max_keys / TILE_KEYS], written
) {
    const int slot = blockIdx.z * gridDim.y + blockIdx.y, context_id = context_ids[blockIdx.z];
    const float slope = static_cast<float>(softmax_scale * LOG2_E);
    wait_for_earlier();
    if (context_id < 0) return;
    const int num_tiles = (context_lens[context_id] + TILE_KEYS - 1) / TILE_KEYS;
    for (int work = blockIdx.x * WARPS + threadIdx.x / 32; work < num_tiles * GROUP_SIZE; work += gridDim.x * WARPS) {
        const size_t row = static_cast<size_t>(slot) * GROUP_SIZE + work % GROUP_SIZE;
        const int tile = work / GROUP_SIZE;
        const TileStatistics mine = tile_statistics(scores + row * max_keys + tile * TILE_KEYS, slope);
        if (threadIdx.x % 32 == 0) statistics[row * (max_keys / TILE_KEYS) + tile] = mine;
    }
}

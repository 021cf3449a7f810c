// The choice among scores of other methods: that of csattn's lists, with one more radix-select pass where many scores lie close
// together: lists leave keys out, but these methods score every key.
// In order: sum_tiles, `combine` of the lists, refine_bins, count_ties, find_among_fine, `write` of the lists.
//
// Compiled for GROUP_SIZE (queries that are combined by their softmax shares), THREADS, and CROWDED: with more keys than that, a
// bin is divided further; otherwise its keys are compared one by one.

#include "../../csattn/search/device/boundary.cuh"

static_assert(CROWDED <= MAX_CANDIDATES, "there is room for so many");

// Before `combine`: the statistics of tiles, which lists get from the kernel that makes their scores.
extern "C" __global__ void __launch_bounds__(THREADS) sum_tiles(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len, double softmax_scale,
    const float* scores, long long max_keys,
    TileStatistics* statistics  // [batch_size, num_index_heads, GROUP_SIZE, max_keys / TILE_KEYS], written
) {
    const int slot = blockIdx.z * gridDim.y + blockIdx.y, context_id = context_ids[blockIdx.z];
    const float slope = static_cast<float>(softmax_scale * LOG2_E);
    wait_then_let_next_start();
    if (context_id < 0) return;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const int num_tiles = (context.num_keys + TILE_KEYS - 1) / TILE_KEYS;
    for (int work = blockIdx.x * WARPS + threadIdx.x / 32; work < num_tiles * GROUP_SIZE; work += gridDim.x * WARPS) {
        const size_t row = static_cast<size_t>(slot) * GROUP_SIZE + work % GROUP_SIZE;
        const int tile = work / GROUP_SIZE;
        const int key = tile * TILE_KEYS + threadIdx.x % 32;
        float mine[TILE_KEYS / 32];
        for (int i = 0; i < TILE_KEYS / 32; ++i) mine[i] = scores[row * max_keys + key + 32 * i];
        const TileStatistics all = tile_statistics(mine, key, slope, context);
        if (threadIdx.x % 32 == 0) statistics[row * (max_keys / TILE_KEYS) + tile] = all;
    }
}

// Where the top_k-th group score lies: a bin of `combine`, or one of the NUM_BINS finer bins of that bin, and what lies in it.
struct Place {
    Range range;
    Boundary boundary;

    __device__ __forceinline__ Place(const Context& context, const Choice& coarse, const Boundary& boundary)
        : range(FirstBins(context, coarse.bottom, coarse.top).of(boundary)), boundary(boundary) {}

    __device__ __forceinline__ bool is_crowded() const { return boundary.inside > CROWDED; }
    __device__ __forceinline__ void look_closer() {
        range.shift = shift_for(range.last - range.low);
    }
};

// If the bin of the top_k-th group score is crowded, makes a histogram of its keys in finer bins.
extern "C" __global__ void __launch_bounds__(THREADS) refine_bins(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len, const uint4* group_scores, long long max_keys,
    Choice* choices  // [2, batch_size, num_index_heads]: the first as `combine` leaves it; bins of the second are counted up
) {
    __shared__ u32 scratch[WARPS], bins[NUM_BINS];
    const int num_slots = gridDim.y * gridDim.z, slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const Part part(context.num_keys);
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
    wait_then_let_next_start();
    const int wanted = num_wanted(context, choices[slot]);
    if (wanted == 0) return;
    Place place(context, choices[slot], find_bin(choices[slot].bins, wanted, scratch));
    if (!place.is_crowded()) return;
    place.look_closer();
    group_scores += slot * (max_keys / UNIT_KEYS) + part.first_key / UNIT_KEYS;
    for (int unit = threadIdx.x; unit < part.num_keys / UNIT_KEYS; unit += THREADS) place.range.count(group_scores[unit], bins);
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&choices[slot + num_slots].bins[i], bins[i]);
}

// The place of the wanted-th group score, among the finer bins if its first bin is crowded.
__device__ __forceinline__ Place find_place(const Context& context, const Choice& coarse, const Choice& fine, u32 wanted,
                                            u32* scratch) {
    Place place(context, coarse, find_bin(coarse.bins, wanted, scratch));
    if (!place.is_crowded()) return place;
    const u32 higher = place.boundary.above;
    place.look_closer();
    place.boundary = find_bin(fine.bins, wanted - higher, scratch);
    place.range = place.range.of(place.boundary);
    place.boundary.above += higher;
    return place;
}

// In a finer bin that is still crowded, scores count as equal, and the first keys are taken. Such scores tie, or differ by less
// than 16 units in the last place (sums of a group's shares) or 2 ** -15 of their range (a single query). Counts them by part.
extern "C" __global__ void __launch_bounds__(THREADS) count_ties(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len, const uint4* group_scores, long long max_keys,
    Choice* choices  // `above` of the second set is written
) {
    __shared__ u32 scratch[WARPS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const Part part(context.num_keys);
    wait_then_let_next_start();
    Choice& fine = choices[slot + gridDim.y * gridDim.z];
    const int wanted = num_wanted(context, choices[slot]);
    if (wanted == 0) return;
    const Place place = find_place(context, choices[slot], fine, wanted, scratch);
    if (!place.is_crowded()) return;
    const Range range = place.range;
    group_scores += slot * (max_keys / UNIT_KEYS) + part.first_key / UNIT_KEYS;
    u32 mine = 0, ties;
    for (int unit = threadIdx.x; unit < part.num_keys / UNIT_KEYS; unit += THREADS)
        mine += __popc(keys_inside(group_scores[unit], range));
    sum_before(mine, scratch, ties);
    if (threadIdx.x == 0) fine.above[blockIdx.x] = ties;
}

// Mark the part's keys above the range and, of those in it, the first `quota`; returns how many are marked.
__device__ u32 mark_first(const uint4* group_scores, const Part& part, const Range& range, u32* marks, u32 quota, u32* scratch) {
    u32 before = 0, marked = 0;
    for (int first = 0; first < part.num_keys; first += THREADS * UNIT_KEYS) {
        const int key = first + threadIdx.x * UNIT_KEYS;
        const bool is_inside = key < part.num_keys;
        const uint4 group_score = is_inside ? group_scores[(part.first_key + key) / UNIT_KEYS] : make_uint4(0, 0, 0, 0);
        const u32 inside = is_inside ? keys_inside(group_score, range) : 0;
        u32 total, mark = is_inside ? keys_above(group_score, range) : 0;
        u32 rank = before + sum_before(__popc(inside), scratch, total);
        before += total;
        for (int i = 0; i < UNIT_KEYS; ++i)
            if (inside >> i & 1 && rank++ < quota) mark |= 1u << i;
        marked += __popc(mark);
        mark <<= threadIdx.x % 8 * 4;  // eight threads share a word
        for (int step = 1; step < 8; step <<= 1) mark |= __shfl_xor_sync(ALL_LANES, mark, step);
        if (is_inside && threadIdx.x % 8 == 0) marks[(part.first_key + key) / 32] = mark;
    }
    return marked;
}

// As find_keys, after refine_bins and count_ties.
extern "C" __global__ void __launch_bounds__(THREADS) find_among_fine(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len, const uint4* group_scores, long long max_keys, u32* marks, Choice* choices, int* kv_indices,
    long long max_top_k
) {
    alignas(16) __shared__ u32 bins[NUM_BINS];
    __shared__ u32 scratch[WARPS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const Part part(context.num_keys);
    wait_then_let_next_start();
    Choice& choice = choices[slot];
    const Choice& fine = choices[slot + gridDim.y * gridDim.z];
    const int wanted = num_wanted(context, choice);
    if (wanted == 0) return;
    group_scores += slot * (max_keys / UNIT_KEYS);
    marks += slot * (max_keys / 32);
    const Place place = find_place(context, choice, fine, wanted, scratch);
    const Boundary& boundary = place.boundary;
    if (boundary.inside == 0) {
        if (blockIdx.x > 0) return;
        if (threadIdx.x == 0) choice.quota = CHOSEN_BY_ONE_BLOCK;
        const int num_units = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS / UNIT_KEYS;
        return select_in_one_block(group_scores, num_units, wanted, place.range, boundary, bins, scratch,
                                   kv_indices + slot * max_top_k);
    }
    const u32 quota = wanted - boundary.above;
    const Range& range = place.range;
    u32 mine, above, taken = 0;
    if (place.is_crowded()) {
        for (int block = 0; block < blockIdx.x; ++block) taken += fine.above[block];
        mine = mark_first(group_scores, part, range, marks, taken < quota ? quota - taken : 0, scratch);
    } else {
        mine = mark_part(group_scores, part, range, marks, choice);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) choice.quota = place.is_crowded() ? 0 : quota;
    sum_before(mine, scratch, above);
    if (threadIdx.x == 0) choice.above[blockIdx.x] = above;
}

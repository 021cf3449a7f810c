// The choice among scores of other methods: the one that csattn's lists have, with one more pass where many scores lie close
// together. Of lists, most keys are in none. `combine` comes before, `write` after.
//
// Compiled for GROUP_SIZE (queries that are put together by their shares), THREADS, and CROWDED: keys in a bin that are too
// many to be compared one by one.

#include "../../csattn/search/device/boundary.cuh"

static_assert(CROWDED <= MAX_CANDIDATES, "there is room for so many");

// Where the top_k-th group score lies: its bin among those of `combine`, or among NUM_BINS of that one.
struct Place {
    Range range;
    Boundary boundary;

    __device__ __forceinline__ bool is_crowded() const { return boundary.inside > CROWDED; }
    __device__ __forceinline__ void look_closer() {
        range = range.of_bin(boundary.bin);
        range.shift = shift_for(range.last - range.low);
    }
};

// Between `combine` and `find`: counts what a crowded bin holds, in bins of its own.
extern "C" __global__ void __launch_bounds__(THREADS) refine_bins(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len, const uint4* group_scores, long long max_keys,
    Choice* choices  // [2, batch_size, num_index_heads]: as combine leaves them; counted up
) {
    __shared__ u32 scratch[WARPS], bins[NUM_BINS];
    const int num_slots = gridDim.y * gridDim.z, slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const Part part(context.num_keys);
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
    wait_then_let_next_start();
    const int wanted = num_wanted(context, choices[slot]);
    if (wanted == 0) return;
    Place place{first_range(context), find_bin(choices[slot].bins, wanted, scratch)};
    if (!place.is_crowded()) return;
    place.look_closer();
    group_scores += slot * (max_keys / UNIT_KEYS) + part.first_key / UNIT_KEYS;
    for (int unit = threadIdx.x; unit < part.num_keys / UNIT_KEYS; unit += THREADS) place.range.count(group_scores[unit], bins);
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&choices[slot + num_slots].bins[i], bins[i]);
}

// As find_keys, after refine_bins.
extern "C" __global__ void __launch_bounds__(THREADS) find_among_fine(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len, const uint4* group_scores, long long max_keys, u32* marks, Choice* choices, int* kv_indices,
    long long max_top_k
) {
    alignas(16) __shared__ u32 bins[NUM_BINS];
    __shared__ u32 scratch[WARPS], above;
    const int num_slots = gridDim.y * gridDim.z, slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const Part part(context.num_keys);
    if (threadIdx.x == 0) above = 0;
    wait_then_let_next_start();
    Choice& choice = choices[slot];
    const int wanted = num_wanted(context, choice);
    if (wanted == 0) return;
    group_scores += slot * (max_keys / UNIT_KEYS);
    Place place{first_range(context), find_bin(choice.bins, wanted, scratch)};
    if (place.is_crowded()) {
        const u32 higher = place.boundary.above;
        place.look_closer();
        place.boundary = find_bin(choices[slot + num_slots].bins, wanted - higher, scratch);
        place.boundary.above += higher;
    }
    const Boundary& boundary = place.boundary;
    if (boundary.inside == 0 || boundary.inside > MAX_CANDIDATES) {
        if (blockIdx.x > 0) return;
        if (threadIdx.x == 0) choice.quota = ALONE;
        const int num_units = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS / UNIT_KEYS;
        return choose_alone(group_scores, num_units, wanted, place.range, boundary, bins, scratch, kv_indices + slot * max_top_k);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) choice.quota = wanted - boundary.above;
    const u32 mine = mark_part(group_scores, part, place.range.of_bin(boundary.bin), marks + slot * (max_keys / 32), choice);
    const u32 of_warp = __reduce_add_sync(ALL_LANES, mine);
    if (threadIdx.x % 32 == 0 && of_warp) atomicAdd(&above, of_warp);
    __syncthreads();
    if (threadIdx.x == 0) choice.above[blockIdx.x] = above;
}

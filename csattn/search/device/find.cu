// Fourth launch over lists: find the bin of the top_k-th group score, mark every key above it, and list the keys in it.

#include "boundary.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) find_keys(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len,
    const uint4* group_scores,  // [batch_size, num_index_heads, max_keys / UNIT_KEYS]
    long long max_keys,
    u32* marks,           // [batch_size, num_index_heads, max_keys / 32], written
    Choice* choices,      // [batch_size, num_index_heads]
    int* kv_indices,      // [batch_size, num_index_heads, max_top_k], written where one block chooses alone
    long long max_top_k
) {
    alignas(16) __shared__ u32 bins[NUM_BINS];
    __shared__ u32 scratch[WARPS], above;
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const Part part(context.num_keys);
    if (threadIdx.x == 0) above = 0;
    wait_then_let_next_start();
    Choice& choice = choices[slot];
    const int wanted = num_wanted(context, choice);
    if (wanted == 0) return;
    group_scores += slot * (max_keys / UNIT_KEYS);
    const Boundary boundary = find_bin(choice.bins, wanted, scratch);
    const Range range = FirstBins(context, choice.bottom, choice.top).of(boundary);
    if (boundary.inside == 0 || boundary.inside > MAX_CANDIDATES) {
        if (blockIdx.x > 0) return;
        if (threadIdx.x == 0) choice.quota = CHOSEN_BY_ONE_BLOCK;
        const int num_units = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS / UNIT_KEYS;
        return select_in_one_block(group_scores, num_units, wanted, range, boundary, bins, scratch, kv_indices + slot * max_top_k);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) choice.quota = wanted - boundary.above;
    const u32 num_marked = mark_part(group_scores, part, range, marks + slot * (max_keys / 32), choice);
    const u32 of_warp = __reduce_add_sync(ALL_LANES, num_marked);
    if (threadIdx.x % 32 == 0 && of_warp) atomicAdd(&above, of_warp);
    __syncthreads();
    if (threadIdx.x == 0) choice.above[blockIdx.x] = above;
}

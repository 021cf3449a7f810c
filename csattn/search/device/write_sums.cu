// Last launch where worths are sums: the top_k-th worth, and all keys above it and the first of those that have it, in
// ascending order.

// What the parts' counts say, in the end, about one of them.
struct Cut {
    u32 worth;  // the top_k-th
    u32 quota;  // keys of just that worth that are wanted
    u32 above_before, equal_before;  // keys in earlier parts
};

__device__ Cut find_cut(const Choice& choice, u32 quota) {
    __shared__ u32 in_all[LEVELS + 1], before[LEVELS + 1];
    const u32 num_parts = gridDim.x, lane = threadIdx.x % 32;
    for (int level = threadIdx.x / 32; level <= LEVELS; level += WARPS) {
        u32 all = 0, earlier = 0;
        for (u32 part = lane; part < num_parts; part += 32) {
            const u32 count = choice.counts[level][part];
            all += count;
            earlier += part < blockIdx.x ? count : 0;
        }
        all = __reduce_add_sync(ALL_LANES, all);
        earlier = __reduce_add_sync(ALL_LANES, earlier);
        if (lane == 0) {
            in_all[level] = all;
            before[level] = earlier;
        }
    }
    __syncthreads();
    Cut cut{0, quota, before[LEVELS], 0};
    int level = LEVELS - 1;
    for (; level > 0 && in_all[level] < cut.quota; --level) {
        cut.quota -= in_all[level];
        cut.above_before += before[level];
    }
    cut.worth = choice.least + level;
    cut.equal_before = before[level];
    return cut;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) write_sums(
    const int* context_lens, const int* top_ks, const int* context_ids, long long sink_len, long long window_len,
    const uint4* worths,    // as score_single writes them
    long long max_keys,
    const Choice* choices,  // [batch_size, num_index_heads]
    int* kv_indices,        // [batch_size, num_index_heads, max_top_k], written
    int* valid_len,         // [batch_size, num_index_heads], written
    long long max_top_k
) {
    __shared__ u32 scratch[WARPS];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids[blockIdx.z], sink_len, window_len);
    const Part part(context.num_keys);
    const uint4* of_part = worths + (slot * max_keys + part.first_key) / SUM_KEYS;
    // `find` has not written them, and what has is over: `find` had waited for it before this kernel began
    uint4 sums[LOADS];
    load_sums(sums, of_part, 0, part.num_keys);
    wait_for_earlier();
    const Choice& choice = choices[slot];
    const int wanted = context.top_k;
    int* chosen = kv_indices + slot * max_top_k;
    for (long long i = wanted + blockIdx.x * THREADS + threadIdx.x; i < max_top_k; i += gridDim.x * THREADS) chosen[i] = -1;
    if (blockIdx.x == 0 && threadIdx.x == 0) valid_len[slot] = wanted;
    if (wanted == 0 || choice.quota == ALONE) return;
    const Cut cut = find_cut(choice, choice.quota);
    u32 above = cut.above_before, equal = cut.equal_before;  // so far
    for (int first = 0; first * SUM_KEYS < part.num_keys; first += LOADS * THREADS) {
        if (first > 0) load_sums(sums, of_part, first, part.num_keys);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int unit = first + i * THREADS;
            if (unit * SUM_KEYS >= part.num_keys) break;
            u32 mine = 0, total;  // how many are above, and above them how many are equal
            for_each_sum(sums[i], [&](int, u32 worth) { mine += (worth > cut.worth) + (worth == cut.worth ? 0x10000u : 0u); });
            const u32 up_to = sum_before(mine, scratch, total);
            u32 above_before = above + (up_to & 0xffffu), equal_before = equal + (up_to >> 16);
            above += total & 0xffffu;
            equal += total >> 16;
            if (mine == 0) continue;
            const int key = part.first_key + (unit + static_cast<int>(threadIdx.x)) * SUM_KEYS;
            for_each_sum(sums[i], [&](int k, u32 worth) {
                const bool is_above = worth > cut.worth, is_equal = worth == cut.worth;
                if (is_above || (is_equal && equal_before < cut.quota)) chosen[above_before + min(equal_before, cut.quota)] = key + k;
                above_before += is_above;
                equal_before += is_equal;
            });
        }
    }
}

// Last launch over many keys whose worths are sums: the top_k-th worth, and all keys above it and the first of those that have it, in
// ascending order.

__device__ Cut find_cut(const Choice& choice) {
    const u32 quota = choice.quota, least = choice.least;  // loaded together with the counts
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
    cut.worth = least + level;
    cut.equal_before = before[level];
    return cut;
}

// Which of eight keys may be taken. Two numbers of keys share 32 bits: above the cut, and 16 bits higher, at it.
struct Taken {
    u32 keys, equal;  // bits
    u32 before;       // in the warp: in lanes before, and in what the warp has of earlier keys

    // For the whole warp: returns how many there are.
    __device__ __forceinline__ u32 find(uint4 sums, u32 worth_at_cut, u32 earlier) {
        keys = equal = 0;
        for_each_sum(sums, [&](int k, u32 worth) {
            keys |= (worth >= worth_at_cut) << k;
            equal |= (worth == worth_at_cut) << k;
        });
        const u32 mine = __popc(keys ^ equal) + (__popc(equal) << 16), up_to = sum_up_to_lane(mine);
        before = earlier + up_to - mine;
        return __shfl_sync(ALL_LANES, up_to, 31);
    }

    __device__ __forceinline__ void write(int* chosen, int first_key, u32 above_before, u32 equal_before, u32 quota) const {
        for (u32 left = keys; left; left &= left - 1) {
            const int k = __ffs(left) - 1;
            const bool is_equal = equal >> k & 1;
            if (!is_equal || equal_before < quota) chosen[above_before + min(equal_before, quota)] = first_key + k;
            above_before += !is_equal;
            equal_before += is_equal;
        }
    }
};

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
    Loaded loaded;
    loaded.load(of_part, 0, part.num_keys / SUM_KEYS);
    wait_for_earlier();
    const Choice& choice = choices[slot];
    const int wanted = context.top_k;
    int* chosen = kv_indices + slot * max_top_k;
    for (long long i = wanted + blockIdx.x * THREADS + threadIdx.x; i < max_top_k; i += gridDim.x * THREADS) chosen[i] = -1;
    if (blockIdx.x == 0 && threadIdx.x == 0) valid_len[slot] = wanted;
    if (wanted == 0) return;
    const Cut cut = find_cut(choice);
    if (choice.quota == ALONE) return;
    u32 above = cut.above_before, equal = cut.equal_before;  // so far
    for (int first = 0; first * SUM_KEYS < part.num_keys; first += LOADS * THREADS) {
        if (first > 0) loaded.load(of_part, first, part.num_keys / SUM_KEYS);
        Taken taken[LOADS];
        u32 of_warp = 0, total;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (i < loaded.each) of_warp += taken[i].find(loaded.sums[i], cut.worth, of_warp);
        const u32 up_to = sum_over_warps_before(of_warp, scratch, total);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (i >= loaded.each) break;
            const u32 before = up_to + taken[i].before;
            taken[i].write(chosen, part.first_key + loaded.unit(i) * SUM_KEYS, above + (before & 0xffffu), equal + (before >> 16), cut.quota);
        }
        above += total & 0xffffu;
        equal += total >> 16;
    }
}

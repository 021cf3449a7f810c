// Third launch over many keys whose worths are sums: the bin of the top_k-th, and how many keys of each part lie above it,
// and at each of its levels.

extern "C" __global__ void __launch_bounds__(THREADS, 2) find_sums(
    const int* context_lens, const int* top_ks, const int* context_ids, long long sink_len, long long window_len,
    const uint4* worths,  // [batch_size, num_index_heads, max_keys / SUM_KEYS]
    long long max_keys,
    Choice* choices,      // [batch_size, num_index_heads]
    int* kv_indices,      // [batch_size, num_index_heads, max_top_k], written where one block chooses alone
    long long max_top_k
) {
    alignas(16) __shared__ u32 bins[NUM_BINS];
    __shared__ u32 scratch[WARPS], counts[LEVELS + 1];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids[blockIdx.z], sink_len, window_len);
    const Part part(context.num_keys);
    if (threadIdx.x <= LEVELS) counts[threadIdx.x] = 0;
    worths += slot * (max_keys / SUM_KEYS);
    const uint4* of_part = worths + part.first_key / SUM_KEYS;
    wait_for_earlier();
    if (context.top_k == 0) return;
    Loaded loaded;
    loaded.load(of_part, 0, part.num_keys / SUM_KEYS);
    Choice& choice = choices[slot];
    const Range range = first_range(context);
    const Boundary boundary = find_bin(choice.bins, context.top_k, scratch);
    if (boundary.inside == 0) {
        if (blockIdx.x > 0) return;
        if (threadIdx.x == 0) choice.quota = ALONE;
        const int num_units = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS / UNIT_KEYS;
        const WidenedSums widened{reinterpret_cast<const uint2*>(worths)};
        return choose_alone(widened, num_units, context.top_k, range, boundary, bins, scratch, kv_indices + slot * max_top_k);
    }
    const u32 least = range.low + (boundary.bin << range.shift), levels = 1u << range.shift;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        choice.quota = context.top_k - boundary.above;
        choice.least = least;
    }
    u32 above = 0;
    for (int first = 0; first * SUM_KEYS < part.num_keys; first += LOADS * THREADS) {
        if (first > 0) loaded.load(of_part, first, part.num_keys / SUM_KEYS);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (i >= loaded.each) break;
            for_each_sum(loaded.sums[i], [&](int, u32 worth) {
                if (worth < least) return;
                if (worth - least < levels)
                    atomicAdd(&counts[worth - least], 1u);
                else
                    ++above;
            });
        }
    }
    const u32 of_warp = __reduce_add_sync(ALL_LANES, above);
    if (threadIdx.x % 32 == 0 && of_warp) atomicAdd(&counts[LEVELS], of_warp);
    __syncthreads();
    if (threadIdx.x <= LEVELS) choice.counts[threadIdx.x][blockIdx.x] = counts[threadIdx.x];
}

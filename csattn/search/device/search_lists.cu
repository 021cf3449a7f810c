// Second launch of a search over Top-L lists, from matches to the chosen keys: see csattn.search.reference for what it computes.

// Sum over the cluster of what each thread has found.
__device__ u32 sum_over_cluster(u32 mine, u32 rank, Counts& counts) {
    if (threadIdx.x == 0) counts.sum = 0;
    __syncthreads();
    atomicAdd(&counts.sum, mine);
    __syncthreads();
    if (threadIdx.x < CLUSTER) write_word(&counts.totals[rank], threadIdx.x, counts.sum);
    cluster_sync();
    u32 sum = 0;
    for (int r = 0; r < CLUSTER; ++r) sum += counts.totals[r];
    return sum;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 2) search_lists(
    const LayerTable* tables,  // [num_contexts], of this layer
    const int* context_lens,   // [num_contexts]
    const int* list_lens,      // [num_contexts]
    const int* top_ks,         // [num_contexts], at most max_top_k
    const int* context_ids,    // [batch_size], -1: idle
    const Match* matches,      // as match_centroids writes them
    long long sink_len, long long window_len, double softmax_scale,
    float* scores,             // [batch_size, num_index_heads, GROUP_SIZE, stride]: scratch
    long long stride,
    long long max_units,       // units of a block
    uint4* spilled,            // [batch_size, num_index_heads, CLUSTER, max_units], or null: they fit shared memory
    int* kv_indices,           // [batch_size, num_index_heads, max_top_k], written
    int* valid_len,            // [batch_size, num_index_heads], written
    long long max_top_k
) {
    extern __shared__ uint4 dynamic[];
    __shared__ QueryRow rows[GROUP_SIZE];
    __shared__ Statistics statistics;
    __shared__ Counts counts;
    __shared__ float scratch[WARPS];
    const u32 rank = blockIdx.x;
    const int head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    int* chosen = kv_indices + slot * max_top_k;
    Context context = context_of(context_lens, top_ks, context_id, sink_len, window_len);
    wait_for_earlier();
    if (context.top_k > 0) {
        const LayerTable table = tables[context_id];
        const int list_len = list_lens[context_id];
        for (int i = threadIdx.x; i < GROUP_SIZE * SUBSPACES; i += THREADS) {
            const int g = i / SUBSPACES, b = i % SUBSPACES;
            const Match match = matches[slot * GROUP_SIZE * SUBSPACES + i];
            rows[g].lists[b] = (static_cast<size_t>(head * SUBSPACES + b) * CENTROIDS + match.centroid) * list_len;
            rows[g].weights[b] = static_cast<float>(match.weight);
        }
        clear_bins(counts);
        __syncthreads();
        scores += static_cast<size_t>(slot) * GROUP_SIZE * stride;
        add_lists(table, list_len, rows, context.num_keys, stride, rank, scores);
        const int keys_each = (context.num_keys + CLUSTER * 64 - 1) / (CLUSTER * 64) * 64;
        const int first_key = min(context.num_keys, static_cast<int>(rank) * keys_each);
        const int num_keys = min(context.num_keys - first_key, keys_each);
        const float slope = static_cast<float>(softmax_scale * LOG2_E);
        if (GROUP_SIZE > 1) {
            share_statistics(scores + first_key, stride, num_keys, slope, rank, scratch, statistics);
            cluster_sync();
            if (threadIdx.x < GROUP_SIZE) merge_statistics(statistics, threadIdx.x, slope, rows[threadIdx.x]);
            __syncthreads();
        }
        const Worths worths{spilled ? spilled + (static_cast<size_t>(slot) * CLUSTER + rank) * max_units : dynamic};
        Range range = first_range(context.top_k, {1, 0xffffffffu, 21});
        const u32 listed = combine_listed(scores + first_key, stride, first_key, num_keys, slope, rows, context, worths, range,
                                          counts.bins);
        context.top_k = min(context.top_k, static_cast<int>(sum_over_cluster(listed, rank, counts)));
        if (context.top_k > 0) {
            u32 quota;
            const int num_units = (num_keys + UNIT_KEYS - 1) / UNIT_KEYS;
            range = find_threshold(worths, num_units, context.top_k, range, rank, counts, quota);
            write_chosen(worths, first_key, num_units, range, quota, rank, counts, chosen);
        }
    }
    write_padding(chosen, context.top_k, max_top_k, rank);
    if (rank == 0 && threadIdx.x == 0) valid_len[slot] = context.top_k;
}

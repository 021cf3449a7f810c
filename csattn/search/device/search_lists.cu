// One search over a table of Top-L lists: see csattn.search.reference for what it computes.

// Sum over the cluster of what each thread has found; the bins are not in use yet, nor any more.
__device__ u32 sum_over_cluster(u32 mine, u32 rank, Counts& counts) {
    if (threadIdx.x == 0) counts.found_inside = 0;
    __syncthreads();
    atomicAdd(&counts.found_inside, mine);
    __syncthreads();
    if (threadIdx.x < CLUSTER) write_word(&counts.totals[rank], threadIdx.x, counts.found_inside);
    cluster_sync();
    u32 sum = 0;
    for (int r = 0; r < CLUSTER; ++r) sum += counts.totals[r];
    return sum;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_PER_SM) search_lists(
    const QUERY* q,             // [batch_size, num_index_heads * GROUP_SIZE, HEAD_DIM]
    const LayerTable* tables,   // [num_contexts], of this layer
    const int* context_lens,    // [num_contexts]
    const int* top_ks,          // [num_contexts], at most max_top_k
    const int* context_ids,     // [batch_size], -1: idle
    long long sink_len, long long window_len, double softmax_scale, long long weigh_by_norm,
    const int* list_lens,       // [num_contexts]
    float* scores,              // [batch_size, num_index_heads, GROUP_SIZE, stride]: scratch
    long long stride,
    int* kv_indices,            // [batch_size, num_index_heads, max_top_k], written
    int* valid_len,             // [batch_size, num_index_heads], written
    long long max_top_k
) {
    __shared__ Match match;
    __shared__ QueryRow rows[GROUP_SIZE];
    __shared__ Statistics statistics;
    __shared__ Counts counts;
    __shared__ float scratch[WARPS];
    const u32 rank = blockIdx.x;
    const int head = blockIdx.y, request = blockIdx.z, slot = request * gridDim.y + head;
    int* chosen = kv_indices + slot * max_top_k;
    const int context_id = context_ids[request];
    Context context{0, 0, 0, 0};
    if (context_id >= 0) context = context_of(context_lens, top_ks, context_id, sink_len, window_len);
    if (context.top_k > 0) {
        const LayerTable table = tables[context_id];
        const QUERY* group = q + static_cast<size_t>(slot) * GROUP_SIZE * HEAD_DIM;
        match_centroids(group, table, nullptr, head, weigh_by_norm, rank, match);
        clear_bins(counts);
        cluster_sync();
        if (threadIdx.x < GROUP_SIZE) take_match(match, threadIdx.x, softmax_scale, rows[threadIdx.x]);
        __syncthreads();
        float* mine = scores + static_cast<size_t>(slot) * GROUP_SIZE * stride;
        add_lists(table, head, list_lens[context_id], rows, context.num_keys, stride, rank, mine);
        const int keys_each = (context.num_keys + CLUSTER - 1) / CLUSTER;
        const int first_key = min(context.num_keys, static_cast<int>(rank) * keys_each);
        const int num_keys = min(context.num_keys - first_key, keys_each);
        if (GROUP_SIZE > 1) {
            share_list_statistics(mine + first_key, stride, num_keys, rows, rank, scratch, statistics);
            cluster_sync();
            if (threadIdx.x < GROUP_SIZE) merge_list_statistics(statistics, threadIdx.x, rows[threadIdx.x]);
            __syncthreads();
        }
        Range range = GROUP_SIZE > 1 ? first_range(context.top_k) : Range{1, 0xffffffffu, 21};
        u32 listed = combine_listed(mine + first_key, stride, first_key, num_keys, rows, context, range, counts.bins);
        context.top_k = min(context.top_k, static_cast<int>(sum_over_cluster(listed, rank, counts)));
        if (context.top_k > 0) {
            u32 quota;
            const ListWorths worths{mine + first_key};
            range = find_threshold(worths, num_keys, context.top_k, range, rank, counts, quota);
            write_chosen(worths, first_key, num_keys, range, quota, rank, counts, chosen);
        }
    }
    write_padding(chosen, context.top_k, max_top_k, rank);
    if (rank == 0 && threadIdx.x == 0) valid_len[slot] = context.top_k;
}

// One search over a table of rows: see csattn.search.reference for what it computes.

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_PER_SM) search_rows(
    const QUERY* q,             // [batch_size, num_index_heads * GROUP_SIZE, HEAD_DIM]
    const LayerTable* tables,   // [num_contexts], of this layer
    const int* context_lens,    // [num_contexts]
    const int* top_ks,          // [num_contexts], at most max_top_k
    const int* context_ids,     // [batch_size], -1: idle
    long long sink_len, long long window_len, double softmax_scale, long long weigh_by_norm,
    uint4* spilled,             // what of the scores does not fit into shared memory
    long long shared_columns,   // columns of a block that do
    long long spilled_stride,   // columns of a block that do not
    int* kv_indices,            // [batch_size, num_index_heads, max_top_k], written
    int* valid_len,             // [batch_size, num_index_heads], written
    long long max_top_k
) {
    extern __shared__ uint4 dynamic[];
    __shared__ Match match;
    __shared__ QueryRow rows[GROUP_SIZE];
    __shared__ Statistics statistics;
    __shared__ Counts counts;
    const u32 rank = blockIdx.x;
    const int head = blockIdx.y, num_heads = gridDim.y, request = blockIdx.z, slot = request * num_heads + head;
    int* chosen = kv_indices + slot * max_top_k;
    const int context_id = context_ids[request];
    Context context{0, 0, 0, 0};
    if (context_id >= 0) context = context_of(context_lens, top_ks, context_id, sink_len, window_len);
    write_padding(chosen, context.top_k, max_top_k, rank);
    if (rank == 0 && threadIdx.x == 0) valid_len[slot] = context.top_k;
    if (context.top_k == 0) return;

    const LayerTable table = tables[context_id];
    const float* scales = reinterpret_cast<const float*>(table.extra);
    match_centroids(q + static_cast<size_t>(slot) * GROUP_SIZE * HEAD_DIM, table, scales, head, weigh_by_norm, rank, match);
    clear_bins(counts);
    cluster_sync();
    const int num_blocks = (context.num_keys + KEYS_PER_BLOCK - 1) / KEYS_PER_BLOCK;
    const u32 row_bytes = num_blocks * (KEYS_PER_BLOCK * SCORE_BITS / 8);
    if (threadIdx.x < GROUP_SIZE) make_weights(match, threadIdx.x, softmax_scale, row_bytes, rows[threadIdx.x]);
    __syncthreads();

    const int blocks_each = (num_blocks + CLUSTER - 1) / CLUSTER;
    const int first_block = min(num_blocks, static_cast<int>(rank) * blocks_each);
    const int first_key = first_block * KEYS_PER_BLOCK;
    const int num_keys = max(0, min(context.num_keys - first_key, blocks_each * KEYS_PER_BLOCK));
    const int first_column = first_block * BLOCK_COLUMNS;
    const int num_columns = (num_keys + KEYS_PER_BLOCK - 1) / KEYS_PER_BLOCK * BLOCK_COLUMNS;
    const int num_tiles = (num_columns + 31) / 32;
    const size_t block_number = static_cast<size_t>(slot) * CLUSTER + rank;
    const Cells cells{dynamic, spilled + block_number * PLANES * QUADS * spilled_stride, static_cast<int>(shared_columns),
                      static_cast<int>(shared_columns) + 2, static_cast<int>(spilled_stride)};
    u32* tops = reinterpret_cast<u32*>(dynamic + PLANES * QUADS * cells.shared_stride);
    float* totals = reinterpret_cast<float*>(tops + GROUP_SIZE * num_tiles);
    const u8* head_rows = reinterpret_cast<const u8*>(table.scores) + static_cast<size_t>(head) * SUBSPACES * CENTROIDS * row_bytes;
    score_rows(head_rows, rows, first_column, num_columns, context.num_keys, cells, tops, totals);
    __syncthreads();
    if (GROUP_SIZE > 1) {
        share_statistics(tops, totals, num_tiles, rows, rank, statistics);
        cluster_sync();
        if (threadIdx.x < GROUP_SIZE) merge_statistics(statistics, threadIdx.x, rows[threadIdx.x]);
        __syncthreads();
    }
    Range range = GROUP_SIZE > 1 ? first_range(context.top_k) : Range{1, 0xffffffffu, 5};
    combine_group(rows, cells, first_column, num_columns, context, range, counts.bins);
    u32 quota;
    const RowWorths worths{cells};
    range = find_threshold(worths, num_keys, context.top_k, range, rank, counts, quota);
    write_chosen(worths, first_key, num_keys, range, quota, rank, counts, chosen);
}

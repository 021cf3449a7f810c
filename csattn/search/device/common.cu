// What every kernel of the search needs. Compiled for GROUP_SIZE, HEAD_DIM, THREADS and QUERY: float, or u16 for
// bfloat16 and (QUERY_IS_HALF) float16. GROUP_SIZE queries share an index head.
//
// The launches of a search follow each other: of a sketch project_queries, score_codes, choose_codes; of lists
// match_centroids, add_list, combine_lists, find_keys, write_keys. What one leaves for the next lies in memory of the
// search, for each index head of each row of the batch: its number is the `slot`.

constexpr int WARPS = THREADS / 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr double LOG2_E = 1.4426950408889634;

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(u16 bits) {
    return QUERY_IS_HALF ? half_as_float(bits) : __uint_as_float(static_cast<u32>(bits) << 16);
}

__device__ __forceinline__ float sum_over_warp(float value) {
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

// What of a context may be chosen.
struct Context {
    int num_keys;
    int top_k;
    int sink_end;      // keys before it are resident
    int window_start;  // keys from it on are resident
};

// An idle row (id -1) has a context of nothing.
__device__ __forceinline__ Context context_of(const int* context_lens, const int* top_ks, int id, int sink_len,
                                              int window_len) {
    if (id < 0) return {0, 0, 0, 0};
    Context context{context_lens[id], top_ks[id], 0, 0};
    context.sink_end = min(sink_len, context.num_keys);
    context.window_start = max(context.sink_end, context.num_keys - window_len);
    context.top_k = min(context.top_k, context.window_start - context.sink_end);
    return context;
}

__device__ __forceinline__ u32 sum_up_to_lane(u32 value) {
    for (int step = 1; step < 32; step <<= 1) {
        const u32 other = __shfl_up_sync(ALL_LANES, value, step);
        if (threadIdx.x % 32 >= step) value += other;
    }
    return value;
}

// The sum over all threads before this one, for the whole block; `total` is that over all. scratch: [WARPS].
__device__ __forceinline__ u32 sum_before(u32 value, u32* scratch, u32& total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 up_to = sum_up_to_lane(value);
    __syncthreads();
    if (lane == 31) scratch[warp] = up_to;
    __syncthreads();
    const u32 of_warp = lane < WARPS ? scratch[lane] : 0;
    const u32 before = __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
    total = __reduce_add_sync(ALL_LANES, of_warp);
    return before + up_to - value;
}

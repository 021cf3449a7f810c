// Joins what a query has kept of the keys seen so far with the contenders that have come since, and keeps the k best.
//
// Contenders come in a list for each lane, that is for each place of a key in its tile: a score's bits above an index. They
// reached the bar, which is the k-th best of what was kept. A list that came to more than DEPTH has lost some: then its
// query is marked, and somebody else has to choose for it.
//
// Compiled for THREADS, LANES, DEPTH, K, and what `topk_entries.cu` is compiled for: CAPACITY is K + LANES * DEPTH.

// The score that `entry_of` was given, unless it was NaN.
__device__ __forceinline__ float score_of(u64 entry) {
    const u32 high = static_cast<u32>(entry >> 32);
    return __uint_as_float(high & 0x80000000u ? high & 0x7fffffffu : ~high);
}

// Returns whether a list had no room for all that came to it. Each thread takes every EACH_LANE-th entry of one list.
__device__ __forceinline__ bool add_contenders(Shared& s, const u64* lists, const int* counts) {
    constexpr int EACH_LANE = THREADS / LANES;
    static_assert(THREADS % LANES == 0, "a thread stays with its lane");
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES, came = counts[lane];
    const int mine = max(0, min(came, DEPTH) - first + EACH_LANE - 1) / EACH_LANE;
    const u32 at = reserve(s, mine).first;
#pragma unroll 4
    for (int i = 0; i < mine; ++i) {
        const u64 raw = lists[(first + i * EACH_LANE) * LANES + lane];
        s.entries[at + i] = entry_of(__uint_as_float(static_cast<u32>(raw >> 32)), static_cast<u32>(raw));
    }
    return came > DEPTH;
}

extern "C" __global__ void __launch_bounds__(THREADS) keep_best(
    const u64* __restrict__ lists,   // [rows, DEPTH, LANES]
    const int* __restrict__ counts,  // [rows, LANES]
    u64* __restrict__ kept,          // [rows, K] entries, read and written
    int* __restrict__ num_kept,      // [rows], likewise
    float* __restrict__ bar_scores,  // [rows], written
    int* __restrict__ bar_indices,   // [rows], likewise
    int* __restrict__ overflowed,    // [rows]; 1 is written where a list had no room
    int* __restrict__ chosen         // [rows, K], or null: not yet
) {
    extern __shared__ Shared shared[];
    Shared& s = *shared;
    const long long row = blockIdx.x;
    lists += row * (LANES * DEPTH), counts += row * LANES, kept += row * K;
    wait_for_earlier();
    const int num_before = num_kept[row];
    for (int i = threadIdx.x; i < num_before; i += THREADS) s.entries[i] = kept[i];
    if (threadIdx.x == 0) s.num_entries = num_before;
    __syncthreads();
    if (add_contenders(s, lists, counts)) overflowed[row] = 1;
    __syncthreads();

    if (s.num_entries > K) drop_below(s, find_threshold<false>(s, find_range(s), K, K));
    const int count = s.num_entries;
    if (chosen) {
        write_best(s, count, K, nullptr, 1, chosen + row * K);
        return;
    }
    for (int i = threadIdx.x; i < count; i += THREADS) kept[i] = s.entries[i];
    const u64 last = find_range(s).low;
    if (threadIdx.x == 0) {
        num_kept[row] = count;
        const bool full = count == K && last >> 32 != 0;  // below NaN there is nothing, and room is for all
        bar_scores[row] = full ? score_of(last) : __uint_as_float(0xff800000u);
        bar_indices[row] = full ? static_cast<int>(0xffffffffu - static_cast<u32>(last)) : 0x7fffffff;
    }
}

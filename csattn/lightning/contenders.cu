// Puts a bar to each query from a sample of its scores, and chooses the k best of what has reached the bar.
//
// A list has a score's bits above an index. More may have come to it than it holds, or fewer than k: then its query is
// marked, and somebody else has to choose for it.
//
// Compiled for THREADS, and what `topk_entries.cu` is compiled for: CAPACITY is that of a list, or of the sample.

// The score that `entry_of` was given, unless it was NaN.
__device__ __forceinline__ float score_of(u64 entry) {
    const u32 high = static_cast<u32>(entry >> 32);
    return __uint_as_float(high & 0x80000000u ? high & 0x7fffffffu : ~high);
}

// What of a query's sample reaches the bar becomes the start of its list. The bar is about the wanted-th best of the
// sample. A query whose list holds all that it may see needs none, which is said by an index of 2^31 - 1; where NaN
// would be the bar, the query is given up: more came, it is said, than the list holds, and nothing reaches its bar.
extern "C" __global__ void __launch_bounds__(THREADS) put_bars(
    const float* __restrict__ sample,   // [rows, sample_len]: scores of every step-th key
    const int* __restrict__ longest,    // [query tiles]: keys that any of a tile's queries may see
    const int* __restrict__ legal_len,  // [rows]
    u64* __restrict__ lists,            // [rows, list_capacity], written
    int* __restrict__ counts,           // [rows], written
    float* __restrict__ bar_scores,     // [rows], written
    int* __restrict__ bar_indices,      // [rows], written
    long long sample_len,
    long long list_capacity,
    long long queries,    // of a query tile
    long long tile_keys,  // of a tile of the sample
    long long step,
    long long wanted
) {
    extern __shared__ Shared shared[];
    Shared& s = *shared;
    const long long row = blockIdx.x;
    sample += row * sample_len, lists += row * list_capacity;
    wait_for_earlier();
    const int legal = legal_len[row], of_tile = longest[row / queries] / static_cast<int>(tile_keys * step) * tile_keys;
    const int num_scores = min(of_tile, (legal + static_cast<int>(step) - 1) / static_cast<int>(step));
    for (int i = threadIdx.x; i < num_scores; i += THREADS) s.entries[i] = entry_of(sample[i], i * step);
    if (threadIdx.x == 0) s.num_entries = num_scores;
    __syncthreads();
    const bool fits = legal <= list_capacity;
    u64 bar = 0;
    if (!fits && num_scores >= wanted) {
        drop_below(s, find_threshold<false>(s, find_range(s), wanted, wanted + wanted / 8));
        bar = find_range(s).low;
    }
    const bool given_up = !fits && bar >> 32 == 0;
    const int count = given_up ? static_cast<int>(list_capacity) + 1 : s.num_entries;
    if (!given_up)
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const u64 entry = s.entries[i];
            const u32 bits = entry >> 32 ? __float_as_uint(score_of(entry)) : 0x7fc00000u;
            lists[i] = static_cast<u64>(bits) << 32 | (0xffffffffu - static_cast<u32>(entry));
        }
    if (threadIdx.x == 0) {
        counts[row] = count;
        bar_scores[row] = given_up ? __uint_as_float(0x7f800000u) : score_of(bar);
        bar_indices[row] = given_up ? -1 : fits ? 0x7fffffff : static_cast<int>(0xffffffffu - static_cast<u32>(bar));
    }
}

// Writes the indices of the k best, best first: entries are put into bins, and within its bin an entry counts those
// above it. Bins are narrow, as entries reach from the bar to the best; where many fall into one it takes long.
template <int EACH> __device__ void write_in_order(Shared& s, const u64 (&mine)[EACH], int count, int k, int* chosen) {
    u64 low = ~0ull, high = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (e * THREADS + static_cast<int>(threadIdx.x) < count) low = min(low, mine[e]), high = max(high, mine[e]);
    u32* const bins = s.bins[0];
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    const Range range = join_threads(s, low, high);
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (e * THREADS + static_cast<int>(threadIdx.x) < count)
            atomicAdd(&bins[(mine[e] - range.low) >> range.shift], 1u);
    __syncthreads();

    const int first = BINS - (threadIdx.x + 1) * BINS_EACH;  // thread 0 has the highest bins
    u32 counts[BINS_EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) sum += counts[i] = bins[first + i];
    u32 above = sum_before(sum, s.scratch);
#pragma unroll
    for (int i = BINS_EACH - 1; i >= 0; --i) bins[first + i] = above, above += counts[i];
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (e * THREADS + static_cast<int>(threadIdx.x) < count)
            s.entries[atomicAdd(&bins[(mine[e] - range.low) >> range.shift], 1u)] = mine[e];
    __syncthreads();  // now a bin says where the next lower one begins

#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        if (e * THREADS + static_cast<int>(threadIdx.x) >= count) continue;
        const u32 bin = (mine[e] - range.low) >> range.shift, begin = bin + 1 < BINS ? bins[bin + 1] : 0;
        if (begin >= static_cast<u32>(k)) continue;
        u32 rank = begin;
        for (u32 i = begin; i < bins[bin]; ++i) rank += s.entries[i] > mine[e];
        if (rank < static_cast<u32>(k)) chosen[rank] = static_cast<int>(0xffffffffu - static_cast<u32>(mine[e]));
    }
    for (int i = count + threadIdx.x; i < k; i += THREADS) chosen[i] = -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) choose_best(
    const u64* __restrict__ lists,      // [rows, CAPACITY]
    const int* __restrict__ counts,     // [rows]
    const int* __restrict__ legal_len,  // [rows]
    int* __restrict__ overflowed,       // [rows]; 1 is written where `chosen` is not to be trusted
    int* __restrict__ chosen,           // [rows, k]
    long long k
) {
    extern __shared__ Shared shared[];
    Shared& s = *shared;
    const long long row = blockIdx.x;
    lists += row * CAPACITY;
    wait_for_earlier();
    const int count = counts[row], legal = legal_len[row];
    if (count > CAPACITY || count < min(static_cast<int>(k), legal)) {
        if (threadIdx.x == 0) overflowed[row] = 1;
        return;
    }
    constexpr int EACH = (CAPACITY + THREADS - 1) / THREADS;
    u64 mine[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = e * THREADS + threadIdx.x;
        const u64 raw = i < count ? lists[i] : 0;
        mine[e] = entry_of(__uint_as_float(static_cast<u32>(raw >> 32)), static_cast<u32>(raw));
    }
    write_in_order(s, mine, count, k, chosen + row * k);
}

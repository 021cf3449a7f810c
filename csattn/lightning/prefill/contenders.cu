// Finds a threshold for each query from a sample of its scores, and chooses the k best keys that reach it.
//
// An entry of a list is score bits << 32 | index. If more keys reach the threshold than a list holds, or fewer than k,
// the query is marked, and other kernels choose for it.
//
// Compiled for THREADS and CAPACITY: the most entries of a list, or scores of a sample.

#include "../topk/entries.cuh"

constexpr u32 LEAST_KEY = 0x007fffffu;  // of a score, -inf: NaN's key is below
constexpr int NO_THRESHOLD = 0x7fffffff, ALL_TIES = NO_THRESHOLD - 1;  // more than any index

// The inverse of `order_of`: the score, or some NaN.
__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key == 0 ? 0x7fc00000u : key >> 31 ? key & 0x7fffffffu : ~key);
}

// Reductions over a block's threads, double-buffered by turn: one may begin while other threads end the one before.
struct BlockReduction {
    u32 of_warps[2][2][WARPS];

    __device__ __forceinline__ u32 sum(u32 value, int turn) {
        value = __reduce_add_sync(ALL_LANES, value);
        if (WARPS == 1) return value;
        u32* const all = of_warps[turn % 2][0];
        const int lane = threadIdx.x % 32;
        if (lane == 0) all[threadIdx.x / 32] = value;
        __syncthreads();
        return __reduce_add_sync(ALL_LANES, lane < WARPS ? all[lane] : 0);
    }
    // The maxima of two values.
    __device__ __forceinline__ void largest(u32& a, u32& b, int turn) {
        a = __reduce_max_sync(ALL_LANES, a), b = __reduce_max_sync(ALL_LANES, b);
        if (WARPS == 1) return;
        u32(&all)[2][WARPS] = of_warps[turn % 2];
        const int lane = threadIdx.x % 32;
        if (lane == 0) all[0][threadIdx.x / 32] = a, all[1][threadIdx.x / 32] = b;
        __syncthreads();
        a = __reduce_max_sync(ALL_LANES, lane < WARPS ? all[0][lane] : 0);
        b = __reduce_max_sync(ALL_LANES, lane < WARPS ? all[1][lane] : 0);
    }
};

// A query's sample, in registers: a thread's vectors of four scores are THREADS vectors apart.
struct Sample {
    static constexpr int VECTORS = (CAPACITY + 4 * THREADS - 1) / (4 * THREADS);
    u32 keys[4 * VECTORS];  // 0 where there is none
    int num_scores;

    __device__ __forceinline__ int first(int vector) const {
        return (vector * THREADS + static_cast<int>(threadIdx.x)) * 4;
    }
    __device__ __forceinline__ Sample(const float4* scores, int num_scores_) : num_scores(num_scores_) {
        const float none = __uint_as_float(0x7fc00000u);
        float4 four[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            four[v] = make_float4(none, none, none, none);
            if (first(v) < num_scores) four[v] = scores[first(v) / 4];
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int left = num_scores - first(v);
            keys[4 * v] = order_of(four[v].x), keys[4 * v + 1] = order_of(left > 1 ? four[v].y : none);
            keys[4 * v + 2] = order_of(left > 2 ? four[v].z : none);
            keys[4 * v + 3] = order_of(left > 3 ? four[v].w : none);
        }
    }
    // Calls use(key, place in the sample) for all scores, and perhaps for places beyond, with key 0.
    template <class Use> __device__ __forceinline__ void for_each(const Use& use) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (v * THREADS * 4 < num_scores)
#pragma unroll
                for (int i = 0; i < 4; ++i) use(keys[4 * v + i], first(v) + i);
    }
};

// A threshold: keys above `key` reach it, and equal ones up to a place in the sample.
struct Threshold {
    u32 key, num_reach;
    int last_place;

    __device__ __forceinline__ bool reached_by(u32 other, int place) const {
        return other >= key + (place > last_place);
    }
    __device__ __forceinline__ int last_index(u32 step) const {
        return last_place == ALL_TIES ? ALL_TIES : last_place * static_cast<int>(step);
    }
};

// A key about midway between two that are not neighbours. Between a negative score's and a positive one's, most keys
// are of tiny scores: there it is the key of the mean score.
__device__ __forceinline__ u32 key_between(u32 low, u32 high) {
    if (low >> 31 < high >> 31) {
        const u32 key = order_of((score_of(low) + score_of(high)) / 2);
        if (low < key && key < high) return key;
    }
    return low + (high - low) / 2;
}

// Bisects for a threshold that `wanted` to `most` scores of the sample reach; with fewer scores, one that these reach.
__device__ Threshold bisect_threshold(BlockReduction& reduction, const Sample& sample, u32 wanted, u32 most) {
    int turn = 0;
    u32 best = 0;
    sample.for_each([&](u32 key, int) { best = max(best, key); });
    u32 not_least = ~best;  // of all threads' best: THREADS scores reach the least one
    reduction.largest(best, not_least, turn++);
    auto count = [&](const auto& reaches) {
        u32 number = 0;
        sample.for_each([&](u32 key, int place) { number += reaches(key, place); });
        return reduction.sum(number, turn++);
    };
    u32 low = wanted <= THREADS ? max(~not_least, LEAST_KEY) : LEAST_KEY, high = best + 1;
    u32 num_reach = count([&](u32 key, int) { return key >= low; });
    if (num_reach < wanted) return {low, num_reach, ALL_TIES};
    while (num_reach > most && high - low > 1) {
        const u32 middle = key_between(low, high), number = count([&](u32 key, int) { return key >= middle; });
        if (number < wanted)
            high = middle;
        else
            low = middle, num_reach = number;
    }
    if (num_reach <= most) {  // the least key that reaches it: one found by bisection may be no score's
        u32 not_key = 0, unused = 0;
        sample.for_each([&](u32 key, int) { not_key = key >= low ? max(not_key, ~key) : not_key; });
        reduction.largest(not_key, unused, turn++);
        return {~not_key, num_reach, ALL_TIES};
    }
    int begin = 0, end = sample.num_scores;  // of many that are equal, take the first
    while (num_reach > most) {
        const int middle = begin + (end - begin) / 2;
        const u32 number = count([&](u32 key, int place) { return Threshold{low, 0, middle}.reached_by(key, place); });
        if (number < wanted)
            begin = middle + 1;
        else
            end = middle, num_reach = number;
    }
    return {low, num_reach, end};
}

// Finds each query's threshold, about the wanted-th best of its sample. The scores of the sample that reach it become
// the start of the query's list, in the sample's place. If a list can hold all keys that its query may see, there is no
// threshold, and its index is NO_THRESHOLD. Where NaN would be the threshold, the query is given up: nothing reaches
// it, and the query's count is above the list's capacity.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) find_thresholds(
    u64* rows,                              // [rows, row_len]: on entry a row has float32 scores of every step-th key
    const int* __restrict__ tile_max_lens,  // [query tiles]: keys that any of a tile's queries may see
    const int* __restrict__ legal_len,      // [rows]
    int* __restrict__ counts,               // [rows], written
    float* __restrict__ threshold_scores,   // [rows], written
    int* __restrict__ threshold_indices,    // [rows], written
    long long row_len,
    u32 list_capacity,
    u32 queries,    // of a query tile
    u32 tile_keys,  // of a tile of the sample
    u32 step,
    u32 wanted
) {
    __shared__ BlockReduction reduction;
    __shared__ u32 scratch[WARPS];
    const long long row = blockIdx.x;
    u64* const list = rows + row * row_len;
    wait_then_let_next_start();
    const u32 legal = legal_len[row], of_tile = tile_max_lens[blockIdx.x / queries] / (tile_keys * step) * tile_keys;
    const int num_scores = min(of_tile, (legal + step - 1) / step);
    const Sample sample(reinterpret_cast<const float4*>(list), num_scores);
    const bool fits = legal <= list_capacity;
    Threshold threshold{0, static_cast<u32>(num_scores), num_scores - 1};
    if (!fits) threshold = bisect_threshold(reduction, sample, wanted, wanted + wanted / 8);
    const bool given_up = !fits && threshold.num_reach < wanted;
    if (threadIdx.x == 0) {
        counts[row] = static_cast<int>(given_up ? list_capacity + 1 : threshold.num_reach);
        threshold_scores[row] = given_up ? __uint_as_float(0x7f800000u) : score_of(threshold.key);
        threshold_indices[row] = given_up ? -1
                           : fits   ? NO_THRESHOLD
                                    : threshold.last_index(step);
    }
    if (given_up) return;
    u32 num_reached = 0;
    sample.for_each([&](u32 key, int place) { num_reached += threshold.reached_by(key, place); });
    u32 at = sum_before(num_reached, scratch);  // has a barrier: all scores are in registers
    sample.for_each([&](u32 key, int place) {
        if (threshold.reached_by(key, place))
            list[at++] = static_cast<u64>(__float_as_uint(score_of(key))) << 32 | static_cast<u32>(place * step);
    });
}

// A query's contenders, in registers: a thread's pairs of entries are THREADS pairs apart.
struct List {
    static constexpr int PAIRS = (CAPACITY + 2 * THREADS - 1) / (2 * THREADS);
    u32 keys[2 * PAIRS], indices[2 * PAIRS];
    int count;

    __device__ __forceinline__ List(const uint4* pairs, int count_) : count(count_) {
        uint4 pair[PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int at = p * THREADS + threadIdx.x;
            pair[p] = 2 * at < count ? pairs[at] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int p = 0; p < PAIRS; ++p)
            if (2 * p * THREADS < count) {
                keys[2 * p] = order_of(__uint_as_float(pair[p].y)), indices[2 * p] = pair[p].x;
                keys[2 * p + 1] = order_of(__uint_as_float(pair[p].w)), indices[2 * p + 1] = pair[p].z;
            }
    }
    // Calls use(number of the thread's entry).
    template <class Use> __device__ __forceinline__ void for_each(const Use& use) const {
#pragma unroll
        for (int e = 0; e < 2 * PAIRS; ++e)
            if (e / 2 * 2 * THREADS < count)
                if (2 * (e / 2 * THREADS + static_cast<int>(threadIdx.x)) + e % 2 < count) use(e);
    }
};

// Entries in the order of their bins, the best first.
struct alignas(16) Sorted {
    u64 entries[CAPACITY];
    u32 bins[BINS + 4];  // how many entries are in better bins; then, how many there are
    BlockReduction reduction;
    u32 scratch[WARPS], num_sorted;
};

// Turns counts of bins into exclusive prefix sums. num_sorted: entries in the bins of the k best; others stay unsorted.
__device__ __forceinline__ void sum_up_bins(Sorted& s, u32 count, u32 k) {
    u32* const bins = s.bins + threadIdx.x * BINS_EACH;
    u32 counts[BINS_EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) sum += counts[i] = bins[i];
    u32 above = sum_before(sum, s.scratch);
    const u32 last = min(k, count);
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) {
        bins[i] = above;
        if (above < last && last <= above + counts[i]) s.num_sorted = above + counts[i];
        above += counts[i];
    }
    if (threadIdx.x == THREADS - 1) s.bins[BINS] = count;
    __syncthreads();
}

// Writes the indices of the k best, best first. An entry is how far its key is below the highest << 32 | index; if all
// keys are equal, the index twice. Entries are sorted into bins, and each is ranked by counting those before it in its
// bin. Bins are narrow, since entries range only from the threshold to the best; many entries in one bin take long.
__device__ void write_in_order(Sorted& s, List& list, int k, int* chosen) {
    u32 highest = 0, not_lowest = 0;
    list.for_each([&](int e) { highest = max(highest, list.keys[e]), not_lowest = max(not_lowest, ~list.keys[e]); });
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    s.reduction.largest(highest, not_lowest, 0);
    const u32 width = highest - ~not_lowest, shift = width == 0 ? 10 : width < BINS ? 0 : 21 - __clz(width);
    u32 before[2 * List::PAIRS];  // how many entries came to its bin earlier
    list.for_each([&](int e) {
        list.keys[e] = width ? highest - list.keys[e] : list.indices[e];
        before[e] = atomicAdd(&s.bins[list.keys[e] >> shift], 1u);
    });
    __syncthreads();
    sum_up_bins(s, list.count, k);
    list.for_each([&](int e) {
        const u32 first = s.bins[list.keys[e] >> shift];
        if (first < static_cast<u32>(k))
            s.entries[first + before[e]] = static_cast<u64>(list.keys[e]) << 32 | list.indices[e];
    });
    __syncthreads();
    const int num_sorted = list.count ? s.num_sorted : 0;
    for (int place = threadIdx.x; place < num_sorted; place += THREADS) {
        const u64 entry = s.entries[place];
        const u32* const bin = s.bins + (static_cast<u32>(entry >> 32) >> shift);
        u32 rank = bin[0];
        for (u32 i = rank, end = bin[1]; i < end; ++i) rank += s.entries[i] < entry;
        if (rank < static_cast<u32>(k)) chosen[rank] = static_cast<int>(entry);
    }
    for (int i = list.count + threadIdx.x; i < k; i += THREADS) chosen[i] = -1;
}
static_assert(BINS == 1 << 11, "a width of n bits leaves bins of n - 11 bits; an index has 21");

constexpr int BLOCKS = 1280 / (THREADS < 256 ? 256 : THREADS);  // of `choose_best`, per multiprocessor
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) choose_best(
    const u64* __restrict__ lists,      // [rows, row_len], of which CAPACITY at most are used; row_len is even
    const int* __restrict__ counts,     // [rows]
    const int* __restrict__ legal_len,  // [rows]
    int* __restrict__ overflowed,       // [rows], written: 1 where `chosen` is invalid, else 0
    int* __restrict__ chosen,           // [rows, k]
    long long row_len,
    long long k
) {
    extern __shared__ Sorted sorted[];
    const long long row = blockIdx.x;
    wait_then_let_next_start();
    const int count = counts[row], legal = legal_len[row];
    const bool trusted = (count <= CAPACITY) & (count >= min(static_cast<int>(k), legal));  // not &&: both are loaded
    if (threadIdx.x == 0) overflowed[row] = !trusted;
    if (!trusted) return;
    List list(reinterpret_cast<const uint4*>(lists + row * row_len), count);
    write_in_order(*sorted, list, k, chosen + row * k);
}

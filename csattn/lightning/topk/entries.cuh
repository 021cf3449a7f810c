// Shared by the top-k kernels: the order of scores, histograms, sorting. Compiled for THREADS.
#pragma once

#include "../../cuda/warps.cuh"

constexpr int BINS = 2048, BINS_EACH = BINS / THREADS;
static_assert(BINS % THREADS == 0 && WARPS <= 32, "threads share out the bins");

// Maps a score to a key that compares in the order of choice: -0 as 0; every NaN has key 0, below all other scores.
__device__ __forceinline__ u32 order_of(float score) {
    u32 bits = __float_as_uint(score);
    bits = bits << 1 == 0 ? 0 : bits;
    return bits << 1 > 0xff000000u ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// An entry compares in the order of choice: by score, among equal scores the lower index first.
__device__ __forceinline__ u64 join(u32 order, u32 index) {
    return static_cast<u64>(order) << 32 | (0xffffffffu - index);
}
__device__ __forceinline__ u64 entry_of(float score, u32 index) { return join(order_of(score), index); }
__device__ __forceinline__ u32 index_of(u64 entry) { return 0xffffffffu - static_cast<u32>(entry); }

// Entries from low to last, in bins of 2 ** shift values.
struct EntryRange {
    u64 low, last;
    int shift;

    __device__ __forceinline__ EntryRange(u64 low_, u64 last_) : low(low_), last(last_) {
        const u64 width = last - low;
        shift = width < BINS ? 0 : 53 - __clzll(width);
    }
    __device__ __forceinline__ bool holds(u64 entry) const { return entry >= low && entry <= last; }
    __device__ __forceinline__ EntryRange of_bin(u32 bin) const {
        const u64 first = low + (static_cast<u64>(bin) << shift);
        return EntryRange(first, min(last, first + ((1ull << shift) - 1)));
    }
};
static_assert(BINS == 1 << 11, "a width of n bits leaves bins of n - 11 bits");

// Returns the bin of the wanted-th highest, also in `found`. count_of(bin) is called once a bin. scratch: [WARPS]. Both
// are in shared memory.
template <class Count>
__device__ __forceinline__ Boundary find_bin(const Count& count_of, u32 wanted, u32* scratch, Boundary& found) {
    const int first = BINS - (threadIdx.x + 1) * BINS_EACH;  // thread 0 has the highest bins
    u32 own_counts[BINS_EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) own_counts[i] = count_of(first + i);
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) sum += own_counts[i];
    find_among(own_counts, first, sum_before(sum, scratch), wanted, found);
    __syncthreads();
    return found;
}

// The greater or the lesser of two entries.
__device__ __forceinline__ u64 pick(u64 a, u64 b, bool greater) { return (a > b) == greater ? a : b; }

// The steps of a bitonic sort over distances of 32 and less, in runs of first_size to last_size entries. A warp has 64
// neighbouring entries in registers: a lane's two are 32 apart.
__device__ void sort_in_warps(u64* entries, int n, int first_size, int last_size) {
    const int lane = threadIdx.x % 32;
    for (int first = threadIdx.x / 32 * 64; first < n; first += WARPS * 64) {
        u64 low = entries[first + lane], high = entries[first + lane + 32];
        for (int size = first_size; size <= last_size; size *= 2) {
            const bool low_falls = !((first + lane) & size), high_falls = !((first + lane + 32) & size);
            if (size > 32) {
                const u64 other = pick(low, high, !low_falls);
                low = pick(low, high, low_falls), high = other;
            }
            for (int stride = min(size / 2, 16); stride > 0; stride /= 2) {
                const bool is_first = !(lane & stride);
                low = pick(low, __shfl_xor_sync(ALL_LANES, low, stride), is_first == low_falls);
                high = pick(high, __shfl_xor_sync(ALL_LANES, high, stride), is_first == high_falls);
            }
        }
        entries[first + lane] = low, entries[first + lane + 32] = high;
    }
    __syncthreads();
}

// Bitonic sort of n entries: n is a power of two, at least 64.
__device__ void sort_descending(u64* entries, int n) {
    sort_in_warps(entries, n, 2, 64);
    for (int size = 128; size <= n; size *= 2) {
        for (int stride = size / 2; stride > 32; stride /= 2) {
            for (int pair = threadIdx.x; pair < n / 2; pair += THREADS) {
                const int i = 2 * pair - (pair & (stride - 1));
                const u64 a = entries[i], b = entries[i + stride];
                if ((a < b) == ((i & size) == 0)) entries[i] = b, entries[i + stride] = a;
            }
            __syncthreads();
        }
        sort_in_warps(entries, n, size, size);
    }
}

__device__ __forceinline__ int place_of(int position, const int* pages, int page_size) {
    return pages ? pages[position / page_size] * page_size + position % page_size : position;
}

// Chooses all of up to k scores, in the order of their index. Each of num_blocks thread blocks writes its share.
__device__ __forceinline__ void choose_all(int num_scores, int k, int block, int num_blocks, const int* pages,
                                           int page_size, int* chosen) {
    for (int i = block * THREADS + threadIdx.x; i < k; i += num_blocks * THREADS)
        chosen[i] = i < num_scores ? place_of(i, pages, page_size) : -1;
}

// Writes the indices of entries, best first, then -1. `entries` must have room for the next power of two.
__device__ void write_sorted(u64* entries, int count, int k, const int* pages, int page_size, int* chosen) {
    int n = 64;
    while (n < count) n *= 2;
    for (int i = count + threadIdx.x; i < n; i += THREADS) entries[i] = 0;
    __syncthreads();
    sort_descending(entries, n);
    for (int i = threadIdx.x; i < k; i += THREADS)
        chosen[i] = i < count ? place_of(index_of(entries[i]), pages, page_size) : -1;
}

// The same for up to BINS entries, by a counting sort into bins of equal width, the best first. An entry is ranked
// within its bin by comparing it with all others there; if a bin has too many for that, all are sorted. bins: [BINS];
// scratch: [WARPS].
__device__ void write_best(u64* entries, int count, int k, const int* pages, int page_size, int* chosen, u32* bins,
                           u32* scratch) {
    constexpr u32 MANY = 64;
    __shared__ u32 low, high, most;
    u64 own_entries[BINS_EACH];
    u32 rank[BINS_EACH], top = 0, bottom = 0, largest = 0;
    if (threadIdx.x == 0) low = 0xffffffffu, high = most = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) {
        const int at = i * THREADS + threadIdx.x;
        bins[at] = 0;
        own_entries[i] = at < count ? entries[at] : 0;
        const u32 order = own_entries[i] >> 32;
        if (at < count) top = max(top, order), bottom = max(bottom, ~order);
    }
    top = __reduce_max_sync(ALL_LANES, top), bottom = __reduce_max_sync(ALL_LANES, bottom);
    if (threadIdx.x % 32 == 0) atomicMax(&high, top), atomicMin(&low, ~bottom);
    __syncthreads();
    const u32 best = high;
    const int shift = max(0, 21 - __clz(best - low));  // BINS are 2^11
    auto bin_of = [&](u64 entry) { return (best - static_cast<u32>(entry >> 32)) >> shift; };
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i)
        if (i * THREADS + threadIdx.x < count) {
            rank[i] = atomicAdd(&bins[bin_of(own_entries[i])], 1u);
            largest = max(largest, rank[i]);
        }
    largest = __reduce_max_sync(ALL_LANES, largest);
    if (threadIdx.x % 32 == 0) atomicMax(&most, largest);
    __syncthreads();
    if (most >= MANY) return write_sorted(entries, count, k, pages, page_size, chosen);
    u32 first[BINS_EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) first[i] = sum, sum += bins[threadIdx.x * BINS_EACH + i];
    const u32 before = sum_before(sum, scratch);
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) bins[threadIdx.x * BINS_EACH + i] = before + first[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i)
        if (i * THREADS + threadIdx.x < count) entries[bins[bin_of(own_entries[i])] + rank[i]] = own_entries[i];
    __syncthreads();
    for (int i = threadIdx.x; i < k; i += THREADS) {
        if (i >= count) {
            chosen[i] = -1;
            continue;
        }
        const u64 entry = entries[i];
        const u32 bin = bin_of(entry), begin = bins[bin], end = bin + 1 < BINS ? bins[bin + 1] : count;
        u32 at = begin;
        for (u32 other = begin; other < end; ++other) at += entries[other] > entry;
        chosen[at] = place_of(index_of(entry), pages, page_size);
    }
}

// A thread block's buffer of a row's entries, and how it finds their k-th best: alone, or with the row's other blocks.
// Compiled for what `buffered.cu` is compiled for.
#pragma once

#include "entries.cuh"

constexpr int TILE = THREADS * 4 * VECTORS;
constexpr u32 ROOM_LIMIT = CAPACITY - TILE;  // with more entries than that, the next tile might not fit; at least k
static_assert(CAPACITY > TILE, "a tile fits");

struct alignas(16) Shared {
    u64 entries[CAPACITY];
    u32 bins[2][BINS];  // double-buffered: other blocks may read one while the other is filled
    u64 lows[WARPS], highs[WARPS];
    u32 scratch[WARPS];
    Boundary boundary;
    u64 low, high;    // the least and the greatest of the entries; other blocks read them
    u32 num_entries;  // other blocks read it
};

// Where a thread may write its entries, and how many there are once its warp has written. Whole warps call `reserve`.
struct Place {
    u32 first, end_of_warp;
};
__device__ __forceinline__ Place reserve(Shared& s, u32 count) {
    const u32 up_to = sum_up_to_lane(count), of_warp = __shfl_sync(ALL_LANES, up_to, 31);
    u32 first = 0;
    if (threadIdx.x % 32 == 0 && of_warp) first = atomicAdd(&s.num_entries, of_warp);
    first = __shfl_sync(ALL_LANES, first, 0);
    return {first + up_to - count, first + of_warp};
}

// Returns the range of all threads' low and high, and stores it where other blocks read it.
__device__ EntryRange join_threads(Shared& s, u64 low, u64 high) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int step = 16; step > 0; step >>= 1) {
        low = min(low, __shfl_xor_sync(ALL_LANES, low, step));
        high = max(high, __shfl_xor_sync(ALL_LANES, high, step));
    }
    if (lane == 0) s.lows[warp] = low, s.highs[warp] = high;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) low = min(low, s.lows[i]), high = max(high, s.highs[i]);
    if (threadIdx.x == 0) s.low = low, s.high = high;
    return EntryRange(low, high);
}

// The range of this block's entries; low > high where there are none.
__device__ EntryRange find_range(Shared& s) {
    u64 low = ~0ull, high = 0;
    for (u32 i = threadIdx.x; i < s.num_entries; i += THREADS) {
        low = min(low, s.entries[i]);
        high = max(high, s.entries[i]);
    }
    return join_threads(s, low, high);
}

// Returns the range over all blocks of the row, and their number of entries.
__device__ EntryRange join_ranges(Shared& s, u32& num_entries) {
    cluster_sync();
    u64 low = ~0ull, high = 0;
    num_entries = 0;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
        low = min(low, *in_block(&s.low, rank));
        high = max(high, *in_block(&s.high, rank));
        num_entries += *in_block(&s.num_entries, rank);
    }
    return EntryRange(low, high);
}

__device__ void count_entries(const Shared& s, const EntryRange& range, u32* bins) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < s.num_entries; i += THREADS) {
        const u64 entry = s.entries[i];
        if (entry >= range.low && entry <= range.last) atomicAdd(&bins[(entry - range.low) >> range.shift], 1u);
    }
}

// Returns the bin of the wanted-th best entry counted in the bins: this block's, or those of all blocks together.
template <bool OF_ROW> __device__ Boundary find_entry(Shared& s, const u32* bins, u32 wanted) {
    auto count_of = [&](int bin) {
        if (!OF_ROW) return bins[bin];
        u32 sum = 0;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) sum += in_block(bins, rank)[bin];
        return sum;
    };
    return find_bin(count_of, wanted, s.scratch, s.boundary);
}

// Returns a threshold that at least `wanted` and at most `most` entries reach, of this block or of the row. There must
// be at least `wanted`, all in the range. The search ends with a range of one entry at the latest.
template <bool OF_ROW> __device__ u64 find_threshold(Shared& s, EntryRange range, u32 wanted, u32 most) {
    u32 above = 0;
    for (int round = 0;; ++round) {
        u32* bins = s.bins[round % 2];
        count_entries(s, range, bins);
        if (OF_ROW && CLUSTER > 1)
            cluster_sync();
        else
            __syncthreads();
        const Boundary boundary = find_entry<OF_ROW>(s, bins, wanted - above);
        above += boundary.above;
        range = range.of_bin(boundary.bin);
        if (above + boundary.inside <= most) return range.low;
    }
}

// Drops the entries below the threshold. The others move to the front, never over entries that are still to be read.
__device__ void drop_below(Shared& s, u64 threshold) {
    constexpr int EACH = 8;
    const u32 num_entries = s.num_entries;
    __syncthreads();
    if (threadIdx.x == 0) s.num_entries = 0;
    for (u32 first = 0; first < num_entries; first += THREADS * EACH) {
        u64 entries[EACH];
        u32 mask = 0;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const u32 i = first + e * THREADS + threadIdx.x;
            entries[e] = i < num_entries ? s.entries[i] : 0;
            if (i < num_entries && entries[e] >= threshold) mask |= 1u << e;
        }
        __syncthreads();
        u32 at = reserve(s, __popc(mask)).first;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (mask >> e & 1) s.entries[at++] = entries[e];
    }
    __syncthreads();
}

// Makes room for a tile and returns the new floor. Not much more than k entries stay; it rarely takes two rounds.
__device__ u64 make_room(Shared& s, u32 k) {
    const u64 floor = find_threshold<false>(s, find_range(s), k, k + (ROOM_LIMIT - k) / 8);
    drop_below(s, floor);
    return floor;
}

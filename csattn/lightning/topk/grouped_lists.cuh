// How a row's floor is found, and how a tile lists the scores that reach it: see `grouped.cu`.
#pragma once

#include "entries.cuh"

constexpr int CHUNK = 4 * THREADS;  // scores of a tile
constexpr int BEST_VECTORS = MAX_GROUPS / CHUNK;
constexpr int FLOOR_BINS = 1 << 13;  // of the groups' best, by their first digit
constexpr u32 FEW = 32;              // entries that are compared one by one
static_assert(MAX_TILES <= THREADS && MAX_GROUPS % CHUNK == 0, "a thread has a tile, and groups by fours");

// A listed score, in 64 bits: its key (`order_of`), and the place of the indexer's key in the cache. The last block
// makes an entry of the key and the number of the listed score in the row, by ascending index; so all entries differ.
__device__ __forceinline__ u64 list_key(u32 key, u32 place) { return static_cast<u64>(key) << 32 | place; }
__device__ __forceinline__ u32 key_of(u64 listed) { return listed >> 32; }
__device__ __forceinline__ u32 place_of(u64 listed) { return static_cast<u32>(listed); }

// In the first slot: how many are listed outside of the slots. In slots after the last score: how many are listed.
constexpr u32 OVERFLOW_KEY = 0xffffffffu, COUNT_MARK = 1u << 31;
__device__ __forceinline__ u64 overflow_marker(u32 count) { return list_key(OVERFLOW_KEY, count); }
__device__ __forceinline__ u64 end_marker(u32 count) { return list_key(0, COUNT_MARK | count); }

struct alignas(16) Shared {
    union {
        u32 floor_bins[FLOOR_BINS];
        u64 listed[ENTRIES];
    };
    u32 bins[BINS + 1];         // the last one for empty slots
    u32 starts[MAX_TILES + 1];  // prefix sums of the lengths of the tiles' lists
    u32 scratch[WARPS], of_warps[WARPS];
    u64 few[FEW], last;
    u32 num_few;
    Boundary boundary;
};

__device__ __forceinline__ void prepare(Shared& s) {
    for (int i = threadIdx.x; i < FLOOR_BINS; i += THREADS) s.floor_bins[i] = 0;
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    if (threadIdx.x == 0) s.num_few = 0;
    __syncthreads();
}

// Returns the bin of the wanted-th highest; bin 0 and nothing in it if there are not so many. Each warp adds up its
// share of the bins, and the one that has the bin locates it.
template <int NUM_BINS> __device__ __forceinline__ Boundary find_boundary(Shared& s, const u32* bins, u32 wanted) {
    constexpr int OF_LANE = NUM_BINS / THREADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * OF_LANE;
    u32 own_counts[OF_LANE], sum = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) sum += own_counts[i] = bins[first + i];
    const u32 of_warp = __reduce_add_sync(ALL_LANES, sum);
    if (lane == 0) s.scratch[warp] = of_warp;
    if (threadIdx.x == 0) s.boundary = {0, 0, 0};
    __syncthreads();
    u32 above = __reduce_add_sync(ALL_LANES, warp < lane && lane < WARPS ? s.scratch[lane] : 0);
    if (above < wanted && wanted <= above + of_warp) {
        above += of_warp - sum_up_to_lane(sum);
        if (above < wanted && wanted <= above + sum) find_among(own_counts, first, above, wanted, s.boundary);
    }
    __syncthreads();
    return s.boundary;
}

using ThreadMaxima = uint4[BEST_VECTORS];  // of a thread: keys, 0 where there is no group

// A threshold key that at least k groups reach, and not many more; 1 if there are not so many. Never 0.
struct Floor {
    u32 key;
    int shift;  // of the digit that it was found by
};
__device__ __forceinline__ Floor find_floor(Shared& s, const ThreadMaxima& maxima, int num_fours, u32 k) {
    auto for_each = [&](const auto& use) {
#pragma unroll
        for (int v = 0; v < BEST_VECTORS; ++v)
            if (v * THREADS < num_fours) use(maxima[v].x), use(maxima[v].y), use(maxima[v].z), use(maxima[v].w);
    };
    int shift = 19;
    static_assert(FLOOR_BINS >> 13 == 1, "keys have 32 bits");
    for_each([&](u32 best) { atomicAdd(&s.floor_bins[best >> shift], 1u); });
    __syncthreads();
    Boundary found = find_boundary<FLOOR_BINS>(s, s.floor_bins, k);
    u32 low = found.bin << shift;
#pragma unroll 1
    while (found.inside > MANY_GROUPS && shift > 0) {
        const u32 width = 1u << shift;
        shift = max(shift - 11, 0);
        for_each([&](u32 best) {
            if (best - low < width) atomicAdd(&s.bins[best - low >> shift], 1u);
        });
        __syncthreads();
        k -= found.above;
        found = find_boundary<BINS>(s, s.bins, k);
        low += found.bin << shift;
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
        __syncthreads();
    }
    return {max(low, 1u), shift};
}

// A row's listed scores, by tiles.
struct Lists {
    u64* slots;   // [num_tiles, tile_slots]
    u64* listed;  // [num_tiles, CHUNK], for tiles that list more
    int tile_slots, num_tiles;
};

struct Row {
    const float* scores;
    int num_scores;
    bool aligned;
    const int* pages;
    int page_shift;

    // Four scores; any values where there are none.
    __device__ __forceinline__ float4 load(int at) const {
        if (aligned && at + 4 <= num_scores) return issue_load(reinterpret_cast<const float4*>(scores + at));
        auto score = [&](int i) { return at + i < num_scores ? scores[at + i] : 0; };
        return make_float4(score(0), score(1), score(2), score(3));
    }
    // Their keys; 0 where there is no score.
    __device__ __forceinline__ uint4 keys_of(float4 four, int at) const {
        auto key = [&](int i, float score) { return at + i < num_scores ? max(order_of(score), 1u) : 0; };  // NaN: 1
        return make_uint4(key(0, four.x), key(1, four.y), key(2, four.z), key(3, four.w));
    }
    __device__ __forceinline__ int load_page(int at) const {
        return pages && at < num_scores ? issue_load(pages + (at >> page_shift)) : 0;
    }
    // The place of a score's key in the cache; the next ones follow it, up to a multiple of four.
    __device__ __forceinline__ u32 place_of(int at, int page) const {
        return pages ? (page << page_shift) + (at & ((1 << page_shift) - 1)) : at;
    }
};

// Rows of another array, which are read next at the places of the chosen keys: to be prefetched.
struct NextRows {
    const char* rows;  // or null
    long long stride;
    u32 bytes;  // a multiple of 16, as is where a row begins

    __device__ __forceinline__ void prefetch(u32 place) const {
        if (rows) prefetch_l2(rows + static_cast<long long>(place) * stride, bytes);
    }
};

// Lists a tile's scores that reach the floor, by ascending index: a thread has four keys and the place of the first.
// Returns whether there are slots for all of them.
__device__ __forceinline__ bool list_tile(Shared& s, const Lists& lists, int tile, uint4 keys, u32 place, u32 floor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 of_keys[4] = {keys.x, keys.y, keys.z, keys.w};
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) count += of_keys[i] >= floor;
    u32 to = 0, of_warp = 0;
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {  // of counts up to four
        const u32 lanes = __ballot_sync(ALL_LANES, count >> bit & 1);
        to += lanes_before(lanes, lane) << bit, of_warp += __popc(lanes) << bit;
    }
    if (lane == 0) s.of_warps[warp] = of_warp;
    __syncthreads();
    const u32 of_lane = lane < WARPS ? s.of_warps[lane] : 0, total = __reduce_add_sync(ALL_LANES, of_lane);
    to += __reduce_add_sync(ALL_LANES, lane < warp ? of_lane : 0);
    u64* const slots = lists.slots + static_cast<long long>(tile) * lists.tile_slots;
    const bool fits = total <= lists.tile_slots;
    u64* put = (fits ? slots : lists.listed + static_cast<long long>(tile) * CHUNK) + to;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (of_keys[i] >= floor) store_relaxed(put++, list_key(of_keys[i], place + i));
#pragma unroll 1
    for (int i = (fits ? total : 1) + threadIdx.x; i < lists.tile_slots; i += THREADS)
        store_relaxed(slots + i, end_marker(total));
    if (fits) return true;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        store_relaxed(slots, overflow_marker(total));
    }
    return false;
}

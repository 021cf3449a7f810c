// How a row's last block chooses among the scores that all of its blocks have listed: see `grouped.cu`.
#pragma once

#include "grouped_lists.cuh"

// Returns the wanted-th best of a few entries. Each warp compares one of them with all.
__device__ __forceinline__ u64 find_last_of_few(Shared& s, u32 wanted, u32 number) {
    const int lane = threadIdx.x % 32;
    const u64 other = lane < number ? s.few[lane] : 0;
    for (u32 i = threadIdx.x / 32; i < number; i += WARPS)
        if (__popc(__ballot_sync(ALL_LANES, other > s.few[i])) == wanted - 1) s.last = s.few[i];
    __syncthreads();
    return s.last;
}

// Returns the k-th best of the entries that for_each(use) passes to `use`: in all threads at a time, 0 where a thread
// has none. It is the wanted-th best in the range, which has `inside` entries.
template <class Each>
__device__ __forceinline__ u64 find_last(Shared& s, const Each& for_each, EntryRange range, u32 wanted, u32 inside) {
#pragma unroll 1
    while (inside != wanted && inside > FEW) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
        __syncthreads();
        for_each([&](u64 entry) {
            if (range.holds(entry)) atomicAdd(&s.bins[(entry - range.low) >> range.shift], 1u);
        });
        __syncthreads();
        const Boundary boundary = find_boundary<BINS>(s, s.bins, wanted);
        wanted -= boundary.above, inside = boundary.inside;
        range = range.of_bin(boundary.bin);
    }
    if (inside == wanted) return range.low;
    for_each([&](u64 entry) {
        if (range.holds(entry)) s.few[atomicAdd(&s.num_few, 1u)] = entry;
    });
    __syncthreads();
    return find_last_of_few(s, wanted, inside);
}

// A row's slots, divided among the threads: a warp has neighbouring ones.
constexpr int SLOTS_EACH = SLOTS / THREADS;
struct Slots {
    u64 values[SLOTS_EACH];

    __device__ __forceinline__ static int number(int i) {
        return static_cast<int>(threadIdx.x) / 32 * 32 * SLOTS_EACH + i * 32 + static_cast<int>(threadIdx.x) % 32;
    }
    __device__ __forceinline__ u64 entry(int i) const { return join(key_of(values[i]), number(i)); }

    // Polls until all slots are written.
    __device__ __forceinline__ void load(const u64* slots, int count) {
        const int there = count - number(0);
        slots += number(0);
        for (bool is_missing = true; is_missing;) {
            is_missing = false;
#pragma unroll
            for (int i = 0; i < SLOTS_EACH; ++i) values[i] = i * 32 < there ? load_relaxed(slots + i * 32) : 1;
#pragma unroll
            for (int i = 0; i < SLOTS_EACH; ++i) is_missing |= values[i] == 0;
        }
    }
};

// Writes the places of entries not worse than `last`, by ascending index.
__device__ __forceinline__ void write_chosen(Shared& s, const Slots& slots, u64 last, int* chosen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 lanes[SLOTS_EACH], count = 0;
#pragma unroll
    for (int i = 0; i < SLOTS_EACH; ++i) {
        lanes[i] = __ballot_sync(ALL_LANES, slots.entry(i) >= last);
        count += __popc(lanes[i]);
    }
    if (lane == 0) s.of_warps[warp] = count;
    __syncthreads();
    u32 at = sum_of_first(s.of_warps, warp, lane);
#pragma unroll
    for (int i = 0; i < SLOTS_EACH; ++i) {
        if (lanes[i] >> lane & 1) chosen[at + lanes_before(lanes[i], lane)] = place_of(slots.values[i]);
        at += __popc(lanes[i]);
    }
}

// All listed scores, where a tile may have listed more than it has slots for.
struct Collected {
    const Shared& s;
    const Lists& lists;
    u32 total;
    bool is_here;  // in shared memory

    __device__ __forceinline__ const u64* list_of(int tile) const {
        const u64* const slots = lists.slots + static_cast<long long>(tile) * lists.tile_slots;
        const bool is_long = s.starts[tile + 1] - s.starts[tile] > lists.tile_slots;
        return is_long ? lists.listed + static_cast<long long>(tile) * CHUNK : slots;
    }
    // Calls use(entry, listed) by ascending index: in all threads at a time, with 0 where a thread has none.
    template <class Use> __device__ __forceinline__ void for_each(const Use& use) const {
        const int num_lists = is_here ? 1 : lists.num_tiles;
        for (int tile = 0; tile < num_lists; ++tile) {
            const u32 start = is_here ? 0 : s.starts[tile], count = (is_here ? total : s.starts[tile + 1]) - start;
            const u64* const from = is_here ? s.listed : list_of(tile);
#pragma unroll 4
            for (u32 first = 0; first < count; first += THREADS) {
                const u32 i = first + threadIdx.x;
                const u64 one = i >= count ? 0 : is_here ? from[i] : __ldcg(from + i);
                use(i < count ? join(key_of(one), start + i) : 0, one);
            }
        }
    }
};

// How many scores a tile has listed.
__device__ __forceinline__ u32 count_listed(const Lists& lists, int tile) {
    const u64* const slots = lists.slots + static_cast<long long>(tile) * lists.tile_slots;
    const u64 first = load_relaxed(slots), last = load_relaxed(slots + lists.tile_slots - 1);
    if (key_of(first) == OVERFLOW_KEY) return place_of(first);
    return key_of(last) ? lists.tile_slots : place_of(last) & ~COUNT_MARK;
}

// Copies all lists into shared memory.
__device__ __forceinline__ void copy_lists(Shared& s, const Collected& all) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int tile = 0; tile < all.lists.num_tiles; ++tile) {
        const u32 start = s.starts[tile], count = s.starts[tile + 1] - start;
        const u64* const from = all.list_of(tile);
        if (count > all.lists.tile_slots) {  // copied by the block; shorter ones by a warp each
#pragma unroll 4
            for (u32 i = threadIdx.x; i < count; i += THREADS) s.listed[start + i] = __ldcg(from + i);
        } else if (tile % WARPS == warp) {
#pragma unroll 4
            for (u32 i = lane; i < count; i += 32) s.listed[start + i] = __ldcg(from + i);
        }
    }
    __syncthreads();
}

// Chooses where a tile has listed more than it has slots for, or many entries share the k-th best's bin.
__device__ __noinline__ void choose_of_many(Shared& s, const Lists& lists, u32 floor, u32 k, int* chosen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __threadfence();
    const u32 count = threadIdx.x < lists.num_tiles ? count_listed(lists, threadIdx.x) : 0;
    const u32 start = sum_before(count, s.scratch);
    if (threadIdx.x < MAX_TILES) s.starts[threadIdx.x] = start;
    if (threadIdx.x == THREADS - 1) s.starts[MAX_TILES] = start + count;
    __syncthreads();
    const u32 total = s.starts[MAX_TILES];
    const Collected all{s, lists, total, total <= ENTRIES};
    if (all.is_here) copy_lists(s, all);
    const EntryRange range(static_cast<u64>(floor) << 32, ~0ull);
    auto for_each = [&](const auto& use) { all.for_each([&](u64 entry, u64) { use(entry); }); };
    const u64 last = find_last(s, for_each, range, k, total);
    u32 before = 0;
    all.for_each([&](u64 entry, u64 listed) {
        const u32 lanes = __ballot_sync(ALL_LANES, entry >= last);
        __syncthreads();
        if (lane == 0) s.scratch[warp] = __popc(lanes);
        __syncthreads();
        const u32 of_lane = lane < WARPS ? s.scratch[lane] : 0;
        const u32 to = before + __reduce_add_sync(ALL_LANES, lane < warp ? of_lane : 0);
        if (entry >= last) chosen[to + lanes_before(lanes, lane)] = place_of(listed);
        before += __reduce_add_sync(ALL_LANES, of_lane);
    });
}

// The first digit of listed keys, from the floor up: the k-th best is not much above it.
struct Digit {
    u32 floor, shift;

    __device__ __forceinline__ Digit(Floor found) : floor(found.key), shift(max(found.shift - 7, 0)) {}
    __device__ __forceinline__ u32 bin_of(u32 key) const { return key ? min((key - floor) >> shift, BINS - 1u) : BINS; }
    __device__ __forceinline__ u64 first_of(u32 bin) const { return static_cast<u64>(floor + (bin << shift)) << 32; }
};

// Chooses among the scores that all blocks have listed.
__device__ __forceinline__ void choose(Shared& s, const Lists& lists, Floor floor, u32 k, int* chosen) {
    Slots slots;
    slots.load(lists.slots, lists.num_tiles * lists.tile_slots);
    const Digit digit(floor);
    u32 bins[SLOTS_EACH], top = 0;
#pragma unroll
    for (int i = 0; i < SLOTS_EACH; ++i) {
        const u32 key = key_of(slots.values[i]);
        top = max(top, key);
        atomicAdd(&s.bins[bins[i] = digit.bin_of(key)], 1u);
    }
    if (__syncthreads_or(top == OVERFLOW_KEY)) return choose_of_many(s, lists, floor.key, k, chosen);
    const Boundary found = find_boundary<BINS>(s, s.bins, k);
    const u32 wanted = k - found.above;
    u64 last = digit.first_of(found.bin);
    if (found.inside != wanted) {
        if (found.inside > FEW) return choose_of_many(s, lists, floor.key, k, chosen);
        bool has_some = false;
#pragma unroll
        for (int i = 0; i < SLOTS_EACH; ++i) has_some |= bins[i] == found.bin;
        if (has_some)
#pragma unroll
            for (int i = 0; i < SLOTS_EACH; ++i)
                if (bins[i] == found.bin) s.few[atomicAdd(&s.num_few, 1u)] = slots.entry(i);
        __syncthreads();
        last = find_last_of_few(s, wanted, found.inside);
    }
    write_chosen(s, slots, last, chosen);
}

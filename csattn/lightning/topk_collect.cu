// How a row's last block chooses among what all of its blocks have listed: see `topk_lists.cu`.

__device__ __forceinline__ Listed read(const Listed* from) {
    const uint2 words = __ldcg(reinterpret_cast<const uint2*>(from));
    return {words.x, words.y};
}

// What is listed, with its number: whole warps have it in the order of the index.
struct Collected {
    u32 total;
    bool is_here;  // in shared memory

    // Calls use(entry, listed); with 0 where a lane has none.
    template <class Use>
    __device__ __forceinline__ void for_each(const Shared& s, const Lists& lists, const Use& use) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (is_here) {
            for (u32 i = threadIdx.x; i < (total + 31) / 32 * 32; i += THREADS)
                use(i < total ? join(s.listed[i].key, i) : 0, i < total ? s.listed[i] : Listed{0, 0});
            return;
        }
        for (int tile = warp; tile < lists.num_tiles; tile += WARPS) {
            const u32 start = s.starts[tile], count = s.starts[tile + 1] - start;
            const Listed* const listed = lists.listed + static_cast<long long>(tile) * lists.tile_len;
#pragma unroll 4
            for (u32 i = lane; i < (count + 31) / 32 * 32; i += 32) {
                const Listed one = i < count ? read(listed + i) : Listed{0, 0};
                use(i < count ? join(one.key, start + i) : 0, one);
            }
        }
    }
};

// Keys that are in question.
struct Keys {
    u32 low, width;

    __device__ __forceinline__ bool holds(u32 key) const { return key - low <= width; }
};

// The first entries of the lists of a warp's tiles, whether they are there or not.
constexpr int TILES_AT_ONCE = 16;
using Heads = Listed[TILES_AT_ONCE];
__device__ __forceinline__ void load_heads(Heads& heads, const Lists& lists) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Listed* from = lists.listed + static_cast<long long>(warp) * lists.tile_len + lane;
#pragma unroll
    for (int i = 0; i < TILES_AT_ONCE; ++i, from += static_cast<long long>(WARPS) * lists.tile_len)
        heads[i] = i * WARPS + warp < lists.num_tiles ? read(from) : Listed{0, 0};
}

// Copies all lists into shared memory; of the last few entries, whose keys are in question, another list.
__device__ __forceinline__ void copy_lists(Shared& s, const Heads& heads, const Lists& lists, Keys keys) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto take = [&](Listed one, u32 number) {
        s.listed[number] = one;
        if (keys.holds(one.key)) s.few[atomicAdd(&s.num_few, 1u) % FEW] = join(one.key, number);
    };
#pragma unroll
    for (int i = 0; i < TILES_AT_ONCE; ++i) {
        const int tile = min(i * WARPS + warp, MAX_TILES - 1);
        const u32 start = s.starts[tile];
        if (lane < s.starts[tile + 1] - start) take(heads[i], start + lane);
    }
    for (int tile = warp; tile < lists.num_tiles; tile += WARPS) {
        const u32 start = s.starts[tile], count = s.starts[tile + 1] - start;
        const Listed* const listed = lists.listed + static_cast<long long>(tile) * lists.tile_len;
        const u32 taken = tile < TILES_AT_ONCE * WARPS ? 32 : 0;
        for (u32 i = taken + lane; i < count; i += 32) take(read(listed + i), start + i);
    }
}

// The k-th best entry; what is among the k best and not in the range is above it, and was counted.
__device__ u64 find_last(Shared& s, const Lists& lists, const Collected& all, Range range, u32 wanted, u32 inside,
                         bool is_gathered) {
    const int lane = threadIdx.x % 32;
    while (inside != wanted && inside > FEW) {
        for (int i = threadIdx.x; i < BINS + BINS / 8; i += THREADS) s.bins[i] = 0;
        __syncthreads();
        all.for_each(s, lists, [&](u64 entry, Listed) {
            if (range.holds(entry)) atomicAdd(&bin_at(s, (entry - range.low) >> range.shift), 1u);
        });
        __syncthreads();
        const Boundary boundary = find_bin([&](int bin) { return bin_at(s, bin); }, wanted, s.scratch, s.boundary);
        wanted -= boundary.above, inside = boundary.inside;
        range = range.of_bin(boundary.bin);
    }
    if (inside == wanted) return range.low;
    if (!is_gathered) {
        all.for_each(s, lists, [&](u64 entry, Listed) {
            if (range.holds(entry)) s.few[atomicAdd(&s.num_few, 1u)] = entry;
        });
        __syncthreads();
    }
    const u64 mine = lane < inside ? s.few[lane] : 0;
    u32 better = 0;
    for (u32 i = 0; i < inside; ++i) better += s.few[i] > mine;
    const u32 last = __ffs(__ballot_sync(ALL_LANES, mine != 0 && better == wanted - 1)) - 1;
    return __shfl_sync(ALL_LANES, mine, last);
}

// Writes the places of what is not worse than `last`, in the order of the index: a warp those of neighbours.
__device__ __forceinline__ void write_chosen_here(Shared& s, u32 total, u64 last, int* chosen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 run_len = (total + THREADS - 1) / THREADS * 32;
    const u32 first = warp * run_len + lane, end = min(total, (warp + 1) * run_len);
    u32 count = 0;
#pragma unroll 4
    for (u32 i = first; i < end; i += 32) count += join(s.listed[i].key, i) >= last;
    count = __reduce_add_sync(ALL_LANES, count);
    if (lane == 0) s.floors[warp] = count;
    __syncthreads();
    chosen += __reduce_add_sync(ALL_LANES, lane < warp ? s.floors[lane] : 0);
#pragma unroll 2
    for (u32 i = first; i < first + run_len; i += 32) {
        const Listed one = i < end ? s.listed[i] : Listed{0, 0};
        const bool is_chosen = i < end && join(one.key, i) >= last;
        const u32 lanes = __ballot_sync(ALL_LANES, is_chosen);
        if (is_chosen) chosen[__popc(lanes & ((1u << lane) - 1))] = one.place;
        chosen += __popc(lanes);
    }
}
__device__ void write_chosen(Shared& s, const Lists& lists, const Collected& all, u64 last, int* chosen) {
    u32 before = 0;
    const int lane = threadIdx.x % 32;
    for (int tile = 0; tile < lists.num_tiles; ++tile) {
        const u32 start = s.starts[tile], count = s.starts[tile + 1] - start;
        const Listed* const listed = lists.listed + static_cast<long long>(tile) * lists.tile_len;
        for (u32 first = 0; first < count; first += THREADS) {
            const u32 i = first + threadIdx.x;
            const Listed one = i < count ? read(listed + i) : Listed{0, 0};
            const bool is_chosen = i < count && join(one.key, start + i) >= last;
            const u32 lanes = __ballot_sync(ALL_LANES, is_chosen);
            __syncthreads();
            if (lane == 0) s.scratch[threadIdx.x / 32] = __popc(lanes);
            __syncthreads();
            const u32 of_lane = lane < WARPS ? s.scratch[lane] : 0;
            const u32 to = before + __reduce_add_sync(ALL_LANES, lane < threadIdx.x / 32 ? of_lane : 0);
            if (is_chosen) chosen[to + __popc(lanes & ((1u << lane) - 1))] = one.place;
            before += __reduce_add_sync(ALL_LANES, of_lane);
        }
    }
}

// Chooses among what all blocks have listed.
__device__ __forceinline__ void choose(Shared& s, const Lists& lists, Span span, const u32* bins, u32 k,
                                       int* chosen) {
    const u32 marked = threadIdx.x < lists.num_tiles ? __ldcg(lists.counts + threadIdx.x) : 0, count = marked & ~MARK;
    u32 counted[BINS_EACH];
#pragma unroll
    for (int i = 0; i < BINS_EACH; i += 4) {
        const uint4 four = __ldcg(reinterpret_cast<const uint4*>(bins + BINS - (threadIdx.x + 1) * BINS_EACH + i));
        counted[i] = four.x, counted[i + 1] = four.y, counted[i + 2] = four.z, counted[i + 3] = four.w;
    }
    const Digit digit(span);
    Heads heads;
    load_heads(heads, lists);
    const u32 start = sum_before(count, s.floors);
    if (threadIdx.x < MAX_TILES) s.starts[threadIdx.x] = start;
    if (threadIdx.x == THREADS - 1) s.starts[MAX_TILES] = start + count;
    const bool is_counted = !__syncthreads_or(marked != count);
    const u32 total = s.starts[MAX_TILES];
    const Collected all{total, total <= ENTRIES};
    Range range(static_cast<u64>(span.floor) << 32, static_cast<u64>(span.top) << 32 | 0xffffffffu);
    u32 wanted = k, inside = total;
    if (is_counted) {
        const Boundary found = find_bin([&](u32 bin) { return counted[bin % BINS_EACH]; }, k, s.scratch, s.boundary);
        range = digit.of_bin(found.bin), wanted -= found.above, inside = found.inside;
    }
    const bool is_few = inside != wanted && inside <= FEW && all.is_here;
    if (all.is_here) copy_lists(s, heads, lists, {is_few ? static_cast<u32>(range.low >> 32) : 0xffffffffu,
                                                  is_few ? static_cast<u32>((range.last - range.low) >> 32) : 0});
    __syncthreads();
    const u64 last = find_last(s, lists, all, range, wanted, inside, is_few);
    if (all.is_here)
        write_chosen_here(s, total, last, chosen);
    else
        write_chosen(s, lists, all, last, chosen);
}

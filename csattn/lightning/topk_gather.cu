// The short way: what may be among the k best of a row is gathered in its first block, which chooses alone.
//
// Each block finds a floor by itself, the (k / CLUSTER)-th best of its chunks' best scores, one for each lane: so many of
// its scores are not worse. The least of all blocks' floors is one that k scores of the row reach, and where the best
// scores lie scattered, few more do.

// The least and the greatest best score of a lane, or all keys where there is none.
__device__ Range find_span(Shared& s, u32 best) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 of_warp[2] = {__reduce_max_sync(ALL_LANES, best ? ~best : 0), __reduce_max_sync(ALL_LANES, best)};
    if (lane < 2) s.scratch[lane][warp] = of_warp[lane];
    __syncthreads();
    const u32 low = ~__reduce_max_sync(ALL_LANES, lane < WARPS ? s.scratch[0][lane] : 0);
    const u32 high = __reduce_max_sync(ALL_LANES, lane < WARPS ? s.scratch[1][lane] : 0);
    return high ? Range(low, high - low) : all_from(1);
}

__device__ __forceinline__ u32 best_of(const Keys& keys) {
    u32 best = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) best = max(max(max(keys[v].x, keys[v].y), max(keys[v].z, keys[v].w)), best);
    return best;
}

// The bin of the wanted-th highest key that the block has counted; if there are fewer, the lowest.
__device__ Boundary find_bin_of_block(Shared& s, u32 wanted) {
    if (threadIdx.x == 0) s.boundary = {0, 0, 0};
    __syncthreads();
    const Boundary found = find_bin([&](int bin) { return s.bins[bin]; }, wanted, s.scratch[0], s.boundary);
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    __syncthreads();
    return found;
}

// A key that at least `wanted` of the block's scores reach, or 1.
__device__ u32 find_floor(Shared& s, const Run& run, const Keys& kept, u32 wanted) {
    Range range = find_span(s, best_of(kept));
    const bool is_kept = !run.has(VECTORS);
    const u32 enough = wanted / 4;
    for (bool first = true;; first = false) {
        for_each_chunk(run, kept, [&](int, const Keys& keys) {
            const u32 best = best_of(keys);
            count_key(s, range, first ? min(best, range.low + range.width) : best);
        });
        const Boundary boundary = find_bin_of_block(s, wanted);
        if (first && boundary.bin == 0) return 1;  // there may be fewer
        range = range.of_bin(boundary.bin);
        wanted -= boundary.above;
        if (!is_kept || boundary.inside <= enough || range.width == 0) return range.low;
    }
}

// The least of the blocks' floors.
__device__ u32 join_floors(Shared& s, u32 floor, Blocks& blocks) {
    if (threadIdx.x < CLUSTER) in_block(s.floors, threadIdx.x)[blocks.rank] = floor;
    blocks.sync();
    return ~__reduce_max_sync(ALL_LANES, ~s.floors[threadIdx.x % CLUSTER]);
}

// Gathers what reaches the floor, in the order of its index, if there is room. Returns how many do.
__device__ u32 gather(Shared& s, const Run& run, const Keys& kept, u32 floor, Blocks& blocks) {
    const Range range = all_from(floor);
    Counts mine{0, 0}, all;
    for_each_vector(run, kept, [&](uint4 keys, int) { mine.inside += count_four(keys, range).inside; });
    u32 at = sum_over_runs(s, run, mine, blocks, all).inside;
    if (all.inside > ENTRIES) return all.inside;
    u64* const entries = in_block(s.entries, 0);
    for_each_chunk(run, kept, [&](int first, const Keys& keys) {
        u32 packed = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) packed |= count_four(keys[v], range).inside << 8 * v;
        const u32 up_to = sum_up_to_lane(packed), before = up_to - packed;  // no byte of it overflows
        const u32 total = __shfl_sync(ALL_LANES, up_to, 31);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            u32 place = at + (before >> 8 * v & 0xff);
            const u32 index = run.index(first + v);
            auto add = [&](u32 key, u32 i) {
                if (range.holds(key)) entries[place++] = join(key, index + i);
            };
            add(keys[v].x, 0), add(keys[v].y, 1), add(keys[v].z, 2), add(keys[v].w, 3);
            at += total >> 8 * v & 0xff;
        }
    });
    blocks.sync();
    return all.inside;
}

// The entries of the first block as its warps have them: each a run, a lane every 32nd of it.
struct Gathered {
    static constexpr int EACH = (ENTRIES + THREADS - 1) / THREADS;
    u64 entries[EACH];  // 0: none
    int places[EACH];   // where the scores' keys lie
    int number;         // of them that any lane has

    __device__ __forceinline__ Gathered(const u64* from, int count, const int* pages, int page_size)
        : number((count + THREADS - 1) / THREADS) {
        const int first = threadIdx.x / 32 * 32 * number + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool is_there = i < number && first + 32 * i < count;
            entries[i] = is_there ? from[first + 32 * i] : 0;
            places[i] = is_there && BY_POSITION ? place_of(index_of(entries[i]), pages, page_size) : 0;
        }
    }
    template <class Use> __device__ __forceinline__ void for_each(const Use& use) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (i < number) use(i, static_cast<u32>(entries[i] >> 32));
    }
};

// The range that the k-th best entry lies in, and how many of it are among the k best. All have keys from `floor` on.
__device__ Range find_last(Shared& s, const Gathered& mine, u32 floor, u32 k, u32& quota, u32& inside) {
    u32 top = floor;
    mine.for_each([&](int, u32 key) { top = max(top, key); });
    const Range span = find_span(s, top);
    Range range(floor, span.low + span.width - floor);
    for (quota = k;;) {
        mine.for_each([&](int, u32 key) { count_key(s, range, key); });
        const Boundary boundary = find_bin_of_block(s, quota);
        quota -= boundary.above, inside = boundary.inside;
        range = range.of_bin(boundary.bin);
        if (inside == quota || inside <= FEW || range.width == 0) return range;
    }
}

// Writes the k best of `count` gathered entries.
__device__ void choose_gathered(Shared& s, int count, u32 floor, int k, const int* pages, int page_size, int* chosen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Gathered mine(s.entries, count, pages, page_size);
    u32 quota, inside;
    const Range range = find_last(s, mine, floor, k, quota, inside);
    u32 is_above = 0, is_inside = 0;
    mine.for_each([&](int i, u32 key) { is_above |= range.is_below(key) << i, is_inside |= range.holds(key) << i; });
    if (inside > quota && inside <= FEW) {
        mine.for_each([&](int i, u32) {
            if (is_inside >> i & 1) s.few[atomicAdd(&s.num_few, 1u)] = mine.entries[i];
        });
        __syncthreads();
        mine.for_each([&](int i, u32) {
            if (!(is_inside >> i & 1)) return;
            u32 better = 0;
            for (u32 other = 0; other < inside; ++other) better += s.few[other] > mine.entries[i];
            is_above |= (better < quota) << i;
        });
        is_inside = quota = 0;
    }
    const u32 of_warp = __reduce_add_sync(ALL_LANES, __popc(is_above) | __popc(is_inside) << 16);
    if (lane == 0) s.scratch[1][warp] = of_warp;
    __syncthreads();
    u32 before = __reduce_add_sync(ALL_LANES, lane < warp ? s.scratch[1][lane] : 0);
    mine.for_each([&](int i, u32) {
        const u32 above = __ballot_sync(ALL_LANES, is_above >> i & 1), equal = __ballot_sync(ALL_LANES, is_inside >> i & 1);
        const u32 lanes_before = (1u << lane) - 1, ahead = (before >> 16) + __popc(equal & lanes_before);
        const u32 place = (before & 0xffff) + __popc(above & lanes_before) + min(ahead, quota);
        if (is_above >> i & 1 || (is_inside >> i & 1 && ahead < quota)) {
            if (BY_POSITION)
                chosen[place] = mine.places[i];
            else
                s.entries[place] = mine.entries[i];
        }
        before += __popc(above) | __popc(equal) << 16;
    });
    if (BY_POSITION) return;
    __syncthreads();
    write_best(s.entries, k, k, pages, page_size, chosen);
}

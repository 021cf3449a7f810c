// The k best scores of a row, exactly and in ascending order, where the best of groups of its scores are known.
//
// Each block has a tile of neighbouring scores. From the groups' best it finds a floor that k scores of the row reach, and
// lists what of its tile does. Where the best scores lie scattered, that is little more than k. The block that is done last
// chooses among what all have listed; no block waits for another.
//
// Compiled for THREADS, ENTRIES (that the last block has room for), MAX_TILES (of a row), MAX_GROUPS.

constexpr int CHUNK = 4 * THREADS;  // scores that a block has at a time
constexpr int BEST_VECTORS = MAX_GROUPS / CHUNK;
constexpr u32 FEW = 32;  // entries that are compared one by one
constexpr u32 MARK = 1u << 31;  // of the number of a tile's entries: not all were counted
constexpr int COUNTERS = BINS + 4;  // of a row; the next row's are aligned, too
static_assert(MAX_TILES <= THREADS && MAX_GROUPS % CHUNK == 0, "a thread has a tile, and groups by fours");

// What is listed of a key: how its score compares, and where it lies. Of what all blocks have listed of a row, an entry is
// this with its number in the order of the index instead of the place; so all entries differ.
struct alignas(8) Listed {
    u32 place, key;
};

struct Shared {
    Listed listed[ENTRIES];
    u32 bins[BINS + BINS / 8];
    u32 starts[MAX_TILES + 1];  // of the tiles' lists among all that is listed
    u32 scratch[WARPS], floors[WARPS], tops[WARPS];
    u64 few[FEW];
    u32 num_few;
    Boundary boundary;
};

// Eight neighbouring bins, which a thread adds up, lie so that all banks are used.
__device__ __forceinline__ u32& bin_at(Shared& s, u32 bin) { return s.bins[bin + bin / 8]; }

// Entries from low to last, in bins of 2 ** shift values.
struct Range {
    u64 low, last;
    int shift;

    __device__ __forceinline__ Range(u64 low_, u64 last_) : low(low_), last(last_) {
        const u64 width = last - low;
        shift = width < BINS ? 0 : 53 - __clzll(width);
    }
    __device__ __forceinline__ bool holds(u64 entry) const { return entry >= low && entry <= last; }
    __device__ __forceinline__ Range of_bin(u32 bin) const {
        const u64 first = low + (static_cast<u64>(bin) << shift);
        return Range(first, min(last, first + ((1ull << shift) - 1)));
    }
};

using Bests = uint4[BEST_VECTORS];  // of a thread: keys, 0 where there is no group

// A key that at least `wanted` of the warp's groups reach, or 1; of such keys not much less than the greatest.
template <int NUM_VECTORS> __device__ __forceinline__ u32 find_floor(const Bests& bests, u32 wanted, u32& top) {
    auto for_each = [&](auto use) {
#pragma unroll
        for (int v = 0; v < NUM_VECTORS; ++v) use(bests[v].x), use(bests[v].y), use(bests[v].z), use(bests[v].w);
    };
    u32 high = 0, not_low = 0;
    for_each([&](u32 best) { high = max(high, best), not_low = max(not_low, ~(best - 1)); });  // of 0: 0
    top = high = __reduce_max_sync(ALL_LANES, high);
    u32 low = ~__reduce_max_sync(ALL_LANES, not_low) + 1, of_low = 0;
    if (high == 0) return 1;
    // In quarters: counts of three keys are added up in one word.
    static_assert(NUM_VECTORS <= 8, "a warp has up to 1024 groups");
    for (bool is_first = true; is_first || low < high; is_first = false) {
        const u32 width = high - low, step = width / 4 + 1;
        const u32 keys[3] = {is_first ? low : low + step, low + min(2 * step, width), low + min(3 * step, width)};
        u32 counts[3] = {0, 0, 0};
        for_each([&](u32 best) { counts[0] += best >= keys[0], counts[1] += best >= keys[1], counts[2] += best >= keys[2]; });
        const u32 both = __reduce_add_sync(ALL_LANES, counts[0] | counts[1] << 16);
        counts[0] = both & 0xffff, counts[1] = both >> 16, counts[2] = __reduce_add_sync(ALL_LANES, counts[2]);
        if (is_first && counts[0] < wanted) return 1;
        const int reached = (counts[0] >= wanted) + (counts[1] >= wanted) + (counts[2] >= wanted);
        if (reached < 3) high = keys[reached] - 1;
        if (reached > 0) low = keys[reached - 1], of_low = counts[reached - 1];
        if (of_low <= wanted + wanted / 16 && of_low) break;
    }
    return low;
}

// What is listed of a row, by tiles.
struct Lists {
    Listed* listed;  // tile_len of each tile
    u32* counts;
    int tile_len, num_tiles;
};

struct Row {
    const float* scores;
    int num_scores;
    bool aligned;
    const int* pages;
    int page_shift;

    __device__ __forceinline__ static u32 key_of(float score) { return max(order_of(score), 1u); }  // NaN is there
    // Four keys; 0 where there is no score.
    __device__ __forceinline__ uint4 load(int at) const {
        if (aligned && at + 4 <= num_scores) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(scores + at));
            return make_uint4(key_of(four.x), key_of(four.y), key_of(four.z), key_of(four.w));
        }
        auto key = [&](int i) { return at + i < num_scores ? key_of(scores[at + i]) : 0; };
        return make_uint4(key(0), key(1), key(2), key(3));
    }
    __device__ __forceinline__ uint4 without_others(uint4 keys, int at) const {
        auto key = [&](int i, u32 of_score) { return at + i < num_scores ? of_score : 0; };
        return make_uint4(key(0, keys.x), key(1, keys.y), key(2, keys.z), key(3, keys.w));
    }
    // Where the key of a score lies, and those behind it up to a multiple of four.
    __device__ __forceinline__ u32 place_of(int at) const {
        if (!pages || at >= num_scores) return at;
        return (pages[at >> page_shift] << page_shift) + (at & ((1 << page_shift) - 1));
    }
};

// The first digit of what is listed, which all blocks count together: bins of keys.
struct Digit {
    u32 floor, shift;

    __device__ __forceinline__ Digit(u32 floor_, u32 top)
        : floor(floor_), shift(top - floor_ < BINS ? 0 : 21 - __clz(top - floor_)) {}
    __device__ __forceinline__ u32 bin_of(u32 key) const { return (key - floor) >> shift; }
    __device__ __forceinline__ Range of_bin(u32 bin) const {
        const u64 first = floor + (static_cast<u64>(bin) << shift);
        return Range(first << 32, (first + (1ull << shift) << 32) - 1);
    }
};

// Lists what of a tile reaches the floor, in the order of its index. The tile's first keys have been loaded. It is counted
// by its first digit, too, but of many at a time, which might wait for each other in few bins: then the tile is marked.
__device__ __forceinline__ void list_tile(Shared& s, const Row& row, const Lists& lists, int tile, uint4 keys, u32 place,
                                          const Digit& digit, u32* bins) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, end = (tile + 1) * lists.tile_len;
    Listed* const listed = lists.listed + static_cast<long long>(tile) * lists.tile_len;
    u32 before = 0, mark = 0;
    for (int first = end - lists.tile_len; first < end; first += CHUNK) {
        const int at = first + 4 * threadIdx.x;
        if (first + lists.tile_len > end) {
            keys = row.load(at), place = row.place_of(at);
            __syncthreads();  // the last chunk's sums have been read
        }
        const u32 of_keys[4] = {keys.x, keys.y, keys.z, keys.w};
        u32 count = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) count += of_keys[i] >= digit.floor;
        const u32 up_to = sum_up_to_lane(count);
        if (lane == 31) s.scratch[warp] = up_to;
        __syncthreads();
        const u32 of_lane = lane < WARPS ? s.scratch[lane] : 0, total = __reduce_add_sync(ALL_LANES, of_lane);
        u32 to = before + __reduce_add_sync(ALL_LANES, lane < warp ? of_lane : 0) + up_to - count;
        const bool is_counted = total <= CHUNK / 8;
        if (!is_counted) mark = MARK;
        before += total;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (of_keys[i] < digit.floor) continue;
            listed[to++] = {place + i, of_keys[i]};
            if (is_counted) atomicAdd(&bins[digit.bin_of(of_keys[i])], 1u);
        }
    }
    if (threadIdx.x == 0) lists.counts[tile] = before | mark;
}

// Says that this block is done. The row's last block waits for the others, which were begun before it; what they have
// written is seen then.
__device__ __forceinline__ bool is_last(u32* arrivals, int tile, int num_tiles) {
    __syncthreads();
    if (tile < num_tiles - 1) {
        if (threadIdx.x) return false;
        __threadfence();
        atomicAdd(arrivals, 1u);
        return false;
    }
    if (threadIdx.x == 0) {
        while (*static_cast<volatile u32*>(arrivals) < num_tiles - 1) {}
        __threadfence();
    }
    __syncthreads();
    return true;
}

__device__ __forceinline__ Listed read(const Listed* from) {
    const uint2 words = __ldcg(reinterpret_cast<const uint2*>(from));
    return {words.x, words.y};
}

// What is listed, with its number: whole warps have it in the order of the index.
struct Collected {
    u32 total;
    bool is_here, is_counted;  // in shared memory; by its first digit

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

// Copies a tile's list into shared memory; of the last few entries in question, which are in the range, another list.
__device__ __forceinline__ void take(Shared& s, Listed one, u32 number, const Range& range, bool is_few) {
    s.listed[number] = one;
    const u64 entry = join(one.key, number);
    if (is_few && range.holds(entry)) s.few[atomicAdd(&s.num_few, 1u)] = entry;
}
__device__ __forceinline__ void copy_lists(Shared& s, const Lists& lists, const Range& range, bool is_few) {
    constexpr int TILES = 16, PARTS = 2;  // of a warp at once, of 32 entries
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int first = warp * TILES; first < lists.num_tiles; first += WARPS * TILES) {
        Listed some[TILES][PARTS];
        u32 starts[TILES + 1];
#pragma unroll
        for (int i = 0; i <= TILES; ++i) starts[i] = s.starts[min(first + i, MAX_TILES)];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                if (p * 32 + lane < starts[i + 1] - starts[i])
                    some[i][p] = read(lists.listed + static_cast<long long>(first + i) * lists.tile_len + p * 32 + lane);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const u32 count = starts[i + 1] - starts[i];
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                if (p * 32 + lane < count) take(s, some[i][p], starts[i] + p * 32 + lane, range, is_few);
            for (u32 at = PARTS * 32 + lane; at < count; at += 32) {
                const Listed* const from = lists.listed + static_cast<long long>(first + i) * lists.tile_len + at;
                take(s, read(from), starts[i] + at, range, is_few);
            }
        }
    }
}

// The k-th best entry; what is among the k best and not in the range is above it, and was counted.
__device__ u64 find_last(Shared& s, const Lists& lists, const Collected& all, Range range, u32 wanted, u32 inside,
                         bool is_gathered) {
    const int lane = threadIdx.x % 32;
    while (inside != wanted && inside > FEW) {
        all.for_each(s, lists, [&](u64 entry, Listed) {
            if (range.holds(entry)) atomicAdd(&bin_at(s, (entry - range.low) >> range.shift), 1u);
        });
        __syncthreads();
        const Boundary boundary = find_bin([&](int bin) { return bin_at(s, bin); }, wanted, s.scratch, s.boundary);
        wanted -= boundary.above, inside = boundary.inside;
        range = range.of_bin(boundary.bin);
        for (int i = threadIdx.x; i < BINS + BINS / 8; i += THREADS) s.bins[i] = 0;
        __syncthreads();
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

// Writes the places of what is not worse than `last`, in the order of the index: that of neighbours by one thread.
__device__ __forceinline__ void write_chosen_here(Shared& s, u32 total, u64 last, int* chosen) {
    constexpr int EACH = ENTRIES / THREADS;
    static_assert(EACH <= 32, "one bit for each");
    const u32 each = (total + THREADS - 1) / THREADS | 1, first = threadIdx.x * each;  // odd: from different banks
    u32 is_chosen = 0, places[EACH + 1];
#pragma unroll
    for (int i = 0; i <= EACH; ++i) {
        if (i >= each || first + i >= total) continue;
        const Listed one = s.listed[first + i];
        is_chosen |= static_cast<u32>(join(one.key, first + i) >= last) << i, places[i] = one.place;
    }
    u32 to = sum_before(__popc(is_chosen), s.scratch);
#pragma unroll
    for (int i = 0; i <= EACH; ++i)
        if (is_chosen >> i & 1) chosen[to++] = places[i];
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
__device__ __forceinline__ void choose(Shared& s, const Lists& lists, const Digit& digit, u32 top, const u32* bins, u32 k,
                                       int* chosen) {
    const u32 marked = threadIdx.x < lists.num_tiles ? __ldcg(lists.counts + threadIdx.x) : 0, count = marked & ~MARK;
    u32 counted[BINS_EACH];
#pragma unroll
    for (int i = 0; i < BINS_EACH; i += 4) {
        const uint4 four = __ldcg(reinterpret_cast<const uint4*>(bins + BINS - (threadIdx.x + 1) * BINS_EACH + i));
        counted[i] = four.x, counted[i + 1] = four.y, counted[i + 2] = four.z, counted[i + 3] = four.w;
    }
    const u32 start = sum_before(count, s.floors);
    if (threadIdx.x < MAX_TILES) s.starts[threadIdx.x] = start;
    if (threadIdx.x == THREADS - 1) s.starts[MAX_TILES] = start + count;
    const bool is_counted = !__syncthreads_or(marked != count);
    const u32 total = s.starts[MAX_TILES];
    const Collected all{total, total <= ENTRIES, is_counted};
    Range range(static_cast<u64>(digit.floor) << 32, static_cast<u64>(top) << 32 | 0xffffffffu);
    u32 wanted = k, inside = total;
    if (is_counted) {
        const Boundary found = find_bin([&](u32 bin) { return counted[bin % BINS_EACH]; }, k, s.scratch, s.boundary);
        range = digit.of_bin(found.bin), wanted -= found.above, inside = found.inside;
    }
    const bool is_few = inside != wanted && inside <= FEW && all.is_here;
    if (all.is_here) copy_lists(s, lists, range, is_few);
    __syncthreads();
    const u64 last = find_last(s, lists, all, range, wanted, inside, is_few);
    if (all.is_here)
        write_chosen_here(s, total, last, chosen);
    else
        write_chosen(s, lists, all, last, chosen);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) choose_listed(
    const float* __restrict__ scores,   // rows `row_stride` apart
    long long row_stride, long long length,
    const int* __restrict__ legal_len,  // [rows]
    const uint4* __restrict__ bests,    // [rows, MAX_GROUPS at most]: keys by fours
    long long bests_stride, long long span, long long groups_of_span,  // so many groups are those of so many scores
    const int* __restrict__ pages,      // [rows] lists `pages_stride` apart, or null
    long long pages_stride, long long page_shift,
    Listed* listed, u32* counts,        // [rows, num_tiles, tile_len], [rows, num_tiles]
    long long tile_len,
    u32* counters,                      // [rows, COUNTERS]: bins, and the blocks that are done; all 0
    int* __restrict__ chosen,           // [rows, k]
    long long k
) {
    extern __shared__ __align__(16) Shared shared[];
    Shared& s = *shared;
    const long long row_number = blockIdx.y;
    const int tile = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < BINS + BINS / 8; i += THREADS) s.bins[i] = 0;
    if (threadIdx.x == 0) s.num_few = 0;
    wait_for_earlier();
    chosen += row_number * k;
    if (pages) pages += row_number * pages_stride;
    scores += row_number * row_stride;
    const bool aligned = row_stride % 4 == 0 && reinterpret_cast<u64>(scores) % 16 == 0;
    // what does not depend on each other is loaded together, whether it is of use or not
    Row row{scores, static_cast<int>(length), aligned, pages, static_cast<int>(page_shift)};
    const int first = tile * static_cast<int>(tile_len) + 4 * threadIdx.x;
    uint4 keys = row.load(first);
    const u32 place = row.place_of(first);
    Bests best;
    const int fours = bests_stride / 4;
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v) {
        const int at = v * THREADS + threadIdx.x;
        best[v] = at < fours ? __ldg(bests + row_number * fours + at) : make_uint4(0, 0, 0, 0);
    }
    row.num_scores = max(0, min(static_cast<int>(length), legal_len[row_number]));
    if (row.num_scores <= k) {  // nothing to choose
        for (int i = tile * THREADS + threadIdx.x; i < k; i += gridDim.x * THREADS)
            chosen[i] = i < row.num_scores ? static_cast<int>(row.place_of(i)) : -1;
        return;
    }
    const int num_tiles = (row.num_scores + static_cast<int>(tile_len) - 1) / static_cast<int>(tile_len);
    if (tile >= num_tiles) return;
    const int num_spans = (row.num_scores + static_cast<int>(span) - 1) / static_cast<int>(span);
    const int num_fours = num_spans * static_cast<int>(groups_of_span) / 4;
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v)
        if (v * THREADS + threadIdx.x >= num_fours) best[v] = make_uint4(0, 0, 0, 0);
    keys = row.without_others(keys, first);
    const u32 wanted = (k + WARPS - 1) / WARPS;
    u32 top, floor = fours <= BEST_VECTORS / 2 * THREADS ? find_floor<BEST_VECTORS / 2>(best, wanted, top)
                                                          : find_floor<BEST_VECTORS>(best, wanted, top);
    if (lane == 0) s.floors[warp] = floor, s.tops[warp] = top;
    __syncthreads();
    floor = ~__reduce_max_sync(ALL_LANES, ~s.floors[lane % WARPS]), top = __reduce_max_sync(ALL_LANES, s.tops[lane % WARPS]);
    const Digit digit(floor, top);
    const long long first_list = row_number * gridDim.x;
    const Lists lists{listed + first_list * tile_len, counts + first_list, static_cast<int>(tile_len), num_tiles};
    counters += row_number * COUNTERS;
    list_tile(s, row, lists, tile, keys, place, digit, counters);
    if (is_last(counters + BINS, tile, num_tiles)) choose(s, lists, digit, top, counters, k, chosen);
}

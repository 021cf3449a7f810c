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
static_assert(MAX_TILES <= THREADS && MAX_GROUPS % CHUNK == 0, "a thread has a tile, and groups by fours");

// An entry, and where its key lies.
struct alignas(16) Listed {
    u64 entry;
    u32 place, unused;
};

struct Shared {
    u64 entries[ENTRIES];
    u32 places[ENTRIES];
    u32 bins[BINS + BINS / 8];
    u32 starts[MAX_TILES + 1];  // of the tiles' lists among all that is listed
    u32 scratch[WARPS], floors[WARPS], tops[WARPS];
    u64 few[FEW];
    u32 num_few, ticket;
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
__device__ __forceinline__ u32 find_floor(const Bests& bests, int num_vectors, u32 wanted, u32& top) {
    auto for_each = [&](auto use) {
#pragma unroll
        for (int v = 0; v < BEST_VECTORS; ++v)
            if (v < num_vectors) use(bests[v].x), use(bests[v].y), use(bests[v].z), use(bests[v].w);
    };
    auto count_from = [&](u32 key) {
        u32 count = 0;
        for_each([&](u32 best) { count += best >= key; });
        return __reduce_add_sync(ALL_LANES, count);
    };
    u32 high = 0, not_low = 0;
    for_each([&](u32 best) { high = max(high, best), not_low = max(not_low, best ? ~best : 0); });
    top = high = __reduce_max_sync(ALL_LANES, high);
    u32 low = ~__reduce_max_sync(ALL_LANES, not_low);
    if (high == 0 || count_from(low) < wanted) return 1;
    while (low < high) {
        const u32 middle = low + (high - low) / 2 + 1, count = count_from(middle);
        if (count < wanted) {
            high = middle - 1;
        } else {
            low = middle;
            if (count <= wanted + wanted / 16) break;
        }
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
    // Where the key of a score lies, and those behind it up to a multiple of four.
    __device__ __forceinline__ u32 place_of(int at) const {
        if (!pages || at >= num_scores) return at;
        return (pages[at >> page_shift] << page_shift) + (at & ((1 << page_shift) - 1));
    }
};

// Lists what of a tile reaches the floor, in the order of its index. The tile's first keys have been loaded.
__device__ __forceinline__ void list_tile(Shared& s, const Row& row, const Lists& lists, int tile, uint4 keys, u32 place, u32 floor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, end = (tile + 1) * lists.tile_len;
    Listed* const listed = lists.listed + static_cast<long long>(tile) * lists.tile_len;
    u32 before = 0;
    for (int first = end - lists.tile_len; first < end; first += CHUNK) {
        const int at = first + 4 * threadIdx.x;
        if (first + lists.tile_len > end) keys = row.load(at), place = row.place_of(at);
        const bool is_in[4] = {keys.x >= floor, keys.y >= floor, keys.z >= floor, keys.w >= floor};
        const u32 count = is_in[0] + is_in[1] + is_in[2] + is_in[3], up_to = sum_up_to_lane(count);
        __syncthreads();  // the last chunk's sums have been read
        if (lane == 31) s.scratch[warp] = up_to;
        __syncthreads();
        const u32 of_lane = lane < WARPS ? s.scratch[lane] : 0;
        u32 to = before + __reduce_add_sync(ALL_LANES, lane < warp ? of_lane : 0) + up_to - count;
        before += __reduce_add_sync(ALL_LANES, of_lane);
        const u32 of_keys[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (is_in[i]) listed[to++] = {join(of_keys[i], at + i), place + i, 0};
    }
    if (threadIdx.x == 0) lists.counts[tile] = before;
}

// Whether this is the last of the row's blocks to come here. What the others wrote before is seen then.
__device__ __forceinline__ bool is_last(Shared& s, u32* arrivals, int num_blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        s.ticket = atomicAdd(arrivals, 1u);
        __threadfence();
    }
    __syncthreads();
    return s.ticket == num_blocks - 1;
}

__device__ __forceinline__ Listed read(const Listed* from) {
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
    return {static_cast<u64>(words.y) << 32 | words.x, words.z, 0};
}

// Finds where the tiles' lists start, and how many entries there are. Copies them into shared memory if there is room.
__device__ __forceinline__ u32 collect(Shared& s, const Lists& lists) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 count = threadIdx.x < lists.num_tiles ? __ldcg(lists.counts + threadIdx.x) : 0;
    constexpr int EACH = MAX_TILES / WARPS, AT_ONCE = 16;
    static_assert(EACH % AT_ONCE == 0, "");
    Listed some[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int tile = i * WARPS + warp;
        if (tile < lists.num_tiles) some[i] = read(lists.listed + static_cast<long long>(tile) * lists.tile_len + lane);
    }
    const u32 start = sum_before(count, s.scratch);
    if (threadIdx.x < MAX_TILES) s.starts[threadIdx.x] = start;
    if (threadIdx.x == THREADS - 1) s.starts[MAX_TILES] = start + count;
    __syncthreads();
    const u32 total = s.starts[MAX_TILES];
    if (total > ENTRIES) return total;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int tile = i * WARPS + warp;
        if (tile < lists.num_tiles && lane < s.starts[tile + 1] - s.starts[tile])
            s.entries[s.starts[tile] + lane] = some[i].entry, s.places[s.starts[tile] + lane] = some[i].place;
    }
    for (int tile = warp; tile < lists.num_tiles; tile += WARPS)
        for (u32 i = (tile < AT_ONCE * WARPS ? 32 : 0) + lane; i < s.starts[tile + 1] - s.starts[tile]; i += 32) {
            const Listed other = read(lists.listed + static_cast<long long>(tile) * lists.tile_len + i);
            s.entries[s.starts[tile] + i] = other.entry, s.places[s.starts[tile] + i] = other.place;
        }
    __syncthreads();
    return total;
}

// Calls use(entry, place) for what is listed, in order; whole warps do, with entry 0 where a lane has none.
template <class Use>
__device__ __forceinline__ void for_each_listed(const Shared& s, const Lists& lists, u32 total, const Use& use) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (total <= ENTRIES) {
        const u32 run_len = (total + WARPS * 32 - 1) / (WARPS * 32) * 32;
        const u32 first = warp * run_len + lane;
#pragma unroll 4
        for (u32 i = 0; i < run_len; i += 32) {
            const bool is_there = first + i < total;
            use(is_there ? s.entries[first + i] : 0, is_there ? s.places[first + i] : 0);
        }
        return;
    }
    const int tiles_each = (lists.num_tiles + WARPS - 1) / WARPS;
    for (int tile = warp * tiles_each; tile < min((warp + 1) * tiles_each, lists.num_tiles); ++tile) {
        const u32 count = s.starts[tile + 1] - s.starts[tile];
        const Listed* const listed = lists.listed + static_cast<long long>(tile) * lists.tile_len;
#pragma unroll 4
        for (u32 i = 0; i < count; i += 32) {
            const Listed one = i + lane < count ? read(listed + i + lane) : Listed{0, 0, 0};
            use(one.entry, one.place);
        }
    }
}

// The k-th best of what is listed. All of it is in the range, but for what is not among the k best.
__device__ __forceinline__ u64 find_last(Shared& s, const Lists& lists, u32 total, Range range, u32 k) {
    const int lane = threadIdx.x % 32;
    u32 wanted = k;
    for (;;) {
        for_each_listed(s, lists, total, [&](u64 entry, u32) {
            if (range.holds(entry)) atomicAdd(&bin_at(s, (entry - range.low) >> range.shift), 1u);
        });
        __syncthreads();
        const Boundary boundary = find_bin([&](int bin) { return bin_at(s, bin); }, wanted, s.scratch, s.boundary);
        wanted -= boundary.above;
        range = range.of_bin(boundary.bin);
        if (boundary.inside == wanted) return range.low;
        if (boundary.inside <= FEW) break;
        for (int i = threadIdx.x; i < BINS + BINS / 8; i += THREADS) s.bins[i] = 0;
        __syncthreads();
    }
    for_each_listed(s, lists, total, [&](u64 entry, u32) {
        if (range.holds(entry)) s.few[atomicAdd(&s.num_few, 1u)] = entry;
    });
    __syncthreads();
    const u64 mine = lane < s.num_few ? s.few[lane] : 0;
    u32 better = 0;
    for (u32 i = 0; i < s.num_few; ++i) better += s.few[i] > mine;
    const u32 last = __ffs(__ballot_sync(ALL_LANES, mine != 0 && better == wanted - 1)) - 1;
    return __shfl_sync(ALL_LANES, mine, last);
}

// Writes the places of what is not worse than `last`, in the order of the index.
__device__ __forceinline__ void write_chosen(Shared& s, const Lists& lists, u32 total, u64 last, int* chosen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 count = 0;
    for_each_listed(s, lists, total, [&](u64 entry, u32) { count += entry >= last; });
    count = __reduce_add_sync(ALL_LANES, count);
    if (lane == 0) s.floors[warp] = count;
    __syncthreads();
    chosen += __reduce_add_sync(ALL_LANES, lane < warp ? s.floors[lane] : 0);
    for_each_listed(s, lists, total, [&](u64 entry, u32 place) {
        const u32 lanes = __ballot_sync(ALL_LANES, entry >= last);
        if (entry >= last) chosen[__popc(lanes & ((1u << lane) - 1))] = place;
        chosen += __popc(lanes);
    });
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
    u32* arrivals,                      // [rows], zeros; left as zeros
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
    const int num_scores = max(0, min(static_cast<int>(length), legal_len[row_number]));
    const bool aligned = row_stride % 4 == 0 && reinterpret_cast<u64>(scores) % 16 == 0;
    const Row row{scores, num_scores, aligned, pages, static_cast<int>(page_shift)};
    if (num_scores <= k) {  // nothing to choose
        for (int i = tile * THREADS + threadIdx.x; i < k; i += gridDim.x * THREADS)
            chosen[i] = i < num_scores ? static_cast<int>(row.place_of(i)) : -1;
        return;
    }
    const int num_tiles = (num_scores + static_cast<int>(tile_len) - 1) / static_cast<int>(tile_len);
    if (tile >= num_tiles) return;
    const long long first_list = row_number * gridDim.x;
    const Lists lists{listed + first_list * tile_len, counts + first_list, static_cast<int>(tile_len), num_tiles};
    const int first = tile * lists.tile_len + 4 * threadIdx.x;
    const uint4 keys = row.load(first);
    const u32 place = row.place_of(first);
    const int num_spans = (num_scores + static_cast<int>(span) - 1) / static_cast<int>(span);
    const int num_fours = num_spans * static_cast<int>(groups_of_span) / 4;
    const int num_vectors = (num_fours + THREADS - 1) / THREADS;
    Bests best;
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v) {
        const int at = v * THREADS + threadIdx.x;
        best[v] = at < num_fours ? bests[row_number * bests_stride / 4 + at] : make_uint4(0, 0, 0, 0);
    }
    u32 top, floor = find_floor(best, num_vectors, (k + WARPS - 1) / WARPS, top);
    if (lane == 0) s.floors[warp] = floor, s.tops[warp] = top;
    __syncthreads();
    floor = ~__reduce_max_sync(ALL_LANES, ~s.floors[lane % WARPS]), top = __reduce_max_sync(ALL_LANES, s.tops[lane % WARPS]);
    list_tile(s, row, lists, tile, keys, place, floor);
    if (!is_last(s, arrivals + row_number, num_tiles)) return;
    if (threadIdx.x == 0) arrivals[row_number] = 0;
    const u32 total = collect(s, lists);
    const Range range(static_cast<u64>(floor) << 32, static_cast<u64>(top) << 32 | 0xffffffffu);
    write_chosen(s, lists, total, find_last(s, lists, total, range, k), chosen);
}

// The k best scores of a row, exactly and in ascending order, where the best of groups of its scores are known.
//
// Each block has a tile of neighbouring scores. From the groups' best it finds a floor that k scores of the row reach,
// and lists what of its tile does: where the best scores lie scattered, little more than k of a row. All blocks of a
// row find the same floor, and together count what they list by its first digit. The last one waits for the others and
// chooses.
//
// This part has what all blocks do, `topk_collect.cu` what the last one does, `topk_choose.cu` the kernel. Compiled for
// THREADS, ENTRIES (that the last block has room for), MAX_TILES (of a row), MAX_GROUPS.

constexpr int CHUNK = 4 * THREADS;  // scores that a block has at a time
constexpr int BEST_VECTORS = MAX_GROUPS / CHUNK;
constexpr u32 FEW = 32;  // entries that are compared one by one
constexpr u32 MARK = 1u << 31;  // of the number of a tile's entries: not all were counted
constexpr int COUNTERS = BINS + 4;  // of a row; the next row's are aligned, too
static_assert(MAX_TILES <= THREADS && MAX_GROUPS % CHUNK == 0, "a thread has a tile, and groups by fours");

// What is listed of a key: how its score compares, and where it lies. Of what all blocks have listed of a row, an entry
// is this with its number in the order of the index instead of the place; so all entries differ.
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
    static_assert(NUM_VECTORS <= 8, "a warp has up to 1024 groups");
    for (bool is_first = true; is_first || low < high; is_first = false) {  // in quarters
        const u32 width = high - low, step = width / 4 + 1;
        const u32 a = is_first ? low : low + step, b = low + min(2 * step, width), c = low + min(3 * step, width);
        u32 from_a = 0, from_b = 0, from_c = 0;
        for_each([&](u32 best) { from_a += best >= a, from_b += best >= b, from_c += best >= c; });
        const u32 both = __reduce_add_sync(ALL_LANES, from_a | from_b << 16);
        from_a = both & 0xffff, from_b = both >> 16, from_c = __reduce_add_sync(ALL_LANES, from_c);
        if (from_a < wanted) {
            if (is_first) return 1;
            high = a - 1;
        } else if (from_b < wanted) {
            low = a, high = b - 1, of_low = from_a;
        } else if (from_c < wanted) {
            low = b, high = c - 1, of_low = from_b;
        } else {
            low = c, of_low = from_c;
        }
        if (of_low && of_low <= wanted + wanted / 16) break;
    }
    return low;
}

// The keys from the least floor of the block's warps to the greatest key of the row.
struct Span {
    u32 floor, top;
};
__device__ __forceinline__ Span find_span(Shared& s, const Bests& bests, bool are_many, u32 k) {
    const u32 lane = threadIdx.x % 32, wanted = (k + WARPS - 1) / WARPS;
    u32 top;
    const u32 floor = are_many ? find_floor<BEST_VECTORS>(bests, wanted, top)
                               : find_floor<BEST_VECTORS / 2>(bests, wanted, top);
    if (lane == 0) s.floors[threadIdx.x / 32] = floor, s.tops[threadIdx.x / 32] = top;
    __syncthreads();
    return {~__reduce_max_sync(ALL_LANES, ~s.floors[lane % WARPS]), __reduce_max_sync(ALL_LANES, s.tops[lane % WARPS])};
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
            const float4 four = load_now(reinterpret_cast<const float4*>(scores + at));
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
        return (load_now(pages + (at >> page_shift)) << page_shift) + (at & ((1 << page_shift) - 1));
    }
};

// The first digit of what is listed, which all blocks count together: bins of keys.
struct Digit {
    u32 floor, shift;

    __device__ __forceinline__ Digit(Span span)
        : floor(span.floor), shift(span.top - floor < BINS ? 0 : 21 - __clz(span.top - floor)) {}
    __device__ __forceinline__ u32 bin_of(u32 key) const { return (key - floor) >> shift; }
    __device__ __forceinline__ Range of_bin(u32 bin) const {
        const u64 first = floor + (static_cast<u64>(bin) << shift);
        return Range(first << 32, (first + (1ull << shift) << 32) - 1);
    }
};

// Lists what of a tile reaches the floor, in the order of its index. The tile's first keys have been loaded. What is
// listed is counted by its first digit, too; but not if it is much, which might wait for each other in few bins: then
// the tile is marked.
__device__ __forceinline__ void list_tile(Shared& s, const Row& row, const Lists& lists, int tile, uint4 keys,
                                          u32 place, const Digit& digit, u32* bins) {
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


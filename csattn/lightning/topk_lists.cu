// The k best scores of a row, exactly and in ascending order, where the best of groups of its scores are known.
//
// Each block has a tile of neighbouring scores. From the groups' best it finds a floor that k scores of the row reach,
// and lists what of its tile does: where the best scores lie scattered, little more than k of a row. All blocks of a
// row find the same floor. The last one waits for the others' lists and chooses among them.
//
// A tile has some slots, which were 0. Its block fills all of them, and never with 0: so the last block sees by each
// slot whether it has come, and nothing else has to be waited for. A tile that lists more than it has slots for says so
// in the first of them.
//
// This part has what all blocks do, `topk_collect.cu` what the last one does, `topk_choose.cu` the kernel. Compiled for
// THREADS, SLOTS (of a row), ENTRIES (that the last block has room for), MAX_TILES (of a row), MAX_GROUPS.

constexpr int CHUNK = 4 * THREADS;  // scores of a tile
constexpr int BEST_VECTORS = MAX_GROUPS / CHUNK;
constexpr int FLOOR_BITS = 13, FLOOR_SHIFT = 32 - FLOOR_BITS;  // of a key, by which the groups' best are counted
constexpr int FLOOR_BINS = 1 << FLOOR_BITS, FLOOR_BINS_EACH = FLOOR_BINS / THREADS;
constexpr u32 FEW = 32;  // entries that are compared one by one
static_assert(MAX_TILES <= THREADS && MAX_GROUPS % CHUNK == 0, "a thread has a tile, and groups by fours");

// What is listed of a key, in 64 bits: how its score compares, and where it lies. Of what all blocks have listed of a
// row, an entry is the key with its number in the order of the index; so all entries differ.
__device__ __forceinline__ u64 list_key(u32 key, u32 place) { return static_cast<u64>(key) << 32 | place; }
__device__ __forceinline__ u32 key_of(u64 listed) { return listed >> 32; }
__device__ __forceinline__ u32 place_of(u64 listed) { return static_cast<u32>(listed); }

// In the first slot: so many are listed elsewhere. In slots behind the last: so many are listed here.
constexpr u32 OVERFLOW_KEY = 0xffffffffu, COUNT_MARK = 1u << 31;
__device__ __forceinline__ u64 overflow_of(u32 count) { return list_key(OVERFLOW_KEY, count); }
__device__ __forceinline__ u64 nothing_behind(u32 count) { return list_key(0, COUNT_MARK | count); }

struct alignas(16) Shared {
    u32 floor_bins[FLOOR_BINS];
    u32 bins[BINS];
    u64 listed[ENTRIES];
    u32 starts[MAX_TILES + 1];  // of the tiles' lists among all that is listed
    u32 scratch[WARPS], of_warps[WARPS];
    u64 few[FEW];
    u32 num_few, floor;
    Boundary boundary;
};

// What the last block wants to be so.
__device__ __forceinline__ void prepare(Shared& s) {
    for (int i = threadIdx.x; i < FLOOR_BINS; i += THREADS) s.floor_bins[i] = 0;
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    if (threadIdx.x == 0) s.num_few = 0, s.floor = 1;
    __syncthreads();
}

using Bests = uint4[BEST_VECTORS];  // of a thread: keys, 0 where there is no group

// A key that at least k groups reach, and not many more; 1 if there are not so many. Never 0.
__device__ __forceinline__ u32 find_floor(Shared& s, const Bests& bests, u32 k) {
    auto count = [&](u32 best) {
        if (best) atomicAdd(&s.floor_bins[best >> FLOOR_SHIFT], 1u);
    };
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v) count(bests[v].x), count(bests[v].y), count(bests[v].z), count(bests[v].w);
    __syncthreads();
    const int first = FLOOR_BINS - (threadIdx.x + 1) * FLOOR_BINS_EACH;  // thread 0 has the highest bins
    u32 mine[FLOOR_BINS_EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < FLOOR_BINS_EACH; ++i) sum += mine[i] = s.floor_bins[first + i];
    u32 above = sum_before(sum, s.scratch);
#pragma unroll
    for (int i = FLOOR_BINS_EACH - 1; i >= 0; --i) {
        if (above < k && k <= above + mine[i]) s.floor = max(static_cast<u32>(first + i) << FLOOR_SHIFT, 1u);
        above += mine[i];
    }
    __syncthreads();
    return s.floor;
}

// What is listed of a row, by tiles.
struct Lists {
    u64* slots;   // [num_tiles, tile_slots]
    u64* listed;  // [num_tiles, CHUNK], of tiles that have more
    int tile_slots, num_tiles;
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

// Lists what of a tile reaches the floor, in the order of its index: a thread has four keys and the place of the first.
__device__ __forceinline__ void list_tile(Shared& s, const Lists& lists, int tile, uint4 keys, u32 place, u32 floor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 of_keys[4] = {keys.x, keys.y, keys.z, keys.w};
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) count += of_keys[i] >= floor;
    u32 to = 0, of_warp = 0;
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {  // of counts up to four
        const u32 lanes = __ballot_sync(ALL_LANES, count >> bit & 1);
        to += __popc(lanes & ((1u << lane) - 1)) << bit, of_warp += __popc(lanes) << bit;
    }
    if (lane == 0) s.of_warps[warp] = of_warp;
    __syncthreads();
    const u32 of_lane = lane < WARPS ? s.of_warps[lane] : 0, total = __reduce_add_sync(ALL_LANES, of_lane);
    to += __reduce_add_sync(ALL_LANES, lane < warp ? of_lane : 0);
    u64* const slots = lists.slots + static_cast<long long>(tile) * lists.tile_slots;
    u64* const longer = lists.listed + static_cast<long long>(tile) * CHUNK;
    const bool fits = total <= lists.tile_slots;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (of_keys[i] < floor) continue;
        store_whole(fits ? slots + to : longer + to, list_key(of_keys[i], place + i));
        ++to;
    }
    for (int i = (fits ? total : 1) + threadIdx.x; i < lists.tile_slots; i += THREADS)
        store_whole(slots + i, nothing_behind(total));
    if (fits) return;
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    store_whole(slots, overflow_of(total));
}

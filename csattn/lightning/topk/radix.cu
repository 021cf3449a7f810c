// The exact top-k of every row, by radix select.
//
// A cluster of CLUSTER thread blocks shares a row; each of its warps has a run of neighbouring scores. A lane keeps its
// first 4 * VECTORS scores in registers and reads the others again in every round. In each round, the blocks make a
// histogram of the scores in range by their next 11 bits, add up their histograms, and continue with the bin of the
// k-th best. At the end, scores above the last range are chosen, and those in it while there is room, lowest index
// first. Nothing is buffered, so nothing can overflow, whatever the scores.
//
// In long rows only the best of every 16 scores of a lane are counted at first: the k-th best of these is not better
// than the k-th best of all, and scores below it are not considered again. A warp lists the remaining ones if there is
// room; if not, it continues with all.
//
// Compiled for THREADS, CLUSTER, VECTORS (of four scores), BLOCKS_PER_SM, BY_POSITION, MAX_K.

#include "radix_source.cuh"

constexpr u32 FEW = 32;   // scores that are compared one by one, with one in each lane
constexpr int LONG = 32;  // times k: of longer rows the best of every 4 * AT_ONCE scores are counted first
constexpr int SHARE = BINS / CLUSTER;
static_assert(VECTORS % AT_ONCE == 0, "so many have one best score");

using Blocks = Cluster<CLUSTER>;

// How many scores lie above a range, and in it.
struct Counts {
    u32 above, inside;
};

struct alignas(16) Shared {
    u64 lists[WARPS][LIST_LEN];            // entries, in the order of their index
    u64 entries[BY_POSITION ? 2 : MAX_K];  // by score: all chosen entries of the row, in its first block
    u32 bins[BINS];
    u32 totals[SHARE];  // of the row, for this block's share of the bins; other blocks read them
    Counts of_warp[WARPS];
    Counts of_block;  // other blocks read it
    u32 top;          // the greatest key of the block; other blocks read it
    u32 num_few;      // entries of the block among the last few of the row; other blocks read them, too
    u64 few[FEW];
    u64 barrier;
    u32 top_of_row;
    u32 scratch[WARPS];
    Boundary boundary;
};

// Returns the bin of the wanted-th best of the row's scores that are counted in the bins, and clears the bins.
__device__ Boundary find_digit(Shared& s, u32 wanted, Blocks& blocks) {
    Boundary found;
    if (CLUSTER == 1) {
        __syncthreads();
        if (threadIdx.x == 0) s.top_of_row = s.top;
        found = find_bin([&](int bin) { return s.bins[bin]; }, wanted, s.scratch, s.boundary);
    } else {
        blocks.sync();
        for (int i = threadIdx.x; i < SHARE; i += THREADS) {
            u32 sum = 0;
#pragma unroll
            for (int other = 0; other < CLUSTER; ++other) sum += in_block(s.bins, other)[blocks.rank * SHARE + i];
            s.totals[i] = sum;
        }
        if (threadIdx.x / 32 == WARPS - 1) {
            const u32 lane = threadIdx.x % 32, top = __reduce_max_sync(ALL_LANES, *in_block(&s.top, lane % CLUSTER));
            if (lane == 0) s.top_of_row = top;
        }
        blocks.sync();
        auto total_of = [&](int bin) { return in_block(s.totals, bin / SHARE)[bin % SHARE]; };
        found = find_bin(total_of, wanted, s.scratch, s.boundary);
    }
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    __syncthreads();
    return found;
}

__device__ __forceinline__ void count_key(Shared& s, const KeyRange& range, u32 key) {
    if (range.holds(key)) atomicAdd(&s.bins[(key - range.low) >> range.shift], 1u);
}

__device__ __forceinline__ Counts count_four(uint4 keys, const KeyRange& range) {
    auto above = [&](u32 key) { return static_cast<u32>(range.is_below(key)); };
    auto inside = [&](u32 key) { return static_cast<u32>(range.holds(key)); };
    return {above(keys.x) + above(keys.y) + above(keys.z) + above(keys.w),
            inside(keys.x) + inside(keys.y) + inside(keys.z) + inside(keys.w)};
}

// Returns a range that contains the row's k best scores: from about the k-th best of the counted ones, to the best.
__device__ KeyRange find_floor(Shared& s, const Source& source, const Kept& kept, u32 k, Blocks& blocks) {
    const KeyRange range = all_keys();
    const Run& run = source.run;
    u32 best = 0, top = 0;
    for_each(source, kept, [&](int vector, uint4 keys, uint4) {
        best = max(max(max(keys.x, keys.y), max(keys.z, keys.w)), best);
        if (vector % AT_ONCE < AT_ONCE - 1 && run.has(vector + 1)) return;
        count_key(s, range, best);
        top = max(top, best);
        best = 0;
    });
    top = __reduce_max_sync(ALL_LANES, top);
    if (threadIdx.x % 32 == 0) atomicMax(&s.top, top);
    const u32 low = range.first_of(find_digit(s, k, blocks).bin);
    return KeyRange(low, s.top_of_row - low);
}

// Lists the warp's scores in the range, and makes the list its source if there is room.
__device__ __forceinline__ void list_inside(Shared& s, Source& source, const Kept& kept, const KeyRange& range) {
    u64* list = s.lists[threadIdx.x / 32];
    int number = 0;
    for_each(source, kept, [&](int, uint4 keys, uint4 indices) {
        const u32 inside = count_four(keys, range).inside;
        if (!__any_sync(ALL_LANES, inside != 0)) return;
        const u32 up_to = sum_up_to_lane(inside);
        int at = number + up_to - inside;
        auto add = [&](u32 key, u32 index) {
            if (!range.holds(key)) return;
            if (at < LIST_LEN) list[at] = join(key, index);
            ++at;
        };
        add(keys.x, indices.x), add(keys.y, indices.y), add(keys.z, indices.z), add(keys.w, indices.w);
        number += __shfl_sync(ALL_LANES, up_to, 31);
    });
    __syncwarp();
    if (number <= LIST_LEN) source.list = list, source.list_len = number;
}

// Narrows the range around the k-th best score. quota: how many in it are among the k best; inside: how many are in it.
__device__ KeyRange find_range(Shared& s, const Source& source, const Kept& kept, KeyRange range, u32 k, Blocks& blocks,
                            u32& quota, u32& inside) {
    for (quota = k;;) {
        for_each(source, kept, [&](int, uint4 keys, uint4) {
            count_key(s, range, keys.x), count_key(s, range, keys.y);
            count_key(s, range, keys.z), count_key(s, range, keys.w);
        });
        const Boundary boundary = find_digit(s, quota, blocks);
        quota -= boundary.above, inside = boundary.inside;
        range = range.of_bin(boundary.bin);
        if (boundary.inside == quota || boundary.inside <= FEW || range.width == 0) return range;
    }
}

__device__ void gather_few(Shared& s, const KeyRange& range, uint4 keys, uint4 indices) {
    auto add = [&](u32 key, u32 index) {
        if (range.holds(key)) s.few[atomicAdd(&s.num_few, 1u)] = join(key, index);
    };
    add(keys.x, indices.x), add(keys.y, indices.y), add(keys.z, indices.z), add(keys.w, indices.w);
}

// Returns how many scores before the warp's run are above the range, and in it. Gathers those in it, if they are few.
__device__ Counts count_before(Shared& s, const Source& source, const Kept& kept, const KeyRange& range, bool is_few,
                               Blocks& blocks) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Counts own_counts{0, 0};
    for_each(source, kept, [&](int, uint4 keys, uint4 indices) {
        const Counts four = count_four(keys, range);
        own_counts.above += four.above, own_counts.inside += four.inside;
        if (is_few && four.inside) gather_few(s, range, keys, indices);
    });
    own_counts = {__reduce_add_sync(ALL_LANES, own_counts.above), __reduce_add_sync(ALL_LANES, own_counts.inside)};
    if (lane == 0) s.of_warp[warp] = own_counts;
    __syncthreads();
    const Counts of_lane = lane < WARPS ? s.of_warp[lane] : Counts{0, 0};
    Counts before{__reduce_add_sync(ALL_LANES, lane < warp ? of_lane.above : 0),
                  __reduce_add_sync(ALL_LANES, lane < warp ? of_lane.inside : 0)};
    if (CLUSTER == 1) return before;
    const Counts all{__reduce_add_sync(ALL_LANES, of_lane.above), __reduce_add_sync(ALL_LANES, of_lane.inside)};
    if (threadIdx.x == 0) s.of_block = all;
    blocks.sync();
    for (u32 other = 0; other < blocks.rank; ++other) {
        const Counts of_other = *in_block(&s.of_block, other);
        before.above += of_other.above, before.inside += of_other.inside;
    }
    return before;
}

// Returns the lane's entry of the few in the row's last range, or 0.
__device__ u64 one_of_few(const Shared& s) {
    int at = threadIdx.x % 32;
    for (int other = 0; other < CLUSTER; ++other) {
        const int number = *in_block(&s.num_few, other);
        if (at >= 0 && at < number) return in_block(s.few, other)[at];
        at -= number;
    }
    return 0;
}

// Narrows a range with few entries to the key of the last one that is chosen.
__device__ void narrow(const Shared& s, const Run& run, KeyRange& range, u32& quota, Counts& before) {
    const u64 entry = one_of_few(s);
    u32 better = 0;
    for (int lane = 0; lane < 32; ++lane) better += __shfl_sync(ALL_LANES, entry, lane) > entry;
    const u32 last_lane = __ffs(__ballot_sync(ALL_LANES, entry != 0 && better == quota - 1)) - 1;
    const u32 last = __shfl_sync(ALL_LANES, entry, last_lane) >> 32, key = entry >> 32;
    const bool is_before = index_of(entry) < static_cast<u32>(run.first);
    before.above += __popc(__ballot_sync(ALL_LANES, key > last && is_before));
    before.inside = __popc(__ballot_sync(ALL_LANES, key == last && is_before));
    quota -= __popc(__ballot_sync(ALL_LANES, key > last));
    range = KeyRange(last, 0);
}

// Calls put(place, index, key) for every chosen score: places ascend with the index.
template <class Put>
__device__ __forceinline__ void for_each_chosen(const Source& source, const Kept& kept, const KeyRange& range,
                                                u32 quota, Counts before, const Put& put) {
    for_each(source, kept, [&](int, uint4 keys, uint4 indices) {
        const Counts four = count_four(keys, range);
        const u32 both = four.above | four.inside << 16;
        if (!__any_sync(ALL_LANES, both != 0)) return;
        const u32 up_to = sum_up_to_lane(both), of_warp = __shfl_sync(ALL_LANES, up_to, 31), below = up_to - both;
        u32 above = before.above + (below & 0xffffu), inside = before.inside + (below >> 16);
        auto choose = [&](u32 key, u32 index) {
            const bool is_above = range.is_below(key), is_inside = range.holds(key);
            if (is_above || (is_inside && inside < quota)) put(above + min(inside, quota), index, key);
            above += is_above, inside += is_inside;
        };
        choose(keys.x, indices.x), choose(keys.y, indices.y), choose(keys.z, indices.z), choose(keys.w, indices.w);
        before.above += of_warp & 0xffffu, before.inside += of_warp >> 16;
    });
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_PER_SM) select_by_digits(
    const float* __restrict__ scores,   // rows `row_stride` apart
    long long row_stride, long long length,
    const int* __restrict__ legal_len,  // [rows], or null: `length`
    const int* __restrict__ pages,      // [rows] lists `pages_stride` apart, or null: positions are written as they are
    long long pages_stride, long long page_size,
    int* __restrict__ chosen,           // [rows, k]
    long long k
) {
    extern __shared__ Shared shared[];
    Shared& s = *shared;
    const int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    scores += row * row_stride;
    chosen += row * k;
    if (pages) pages += row * pages_stride;
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    if (threadIdx.x == 0) s.top = s.num_few = 0;
    Blocks blocks(s.barrier, rank);
    wait_then_let_next_start();
    const int num_scores = max(0, min(static_cast<int>(length), legal_len ? legal_len[row] : static_cast<int>(length)));
    if (BY_POSITION && num_scores <= k) return choose_all(num_scores, k, rank, CLUSTER, pages, page_size, chosen);
    __syncthreads();

    const int num_vectors = (num_scores + VECTOR_SCORES - 1) / VECTOR_SCORES;
    const int run_len = (num_vectors + CLUSTER * WARPS - 1) / (CLUSTER * WARPS) * VECTOR_SCORES;
    const int first = min((rank * WARPS + static_cast<int>(threadIdx.x) / 32) * run_len, num_scores);
    const bool aligned = row_stride % 4 == 0 && reinterpret_cast<u64>(scores) % 16 == 0;
    Source source{{scores, first, min(first + run_len, num_scores), aligned}, nullptr, -1};
    Kept kept;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) kept[v] = source.run.load(v);
    u32 quota = num_scores, inside = num_scores;
    KeyRange range = all_keys();
    if (num_scores > k) {
        if (num_scores / LONG >= k) {
            range = find_floor(s, source, kept, k, blocks);
            list_inside(s, source, kept, range);
        }
        range = find_range(s, source, kept, range, k, blocks, quota, inside);
    }
    const bool is_few = inside != quota && inside <= FEW;
    Counts before = count_before(s, source, kept, range, is_few, blocks);
    if (is_few) narrow(s, source.run, range, quota, before);
    if (BY_POSITION) {
        auto put = [&](u32 place, u32 index, u32) { chosen[place] = place_of(index, pages, page_size); };
        for_each_chosen(source, kept, range, quota, before, put);
        if (CLUSTER > 1) blocks.sync();  // other blocks read a block's shared memory until here
        return;
    }
    u64* entries = CLUSTER > 1 ? in_block(s.entries, 0) : s.entries;
    auto put = [&](u32 place, u32 index, u32 key) { entries[place] = join(key, index); };
    for_each_chosen(source, kept, range, quota, before, put);
    if (CLUSTER > 1) blocks.sync();
    if (rank > 0) return;
    const int count = min(num_scores, static_cast<int>(k));
    write_best(s.entries, count, k, pages, page_size, chosen, s.bins, s.scratch);
}

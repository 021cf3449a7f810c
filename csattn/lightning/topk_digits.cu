// The k best scores of every row, exactly, found digit by digit.
//
// A cluster of CLUSTER blocks has a row, each warp of it a run of neighbouring scores. A lane keeps its first ones in
// registers, 4 * VECTORS of them, and reads what is beyond that again whenever it is asked for it. In each round the
// blocks count the scores in question by their next 11 bits, add up their counts, and go on with those whose bits are
// those of the k-th best. At the end what is above the last range is chosen, and what is in it as far as room is left,
// the lowest index first. Nothing has to be set aside, so nothing can overflow, whatever the scores.
//
// Of long rows only the best of every 16 scores of a lane are counted at first: the k-th best of those is not better
// than the k-th best of all, and what is worse than it is not looked at again. A warp lists the rest if there is room;
// if not, it goes on with all.
//
// Compiled for THREADS, CLUSTER, VECTORS (of four scores), BLOCKS_PER_SM, BY_POSITION, MAX_K.

// The bin of the wanted-th best score of the row that is counted in the bins. All bins are cleared then.
__device__ Boundary find_digit(Shared& s, u32 wanted, Blocks& blocks) {
    Boundary found;
    if (CLUSTER == 1) {
        __syncthreads();
        found = find_bin([&](int bin) { return s.bins[bin]; }, wanted, s.scratch[0], s.boundary);
    } else {
        blocks.sync();
        for (int i = threadIdx.x; i < SHARE; i += THREADS) {
            u32 sum = 0;
#pragma unroll
            for (int other = 0; other < CLUSTER; ++other) sum += in_block(s.bins, other)[blocks.rank * SHARE + i];
            s.totals[i] = sum;
        }
        blocks.sync();
        auto total_of = [&](int bin) { return in_block(s.totals, bin / SHARE)[bin % SHARE]; };
        found = find_bin(total_of, wanted, s.scratch[0], s.boundary);
    }
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    __syncthreads();
    return found;
}

// The range that the k-th best score lies in, the smaller the better, and how many of it are among the k best.
__device__ Range find_range(Shared& s, const Run& run, const Keys& kept, Range range, u32 k, Blocks& blocks,
                            u32& quota, u32& inside) {
    for (quota = k;;) {
        for_each_vector(run, kept, [&](uint4 keys, int) {
            count_key(s, range, keys.x), count_key(s, range, keys.y);
            count_key(s, range, keys.z), count_key(s, range, keys.w);
        });
        const Boundary boundary = find_digit(s, quota, blocks);
        quota -= boundary.above, inside = boundary.inside;
        range = range.of_bin(boundary.bin);
        if (boundary.inside == quota || boundary.inside <= FEW || range.width == 0) return range;
    }
}

__device__ void gather_few(Shared& s, const Range& range, uint4 keys, int index) {
    auto add = [&](u32 key, int i) {
        if (range.holds(key)) s.few[atomicAdd(&s.num_few, 1u)] = join(key, index + i);
    };
    add(keys.x, 0), add(keys.y, 1), add(keys.z, 2), add(keys.w, 3);
}

// How many scores before the warp's run lie above the range, and in it. What is in it is gathered, if it is few.
__device__ Counts count_before(Shared& s, const Run& run, const Keys& kept, const Range& range, bool is_few,
                               Blocks& blocks) {
    Counts mine{0, 0}, all;
    for_each_vector(run, kept, [&](uint4 keys, int index) {
        const Counts four = count_four(keys, range);
        mine.above += four.above, mine.inside += four.inside;
        if (is_few && four.inside) gather_few(s, range, keys, index);
    });
    return sum_over_runs(s, run, mine, blocks, all);
}

// The entry of the row's last few that a lane has, 0 where there are not so many.
__device__ u64 one_of_few(const Shared& s) {
    int at = threadIdx.x % 32;
    for (int other = 0; other < CLUSTER; ++other) {
        const int number = *in_block(&s.num_few, other);
        if (at >= 0 && at < number) return in_block(s.few, other)[at];
        at -= number;
    }
    return 0;
}

// Narrows the range, which few are in, to the key of the last one that is chosen.
__device__ void narrow(const Shared& s, const Run& run, Range& range, u32& quota, Counts& before) {
    const u64 entry = one_of_few(s);
    u32 better = 0;
    for (int lane = 0; lane < 32; ++lane) better += __shfl_sync(ALL_LANES, entry, lane) > entry;
    const u32 last_lane = __ffs(__ballot_sync(ALL_LANES, entry != 0 && better == quota - 1)) - 1;
    const u32 last = __shfl_sync(ALL_LANES, entry, last_lane) >> 32, key = entry >> 32;
    const bool is_before = index_of(entry) < static_cast<u32>(run.first);
    before.above += __popc(__ballot_sync(ALL_LANES, key > last && is_before));
    before.inside = __popc(__ballot_sync(ALL_LANES, key == last && is_before));
    quota -= __popc(__ballot_sync(ALL_LANES, key > last));
    range = Range(last, 0);
}

// Calls put(place, index, key) for all that is chosen: places count up with the index.
template <class Put>
__device__ __forceinline__ void for_each_chosen(const Run& run, const Keys& kept, const Range& range,
                                                u32 quota, Counts before, const Put& put) {
    for_each_vector(run, kept, [&](uint4 keys, int index) {
        const Counts four = count_four(keys, range);
        const u32 both = four.above | four.inside << 16;
        if (!__any_sync(ALL_LANES, both != 0)) return;
        const u32 up_to = sum_up_to_lane(both), of_warp = __shfl_sync(ALL_LANES, up_to, 31), below = up_to - both;
        u32 above = before.above + (below & 0xffffu), inside = before.inside + (below >> 16);
        auto choose = [&](u32 key, int i) {
            const bool is_above = range.is_below(key), is_inside = range.holds(key);
            if (is_above || (is_inside && inside < quota)) put(above + min(inside, quota), index + i, key);
            above += is_above, inside += is_inside;
        };
        choose(keys.x, 0), choose(keys.y, 1), choose(keys.z, 2), choose(keys.w, 3);
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
    if (threadIdx.x == 0) s.num_few = 0;
    Blocks blocks(s.barrier, rank);
    wait_for_earlier();
    const int num_scores = max(0, min(static_cast<int>(length), legal_len ? legal_len[row] : static_cast<int>(length)));
    if (BY_POSITION && num_scores <= k) {  // nothing to choose
        for (int i = rank * THREADS + threadIdx.x; i < k; i += CLUSTER * THREADS)
            chosen[i] = i < num_scores ? place_of(i, pages, page_size) : -1;
        return;
    }
    __syncthreads();

    const int num_vectors = (num_scores + VECTOR_SCORES - 1) / VECTOR_SCORES;
    const int run_len = (num_vectors + CLUSTER * WARPS - 1) / (CLUSTER * WARPS) * VECTOR_SCORES;
    const int number = threadIdx.x / 32 * CLUSTER + rank, first = min(number * run_len, num_scores);
    const bool aligned = row_stride % 4 == 0 && reinterpret_cast<u64>(scores) % 16 == 0;
    const Run run{scores, number, first, min(first + run_len, num_scores), aligned};
    Keys kept;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) kept[v] = run.load(v);
    u32 quota = num_scores, inside = num_scores;
    Range range = all_from(1);
    if (num_scores > k) {
        if (CLUSTER > 1) {
            const int lane_scores = max(1, min(run_len / 32, 4 * VECTORS));
            const bool has_floor = 2 * k * lane_scores <= num_scores;
            if (has_floor) range = all_from(join_floors(s, find_floor(s, run, kept, (k + CLUSTER - 1) / CLUSTER), blocks));
            if (has_floor || num_scores <= ENTRIES) {
                const u32 count = gather(s, run, kept, range.low, blocks);
                if (count <= ENTRIES) {
                    if (rank == 0) choose_gathered(s, count, range.low, k, pages, page_size, chosen);
                    return;
                }
            }
        }
        range = find_range(s, run, kept, range, k, blocks, quota, inside);
    }
    const bool is_few = inside != quota && inside <= FEW;
    Counts before = count_before(s, run, kept, range, is_few, blocks);
    if (is_few) narrow(s, run, range, quota, before);
    if (BY_POSITION) {
        auto put = [&](u32 place, u32 index, u32) { chosen[place] = place_of(index, pages, page_size); };
        for_each_chosen(run, kept, range, quota, before, put);
        if (CLUSTER > 1) blocks.sync();  // a block that leaves takes its shared memory along
        return;
    }
    u64* entries = CLUSTER > 1 ? in_block(s.entries, 0) : s.entries;
    auto put = [&](u32 place, u32 index, u32 key) { entries[place] = join(key, index); };
    for_each_chosen(run, kept, range, quota, before, put);
    if (CLUSTER > 1) blocks.sync();
    if (rank == 0) write_best(s.entries, min(num_scores, static_cast<int>(k)), k, pages, page_size, chosen);
}

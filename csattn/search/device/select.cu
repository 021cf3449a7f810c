// The top_k keys of a cluster, exactly: worth descending, then key ascending; written in ascending order.
//
// A histogram over the cluster finds the bin that holds the top_k-th worth, further histograms split that bin until it is
// one value, or until all its keys are wanted. What lies above the bin is chosen, and of the bin the first keys that fit.

constexpr int SEGMENT = NUM_BINS / CLUSTER;  // bins that one block sums up over the cluster

struct Counts {
    u32 bins[NUM_BINS];
    u32 segment[SEGMENT];
    u32 totals[CLUSTER];  // of each block's segment
    u32 sum, is_found, found_bin, found_above, found_inside;
    u32 warp_above[WARPS], warp_inside[WARPS];
    u32 rank_above[CLUSTER], rank_inside[CLUSTER];
};

__device__ __forceinline__ void clear_bins(Counts& counts) {
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) counts.bins[i] = 0;
}

// Every block sums one segment of the bins over the cluster, and tells all blocks its total.
__device__ void sum_segments(Counts& counts, u32 rank) {
    if (threadIdx.x == 0) counts.sum = 0;
    cluster_sync();
    for (int i = threadIdx.x; i < SEGMENT; i += THREADS) {
        u32 parts[CLUSTER], sum = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) parts[r] = read_word(&counts.bins[rank * SEGMENT + i], r);
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) sum += parts[r];
        counts.segment[i] = sum;
        if (sum) atomicAdd(&counts.sum, sum);
    }
    __syncthreads();
    if (threadIdx.x < CLUSTER) write_word(&counts.totals[rank], threadIdx.x, counts.sum);
    cluster_sync();
}

__device__ __forceinline__ u32 sum_up_to_lane(u32 value) {
    for (int step = 1; step < 32; step <<= 1) {
        const u32 other = __shfl_up_sync(ALL_LANES, value, step);
        if (threadIdx.x % 32 >= step) value += other;
    }
    return value;
}

// The bin in which the `wanted`-th largest lies, how many lie above that bin, and how many in it. False: fewer are counted.
__device__ bool find_bin(Counts& counts, u32 wanted) {
    if (threadIdx.x < 32) {
        constexpr int BINS_PER_LANE = SEGMENT / 32;
        const int lane = threadIdx.x;  // lane 0 has the highest segment, then the highest bins
        const u32 total = lane < CLUSTER ? counts.totals[CLUSTER - 1 - lane] : 0;
        u32 up_to = sum_up_to_lane(total);
        const u32 reached = __ballot_sync(ALL_LANES, up_to >= wanted);
        if (reached == 0) {
            if (lane == 31) counts.found_above = up_to;
        } else {
            const int nth = __ffs(reached) - 1, owner = CLUSTER - 1 - nth, first = SEGMENT - (lane + 1) * BINS_PER_LANE;
            u32 above = __shfl_sync(ALL_LANES, up_to - total, nth);
            u32 mine[BINS_PER_LANE], sum = 0;
#pragma unroll
            for (int i = 0; i < BINS_PER_LANE; ++i) mine[i] = read_word(&counts.segment[first + i], owner);
#pragma unroll
            for (int i = 0; i < BINS_PER_LANE; ++i) sum += mine[i];
            above += sum_up_to_lane(sum) - sum;
#pragma unroll
            for (int i = BINS_PER_LANE - 1; i >= 0; --i) {
                if (above < wanted && wanted <= above + mine[i]) {
                    counts.found_bin = owner * SEGMENT + first + i;
                    counts.found_above = above;
                    counts.found_inside = mine[i];
                }
                above += mine[i];
            }
        }
        if (lane == 0) counts.is_found = reached != 0;
    }
    __syncthreads();
    return counts.is_found;
}

// The least shift that leaves a range, of that many worths besides the first, no more bins than there are.
__device__ __forceinline__ u32 shift_for(u32 width) { return width < NUM_BINS ? 0 : 21 - __clz(width); }

// A range of worths: all keys above it are wanted, and so are `quota` of those in it. The bins must hold the counts of
// `range`.
__device__ Range find_threshold(const Worths& worths, int num_units, u32 top_k, Range range, u32 rank, Counts& counts,
                                u32& quota) {
    u32 above = 0;
    while (true) {
        sum_segments(counts, rank);
        const bool found = find_bin(counts, top_k - above);
        above += counts.found_above;
        if (found) {
            const u32 bin = counts.found_bin, inside = counts.found_inside;
            range.low += bin << range.shift;
            if (bin < NUM_BINS - 1) range.last = min(range.last, range.low + (1u << range.shift) - 1);
            quota = top_k - above;
            if (inside == quota || range.last == range.low) return range;
        } else {
            range = {1, range.low - 1, 0};
        }
        range.shift = shift_for(range.last - range.low);
        __syncthreads();
        clear_bins(counts);
        __syncthreads();
        for (int unit = threadIdx.x; unit < num_units; unit += THREADS) range.count(worths[unit], counts.bins);
    }
}

// Which of a unit's keys lie above the range, or in it: a bit for each.
__device__ __forceinline__ u32 keys_above(uint4 worth, const Range& range) {
    return (worth.x > range.last) | (worth.y > range.last) << 1 | (worth.z > range.last) << 2 | (worth.w > range.last) << 3;
}
__device__ __forceinline__ u32 keys_inside(uint4 worth, const Range& range) {
    return range.holds(worth.x) | range.holds(worth.y) << 1 | range.holds(worth.z) << 2 | range.holds(worth.w) << 3;
}

// For the whole warp; number at most 32.
__device__ __forceinline__ u32 sum_of_first(const u32* values, int number) {
    const int lane = threadIdx.x % 32;
    return __reduce_add_sync(ALL_LANES, lane < number ? values[lane] : 0);
}

// Tell every block how many keys lie above the range and in it, in each warp's part of each block's keys.
__device__ void count_chosen(const Worths& worths, int start, int stop, const Range& range, u32 rank, Counts& counts) {
    u32 above = 0, inside = 0;
    for (int unit = start + threadIdx.x % 32; unit < stop; unit += 32) {
        const uint4 worth = worths[unit];
        above += __popc(keys_above(worth, range));
        inside += __popc(keys_inside(worth, range));
    }
    above = __reduce_add_sync(ALL_LANES, above);
    inside = __reduce_add_sync(ALL_LANES, inside);
    if (threadIdx.x % 32 == 0) {
        counts.warp_above[threadIdx.x / 32] = above;
        counts.warp_inside[threadIdx.x / 32] = inside;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        above = sum_of_first(counts.warp_above, WARPS);
        inside = sum_of_first(counts.warp_inside, WARPS);
        if (threadIdx.x < CLUSTER) {
            write_word(&counts.rank_above[rank], threadIdx.x, above);
            write_word(&counts.rank_inside[rank], threadIdx.x, inside);
        }
    }
    cluster_sync();
}

// Write the chosen keys of the block, whose first key is first_key.
__device__ void write_chosen(const Worths& worths, int first_key, int num_units, const Range& range, u32 quota, u32 rank,
                             Counts& counts, int* chosen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int units_each = (num_units + WARPS - 1) / WARPS;
    const int start = min(num_units, warp * units_each), stop = min(num_units, start + units_each);
    count_chosen(worths, start, stop, range, rank, counts);
    // in all keys before
    u32 above = sum_of_first(counts.rank_above, rank) + sum_of_first(counts.warp_above, warp);
    u32 inside = sum_of_first(counts.rank_inside, rank) + sum_of_first(counts.warp_inside, warp);
    for (int first = start; first < stop; first += 32) {
        const uint4 worth = first + lane < stop ? worths[first + lane] : make_uint4(0, 0, 0, 0);
        const u32 mine_above = keys_above(worth, range), mine_inside = keys_inside(worth, range);
        const u32 up_to = sum_up_to_lane(__popc(mine_above) << 16 | __popc(mine_inside));
        u32 my_above = above + (up_to >> 16) - __popc(mine_above);
        u32 my_inside = inside + (up_to & 0xffffu) - __popc(mine_inside);
#pragma unroll
        for (int i = 0; i < UNIT_KEYS; ++i) {
            const bool is_inside = mine_inside >> i & 1, is_above = mine_above >> i & 1;
            if (is_above || (is_inside && my_inside < quota))
                chosen[my_above + min(my_inside, quota)] = first_key + (first + lane) * UNIT_KEYS + i;
            my_above += is_above;
            my_inside += is_inside;
        }
        const u32 all = __shfl_sync(ALL_LANES, up_to, 31);
        above += all >> 16;
        inside += all & 0xffffu;
    }
}

__device__ __forceinline__ void write_padding(int* chosen, long long from, long long to, u32 rank) {
    for (long long i = from + rank * THREADS + threadIdx.x; i < to; i += CLUSTER * THREADS) chosen[i] = -1;
}

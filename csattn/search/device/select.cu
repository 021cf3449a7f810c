// The top_k keys of a cluster, exactly: worth descending, then key ascending; written in ascending order.
//
// A histogram over the cluster finds the bin that holds the top_k-th worth, further histograms split that bin until it is
// one value, or until all its keys are wanted. What lies above the bin is chosen, and of the bin the first keys that fit.

constexpr int SEGMENT = NUM_BINS / CLUSTER;  // bins that one block sums up over the cluster

struct Counts {
    u32 bins[NUM_BINS];
    u32 segment[SEGMENT];
    u32 totals[CLUSTER];  // of each block's segment
    u32 found_bin, found_above, found_inside;
    u32 warp_above[WARPS], warp_inside[WARPS];
    u32 rank_above[CLUSTER], rank_inside[CLUSTER];
};

__device__ __forceinline__ void clear_bins(Counts& counts) {
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) counts.bins[i] = 0;
}

// Every block sums one segment of the bins over the cluster, and tells all blocks its total.
__device__ void sum_segments(Counts& counts, u32 rank) {
    cluster_sync();
    if (threadIdx.x == 0) counts.found_inside = 0;  // lent as the segment's total
    __syncthreads();
    for (int i = threadIdx.x; i < SEGMENT; i += THREADS) {
        u32 sum = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) sum += read_word(&counts.bins[rank * SEGMENT + i], r);
        counts.segment[i] = sum;
        if (sum) atomicAdd(&counts.found_inside, sum);
    }
    __syncthreads();
    if (threadIdx.x < CLUSTER) write_word(&counts.totals[rank], threadIdx.x, counts.found_inside);
    cluster_sync();
}

// The bin in which the `wanted`-th largest lies, how many lie above that bin, and how many in it. False: fewer are counted.
__device__ bool find_bin(Counts& counts, u32 wanted) {
    u32 above = 0;
    int owner = CLUSTER - 1;
    while (owner >= 0 && above + counts.totals[owner] < wanted) above += counts.totals[owner--];
    if (owner < 0) {
        if (threadIdx.x == 0) counts.found_above = above;
        __syncthreads();
        return false;
    }
    if (threadIdx.x < 32) {
        constexpr int BINS_PER_LANE = SEGMENT / 32;
        const int lane = threadIdx.x, first = SEGMENT - (lane + 1) * BINS_PER_LANE;  // lane 0 has the highest bins
        u32 mine[BINS_PER_LANE], sum = 0;
        for (int i = 0; i < BINS_PER_LANE; ++i) sum += mine[i] = read_word(&counts.segment[first + i], owner);
        u32 up_to = sum;
        for (int step = 1; step < 32; step <<= 1) {
            const u32 other = __shfl_up_sync(ALL_LANES, up_to, step);
            if (lane >= step) up_to += other;
        }
        above += up_to - sum;
        if (above < wanted && wanted <= above + sum) {
            int i = BINS_PER_LANE - 1;
            while (above + mine[i] < wanted) above += mine[i--];
            counts.found_bin = owner * SEGMENT + first + i;
            counts.found_above = above;
            counts.found_inside = mine[i];
        }
    }
    __syncthreads();
    return true;
}

// The least shift that leaves a range, of that many worths besides the first, no more bins than there are.
__device__ __forceinline__ u32 shift_for(u32 width) { return width < NUM_BINS ? 0 : 21 - __clz(width); }

// A range of worths: all keys above it are wanted, and so are `quota` of those in it. The bins must hold the counts of
// `range`.
template <class Worths>
__device__ Range find_threshold(const Worths& worths, int num_keys, u32 top_k, Range range, u32 rank, Counts& counts,
                                u32& quota) {
    u32 above = 0;
    while (true) {
        sum_segments(counts, rank);
        if (find_bin(counts, top_k - above)) {
            const u32 bin = counts.found_bin, inside = counts.found_inside;
            above += counts.found_above;
            range.low += bin << range.shift;
            if (bin < NUM_BINS - 1) range.last = min(range.last, range.low + (1u << range.shift) - 1);
            quota = top_k - above;
            if (inside == quota || range.last == range.low) return range;
        } else {
            above += counts.found_above;
            range = {1, range.low - 1, 0};
        }
        range.shift = shift_for(range.last - range.low);
        __syncthreads();
        clear_bins(counts);
        __syncthreads();
        for (int key = threadIdx.x; key < num_keys; key += THREADS) {
            const u32 worth = worths[key];
            if (range.holds(worth)) atomicAdd(&counts.bins[range.bin(worth)], 1u);
        }
    }
}

// Write the chosen keys. num_keys: of the block's part, whose first key is first_key.
template <class Worths>
__device__ void write_chosen(const Worths& worths, int first_key, int num_keys, const Range& range, u32 quota, u32 rank,
                             Counts& counts, int* chosen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int keys_per_warp = (num_keys + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int start = min(num_keys, warp * keys_per_warp), stop = min(num_keys, start + keys_per_warp);
    u32 above = 0, inside = 0;
    for (int key = start; key < stop; key += 32) {
        const u32 worth = key + lane < stop ? worths[key + lane] : 0;
        above += __popc(__ballot_sync(ALL_LANES, worth > range.last));
        inside += __popc(__ballot_sync(ALL_LANES, range.holds(worth)));
    }
    if (lane == 0) {
        counts.warp_above[warp] = above;
        counts.warp_inside[warp] = inside;
    }
    __syncthreads();
    if (threadIdx.x < CLUSTER) {
        u32 block_above = 0, block_inside = 0;
        for (int w = 0; w < WARPS; ++w) {
            block_above += counts.warp_above[w];
            block_inside += counts.warp_inside[w];
        }
        write_word(&counts.rank_above[rank], threadIdx.x, block_above);
        write_word(&counts.rank_inside[rank], threadIdx.x, block_inside);
    }
    cluster_sync();
    above = inside = 0;
    for (int r = 0; r < rank; ++r) {
        above += counts.rank_above[r];
        inside += counts.rank_inside[r];
    }
    for (int w = 0; w < warp; ++w) {
        above += counts.warp_above[w];
        inside += counts.warp_inside[w];
    }
    const u32 lanes_before = (1u << lane) - 1;
    for (int key = start; key < stop; key += 32) {
        const u32 worth = key + lane < stop ? worths[key + lane] : 0;
        const u32 ties = __ballot_sync(ALL_LANES, range.holds(worth));
        const bool fits = range.holds(worth) && inside + __popc(ties & lanes_before) < quota;
        const u32 taken = __ballot_sync(ALL_LANES, worth > range.last || fits);
        if (taken >> lane & 1) chosen[above + min(inside, quota) + __popc(taken & lanes_before)] = first_key + key + lane;
        above += __popc(__ballot_sync(ALL_LANES, worth > range.last));
        inside += __popc(ties);
    }
}

__device__ __forceinline__ void write_padding(int* chosen, long long from, long long to, u32 rank) {
    for (long long i = from + rank * THREADS + threadIdx.x; i < to; i += CLUSTER * THREADS) chosen[i] = -1;
}

// Last launch where worths are sums: the top_k-th worth, and all keys above it and the first of those that have it, in
// ascending order. A cluster of CLUSTER blocks has a slot, each of them a part of the keys.

// Loaded sums in shared memory, from where each thread reads `each` neighbouring units of SUM_KEYS: any of its sums, in the
// order of the keys. Units change places so that neither way meets a bank twice.
struct Tray {
    uint4* of_warp;  // [32 * LOADS]
    int each;

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ static int place(int unit) { return unit ^ (unit >> 3 & 7); }

    __device__ __forceinline__ Tray(uint4* shared, const Loaded& loaded)
        : of_warp(shared + threadIdx.x / 32 * (32 * LOADS)), each(loaded.each) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (i < each) of_warp[place(i * 32 + lane())] = loaded.sums[i];
        __syncwarp();
    }

    // The thread's first unit, from the part's.
    __device__ __forceinline__ int first() const { return (static_cast<int>(threadIdx.x) / 32 * 32 + lane()) * each; }
    __device__ __forceinline__ uint4 unit(int i) const { return of_warp[place(lane() * each + i)]; }
    __device__ __forceinline__ u32 word(int w) const {  // of two sums
        return reinterpret_cast<const u32*>(of_warp + place(lane() * each + w / 4))[w % 4];
    }
    __device__ __forceinline__ u32 worth(int key) const { return word(key / 2) >> key % 2 * 16 & 0xffffu; }
};

// Which of the thread's keys lie above a bin, whose worths are `levels` from `least` on, and which in it: a bit for each.
struct Marks {
    u32 above, inside;

    __device__ __forceinline__ Marks(const Tray& tray, u32 least, u32 levels) : above(0), inside(0) {
        const u32 below = (least - 1) * 0x00010001u;
        u32 words = 0;  // of two keys, one of which at least lies not below the bin
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (i >= tray.each) break;
            const uint4 unit = tray.unit(i);
            words |= (__vmaxu2(unit.x, below) != below) << (4 * i);
            words |= (__vmaxu2(unit.y, below) != below) << (4 * i + 1);
            words |= (__vmaxu2(unit.z, below) != below) << (4 * i + 2);
            words |= (__vmaxu2(unit.w, below) != below) << (4 * i + 3);
        }
        for (; words; words &= words - 1) {
            const int w = __ffs(words) - 1;
            const u32 word = tray.word(w), low = word & 0xffffu, high = word >> 16;
            inside |= (low - least < levels) << 2 * w | (high - least < levels) << (2 * w + 1);
            above |= (low >= least + levels) << 2 * w | (high >= least + levels) << (2 * w + 1);
        }
    }
};

// For the whole warp. counts: of all parts.
__device__ Cut find_cut(const u32 (*counts)[LEVELS + 1], u32 least, u32 quota) {
    const u32 lane = threadIdx.x % 32, level = LEVELS - 1 - lane;  // the highest first
    u32 all = 0, before = 0, above_before = 0;
    for (u32 part = 0; part < CLUSTER; ++part) {
        all += counts[part][level];
        if (part < blockIdx.x) before += counts[part][level], above_before += counts[part][LEVELS];
    }
    const u32 up_to = sum_up_to_lane(all), before_up_to = sum_up_to_lane(before);
    const int at = __ffs(__ballot_sync(ALL_LANES, up_to >= quota)) - 1;
    const u32 higher = __shfl_sync(ALL_LANES, up_to - all, at), equal_before = __shfl_sync(ALL_LANES, before, at);
    above_before += __shfl_sync(ALL_LANES, before_up_to - before, at);
    return {least + LEVELS - 1 - at, quota - higher, above_before, equal_before};
}

// Count the part's keys at each level of the bin, and above it.
__device__ __forceinline__ void count_marked(const Tray& tray, const Marks& marks, u32 least, u32* counts) {
    for (u32 left = marks.inside; left; left &= left - 1) atomicAdd(&counts[tray.worth(__ffs(left) - 1) - least], 1u);
    const u32 above = __reduce_add_sync(ALL_LANES, __popc(marks.above));
    if (threadIdx.x % 32 == 0 && above) atomicAdd(&counts[LEVELS], above);
}

// For the whole block: write what is marked and not below the cut. scratch: [WARPS].
__device__ __forceinline__ void write_marked(const Tray& tray, Marks marks, const Cut& cut, int first_key, int* chosen,
                                             u32* scratch) {
    u32 equal = 0;
    for (u32 left = marks.inside; left; left &= left - 1) {
        const int key = __ffs(left) - 1;
        const u32 worth = tray.worth(key);
        marks.above |= (worth > cut.worth) << key;
        equal |= (worth == cut.worth) << key;
    }
    // two numbers share 32 bits: of keys above the cut, and of keys at it
    const u32 mine = __popc(marks.above) + (__popc(equal) << 16), up_to = sum_up_to_lane(mine);
    u32 total;
    const u32 before = sum_over_warps_before(__shfl_sync(ALL_LANES, up_to, 31), scratch, total) + up_to - mine;
    const u32 equal_before = cut.equal_before + (before >> 16);
    for (u32 left = cut.quota - min(cut.quota, equal_before); __popc(equal) > left;) equal ^= 0x80000000u >> __clz(equal);
    int* at = chosen + cut.above_before + (before & 0xffffu) + min(equal_before, cut.quota);
    first_key += tray.first() * SUM_KEYS;
    for (u32 left = marks.above | equal; left; left &= left - 1) *at++ = first_key + __ffs(left) - 1;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 3) choose_sums(
    const int* context_lens, const int* top_ks, const int* context_ids, long long sink_len, long long window_len,
    const uint4* worths,    // [batch_size, num_index_heads, max_keys / SUM_KEYS]
    long long max_keys,
    const Choice* choices,  // [batch_size, num_index_heads]
    int* kv_indices,        // [batch_size, num_index_heads, max_top_k], written
    int* valid_len,         // [batch_size, num_index_heads], written
    long long max_top_k
) {
    __shared__ uint4 sums[LOADS * THREADS];  // a part has no more
    __shared__ u32 scratch[WARPS], mine[LEVELS + 1], counts[CLUSTER][LEVELS + 1];
    __shared__ u64 number_barrier;
    const int slot = blockIdx.z * gridDim.y + blockIdx.y, context_id = context_ids[blockIdx.z];
    const Context context = context_of(context_lens, top_ks, context_id, sink_len, window_len);
    const Part part(context.num_keys);
    const int num_units = part.num_keys / SUM_KEYS, wanted = context.top_k;
    if (threadIdx.x <= LEVELS) mine[threadIdx.x] = 0;
    worths += slot * (max_keys / SUM_KEYS);
    const uint4* of_part = worths + part.first_key / SUM_KEYS;
    int* chosen = kv_indices + slot * max_top_k;
    const Handover handover(number_barrier);
    if (threadIdx.x == 0) handover.expect(CLUSTER * (LEVELS + 1));
    wait_for_earlier(part.first_key ^ wanted);
    const BinCounts bin_counts(choices[slot].bins);
    Loaded loaded;
    loaded.load(of_part, 0, num_units);
    const Tray tray(sums, loaded);
    const Range range = first_range(context);
    Boundary boundary{0, 0, 0};
    if (wanted > 0) boundary = find_bin(bin_counts, wanted, scratch);
    for (long long i = wanted + blockIdx.x * THREADS + threadIdx.x; i < max_top_k; i += CLUSTER * THREADS) chosen[i] = -1;
    if (blockIdx.x == 0 && threadIdx.x == 0) valid_len[slot] = wanted;
    if (wanted == 0) return;
    if (boundary.inside == 0) {
        if (blockIdx.x > 0) return;
        const WidenedSums widened{reinterpret_cast<const uint2*>(worths)};
        const int all_units = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS / UNIT_KEYS;
        __syncthreads();
        return choose_alone(widened, all_units, wanted, range, boundary, reinterpret_cast<u32*>(sums), scratch, chosen);
    }
    const u32 least = range.low + (boundary.bin << range.shift), levels = 1u << range.shift;
    const Marks marks(tray, least, levels);
    count_marked(tray, marks, least, mine);
    __syncthreads();
    handover.wait_for_all();
    for (int i = threadIdx.x; i < CLUSTER * (LEVELS + 1); i += THREADS)
        handover.give(counts[blockIdx.x][i % (LEVELS + 1)], i / (LEVELS + 1), mine[i % (LEVELS + 1)]);
    handover.wait_for_numbers();
    write_marked(tray, marks, find_cut(counts, least, wanted - boundary.above), part.first_key, chosen, scratch);
}

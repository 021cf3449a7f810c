// Fourth launch: the bin of the top_k-th worth, a mark for every key above it, a list of the keys in it.

struct Boundary {
    u32 bin, above, inside;
};

// The bin that holds the `wanted`-th largest worth; inside is 0 if fewer are counted. scratch: [WARPS].
__device__ Boundary find_bin(const u32* bins, u32 wanted, u32* scratch) {
    __shared__ Boundary found;
    constexpr int BINS_EACH = NUM_BINS / THREADS;
    static_assert(NUM_BINS % THREADS == 0, "threads share out the bins");
    const int first = NUM_BINS - (threadIdx.x + 1) * BINS_EACH;  // thread 0 has the highest bins
    u32 mine[BINS_EACH], sum = 0, total;
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) mine[i] = bins[first + i];
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) sum += mine[i];
    u32 above = sum_before(sum, scratch, total);
    if (threadIdx.x == 0 && total < wanted) found = {0, total, 0};
#pragma unroll
    for (int i = BINS_EACH - 1; i >= 0; --i) {
        if (above < wanted && wanted <= above + mine[i]) found = {static_cast<u32>(first + i), above, mine[i]};
        above += mine[i];
    }
    __syncthreads();
    return found;
}

// The least shift that leaves a range, of that many worths besides the first, no more bins than there are.
__device__ __forceinline__ u32 shift_for(u32 width) { return width < NUM_BINS ? 0 : 20 - __clz(width); }

// One block does it all by itself, over as many passes as it takes: where worths tie, or lie further apart than the bins.
__device__ void choose_alone(const uint4* worths, int num_units, u32 wanted, Range range, Boundary boundary, u32* bins,
                             u32* scratch, int* chosen) {
    u32 above = boundary.above;
    while (true) {
        range = boundary.inside ? range.of_bin(boundary.bin) : Range{1, range.low - 1, 0};
        if (boundary.inside && (above + boundary.inside == wanted || range.last == range.low)) break;
        range.shift = shift_for(range.last - range.low);
        __syncthreads();
        for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
        for (int unit = threadIdx.x; unit < num_units; unit += THREADS) range.count(worths[unit], bins);
        __syncthreads();
        boundary = find_bin(bins, wanted - above, scratch);
        above += boundary.above;
    }
    const u32 quota = wanted - above;
    u32 inside_before = 0, written = 0;
    for (int first = 0; first < num_units; first += THREADS) {
        const int unit = first + threadIdx.x;
        const uint4 worth = unit < num_units ? worths[unit] : make_uint4(0, 0, 0, 0);
        const u32 inside = keys_inside(worth, range);
        u32 total, taken = keys_above(worth, range), rank = inside_before + sum_before(__popc(inside), scratch, total);
        inside_before += total;
        for (int i = 0; i < UNIT_KEYS; ++i)
            if (inside >> i & 1 && rank++ < quota) taken |= 1u << i;
        u32 at = written + sum_before(__popc(taken), scratch, total);
        written += total;
        for (int i = 0; i < UNIT_KEYS; ++i)
            if (taken >> i & 1) chosen[at++] = unit * UNIT_KEYS + i;
    }
}

// Mark the part's keys above the range, count them, and list those in it.
__device__ u32 mark_part(const uint4* worths, const Part& part, const Range& range, u32* marks, Choice& choice) {
    u32 above = 0;
    for (int key = threadIdx.x * UNIT_KEYS; key < part.num_keys; key += THREADS * UNIT_KEYS) {
        const uint4 worth = worths[(part.first_key + key) / UNIT_KEYS];
        const u32 words[UNIT_KEYS] = {worth.x, worth.y, worth.z, worth.w};
        const u32 inside = keys_inside(worth, range);
        u32 mark = keys_above(worth, range);
        above += __popc(mark);
        for (int i = 0; i < UNIT_KEYS; ++i) {
            if (inside >> i & 1) {
                const u32 at = atomicAdd(&choice.num_candidates, 1u);
                choice.worths[at] = words[i];
                choice.keys[at] = part.first_key + key + i;
            }
        }
        mark <<= threadIdx.x % 8 * 4;  // eight threads share a word
        for (int step = 1; step < 8; step <<= 1) mark |= __shfl_xor_sync(ALL_LANES, mark, step);
        if (threadIdx.x % 8 == 0) marks[(part.first_key + key) / 32] = mark;
    }
    return above;
}

extern "C" __global__ void __launch_bounds__(THREADS) find_keys(
    const int* context_lens, const int* top_ks, const int* context_ids, long long sink_len, long long window_len,
    const uint4* worths,  // [batch_size, num_index_heads, max_keys / UNIT_KEYS]
    long long max_keys,
    u32* marks,           // [batch_size, num_index_heads, max_keys / 32], written
    Choice* choices,      // [batch_size, num_index_heads]
    int* kv_indices,      // [batch_size, num_index_heads, max_top_k], written where one block chooses alone
    long long max_top_k
) {
    __shared__ u32 scratch[WARPS], bins[NUM_BINS], above;
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids[blockIdx.z], sink_len, window_len);
    const Part part(context.num_keys);
    if (threadIdx.x == 0) above = 0;
    wait_for_earlier();
    Choice& choice = choices[slot];
    const int wanted = num_wanted(context, choice);
    if (wanted == 0) return;
    worths += slot * (max_keys / UNIT_KEYS);
    const Range range = first_range(context);
    const Boundary boundary = find_bin(choice.bins, wanted, scratch);
    if (boundary.inside == 0 || boundary.inside > MAX_CANDIDATES) {
        if (blockIdx.x > 0) return;
        if (threadIdx.x == 0) choice.quota = ALONE;
        const int num_units = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS / UNIT_KEYS;
        return choose_alone(worths, num_units, wanted, range, boundary, bins, scratch, kv_indices + slot * max_top_k);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) choice.quota = wanted - boundary.above;
    const u32 mine = mark_part(worths, part, range.of_bin(boundary.bin), marks + slot * (max_keys / 32), choice);
    const u32 of_warp = __reduce_add_sync(ALL_LANES, mine);
    if (threadIdx.x % 32 == 0 && of_warp) atomicAdd(&above, of_warp);
    __syncthreads();
    if (threadIdx.x == 0) choice.above[blockIdx.x] = above;
}

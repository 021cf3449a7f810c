// Third launch of a search over a sketch: the choice. A cluster of CLUSTER blocks has the keys of one slot, each block neighbouring
// ones. In integers throughout, so that neither the device nor how keys are shared out makes a difference: see
// csattn.sketch.reference.worth.

#include "codes.cuh"

constexpr u32 NUM_BINS = 1024;
constexpr int BINS_PER_OCTAVE_LOG = 5;         // at first: 32 octaves in all
constexpr int TOTAL_BITS = 24, LOG_BITS = 16;  // of reference.normaliser
constexpr int UNIT_KEYS = 8;                   // 16 bytes of scores
constexpr u32 MARKED = 65535, LEAST = 1;       // worths, in 16 bits; 0: may not be chosen
constexpr u32 TWICE = 0x00010001u;             // times a number of 16 bits: twice side by side
static_assert(THREADS == NUM_BINS, "a thread has a bin");

// The neighbouring keys of one block, in units, and of a warp of it.
struct Share {
    int of_block, first, end;

    __device__ __forceinline__ explicit Share(int num_keys) {
        const int units = (num_keys + UNIT_KEYS - 1) / UNIT_KEYS, each = (units + CLUSTER - 1) / CLUSTER;
        of_block = min(units, static_cast<int>(blockIdx.x) * each);
        const int end_of_block = min(units, of_block + each), warp = threadIdx.x / 32;
        const int of_warp = (end_of_block - of_block + 32 * WARPS - 1) / (32 * WARPS) * 32;
        first = min(end_of_block, of_block + warp * of_warp);
        end = min(end_of_block, first + of_warp);
    }

    // use(unit) for the units that are the thread's.
    template <class Use> __device__ __forceinline__ void for_each(Use use) const {
#pragma unroll 2
        for (int unit = first + threadIdx.x % 32; unit < end; unit += 32) use(unit);
    }
};

// What scores are worth: less what their query's normaliser is more than the least of them. See reference.normaliser.
struct Normalisers {
    int found[GROUP_SIZE], tops[GROUP_SIZE];  // a top: no score reaches it
    u32 least[GROUP_SIZE];                    // a score that is worth nothing, twice side by side

    // By one warp each. octaves: [GROUP_SIZE][NUM_OCTAVES] counts.
    __device__ __forceinline__ void find(const u32* octaves, int exponent) {
        const int lane = threadIdx.x % 32;
        for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
            const uint4 four = __ldcg(reinterpret_cast<const uint4*>(octaves + g * NUM_OCTAVES) + lane);
            const u32 here = four.w ? 4 : four.z ? 3 : four.y ? 2 : four.x ? 1 : 0;
            const int top = static_cast<int>(__reduce_max_sync(ALL_LANES, here ? 4 * lane + here : 0)) - 1;
            u64 total = 0;
            for (int i = 0; i < 4; ++i) {
                const int below = top - (4 * lane + i);
                if (below >= 0 && below <= TOTAL_BITS) total += static_cast<u64>(word_of(four, i)) << (TOTAL_BITS - below);
            }
            for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(ALL_LANES, total, step);
            const int whole = 63 - __clzll(static_cast<long long>(total));
            const int log = (top + LEAST_OCTAVE + whole - TOTAL_BITS - 1) * (1 << LOG_BITS) + static_cast<int>(total >> (whole - LOG_BITS));
            const int next = top + LEAST_OCTAVE + 1;
            if (lane > 0) continue;
            found[g] = log >> (LOG_BITS + exponent);
            tops[g] = top == NUM_OCTAVES - 1 ? 65535 : BIAS + (next * (1 << max(-exponent, 0)) >> max(exponent, 0)) + (exponent > 0);
        }
    }

    // By the first threads, when all are found.
    __device__ __forceinline__ void compare() {
        if (threadIdx.x >= GROUP_SIZE) return;
        int lowest = found[0];
        for (int g = 1; g < GROUP_SIZE; ++g) lowest = min(lowest, found[g]);
        least[threadIdx.x] = static_cast<u32>(min(found[threadIdx.x] - lowest, 65535)) * TWICE;
    }

    // No worth is greater.
    __device__ __forceinline__ u32 top() const {
        int most = LEAST;
        for (int g = 0; g < GROUP_SIZE; ++g) most = max(most, tops[g] - static_cast<int>(least[g] & 0xffffu));
        return static_cast<u32>(min(most, 65535));
    }
};

__device__ __forceinline__ u32 less(u32 scores, u32 least) { return __vmaxu2(scores, least) - least; }

// Which of the keys may be chosen: all ones in their halves of words.
__device__ __forceinline__ u32 eligible(int key, const Context& context) {
    return (key >= context.sink_end && key < context.window_start ? 0xffffu : 0u) |
           (key + 1 >= context.sink_end && key + 1 < context.window_start ? 0xffff0000u : 0u);
}

// Of eight keys, in 16 bits each, none of them marked.
__device__ __forceinline__ uint4 worths_of(const uint4* scores, long long plane, int unit, const u32* least, const Context& context) {
    u32 words[4] = {LEAST * TWICE, LEAST * TWICE, LEAST * TWICE, LEAST * TWICE};
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const uint4 eight = scores[g * plane + unit];
        const u32 off = GROUP_SIZE > 1 ? least[g] : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __vmaxu2(words[i], less(word_of(eight, i), off));
    }
    const int key = unit * UNIT_KEYS;
    if (key < context.sink_end || key + UNIT_KEYS > context.window_start)
        for (int i = 0; i < 4; ++i) words[i] &= eligible(key + 2 * i, context);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Of eight keys, some of them marked; what may not be chosen stays 0.
__device__ __forceinline__ uint4 with_marks(const uint4& eight, u32 marked) {
    u32 words[4];
    for (int i = 0; i < 4; ++i) {
        const u32 word = word_of(eight, i), halves = (marked >> 2 * i & 1) * 0xffffu | (marked >> (2 * i + 1) & 1) * 0xffff0000u;
        words[i] = word | (halves & ((word & 0xffffu ? 0xffffu : 0) | (word >> 16 ? 0xffff0000u : 0)));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ u32 worth_of(const uint4& eight, int i) {
    return i % 2 ? word_of(eight, i / 2) >> 16 : word_of(eight, i / 2) & 0xffffu;
}

__device__ __forceinline__ u32 greatest_of(const uint4& eight) {
    const u32 both = __vmaxu2(__vmaxu2(eight.x, eight.y), __vmaxu2(eight.z, eight.w));
    return max(both & 0xffffu, both >> 16);
}

// Worths from `lowest` to `highest`, the highest first, in bins of 2 ** shift. Where it is open, the first bin also has what is above.
// The last has what is left, and is not counted.
struct Bins {
    u32 highest, lowest, shift;
    bool is_open;

    __device__ __forceinline__ void count(u32 worth, u32* counts) const {
        const u32 bin = highest - min(worth, highest) >> shift;
        if (worth >= lowest && (worth <= highest || is_open) && bin < NUM_BINS - 1) atomicAdd(&counts[bin], 1u);
    }
    __device__ __forceinline__ static Bins over(u32 highest, u32 lowest, bool is_open) {
        const u32 width = highest - lowest;
        return {highest, lowest, width < NUM_BINS ? 0 : 32u - __clz(width / NUM_BINS), is_open};
    }
    __device__ __forceinline__ u32 lowest_of(u32 bin) const {
        const u32 top = highest - (bin << shift);
        return bin == NUM_BINS - 1 ? lowest : max(lowest, top + 1 - min(top + 1, 1u << shift));
    }
    // Of one bin, in bins again.
    __device__ __forceinline__ Bins of_bin(u32 bin) const {
        return over(is_open && bin == 0 ? MARKED : highest - (bin << shift), lowest_of(bin), false);
    }
};

struct Found {
    u32 bin, above;  // of the wanted one; how many are in the bins before
};

// For the whole block: in which bins of the cluster's counts the `wanted`-th is, and an earlier one. scratch: [WARPS].
struct BinsFound {
    Found last, first;

    __device__ __forceinline__ static BinsFound of(u32* counts, u32 wanted, u32 earlier, u32* scratch) {
        __shared__ BinsFound found;
        u32 mine = 0, total;
        if (threadIdx.x < NUM_BINS - 1)
#pragma unroll
            for (u32 rank = 0; rank < CLUSTER; ++rank) mine += *in_block(counts + threadIdx.x, rank);
        const u32 above = sum_before(mine, scratch, total);
        if (threadIdx.x == 0 && total < wanted) found.last = {NUM_BINS - 1, total};
        if (threadIdx.x == 0 && total < earlier) found.first = {NUM_BINS - 1, total};
        if (above < wanted && wanted <= above + mine) found.last = {threadIdx.x, above};
        if (above < earlier && earlier <= above + mine) found.first = {threadIdx.x, above};
        __syncthreads();
        return found;
    }
};

// The upper bits of those halves of a word that are not 0.
__device__ __forceinline__ u32 some_in_halves(u32 word) { return ((word & 0x7fff7fffu) + 0x7fff7fffu | word) & 0x80008000u; }

// Of eight keys, a bit for each that is worth more than the last, at 8 one for each that is worth as much. Key 2 i + h is bit i + 4 h.
__device__ __forceinline__ u32 above_and_equal(const uint4& eight, u32 last) {
    u32 not_equal = 0, above = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        not_equal |= some_in_halves(word_of(eight, i) ^ last * TWICE) >> (3 - i);
        above |= some_in_halves(less(word_of(eight, i), last * TWICE)) >> (3 - i);
    }
    // bits 12 to 15 and 28 to 31 so far
    const u32 equal = ~not_equal;
    return (above >> 12 & 0xfu) | (above >> 24 & 0xf0u) | (equal >> 4 & 0xf00u) | (equal >> 16 & 0xf000u);
}
// How many they are: those above, and 2 ** 16 times those equal.
__device__ __forceinline__ u32 count_both(u32 bits) { return __popc(bits & 0xffu) | __popc(bits >> 8) << 16; }

struct AboveAndEqual {
    u32 above, equal;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) choose_codes(
    const int* context_lens,  // [num_contexts]
    const int* top_ks,        // [num_contexts]
    const int* context_ids,   // [batch_size], -1: idle
    long long sink_len, long long window_len,
    const Sketch* sketches,   // [num_contexts], of this layer
    const float* coordinates, const float* means, const u8* asked, long long max_segments,  // `Queries`
    const uint4* scores, long long max_keys,  // as score_codes writes them
    const u32* octaves,       // [slots, GROUP_SIZE, NUM_OCTAVES], likewise
    uint4* set_aside,              // [slots, max_keys / UNIT_KEYS], where a block's worths do not fit into its memory
    int* kv_indices,          // [batch_size, num_index_heads, max_top_k], written
    int* valid_len,           // [batch_size, num_index_heads], written
    long long max_top_k
) {
    extern __shared__ uint4 memory[];  // worths of the block's keys
    __shared__ Normalisers normalisers;
    __shared__ u32 counts[3][NUM_BINS], scratch[WARPS];
    __shared__ AboveAndEqual of_warps[WARPS], chosen_here;
    const int head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    const Context context = context_of(context_lens, top_ks, context_id, sink_len, window_len);
    const Share share(context.num_keys);
    const u8* marks = context_id < 0 ? nullptr : sketches[context_id].marks;
    for (int i = 0; i < 3; ++i) counts[i][threadIdx.x] = 0;
    if (threadIdx.x == 0) chosen_here = {0, 0};
    wait_then_let_next_start(context.num_keys + static_cast<u32>(reinterpret_cast<u64>(marks)));
    const u32 wanted = context.top_k;
    int* chosen = kv_indices + slot * max_top_k;
    for (long long i = wanted + blockIdx.x * THREADS + threadIdx.x; i < max_top_k; i += CLUSTER * THREADS) chosen[i] = -1;
    if (blockIdx.x == 0 && threadIdx.x == 0) valid_len[slot] = wanted;
    if (wanted == 0) return;
    const int exponent = Unit(Queries{coordinates, means, asked, max_segments}, slot).exponent;
    const long long plane = max_keys / UNIT_KEYS;
    scores += slot * GROUP_SIZE * plane;
    uint4* worths = (IN_SHARED ? memory : set_aside + slot * plane + share.of_block) - share.of_block;
    u32 top = MARKED;
    if (GROUP_SIZE > 1) {
        normalisers.find(octaves + slot * GROUP_SIZE * NUM_OCTAVES, exponent);
        __syncthreads();
        normalisers.compare();
        __syncthreads();
        top = normalisers.top();
    }
    if (marks) marks += head * static_cast<long long>((context.num_keys + BLOCK_KEYS - 1) / BLOCK_KEYS) * (BLOCK_KEYS / 8);

    // The worth of the last that is chosen. First of units, by their greatest but for marks: as many keys are worth at least as much.
    // No unit has more than UNIT_KEYS keys, and at least half of the choice is not marked: so few units are worth more than the last.
    Bins bins = Bins::over(top, LEAST, true);
    if (GROUP_SIZE > 1) bins.shift = min(bins.shift, static_cast<u32>(max(0, -BINS_PER_OCTAVE_LOG - exponent)));
    share.for_each([&](int unit) {
        const uint4 eight = worths_of(scores, plane, unit, normalisers.least, context);
        const u32 marked = marks ? marks[unit] : 0;
        worths[unit] = marked ? with_marks(eight, marked) : eight;
        bins.count(greatest_of(eight), counts[0]);
    });
    cluster_sync();
    const BinsFound units = BinsFound::of(counts[0], wanted, (wanted + 2 * UNIT_KEYS - 1) / (2 * UNIT_KEYS), scratch);
    const u32 above_all = units.first.bin == 0 ? MARKED : bins.highest - (units.first.bin << bins.shift) + 1;
    bins = Bins::over(above_all, bins.lowest_of(units.last.bin), true);
    u32 above = 0;
    for (int round = 1; bins.is_open || bins.highest > bins.lowest; ++round) {
        u32* mine = counts[round % 3];
        share.for_each([&](int unit) {
            const uint4 eight = worths[unit];
            if (greatest_of(eight) < bins.lowest) return;
#pragma unroll
            for (int i = 0; i < UNIT_KEYS; ++i) bins.count(worth_of(eight, i), mine);
        });
        counts[(round + 1) % 3][threadIdx.x] = 0;  // read by all before they came to the last barrier
        cluster_sync();
        const Found found = BinsFound::of(mine, wanted - above, wanted - above, scratch).last;
        above += found.above;
        bins = bins.of_bin(found.bin);
    }
    const u32 last = bins.highest, quota = wanted - above;  // of the keys that are worth as much as the last one, so many

    // which they are, and how many in the warps and blocks before
    u32 here = 0;
    share.for_each([&](int unit) {
        const u32 bits = above_and_equal(worths[unit], last);
        worths[unit].x = bits;
        here += count_both(bits);
    });
    const u32 above_here = __reduce_add_sync(ALL_LANES, here & 0xffffu), equal_here = __reduce_add_sync(ALL_LANES, here >> 16);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = {above_here, equal_here};
        atomicAdd(&chosen_here.above, above_here), atomicAdd(&chosen_here.equal, equal_here);
    }
    cluster_sync();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 above_before = lane < warp ? of_warps[lane].above : 0, equal_before = lane < warp ? of_warps[lane].equal : 0;
    if (lane < static_cast<int>(blockIdx.x)) {
        const AboveAndEqual* of_block = in_block(&chosen_here, lane);
        above_before += of_block->above, equal_before += of_block->equal;
    }
    above_before = __reduce_add_sync(ALL_LANES, above_before), equal_before = __reduce_add_sync(ALL_LANES, equal_before);

    for (int first = share.first; first < share.end; first += 32) {
        const int unit = first + lane;
        const u32 bits = unit < share.end ? worths[unit].x : 0;
        const u32 both = count_both(bits), up_to = sum_up_to_lane(both), before = up_to - both;
        u32 above_at = above_before + (before & 0xffffu), equal_at = equal_before + (before >> 16);
        for (u32 left = (bits | bits >> 8) & 0xffu; left;) {  // in the order of the keys: bits 0, 4, 1, 5, ...
            const int low = __ffs(left & 0xfu) - 1, high = __ffs(left >> 4) - 1;
            const int i = high < 0 || (low >= 0 && low <= high) ? 2 * low : 2 * high + 1, bit = i / 2 + i % 2 * 4;
            left &= ~(1u << bit);
            const bool is_equal = bits >> (8 + bit) & 1;
            if (!is_equal || equal_at < quota) chosen[above_at + min(equal_at, quota)] = unit * UNIT_KEYS + i;
            above_at += !is_equal, equal_at += is_equal;
        }
        const u32 total = __shfl_sync(ALL_LANES, up_to, 31);
        above_before += total & 0xffffu, equal_before += total >> 16;
    }
    cluster_sync();  // others may still read what this block has counted
}

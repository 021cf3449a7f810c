// Third launch over a sketch: the choice. BLOCKS blocks share a slot, with neighbouring keys each. All arithmetic is on integers, so
// neither the device nor the division of keys makes a difference: see csattn.sketch.reference.group_scores.
//
// A radix select: group scores are counted in bins, one for each score if there is room, from the greatest possible down to one that as
// many keys as are wanted certainly reach. Every block posts its counts. From all of them each block finds for itself the bin of the
// last key to choose, and how many keys the blocks before it choose.

#include "codes.cuh"

// In two steps: first the coarse bin of the last key to choose, then which of its FINE_BINS it is.
constexpr u32 NUM_BINS = 4096, FINE_BINS = 32, COARSE_BINS = NUM_BINS / FINE_BINS;
constexpr u32 NUMBER_BITS = 8, NUMBERS = (1 << NUMBER_BITS) - 1, MOST_MESSAGES = 16;  // of messages; of a launch: see `Counts`
constexpr int TOTAL_BITS = 24, LOG_BITS = 16;  // of reference.normaliser
constexpr int UNIT_KEYS = 8;                   // 16 bytes of scores
constexpr u32 MARKED = 65535, LEAST = 1;       // group scores, in 16 bits; 0: may not be chosen
constexpr u32 TWICE = 0x00010001u;             // times a number of 16 bits: the number in both halves

// The neighbouring keys of a block and of one of its warps, in units.
struct Share {
    int of_block, first, end;

    __device__ __forceinline__ explicit Share(int num_keys) {
        const int units = (num_keys + UNIT_KEYS - 1) / UNIT_KEYS, each = (units + BLOCKS - 1) / BLOCKS;
        of_block = min(units, static_cast<int>(blockIdx.x) * each);
        const int end_of_block = min(units, of_block + each), warp = threadIdx.x / 32;
        const int of_warp = (end_of_block - of_block + 32 * WARPS - 1) / (32 * WARPS) * 32;
        first = min(end_of_block, of_block + warp * of_warp);
        end = min(end_of_block, first + of_warp);
    }

    // use(unit) for each of the thread's units, with TOGETHER loads in flight. Little else is unrolled: it gains nothing, and five
    // kernels a layer are many instructions.
    template <int TOGETHER, class Use> __device__ __forceinline__ void for_each(Use use) const {
#pragma unroll TOGETHER
        for (int unit = first + threadIdx.x % 32; unit < end; unit += 32) use(unit);
    }
};

__device__ __forceinline__ u32 greatest_of(const uint4& eight) {
    const u32 both = __vmaxu2(__vmaxu2(eight.x, eight.y), __vmaxu2(eight.z, eight.w));
    return max(both & 0xffffu, both >> 16);
}

// The normalisers of a group's queries: see reference.normaliser. A score minus its query's normaliser, plus the least normaliser of the
// group, is its share in the softmax, as a score; a key's group score is the greatest of these.
struct Normalisers {
    int found[GROUP_SIZE];
    int tops[GROUP_SIZE], floors[GROUP_SIZE];  // no score reaches the top; as many eligible keys as are wanted reach the floor

    // By one warp for each query. four: the lane's of the query's NUM_OCTAVES counts of units, by their greatest score; enough: so many
    // units certainly have as many eligible keys as are wanted.
    __device__ __forceinline__ void find(const uint4& four, int exponent, u32 enough) {
        const int lane = threadIdx.x % 32;
        if (const int g = threadIdx.x / 32; g < GROUP_SIZE) {
            const u32 here = four.w ? 4 : four.z ? 3 : four.y ? 2 : four.x ? 1 : 0;
            const int top = static_cast<int>(__reduce_max_sync(ALL_LANES, here ? 4 * lane + here : 0)) - 1;
            u64 of_octaves = 0;
            for (int i = 0; i < 4; ++i) {
                const int below = top - (4 * lane + i);
                if (below >= 0 && below <= TOTAL_BITS) of_octaves += static_cast<u64>(word_of(four, i)) << (TOTAL_BITS - below);
            }
            const u32 low = __reduce_add_sync(ALL_LANES, static_cast<u32>(of_octaves) & 0xffffu);
            const u64 high = __reduce_add_sync(ALL_LANES, static_cast<u32>(of_octaves >> 16));  // fits: units are few
            const u64 total = (high << 16) + low;
            const u32 of_lane = four.x + four.y + four.z + four.w, up_to = sum_up_to_lane(of_lane);
            u32 reached = __shfl_sync(ALL_LANES, up_to, 31) - up_to, floor = 0;  // units in octaves above the lane's
            for (int i = 3; i >= 0; --i) {
                reached += word_of(four, i);
                if (floor == 0 && reached >= enough) floor = 4 * lane + i;
            }
            floor = __reduce_max_sync(ALL_LANES, floor);  // 0: the lowest octave, which has no end
            if (lane > 0) return;
            found[g] = normaliser_of(top + LEAST_OCTAVE, total, exponent);
            tops[g] = top == NUM_OCTAVES - 1 ? 65535 : BIAS + first_score(top + 1, exponent) + (exponent > 0);
            floors[g] = floor == 0 ? 0 : BIAS + first_score(static_cast<int>(floor), exponent);
        }
    }
    // By the whole block, if a query's scores reach octaves that are not counted: find its normaliser from all its units. scratch:
    // [WARPS].
    __device__ __forceinline__ void find_from_all_units(int g, const uint4* scores, int num_units, int exponent, u32* scratch) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        u32 greatest = 0, low, high;
#pragma unroll 4
        for (int unit = threadIdx.x; unit < num_units; unit += THREADS) greatest = max(greatest, greatest_of(scores[unit]));
        greatest = __reduce_max_sync(ALL_LANES, greatest);
        __syncthreads();
        if (lane == 0) scratch[warp] = greatest;
        __syncthreads();
        const int top = octave_of(__reduce_max_sync(ALL_LANES, lane < WARPS ? scratch[lane] : 0), exponent);
        u64 total = 0;
#pragma unroll 4
        for (int unit = threadIdx.x; unit < num_units; unit += THREADS)
            total += 1u << TOTAL_BITS >> min(top - octave_of(greatest_of(scores[unit]), exponent), TOTAL_BITS + 1);
        sum_before(static_cast<u32>(total) & 0xffffu, scratch, low);
        sum_before(static_cast<u32>(total >> 16), scratch, high);  // fits: units are few
        if (threadIdx.x == 0) found[g] = normaliser_of(top, (static_cast<u64>(high) << 16) + low, exponent);
    }
    // top: the highest octave
    __device__ __forceinline__ static int normaliser_of(int top, u64 total, int exponent) {
        const int whole = 63 - __clzll(static_cast<long long>(total));
        const long long log = static_cast<long long>(top + whole - TOTAL_BITS - 1) * (1 << LOG_BITS) + static_cast<long long>(total >> (whole - LOG_BITS));
        return static_cast<int>(log >> (LOG_BITS + exponent));
    }
    // The first score of an octave, rounded down.
    __device__ __forceinline__ static int first_score(int place, int exponent) {
        return (place + LEAST_OCTAVE) * (1 << max(-exponent, 0)) >> max(exponent, 0);
    }
};

// How group scores are made of a group's scores, in 16 bits.
struct GroupScores {
    u32 least[GROUP_SIZE];  // what is subtracted from a query's scores, in both halves
    u32 top, floor;         // no group score exceeds top; as many eligible keys as are wanted reach floor

    __device__ __forceinline__ GroupScores() : top(MARKED), floor(LEAST) {
        for (int g = 0; g < GROUP_SIZE; ++g) least[g] = 0;
    }
    __device__ __forceinline__ explicit GroupScores(const Normalisers& all) {
        int lowest = all.found[0], most = LEAST, reached = LEAST;
        for (int g = 1; g < GROUP_SIZE; ++g) lowest = min(lowest, all.found[g]);
#pragma unroll
        for (int g = 0; g < GROUP_SIZE; ++g) {
            const int off = min(all.found[g] - lowest, 65535);
            least[g] = static_cast<u32>(off) * TWICE;
            most = max(most, all.tops[g] - off), reached = max(reached, all.floors[g] - off);
        }
        top = static_cast<u32>(min(most, 65535)), floor = min(static_cast<u32>(reached), top);
    }
};

__device__ __forceinline__ u32 less(u32 scores, u32 least) { return __vmaxu2(scores, least) - least; }

// Which of two keys may be chosen: all ones in their halves of a word.
__device__ __forceinline__ u32 eligible(int key, const Context& context) {
    return (key >= context.sink_end && key < context.window_start ? 0xffffu : 0u) |
           (key + 1 >= context.sink_end && key + 1 < context.window_start ? 0xffff0000u : 0u);
}

// The group scores of eight keys, in 16 bits each, as if none were marked.
__device__ __forceinline__ uint4 group_scores_of(const uint4* scores, long long plane, int unit, const u32* least, const Context& context) {
    u32 words[4] = {LEAST * TWICE, LEAST * TWICE, LEAST * TWICE, LEAST * TWICE};
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const uint4 eight = scores[g * plane + unit];
        const u32 off = GROUP_SIZE > 1 ? least[g] : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __vmaxu2(words[i], less(word_of(eight, i), off));
    }
    const int key = unit * UNIT_KEYS;
    uint4 all = make_uint4(words[0], words[1], words[2], words[3]);
    if (key < context.sink_end || key + UNIT_KEYS > context.window_start) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) all = make_uint4(all.y, all.z, all.w, all.x & eligible(key + 2 * i, context));
    }
    return all;
}

// The group scores of eight keys with those of marked ones set to MARKED; 0, if a key may not be chosen, stays.
__device__ __forceinline__ uint4 with_marks(const uint4& eight, u32 marked) {
    uint4 words = eight;
#pragma unroll 1
    for (int i = 0; i < 4; ++i, marked >>= 2) {
        const u32 word = words.x, halves = (marked & 1) * 0xffffu | (marked >> 1 & 1) * 0xffff0000u;
        const u32 with = word | (halves & ((word & 0xffffu ? 0xffffu : 0) | (word >> 16 ? 0xffff0000u : 0)));
        words = make_uint4(words.y, words.z, words.w, with);
    }
    return words;
}

// Bins of 2 ** shift for group scores from `lowest` on, the highest first. If is_open, the first bin also has those above `highest`.
struct Bins {
    u32 highest, lowest, shift;
    bool is_open;

    __device__ __forceinline__ static Bins over(u32 highest, u32 lowest, bool is_open) {
        const u32 width = highest - lowest;
        return {highest, lowest, width < NUM_BINS ? 0 : 32u - __clz(width / NUM_BINS), is_open};
    }
    __device__ __forceinline__ bool has(u32 group_score) const { return group_score >= lowest && (group_score <= highest || is_open); }
    __device__ __forceinline__ u32 bin_of(u32 group_score) const { return highest - min(group_score, highest) >> shift; }
    __device__ __forceinline__ bool is_one_score(u32 bin) const { return shift == 0 && !(is_open && bin == 0 && highest < MARKED); }
    // One bin, divided into bins again.
    __device__ __forceinline__ Bins of_bin(u32 bin) const {
        const u32 top = highest - (bin << shift), width = min(1u << shift, top - lowest + 1);
        return over(is_open && bin == 0 ? MARKED : top, top + 1 - width, false);
    }
};

// What the blocks of a slot count, each among its own keys, goes from block to block in messages. A word is a count and, in the lowest
// bits, the message's number. So a block polls the words of others until they have that number, and no barrier is needed. All blocks of
// a slot run at the same time: all slots together have no more than the device has room for, and no other kernel whose blocks wait for
// each other may run beside this one.
struct Counts {
    // [2][BLOCKS * COARSE_BINS]: messages alternate. Who posts one has read the last one, and so all have read the one before that.
    u32* posted;
    alignas(16) u32 of_blocks[BLOCKS * COARSE_BINS];
    uint2 sums[COARSE_BINS];  // of a bin: over all blocks, and over those before this one

    __device__ __forceinline__ u32* words(u32 number) const { return posted + number % 2 * (BLOCKS * COARSE_BINS); }

    // Post this block's count of one of NUM bins.
    template <u32 NUM> __device__ __forceinline__ void post(u32 number, u32 bin, u32 count) {
        const u32 place = blockIdx.x * NUM + bin;
        if (BLOCKS == 1)
            of_blocks[place] = count;
        else
            store_relaxed(words(number) + place, count << NUMBER_BITS | number & NUMBERS);
    }

    struct Found {
        u32 bin;                                // of the wanted key
        u32 above;                              // keys in higher bins
        u32 above_in_before, inside_in_before;  // of those, and of the bin's, how many the blocks before this one have
    };

    // By the whole block: when all blocks have posted their counts of NUM bins, the highest first, find the bin of the wanted key.
    template <u32 NUM> __device__ __forceinline__ Found find(u32 number, u32 wanted) {
        if (BLOCKS > 1) receive<NUM>(number);
        __syncthreads();
        if (threadIdx.x < NUM) {
            u32 all = 0, before = 0;
#pragma unroll
            for (u32 block = 0; block < BLOCKS; ++block) {
                const u32 count = of_blocks[block * NUM + threadIdx.x];
                all += count, before += block < blockIdx.x ? count : 0;
            }
            sums[threadIdx.x] = make_uint2(all, before);
        }
        __syncthreads();
        constexpr u32 EACH = NUM / 32;  // a lane's bins
        const u32 lane = threadIdx.x % 32;
        uint2 of_lane = make_uint2(0, 0);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) of_lane.x += sums[lane * EACH + i].x, of_lane.y += sums[lane * EACH + i].y;
        const u32 up_to = sum_up_to_lane(of_lane.x);
        Found found{lane * EACH, up_to - of_lane.x, sum_up_to_lane(of_lane.y) - of_lane.y, 0};
#pragma unroll
        for (u32 i = 1; i < EACH; ++i) {
            const uint2 higher = sums[found.bin];
            if (found.above + higher.x < wanted) ++found.bin, found.above += higher.x, found.above_in_before += higher.y;
        }
        const u32 with_it = __popc(__ballot_sync(ALL_LANES, up_to < wanted));  // the lane that has the bin
        found.bin = __shfl_sync(ALL_LANES, found.bin, with_it);
        found.above = __shfl_sync(ALL_LANES, found.above, with_it);
        found.above_in_before = __shfl_sync(ALL_LANES, found.above_in_before, with_it);
        found.inside_in_before = sums[found.bin].y;
        return found;
    }

    // Wait for the message of all blocks.
    template <u32 NUM> __device__ __forceinline__ void receive(u32 number) {
        constexpr u32 FOURS = BLOCKS * NUM / 4, EACH = (FOURS + THREADS - 1) / THREADS;
        const u32* from = words(number);
        uint4 four[EACH];
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) four[k] = make_uint4(~number, 0, 0, 0);
        for (bool all = false; !all;) {
            all = true;
#pragma unroll
            for (u32 k = 0; k < EACH; ++k)
                if (const u32 i = threadIdx.x + k * THREADS; i < FOURS && differ(four[k], number)) four[k] = load_relaxed(from + 4 * i);
#pragma unroll
            for (u32 k = 0; k < EACH; ++k)
                if (threadIdx.x + k * THREADS < FOURS && differ(four[k], number)) all = false;
        }
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            const uint4 x = make_uint4(four[k].x >> NUMBER_BITS, four[k].y >> NUMBER_BITS, four[k].z >> NUMBER_BITS, four[k].w >> NUMBER_BITS);
            if (const u32 i = threadIdx.x + k * THREADS; i < FOURS) reinterpret_cast<uint4*>(of_blocks)[i] = x;
        }
    }
    // Whether one of the words has another number.
    __device__ __forceinline__ static bool differ(const uint4& four, u32 number) {
        return ((four.x ^ number | four.y ^ number | four.z ^ number | four.w ^ number) & NUMBERS) != 0;
    }
};

// The highest bit of each half of a word that is not 0.
__device__ __forceinline__ u32 some_in_halves(u32 word) { return ((word & 0x7fff7fffu) + 0x7fff7fffu | word) & 0x80008000u; }

// Of eight keys, a bit for each whose group score is above `last`, and from bit 8 on one for each whose is equal. Key 2 i + h has bit
// i + 4 h.
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
// The number of keys above, plus 2 ** 16 times that of equal ones.
__device__ __forceinline__ u32 count_both(u32 bits) { return __popc(bits & 0xffu) | __popc(bits >> 8) << 16; }

struct AboveAndEqual {
    u32 above, equal;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) choose_codes(
    const int* context_lens,  // [num_contexts]
    const int* top_ks,        // [num_contexts]
    const int* context_ids,   // [batch_size], -1: idle
    const int* row_top_ks,    // [batch_size], or null
    long long sink_len, long long window_len,
    const int* min_top_ks_for_marks,  // [num_contexts]: the least top_k with which marks are used
    const Sketch* sketches,           // [num_contexts], of this layer
    const float* coordinates, const float* means, const u8* unit_exponents, long long max_segments,  // `Queries`
    const uint4* scores, long long max_keys,  // as score_codes writes them
    const u32* octaves,           // [slots, GROUP_SIZE, NUM_OCTAVES], as score_codes writes them
    uint4* spilled_group_scores,  // [slots, max_keys / UNIT_KEYS], if a block's group scores do not fit into its shared memory
    u32* num_launches,            // [slots, BLOCKS]: of which each block has chosen keys
    u32* posted,                  // [slots, 2, BLOCKS, COARSE_BINS]: see `Counts`
    int* kv_indices,              // [batch_size, num_index_heads, max_top_k], written
    int* valid_len,               // [batch_size, num_index_heads], written
    long long max_top_k
) {
    extern __shared__ uint4 memory[];  // group scores of the block's keys
    __shared__ Normalisers normalisers;
    __shared__ Counts all;
    __shared__ u32 counts[NUM_BINS], scratch[WARPS], launch;
    __shared__ AboveAndEqual of_warps[WARPS];
    const int head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const Share share(context.num_keys);
    const bool uses_marks = context_id >= 0 && context.top_k >= min_top_ks_for_marks[context_id];
    const u8* marks = uses_marks ? sketches[context_id].marks : nullptr;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < NUM_BINS; i += THREADS) counts[i] = 0;
    wait_then_let_next_start(context.num_keys + static_cast<u32>(reinterpret_cast<u64>(marks)));
    const u32 wanted = context.top_k;
    int* chosen = kv_indices + slot * max_top_k;
#pragma unroll 1
    for (long long i = wanted + blockIdx.x * THREADS + threadIdx.x; i < max_top_k; i += BLOCKS * THREADS) chosen[i] = -1;
    if (blockIdx.x == 0 && threadIdx.x == 0) valid_len[slot] = wanted;
    if (wanted == 0) return;
    if (threadIdx.x == 0) {
        launch = ++num_launches[slot * BLOCKS + blockIdx.x];
        all.posted = posted + slot * (2 * BLOCKS * COARSE_BINS);
    }
    const long long plane = max_keys / UNIT_KEYS;
    scores += slot * GROUP_SIZE * plane;
    static_assert(GROUP_SIZE <= WARPS && NUM_OCTAVES == 4 * 32, "a warp has the counts of a query");
    const int of_warp = min(static_cast<int>(threadIdx.x) / 32, GROUP_SIZE - 1);
    const uint4 of_octaves = __ldcg(reinterpret_cast<const uint4*>(octaves + (slot * GROUP_SIZE + of_warp) * NUM_OCTAVES) + threadIdx.x % 32);
    const int exponent = Unit(Queries{coordinates, means, unit_exponents, max_segments}, slot).exponent;
    uint4* group_scores = (IN_SHARED ? memory : spilled_group_scores + slot * plane + share.of_block) - share.of_block;
    const int resident = context.sink_end + context.num_keys - context.window_start;  // in fewer than resident / UNIT_KEYS + 4 units
    if (GROUP_SIZE > 1) normalisers.find(of_octaves, exponent, wanted + resident / UNIT_KEYS + 4);
    __syncthreads();
#pragma unroll 1
    for (int g = 0; GROUP_SIZE > 1 && g < GROUP_SIZE; ++g)
        if (normalisers.tops[g] == 65535)
            normalisers.find_from_all_units(g, scores + g * plane, (context.num_keys + UNIT_KEYS - 1) / UNIT_KEYS, exponent,
                                            scratch);
    __syncthreads();
    const GroupScores of_scores = GROUP_SIZE > 1 ? GroupScores(normalisers) : GroupScores();
    if (marks) marks += head * static_cast<long long>((context.num_keys + BLOCK_KEYS - 1) / BLOCK_KEYS) * (BLOCK_KEYS / 8);

    // find the group score of the last key that is chosen
    Bins bins = Bins::over(of_scores.top, of_scores.floor, true);
    auto count = [&](const uint4& eight) {
        if (greatest_of(eight) < bins.lowest) return;
#pragma unroll
        for (int i = 0; i < UNIT_KEYS; ++i) {
            const u32 group_score = word_of(eight, i / 2) >> 16 * (i % 2) & 0xffffu;
            if (bins.has(group_score)) atomicAdd(counts + bins.bin_of(group_score), 1u);
        }
    };
    share.for_each<2>([&](int unit) {
        const u32 marked = marks ? marks[unit] : 0;
        uint4 eight = group_scores_of(scores, plane, unit, of_scores.least, context);
        if (marked) eight = with_marks(eight, marked);
        group_scores[unit] = eight;
        count(eight);
    });
    u32 above = 0, above_before = 0, equal_before;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 number = launch * MOST_MESSAGES;; number += 2) {
        __syncthreads();
        u32 of_lane = 0;  // this block's count in coarse bin `warp + lane * WARPS`
#pragma unroll 4
        for (u32 i = 0; i < (COARSE_BINS + WARPS - 1) / WARPS; ++i) {
            const u32 bin = warp + i * WARPS;
            const u32 sum = __reduce_add_sync(ALL_LANES, bin < COARSE_BINS ? counts[bin * FINE_BINS + lane] : 0);
            if (lane == i) of_lane = sum;
        }
        if (const u32 bin = warp + lane * WARPS; bin < COARSE_BINS) all.post<COARSE_BINS>(number, bin, of_lane);
        const Counts::Found coarse = all.find<COARSE_BINS>(number, wanted - above);
        if (warp == 0) all.post<FINE_BINS>(number + 1, lane, counts[coarse.bin * FINE_BINS + lane]);
        above += coarse.above, above_before += coarse.above_in_before;
        const Counts::Found fine = all.find<FINE_BINS>(number + 1, wanted - above);
        above += fine.above, above_before += fine.above_in_before, equal_before = fine.inside_in_before;
        const u32 bin = coarse.bin * FINE_BINS + fine.bin;
        const bool is_one_score = bins.is_one_score(bin);
        bins = bins.of_bin(bin);
        if (is_one_score) break;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < NUM_BINS; i += THREADS) counts[i] = 0;
        __syncthreads();
        share.for_each<1>([&](int unit) { count(group_scores[unit]); });
    }
    const u32 last = bins.lowest, quota = wanted - above;  // quota: how many of the keys with that group score are chosen

    // find the keys above and equal, and how many the warps before have
    u32 here = 0;
    share.for_each<1>([&](int unit) {
        const u32 bits = above_and_equal(group_scores[unit], last);
        group_scores[unit].x = bits;
        here += count_both(bits);
    });
    const u32 above_here = __reduce_add_sync(ALL_LANES, here & 0xffffu), equal_here = __reduce_add_sync(ALL_LANES, here >> 16);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = {above_here, equal_here};
    __syncthreads();
    above_before += __reduce_add_sync(ALL_LANES, lane < warp ? of_warps[lane].above : 0);
    equal_before += __reduce_add_sync(ALL_LANES, lane < warp ? of_warps[lane].equal : 0);

#pragma unroll 1
    for (int first = share.first; first < share.end; first += 32) {
        const int unit = first + lane;
        const u32 bits = unit < share.end ? group_scores[unit].x : 0;
        const u32 both = count_both(bits), up_to = sum_up_to_lane(both), before = up_to - both;
        u32 above_at = above_before + (before & 0xffffu), equal_at = equal_before + (before >> 16);
#pragma unroll 1
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
}

// The scores of a row as its blocks go through them, again and again, and what the blocks share.
//
// Compiled for CLUSTER, VECTORS (of four scores, that a lane keeps), ENTRIES (that the first block has room for).

constexpr int VECTOR_SCORES = 128;          // of a warp
constexpr int CHUNK = VECTORS * VECTOR_SCORES;  // scores that a warp has at a time
constexpr int RUNS = CLUSTER * WARPS;
constexpr int SHARE = BINS / CLUSTER;
constexpr u32 FEW = 32;                     // scores that are compared one by one
using Keys = uint4[VECTORS];                // of a lane, of a chunk
using Blocks = Cluster<CLUSTER>;
static_assert(VECTORS <= 4, "a byte of a word counts the scores of a warp's vector");

// Keys from low to low + width, in bins of 2 ** shift.
struct Range {
    u32 low, width, shift;

    __device__ __forceinline__ Range(u32 low_, u32 width_)
        : low(low_), width(width_), shift(width_ < BINS ? 0 : 21 - __clz(width_)) {}
    __device__ __forceinline__ bool holds(u32 key) const { return key - low <= width; }
    __device__ __forceinline__ bool is_below(u32 key) const { return key > low + width; }
    __device__ __forceinline__ u32 bin_of(u32 key) const { return (key - low) >> shift; }
    __device__ __forceinline__ Range of_bin(u32 bin) const {
        const u32 first = low + (bin << shift);
        return Range(first, min((1u << shift) - 1, low + width - first));
    }
};
static_assert(BINS == 1 << 11, "a width of n bits leaves bins of n - 11 bits");
__device__ __forceinline__ Range all_from(u32 low) { return Range(low, 0xffffffffu - low); }

// How many scores lie above a range, and in it.
struct Counts {
    u32 above, inside;
};

struct alignas(16) Shared {
    u64 entries[ENTRIES];  // in the first block: of the row's scores those that may be chosen, or that are
    u32 bins[BINS];
    u32 totals[SHARE];  // of the row, for this block's share of the bins; other blocks read them
    Counts of_runs[RUNS];
    u32 floors[CLUSTER];  // of all blocks
    u32 num_few;          // entries of the block among the last few of the row; other blocks read them, too
    u64 few[FEW];
    u64 barrier;
    u32 scratch[2][WARPS];
    Boundary boundary;
};

__device__ __forceinline__ void count_key(Shared& s, const Range& range, u32 key) {
    if (range.holds(key)) atomicAdd(&s.bins[range.bin_of(key)], 1u);
}

// A warp's run of scores; neighbouring runs lie in different blocks. What is not there has key 0.
struct Run {
    const float* scores;
    int number, first, end;
    bool aligned;

    __device__ __forceinline__ static u32 key_of(float score) { return max(order_of(score), 1u); }  // NaN is there
    __device__ __forceinline__ bool has(int vector) const { return first + vector * VECTOR_SCORES < end; }
    // The index of this lane's first score of a vector.
    __device__ __forceinline__ int index(int vector) const {
        return first + vector * VECTOR_SCORES + static_cast<int>(threadIdx.x) % 32 * 4;
    }
    __device__ __forceinline__ uint4 load(int vector) const {
        const int at = index(vector);
        if (aligned && at + 4 <= end) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(scores + at));
            return make_uint4(key_of(four.x), key_of(four.y), key_of(four.z), key_of(four.w));
        }
        auto key = [&](int i) { return at + i < end ? key_of(scores[at + i]) : 0; };
        return make_uint4(key(0), key(1), key(2), key(3));
    }
};

// Calls use(first vector, keys) for all chunks of the run, in order; whole warps do. The first chunk is kept.
template <class Use>
__device__ __forceinline__ void for_each_chunk(const Run& run, const Keys& kept, const Use& use) {
    use(0, kept);
    for (int first = VECTORS; run.has(first); first += VECTORS) {
        Keys some;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) some[v] = run.load(first + v);
        use(first, some);
    }
}

// Calls use(keys, index of the first) for all vectors of the run, in order; whole warps do.
template <class Use>
__device__ __forceinline__ void for_each_vector(const Run& run, const Keys& kept, const Use& use) {
    for_each_chunk(run, kept, [&](int first, const Keys& keys) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (run.has(first + v)) use(keys[v], run.index(first + v));
    });
}

__device__ __forceinline__ Counts count_four(uint4 keys, const Range& range) {
    auto above = [&](u32 key) { return static_cast<u32>(range.is_below(key)); };
    auto inside = [&](u32 key) { return static_cast<u32>(range.holds(key)); };
    return {above(keys.x) + above(keys.y) + above(keys.z) + above(keys.w),
            inside(keys.x) + inside(keys.y) + inside(keys.z) + inside(keys.w)};
}

// Sums over the warps' counts of their runs: of the runs before this one, and of all.
__device__ Counts sum_over_runs(Shared& s, const Run& run, Counts of_lane, Blocks& blocks, Counts& all) {
    const int lane = threadIdx.x % 32;
    const Counts mine{__reduce_add_sync(ALL_LANES, of_lane.above), __reduce_add_sync(ALL_LANES, of_lane.inside)};
    if (CLUSTER == 1 && lane == 0) s.of_runs[run.number] = mine;
    if (CLUSTER > 1 && lane < CLUSTER) in_block(s.of_runs, lane)[run.number] = mine;
    blocks.sync();
    Counts before{0, 0};
    all = {0, 0};
    for (int i = lane; i < RUNS; i += 32) {
        const Counts theirs = s.of_runs[i];
        all.above += theirs.above, all.inside += theirs.inside;
        if (i < run.number) before.above += theirs.above, before.inside += theirs.inside;
    }
    all = {__reduce_add_sync(ALL_LANES, all.above), __reduce_add_sync(ALL_LANES, all.inside)};
    return {__reduce_add_sync(ALL_LANES, before.above), __reduce_add_sync(ALL_LANES, before.inside)};
}

// Where an index head has one query, a key's worth is its sum and 1: it fits 16 bits, eight keys lie in 16 bytes.
//
// Then no list of candidates is needed: a bin has few different worths, which are counted one by one, by each block for its
// part of the keys. From the counts of all parts a block knows the K-th worth itself, how many keys of just that worth are
// wanted, and how many keys of earlier parts come before its own.
//
// Parts that a block holds at once are counted and written by one launch (choose_sums.cu); longer ones (MANY_KEYS) by two,
// with more blocks than a cluster has (find_sums.cu, write_sums.cu).

constexpr int SUM_KEYS = 8;  // sums are read and written eight at a time
constexpr int LOADS = 4;     // that many, by every thread, before one is used

// For each key, in order, its number among the eight and its worth.
template <typename Use> __device__ __forceinline__ void for_each_sum(uint4 sums, Use use) {
    const u32 words[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        use(2 * w, words[w] & 0xffffu);
        use(2 * w + 1, words[w] >> 16);
    }
}

// The sums that a thread holds at a time, of `each` that every thread of the block takes. A warp's lie side by side.
struct Loaded {
    uint4 sums[LOADS];
    int first, each;

    // The place of sums i in the part, in units of SUM_KEYS.
    __device__ __forceinline__ int unit(int i) const {
        return first + (static_cast<int>(threadIdx.x) / 32 * each + i) * 32 + static_cast<int>(threadIdx.x) % 32;
    }

    // Whatever comes from earlier launches lies in the L2 cache; a first-level cache may hold what it was before.
    __device__ __forceinline__ void load(const uint4* of_part, int from, int num_units) {
        first = from;
        each = min(LOADS, (num_units - from + THREADS - 1) / THREADS);
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            sums[i] = i < each && unit(i) < num_units ? __ldcg(of_part + unit(i)) : make_uint4(0, 0, 0, 0);
    }
};

// The same four at a time, with 32 bits each.
struct WidenedSums {
    const uint2* sums;

    __device__ __forceinline__ uint4 operator[](int unit) const {
        const uint2 four = sums[unit];
        return make_uint4(four.x & 0xffffu, four.x >> 16, four.y & 0xffffu, four.y >> 16);
    }
};

// What the parts' counts say about one of them.
struct Cut {
    u32 worth;  // the top_k-th
    u32 quota;  // keys of just that worth that are wanted
    u32 above_before, equal_before;  // keys in earlier parts
};

// The sum over all warps before the thread's, of what is the same in all lanes; `total` is that over all. scratch: [WARPS].
__device__ __forceinline__ u32 sum_over_warps_before(u32 of_warp, u32* scratch, u32& total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    if (lane == 0) scratch[warp] = of_warp;
    __syncthreads();
    const u32 theirs = lane < WARPS ? scratch[lane] : 0;
    total = __reduce_add_sync(ALL_LANES, theirs);
    return __reduce_add_sync(ALL_LANES, lane < warp ? theirs : 0);
}

// Scores of the keys that the chosen lists hold, summed by key in global memory, in the order of the subspaces.
//
// A key occurs once in a list, so the additions of one subspace never meet, and a cluster_sync stands between
// subspaces: every sum is built in one order. -0.0 marks a key that no list holds; no stored score is -0.0.

constexpr u32 NOT_LISTED = 0x80000000u;

// What a block knows of one query row.
struct QueryRow {
    size_t lists[SUBSPACES];  // where the chosen ones start
    float weights[SUBSPACES];
    float top;     // largest score of all listed keys
    float offset;  // HEADROOM - log2(total), total = sum over listed keys of 2 ** (slope * (score - top))
};

// scores: [GROUP_SIZE][stride], written. Ends with a cluster_sync.
__device__ void add_lists(const LayerTable& table, int list_len, const QueryRow* rows, int num_keys, int stride, u32 rank,
                          float* scores) {
    const int* indices = static_cast<const int*>(table.extra);
    const u16* halves = static_cast<const u16*>(table.scores);
    for (int g = 0; g < GROUP_SIZE; ++g)
        for (int key = rank * THREADS + threadIdx.x; key < num_keys; key += CLUSTER * THREADS) scores[g * stride + key] = -0.0f;
    __threadfence();
    cluster_sync();
    for (int b = 0; b < SUBSPACES; ++b) {
        for (int g = 0; g < GROUP_SIZE; ++g) {
            const size_t list = rows[g].lists[b];
            for (int i = rank * THREADS + threadIdx.x; i < list_len; i += CLUSTER * THREADS) {
                // two roundings, as the definition has them: product, then sum; adding 0.0 turns a product of -0.0 into 0.0
                const float product = __fadd_rn(__fmul_rn(rows[g].weights[b], half_as_float(halves[list + i])), 0.0f);
                atomicAdd(&scores[g * stride + indices[list + i]], product);
            }
        }
        __threadfence();
        cluster_sync();
    }
}

__device__ __forceinline__ float read_score(const float* score) { return __ldcg(score); }
__device__ __forceinline__ bool is_listed(float score) { return __float_as_uint(score) != NOT_LISTED; }

// Largest score and softmax total of each block's keys.
struct Statistics {
    u32 tops[CLUSTER][GROUP_SIZE];  // bits of floats, as the totals
    u32 totals[CLUSTER][GROUP_SIZE];
};

// The block's own, told to all blocks. scratch: [WARPS].
__device__ void share_statistics(const float* scores, int stride, int num_keys, float slope, u32 rank, float* scratch,
                                 Statistics& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const float* mine = scores + g * stride;
        float top = -1.0f / 0.0f;
        for (int key = threadIdx.x; key < num_keys; key += THREADS)
            if (is_listed(read_score(mine + key))) top = fmaxf(top, read_score(mine + key));
        for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        if (lane == 0) scratch[warp] = top;
        __syncthreads();
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, scratch[w]);
        __syncthreads();
        float total = 0;
        for (int key = threadIdx.x; key < num_keys; key += THREADS) {
            const float score = read_score(mine + key);
            if (is_listed(score)) total += power_of_two(slope * (score - top));
        }
        total = sum_over_warp(total);
        if (lane == 0) scratch[warp] = total;
        __syncthreads();
        total = 0;
        for (int w = 0; w < WARPS; ++w) total += scratch[w];
        __syncthreads();
        if (threadIdx.x < CLUSTER) {
            write_word(&all.tops[rank][g], threadIdx.x, __float_as_uint(top));
            write_word(&all.totals[rank][g], threadIdx.x, __float_as_uint(total));
        }
    }
}

__device__ void merge_statistics(const Statistics& all, int g, float slope, QueryRow& row) {
    row.top = -1.0f / 0.0f;
    for (int r = 0; r < CLUSTER; ++r) row.top = fmaxf(row.top, __uint_as_float(all.tops[r][g]));
    float total = 0;
    for (int r = 0; r < CLUSTER; ++r) {
        const float part = __uint_as_float(all.totals[r][g]);
        if (part > 0) total += part * exp2f(slope * (__uint_as_float(all.tops[r][g]) - row.top));
    }
    row.offset = HEADROOM - log2f(total);
}

// The worth of a key, from its scores: 0 where no row lists it. Positive floats order like their bits, negative ones
// backwards.
__device__ __forceinline__ u32 list_worth(const float* scores, int stride, float slope, const QueryRow* rows) {
    if (GROUP_SIZE == 1) {
        const u32 bits = __float_as_uint(read_score(scores));
        if (bits == NOT_LISTED) return 0;
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    float worth = 0;
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const float score = read_score(scores + g * stride);
        if (is_listed(score))
            worth += power_of_two(fmaxf(fmaf(slope, score - rows[g].top, rows[g].offset), LEAST_EXPONENT));
    }
    return __float_as_uint(worth);
}

// Fill `worths` with the block's keys, and count them; returns how many of the thread's keys may be chosen.
__device__ u32 combine_listed(const float* scores, int stride, int first_key, int num_keys, float slope, const QueryRow* rows,
                              const Context& context, const Worths& worths, const Range& range, u32* bins) {
    u32 listed = 0;
    for (int key = threadIdx.x * UNIT_KEYS; key < num_keys; key += THREADS * UNIT_KEYS) {
        u32 four[UNIT_KEYS];
        for (int i = 0; i < UNIT_KEYS; ++i) four[i] = key + i < num_keys ? list_worth(scores + key + i, stride, slope, rows) : 0;
        const uint4 worth = eligible_only(make_uint4(four[0], four[1], four[2], four[3]), first_key + key, context);
        range.count(worth, bins);
        listed += (worth.x > 0) + (worth.y > 0) + (worth.z > 0) + (worth.w > 0);
        worths[key / UNIT_KEYS] = worth;
    }
    return listed;
}

// Scores of the keys that the chosen lists hold, summed by key in global memory, in the order of the subspaces.
//
// A key occurs once in a list, so the additions of one subspace never meet, and a cluster_sync stands between
// subspaces: every sum is built in one order. -0.0 marks a key that no list holds; no stored score is -0.0.

constexpr u32 NOT_LISTED = 0x80000000u;

// What a block knows of one query row.
struct QueryRow {
    u32 centroid[SUBSPACES];
    float weight[SUBSPACES];
    float slope;
    float top;     // largest score of all listed keys
    float offset;  // HEADROOM - log2(total), total = sum over listed keys of 2 ** (slope * (score - top))
};

__device__ void take_match(const Match& match, int g, double softmax_scale, QueryRow& row) {
    for (int b = 0; b < SUBSPACES; ++b) {
        row.centroid[b] = read_word(&match.centroid[g][b], b % CLUSTER);
        row.weight[b] = static_cast<float>(read_double(&match.scaled[g][b], b % CLUSTER));
    }
    row.slope = static_cast<float>(softmax_scale * 1.4426950408889634);
}

__device__ __forceinline__ float half_as_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// scores: [GROUP_SIZE][stride], written. Ends with a cluster_sync.
__device__ void add_lists(const LayerTable& table, int head, int list_len, const QueryRow* rows, int num_keys, int stride,
                          u32 rank, float* scores) {
    const int* indices = reinterpret_cast<const int*>(table.extra);
    const u16* halves = reinterpret_cast<const u16*>(table.scores);
    for (int g = 0; g < GROUP_SIZE; ++g)
        for (int key = rank * THREADS + threadIdx.x; key < num_keys; key += CLUSTER * THREADS) scores[g * stride + key] = -0.0f;
    __threadfence();
    cluster_sync();
    for (int b = 0; b < SUBSPACES; ++b) {
        for (int g = 0; g < GROUP_SIZE; ++g) {
            const size_t list = ((static_cast<size_t>(head) * SUBSPACES + b) * CENTROIDS + rows[g].centroid[b]) * list_len;
            for (int i = rank * THREADS + threadIdx.x; i < list_len; i += CLUSTER * THREADS) {
                // two roundings, as the definition has them: product, then sum; adding 0.0 turns a product of -0.0 into 0.0
                const float product = __fadd_rn(__fmul_rn(rows[g].weight[b], half_as_float(halves[list + i])), 0.0f);
                atomicAdd(&scores[g * stride + indices[list + i]], product);
            }
        }
        __threadfence();
        cluster_sync();
    }
}

__device__ __forceinline__ float read_score(const float* score) { return __ldcg(score); }
__device__ __forceinline__ bool is_listed(float score) { return __float_as_uint(score) != NOT_LISTED; }

// Statistics of the block's own keys, told to all blocks as words that order like the scores; scratch: [WARPS].
__device__ void share_list_statistics(const float* scores, int stride, int num_keys, const QueryRow* rows, u32 rank,
                                      float* scratch, Statistics& all) {
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
            if (is_listed(score)) total += power_of_two(rows[g].slope * (score - top));
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

__device__ void merge_list_statistics(const Statistics& all, int g, QueryRow& row) {
    row.top = -1.0f / 0.0f;
    for (int r = 0; r < CLUSTER; ++r) row.top = fmaxf(row.top, __uint_as_float(all.tops[r][g]));
    float total = 0;
    for (int r = 0; r < CLUSTER; ++r)
        if (all.totals[r][g] > 0)
            total += all.totals[r][g] * exp2f(row.slope * (__uint_as_float(all.tops[r][g]) - row.top));
    row.offset = HEADROOM - log2f(total);
}

// The worth of a key, from its scores: 0 where no row lists it, or where it may not be chosen. Positive floats order like
// their bits, negative ones backwards.
__device__ __forceinline__ u32 list_worth(const float* scores, int stride, const QueryRow* rows) {
    if (GROUP_SIZE == 1) {
        const u32 bits = __float_as_uint(read_score(scores));
        if (bits == NOT_LISTED) return 0;
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    float worth = 0;
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const float score = read_score(scores + g * stride);
        if (is_listed(score))
            worth += power_of_two(fmaxf(fmaf(rows[g].slope, score - rows[g].top, rows[g].offset), LEAST_EXPONENT));
    }
    return __float_as_uint(worth);
}

// The worths of the block's part, in place of its first query row's scores; returns how many keys of it are listed.
__device__ u32 combine_listed(float* scores, int stride, int first_key, int num_keys, const QueryRow* rows,
                              const Context& context, const Range& range, u32* counts) {
    u32 listed = 0;
    for (int key = threadIdx.x; key < num_keys; key += THREADS) {
        u32 worth = list_worth(scores + key, stride, rows);
        if (first_key + key < context.sink_end || first_key + key >= context.window_start) worth = 0;
        if (range.holds(worth)) atomicAdd(&counts[range.bin(worth)], 1u);
        listed += worth > 0;
        scores[key] = __uint_as_float(worth);
    }
    return listed;
}

struct ListWorths {
    const float* worths;

    __device__ __forceinline__ u32 operator[](int key) const { return __float_as_uint(worths[key]); }
};

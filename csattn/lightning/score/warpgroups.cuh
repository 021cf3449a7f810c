// Warp specialization: of a block's three warpgroups two score, and one warp of the third loads.
// The epilogue of a tile's products: weighs them, sums them over heads, and writes or lists the scores.
//
// Compiled for what `tiles.cuh` is compiled for, and THREADS, which is 3 * 128.
#pragma once

#include "products.cuh"

constexpr int OWNED = QUERIES / 4;  // queries whose sums a thread keeps, for each of its two keys
constexpr int GROUP = 128;
constexpr int NO_THRESHOLD = 0x7fffffff;

// Weighs a thread's products and sums them, for each of its keys (r in `multiply_tile`) and queries, over its heads.
typedef float Partial[QUERIES][2];
__device__ __forceinline__ void sum_weighted(const float (&products)[128], const float (&weights)[64], Partial& sums) {
    constexpr int EACH = HEADS / 8;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int query = 0; query < QUERIES; ++query)
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int at = query * EACH + i;
                    const float product = products[4 * at + 2 * r + c], weight = weights[2 * at + c];
                    if (i + c == 0)
                        sums[query][r] = relu(product) * weight;
                    else
                        add_positive(sums[query][r], product, weight);
                }
}

// Completes the sums across the four threads that share a key's columns: each keeps those of queries 4 i + lane % 4.
typedef float Sums[OWNED][2];
__device__ __forceinline__ void sum_up(const Partial& partial, Sums& sums) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < OWNED; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float pair[2];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const float even_ones = partial[4 * i + 2 * p][r], odd_ones = partial[4 * i + 2 * p + 1][r];
                pair[p] = (odd ? odd_ones : even_ones) + __shfl_xor_sync(ALL_LANES, odd ? even_ones : odd_ones, 1);
            }
            sums[i][r] = (high ? pair[1] : pair[0]) + __shfl_xor_sync(ALL_LANES, high ? pair[0] : pair[1], 2);
        }
}

// A thread's two keys of a tile (8 rows apart), and its queries (4 apart).
struct Owner {
    int row, query;  // the first ones
    __device__ __forceinline__ Owner()
        : row(static_cast<int>(threadIdx.x) % GROUP / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
          query(static_cast<int>(threadIdx.x) % 4) {}
};

struct Threshold {
    int legal_len, index;
    float score;
    u64* list;  // of the entries that reach it
};

// What a thread needs of a query tile: the weights of its columns and, when listing, the thresholds of its queries.
struct ThreadState {
    int query_tile;
    float weights[64];
    Threshold thresholds[OWNED];

    template <class Work>
    __device__ __forceinline__ void load(const Shared& s, const Work& work, int at, const Owner& owner) {
#pragma unroll
        for (int i = 0; i < 64; ++i) weights[i] = s.weights[at][i / 2 * 8 + owner.query * 2 + i % 2];
        if constexpr (Work::LISTED) {
            const Item& item = s.items[at];
#pragma unroll
            for (int i = 0; i < OWNED; ++i) {
                const int query = 4 * i + owner.query;
                const long long row = static_cast<long long>(query_tile) * QUERIES + query;
                u64* const list = work.lists + row * work.capacity;
                thresholds[i] = {item.legal_len[query], item.threshold_indices[query], item.threshold_scores[query],
                                 list};
            }
        }
    }
};

// A tile's scores, which are written or listed while the next tile is multiplied.
struct Pending {
    Sums sums;
    float scale[2];
    Place tile;
};

__device__ __forceinline__ void emit(const ListContenders& work, const Operands&, const ThreadState& state,
                                     const Owner& owner, const Place& tile, const Sums& sums, Item& item) {
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
        const Threshold& threshold = state.thresholds[i];
        // Mostly neither reaches it. NaN passes here, but is listed only where there is none: then all are listed.
        if ((sums[i][0] < threshold.score) & (sums[i][1] < threshold.score)) continue;
        const int query = 4 * i + owner.query;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int index = tile.first + (owner.row + 8 * r) * tile.step;
            const float score = sums[i][r];
            const bool reaches =
                (score > threshold.score) | ((score == threshold.score) & (index <= threshold.index)) |
                (threshold.index == NO_THRESHOLD);
            if (reaches & (index < threshold.legal_len)) {
                const int at = atomicAdd(&item.counts[query], 1);
                if (at < work.capacity)
                    threshold.list[at] = static_cast<u64>(__float_as_uint(score)) << 32 | static_cast<u32>(index);
            }
        }
    }
}

__device__ __forceinline__ void emit(const WriteScores& work, const Operands& of, const ThreadState& state,
                                     const Owner& owner, const Place& tile, const Sums& sums, Item&) {
    const int column = tile.row - work.first_key + owner.row;
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
        const int query = state.query_tile * QUERIES + 4 * i + owner.query;
        float* const out = work.out + query * work.out_stride + column;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (query < of.num_queries) out[8 * r] = sums[i][r];
    }
}

template <class Work>
__device__ __forceinline__ void finish(const Pending& pending, const Operands& of, const Work& work,
                                       const ThreadState& state, const Owner& owner, Item& item) {
    Sums sums;
#pragma unroll
    for (int i = 0; i < OWNED; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) sums[i][r] = pending.sums[i][r] * pending.scale[r];
    emit(work, of, state, owner, pending.tile, sums, item);
}

constexpr int FETCHING_REGISTERS = 40, SCORING_REGISTERS = 232;
static_assert(STAGES % 2 == 0 && THREADS == 3 * GROUP, "a place in the ring belongs to one group");
static_assert(2 * SCORING_REGISTERS + FETCHING_REGISTERS <= 3 * 168, "a block starts with 168 for each thread");

// To be called once thread 0 has made the mbarriers. fetch() runs in one warp, score(group) in two warpgroups.
template <class Fetch, class Score> __device__ __forceinline__ void divide_work(const Fetch& fetch, const Score& score) {
    __syncthreads();
    wait_then_let_next_start();
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / GROUP, 0);  // tells the compiler that a warp has one
    if (group == 2) {
        decrease_registers<FETCHING_REGISTERS>();
        if (threadIdx.x % GROUP < 32) fetch();
    } else {
        increase_registers<SCORING_REGISTERS>();
        score(group);
    }
}

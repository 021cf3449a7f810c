// First launch over lists: the centroid of each subspace that is nearest to each query, by the same float64 sums as on the
// CPU, in index order.
//
// A launch of its own, with a block for each subspace and a warp for each query. The centroids are in registers, as float64,
// before the query arrives; from then on a warp waits neither for memory nor for another warp.

#include "list_index.cuh"

constexpr int CENTROIDS_PER_LANE = (CENTROIDS + 31) / 32;

__device__ __forceinline__ int lane_of() { return threadIdx.x % 32; }

template <int NUM> __device__ __forceinline__ void load_floats(double (&to)[NUM], const float* from) {
    if (NUM % 4 == 0) {
#pragma unroll
        for (int i = 0; i + 3 < NUM; i += 4) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
            to[i] = four.x;
            to[i + 1] = four.y;
            to[i + 2] = four.z;
            to[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < NUM; ++i) to[i] = __ldg(from + i);
    }
}

__device__ __forceinline__ double dot(const double (&a)[SUBSPACE_DIM], const double (&b)[SUBSPACE_DIM]) {
    double total = 0;
#pragma unroll
    for (int i = 0; i < SUBSPACE_DIM; ++i) total += a[i] * b[i];
    return total;
}

// Bits that order like the numbers; 0 for NaN.
__device__ __forceinline__ u64 ordered_bits(double value) {
    const u64 bits = static_cast<u64>(__double_as_longlong(value + 0.0));  // -0.0 becomes 0.0
    if (value != value) return 0;
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

// The centroids that a lane compares queries with.
struct LaneCentroids {
    double vectors[CENTROIDS_PER_LANE][SUBSPACE_DIM];

    __device__ __forceinline__ LaneCentroids(const float* codebook) {
#pragma unroll
        for (int k = 0; k < CENTROIDS_PER_LANE; ++k) {
            const int c = min(lane_of() + 32 * k, CENTROIDS - 1);
            load_floats(vectors[k], codebook + c * SUBSPACE_DIM);
        }
    }

    // For `wait_then_let_next_start`: depends on all that was loaded.
    __device__ __forceinline__ u32 mixed() const {
        u32 mixed = 0;
#pragma unroll
        for (int k = 0; k < CENTROIDS_PER_LANE; ++k)
#pragma unroll
            for (int i = 0; i < SUBSPACE_DIM; ++i) mixed ^= __double2hiint(vectors[k][i]);
        return mixed;
    }

    // By the whole warp: the centroid nearest to `part`; among equally near ones, that of the lowest number.
    __device__ __forceinline__ Match nearest(const float (&part)[SUBSPACE_DIM], bool weigh_by_norm) const {
        double wide[SUBSPACE_DIM];
#pragma unroll
        for (int i = 0; i < SUBSPACE_DIM; ++i) wide[i] = part[i];
        u64 best = 0;
        u32 number = CENTROIDS;
#pragma unroll
        for (int k = 0; k < CENTROIDS_PER_LANE; ++k) {
            const u32 c = lane_of() + 32 * k;
            const u64 score = ordered_bits(dot(wide, vectors[k]));
            if (c < CENTROIDS && (score > best || number == CENTROIDS)) {
                best = score;
                number = c;
            }
        }
        const u32 high = best >> 32, highest = __reduce_max_sync(ALL_LANES, high);
        const u32 low = high == highest ? static_cast<u32>(best) : 0, lowest_bits = __reduce_max_sync(ALL_LANES, low);
        const bool is_best = high == highest && low == lowest_bits;
        number = ~__reduce_max_sync(ALL_LANES, is_best ? ~number : 0);
        return {weigh_by_norm ? sqrt(dot(wide, wide)) : 1.0, number};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) match_centroids(
    const QUERY* q,            // [batch_size, num_index_heads * GROUP_SIZE, HEAD_DIM]
    const ListIndex* indexes,  // [num_contexts], of this layer
    const int* context_ids,    // [batch_size], -1: idle
    long long weigh_by_norm,
    Match* matches,            // [batch_size, num_index_heads, GROUP_SIZE, SUBSPACES], written
    Choice* choices            // [batch_size, num_index_heads], cleared
) {
    const int b = blockIdx.x, head = blockIdx.y, slot = blockIdx.z * gridDim.y + head;
    const int context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_then_let_next_start();
    const ListIndex index = indexes[context_id];
    const LaneCentroids centroids(index.codebooks + (head * SUBSPACES + b) * CENTROIDS * SUBSPACE_DIM);
    wait_then_let_next_start(centroids.mixed());
    for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
        const QUERY* query = q + (static_cast<size_t>(slot) * GROUP_SIZE + g) * HEAD_DIM + b * SUBSPACE_DIM;
        float part[SUBSPACE_DIM];
#pragma unroll
        for (int i = 0; i < SUBSPACE_DIM; ++i) part[i] = as_float(query[i]);
        const Match match = centroids.nearest(part, weigh_by_norm);
        if (lane_of() == 0) matches[(slot * GROUP_SIZE + g) * SUBSPACES + b] = match;
    }
    clear_counts(choices[slot], b, SUBSPACES);
}

// From the group's queries to the nearest centroid of each subspace: the same sums in float64 as on the CPU. Their order
// differs, which can change a result only where it lies within 1e-15 of a rounding boundary.
//
// A launch of its own, one block for each subspace: everything a block reads is asked for at once, so that it waits for
// memory twice, for the addresses and for what is there.

constexpr int CENTROIDS_PER_LANE = (CENTROIDS + 31) / 32;

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(u16 bits) {
    return QUERY_IS_HALF ? half_as_float(bits) : __uint_as_float(static_cast<u32>(bits) << 16);
}

// part [GROUP_SIZE * SUBSPACE_DIM] = the group's queries times the subspace's columns of query_basis; eight lanes to a sum.
__device__ void rotate_into_subspace(const QUERY* q, const float* columns, float* part) {
    constexpr int NUM_SUMS = GROUP_SIZE * SUBSPACE_DIM;
    for (int first = threadIdx.x / 32 * 4; first < NUM_SUMS; first += WARPS * 4) {
        const int sum = first + threadIdx.x % 32 / 8;
        double total = 0;
        if (sum < NUM_SUMS) {
#pragma unroll 16
            for (int i = threadIdx.x % 8; i < HEAD_DIM; i += 8) {
                const double x = as_float(q[sum / SUBSPACE_DIM * HEAD_DIM + i]);
                total += x * static_cast<double>(__ldg(columns + i * HEAD_DIM + sum % SUBSPACE_DIM));
            }
        }
        for (int step = 4; step > 0; step >>= 1) total += __shfl_xor_sync(ALL_LANES, total, step);
        if (threadIdx.x % 8 == 0 && sum < NUM_SUMS) part[sum] = static_cast<float>(total);
    }
}

// The centroids that a lane compares with, and the scales of their rows.
struct Candidates {
    float vectors[CENTROIDS_PER_LANE][SUBSPACE_DIM];
    float scales[CENTROIDS_PER_LANE];
};

__device__ __forceinline__ Candidates load_candidates(const float* codebook, const float* scales) {
    Candidates mine;
#pragma unroll
    for (int k = 0; k < CENTROIDS_PER_LANE; ++k) {
        const int c = min(static_cast<int>(threadIdx.x % 32) + 32 * k, CENTROIDS - 1);
#pragma unroll
        for (int i = 0; i < SUBSPACE_DIM; ++i) mine.vectors[k][i] = __ldg(codebook + c * SUBSPACE_DIM + i);
        mine.scales[k] = scales ? __ldg(scales + c) : 1.0f;
    }
    return mine;
}

__device__ __forceinline__ double dot(const float* a, const float* b) {
    double total = 0;
#pragma unroll
    for (int i = 0; i < SUBSPACE_DIM; ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return total;
}

// The nearest centroid to `part`, for the whole warp; of equally near ones the one of the lowest number.
__device__ Match nearest_centroid(const float* part, const Candidates& mine, bool weigh_by_norm) {
    double best = -1.0 / 0.0;
    u32 number = CENTROIDS;
    float scale = 0;
#pragma unroll
    for (int k = 0; k < CENTROIDS_PER_LANE; ++k) {
        const u32 c = threadIdx.x % 32 + 32 * k;
        const double score = dot(part, mine.vectors[k]);
        if (c < CENTROIDS && (score > best || number == CENTROIDS)) {
            best = score;
            number = c;
            scale = mine.scales[k];
        }
    }
    for (int step = 16; step > 0; step >>= 1) {
        const double other = __shfl_xor_sync(ALL_LANES, best, step);
        const u32 other_number = __shfl_xor_sync(ALL_LANES, number, step);
        const float other_scale = __shfl_xor_sync(ALL_LANES, scale, step);
        const bool better = number == CENTROIDS || other > best || (other == best && other_number < number);
        if (other_number < CENTROIDS && better) {
            best = other;
            number = other_number;
            scale = other_scale;
        }
    }
    return {(weigh_by_norm ? sqrt(dot(part, part)) : 1.0) * static_cast<double>(scale), number};
}

extern "C" __global__ void __launch_bounds__(THREADS) match_centroids(
    const QUERY* q,            // [batch_size, num_index_heads * GROUP_SIZE, HEAD_DIM]
    const LayerTable* tables,  // [num_contexts], of this layer
    const int* context_ids,    // [batch_size], -1: idle
    long long weigh_by_norm, long long has_scales,
    Match* matches             // [batch_size, num_index_heads, GROUP_SIZE, SUBSPACES], written
) {
    __shared__ float part[GROUP_SIZE * SUBSPACE_DIM];
    const int b = blockIdx.x, head = blockIdx.y, slot = blockIdx.z * gridDim.y + head;
    const int context_id = context_ids[blockIdx.z];
    if (context_id < 0) return;
    const LayerTable table = tables[context_id];
    const int row = (head * SUBSPACES + b) * CENTROIDS;
    const float* scales = has_scales ? static_cast<const float*>(table.extra) + row : nullptr;
    const Candidates mine = load_candidates(table.codebooks + row * SUBSPACE_DIM, scales);
    rotate_into_subspace(q + static_cast<size_t>(slot) * GROUP_SIZE * HEAD_DIM,
                         table.query_basis + head * HEAD_DIM * HEAD_DIM + b * SUBSPACE_DIM, part);
    __syncthreads();
    for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
        const Match match = nearest_centroid(part + g * SUBSPACE_DIM, mine, weigh_by_norm);
        if (threadIdx.x % 32 == 0) matches[(slot * GROUP_SIZE + g) * SUBSPACES + b] = match;
    }
}

// From the group's queries to the nearest centroid of each subspace: the same sums in float64 as on the CPU. Their order
// differs, which can change a result only where it lies within 1e-15 of a rounding boundary.

struct Match {
    float part[GROUP_SIZE * SUBSPACE_DIM];  // of the subspace at hand
    double scaled[GROUP_SIZE][SUBSPACES];   // the subspace's weight, times the chosen row's scale
    u32 centroid[GROUP_SIZE][SUBSPACES];
};

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(u16 bits) {
#if QUERY_IS_HALF
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}

// part = the group's queries times the columns of query_basis that make up subspace b: 16 lanes share one sum.
__device__ void rotate_into_subspace(const QUERY* q, const float* query_basis, int b, float* part) {
    constexpr int NUM_SUMS = GROUP_SIZE * SUBSPACE_DIM;
    const int lane = threadIdx.x % 32;
    for (int first = threadIdx.x / 32 * 2; first < NUM_SUMS; first += WARPS * 2) {
        const int sum = first + lane / 16;
        double total = 0;
        if (sum < NUM_SUMS) {
            const QUERY* row = q + sum / SUBSPACE_DIM * HEAD_DIM;
            const float* column = query_basis + b * SUBSPACE_DIM + sum % SUBSPACE_DIM;
            for (int i = lane % 16; i < HEAD_DIM; i += 16)
                total += static_cast<double>(as_float(row[i])) * static_cast<double>(column[i * HEAD_DIM]);
        }
        for (int step = 8; step > 0; step >>= 1) total += __shfl_xor_sync(ALL_LANES, total, step);
        if (lane % 16 == 0 && sum < NUM_SUMS) part[sum] = static_cast<float>(total);
    }
}

__device__ double dot(const float* a, const float* b) {
    double total = 0;
    for (int i = 0; i < SUBSPACE_DIM; ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return total;
}

// The number of the nearest centroid to `part`, for the whole warp; of equally near ones the lowest.
__device__ u32 nearest_centroid(const float* part, const float* codebook) {
    double best = -1.0 / 0.0;
    u32 number = CENTROIDS;
    for (u32 c = threadIdx.x % 32; c < CENTROIDS; c += 32) {
        const double score = dot(part, codebook + c * SUBSPACE_DIM);
        if (score > best || number == CENTROIDS) {
            best = score;
            number = c;
        }
    }
    for (int step = 16; step > 0; step >>= 1) {
        const double other = __shfl_xor_sync(ALL_LANES, best, step);
        const u32 other_number = __shfl_xor_sync(ALL_LANES, number, step);
        if (other_number < CENTROIDS && (number == CENTROIDS || other > best || (other == best && other_number < number))) {
            best = other;
            number = other_number;
        }
    }
    return number;
}

// Subspaces are dealt out to the blocks; after the next cluster_sync, block b % CLUSTER knows subspace b.
// scales: [num_index_heads, SUBSPACES, CENTROIDS], or null for scales of 1.
__device__ void match_centroids(const QUERY* q, const LayerTable& table, const float* scales, int head, bool weigh_by_norm,
                                u32 rank, Match& match) {
    const float* query_basis = reinterpret_cast<const float*>(table.query_basis) + head * HEAD_DIM * HEAD_DIM;
    const float* codebooks = reinterpret_cast<const float*>(table.codebooks) + head * CENTROIDS * HEAD_DIM;
    for (int b = rank; b < SUBSPACES; b += CLUSTER) {
        rotate_into_subspace(q, query_basis, b, match.part);
        __syncthreads();
        for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
            const float* part = match.part + g * SUBSPACE_DIM;
            const u32 centroid = nearest_centroid(part, codebooks + b * CENTROIDS * SUBSPACE_DIM);
            if (threadIdx.x % 32 == 0) {
                const double weight = weigh_by_norm ? sqrt(dot(part, part)) : 1.0;
                const double scale = scales ? scales[(head * SUBSPACES + b) * CENTROIDS + centroid] : 1.0;
                match.centroid[g][b] = centroid;
                match.scaled[g][b] = weight * scale;
            }
        }
        __syncthreads();
    }
}

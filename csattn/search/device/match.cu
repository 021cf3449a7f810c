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

// The lane's part of a column of query_basis: eight lanes share a sum, each has every eighth term of it.
struct Column {
    static constexpr int TERMS = (HEAD_DIM + 7) / 8;
    float terms[TERMS];

    __device__ __forceinline__ static int index(int term) { return term * 8 + threadIdx.x % 8; }

    __device__ __forceinline__ Column(const float* column) {
#pragma unroll
        for (int t = 0; t < TERMS; ++t) terms[t] = index(t) < HEAD_DIM ? __ldg(column + index(t) * HEAD_DIM) : 0;
    }

    // The query times the column, in all eight lanes.
    template <typename Query> __device__ __forceinline__ float times(const Query* q) const {
        double total = 0;
#pragma unroll
        for (int t = 0; t < TERMS; ++t)
            if (index(t) < HEAD_DIM) total += static_cast<double>(as_float(q[index(t)])) * static_cast<double>(terms[t]);
        for (int step = 4; step > 0; step >>= 1) total += __shfl_xor_sync(ALL_LANES, total, step);
        return static_cast<float>(total);
    }
};

// The centroids that a lane compares with, and the scales of their rows.
struct Nearby {
    float vectors[CENTROIDS_PER_LANE][SUBSPACE_DIM];
    float scales[CENTROIDS_PER_LANE];
};

__device__ __forceinline__ Nearby load_nearby(const float* codebook, const float* scales) {
    Nearby mine;
#pragma unroll
    for (int k = 0; k < CENTROIDS_PER_LANE; ++k) {
        const int c = min(static_cast<int>(threadIdx.x % 32) + 32 * k, CENTROIDS - 1);
        const float* vector = codebook + c * SUBSPACE_DIM;
        if (SUBSPACE_DIM % 4 == 0) {
#pragma unroll
            for (int i = 0; i < SUBSPACE_DIM; i += 4) {
                const float4 four = __ldg(reinterpret_cast<const float4*>(vector + i));
                mine.vectors[k][i] = four.x;
                mine.vectors[k][i + 1] = four.y;
                mine.vectors[k][i + 2] = four.z;
                mine.vectors[k][i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < SUBSPACE_DIM; ++i) mine.vectors[k][i] = __ldg(vector + i);
        }
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
__device__ Match nearest_centroid(const float* part, const Nearby& mine, bool weigh_by_norm) {
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

// Query heads made one: the sum of each group's rows, scaled to norm 1, as csattn.search.reference.pool_queries makes it.
__device__ void pool_queries(const QUERY* q, double* units, float* pooled) {
    for (int row = threadIdx.x / 32; row < GROUP_SIZE * POOL_SIZE; row += WARPS) {
        double square = 0;
        for (int i = threadIdx.x % 32; i < HEAD_DIM; i += 32) {
            const double value = as_float(q[row * HEAD_DIM + i]);
            square += value * value;
        }
        for (int step = 16; step > 0; step >>= 1) square += __shfl_xor_sync(ALL_LANES, square, step);
        const double norm = sqrt(square);
        for (int i = threadIdx.x % 32; i < HEAD_DIM; i += 32)
            units[row * HEAD_DIM + i] = norm > 0 ? static_cast<double>(as_float(q[row * HEAD_DIM + i])) / norm : 0.0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP_SIZE * HEAD_DIM; i += THREADS) {
        double sum = 0;
        for (int p = 0; p < POOL_SIZE; ++p) sum += units[(i / HEAD_DIM * POOL_SIZE + p) * HEAD_DIM + i % HEAD_DIM];
        pooled[i] = static_cast<float>(sum);
    }
    __syncthreads();
}

// Each subspace's block clears its part.
__device__ __forceinline__ void clear_counts(Choice& choice, int b) {
    for (int i = b * THREADS + threadIdx.x; i < NUM_BINS; i += SUBSPACES * THREADS) choice.bins[i] = 0;
    if (b == 0 && threadIdx.x == 0) choice.num_listed = choice.num_candidates = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) match_centroids(
    const QUERY* q,            // [batch_size, num_index_heads * GROUP_SIZE * POOL_SIZE, HEAD_DIM]
    const LayerTable* tables,  // [num_contexts], of this layer
    const int* context_ids,    // [batch_size], -1: idle
    long long weigh_by_norm, long long has_scales,
    Match* matches,            // [batch_size, num_index_heads, GROUP_SIZE, SUBSPACES], written
    Choice* choices            // [batch_size, num_index_heads], cleared
) {
    constexpr bool POOLED = POOL_SIZE > 1;
    __shared__ double units[POOLED ? GROUP_SIZE * POOL_SIZE * HEAD_DIM : 1];
    __shared__ float part[GROUP_SIZE * SUBSPACE_DIM], pooled[POOLED ? GROUP_SIZE * HEAD_DIM : 1];
    const int b = blockIdx.x, head = blockIdx.y, slot = blockIdx.z * gridDim.y + head;
    const int context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_for_earlier();
    const LayerTable table = tables[context_id];
    const int row = (head * SUBSPACES + b) * CENTROIDS;
    const float* scales = has_scales ? static_cast<const float*>(table.extra) + row : nullptr;
    const Nearby mine = load_nearby(table.codebooks + row * SUBSPACE_DIM, scales);
    // eight lanes stay with one column, for one query after the other
    const int column = threadIdx.x / 8 % SUBSPACE_DIM;
    const Column mine_of_basis(table.query_basis + head * HEAD_DIM * HEAD_DIM + b * SUBSPACE_DIM + column);
    wait_for_earlier();
    clear_counts(choices[slot], b);
    q += static_cast<size_t>(slot) * GROUP_SIZE * POOL_SIZE * HEAD_DIM;
    if (POOLED) pool_queries(q, units, pooled);
    constexpr int QUERIES_AT_ONCE = THREADS / 8 / SUBSPACE_DIM;
    for (int first = 0; first < GROUP_SIZE; first += QUERIES_AT_ONCE) {
        const int g = first + threadIdx.x / 8 / SUBSPACE_DIM;
        const bool is_mine = g < min(GROUP_SIZE, first + QUERIES_AT_ONCE);
        const int at = (is_mine ? g : 0) * HEAD_DIM;
        const float sum = POOLED ? mine_of_basis.times(pooled + at) : mine_of_basis.times(q + at);
        if (is_mine && threadIdx.x % 8 == 0) part[g * SUBSPACE_DIM + column] = sum;
    }
    __syncthreads();
    for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
        const Match match = nearest_centroid(part + g * SUBSPACE_DIM, mine, weigh_by_norm);
        if (threadIdx.x % 32 == 0) matches[(slot * GROUP_SIZE + g) * SUBSPACES + b] = match;
    }
}

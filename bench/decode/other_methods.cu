// The scores by which other methods choose: Quest's upper bounds for pages, SparQ's products of a query's largest components,
// PQCache's sums of products with centroids.
//
// Compiled for GROUP_SIZE, NUM_HEADS, HEAD_DIM, THREADS, QUERY (the type of queries and keys), and the constants that a kernel
// uses. Contexts are whole pages: a multiple of 16 keys. After the last key all scores are NOT_LISTED.

#include "../../csattn/search/device/choice.cuh"

constexpr int CHANNELS = 8;  // read at once: 16 bytes of 16-bit keys

struct alignas(16) Eight {
    QUERY values[CHANNELS];
};

// The addresses of the parts of a context's index in a layer.
struct Parts {
    const void *first, *second, *third, *fourth;
    long long length;  // keys, or pages
};

// Clear the two sets of counts that a slot's last step left.
__device__ __forceinline__ void clear_both(Choice* choices, int slot) {
    clear_counts(choices[slot], blockIdx.x, gridDim.x);
    clear_counts(choices[slot + gridDim.y * gridDim.z], blockIdx.x, gridDim.x);
}

// How kernels that read queries begin: load a slot's queries as floats, and clear its counts. Returns false if the row is idle.
__device__ __forceinline__ bool begin(const QUERY* q, const int* context_ids, int slot, Choice* choices,
                                      float (&queries)[GROUP_SIZE][HEAD_DIM]) {
    wait_then_let_next_start();
    if (context_ids[blockIdx.z] < 0) return false;
    clear_both(choices, slot);
    for (int i = threadIdx.x; i < GROUP_SIZE * HEAD_DIM; i += THREADS)
        queries[i / HEAD_DIM][i % HEAD_DIM] = as_float(q[slot * GROUP_SIZE * HEAD_DIM + i]);
    __syncthreads();
    return true;
}

// Quest: for each page, the largest product that a key in it could have with a query. Lanes share the channels.
extern "C" __global__ void __launch_bounds__(THREADS) score_pages(
    const QUERY* q,           // [batch_size, NUM_HEADS, GROUP_SIZE, HEAD_DIM]
    const Parts* indexes,     // [num_contexts], first: bounds [NUM_HEADS, num_pages, 2, HEAD_DIM], minima, then maxima
    const int* context_ids,   // [batch_size], -1: idle
    long long max_pages,      // whole chunks
    float* scores,            // [batch_size, NUM_HEADS, GROUP_SIZE, max_pages], written
    Choice* choices           // [2, batch_size, NUM_HEADS], cleared
) {
    constexpr int LANES = HEAD_DIM / CHANNELS, PAGES = THREADS / LANES;  // lanes for a page; pages of a block at a time
    static_assert(32 % LANES == 0 && THREADS % 32 == 0, "lanes of a page are neighbours in a warp");
    __shared__ float queries[GROUP_SIZE][HEAD_DIM];
    const int head = blockIdx.y, slot = blockIdx.z * NUM_HEADS + head, id = context_ids[blockIdx.z];
    if (!begin(q, context_ids, slot, choices, queries)) return;
    const int lane = threadIdx.x % LANES, num_pages = indexes[id].length;
    float own[GROUP_SIZE][CHANNELS];
    for (int g = 0; g < GROUP_SIZE; ++g)
        for (int i = 0; i < CHANNELS; ++i) own[g][i] = queries[g][lane * CHANNELS + i];
    const Eight* bounds = static_cast<const Eight*>(indexes[id].first) + static_cast<size_t>(head) * num_pages * 2 * LANES;
    for (int first = blockIdx.x * PAGES; first < max_pages; first += gridDim.x * PAGES) {
        const int page = first + threadIdx.x / LANES;
        float sums[GROUP_SIZE] = {};
        if (page < num_pages) {
            const Eight low = bounds[page * 2 * LANES + lane], high = bounds[(page * 2 + 1) * LANES + lane];
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i)
#pragma unroll
                for (int g = 0; g < GROUP_SIZE; ++g)
                    sums[g] += fmaxf(own[g][i] * as_float(low.values[i]), own[g][i] * as_float(high.values[i]));
        }
#pragma unroll
        for (int g = 0; g < GROUP_SIZE; ++g)
            for (int step = LANES / 2; step > 0; step >>= 1) sums[g] += __shfl_xor_sync(ALL_LANES, sums[g], step);
        if (lane == 0 && page < max_pages)
            for (int g = 0; g < GROUP_SIZE; ++g)
                scores[(static_cast<size_t>(slot) * GROUP_SIZE + g) * max_pages + page] = page < num_pages ? sums[g] : NOT_LISTED;
    }
}

// The rows of chosen pages of PAGE_LEN rows.
extern "C" __global__ void __launch_bounds__(THREADS) rows_of_pages(
    const int* pages,      // [batch_size, NUM_HEADS, max_pages], ascending
    const int* num_pages,  // [batch_size, NUM_HEADS]
    long long max_pages,
    int* kv_indices,       // [batch_size, NUM_HEADS, max_top_k], written
    int* valid_len,        // [batch_size, NUM_HEADS], written
    long long max_top_k    // at least max_pages * PAGE_LEN
) {
    const int slot = blockIdx.z * NUM_HEADS + blockIdx.y;
    wait_then_let_next_start();
    const int valid = num_pages[slot] * PAGE_LEN;
    if (blockIdx.x == 0 && threadIdx.x == 0) valid_len[slot] = valid;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < max_top_k; i += gridDim.x * THREADS)
        kv_indices[slot * max_top_k + i] = i < valid ? pages[slot * max_pages + i / PAGE_LEN] * PAGE_LEN + i % PAGE_LEN : -1;
}

// SparQ: the sum over the group of products in the COMPONENTS channels in which its queries are largest. Each query's logits are
// scaled by SparQ's temperature, from the share of |q| in these channels; so the queries of a group add up to one vector.
extern "C" __global__ void __launch_bounds__(THREADS) score_components(
    const QUERY* q, const Parts* indexes,  // first: keys [NUM_HEADS, HEAD_DIM, num_keys]
    const int* context_ids,
    long long max_keys,                    // whole chunks
    float* scores,                         // [batch_size, NUM_HEADS, max_keys], written
    Choice* choices
) {
    __shared__ float queries[GROUP_SIZE][HEAD_DIM], sizes[HEAD_DIM], covered[GROUP_SIZE], weights[COMPONENTS];
    __shared__ int channels[COMPONENTS];
    const int head = blockIdx.y, slot = blockIdx.z * NUM_HEADS + head, id = context_ids[blockIdx.z];
    if (!begin(q, context_ids, slot, choices, queries)) return;
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        sizes[d] = 0;
        for (int g = 0; g < GROUP_SIZE; ++g) sizes[d] += fabsf(queries[g][d]);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        int rank = 0;
        for (int other = 0; other < HEAD_DIM; ++other)
            rank += sizes[other] > sizes[d] || (sizes[other] == sizes[d] && other < d);
        if (rank < COMPONENTS) channels[rank] = d;
    }
    __syncthreads();
    if (threadIdx.x < GROUP_SIZE) {
        float all = 0, part = 0;
        for (int d = 0; d < HEAD_DIM; ++d) all += fabsf(queries[threadIdx.x][d]);
        for (int i = 0; i < COMPONENTS; ++i) part += fabsf(queries[threadIdx.x][channels[i]]);
        covered[threadIdx.x] = part > 0 ? sqrtf(all / part) : 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COMPONENTS; i += THREADS) {
        weights[i] = 0;
        for (int g = 0; g < GROUP_SIZE; ++g) weights[i] += covered[g] * queries[g][channels[i]];
    }
    __syncthreads();
    const int num_eights = indexes[id].length / CHANNELS;
    const Eight* keys = static_cast<const Eight*>(indexes[id].first) + static_cast<size_t>(head) * HEAD_DIM * num_eights;
    float* row = scores + slot * max_keys;
    for (int eight = blockIdx.x * THREADS + threadIdx.x; eight < max_keys / CHANNELS; eight += gridDim.x * THREADS) {
        float sums[CHANNELS];
        for (int k = 0; k < CHANNELS; ++k) sums[k] = eight < num_eights ? 0.0f : NOT_LISTED;
        if (eight < num_eights) {
#pragma unroll 16
            for (int i = 0; i < COMPONENTS; ++i) {
                const Eight of_channel = keys[static_cast<size_t>(channels[i]) * num_eights + eight];
#pragma unroll
                for (int k = 0; k < CHANNELS; ++k) sums[k] += weights[i] * as_float(of_channel.values[k]);
            }
        }
        for (int k = 0; k < CHANNELS; ++k) row[eight * CHANNELS + k] = sums[k];
    }
}

// PQCache: products of a query's parts with the CENTROIDS centroids of each of SUBSPACES subspaces, a warp for each centroid.
extern "C" __global__ void __launch_bounds__(THREADS) multiply_centroids(
    const QUERY* q, const Parts* indexes,  // second: centroids [NUM_HEADS, SUBSPACES, CENTROIDS, HEAD_DIM / SUBSPACES]
    const int* context_ids,
    float* products,                       // [batch_size, NUM_HEADS, SUBSPACES, CENTROIDS, GROUP_SIZE], written
    Choice* choices
) {
    constexpr int WIDTH = HEAD_DIM / SUBSPACES;
    static_assert(HEAD_DIM % SUBSPACES == 0, "parts are equally wide");
    __shared__ float queries[GROUP_SIZE][HEAD_DIM];
    const int head = blockIdx.y, slot = blockIdx.z * NUM_HEADS + head, id = context_ids[blockIdx.z];
    if (!begin(q, context_ids, slot, choices, queries)) return;
    const QUERY* centroids = static_cast<const QUERY*>(indexes[id].second) + head * CENTROIDS * HEAD_DIM;
    const int lane = threadIdx.x % 32;
    for (int c = blockIdx.x * WARPS + threadIdx.x / 32; c < SUBSPACES * CENTROIDS; c += gridDim.x * WARPS) {
        float sums[GROUP_SIZE] = {};
        for (int d = lane; d < WIDTH; d += 32) {
            const float of_centroid = as_float(centroids[c * WIDTH + d]);
            for (int g = 0; g < GROUP_SIZE; ++g) sums[g] += queries[g][c / CENTROIDS * WIDTH + d] * of_centroid;
        }
        for (int g = 0; g < GROUP_SIZE; ++g) {
            const float sum = sum_over_warp(sums[g]);
            if (lane == 0) products[(slot * SUBSPACES * CENTROIDS + c) * GROUP_SIZE + g] = sum;
        }
    }
}

// PQCache: a key's score is the sum of its centroids' products.
extern "C" __global__ void __launch_bounds__(THREADS) add_products(
    const Parts* indexes,   // first: codes [NUM_HEADS, num_keys, SUBSPACES] bytes
    const int* context_ids, const float* products,
    long long max_keys,     // whole chunks
    float* scores           // [batch_size, NUM_HEADS, GROUP_SIZE, max_keys], written
) {
    struct alignas(SUBSPACES * 4) Codes {
        u8 of_key[4][SUBSPACES];
    };
    __shared__ float sums[SUBSPACES * CENTROIDS][GROUP_SIZE];
    const int head = blockIdx.y, slot = blockIdx.z * NUM_HEADS + head, id = context_ids[blockIdx.z];
    wait_then_let_next_start();
    if (id < 0) return;
    for (int i = threadIdx.x; i < SUBSPACES * CENTROIDS * GROUP_SIZE; i += THREADS)
        sums[i / GROUP_SIZE][i % GROUP_SIZE] = products[slot * SUBSPACES * CENTROIDS * GROUP_SIZE + i];
    __syncthreads();
    const int num_keys = indexes[id].length;
    const Codes* codes = reinterpret_cast<const Codes*>(static_cast<const u8*>(indexes[id].first) + static_cast<size_t>(head) * num_keys * SUBSPACES);
    for (int four = blockIdx.x * THREADS + threadIdx.x; four < max_keys / 4; four += gridDim.x * THREADS) {
        float of_keys[GROUP_SIZE][4];
        const bool is_inside = four < num_keys / 4;
        const Codes own = is_inside ? codes[four] : Codes{};
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int g = 0; g < GROUP_SIZE; ++g) {
                float sum = 0;
#pragma unroll
                for (int b = 0; b < SUBSPACES; ++b) sum += sums[b * CENTROIDS + own.of_key[k][b]][g];
                of_keys[g][k] = is_inside ? sum : NOT_LISTED;
            }
        for (int g = 0; g < GROUP_SIZE; ++g)
            reinterpret_cast<float4*>(scores + (static_cast<size_t>(slot) * GROUP_SIZE + g) * max_keys)[four] =
                make_float4(of_keys[g][0], of_keys[g][1], of_keys[g][2], of_keys[g][3]);
    }
}

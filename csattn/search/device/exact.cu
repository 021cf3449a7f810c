// The logits of each query: its scaled products with all keys of its context, which are read from the KV.
//
// Compiled for GROUP_SIZE, NUM_HEADS, HEAD_DIM, THREADS and QUERY, which is the keys' type, too; see common.cuh.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) score_rows(
    const QUERY* q,              // [batch_size, NUM_HEADS, GROUP_SIZE, HEAD_DIM]
    const long long* addresses,  // [num_contexts] of [NUM_HEADS, rows_per_head, 2, HEAD_DIM]: K, then V
    const int* rows_per_head,    // [num_contexts]
    const int* context_ids,      // [batch_size], -1: idle
    double softmax_scale, long long max_keys,
    float* logits                // [batch_size, NUM_HEADS, GROUP_SIZE, max_keys], written; -inf where there is no key
) {
    __shared__ float queries[GROUP_SIZE][HEAD_DIM];
    wait_then_let_next_start();
    const int head = blockIdx.y, slot = blockIdx.z * NUM_HEADS + head, id = context_ids[blockIdx.z];
    const long long key = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const long long num_keys = id < 0 ? 0 : rows_per_head[id];
    for (int i = threadIdx.x; i < GROUP_SIZE * HEAD_DIM; i += THREADS)
        queries[i / HEAD_DIM][i % HEAD_DIM] = static_cast<float>(softmax_scale) * as_float(q[slot * GROUP_SIZE * HEAD_DIM + i]);
    __syncthreads();
    if (key >= max_keys) return;
    float sums[GROUP_SIZE] = {};
    if (key < num_keys) {
        const QUERY* row = reinterpret_cast<const QUERY*>(addresses[id]) + (head * num_keys + key) * (2 * HEAD_DIM);
#pragma unroll 16
        for (int d = 0; d < HEAD_DIM; ++d) {
            const float of_key = as_float(row[d]);
#pragma unroll
            for (int g = 0; g < GROUP_SIZE; ++g) sums[g] += queries[g][d] * of_key;
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g)
        logits[(slot * GROUP_SIZE + g) * max_keys + key] = key < num_keys ? sums[g] : __uint_as_float(0xff800000u);
}

// Shared by all kernels of the search. Compiled for GROUP_SIZE, HEAD_DIM, THREADS and QUERY: float, or u16 for bfloat16
// and (QUERY_IS_HALF) float16. GROUP_SIZE query heads share an index head.
//
// The launches of a search follow each other, by programmatic dependent launch: over a sketch project_queries, score_codes,
// choose_codes; over lists match_centroids, score_lists, combine_lists, find_keys, write_keys. What one leaves for the next
// is in the search's memory, by `slot`: the number of an index head of a row of the batch.

#pragma once

#include "../../cuda/warps.cuh"

constexpr double LOG2_E = 1.4426950408889634;

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(u16 bits) {
    return QUERY_IS_HALF ? half_as_float(bits) : __uint_as_float(static_cast<u32>(bits) << 16);
}

// A context, and which of its keys may be chosen.
struct Context {
    int num_keys;
    int top_k;
    int sink_end;      // keys before it are resident
    int window_start;  // keys from it on are resident
};

// The context of row blockIdx.z, empty for an idle row (id -1). row_top_ks: null, or each row's K, where less than its
// context's.
__device__ __forceinline__ Context context_of(const int* context_lens, const int* top_ks, const int* context_ids,
                                              const int* row_top_ks, int sink_len, int window_len) {
    const int id = context_ids[blockIdx.z], row_top_k = row_top_ks ? row_top_ks[blockIdx.z] : 0x7fffffff;
    if (id < 0) return {0, 0, 0, 0};
    Context context{context_lens[id], min(top_ks[id], row_top_k), 0, 0};
    context.sink_end = min(sink_len, context.num_keys);
    context.window_start = max(context.sink_end, context.num_keys - window_len);
    context.top_k = min(context.top_k, context.window_start - context.sink_end);
    return context;
}

// Lists of keys: one for each centroid of each subspace.
#pragma once

#include "choice.cuh"

constexpr int SUBSPACE_DIM = HEAD_DIM / SUBSPACES;
constexpr int SCORE_UNIT = 8;  // scores that are copied together: 16 bytes

// The addresses of a context's lists of one layer. They are read from a table in device memory, so that a captured graph
// follows them when another context takes the place.
struct ListIndex {
    const float* codebooks;    // [num_index_heads, SUBSPACES, CENTROIDS, SUBSPACE_DIM]
    const u16* scores;         // [num_index_heads, SUBSPACES, CENTROIDS, list_len] halves, in the order of keys; padded
    const u32* listed;         // [num_index_heads, SUBSPACES, CENTROIDS, num_chunks, CHUNK_KEYS / 32]: a bit for each key
    const int* starts;         // [num_index_heads, SUBSPACES, CENTROIDS, num_chunks]: where a chunk's scores begin in their list
    long long list_len;        // with padding: whole units
};

// The centroid of a subspace that is nearest to a query.
struct alignas(16) Match {
    double weight;  // the query's norm in the subspace, or 1
    u32 centroid;
};

// What every kernel of the search needs. Compiled for GROUP_SIZE, HEAD_DIM, SUBSPACES, CENTROIDS, SCORE_BITS, CLUSTER,
// THREADS and QUERY: float, or u16 for bfloat16 and (QUERY_IS_HALF) float16.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARPS = THREADS / 32;
constexpr int SUBSPACE_DIM = HEAD_DIM / SUBSPACES;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr double LOG2_E = 1.4426950408889634;

__device__ __forceinline__ float sum_over_warp(float value) {
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

__device__ __forceinline__ float power_of_two(float exponent) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
    return value;
}

// Kernels may start while the one before them ends. Until `wait_for_earlier` returns they read only what no kernel of the
// step writes, and write nothing; only after it do they let the next kernel start.
__device__ __forceinline__ void wait_for_earlier() {
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
}

// Where a context's index of one layer lies. Addresses come from a table in device memory, so that a captured graph
// follows them when another context takes the place.
struct LayerTable {
    const float* query_basis;  // [num_index_heads, HEAD_DIM, HEAD_DIM]
    const float* codebooks;    // [num_index_heads, SUBSPACES, CENTROIDS, SUBSPACE_DIM]
    const void* scores;        // rows: u8 [num_index_heads, num_tiles, SUBSPACES, CENTROIDS, TILE_BYTES]; lists: halves
    const void* extra;         // rows: float scales [num_index_heads, SUBSPACES, CENTROIDS]; lists: int indices
};

// What of a context may be chosen.
struct Context {
    int num_keys;
    int top_k;
    int sink_end;      // keys before it are resident
    int window_start;  // keys from it on are resident
};

// An idle row (id -1) has a context of nothing.
__device__ __forceinline__ Context context_of(const int* context_lens, const int* top_ks, int id, int sink_len,
                                              int window_len) {
    if (id < 0) return {0, 0, 0, 0};
    Context context{context_lens[id], top_ks[id], 0, 0};
    context.sink_end = min(sink_len, context.num_keys);
    context.window_start = max(context.sink_end, context.num_keys - window_len);
    context.top_k = min(context.top_k, context.window_start - context.sink_end);
    return context;
}

// What a subspace's nearest centroid is to a query.
struct Match {
    double weight;  // the query's norm in the subspace, or 1; times the scale of the centroid's row
    u32 centroid;
};

__device__ __forceinline__ float half_as_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// A cluster of CLUSTER blocks serves one index head of one row of the batch; block r owns the r-th part of the keys.
// Blocks read and write each other's shared memory; every exchange stands between two `cluster_sync`.
//
// Compiled for: GROUP_SIZE, HEAD_DIM, SUBSPACES, CENTROIDS, SCORE_BITS, CLUSTER, THREADS, QUERY (bf16, half or float).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARPS = THREADS / 32;
constexpr int SUBSPACE_DIM = HEAD_DIM / SUBSPACES;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the cluster's shared memory, of what block `rank` keeps at its own `place`.
__device__ __forceinline__ u32 address_at(const void* place, u32 rank) {
    u32 mine = static_cast<u32>(__cvta_generic_to_shared(place)), theirs;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank));
    return theirs;
}

__device__ __forceinline__ u32 read_word(const void* place, u32 rank) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_at(place, rank)) : "memory");
    return value;
}

__device__ __forceinline__ double read_double(const void* place, u32 rank) {
    double value;
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(address_at(place, rank)) : "memory");
    return value;
}

__device__ __forceinline__ void write_word(void* place, u32 rank, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_at(place, rank)), "r"(value) : "memory");
}

__device__ __forceinline__ u32 sum_over_warp(u32 value) { return __reduce_add_sync(ALL_LANES, value); }

__device__ __forceinline__ float sum_over_warp(float value) {
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

__device__ __forceinline__ float power_of_two(float exponent) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
    return value;
}

// Where a context's index of one layer lies. Addresses come from a table in device memory, so that a captured graph
// follows them when another context takes the place.
struct LayerTable {
    u64 query_basis;  // float [num_index_heads, HEAD_DIM, HEAD_DIM]
    u64 codebooks;    // float [num_index_heads, SUBSPACES, CENTROIDS, SUBSPACE_DIM]
    u64 scores;       // rows: u8 [num_index_heads, SUBSPACES, CENTROIDS, row_bytes]; lists: halves, like indices
    u64 extra;        // rows: float scales [num_index_heads, SUBSPACES, CENTROIDS]; lists: int indices [..., list_len]
};

// What of a context may be chosen.
struct Context {
    int num_keys;
    int top_k;
    int sink_end;      // keys before it are resident
    int window_start;  // keys from it on are resident
};

__device__ __forceinline__ Context context_of(const int* context_lens, const int* top_ks, int id, int sink_len,
                                              int window_len) {
    Context context{context_lens[id], top_ks[id], 0, 0};
    context.sink_end = min(sink_len, context.num_keys);
    context.window_start = max(context.sink_end, context.num_keys - window_len);
    context.top_k = min(context.top_k, context.window_start - context.sink_end);
    return context;
}

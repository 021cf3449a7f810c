// Blocks of one cluster: their barrier, and each other's shared memory.

constexpr unsigned kAll = ~0u;

// Barrier of the cluster in two halves; what was written before one's arrival is seen after the other's wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The address of the same shared variable in another block of the cluster.
__device__ __forceinline__ unsigned in_block(const void* here, unsigned rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"((unsigned)__cvta_generic_to_shared(here)), "r"(rank));
    return there;
}
__device__ __forceinline__ unsigned load_in_block(const void* here, unsigned rank) {
    unsigned value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(in_block(here, rank)) : "memory");
    return value;
}
__device__ __forceinline__ void store_in_block(void* here, unsigned rank, unsigned value) {
    asm volatile("st.shared::cluster.u8 [%0], %1;" ::"r"(in_block(here, rank)), "r"(value) : "memory");
}

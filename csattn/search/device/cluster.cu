// A cluster of CLUSTER blocks chooses for one index head of one row of the batch; block r owns the r-th part of the keys.
// Blocks read and write each other's shared memory; every exchange stands between two `cluster_sync`.

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

__device__ __forceinline__ void write_word(void* place, u32 rank, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_at(place, rank)), "r"(value) : "memory");
}

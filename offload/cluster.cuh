// Blocks of one cluster: their barrier, and each other's shared memory.

constexpr unsigned kAll = ~0u;

// What any thread of the cluster wrote before is seen by all of them after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A block that leaves takes its shared memory along: `done_reading` others', then `wait_for_readers` before leaving.
__device__ __forceinline__ void done_reading() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_readers() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

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
__device__ __forceinline__ unsigned load_short_in_block(const void* here, unsigned rank) {
    unsigned short value;
    asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(value) : "r"(in_block(here, rank)) : "memory");
    return value;
}
__device__ __forceinline__ uint4 load_four_in_block(const void* here, unsigned rank) {
    uint4 value;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(in_block(here, rank))
                 : "memory");
    return value;
}

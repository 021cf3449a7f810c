// The instructions that CUDA C has no name for. An emulator brings its own version of this file, and of nothing else.

typedef unsigned u32;
typedef unsigned long long u64;

// A kernel may start while the one before it ends. Until this returns it reads only what no kernel of the step writes,
// and writes nothing; only after it does it let the next kernel start.
__device__ __forceinline__ void wait_for_earlier() {
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
}

// A load that is begun here, and not where its result is first wanted.
__device__ __forceinline__ int load_now(const int* from) {
    int value;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}
__device__ __forceinline__ float4 load_now(const float4* from) {
    float4 four;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "l"(from));
    return four;
}
__device__ __forceinline__ uint4 load_now(const uint4* from) {
    uint4 four;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "l"(from));
    return four;
}

// Eight bytes that are written and read as one, while other blocks read and write.
__device__ __forceinline__ void store_whole(u64* to, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ u64 load_whole(const u64* from) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// Asks for what will be read soon: a multiple of 16 bytes, as is where it begins.
__device__ __forceinline__ void bring_to_l2(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// What any thread of the cluster wrote before is seen by all of them after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same shared variable in another block of the cluster.
template <class T> __device__ __forceinline__ T* in_block(T* here, u32 rank) {
    u64 there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
    return reinterpret_cast<T*>(there);
}

// A thread's view of its cluster, whose blocks meet at barriers that each has at the same place of its shared memory.
// `cluster_sync` would make every thread wait until all that it wrote is seen by the whole device, which takes longer.
template <u32 NUM_BLOCKS> struct Cluster {
    u32 rank, place, parity;

    // One thread of each block prepares the barrier; all blocks may use it after `cluster_sync`.
    __device__ __forceinline__ Cluster(u64& barrier, u32 rank_)
        : rank(rank_), place(static_cast<u32>(__cvta_generic_to_shared(&barrier))), parity(0) {
        if (NUM_BLOCKS == 1) return;
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place), "r"(NUM_BLOCKS) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        cluster_sync();
    }

    // What any thread of the cluster wrote to shared memory before is seen by all of them after.
    __device__ __forceinline__ void sync() {
        __syncthreads();
        if (NUM_BLOCKS == 1) return;
        if (threadIdx.x < NUM_BLOCKS)
            asm volatile(
                "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
                "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n\t}" ::"r"(place),
                "r"(threadIdx.x)
                : "memory");
        u32 done = 0;
        while (!done)
            asm volatile(
                "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n\t"
                "selp.u32 %0, 1, 0, done;\n\t}"
                : "=r"(done)
                : "r"(place), "r"(parity)
                : "memory");
        parity ^= 1;
    }
};

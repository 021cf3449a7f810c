// The instructions that CUDA C has no name for. An emulator brings its own version of this file, and of nothing else.

typedef unsigned u32;
typedef unsigned long long u64;

// A kernel may start while the one before it ends. Until this returns it reads only what no kernel of the step writes,
// and writes nothing; only after it does it let the next kernel start.
__device__ __forceinline__ void wait_for_earlier() {
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
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

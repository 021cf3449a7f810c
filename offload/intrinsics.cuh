// The instructions that CUDA C has no name for. An emulator brings its own version of this file, and of nothing else.

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
__device__ __forceinline__ uint4 load_four_in_block(const void* here, unsigned rank) {
    uint4 value;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(in_block(here, rank))
                 : "memory");
    return value;
}
__device__ __forceinline__ void store_in_block(void* here, unsigned rank, unsigned value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(in_block(here, rank)), "r"(value) : "memory");
}

// Copies into shared memory that go on behind a thread's back.
__device__ __forceinline__ void start_copy(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What a thread copies at once: as much as row sizes are multiples of. Rows are read once and never written while the
// kernel runs: no reason to keep them in L1.
template <unsigned BYTES> struct Piece;
template <> struct Piece<16> { unsigned x, y, z, w; };
template <> struct Piece<8> { unsigned x, y; };
template <> struct Piece<4> { unsigned x; };

__device__ __forceinline__ void read_piece(unsigned long long address, Piece<16>& p) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.x), "=r"(p.y), "=r"(p.z), "=r"(p.w)
                 : "l"(address));
}
__device__ __forceinline__ void read_piece(unsigned long long address, Piece<8>& p) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(p.x), "=r"(p.y) : "l"(address));
}
__device__ __forceinline__ void read_piece(unsigned long long address, Piece<4>& p) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(p.x) : "l"(address));
}
__device__ __forceinline__ void write_piece(unsigned long long address, const Piece<16>& p) {
    asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(p.x), "r"(p.y), "r"(p.z), "r"(p.w)
                 : "memory");
}
__device__ __forceinline__ void write_piece(unsigned long long address, const Piece<8>& p) {
    asm volatile("st.global.cg.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(p.x), "r"(p.y) : "memory");
}
__device__ __forceinline__ void write_piece(unsigned long long address, const Piece<4>& p) {
    asm volatile("st.global.cg.u32 [%0], %1;" ::"l"(address), "r"(p.x) : "memory");
}

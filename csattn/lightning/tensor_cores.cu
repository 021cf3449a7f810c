// The instructions of Hopper's tensor cores and of what feeds them (sm_90a). An emulator brings its own version of this
// file.

typedef unsigned u32;
typedef unsigned long long u64;

// Where something lies in shared memory.
__device__ __forceinline__ u32 address_of(const void* place) {
    return static_cast<u32>(__cvta_generic_to_shared(place));
}
// Where 16 bytes of a line of 128 lie in a block of lines, as tensor cores want them.
__device__ __forceinline__ u32 offset_of(int line, int unit) { return line * 128 + ((unit ^ line % 8) << 4); }

// How many registers each thread of the warpgroup has from now on.
template <int COUNT> __device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A copy of 16 bytes into shared memory behind a thread's back; 16 zeros unless `count` is 16.
__device__ __forceinline__ void start_copy(u32 to, const void* from, int count) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(count) : "memory");
}
// Copies go in groups: `wait_for_copies<N>` leaves the N last ended.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Barriers in shared memory: a phase ends when `count` have arrived.
__device__ __forceinline__ void init_barrier(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}
// Arrives when all copies that the thread has started are done.
__device__ __forceinline__ void arrive_when_copied(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address_of(barrier)) : "memory");
}
// Until the phase of that parity has ended. The phases count from 0; the one before the first has ended.
__device__ __forceinline__ void wait_for(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n}" ::"r"(address_of(barrier)), "r"(parity)
        : "memory");
}
// A barrier of the first COUNT threads of the block.
template <int ID, int COUNT> __device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// What the thread has written to shared memory, or seen written, tensor cores read from now on.
__device__ __forceinline__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where an operand lies: lines of 128 bytes, 8 of them 1024 bytes, their 16-byte units exchanged by xor with the line's
// number. `to_next`: bytes to the next 64 columns, where an operand's columns are not those that are summed over.
__device__ __forceinline__ u64 operand_at(u32 shared_address, u32 to_next = 16) {
    return (shared_address & 0x3ffff) >> 4 | static_cast<u64>(to_next >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// A warpgroup's products go on behind its back. Between `begin_products` and `wait_for_products<N>`, which leaves the N
// groups last ended, nobody touches their results. Of a result [64, N] a thread has, at [4 j + 2 i + e], row
// 16 warp + 8 i + lane / 4 and column 8 j + 2 (lane % 4) + e.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT, int COUNT> __device__ __forceinline__ void wait_for_products(float (&result)[COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(result[i])::"memory");
}
// Until all have ended, whoever's they are; their results are still to be waited for before they are touched.
__device__ __forceinline__ void wait_for_all_products() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define REGISTERS_8(x, i) \
    "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), \
        "+f"(x[i + 7])

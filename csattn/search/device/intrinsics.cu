// The instructions that CUDA C has no name for. An emulator brings its own version of this file, and of nothing else.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// 2 ** exponent, with a relative error of 2 ** -22; a result below the smallest normal number is 0.
__device__ __forceinline__ float power_of_two(float exponent) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
    return value;
}

__device__ __forceinline__ float half_as_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Kernels may start while the one before them ends. Until this returns they read only what no kernel of the step writes,
// and write nothing; only after it do they let the next kernel start. `known` is made of everything that must have been
// read by then: a compiler would read it afterwards, where it is used.
__device__ __forceinline__ void wait_for_earlier(u32 known = 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.eq.u32 p, %0, 0;\n\t@p griddepcontrol.wait;\n\t@!p griddepcontrol.wait;\n\t"
        "griddepcontrol.launch_dependents;\n\t}" ::"r"(known)
        : "memory");
}

// Copies into shared memory that go on behind a thread's back, in groups: `wait_for_copies<N>` leaves the N last begun.
__device__ __forceinline__ void start_copy(uint4* to, const void* from) {
    const u32 place = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// The blocks of a cluster, which hand each other numbers.
struct Handover {
    u32 barrier;

    // place: in shared memory, for nothing else. The blocks may hand over after `wait_for_all`.
    __device__ __forceinline__ Handover(u64& place) : barrier(static_cast<u32>(__cvta_generic_to_shared(&place))) {
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
    __device__ __forceinline__ void wait_for_all() const { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

    // Put a number at the same place of another block's shared memory.
    __device__ __forceinline__ void give(u32& place, u32 rank, u32 number) const {
        const u32 here = static_cast<u32>(__cvta_generic_to_shared(&place));
        asm volatile(
            "{\n\t.reg .b32 there, barrier;\n\tmapa.shared::cluster.u32 there, %0, %3;\n\t"
            "mapa.shared::cluster.u32 barrier, %1, %3;\n\t"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %2, [barrier];\n\t}" ::"r"(here),
            "r"(barrier), "r"(number), "r"(rank)
            : "memory");
    }
    // Until so many numbers have come, from all blocks together. One thread says beforehand how many.
    __device__ __forceinline__ void expect(u32 numbers) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(numbers * 4) : "memory");
    }
    __device__ __forceinline__ void wait_for_numbers() const {
        u32 done = 0;
        while (!done)
            asm volatile(
                "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;\n\t"
                "selp.u32 %0, 1, 0, done;\n\t}"
                : "=r"(done)
                : "r"(barrier)
                : "memory");
    }
};

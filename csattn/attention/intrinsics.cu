// The instructions that CUDA C has no name for. An emulator brings its own version of this file, and of nothing else.
// (Matrix products of tensor cores are in device_mma.cu.)

// 2 ** x, with a relative error of 2 ** -22; a result below the smallest normal number is 0.
__device__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The kernel may start while the one before it ends. Until this returns it reads only what no kernel of the step writes, and
// writes nothing.
__device__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Only after that, and not so early that the next kernel's blocks take room from this one's.
__device__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Copies of 16 bytes into shared memory, of which `count` are copied and the others become 0. They go on behind a
// thread's back, in groups: `wait_for_copies<N>` leaves the N last begun. By way of L1, more are in flight than past it.
__device__ void start_copy(unsigned to, long long from, int count) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(count) : "memory");
}
__device__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Loads into the second-level cache what is read later.
__device__ void bring_near(const char* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// What one block leaves for another that looks again and again: each float arrives whole, in any order.
__device__ void post(float* to, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
__device__ float4 peek(const float* from) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// A barrier of a block's warps in two halves: a warp that has arrived goes on, and waits when it needs what the others did.
struct Arrivals {
    unsigned place;  // of 8 bytes in shared memory

    __device__ Arrivals(const void* memory) : place((unsigned)__cvta_generic_to_shared(memory)) {
        // for all warps once the block has met
        if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place), "r"(WARPS) : "memory");
    }
    __device__ void arrive() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place) : "memory");
    }
    // round: how often all warps had arrived before; at most one ago.
    __device__ void wait(int round) const {
        unsigned done = 0;
        while (!done)
            asm volatile(
                "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                "selp.u32 %0, 1, 0, done;\n\t}"
                : "=r"(done)
                : "r"(place), "r"(round & 1)
                : "memory");
    }
};

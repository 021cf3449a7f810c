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
// and write nothing; only after it do they let the next kernel start.
__device__ __forceinline__ void wait_for_earlier() {
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
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

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
// The same, with constant distances in bytes from a place in shared memory and from an address.
template <int TO, int FROM> __device__ __forceinline__ void start_copy_at(u32 place, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(place), "l"(from), "n"(TO), "n"(FROM) : "memory");
}
// The compiler keeps it in a register, rather than make it again wherever it is used.
__device__ __forceinline__ u32 kept(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// What one block leaves for another that looks again and again: each float arrives whole, in any order.
__device__ __forceinline__ void post(float* to, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// (x & mask) | bits in one operation: it takes one constant, and the compiler would make two operations of two.
__device__ __forceinline__ u32 and_or(u32 x, u32 mask, u32 bits) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
}

// Products on tensor cores, each lane with its part of the matrices (see PTX, mma.m16n8k32 and mma.m16n8k16).
// d = c + a * b: a of 16 rows of signed bytes, b of 8 columns of unsigned ones, 32 long.
__device__ __forceinline__ void multiply_codes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// d += a * b of bfloat16, 16 long.
__device__ __forceinline__ void multiply_values(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Blocks of a cluster. What any thread of it wrote before is seen by all of them after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same shared variable in another block of the cluster.
template <class T> __device__ __forceinline__ T* in_block(T* here, u32 rank) {
    u64 there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
    return reinterpret_cast<T*>(there);
}

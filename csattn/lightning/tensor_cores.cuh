// Instructions for Hopper's tensor cores (wgmma), and for feeding them (sm_90a). The CPU emulator replaces this file.
#pragma once

#include "../cuda/intrinsics.cuh"

// Offset of a 16-byte unit of a 128-byte line in a block of lines, by wgmma's 128-byte swizzle.
__device__ __forceinline__ u32 offset_of(int line, int unit) { return line * 128 + ((unit ^ line % 8) << 4); }

// Sets the number of registers of each thread of the calling warpgroup: to more, or to fewer.
template <int COUNT> __device__ __forceinline__ void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Named barrier ID, of the first COUNT threads of the block.
template <int ID, int COUNT> __device__ __forceinline__ void sync_named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// Makes writes to shared memory that the thread did, or has observed, visible to wgmma and TMA (async proxy).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// wgmma's descriptor of an operand in shared memory, with 128-byte swizzle: groups of 8 lines of 128 bytes, 1024 bytes
// apart, whose 16-byte units are permuted by xor with the line's number. `to_next`: bytes to the next 64 columns, for
// an operand whose columns are not the dimension that is summed over.
__device__ __forceinline__ u64 operand_descriptor(u32 address, u32 to_next = 16) {
    return (address & 0x3ffff) >> 4 | static_cast<u64>(to_next >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// wgmma is asynchronous: between `begin_products` and `wait_for_products<LEFT>`, after which only the LEFT groups ended
// last may be in flight, no thread may touch the results. Of a result [64, N] a thread has, at [4 j + 2 i + e], row
// 16 warp + 8 i + lane / 4 and column 8 j + 2 (lane % 4) + e.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT, int COUNT> __device__ __forceinline__ void wait_for_products(float (&result)[COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(result[i])::"memory");
}
// The same wait without a result: before a result is touched, it must be passed to the version above.
template <int LEFT> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define REGISTERS_8(x, i) \
    "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), \
        "+f"(x[i + 7])
#define REGISTERS_32(x, i) REGISTERS_8(x, i), REGISTERS_8(x, i + 8), REGISTERS_8(x, i + 16), REGISTERS_8(x, i + 24)
#define REGISTERS_128(x) REGISTERS_32(x, 0), REGISTERS_32(x, 32), REGISTERS_32(x, 64), REGISTERS_32(x, 96)

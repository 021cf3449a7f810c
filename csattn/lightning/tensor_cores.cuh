// The instructions of Hopper's tensor cores and of what feeds them (sm_90a). An emulator brings its own version of this
// file.
#pragma once

#include "../cuda/intrinsics.cuh"

// Where 16 bytes of a line of 128 lie in a block of lines, as tensor cores want them.
__device__ __forceinline__ u32 offset_of(int line, int unit) { return line * 128 + ((unit ^ line % 8) << 4); }

// Registers of the calling warpgroup's threads, from now on.
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A barrier of the first COUNT threads of the block.
template <int ID, int COUNT> __device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// What the thread has written to shared memory, or seen written, tensor cores read from now on.
__device__ __forceinline__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where an operand lies: lines of 128 bytes, 8 of them 1024 bytes, their 16-byte units exchanged by xor with the line's
// number. `to_next`: bytes to the next 64 columns, where an operand's columns are not those that are summed over.
__device__ __forceinline__ u64 operand_at(u32 address, u32 to_next = 16) {
    return (address & 0x3ffff) >> 4 | static_cast<u64>(to_next >> 4) << 16 | 64ull << 32 | 1ull << 62;
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
// The same for all groups of products; their results are still to be waited for before they are touched.
template <int LEFT> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define REGISTERS_8(x, i) \
    "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), \
        "+f"(x[i + 7])
#define REGISTERS_32(x, i) REGISTERS_8(x, i), REGISTERS_8(x, i + 8), REGISTERS_8(x, i + 16), REGISTERS_8(x, i + 24)
#define REGISTERS_128(x) REGISTERS_32(x, 0), REGISTERS_32(x, 32), REGISTERS_32(x, 64), REGISTERS_32(x, 96)

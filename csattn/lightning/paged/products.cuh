// Products of a page of FP8 keys with a query's heads by wgmma. The CPU emulator replaces this file.
#pragma once

#include "../tensor_cores.cuh"

// A wgmma step sums over 32 channels, of which a thread has two words of each of its two keys. So that it can read its
// keys 16 bytes at a time, steps take channels in a permuted order: step s takes word s of every 16-byte unit.

// Writes 16 bytes of a head, the channels from 16 * unit, to where the products read them.
__device__ __forceinline__ void store_unit(char* query, int head, int unit, uint4 channels) {
    auto put = [&](int step, u32 word) {
        *reinterpret_cast<u32*>(query + offset_of(head, 2 * step + unit / 4) + unit % 4 * 4) = word;
    };
    put(0, channels.x), put(1, channels.y), put(2, channels.z), put(3, channels.w);
}

// result [64, 64] (+)= a [64, 32] * b [64, 32] transposed.
__device__ __forceinline__ void multiply_keys(float (&result)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32, %33, %34, %35}, %36, add, 1, 1;\n}"
        : REGISTERS_32(result, 0)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

// Multiplies a page's 64 keys by 64 heads. A thread gets, at [4 j + 2 i + e], the product of key
// 16 warp + 8 i + lane / 4 and head 8 j + 2 (lane % 4) + e.
__device__ __forceinline__ void multiply_page(float (&products)[32], const char* page, const char* query) {
    const int quad = threadIdx.x % 4, first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    uint4 low[2], high[2];  // of a key: units `quad` and 4 + quad
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4* const units = reinterpret_cast<const uint4*>(page + (first + 8 * i) * 128);
        const int odd = first % 2;  // neighbouring keys are read from different banks
        const uint4 a = units[quad + 4 * odd], b = units[quad + 4 - 4 * odd];
        low[i] = odd ? b : a, high[i] = odd ? a : b;
    }
    const u64 heads = operand_descriptor(shared_address(query));
    begin_products();
    multiply_keys(products, low[0].x, low[1].x, high[0].x, high[1].x, heads, 0);
    multiply_keys(products, low[0].y, low[1].y, high[0].y, high[1].y, heads + 2, 1);
    multiply_keys(products, low[0].z, low[1].z, high[0].z, high[1].z, heads + 4, 1);
    multiply_keys(products, low[0].w, low[1].w, high[0].w, high[1].w, heads + 6, 1);
    end_products();
    wait_for_products<0>(products);
}

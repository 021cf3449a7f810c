// Part 3, for contexts whose rows are coded (CODED): a tile's rows are decoded in place in shared memory.
//
// A coded row has the key's bytes at its start and the value's V_AT bytes later. Formats, to the bit, where d is a float16
// except in fp8:
//     float32, bfloat16, float16   plain values
//     q8_0    for each 32 values d, then 32 int8 q: q * d
//     q4_0    for each 32 values d, then 16 bytes, the j-th with q of value j in its low half and of value j + 16 in its high
//             half: (q - 8) * d
//     fp8     for the whole vector d as float32, then one e4m3 byte for each value: e4m3 * d
// A decoded value is a float32 that is rounded once, to ELEMENT: attention has the bits of attention to rows decoded beforehand.
//
// Defined by the caller: CODED, K_FORMAT and V_FORMAT (by their numbers below), V_AT, CONTEXT_ROW_BYTES.
#pragma once

#include "device_rows.cuh"

enum { FLOAT32, BFLOAT16, FLOAT16, Q8_0, Q4_0, FP8 };

// Fields of a row are aligned to 2 bytes only.
__device__ u32 two_bytes(const char* from) { return *(const u16*)from; }
__device__ u32 four_bytes(const char* from) { return two_bytes(from) | two_bytes(from + 2) << 16; }

// The i-th of four unsigned bytes as a float: the float 2 ** 23 + x has x in its low bits.
__device__ float whole_number(u32 bytes, int i) { return __uint_as_float(0x4b000000 | bytes >> 8 * i & 0xff) - 8388608.f; }

// Without its sign and shifted left by 7 bits, an e4m3 is the float16 of 2 ** -8 times its value, subnormal or not.
__device__ float e4m3(u32 bytes, int i) {
    const u32 code = bytes >> 8 * i;
    return half_as_float((u16)((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.f;
}

// Decode four values of a vector from the d-th on; d is a multiple of 4.
template <int FORMAT> __device__ float4 decode_four(const char* vector, int d) {
    float x[4];
    if (FORMAT == FLOAT32) {
        for (int i = 0; i < 4; i++) x[i] = __uint_as_float(four_bytes(vector + 4 * (d + i)));
    } else if (FORMAT == BFLOAT16) {
        for (int i = 0; i < 4; i++) x[i] = __uint_as_float(two_bytes(vector + 2 * (d + i)) << 16);
    } else if (FORMAT == FLOAT16) {
        for (int i = 0; i < 4; i++) x[i] = half_as_float(two_bytes(vector + 2 * (d + i)));
    } else if (FORMAT == FP8) {
        const float scale = __uint_as_float(four_bytes(vector));
        const u32 codes = four_bytes(vector + 4 + d);
        for (int i = 0; i < 4; i++) x[i] = e4m3(codes, i) * scale;
    } else if (FORMAT == Q8_0) {
        const char* block = vector + d / 32 * 34;
        const float scale = half_as_float(two_bytes(block));
        const u32 codes = four_bytes(block + 2 + d % 32) ^ 0x80808080;  // q + 128
        for (int i = 0; i < 4; i++) x[i] = (whole_number(codes, i) - 128.f) * scale;
    } else {
        const char* block = vector + d / 32 * 18;
        const float scale = half_as_float(two_bytes(block));
        const u32 codes = four_bytes(block + 2 + d % 16) >> d % 32 / 16 * 4 & 0x0f0f0f0f;
        for (int i = 0; i < 4; i++) x[i] = (whole_number(codes, i) - 8.f) * scale;
    }
    return make_float4(x[0], x[1], x[2], x[3]);
}

// Decode the first `count` rows of a tile to rows of ELEMENTs, in place. One warp does it, a few rows at a time.
__device__ void decode_rows(unsigned tile, int count) {
    constexpr int AT_ONCE = 4, FOURS = HEAD_DIM / 2, EACH = AT_ONCE * FOURS / 32;  // rows; groups of four in a row; of a lane
    char* rows = (char*)__cvta_shared_to_generic(tile);
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE, rows += AT_ONCE * PITCH) {
        Four decoded[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int number = i * 32 + threadIdx.x % 32, d = number % FOURS * 4;
            const char* row = rows + number / FOURS * PITCH;
            decoded[i] = pack_four(d < HEAD_DIM ? decode_four<K_FORMAT>(row, d) : decode_four<V_FORMAT>(row + V_AT, d - HEAD_DIM));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int number = i * 32 + threadIdx.x % 32;
            if (first + number / FOURS < count)
                *(Four*)(rows + number / FOURS * PITCH + number % FOURS * 4 * ELEMENT_BYTES) = decoded[i];
        }
    }
    __syncwarp();
}

// Part 2 for bf16 and f16: attention of one warp, on tensor cores.
#pragma once

#include "device_rows.cuh"
#include "products.cuh"

__device__ float4 load_four(const char* from) {
    const ushort4 x = *(const ushort4*)from;
    return make_float4(unpack(x.x), unpack(x.y), unpack(x.z), unpack(x.w));
}

typedef uint2 Four;
__device__ Four pack_four(float4 x) { return make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }

// Online softmax attention to a warp's tiles so far. The 16 rows of an mma are KV rows in the first product and dimensions in the
// second; its 8 columns are the heads. In both a lane holds rows lane / 4 and lane / 4 + 8 of columns 2 (lane % 4) and the next.
struct Attention {
    unsigned q[HEAD_DIM / 16][2];
    float max[2], sum[2];  // the sum is over the lane's own rows
    float out[HEAD_DIM / 16][4];

    __device__ void load_q(const char* q_heads) {
        const int lane = threadIdx.x % 32, head = lane / 4;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            const unsigned* from = (const unsigned*)q_heads + (head * HEAD_DIM + k * 16) / 2 + lane % 4;
            for (int i = 0; i < 2; i++) q[k][i] = head < HEADS ? from[4 * i] : 0;
        }
    }

    __device__ void clear() {
        for (int i = 0; i < 2; i++) max[i] = MINUS_INFINITY, sum[i] = 0.f;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            for (int i = 0; i < 4; i++) out[k][i] = 0.f;
    }

    // Add a tile, of which the first `count` rows exist. scale: softmax_scale * log2(e).
    __device__ void add(unsigned tile, int count, float scale, float cap) {
        const int lane = threadIdx.x % 32;
        float score[2][4] = {};  // two independent chains, to hide latency
        unsigned a[4], weights[2];
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            load_matrices(a, tile + lane % 16 * PITCH + (2 * k + lane / 16) * 16);
            multiply_add(score[k % 2], a, q[k]);
        }
        float p[4], top[2], kept[2];
        for (int i = 0; i < 4; i++)
            p[i] = lane / 4 + i / 2 * 8 < count ? as_logit((score[0][i] + score[1][i]) * scale, cap) : MINUS_INFINITY;
        for (int i = 0; i < 2; i++) top[i] = fmaxf(p[i], p[i + 2]);
        for (int step = 4; step < 32; step *= 2)
            for (int i = 0; i < 2; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(ALL_LANES, top[i], step));
        for (int i = 0; i < 2; i++) {
            top[i] = fmaxf(top[i], max[i]);
            kept[i] = exp2_approx(max[i] - top[i]);
            max[i] = top[i];
            p[i] = exp2_approx(p[i] - top[i]);
            p[i + 2] = exp2_approx(p[i + 2] - top[i]);
            sum[i] = sum[i] * kept[i] + p[i] + p[i + 2];
        }
        for (int i = 0; i < 2; i++) weights[i] = transpose(pack(p[2 * i], p[2 * i + 1]));
        const unsigned values = tile + ROW_BYTES / 2 + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            load_matrices_transposed(a, values + k * 32);
            for (int i = 0; i < 4; i++) out[k][i] *= kept[i % 2];
            multiply_add(out[k], a, weights);
        }
    }

    // Write the heads' products with both halves of each row of a tile to [HEADS][2][HEAD_DIM], where `products` points to
    // the tile's first row.
    __device__ void multiply(unsigned tile, float* products) const {
        const int lane = threadIdx.x % 32;
        float sum[2][4] = {};
        unsigned a[4];
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            for (int half = 0; half < 2; half++) {
                load_matrices(a, tile + lane % 16 * PITCH + half * (ROW_BYTES / 2) + (2 * k + lane / 16) * 16);
                multiply_add(sum[half], a, q[k]);
            }
        for (int i = 0; i < 4; i++) {
            const int head = lane % 4 * 2 + i % 2;
            if (head >= HEADS) continue;
            for (int half = 0; half < 2; half++)
                products[(head * 2 + half) * HEAD_DIM + lane / 4 + i / 2 * 8] = sum[half][i];
        }
    }

    __device__ void store(float* parts) {
        const int lane = threadIdx.x % 32;
        for (int step = 4; step < 32; step *= 2)
            for (int i = 0; i < 2; i++) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], step);
        for (int i = 0; i < 2; i++) {
            const int head = lane % 4 * 2 + i;
            if (head >= HEADS) continue;
            float* part = parts + head * PART;
            if (lane < 4) *(float2*)(part + ENDS_AT) = make_float2(max[i], sum[i]);
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++) {
                part[k * 16 + lane / 4] = out[k][i];
                part[k * 16 + lane / 4 + 8] = out[k][i + 2];
            }
        }
    }
};

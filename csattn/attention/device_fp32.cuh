// Part 2 for float32: attention of one warp, without tensor cores, which would round to 10 bits.
#pragma once

#include "device_rows.cuh"

__device__ float4 load_four(const char* from) { return *(const float4*)from; }
typedef float4 Four;
__device__ Four pack_four(float4 x) { return x; }

// Online softmax attention to a warp's tiles so far. Lanes r and r + 16 score row r, for the even and for the odd heads. A lane
// has every 32nd dimension of the output.
struct Attention {
    static constexpr int PAIRS = (HEADS + 1) / 2, SLICES = (HEAD_DIM + 31) / 32;
    const float4* q;
    float max[PAIRS], sum[PAIRS];  // of the heads of the lane's half
    float out[HEADS][SLICES];

    __device__ void load_q(const char* q_heads) { q = (const float4*)q_heads; }

    __device__ void clear() {
        for (int i = 0; i < PAIRS; i++) max[i] = MINUS_INFINITY, sum[i] = 0.f;
        for (int head = 0; head < HEADS; head++)
            for (int i = 0; i < SLICES; i++) out[head][i] = 0.f;
    }

    // The product of k and the i-th query head of the lane's half.
    __device__ float product(const float4* k, int i) const {
        const float4* head_q = q + min(2 * i + threadIdx.x % 32 / TILE, HEADS - 1) * (HEAD_DIM / 4);
        float sum = 0.f;
#pragma unroll 4
        for (int d = 0; d < HEAD_DIM / 4; d++) {
            const float4 x = head_q[d], y = k[d];
            sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
        return sum;
    }

    // Add a tile, of which the first `count` rows exist. scale: softmax_scale * log2(e).
    __device__ void add(unsigned tile, int count, float scale, float cap) {
        const int lane = threadIdx.x % 32;
        const float* rows = (const float*)__cvta_shared_to_generic(tile);
        const float4* k = (const float4*)(rows + lane % TILE * (PITCH / 4));
        float p[PAIRS], kept[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const float score = lane % TILE < count ? as_logit(product(k, i) * scale, cap) : MINUS_INFINITY;
            float top = score;
            for (int step = 1; step < TILE; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
            top = fmaxf(top, max[i]);
            kept[i] = exp2_approx(max[i] - top);
            max[i] = top;
            p[i] = exp2_approx(score - top);
            sum[i] = sum[i] * kept[i] + p[i];
        }
#pragma unroll
        for (int head = 0; head < HEADS; head++) {
            const float head_kept = __shfl_sync(ALL_LANES, kept[head / 2], head % 2 * TILE);
            for (int i = 0; i < SLICES; i++) out[head][i] *= head_kept;
        }
#pragma unroll 2
        for (int r = 0; r < TILE; r++) {
            const float* v = rows + r * (PITCH / 4) + HEAD_DIM + lane;
#pragma unroll
            for (int head = 0; head < HEADS; head++) {
                const float weight = __shfl_sync(ALL_LANES, p[head / 2], head % 2 * TILE + r);
#pragma unroll
                for (int i = 0; i < SLICES; i++)
                    if (i * 32 + lane < HEAD_DIM) out[head][i] += weight * v[i * 32];
            }
        }
    }

    // Write the heads' products with both halves of each row of a tile to [HEADS][2][HEAD_DIM], where `products` points to
    // the tile's first row.
    __device__ void multiply(unsigned tile, float* products) const {
        const int lane = threadIdx.x % 32;
        const float4* k = (const float4*)__cvta_shared_to_generic(tile) + lane % TILE * (PITCH / 16);
        for (int i = 0; i < PAIRS; i++) {
            const int head = 2 * i + lane / TILE;
            for (int half = 0; head < HEADS && half < 2; half++)
                products[(head * 2 + half) * HEAD_DIM + lane % TILE] = product(k + half * (HEAD_DIM / 4), i);
        }
    }

    __device__ void store(float* parts) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int head = 2 * i + lane / TILE;
            for (int step = 1; step < TILE; step *= 2) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], step);
            float* part = parts + head * PART;
            if (lane % TILE == 0 && head < HEADS) *(float2*)(part + ENDS_AT) = make_float2(max[i], sum[i]);
        }
#pragma unroll
        for (int head = 0; head < HEADS; head++)
#pragma unroll
            for (int i = 0; i < SLICES; i++)
                if (i * 32 + lane < HEAD_DIM) parts[head * PART + i * 32 + lane] = out[head][i];
    }
};

// Fourth part: what the rows that are not selected would give, estimated from their moments (ESTIMATE_REST).
//
// `csattn.rest.reference` is the definition. Moments lie in 2 + HEAD_DIM rows for each context and KV head, as
// `csattn.rest.device` makes them: two whose sum is the mean row, then, for each dimension, the covariances of all keys with
// that of the key and with that of the value. Products with q are in units of the softmax's logits. The covariances are
// tiles of the unit's first split, whose block makes one more part of the result of their products with q.
#pragma once

#include "device_rows.cuh"

constexpr float LOG2_E = 1.44269504f, SQRT_HALF = 0.70710678f;
constexpr float DENSITY_AT_0 = 0.39894228f;  // of the standard normal

__device__ float dot(float4 x, float4 y) { return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w; }

// Four dimensions of a mean: what it is rounded to, and what that leaves.
__device__ float4 load_mean(const char* from) {
    const float4 x = load_four(from), y = load_four(from + ROW_BYTES);
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// What the chosen share of a standard normal exceeds.
__device__ float cut_after(int num_chosen, int num_rows) {
    const int num_left = num_rows - num_chosen;
    const float of_rarer = normcdfinvf((float)min(num_chosen, num_left) / num_rows);
    return num_chosen < num_left ? -of_rarer : of_rarer;
}

// Logits are normal, those above the cut chosen. Of the others: log2 of the mean of their exponentials over all rows, and by
// how many variances weighing by these moves their mean from that of all rows.
__device__ float2 below_cut(float mean, float spread, float cut) {
    const float x = cut - spread;
    float log_mean, ratio;  // the density at x over the share below it
    if (x < 0.f) {          // the share itself may be too small for a float
        const float scaled = erfcxf(-x * SQRT_HALF) / 2;  // the share, over exp(-x * x / 2)
        ratio = DENSITY_AT_0 / scaled;
        log_mean = mean + cut * (spread - cut / 2) + logf(scaled);
    } else {
        const float share = normcdff(x);
        ratio = DENSITY_AT_0 * expf(-x * x / 2) / share;
        log_mean = mean + spread * spread / 2 + logf(share);
    }
    return make_float2(log_mean * LOG2_E, spread > 0.f ? (spread - ratio) / spread : 0.f);
}

// By one warp: post a head's part, of its products [2][HEAD_DIM] with the keys and with the values.
__device__ void estimate_rest(float* part, const float* products, const char* q, const Unit& unit) {
    const int lane = threadIdx.x % 32;
    if (unit.rest_tiles() == 0) {
        for (int i = 4 * lane; i < PART; i += 4 * 32)
            post(part + i, make_float4(i == ENDS_AT ? MINUS_INFINITY : 0.f, 0.f, 0.f, 0.f));
        return;
    }
    const float cut = cut_after(unit.far_len, unit.middle_len), log_rows = log2f((float)unit.middle_len);
    float mean = 0.f, square = 0.f;
    for (int d = 4 * lane; d < HEAD_DIM; d += 4 * 32) {
        const float4 head_q = load_four(q + d * ELEMENT_BYTES);
        mean += dot(head_q, load_mean(unit.means() + d * ELEMENT_BYTES));
        square += dot(head_q, *(const float4*)(products + d));
    }
    for (int step = 1; step < 32; step *= 2) {
        mean += __shfl_xor_sync(ALL_LANES, mean, step);
        square += __shfl_xor_sync(ALL_LANES, square, step);
    }
    const float2 rest = below_cut(mean, sqrtf(fmaxf(square, 0.f)), cut);
    for (int d = 4 * lane; d < HEAD_DIM; d += 4 * 32) {
        const float4 x = load_mean(unit.means() + ROW_BYTES / 2 + d * ELEMENT_BYTES);
        const float4 y = *(const float4*)(products + HEAD_DIM + d);
        post(part + d, make_float4(x.x + rest.y * y.x, x.y + rest.y * y.y, x.z + rest.y * y.z, x.w + rest.y * y.w));
    }
    if (lane == 0) post(part + ENDS_AT, make_float4(rest.x + log_rows, 1.f, 0.f, 0.f));
}


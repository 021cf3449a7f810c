// Part 4: attention to the rows that are not selected, estimated from moments (ESTIMATE_REST).
//
// `csattn.rest.reference` is the definition. Moments are 2 + HEAD_DIM rows for each context and KV head, in the layout of
// `csattn.rest.device`: two whose sum is the mean row, then, for each dimension, the covariances of the keys with that dimension
// of the key and of the value. The softmax scale is included, so products with q are logits. The covariances are tiles of the
// unit's first split, whose block turns their products with q into one more part of the result.
#pragma once

#include "device_rows.cuh"

constexpr float LOG2_E = 1.44269504f, SQRT_HALF = 0.70710678f;
constexpr float DENSITY_AT_0 = 0.39894228f;  // of the standard normal

__device__ float dot(float4 x, float4 y) { return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w; }

// Four dimensions of a mean: its rounded value plus the rounding error.
__device__ float4 load_mean(const char* from) {
    const float4 x = load_four(from), y = load_four(from + ROW_BYTES);
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// The quantile of the standard normal that the chosen share exceeds.
__device__ float cut_after(int num_chosen, int num_rows) {
    const int num_left = num_rows - num_chosen;
    const float of_rarer = normcdfinvf((float)min(num_chosen, num_left) / num_rows);
    return num_chosen < num_left ? -of_rarer : of_rarer;
}

// Logits are normal, and those above the cut are chosen. For the others, return log2 of the sum of their exponentials divided by
// the number of all rows, and by how many variances weighting by the exponentials shifts their mean from that of all rows.
__device__ float2 below_cut(float mean, float spread, float cut) {
    const float x = cut - spread;
    float log_mean, ratio;  // ratio: the density at x divided by the share below x
    if (x < 0.f) {          // the share itself may underflow
        const float scaled = erfcxf(-x * SQRT_HALF) / 2;  // the share divided by exp(-x * x / 2)
        ratio = DENSITY_AT_0 / scaled;
        log_mean = mean + cut * (spread - cut / 2) + logf(scaled);
    } else {
        const float share = normcdff(x);
        ratio = DENSITY_AT_0 * expf(-x * x / 2) / share;
        log_mean = mean + spread * spread / 2 + logf(share);
    }
    return make_float2(log_mean * LOG2_E, spread > 0.f ? (spread - ratio) / spread : 0.f);
}

// Post a head's part, by one warp, from its products [2][HEAD_DIM] with the covariances of the keys and of the values.
__device__ void estimate_rest(float* part, const float* products, const char* q, const Unit& unit) {
    const int lane = threadIdx.x % 32;
    if (unit.rest_tiles() == 0) {
        for (int i = 4 * lane; i < PART; i += 4 * 32)
            store_relaxed(part + i, make_float4(i == ENDS_AT ? MINUS_INFINITY : 0.f, 0.f, 0.f, 0.f));
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
        store_relaxed(part + d, make_float4(x.x + rest.y * y.x, x.y + rest.y * y.y, x.z + rest.y * y.z, x.w + rest.y * y.w));
    }
    if (lane == 0) store_relaxed(part + ENDS_AT, make_float4(rest.x + log_rows, 1.f, 0.f, 0.f));
}


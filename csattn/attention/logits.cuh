// A logit from a product. Defined by the caller: CAPPED.
#pragma once

#include "../cuda/intrinsics.cuh"

constexpr float LOG2E = 1.4426950408889634f;

#define MINUS_INFINITY __int_as_float(0xff800000)  // NVRTC has no math.h

// The logit in octaves, from x = q . k * softmax_scale * log2(e): cap * tanh(logit / cap) * log2(e) where logits are capped.
__device__ __forceinline__ float as_logit(float x, float cap) {
    return CAPPED ? cap * LOG2E * (1.f - 2.f / (1.f + exp2_approx(2.f / cap * x))) : x;
}

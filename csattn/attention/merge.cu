// Merges attention to the requests' own segments into a step's attention by their log-sum-exps. A block has one head of one row.
// Compiled for HEAD_DIM, THREADS, ELEMENT (bf16, f16 or f32) and ELEMENT_BYTES.

#include "../cuda/intrinsics.cuh"
#if ELEMENT_BYTES == 4
typedef float Element;
__device__ float as_float(Element x) { return x; }
__device__ Element rounded(float x) { return x; }
#else
#include "products.cuh"
typedef u16 Element;
__device__ float as_float(Element x) { return unpack(x); }
__device__ Element rounded(float x) { return static_cast<Element>(pack(x, 0.f)); }
#endif

extern "C" __global__ void merge_states(
    Element* out,            // [batch_size, num_q_heads, head_dim], changed
    const float* lse,        // [batch_size, num_q_heads]: log2 of the sum of exponentials
    const Element* own_out, const float* own_lse,  // like out and lse
    const int* own_lens      // [batch_size]; 0: the row has no own segments, and its result is left as it is
) {
    if (own_lens[blockIdx.x] == 0) return;
    const long long head = blockIdx.x * gridDim.y + blockIdx.y;
    const float top = fmaxf(lse[head], own_lse[head]);
    const float weight = exp2_approx(lse[head] - top), own_weight = exp2_approx(own_lse[head] - top);
    for (long long d = threadIdx.x, at = head * HEAD_DIM + d; d < HEAD_DIM; d += THREADS, at += THREADS)
        out[at] = rounded((weight * as_float(out[at]) + own_weight * as_float(own_out[at])) / (weight + own_weight));
}

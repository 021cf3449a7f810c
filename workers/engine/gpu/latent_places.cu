// Where rows of latents lie that a learned indexer has chosen. `chosen` has their numbers among what each row of a step sees, its
// context's rows first: ascending, -1 padded. One kernel counts the context's rows, which are then brought into slots; the other
// computes the places of all chosen rows. Compiled for THREADS.

#include "../../../csattn/cuda/warps.cuh"

__device__ __forceinline__ int rows_of_context(const int* context_lens, int context) { return context < 0 ? 0 : context_lens[context]; }

// One thread block for each row of the step.
extern "C" __global__ void __launch_bounds__(THREADS) count_far(
    const int* chosen,        // [batch_size, top_k]
    const int* context_ids,   // [batch_size], -1: none
    const int* context_lens,  // [num_contexts]
    int* num_far,             // [batch_size], written
    int top_k
) {
    __shared__ u32 scratch[WARPS];
    const u32 context_len = rows_of_context(context_lens, context_ids[blockIdx.x]);
    u32 far = 0, all;
    for (int i = threadIdx.x; i < top_k; i += THREADS) far += static_cast<u32>(chosen[blockIdx.x * top_k + i]) < context_len ? 1 : 0;
    sum_before(far, scratch, all);
    if (threadIdx.x == 0) num_far[blockIdx.x] = all;
}

// One thread for each chosen row; blockIdx.y is the row of the step.
extern "C" __global__ void __launch_bounds__(THREADS) place_chosen(
    const int* chosen,        // [batch_size, top_k]
    const int* slots,         // [batch_size, top_k], of the context's rows among the chosen ones
    const int* context_ids,   // [batch_size], -1: none
    const int* tail_ids,      // [batch_size]
    const int* context_lens,  // [num_contexts]
    int* places,              // [batch_size, top_k], written: numbers among the slots of all contexts, which all tails follow
    int top_k,
    int num_slots,   // of a context
    int first_own,   // where the tails begin
    int tail_capacity
) {
    const int row = blockIdx.y, i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= top_k) return;
    const int context = context_ids[row], context_len = rows_of_context(context_lens, context), at = chosen[row * top_k + i];
    int place = -1;
    if (at >= context_len)
        place = first_own + tail_ids[row] * tail_capacity + at - context_len;
    else if (at >= 0 && slots[row * top_k + i] >= 0)  // the engine splits steps so that each has a slot
        place = context * num_slots + slots[row * top_k + i];
    places[row * top_k + i] = place;
}

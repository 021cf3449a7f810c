// Last launch over lists: rank the candidates, mark those that fit, and write all marked keys in ascending order.

#include "choice.cuh"

// Mark the candidates that fit and lie in the part. Returns how many keys before the part are marked once all blocks are done.
__device__ u32 mark_candidates(const Choice& choice, const Part& part, u32* marks, u32* group_scores, u32* keys, u32* before) {
    const u32 number = choice.num_candidates, quota = choice.quota;
    const u32 padded = (number + 3) / 4 * 4;
    for (u32 i = threadIdx.x; i < padded; i += THREADS) {
        group_scores[i] = i < number ? choice.group_scores[i] : 0;
        keys[i] = i < number ? choice.keys[i] : 0;
    }
    for (u32 block = threadIdx.x; block < blockIdx.x; block += THREADS) atomicAdd(before, choice.above[block]);
    __syncthreads();
    for (u32 i = threadIdx.x; i < number; i += THREADS) {
        const u32 group_score = group_scores[i], key = keys[i];
        u32 better = 0, equal = 0;
#pragma unroll 8
        for (u32 k = 0; k < padded; k += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(group_scores + k);
            better += (four.x > group_score) + (four.y > group_score) + (four.z > group_score) + (four.w > group_score);
            equal += (four.x == group_score) + (four.y == group_score) + (four.z == group_score) + (four.w == group_score);
        }
        if (equal > 1)
            for (u32 k = 0; k < number; ++k) better += group_scores[k] == group_score && keys[k] < key;
        if (better >= quota) continue;
        const u32 place = key - part.first_key;  // keys before the part wrap around
        if (place < part.num_keys) atomicOr(&marks[place / 32], 1u << place % 32);
        if (static_cast<int>(key) < part.first_key) atomicAdd(before, 1u);
    }
    __syncthreads();
    return *before;
}

extern "C" __global__ void __launch_bounds__(THREADS) write_keys(
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len,
    u32* marks,             // as `find` writes them; the candidates' are added
    long long max_keys,
    const Choice* choices,  // [batch_size, num_index_heads]
    int* kv_indices,        // [batch_size, num_index_heads, max_top_k], written
    int* valid_len,         // [batch_size, num_index_heads], written
    long long max_top_k
) {
    alignas(16) __shared__ u32 group_scores[MAX_CANDIDATES];
    __shared__ u32 scratch[WARPS], before, keys[MAX_CANDIDATES];
    const int slot = blockIdx.z * gridDim.y + blockIdx.y;
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const Part part(context.num_keys);
    if (threadIdx.x == 0) before = 0;
    wait_then_let_next_start();
    const Choice& choice = choices[slot];
    const int wanted = num_wanted(context, choice);
    int* chosen = kv_indices + slot * max_top_k;
    for (long long i = wanted + blockIdx.x * THREADS + threadIdx.x; i < max_top_k; i += gridDim.x * THREADS) chosen[i] = -1;
    if (blockIdx.x == 0 && threadIdx.x == 0) valid_len[slot] = wanted;
    if (wanted == 0 || choice.quota == CHOSEN_BY_ONE_BLOCK) return;
    __syncthreads();
    marks += slot * (max_keys / 32) + part.first_key / 32;
    u32 written = mark_candidates(choice, part, marks, group_scores, keys, &before);
    for (int first = 0; first < part.num_keys / 32; first += THREADS) {
        const int word = first + threadIdx.x;
        u32 total, mark = word < part.num_keys / 32 ? __ldcg(&marks[word]) : 0;
        u32 at = written + sum_before(__popc(mark), scratch, total);
        written += total;
        for (; mark; mark &= mark - 1) chosen[at++] = part.first_key + word * 32 + __ffs(mark) - 1;
    }
}

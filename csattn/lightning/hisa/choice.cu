// Chooses HISA's candidates: for each query the first and the last blocks that it sees, and the best of the others.
//
// A thread block has one query; a thread keeps the scores of neighbouring key blocks in registers. The threshold
// that the wanted number of scores reach is found bit by bit (radix select); of scores equal to it the first are
// chosen.
//
// If lists are given, the query is also listed at each candidate. A list is cut into items of up to ITEM_QUERIES.
//
// Compiled for THREADS, EACH (key blocks of a thread) and ITEM_QUERIES.

#include "../topk/entries.cuh"

// The queries of each block, as `score.cu` reads them.
struct Lists {
    int *entries, *counts, *items, *num_items;  // entries: may be null
    int num_queries;

    __device__ __forceinline__ void add(int block, int place) const {
        const int at = atomicAdd(counts + block, 1), parts_each = (num_queries + ITEM_QUERIES - 1) / ITEM_QUERIES;
        entries[static_cast<long long>(block) * num_queries + at] = place;
        if (at % ITEM_QUERIES == 0) items[atomicAdd(num_items, 1)] = block * parts_each + at / ITEM_QUERIES;
    }
};

__device__ __forceinline__ u32 sum_of_all(u32 value, u32* scratch) {
    value = __reduce_add_sync(ALL_LANES, value);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    u32 sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += scratch[warp];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) choose_candidates(
    const float* __restrict__ scores,  // rows `row_stride` apart
    long long row_stride,
    long long max_blocks,              // at most THREADS * EACH
    const int* __restrict__ kv_lens,   // [queries]
    long long block_size,
    long long first_blocks,
    long long last_blocks,
    int* __restrict__ candidates,      // [queries, wanted], written: ascending, then -1
    long long wanted,
    int* __restrict__ num_keys,        // [queries], written: keys that a query sees in its candidates
    int* entries,                      // [blocks, queries], or null: places of candidates, written
    int* counts,                       // [blocks + 1], added to: entries of each block; then the number of items
    int* items,                        // written: block * most items of a block + the item's number, in any order
    long long listed_blocks,
    long long longer_than              // queries with no more keys than this are in no list
) {
    __shared__ u32 scratch[3][WARPS];
    wait_then_let_next_start();
    const int kv_len = kv_lens[blockIdx.x], size = block_size, first = threadIdx.x * EACH;
    const int end = min(static_cast<int>(max_blocks), (max(kv_len, 0) + size - 1) / size);
    scores += blockIdx.x * row_stride;
    candidates += blockIdx.x * wanted;
    const Lists lists{entries, counts, items, counts + listed_blocks, static_cast<int>(gridDim.x)};
    const bool is_listed = entries && kv_len > longer_than;
    u32 keys[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int block = first + i;
        const bool forced = block < first_blocks || block >= end - last_blocks;
        keys[i] = block < end ? (forced ? 0xffffffffu : order_of(scores[block])) : 0;
    }
    u32 threshold = 0, reached = end;
    for (int bit = 31; bit >= 0 && reached > wanted; --bit) {
        const u32 higher = threshold | 1u << bit;
        u32 count = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) count += keys[i] >= higher;
        count = sum_of_all(count, scratch[bit % 2]);
        if (count >= wanted) threshold = higher, reached = count;
    }
    u32 above = 0, same = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) above += keys[i] > threshold, same += keys[i] == threshold && first + i < end;
    const u32 room = wanted - sum_of_all(above, scratch[2]);
    above = sum_before(above, scratch[0]), same = sum_before(same, scratch[1]);  // not packed: may exceed 2 ** 16
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int block = first + i;
        const bool is_above = keys[i] > threshold, is_same = keys[i] == threshold && block < end;
        const bool chosen = is_above || (is_same && same < room);
        const u32 place = above + min(same, room);
        if (chosen) candidates[place] = block;
        if (chosen && is_listed && block < listed_blocks) lists.add(block, blockIdx.x * wanted + place);
        if (block == max(end, 1) - 1) {  // only the last one may be short
            const int missing = chosen ? max(end * size - kv_len, 0) : 0;
            num_keys[blockIdx.x] = min(end, static_cast<int>(wanted)) * size - missing;
        }
        above += is_above, same += is_same;
    }
    for (int i = end + threadIdx.x; i < wanted; i += THREADS) candidates[i] = -1;
}

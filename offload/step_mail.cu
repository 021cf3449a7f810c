// What a step and the host tell each other through pinned memory: the device posts rows and says so in a flag for each,
// the host posts selections and does the same. A flag's value only grows: whoever waits for a value sees all that was
// posted before it.
//
// Compiled for THREADS.

// All that the block's threads wrote is there for the host once it sees the flag.
__device__ void raise(volatile long long* flag, long long value) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *flag = value;
    }
}

// Block b posts row b.
extern "C" __global__ void __launch_bounds__(THREADS) post_rows(
    const unsigned* __restrict__ from,  // [num_rows, row_words]
    unsigned* __restrict__ to,          // [num_rows, row_words], pinned
    volatile long long* flags,          // [num_rows], pinned
    const long long* __restrict__ step, // [1]
    long long row_words, long long flags_per_step, long long flag_of_step) {
    const long long first = blockIdx.x * row_words;
    for (long long i = threadIdx.x; i < row_words; i += THREADS) to[first + i] = from[first + i];
    raise(flags + blockIdx.x, *step * flags_per_step + flag_of_step);
}

// Block (head, part, row) waits for the row's flag and fetches a part of the head's selection; idle rows get none.
extern "C" __global__ void __launch_bounds__(THREADS) fetch_selections(
    const int* __restrict__ context_ids,      // [num_rows], -1: idle
    const volatile int* posted_kv_indices,    // [num_rows, num_heads * max_top_k], pinned; heads of a row lie widths apart
    const volatile int* posted_valid_len,     // [num_rows, num_heads], pinned
    const volatile int* widths,               // [num_rows], pinned
    const volatile long long* flags,          // [num_rows], pinned
    int* __restrict__ kv_indices,             // [num_rows, num_heads, max_top_k]
    int* __restrict__ valid_len,              // [num_rows, num_heads]
    const long long* __restrict__ step,       // [1]
    long long max_top_k, long long flags_per_step, long long flag_of_step) {
    const int head = blockIdx.x, num_heads = gridDim.x, row = blockIdx.z;
    const bool idle = context_ids[row] < 0;
    if (!idle && threadIdx.x == 0) {
        const long long wanted = *step * flags_per_step + flag_of_step;
        while (flags[row] < wanted) {}
        __threadfence_system();
    }
    __syncthreads();
    const long long place = (long long)row * num_heads + head;
    const int found = idle ? 0 : posted_valid_len[place], width = idle ? 0 : widths[row];
    if (blockIdx.y == 0 && threadIdx.x == 0) valid_len[place] = found;
    const volatile int* posted = posted_kv_indices + (row * num_heads) * max_top_k + (long long)head * width;
#pragma unroll 4
    for (long long i = blockIdx.y * THREADS + threadIdx.x; i < max_top_k; i += gridDim.y * THREADS)
        kv_indices[place * max_top_k + i] = i < found ? posted[i] : -1;
}

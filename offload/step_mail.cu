// Messages between a step and the host through pinned memory: the device posts rows and raises a flag for each, the
// host posts selections and raises a flag for each head. A flag's value only increases, and a reader that has waited
// for a value sees everything that was posted before it.
//
// Compiled for THREADS.

// Sets the flag after all writes of the block: the host sees them once it sees the flag.
__device__ void raise(volatile long long* flag, long long value) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *flag = value;
    }
}

// Block b posts row b and raises its flag.
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

// Block (head, part, row) waits for the head's flag and fetches a part of its selection; idle rows get an empty one.
extern "C" __global__ void __launch_bounds__(THREADS) fetch_selections(
    const int* context_ids,                   // [num_rows], -1: idle
    // Not volatile: such reads of pinned memory would cross the link word by word. Not __restrict__: it would allow
    // reads before the wait.
    const int* posted_kv_indices,             // [num_rows, num_heads * max_top_k], pinned; head stride widths[row]
    const int* posted_valid_len,              // [num_rows, num_heads], pinned
    const int* widths,                        // [num_rows], pinned
    const volatile long long* flags,          // [num_rows, num_heads], pinned
    int* kv_indices,                          // [num_rows, num_heads, max_top_k]
    int* valid_len,                           // [num_rows, num_heads]
    const long long* step,                    // [1]
    long long max_top_k, long long flags_per_step, long long flag_of_step) {
    const int head = blockIdx.x, num_heads = gridDim.x, row = blockIdx.z;
    const bool idle = context_ids[row] < 0;
    const long long place = (long long)row * num_heads + head;
    if (!idle && threadIdx.x == 0) {
        const long long wanted = *step * flags_per_step + flag_of_step;
        while (flags[place] < wanted) __nanosleep(64);
        __threadfence_system();
    }
    __syncthreads();
    const int found = idle ? 0 : posted_valid_len[place], width = idle ? 0 : widths[row];
    if (blockIdx.y == 0 && threadIdx.x == 0) valid_len[place] = found;
    const int* posted = posted_kv_indices + (long long)row * num_heads * max_top_k + (long long)head * width;
    int* chosen = kv_indices + place * max_top_k;
    const int stride = gridDim.y * THREADS;
    for (int base = blockIdx.y * THREADS + threadIdx.x; base < max_top_k; base += 4 * stride) {
        int index[4];  // four loads in flight before the first is used
#pragma unroll
        for (int i = 0; i < 4; ++i) index[i] = base + i * stride < found ? posted[base + i * stride] : -1;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (base + i * stride < max_top_k) chosen[base + i * stride] = index[i];
    }
}

// How a block orders and writes the entries that it has kept. Compiled for THREADS, BY_POSITION.

// Sorts n entries, a power of two. Up to a stride of 32 a warp works on 64 neighbours that no other warp touches.
__device__ void sort_descending(u64* entries, int n) {
    for (int size = 2; size <= n; size *= 2)
        for (int stride = size / 2; stride > 0; stride /= 2) {
            for (int pair = threadIdx.x; pair < n / 2; pair += THREADS) {
                const int i = 2 * pair - (pair & (stride - 1));
                const u64 a = entries[i], b = entries[i + stride];
                if ((a < b) == ((i & size) == 0)) entries[i] = b, entries[i + stride] = a;
            }
            const int next_stride = stride > 1 ? stride / 2 : size;
            if (stride > 32 || next_stride > 32)
                __syncthreads();
            else
                __syncwarp();
        }
    __syncthreads();
}

__device__ __forceinline__ int place_of(int position, const int* pages, int page_size) {
    return pages ? pages[position / page_size] * page_size + position % page_size : position;
}

__device__ void write_best(Shared& s, int count, int k, const int* pages, int page_size, int* chosen) {
    int n = 2;
    while (n < count) n *= 2;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        if (i >= count) s.entries[i] = 0;
        if (BY_POSITION) s.entries[i] &= 0xffffffffu;  // counts down as the index goes up
    }
    __syncthreads();
    sort_descending(s.entries, n);
    for (int i = threadIdx.x; i < k; i += THREADS)
        chosen[i] = i < count ? place_of(0xffffffffu - static_cast<u32>(s.entries[i]), pages, page_size) : -1;
}

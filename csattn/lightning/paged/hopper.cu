// Indexer scores of each query's keys in a paged key cache, whose pages hold 64 FP8 keys and their scales.
//
// A thread block scores some neighbouring pages of one query. It starts bulk copies (TMA) of all of them at once and
// scores each as soon as its mbarrier completes.
//
// Compiled for THREADS (128), PAGES (at most, per thread block).

#include "../topk/entries.cuh"
#include "products.cuh"

constexpr int HEADS = 64, HEAD_DIM = 128, PAGE_SIZE = 64;
constexpr int VALUE_BYTES = PAGE_SIZE * HEAD_DIM, PAGE_BYTES = VALUE_BYTES + PAGE_SIZE * 4, UNITS = HEAD_DIM / 16;
constexpr int QUERY_UNITS = HEADS * UNITS;
static_assert(THREADS == 128, "a warpgroup");

struct alignas(1024) Shared {
    char query[HEADS * HEAD_DIM];
    char pages[PAGES][PAGE_BYTES];
    u64 arrivals[PAGES];
    int exists[PAGES];
};

// The score of this thread's key in a page that has been loaded.
__device__ float score_key(const Shared& s, int page, const float (&weights)[16], int key) {
    float products[32], sums[2] = {0, 0};
    multiply_page(products, s.pages[page], s.query);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) sums[i] += relu(products[4 * j + 2 * i + e]) * weights[2 * j + e];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], 1);
        sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], 2);
    }
    const float scale = reinterpret_cast<const float*>(s.pages[page] + VALUE_BYTES)[key];
    return (threadIdx.x % 4 ? sums[1] : sums[0]) * scale;
}

// Writes the best score of each group, in the order of `order_of`. A group is the 16 keys that a warp scores in each of
// `pages` neighbouring pages, or half of a warp's keys in one page.
struct GroupMaxima {
    u32* of_row;
    int pages;  // of a group; 0: a group is half of a warp's keys in a page
    u32 best;

    __device__ __forceinline__ void add(int page, u32 key, bool is_last) {
        best = max(best, key);
        if (!is_last && pages && (page + 1 & (pages - 1))) return;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const u32 first = __reduce_max_sync(ALL_LANES, lane % 2 ? 0 : best);
        const u32 second = __reduce_max_sync(ALL_LANES, lane % 2 ? best : 0);
        if (lane == 0 && pages) of_row[page / pages * 4 + warp] = max(first, second);
        if (lane < 2 && !pages) of_row[page * 8 + warp * 2 + lane] = lane ? second : first;
        best = 0;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) score_pages(
    const uint4* __restrict__ q,          // [num_queries, HEADS, HEAD_DIM]
    const float* __restrict__ weights,    // [num_queries, HEADS]
    const char* __restrict__ cache,       // [num_pages, PAGE_BYTES]
    const int* __restrict__ pages,        // [num_queries] lists `pages_stride` apart
    const int* __restrict__ kv_lens,      // [num_queries]
    float* __restrict__ scores,           // [num_queries, max_pages * PAGE_SIZE], written
    long long pages_stride, long long max_pages, long long num_pages,
    long long longer_than, long long pages_each,
    u32* __restrict__ group_maxima,       // [num_queries] lists `maxima_stride` apart, written, or null
    long long maxima_stride, long long group_keys,
    u32* __restrict__ counters, long long num_counters  // [num_queries, num_counters], set to 0
) {
    extern __shared__ Shared shared[];
    Shared& s = *shared;
    const long long query = blockIdx.y;
    const int own = threadIdx.x, quad = threadIdx.x % 4;
    const int first = blockIdx.x * static_cast<int>(pages_each);
    if (own < PAGES) init_barrier(&s.arrivals[own], 1);
    fence_async_proxy();  // for wgmma, and for TMA
    wait_then_let_next_start();
    for (int i = blockIdx.x * THREADS + own; i < num_counters; i += gridDim.x * THREADS)
        counters[query * num_counters + i] = 0;
    // independent loads are issued together
    const int place = min(first + own, static_cast<int>(max_pages) - 1);
    const int number = own < PAGES ? pages[query * pages_stride + place] : -1;
    const int num_keys = min(kv_lens[query], static_cast<int>(max_pages) * PAGE_SIZE);
    uint4 channels[QUERY_UNITS / THREADS];
#pragma unroll
    for (int i = 0; i < QUERY_UNITS / THREADS; ++i) channels[i] = q[query * QUERY_UNITS + i * THREADS + own];
    float of_heads[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) of_heads[i] = weights[query * HEADS + i / 2 * 8 + quad * 2 + i % 2];
    const int count = min(static_cast<int>(pages_each), (num_keys + PAGE_SIZE - 1) / PAGE_SIZE - first);
    if (num_keys <= longer_than || count <= 0) return;
    if (own < count) {
        s.exists[own] = 0 <= number && number < num_pages;
        if (s.exists[own]) {
            arrive_expecting(&s.arrivals[own], PAGE_BYTES);
            load_bytes(s.pages[own], cache + static_cast<long long>(number) * PAGE_BYTES, PAGE_BYTES, &s.arrivals[own]);
        }
    }
#pragma unroll
    for (int i = 0; i < QUERY_UNITS / THREADS; ++i) {
        const int unit = i * THREADS + own;
        store_unit(s.query, unit / UNITS, unit % UNITS, channels[i]);
    }
    fence_async_proxy();
    __syncthreads();
    scores += (query * max_pages + first) * PAGE_SIZE;
    GroupMaxima of_groups{group_maxima + query * maxima_stride, static_cast<int>(group_keys / 16), 0};
    // of every four threads, the first two have a key in each page
    const bool has_key = quad < 2;
    const int key = own / 32 * 16 + quad % 2 * 8 + own % 32 / 4;
    for (int page = 0; page < count; ++page, scores += PAGE_SIZE) {
        float score = __int_as_float(0xff800000);
        if (s.exists[page]) {
            wait_for(&s.arrivals[page], 0);
            score = score_key(s, page, of_heads, key);
        }
        const bool is_there = has_key && key < num_keys - (first + page) * PAGE_SIZE;
        if (is_there) scores[key] = score;
        if (group_maxima) of_groups.add(first + page, is_there ? max(order_of(score), 1u) : 0, page == count - 1);
    }
}

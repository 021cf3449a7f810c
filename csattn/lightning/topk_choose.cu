// The kernel of `topk_lists.cu`.

extern "C" __global__ void __launch_bounds__(THREADS, 2) choose_listed(
    const float* __restrict__ scores,   // rows `row_stride` apart
    long long row_stride, long long length,
    const int* __restrict__ legal_len,  // [rows]
    const uint4* __restrict__ bests,    // [rows, MAX_GROUPS at most]: keys by fours
    long long bests_stride, long long four_groups,  // the scores of four groups
    const int* __restrict__ pages,      // [rows] lists `pages_stride` apart, or null
    long long pages_stride, long long page_shift,
    Listed* listed, u32* counts,        // [rows, num_tiles, tile_len], [rows, num_tiles]
    long long tile_len,
    u32* counters,                      // [rows, COUNTERS]: bins, and the blocks that are done; all 0
    int* __restrict__ chosen,           // [rows, k]
    long long k
) {
    extern __shared__ __align__(16) Shared shared[];
    Shared& s = *shared;
    const long long row_number = blockIdx.y;
    const int tile = blockIdx.x;
    if (threadIdx.x == 0) s.num_few = 0;
    wait_for_earlier();
    chosen += row_number * k;
    if (pages) pages += row_number * pages_stride;
    scores += row_number * row_stride;
    const bool aligned = row_stride % 4 == 0 && reinterpret_cast<u64>(scores) % 16 == 0;
    // what does not depend on each other is loaded together, whether it is of use or not
    const int legal = load_now(legal_len + row_number);
    Row row{scores, static_cast<int>(length), aligned, pages, static_cast<int>(page_shift)};
    const int first = tile * static_cast<int>(tile_len) + 4 * threadIdx.x;
    uint4 keys = row.load(first);
    const u32 place = row.place_of(first);
    Bests best;
    const int fours = bests_stride / 4;
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v) {
        const int at = v * THREADS + threadIdx.x;
        best[v] = at < fours ? load_now(bests + row_number * fours + at) : make_uint4(0, 0, 0, 0);
    }
    row.num_scores = max(0, min(static_cast<int>(length), legal));
    if (row.num_scores <= k) return choose_all(row.num_scores, k, tile, gridDim.x, pages, 1 << page_shift, chosen);
    const int num_tiles = (row.num_scores + static_cast<int>(tile_len) - 1) / static_cast<int>(tile_len);
    if (tile >= num_tiles) return;
    const int num_fours = (row.num_scores + static_cast<int>(four_groups) - 1) / static_cast<int>(four_groups);
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v)
        if (v * THREADS + threadIdx.x >= num_fours) best[v] = make_uint4(0, 0, 0, 0);
    keys = row.without_others(keys, first);
    const Span span = find_span(s, best, fours > BEST_VECTORS / 2 * THREADS, k);
    const long long first_list = row_number * gridDim.x;
    const Lists lists{listed + first_list * tile_len, counts + first_list, static_cast<int>(tile_len), num_tiles};
    counters += row_number * COUNTERS;
    list_tile(s, row, lists, tile, keys, place, Digit(span), counters);
    if (is_last(counters + BINS, tile, num_tiles)) choose(s, lists, span, counters, k, chosen);
}

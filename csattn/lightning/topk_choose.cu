// The kernel of `topk_lists.cu`.

extern "C" __global__ void __launch_bounds__(THREADS, 1) choose_listed(
    const float* __restrict__ scores,   // rows `row_stride` apart
    long long row_stride, long long length,
    const int* __restrict__ legal_len,  // [rows]
    const uint4* __restrict__ bests,    // [rows, MAX_GROUPS at most]: keys by fours
    long long bests_stride, long long four_groups,  // the scores of four groups
    const int* __restrict__ pages,      // [rows] lists `pages_stride` apart, or null
    long long pages_stride, long long page_shift,
    u64* slots,                         // [rows, SLOTS]: 0
    u64* listed,                        // [rows, num_tiles, CHUNK]
    int* __restrict__ chosen,           // [rows, k]
    long long k
) {
    extern __shared__ __align__(16) Shared shared[];
    Shared& s = *shared;
    const long long row_number = blockIdx.y;
    const int tile = blockIdx.x;
    prepare(s);
    wait_for_earlier();
    chosen += row_number * k;
    if (pages) pages += row_number * pages_stride;
    scores += row_number * row_stride;
    const bool aligned = row_stride % 4 == 0 && reinterpret_cast<u64>(scores) % 16 == 0;
    // what does not depend on each other is loaded together, whether it is of use or not
    const int legal = load_now(legal_len + row_number);
    Bests best;
    const int fours = bests_stride / 4;
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v) {
        const int at = v * THREADS + threadIdx.x;
        best[v] = at < fours ? load_now(bests + row_number * fours + at) : make_uint4(0, 0, 0, 0);
    }
    Row row{scores, static_cast<int>(length), aligned, pages, static_cast<int>(page_shift)};
    const int first = tile * CHUNK + 4 * threadIdx.x;
    uint4 keys = row.load(first);
    const u32 place = row.place_of(first);
    row.num_scores = max(0, min(static_cast<int>(length), legal));
    if (row.num_scores <= k) return choose_all(row.num_scores, k, tile, gridDim.x, pages, 1 << page_shift, chosen);
    const int num_tiles = (row.num_scores + CHUNK - 1) / CHUNK;
    if (tile >= num_tiles) return;
    const int num_fours = (row.num_scores + static_cast<int>(four_groups) - 1) / static_cast<int>(four_groups);
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v)
        if (v * THREADS + threadIdx.x >= num_fours) best[v] = make_uint4(0, 0, 0, 0);
    const u32 floor = find_floor(s, best, k);
    keys = row.without_others(keys, first);
    const int tile_slots = SLOTS / gridDim.x;
    const Lists lists{slots + row_number * SLOTS, listed + row_number * gridDim.x * CHUNK, tile_slots, num_tiles};
    list_tile(s, lists, tile, keys, place, floor);
    if (tile == num_tiles - 1) choose(s, lists, floor, k, chosen);
}

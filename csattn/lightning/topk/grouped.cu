// The exact top-k of a row, in ascending order of index, given the best score of each group of its scores.
//
// A thread block has a tile of neighbouring scores. From the groups' best it finds a floor, a threshold that k scores
// of the row reach, and lists those of its tile that reach it: where the best scores are scattered, little more than k
// of a row. All blocks of a row find the same floor. The last tile's block waits for the others' lists and chooses
// among them.
//
// A tile has some slots, 0 at first. Its block fills all of them, and never with 0: so the last block sees by each slot
// whether it has been written, and needs no other synchronization. A tile that lists more than it has slots for marks
// the overflow in the first of them.
//
// `grouped_lists.cuh` has what all blocks do, `grouped_collect.cuh` what the last one does. Compiled for THREADS, SLOTS
// (of a row), ENTRIES (that the last block has room for), MAX_TILES (of a row), MAX_GROUPS, MANY_GROUPS (if more share
// the k-th best's digit, the next digit is used, too).

#include "grouped_collect.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_from_lists(
    const float* __restrict__ scores,   // rows `row_stride` apart
    long long row_stride, long long length,
    const int* __restrict__ legal_len,       // [rows]
    const uint4* __restrict__ group_maxima,  // [rows, MAX_GROUPS at most]: keys, in vectors of four
    long long maxima_stride, long long four_groups,  // how many scores four groups have
    const int* __restrict__ pages,      // [rows] lists `pages_stride` apart, or null
    long long pages_stride, long long page_shift,
    u64* slots,                         // [rows, SLOTS]: 0 on entry
    u64* listed,                        // [rows, num_tiles, CHUNK]
    int* __restrict__ chosen,           // [rows, k]
    long long num_chosen,
    const char* rows_a, long long stride_a, long long bytes_a,  // see `NextRows`
    const char* rows_b, long long stride_b, long long bytes_b, long long num_rows
) {
    extern __shared__ __align__(16) Shared shared[];
    Shared& s = *shared;
    const long long row_number = blockIdx.y;
    const int tile = blockIdx.x, first = tile * CHUNK + 4 * threadIdx.x, fours = maxima_stride / 4;
    const u32 k = num_chosen;
    scores += row_number * row_stride;
    group_maxima += row_number * fours + threadIdx.x;
    if (pages) pages += row_number * pages_stride;
    chosen += row_number * k;
    const bool aligned = row_stride % 4 == 0 && reinterpret_cast<u64>(scores) % 16 == 0;
    Row row{scores, static_cast<int>(length), aligned, pages, static_cast<int>(page_shift)};
    prepare(s);
    wait_then_let_next_start();
    // independent loads are issued together, whether they are needed or not
    const int legal = issue_load(legal_len + row_number), page = row.load_page(first);
    ThreadMaxima maxima;
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v)
        maxima[v] = v * THREADS + threadIdx.x < fours ? issue_load(group_maxima + v * THREADS) : make_uint4(0, 0, 0, 0);
    const float4 four = row.load(first);
    row.num_scores = max(0, min(static_cast<int>(length), legal));
    if (row.num_scores <= k) return choose_all(row.num_scores, k, tile, gridDim.x, pages, 1 << page_shift, chosen);
    const int num_tiles = (row.num_scores + CHUNK - 1) / CHUNK;
    if (tile >= num_tiles) return;
    const int num_fours = (row.num_scores + static_cast<int>(four_groups) - 1) / static_cast<int>(four_groups);
#pragma unroll
    for (int v = 0; v < BEST_VECTORS; ++v)
        if (v * THREADS + threadIdx.x >= num_fours) maxima[v] = make_uint4(0, 0, 0, 0);
    const Floor floor = find_floor(s, maxima, num_fours, k);
    const uint4 keys = row.keys_of(four, first);
    const u32 place = row.place_of(first, page);
    const int tile_slots = SLOTS / gridDim.x;
    const Lists lists{slots + row_number * SLOTS, listed + row_number * gridDim.x * CHUNK, tile_slots, num_tiles};
    const bool has_slots = list_tile(s, lists, tile, keys, place, floor.key);
    if (tile == num_tiles - 1) return choose(s, lists, floor, k, chosen);
    if (!has_slots) return;
    const NextRows a{rows_a, stride_a, static_cast<u32>(bytes_a)}, b{rows_b, stride_b, static_cast<u32>(bytes_b)};
    const u32 of_keys[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (of_keys[i] >= floor.key && place + i < num_rows) a.prefetch(place + i), b.prefetch(place + i);
}

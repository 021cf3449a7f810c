// The exact top-k of every row, reading each score once.
//
// A cluster of CLUSTER thread blocks shares a row; each block reads a run of its tiles. A block buffers entries that
// may be among the k best in shared memory. When the next tile might not fit, it finds a floor, a threshold that a
// little more than k of them reach, drops those below, and from then on adds only entries that reach it. At the end the
// blocks together find the k-th best entry of the row and drop all worse ones. By position, each block writes its
// entries after those of the blocks before it; by score, the first block collects, sorts and writes. All entries
// differ, since they contain their index, so the result is unique; whatever the scores, no entry is lost, because room
// is made first.
//
// Compiled for THREADS, CLUSTER, VECTORS (of four scores that a thread has of a tile), CAPACITY (entries of a block),
// BLOCKS_PER_SM, BY_POSITION.

#include "buffer.cuh"

struct Tile {
    float4 scores[VECTORS];
};

// Which score of a tile is the first of this thread's vector.
__device__ __forceinline__ int first_of_vector(int vector) { return (vector * THREADS + threadIdx.x) * 4; }

// Reads nothing at or beyond `end`.
__device__ __forceinline__ Tile load_tile(const float* scores, int end, bool aligned, int start) {
    Tile loaded;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int first = start + first_of_vector(v);
        if (aligned && first + 4 <= end) {
            loaded.scores[v] = __ldcs(reinterpret_cast<const float4*>(scores + first));
        } else {
            loaded.scores[v].x = first < end ? scores[first] : 0;
            loaded.scores[v].y = first + 1 < end ? scores[first + 1] : 0;
            loaded.scores[v].z = first + 2 < end ? scores[first + 2] : 0;
            loaded.scores[v].w = first + 3 < end ? scores[first + 3] : 0;
        }
    }
    return loaded;
}

// Adds the entries that reach the floor. Returns whether another tile might not fit.
__device__ __forceinline__ bool add_tile(Shared& s, const Tile& tile, int start, int end, u64 floor) {
    u64 entries[4 * VECTORS];
    u32 mask = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const float of_vector[4] = {tile.scores[v].x, tile.scores[v].y, tile.scores[v].z, tile.scores[v].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int index = start + first_of_vector(v) + i;
            entries[4 * v + i] = entry_of(of_vector[i], index);
            if (index < end && entries[4 * v + i] >= floor) mask |= 1u << (4 * v + i);
        }
    }
    if (!__any_sync(ALL_LANES, mask != 0)) return false;
    const Place place = reserve(s, __popc(mask));
    u32 at = place.first;
#pragma unroll
    for (int i = 0; i < 4 * VECTORS; ++i)
        if (mask >> i & 1) s.entries[at++] = entries[i];
    return place.end_of_warp > ROOM_LIMIT;
}

// The first block copies the other blocks' entries. Returns how many entries there are.
__device__ int collect(Shared& s) {
    u32 count = s.num_entries;
    for (int rank = 1; rank < CLUSTER; ++rank) {
        const u32 of_rank = *in_block(&s.num_entries, rank);
        for (u32 i = threadIdx.x; i < of_rank; i += THREADS) s.entries[count + i] = in_block(s.entries, rank)[i];
        count += of_rank;
    }
    __syncthreads();
    return count;
}

// How many entries the blocks before this one have.
__device__ int count_before(const Shared& s, int rank) {
    int before = 0;
    for (int other = 0; other < rank; ++other) before += *in_block(&s.num_entries, other);
    return before;
}

// Writes the block's entries in ascending order of position. Positions are at least `first`, and less than `end`.
__device__ void write_ascending(Shared& s, int first, int end, const int* pages, int page_size, int* chosen) {
    constexpr int WORDS = 2 * BINS, WORDS_EACH = WORDS / THREADS;
    const int count = s.num_entries;
    if (end - first > 32 * WORDS) {
        for (int i = threadIdx.x; i < count; i += THREADS) s.entries[i] &= 0xffffffffu;  // counts down with the index
        return write_sorted(s.entries, count, count, pages, page_size, chosen);
    }
    u32* marks = s.bins[0];
    __syncthreads();
    for (int i = threadIdx.x; i < WORDS; i += THREADS) marks[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const u32 place = index_of(s.entries[i]) - first;
        atomicOr(&marks[place / 32], 1u << place % 32);
    }
    __syncthreads();
    u32 own_words[WORDS_EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i) sum += __popc(own_words[i] = marks[threadIdx.x * WORDS_EACH + i]);
    u32 at = sum_before(sum, s.scratch);
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i)
        for (u32 word = own_words[i]; word; word &= word - 1) {
            const int place = (threadIdx.x * WORDS_EACH + i) * 32 + __ffs(word) - 1;
            chosen[at++] = place_of(first + place, pages, page_size);
        }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_PER_SM) select_top_k(
    const float* __restrict__ scores,   // rows `row_stride` apart
    long long row_stride, long long length,
    const int* __restrict__ legal_len,  // [rows], or null: `length`
    const int* __restrict__ pages,      // [rows] lists `pages_stride` apart, or null: positions are written as they are
    long long pages_stride, long long page_size,
    int* __restrict__ chosen,           // [rows, k]
    long long k
) {
    extern __shared__ Shared shared[];
    Shared& s = *shared;
    const int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    scores += row * row_stride;
    chosen += row * k;
    if (pages) pages += row * pages_stride;
    if (threadIdx.x == 0) s.num_entries = 0;
    wait_then_let_next_start();
    const int num_scores = max(0, min(static_cast<int>(length), legal_len ? legal_len[row] : static_cast<int>(length)));
    if (BY_POSITION && num_scores <= k) return choose_all(num_scores, k, rank, CLUSTER, pages, page_size, chosen);
    __syncthreads();

    const bool aligned = row_stride % 4 == 0 && reinterpret_cast<u64>(scores) % 16 == 0;
    const int tiles_each = ((num_scores + TILE - 1) / TILE + CLUSTER - 1) / CLUSTER;
    const int first = min(rank * tiles_each * TILE, num_scores), end = min(first + tiles_each * TILE, num_scores);
    u64 floor = 0;
    Tile tile = load_tile(scores, end, aligned, first);
    for (int start = first; start < end; start += TILE) {
        const Tile next = load_tile(scores, end, aligned, start + TILE);
        const bool full = add_tile(s, tile, start, end, floor);
        if (__syncthreads_or(full)) floor = make_room(s, k);
        tile = next;
    }
    __syncthreads();

    u32 num_entries = s.num_entries;
    EntryRange range = find_range(s);
    if (CLUSTER > 1) range = join_ranges(s, num_entries);
    if (num_entries > k) drop_below(s, find_threshold<true>(s, range, k, k));
    if (CLUSTER > 1) cluster_sync();  // all blocks have dropped theirs
    if (BY_POSITION)
        write_ascending(s, first, end, pages, page_size, chosen + count_before(s, rank));
    else if (rank == 0)
        write_best(s.entries, collect(s), k, pages, page_size, chosen, s.bins[0], s.scratch);
    if (CLUSTER > 1) cluster_sync();  // other blocks read a block's shared memory until here
}

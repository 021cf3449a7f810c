// Whose queries a warp multiplies with which tiles of keys, and the codes' way into shared memory.
#pragma once

#include "codes.cuh"

constexpr int TILE_BLOCKS = TILE_KEYS / BLOCK_KEYS;
constexpr int GROUP_ROWS = GROUP_SIZE < 16 ? 16 / GROUP_SIZE : 1;  // rows of the batch that go together
constexpr int CHUNK = 32;                                         // pieces of 16 bytes: of half a block's words of a group
constexpr int BLOCK_CHUNKS = 2 * WORD_GROUPS;
constexpr int MOST_QUERIES = (BATCH < GROUP_ROWS ? BATCH : GROUP_ROWS) * GROUP_SIZE;
constexpr bool COUNTS = SCORES && GROUP_SIZE > 1;  // scores by octave
static_assert(GROUP_SIZE <= 16, "the queries of a group are rows of one product");

// Rows of the batch that continue one context.
struct RowGroup {
    int context_id, num_keys, num_tiles, num_rows;
    int first_tile;  // of all groups' tiles, head after head
    int rows[GROUP_ROWS];
};

// For the whole block: the rows of the batch that go together; one more group follows, of nothing. Returns how many there are.
__device__ int find_groups(const int* context_ids, const int* context_lens, RowGroup* groups) {
    __shared__ int ids[BATCH], tiles[BATCH];  // of a group's first row: its tiles; -1: of another row
    for (int b = threadIdx.x; b < BATCH; b += THREADS) ids[b] = context_ids[b];
    __syncthreads();
    for (int b = threadIdx.x; b < BATCH; b += THREADS) {
        int rank = 0;  // among the rows with its context
        for (int other = 0; other < b; ++other) rank += ids[other] == ids[b];
        const bool is_first = ids[b] >= 0 && rank % GROUP_ROWS == 0;
        tiles[b] = is_first ? (context_lens[ids[b]] + TILE_KEYS - 1) / TILE_KEYS : -1;
    }
    __syncthreads();
    int num_groups = 0, num_tiles = 0;
    for (int b = 0; b < BATCH; ++b) {
        if (tiles[b] < 0) continue;
        if (b % THREADS == threadIdx.x) {
            RowGroup& group = groups[num_groups];
            group.context_id = ids[b], group.num_keys = context_lens[ids[b]], group.num_tiles = tiles[b];
            group.first_tile = num_tiles;
            group.num_rows = 0;
            for (int row = b; row < BATCH && group.num_rows < GROUP_ROWS; ++row)
                if (ids[row] == ids[b]) group.rows[group.num_rows++] = row;
        }
        ++num_groups;
        num_tiles += tiles[b] * NUM_HEADS;
    }
    if (threadIdx.x == 0) groups[num_groups].first_tile = num_tiles;
    __syncthreads();
    return num_groups;
}

// A way through neighbouring tiles.
struct Walk {
    const RowGroup* group;
    int head, tile, tiles_left;

    __device__ __forceinline__ Walk(const RowGroup* groups, int first, int end) : group(groups), tiles_left(end - first) {
        if (tiles_left <= 0) return;
        while (first >= group[1].first_tile) ++group;
        head = (first - group->first_tile) / group->num_tiles;
        tile = (first - group->first_tile) % group->num_tiles;
    }
    __device__ __forceinline__ bool goes_on() const { return tiles_left > 0; }
    __device__ __forceinline__ int num_blocks() const {
        return min(TILE_BLOCKS, (group->num_keys - tile * TILE_KEYS + BLOCK_KEYS - 1) / BLOCK_KEYS);
    }
    __device__ __forceinline__ void next() {
        --tiles_left;
        if (++tile < group->num_tiles) return;
        tile = 0;
        if (++head == NUM_HEADS) enter_next_group();
    }
    __device__ __forceinline__ void enter_next_group() {
        head = tile = 0;
        do ++group;
        while (tiles_left > 0 && group->num_tiles == 0);
    }
};

// The blocks of those tiles, copied in their order: of a context they lie one after the other, whatever their heads. Eight lanes
// copy 32 keys' word, 128 bytes side by side: requests to the second-level cache are few. Who reads what they copy, see codes.cu.
struct Source {
    Walk walk;
    const Sketch* sketches;
    const u32* block;  // at what the lane copies
    int blocks_left;   // in the group
    u32 place;         // in a stage, in bytes

    __device__ __forceinline__ Source(const Walk& walk, const Sketch* sketches)
        : walk(walk), sketches(sketches), blocks_left(0), place(kept(16 * place_of(threadIdx.x % 8 * 4 + threadIdx.x % 32 / 8))) {
        enter_group();
    }

    __device__ __forceinline__ void enter_group() {
        if (!walk.goes_on()) return;
        const RowGroup& group = *walk.group;
        const int in_group = min(walk.tiles_left, group.num_tiles * NUM_HEADS - (walk.head * group.num_tiles + walk.tile));
        const int lane = threadIdx.x % 32, first = blocks_before(walk.head * group.num_tiles + walk.tile);
        blocks_left = blocks_before(walk.head * group.num_tiles + walk.tile + in_group) - first;
        block = sketches[group.context_id].codes + static_cast<long long>(first) * (WORDS * BLOCK_KEYS) + lane / 8 * BLOCK_KEYS + lane % 8 * 4;
        walk.tiles_left -= in_group;
    }
    __device__ __forceinline__ int blocks_before(int tile) const {
        const int num_tiles = walk.group->num_tiles, of_head = (walk.group->num_keys + BLOCK_KEYS - 1) / BLOCK_KEYS;
        return tile / num_tiles * of_head + min(tile % num_tiles * TILE_BLOCKS, of_head);
    }

    template <int I> __device__ __forceinline__ void copy_groups(u32 to) const {
        constexpr int FIRST = I < FINE_GROUPS ? 4 * I : FINE + 4 * (I - FINE_GROUPS), END = I < FINE_GROUPS ? FINE : WORDS;
        if (FIRST + 4 <= END || FIRST + static_cast<int>(threadIdx.x) % 32 / 8 < END) {  // for lane 4 r + c, r = lane % 8, c = lane / 8
            start_copy_at<2 * I * CHUNK * 16, FIRST * BLOCK_KEYS * 4>(to, block);
            start_copy_at<(2 * I + 1) * CHUNK * 16, (FIRST * BLOCK_KEYS + HALF_KEYS) * 4>(to, block);
        }
        if constexpr (I + 1 < WORD_GROUPS) copy_groups<I + 1>(to);
    }

    // Start copying the next block, one group of copies, into a stage [BLOCK_CHUNKS][CHUNK].
    __device__ __forceinline__ void copy_next(uint4* stage) {
        if (blocks_left > 0) {
            copy_groups<0>(static_cast<u32>(__cvta_generic_to_shared(stage)) + place);
            block += WORDS * BLOCK_KEYS;
            if (--blocks_left == 0 && walk.goes_on()) {
                walk.enter_next_group();
                enter_group();
            }
        }
        end_copy_group();
    }
};

// A warp's ring of blocks, STAGES - 1 of them in flight.
struct Ring {
    uint4* stages;  // [STAGES][BLOCK_CHUNKS][CHUNK]
    int stage;

    __device__ __forceinline__ uint4* at(int stage) const { return stages + stage * (BLOCK_CHUNKS * CHUNK); }
    __device__ __forceinline__ void next() { stage = stage + 1 == STAGES ? 0 : stage + 1; }
};

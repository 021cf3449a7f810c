// Which tiles of keys a warp takes, with which queries it multiplies them, and how codes are copied into shared memory.
#pragma once

#include "codes.cuh"

constexpr int TILE_BLOCKS = TILE_KEYS / BLOCK_KEYS;
constexpr int GROUP_ROWS = GROUP_SIZE < 16 ? 16 / GROUP_SIZE : 1;  // rows of the batch that share a product
constexpr int BLOCK_PIECES = WORDS * WORD_PIECES;                  // of 16 bytes
constexpr int MOST_QUERIES = (BATCH < GROUP_ROWS ? BATCH : GROUP_ROWS) * GROUP_SIZE;
constexpr bool COUNTS = SCORES && GROUP_SIZE > 1;  // whether scores are counted by octave
static_assert(GROUP_SIZE <= 16, "the queries of a group are rows of one product");

// Rows of the batch that continue one context.
struct RowGroup {
    int context_id, num_keys, num_tiles, num_rows;
    int first_tile;  // its number among all groups' tiles, which are counted head after head
    int rows[GROUP_ROWS];
};

// By the whole block: group the rows of the batch by their context. Returns the number of groups; an empty one follows them.
__device__ int find_groups(const int* context_ids, const int* context_lens, RowGroup* groups) {
    __shared__ int ids[BATCH], tiles[BATCH];  // tiles: a context's for the first row of a group, -1 for others
#pragma unroll 1
    for (int b = threadIdx.x; b < BATCH; b += THREADS) ids[b] = context_ids[b];
    __syncthreads();
#pragma unroll 1
    for (int b = threadIdx.x; b < BATCH; b += THREADS) {
        int rank = 0;  // among the rows with the same context
#pragma unroll 1
        for (int other = 0; other < b; ++other) rank += ids[other] == ids[b];
        const bool is_first = ids[b] >= 0 && rank % GROUP_ROWS == 0;
        tiles[b] = is_first ? (context_lens[ids[b]] + TILE_KEYS - 1) / TILE_KEYS : -1;
    }
    __syncthreads();
    int num_groups = 0, num_tiles = 0;
#pragma unroll 1
    for (int b = 0; b < BATCH; ++b) {
        if (tiles[b] < 0) continue;
        if (b % THREADS == threadIdx.x) {
            RowGroup& group = groups[num_groups];
            group.context_id = ids[b], group.num_keys = context_lens[ids[b]], group.num_tiles = tiles[b];
            group.first_tile = num_tiles;
            group.num_rows = 0;
#pragma unroll 1
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

// An iterator over neighbouring tiles.
struct TileIterator {
    const RowGroup* group;
    int head, tile, tiles_left;

    __device__ __forceinline__ TileIterator(const RowGroup* groups, int first, int end) : group(groups), tiles_left(end - first) {
        if (tiles_left <= 0) return;
        while (first >= group[1].first_tile) ++group;
        head = (first - group->first_tile) / group->num_tiles;
        tile = (first - group->first_tile) % group->num_tiles;
    }
    __device__ __forceinline__ bool has_tile() const { return tiles_left > 0; }
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

// The blocks of those tiles, in their order: a context's are contiguous, also across heads.
struct BlockStream {
    TileIterator tiles;
    const Sketch* sketches;
    const u32* block;
    int blocks_left;  // in the group

    __device__ __forceinline__ BlockStream(const TileIterator& tiles, const Sketch* sketches)
        : tiles(tiles), sketches(sketches), blocks_left(0) {
        enter_group();
    }

    __device__ __forceinline__ void enter_group() {
        if (!tiles.has_tile()) return;
        const RowGroup& group = *tiles.group;
        const int in_group = min(tiles.tiles_left, group.num_tiles * NUM_HEADS - (tiles.head * group.num_tiles + tiles.tile));
        const int first = blocks_before(tiles.head * group.num_tiles + tiles.tile);
        blocks_left = blocks_before(tiles.head * group.num_tiles + tiles.tile + in_group) - first;
        block = sketches[group.context_id].codes + static_cast<long long>(first) * (WORDS * BLOCK_KEYS);
        tiles.tiles_left -= in_group;
    }
    __device__ __forceinline__ int blocks_before(int tile) const {
        const int num_tiles = tiles.group->num_tiles, of_head = (tiles.group->num_keys + BLOCK_KEYS - 1) / BLOCK_KEYS;
        return tile / num_tiles * of_head + min(tile % num_tiles * TILE_BLOCKS, of_head);
    }

    // The next block; null if there is none.
    __device__ __forceinline__ const u32* next() {
        if (blocks_left == 0) return nullptr;
        const u32* here = block;
        block += WORDS * BLOCK_KEYS;
        if (--blocks_left == 0 && tiles.has_tile()) {
            tiles.enter_next_group();
            enter_group();
        }
        return here;
    }
};

// A warp's ring buffer of blocks of 64 keys: STAGES - 1 of them are copied asynchronously while the warp reads one.
struct Ring {
    const uint4* stages;  // [STAGES][BLOCK_PIECES]
    u32 place, arrived;   // shared_address of the stages, and of [STAGES] mbarriers
    int stage;
    u32 parity;

    __device__ __forceinline__ Ring(uint4* stages, u64* barriers)
        : stages(stages), place(keep_in_register(shared_address(stages))),
          arrived(keep_in_register(shared_address(barriers))), stage(0), parity(0) {
        if (threadIdx.x % 32 < STAGES) init_barrier(barriers + threadIdx.x % 32, ARRIVALS_PER_LOAD);
        fence_barrier_init();
        __syncwarp();
    }

    // Start copying the next block into a stage. All lanes must have read what was in it.
    __device__ __forceinline__ void fill(int to, BlockStream& stream) const {
        const u32* block = stream.next();
        if (block == nullptr) return;
        load_by_warp(
            1, BLOCK_PIECES * 16, arrived + 8 * to, [&](u32) { return place + to * (BLOCK_PIECES * 16); }, [&](u32) { return block; });
    }
    __device__ __forceinline__ int last_read() const { return stage > 0 ? stage - 1 : STAGES - 1; }
    // Wait for the next block.
    __device__ __forceinline__ const uint4* wait() const {
        wait_for(arrived + 8 * stage, parity);
        return stages + stage * BLOCK_PIECES;
    }
    __device__ __forceinline__ void next() {
        if (++stage < STAGES) return;
        stage = 0, parity ^= 1;
    }
};

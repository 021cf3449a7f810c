// Decode attention of one step, part 1: where a unit's KV rows are, and how they are copied into shared memory.
//
// A unit is one row of the batch and HEADS of its query heads, which share a selection; SHARES neighbouring units have the same
// selection. Its KV rows are in this order: the selected far rows, the resident rows, the tail. Before them, at negative
// positions, are covariances in the layout of rows, from whose products with q attention to the rows that are not selected is
// estimated (device_rest.cuh). This is split-K: tiles of 16 rows are divided among the unit's NUM_SPLITS splits. A split has
// neighbouring tiles, so that a block stays within few pages of memory, and the first split has all covariances. The warps take
// a split's tiles in turn. What a warp sums depends neither on the batch nor on where a row is.
//
// A context's rows may be coded (device_coded.cuh); tails and covariances are not.
//
// Defined by the caller: HEAD_DIM, HEADS, ROW_UNITS (of a row of the batch), SHARES, NUM_KV_HEADS, ELEMENT (bf16, f16 or f32),
// ELEMENT_BYTES, CODED, CONTEXT_ROW_BYTES, NUM_SPLITS, THREADS, STAGES, ESTIMATE_REST, REST_PARTS, LOCAL, CAPPED, SINKS.
#pragma once

#include "../cuda/warps.cuh"
#include "logits.cuh"

constexpr int TILE = 16;  // KV rows
constexpr int ROW_BYTES = 2 * HEAD_DIM * ELEMENT_BYTES;  // K, then V
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int PITCH = ROW_BYTES + 16;  // an odd number of chunks: the same chunk of 8 rows is in 8 different banks
constexpr int TILE_BYTES = TILE * PITCH;
constexpr int RING_BYTES = STAGES * TILE_BYTES;  // a warp's ring buffer of tiles in flight
constexpr int REST_TILES = ESTIMATE_REST ? HEAD_DIM / TILE : 0;
constexpr long long MOMENTS_BYTES = (2 + HEAD_DIM) * ROW_BYTES;
static_assert(CODED || CONTEXT_ROW_BYTES == ROW_BYTES, "only coded rows have other bytes");
static_assert(CONTEXT_ROW_BYTES % 16 == 0 && CONTEXT_ROW_BYTES <= ROW_BYTES, "a coded row is copied to where it is decoded");
static_assert(HEAD_DIM % 16 == 0 && HEADS >= 1 && HEADS <= 8, "tiles are 16 wide and pad a unit's heads to 8");

// A part of a result: each head's output, unnormalised, then the maximum of its scores and the sum of its weights.
constexpr int PART = HEAD_DIM + 4;  // floats; keeps parts on 16 bytes
constexpr int ENDS_AT = HEAD_DIM;

struct Unit {
    long long far, spill, resident, tail;  // addresses of the first row
    long long rest_end;                    // end address of the covariances
    const int* ids;                        // of the far rows
    int far_len, resident_len, tail_len, total;
    int middle_len;                        // rows that may be selected

    __device__ void set_far_len(int len) {
        far_len = len;
        total = far_len + resident_len + tail_len;
    }

    __device__ const char* means() const { return (const char*)rest_end - MOMENTS_BYTES; }
    // The number of tiles of covariances: 0 if nothing is left to estimate.
    __device__ int rest_tiles() const { return far_len < middle_len ? REST_TILES : 0; }

    // The first tile of a split; and the first that this warp takes of them: it takes every WARPS-th. Splits begin with
    // different warps, so that it is not always the same warps that get one tile more.
    __device__ int first_tile(int split) const {
        const int before = rest_tiles(), tile = (before + (total + TILE - 1) / TILE) * split / NUM_SPLITS - before;
        return ESTIMATE_REST && split > 0 ? max(tile, 0) : tile;
    }
    __device__ int warps_tile(int split) const {
        return first_tile(split) + (threadIdx.x / 32 + split * (WARPS > 3 ? WARPS - 3 : 1)) % WARPS;
    }
    __device__ static int position(int tile) { return tile * TILE + threadIdx.x % TILE; }  // of the lane's row
    // So many rows at the start of a tile are coded; none if it is not positive.
    __device__ int num_coded(int tile) const { return CODED && tile >= 0 ? far_len + resident_len - tile * TILE : 0; }
    __device__ int id_at(int position) const { return (unsigned)position < far_len ? ids[position] : 0; }

    __device__ long long row_at(int position, int id) const {
        long long first = id >= 0 ? far : spill;
        int row = id >= 0 ? id : -2 - id;
        if (position >= far_len) {
            const bool in_tail = position >= far_len + resident_len;
            first = in_tail ? tail : resident;
            row = position - far_len - (in_tail ? resident_len : 0);
        } else if (ESTIMATE_REST && position < 0) {
            first = rest_end;
            row = position;
        }
        return first + (long long)row * (position >= 0 && position < far_len + resident_len ? CONTEXT_ROW_BYTES : ROW_BYTES);
    }
};

static_assert(sizeof(Unit) == 72, "device_blocks.UNIT_BYTES");

// An iterator over the tiles of its block's items that a warp takes, in order. An item is a split of a unit.
struct Tiles {
    const Unit* unit;
    int num_items, split, tile, end;

    __device__ Tiles(const Unit* units, int num_items, int split) : unit(units), num_items(num_items), split(split) {
        enter_item();
        skip_empty_items();
    }

    __device__ bool exist() const { return num_items > 0; }
    __device__ int position() const { return Unit::position(tile); }

    __device__ void enter_item() {
        tile = unit->warps_tile(split);
        end = unit->first_tile(split + 1);
    }
    __device__ void skip_empty_items() {
        while (exist() && tile >= end) {
            if (++split == NUM_SPLITS) split = 0, unit++;
            if (--num_items > 0) enter_item();
        }
    }
    __device__ void next() {
        tile += WARPS;
        skip_empty_items();
    }
};

// Start copying the next tile (cp.async, one commit group), and loading the ids of the one after. Rows past the unit's last
// become zeros.
__device__ void copy_next(unsigned slot, Tiles& tiles, int& id) {
    if (tiles.exist()) {
        constexpr int COPIES = TILE * CHUNKS / 32;
        const int lane = threadIdx.x % 32, count = tiles.unit->total - tiles.tile * TILE;
        const int num_coded = tiles.unit->num_coded(tiles.tile);
        const long long row = tiles.unit->row_at(tiles.position(), id);
        tiles.next();
        if (tiles.exist()) id = tiles.unit->id_at(tiles.position());  // before the copies, which it would queue behind
        long long from[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) from[i] = __shfl_sync(ALL_LANES, row, (i * 32 + lane) / CHUNKS);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int r = (i * 32 + lane) / CHUNKS, c = (i * 32 + lane) % CHUNKS;
            if (r < num_coded && c >= CONTEXT_ROW_BYTES / 16) continue;
            start_copy_through_l1(slot + r * PITCH + c * 16, from[i] + c * 16, r < count ? 16 : 0);
        }
    }
    end_copy_group();
}

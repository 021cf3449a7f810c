// The tiles to score: query tiles, the key tiles of each, and their layout in shared memory.
//
// Compiled for DTYPE: 0 float16, 1 bfloat16, 2 float8_e4m3fn; HEAD_DIM, COLUMNS, HEADS, STAGES.
#pragma once

#include "../../cuda/warps.cuh"

struct TensorMap;  // of `products.cuh`

constexpr int ELEMENT_BYTES = DTYPE == 2 ? 1 : 2;
constexpr int ATOM_BYTES = 128;  // of a row, contiguous in shared memory
constexpr int ATOMS = HEAD_DIM * ELEMENT_BYTES / ATOM_BYTES;
constexpr int KEYS = 64;  // of a tile: the rows of one product
static_assert(HEAD_DIM * ELEMENT_BYTES % ATOM_BYTES == 0 && COLUMNS == 256, "rows are whole atoms");

constexpr int QUERIES = COLUMNS / HEADS;
static_assert(QUERIES % 4 == 0 && QUERIES <= 32 && HEADS % 8 == 0, "four threads share out the queries of their keys");

struct Operands {
    const TensorMap *columns, *keys, *every_step_th;  // the last two differ in the stride of rows
    const float *weights, *key_scale;                 // key_scale: may be null
    const int* tile_max_lens;                         // [query tiles]
    int num_queries, num_keys;
};

// A key tile: 64 keys, `step` apart.
struct Tile {
    int first, step;
    int row, column;  // in the tensor map
    const TensorMap* map;
};

// The work of `write_scores`: tiles of a range of keys or, for a step above 1, of every step-th key in whole blocks of
// 64 * step.
struct WriteScores {
    static constexpr bool LISTED = false;
    float* out;
    long long out_stride;
    int first_key, end_key, step;

    __device__ __forceinline__ int num_tiles(int tile_max_len) const {
        const int end = min(tile_max_len, end_key);
        return step > 1 ? end / (KEYS * step) : max(0, end - first_key + KEYS - 1) / KEYS;
    }
    __device__ __forceinline__ Tile tile(const Operands& of, int, int number) const {
        const int row = first_key + number * KEYS;
        return {row * step, step, row, 0, of.every_step_th};
    }
};

// The work of `list_contenders`: the keys that `WriteScores` leaves out. These are all but every step-th key of the
// whole blocks, then the rest of the sequence.
struct ListContenders {
    static constexpr bool LISTED = true;
    const int *legal_len, *threshold_indices;
    const float* threshold_scores;
    u64* lists;
    int *counts, step, capacity;

    __device__ __forceinline__ int blocks(int tile_max_len) const {
        return step > 1 ? tile_max_len / (KEYS * step) : 0;
    }
    __device__ __forceinline__ int num_tiles(int tile_max_len) const {
        const int whole = blocks(tile_max_len);
        return whole * (step - 1) + (tile_max_len - whole * KEYS * step + KEYS - 1) / KEYS;
    }
    __device__ __forceinline__ Tile tile(const Operands& of, int tile_max_len, int number) const {
        const int whole = blocks(tile_max_len), rest = number - whole * (step - 1);
        if (rest >= 0) {
            const int first = whole * KEYS * step + rest * KEYS;
            return {first, 1, first, 0, of.keys};
        }
        const int block = number / (step - 1), phase = 1 + number % (step - 1);
        return {block * KEYS * step + phase, step, block * KEYS, phase * HEAD_DIM, of.every_step_th};
    }
};

__device__ __forceinline__ int num_query_tiles(const Operands& of) { return (of.num_queries + QUERIES - 1) / QUERIES; }

// The last queries come first, since they see the most keys. Negative: there are no more.
__device__ __forceinline__ int query_tile_of(const Operands& of, int item) {
    return num_query_tiles(of) - 1 - static_cast<int>(blockIdx.x) - item * static_cast<int>(gridDim.x);
}

constexpr u32 KEY_BYTES = KEYS * HEAD_DIM * ELEMENT_BYTES, COLUMN_BYTES = COLUMNS * HEAD_DIM * ELEMENT_BYTES;

// What the producer warp passes to the others about a query tile.
struct Item {
    int tile_max_len;  // keys that any of the queries may see
    int legal_len[QUERIES], threshold_indices[QUERIES], counts[QUERIES];
    float threshold_scores[QUERIES];
};

// And about a key tile, since computing it takes divisions.
struct Place {
    int first, step, row;
};

struct Shared {
    u8 columns[2][COLUMN_BYTES];  // of 1024-byte alignment, as are keys
    u8 keys[STAGES][KEY_BYTES];
    float weights[2][COLUMNS];
    Item items[2];
    Place places[STAGES];
    u64 keys_loaded[STAGES], keys_used[STAGES], item_loaded[2], item_used[2];
};

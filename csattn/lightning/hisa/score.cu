// Scores of HISA's candidates on Hopper's tensor cores: a block of keys with the queries that it is a candidate of.
//
// An item is a block and up to 32 of its queries. Its keys stay in shared memory while the queries, with all of their
// heads, are streamed in tiles of COLUMNS pairs of a query and a head: for each candidate a query is read, which has
// half as many bytes as the keys. Two warpgroups have alternate tiles and take turns at wgmma, 64 keys at a time; one
// warp of a third loads. A score has the bits that `write_scores` gives it.
//
// Compiled for what `score/hopper.cu` is compiled for, whose products and sums are used; and for BLOCK_KEYS (of a
// block) and ITEM_QUERIES.

#include "../score/warpgroups.cuh"

namespace hisa {

constexpr int PARTS = BLOCK_KEYS / KEYS;  // of a block's keys
constexpr u32 QUERY_BYTES = HEADS * HEAD_DIM * ELEMENT_BYTES;
static_assert(ITEM_QUERIES == 32, "a lane has a query of an item");
static_assert(BLOCK_KEYS % KEYS == 0, "a block has whole tiles");

struct Work {
    const TensorMap *columns, *keys;
    const float *weights, *key_scale;
    const int *lists, *counts, *items, *num_items;
    int* num_taken;
    float* out;
    int num_queries, num_candidates, num_keys;
};

// Queries that are scored together. An item has an even number of tiles: the last may be without queries.
struct Tile {
    int block;  // negative: no more tiles
    int count;  // of queries
    u32 item;
    bool is_first, is_last;  // of its group's tiles of the item
    int places[QUERIES];     // where their scores go, in blocks; negative: nowhere
};

struct Shared {
    u8 columns[STAGES][COLUMN_BYTES];  // of 1024-byte alignment, as are keys
    u8 keys[2][PARTS][KEY_BYTES];
    float weights[STAGES][COLUMNS];
    Tile tiles[STAGES];
    u64 loaded[STAGES], used[STAGES], keys_loaded[2], keys_used[2];
};

// A block and some of its queries, one for each lane.
struct Item {
    int block, count, place;
};

__device__ __forceinline__ Item take_item(const Work& of) {
    const int lane = threadIdx.x % 32, parts_each = (of.num_queries + ITEM_QUERIES - 1) / ITEM_QUERIES;
    const int number = __shfl_sync(ALL_LANES, lane == 0 ? atomicAdd(of.num_taken, 1) : 0, 0);
    if (number >= *of.num_items) return {-1, 0, -1};
    const int item = of.items[number], block = item / parts_each, first = item % parts_each * ITEM_QUERIES;
    const int count = min(ITEM_QUERIES, of.counts[block] - first);
    const long long begin = static_cast<long long>(block) * of.num_queries + first;
    return {block, count, lane < count ? of.lists[begin + lane] : -1};
}

__device__ void fetch_keys(Shared& s, const Work& of, int block, u32 item) {
    const int lane = threadIdx.x % 32, part = lane / ATOMS, atom = lane % ATOMS;
    u64* const loaded = &s.keys_loaded[item % 2];
    wait_for(&s.keys_used[item % 2], item / 2 % 2 ^ 1);
    if (lane == 0) arrive_expecting(loaded, PARTS * KEY_BYTES);
    __syncwarp();
    if (part < PARTS)
        load_box(s.keys[item % 2][part] + atom * (KEYS * ATOM_BYTES), of.keys, atom * (ATOM_BYTES / ELEMENT_BYTES),
                 block * BLOCK_KEYS + part * KEYS, loaded);
}

// Loads a tile: each lane loads the query whose scores go to its place.
__device__ void fetch_tile(Shared& s, const Work& of, const Tile& about, int place, u32 number) {
    const int lane = threadIdx.x % 32, stage = number % STAGES;
    const bool has_query = lane < about.count;
    wait_for(&s.used[stage], number / STAGES % 2 ^ 1);
    Tile& tile = s.tiles[stage];
    if (lane == 0) {
        tile.block = about.block, tile.count = about.count, tile.item = about.item;
        tile.is_first = about.is_first, tile.is_last = about.is_last;
    }
    if (lane < QUERIES) tile.places[lane] = has_query ? place : -1;
    __syncwarp();
    if (lane == 0) arrive_expecting(&s.loaded[stage], about.count * (QUERY_BYTES + HEADS * 4));
    __syncwarp();
    if (!has_query) return;
    const int query = place / of.num_candidates;
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom)
        load_box(s.columns[stage] + (atom * COLUMNS + lane * HEADS) * ATOM_BYTES, of.columns,
                 atom * (ATOM_BYTES / ELEMENT_BYTES), query * HEADS, &s.loaded[stage]);
    load_bytes(s.weights[stage] + lane * HEADS, of.weights + static_cast<long long>(query) * HEADS, HEADS * 4,
               &s.loaded[stage]);
}

__device__ void fetch(Shared& s, const Work& of) {
    const int lane = threadIdx.x % 32;
    u32 number = 0;  // tiles of the thread block so far
    Tile tile{};
    for (tile.item = 0;; ++tile.item) {
        const Item item = take_item(of);
        tile.block = item.block;
        if (item.count == 0) break;
        fetch_keys(s, of, tile.block, tile.item);
        const int num_tiles = (item.count + 2 * QUERIES - 1) / (2 * QUERIES) * 2;
#pragma unroll 1
        for (int i = 0; i < num_tiles; ++i, ++number) {
            const int first = i * QUERIES;
            tile.count = max(0, min(QUERIES, item.count - first));
            tile.is_first = i < 2, tile.is_last = i >= num_tiles - 2;
            fetch_tile(s, of, tile, __shfl_sync(ALL_LANES, item.place, (first + lane) % 32), number);
        }
    }
    tile.count = 0;
    for (int group = 0; group < 2; ++group) fetch_tile(s, of, tile, -1, number + group);
}

// What a thread needs of a tile.
struct ThreadState {
    float weights[64];
    int places[OWNED];

    __device__ __forceinline__ void load(const Shared& s, u32 stage, const Owner& owner) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float2 pair = reinterpret_cast<const float2*>(s.weights[stage])[i * 4 + owner.query];
            weights[2 * i] = pair.x, weights[2 * i + 1] = pair.y;
        }
#pragma unroll
        for (int i = 0; i < OWNED; ++i) places[i] = s.tiles[stage].places[4 * i + owner.query];
    }
};

// Scores that are written while the next products are computed. row: of the first key, in its block.
struct Pending {
    Sums sums;
    int places[OWNED], row;
};

__device__ __forceinline__ void write(const Work& of, const Pending& pending) {
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
        if (pending.places[i] < 0) continue;
        float* const out = of.out + static_cast<long long>(pending.places[i]) * BLOCK_KEYS + pending.row;
#pragma unroll
        for (int r = 0; r < 2; ++r) out[8 * r] = pending.sums[i][r];
    }
}

// Scores a tile's queries and the block's keys, once both are loaded. scales: of the thread's keys.
__device__ __forceinline__ void score_tile(Shared& s, const Work& of, const float (&scales)[PARTS][2],
                                           const Owner& owner, Pending& pending, int group, u32 stage) {
    const u32 at = s.tiles[stage].item % 2;
    ThreadState state;
    state.load(s, stage, owner);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        float products[128];
        wait_for_turn(group);
        multiply_tile(products, s.keys[at][part], s.columns[stage]);
        give_turn_to(1 - group);  // giving it when most products are done was 4 % slower
        write(of, pending);
        wait_for_products<0>(products);
        Partial partial;
        sum_weighted(products, state.weights, partial);
        sum_up(partial, pending.sums);
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            pending.places[i] = state.places[i];
            pending.sums[i][0] *= scales[part][0], pending.sums[i][1] *= scales[part][1];
        }
        pending.row = part * KEYS + owner.row;
    }
}

__device__ void score(Shared& s, const Work& of, int group) {
    const Owner owner;
    float scales[PARTS][2];
    Pending pending{};
    for (int i = 0; i < OWNED; ++i) pending.places[i] = -1;
    if (group == 1) give_turn_to(0);
    for (u32 number = group;; number += 2) {
        const u32 stage = __shfl_sync(ALL_LANES, number % STAGES, 0);  // tells the compiler that a warp has one
        wait_for(&s.loaded[stage], number / STAGES % 2);
        const Tile& tile = s.tiles[stage];
        if (tile.block < 0) break;
        const int at = tile.item % 2;
        const bool is_last = tile.is_last;
        if (tile.is_first) {
            wait_for(&s.keys_loaded[at], tile.item / 2 % 2);
#pragma unroll
            for (int i = 0; i < PARTS * 2; ++i) {
                const int key = tile.block * BLOCK_KEYS + i / 2 * KEYS + owner.row + i % 2 * 8;
                scales[i / 2][i % 2] = __ldg(of.key_scale + min(key, of.num_keys - 1));
            }
        }
        if (tile.count > 0) {
            score_tile(s, of, scales, owner, pending, group, stage);
        } else {
            for (int part = 0; part < PARTS; ++part) wait_for_turn(group), give_turn_to(1 - group);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            arrive(&s.used[stage]);
            if (is_last) arrive(&s.keys_used[at]);
        }
    }
    write(of, pending);
}

}  // namespace hisa

extern "C" __global__ void __launch_bounds__(THREADS, 1) score_candidates(
    const __grid_constant__ TensorMap columns,  // in boxes of one query
    const __grid_constant__ TensorMap keys,
    const float* __restrict__ weights,    // [num_queries, HEADS]
    const float* __restrict__ key_scale,  // [num_keys]
    const int* __restrict__ lists,        // [blocks, num_queries]: query * num_candidates + the candidate's number
    const int* __restrict__ counts,       // [blocks]: entries of each list
    const int* __restrict__ items,        // block * most items of a block + the item's number in its block
    const int* __restrict__ num_items,
    int* __restrict__ num_taken,  // how many items are taken; 0 on entry
    float* __restrict__ out,      // [num_queries, num_candidates, BLOCK_KEYS]
    long long num_queries,
    long long num_candidates,
    long long num_keys
) {
    extern __shared__ u8 memory[];
    hisa::Shared& s = *reinterpret_cast<hisa::Shared*>(memory + (-shared_address(memory) & 1023));
    const hisa::Work of{&columns, &keys, weights, key_scale, lists, counts, items, num_items, num_taken, out,
                        static_cast<int>(num_queries), static_cast<int>(num_candidates), static_cast<int>(num_keys)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) init_barrier(&s.loaded[i], 1), init_barrier(&s.used[i], GROUP / 32);
        for (int i = 0; i < 2; ++i) init_barrier(&s.keys_loaded[i], 1), init_barrier(&s.keys_used[i], 2 * GROUP / 32);
        fence_barrier_init();
    }
    divide_work([&] { hisa::fetch(s, of); }, [&](int group) { hisa::score(s, of, group); });
}

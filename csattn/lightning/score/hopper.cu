// Scores on Hopper's tensor cores, with warp specialization: two warpgroups alternate at wgmma, so that one weighs and
// sums while the other multiplies. A group writes or lists its scores once its next products are in flight. The third
// group has one producer warp, which loads key tiles into a ring buffer, and the next query tile early, by TMA.
//
// A thread block takes query tiles, those that see most keys first, and for each all of its key tiles. A query tile is
// COLUMNS pairs of a query and a head. `write_scores` writes scores; `list_contenders` lists those that reach their
// query's threshold. A score has the same bits in both, wherever its key is in a tile and whatever is beside it.
//
// Compiled for DTYPE, HEAD_DIM, COLUMNS, HEADS, STAGES and THREADS.

#include "warpgroups.cuh"

// Loads what a query tile needs besides its keys.
template <class Work>
__device__ void fetch_item(Shared& s, const Operands& of, const Work& work, int query_tile, int at) {
    const int lane = threadIdx.x % 32, query = query_tile * QUERIES + lane;
    Item& item = s.items[at];
    if (lane == 0) item.tile_max_len = of.tile_max_lens[query_tile];
    if constexpr (Work::LISTED) {
        if (lane < QUERIES) {
            const bool there = query < of.num_queries;
            item.legal_len[lane] = there ? work.legal_len[query] : 0;
            item.threshold_indices[lane] = there ? work.threshold_indices[query] : 0;
            item.threshold_scores[lane] = there ? work.threshold_scores[query] : 0.0f;
            item.counts[lane] = there ? work.counts[query] : 0;
        }
    }
    __syncwarp();
    if (lane == 0) {
        const int first = query_tile * QUERIES;
        const u32 weight_bytes = min(QUERIES, of.num_queries - first) * (HEADS * 4);
        arrive_expecting(&s.item_loaded[at], COLUMN_BYTES + weight_bytes);
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
            load_box(s.columns[at] + atom * (COLUMNS * ATOM_BYTES), of.columns, atom * (ATOM_BYTES / ELEMENT_BYTES),
                     first * HEADS, &s.item_loaded[at]);
        load_bytes(s.weights[at], of.weights + static_cast<long long>(first) * HEADS, weight_bytes, &s.item_loaded[at]);
    }
}

// Waits until a query tile is scored, and stores how many contenders its queries have.
template <class Work> __device__ void close_item(Shared& s, const Operands& of, const Work& work, int item) {
    if (item < 0) return;
    const int at = item % 2;
    wait_for(&s.item_used[at], item / 2 % 2);
    if constexpr (Work::LISTED) {
        const int lane = threadIdx.x % 32, query = query_tile_of(of, item) * QUERIES + lane;
        if (lane < QUERIES && query < of.num_queries) work.counts[query] = s.items[at].counts[lane];
    }
}

template <class Work> __device__ void fetch(Shared& s, const Operands& of, const Work& work) {
    int item = 0;
    u32 number = 0;  // key tiles of the block so far
    for (int query_tile; (query_tile = query_tile_of(of, item)) >= 0; ++item) {
        close_item(s, of, work, item - 2);
        __syncwarp();
        fetch_item(s, of, work, query_tile, item % 2);
        const int tile_max_len = of.tile_max_lens[query_tile], num_tiles = work.num_tiles(tile_max_len);
        if (threadIdx.x % 32 == 0)
#pragma unroll 1
            for (int i = 0; i < num_tiles; ++i) {
                const u32 at = (number + i) % STAGES;
                const Tile tile = work.tile(of, tile_max_len, i);
                wait_for(&s.keys_used[at], (number + i) / STAGES % 2 ^ 1);
                s.places[at] = {tile.first, tile.step, tile.row};
                arrive_expecting(&s.keys_loaded[at], KEY_BYTES);
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom)
                    load_box(s.keys[at] + atom * (KEYS * ATOM_BYTES), tile.map,
                             tile.column + atom * (ATOM_BYTES / ELEMENT_BYTES), tile.row, &s.keys_loaded[at]);
            }
        __syncwarp();
        number += num_tiles;
    }
    close_item(s, of, work, item - 2);
    close_item(s, of, work, item - 1);
}

// Multiplies and weighs a key tile that has been loaded, and meanwhile finishes the one before it.
template <class Work>
__device__ __forceinline__ void score_tile(Shared& s, const Operands& of, const Work& work, const ThreadState& state,
                                           const Owner& owner, Pending& pending, bool is_first, int group, int at,
                                           u32 stage) {
    float products[128], scale[2] = {1.0f, 1.0f};
    const Place tile = s.places[stage];
    wait_for_turn(group);
    multiply_tile(products, s.keys[stage], s.columns[at]);
    if (of.key_scale)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            scale[r] = __ldg(of.key_scale + min(tile.first + (owner.row + 8 * r) * tile.step, of.num_keys - 1));
    if (!is_first) finish(pending, of, work, state, owner, s.items[at]);
    wait_for_products<1>();
    give_turn_to(1 - group);
    wait_for_products<0>(products);
    if (threadIdx.x % 32 == 0) arrive(&s.keys_used[stage]);
    Partial partial;
    sum_weighted(products, state.weights, partial);
    sum_up(partial, pending.sums);
    pending.scale[0] = scale[0], pending.scale[1] = scale[1];
    pending.tile = tile;
}

template <class Work> __device__ void score(Shared& s, const Operands& of, const Work& work, int group) {
    const Owner owner;
    u32 number = 0;  // key tiles of the block so far: the first group takes the even ones
    if (group == 1) give_turn_to(0);
    for (int item = 0, query_tile; (query_tile = query_tile_of(of, item)) >= 0; ++item) {
        const int at = item % 2;
        wait_for(&s.item_loaded[at], item / 2 % 2);
        ThreadState state{query_tile};
        state.load(s, work, at, owner);
        const int num_tiles = work.num_tiles(s.items[at].tile_max_len), first = (number + group) % 2;
        Pending pending;
        for (int i = first; i < num_tiles; i += 2) {
            const u32 stage = (number + i) % STAGES;
            wait_for(&s.keys_loaded[stage], (number + i) / STAGES % 2);
            score_tile(s, of, work, state, owner, pending, i == first, group, at, stage);
        }
        if (first < num_tiles) finish(pending, of, work, state, owner, s.items[at]);
        number += num_tiles;
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&s.item_used[at]);
    }
}

template <class Work> __device__ __forceinline__ void run(u8* memory, const Operands& of, const Work& work) {
    Shared& s = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) init_barrier(&s.keys_loaded[i], 1), init_barrier(&s.keys_used[i], GROUP / 32);
        for (int i = 0; i < 2; ++i) init_barrier(&s.item_loaded[i], 1), init_barrier(&s.item_used[i], 2 * GROUP / 32);
        fence_barrier_init();
    }
    divide_work([&] { fetch(s, of, work); }, [&](int group) { score(s, of, work, group); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) write_scores(
    const __grid_constant__ TensorMap columns,
    const __grid_constant__ TensorMap every_step_th,
    const float* __restrict__ weights,      // [num_queries, HEADS]
    const float* __restrict__ key_scale,    // [num_keys], or null
    const int* __restrict__ tile_max_lens,  // [query tiles]: keys that any of a tile's queries may see
    float* __restrict__ out,                // [num_queries, at least as many as are scored], rows out_stride apart
    long long out_stride,
    long long num_queries,
    long long num_keys,
    long long first_key,
    long long end_key,
    long long step  // 1, or first_key is 0
) {
    extern __shared__ u8 memory[];
    const Operands of{&columns, nullptr, &every_step_th,
                      weights, key_scale, tile_max_lens, static_cast<int>(num_queries), static_cast<int>(num_keys)};
    const WriteScores work{out, out_stride, static_cast<int>(first_key), static_cast<int>(end_key),
                           static_cast<int>(step)};
    run(memory, of, work);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) list_contenders(
    const __grid_constant__ TensorMap columns,
    const __grid_constant__ TensorMap keys,
    const __grid_constant__ TensorMap every_step_th,
    const float* __restrict__ weights,
    const float* __restrict__ key_scale,
    const int* __restrict__ tile_max_lens,
    const int* __restrict__ legal_len,           // [num_queries]
    const float* __restrict__ threshold_scores,  // [num_queries]
    const int* __restrict__ threshold_indices,   // [num_queries]
    u64* __restrict__ lists,                     // [num_queries, capacity]: score bits << 32 | index
    int* __restrict__ counts,                    // [num_queries], of entries, even beyond capacity; read and written
    long long num_queries,
    long long num_keys,
    long long step,
    long long capacity
) {
    extern __shared__ u8 memory[];
    const Operands of{&columns, &keys, &every_step_th,
                      weights, key_scale, tile_max_lens, static_cast<int>(num_queries), static_cast<int>(num_keys)};
    const ListContenders work{legal_len, threshold_indices, threshold_scores, lists, counts, static_cast<int>(step),
                      static_cast<int>(capacity)};
    run(memory, of, work);
}

// Scores on Hopper's matrix units: two warpgroups take turns at them, so that one weighs and sums up while the other
// multiplies. A third group has one warp that fetches: key tiles into a ring, and the next queries while there are others.
//
// A block goes through query tiles, those that see most keys first, and of each through all tiles of its keys. A query
// tile is COLUMNS pairs of a query and a head. `write_scores` writes what it has scored; `list_contenders` what reaches
// its query's bar. A score's bits depend on neither, nor on where its key lies in a tile, nor on what is beside it.
//
// Compiled for DTYPE, HEAD_DIM, COLUMNS, HEADS, STAGES and THREADS, which is 3 * 128.

constexpr int QUERIES = COLUMNS / HEADS;
constexpr int OWNED = QUERIES / 4;  // queries, of each of a thread's two keys, that it has the sums of
constexpr int GROUP = 128;
constexpr int FETCHING_REGISTERS = 40, SCORING_REGISTERS = 232;
constexpr u32 KEY_BYTES = KEYS * HEAD_DIM * ELEMENT_BYTES, COLUMN_BYTES = COLUMNS * HEAD_DIM * ELEMENT_BYTES;
constexpr u32 EVERY_LANE = 0xffffffffu;
constexpr int NO_BAR = 0x7fffffff;
static_assert(QUERIES % 4 == 0 && QUERIES <= 32 && HEADS % 8 == 0, "four threads share out the queries of their keys");
static_assert(STAGES % 2 == 0 && THREADS == 3 * GROUP, "a place in the ring belongs to one group");

// What the fetching warp leaves for the others about a query tile.
struct Item {
    int longest;  // keys that any of the queries may see
    int legal_len[QUERIES], bar_indices[QUERIES], counts[QUERIES];
    float bar_scores[QUERIES];
};

struct Shared {
    u8 columns[2][COLUMN_BYTES];  // of 1024-byte alignment, as are keys
    u8 keys[STAGES][KEY_BYTES];
    float weights[2][COLUMNS];
    Item items[2];
    u64 keys_here[STAGES], keys_used[STAGES], item_here[2], item_used[2];
};

struct Operands {
    const TensorMap *columns, *keys, *every_step_th;  // the last two differ in how far rows are apart
    const float *weights, *key_scale;                 // key_scale: may be null
    const int* longest;                               // [query tiles]
    int num_queries;
};

// 64 keys, `step` apart.
struct Tile {
    int first, step;
    const TensorMap* map;
    int column, row;  // in the map
};

// The tiles of a range of keys, or of every step-th key: then only of blocks of 64 * step that are whole.
struct Written {
    static constexpr bool LISTED = false;
    float* out;
    long long out_stride;
    int first_key, end_key, step;

    __device__ __forceinline__ int num_tiles(int longest) const {
        const int end = min(longest, end_key);
        return step > 1 ? end / (KEYS * step) : max(0, end - first_key + KEYS - 1) / KEYS;
    }
    __device__ __forceinline__ Tile tile(const Operands& of, int, int number) const {
        const int row = first_key + number * KEYS;
        return {row * step, step, of.every_step_th, 0, row};
    }
};

// The tiles that `Written` leaves out: of whole blocks all but every step-th key, then what is left of the sequence.
struct Listed {
    static constexpr bool LISTED = true;
    const int *legal_len, *bar_indices;
    const float* bar_scores;
    u64* lists;
    int *counts, step, capacity;

    __device__ __forceinline__ int blocks(int longest) const { return step > 1 ? longest / (KEYS * step) : 0; }
    __device__ __forceinline__ int num_tiles(int longest) const {
        const int whole = blocks(longest);
        return whole * (step - 1) + (longest - whole * KEYS * step + KEYS - 1) / KEYS;
    }
    __device__ __forceinline__ Tile tile(const Operands& of, int longest, int number) const {
        const int whole = blocks(longest), rest = number - whole * (step - 1);
        if (rest >= 0) {
            const int first = whole * KEYS * step + rest * KEYS;
            return {first, 1, of.keys, 0, first};
        }
        const int block = number / (step - 1), phase = 1 + number % (step - 1);
        return {block * KEYS * step + phase, step, of.every_step_th, phase * HEAD_DIM, block * KEYS};
    }
};

__device__ __forceinline__ int num_query_tiles(const Operands& of) { return (of.num_queries + QUERIES - 1) / QUERIES; }

// The last queries see the most keys: they begin. Negative: there are no more.
__device__ __forceinline__ int query_tile_of(const Operands& of, int item) {
    return num_query_tiles(of) - 1 - static_cast<int>(blockIdx.x) - item * static_cast<int>(gridDim.x);
}

// What a query tile needs besides its keys.
template <class Work> __device__ void fetch_item(Shared& s, const Operands& of, const Work& work, int query_tile, int at) {
    const int lane = threadIdx.x % 32, query = query_tile * QUERIES + lane;
    Item& item = s.items[at];
    if (lane == 0) item.longest = of.longest[query_tile];
    if constexpr (Work::LISTED) {
        if (lane < QUERIES) {
            const bool there = query < of.num_queries;
            item.legal_len[lane] = there ? work.legal_len[query] : 0;
            item.bar_indices[lane] = there ? work.bar_indices[query] : 0;
            item.bar_scores[lane] = there ? work.bar_scores[query] : 0.0f;
            item.counts[lane] = there ? work.counts[query] : 0;
        }
    }
    __syncwarp();
    if (lane == 0) {
        const int first = query_tile * QUERIES;
        const u32 weight_bytes = min(QUERIES, of.num_queries - first) * (HEADS * 4);
        arrive_expecting(&s.item_here[at], COLUMN_BYTES + weight_bytes);
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
            load_box(s.columns[at] + atom * (COLUMNS * ATOM_BYTES), of.columns, atom * (ATOM_BYTES / ELEMENT_BYTES),
                     first * HEADS, &s.item_here[at]);
        load_bytes(s.weights[at], of.weights + static_cast<long long>(first) * HEADS, weight_bytes, &s.item_here[at]);
    }
}

// Waits until a query tile is scored, and says how many contenders it has.
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
    u32 number = 0;  // of a key tile, among all of the block
    for (int query_tile; (query_tile = query_tile_of(of, item)) >= 0; ++item) {
        close_item(s, of, work, item - 2);
        __syncwarp();
        fetch_item(s, of, work, query_tile, item % 2);
        const int longest = of.longest[query_tile], num_tiles = work.num_tiles(longest);
        if (threadIdx.x % 32 == 0)
            for (int i = 0; i < num_tiles; ++i) {
                const u32 at = (number + i) % STAGES;
                const Tile tile = work.tile(of, longest, i);
                wait_for(&s.keys_used[at], (number + i) / STAGES % 2 ^ 1);
                arrive_expecting(&s.keys_here[at], KEY_BYTES);
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom)
                    load_box(s.keys[at] + atom * (KEYS * ATOM_BYTES), tile.map,
                             tile.column + atom * (ATOM_BYTES / ELEMENT_BYTES), tile.row, &s.keys_here[at]);
            }
        __syncwarp();
        number += num_tiles;
    }
    close_item(s, of, work, item - 2);
    close_item(s, of, work, item - 1);
}

// The sums over heads, of products that are weighed here. Four threads have the columns of a key among them; of their
// sums each keeps those of its queries, 4 i + lane % 4: sums[i][r] for the keys r of `begin_products`.
__device__ __forceinline__ void sum_up(const float (&products)[128], const float (&weights)[64], float (&sums)[OWNED][2]) {
    constexpr int EACH = HEADS / 8;
    float mine[QUERIES][2];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int query = 0; query < QUERIES; ++query)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int at = query * EACH + i;
                const float first = relu(products[4 * at + 2 * r]) * weights[2 * at];
                mine[query][r] = i == 0 ? first : fmaf(relu(products[4 * at + 2 * r]), weights[2 * at], mine[query][r]);
                mine[query][r] = fmaf(relu(products[4 * at + 2 * r + 1]), weights[2 * at + 1], mine[query][r]);
            }
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < OWNED; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float pair[2];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const float even_ones = mine[4 * i + 2 * p][r], odd_ones = mine[4 * i + 2 * p + 1][r];
                pair[p] = (odd ? odd_ones : even_ones) + __shfl_xor_sync(EVERY_LANE, odd ? even_ones : odd_ones, 1);
            }
            sums[i][r] = (high ? pair[1] : pair[0]) + __shfl_xor_sync(EVERY_LANE, high ? pair[0] : pair[1], 2);
        }
}

// A thread's two keys of a tile, and its queries.
struct Owner {
    int row, query;  // of the first
    __device__ __forceinline__ Owner()
        : row(static_cast<int>(threadIdx.x) % GROUP / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
          query(static_cast<int>(threadIdx.x) % 4) {}
};

struct Bar {
    int legal_len, index;
    float score;
};

__device__ __forceinline__ void keep(const Listed& work, Item& item, int query_tile, const Tile& tile, const Owner& mine,
                                     const Bar (&bars)[OWNED], const float (&sums)[OWNED][2]) {
#pragma unroll
    for (int i = 0; i < OWNED; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int index = tile.first + (mine.row + 8 * r) * tile.step;
            const float score = sums[i][r];
            const Bar& bar = bars[i];
            // NaN reaches no bar; where there is none, all are kept
            const bool reaches = score > bar.score || (score == bar.score && index <= bar.index) || bar.index == NO_BAR;
            if (reaches && index < bar.legal_len) {
                const int query = 4 * i + mine.query, at = atomicAdd(&item.counts[query], 1);
                const long long row = static_cast<long long>(query_tile) * QUERIES + query;
                if (at < work.capacity)
                    work.lists[row * work.capacity + at] = static_cast<u64>(__float_as_uint(score)) << 32 | static_cast<u32>(index);
            }
        }
}

__device__ __forceinline__ void write(const Written& work, const Operands& of, int query_tile, int number, const Owner& mine,
                                      const float (&sums)[OWNED][2]) {
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
        const int query = query_tile * QUERIES + 4 * i + mine.query;
        float* const out = work.out + query * work.out_stride + number * KEYS + mine.row;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (query < of.num_queries) out[8 * r] = sums[i][r];
    }
}

template <class Work> __device__ void score(Shared& s, const Operands& of, const Work& work, int group, int num_keys) {
    const Owner mine;
    const int lane = threadIdx.x % 32;
    u32 number = 0;
    if (group == 1) give_turn_to(0);
    for (int item = 0, query_tile; (query_tile = query_tile_of(of, item)) >= 0; ++item) {
        const int at = item % 2;
        wait_for(&s.item_here[at], item / 2 % 2);
        Item& about = s.items[at];
        const int longest = about.longest, num_tiles = work.num_tiles(longest);
        float weights[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) weights[i] = s.weights[at][i / 2 * 8 + lane % 4 * 2 + i % 2];
        Bar bars[OWNED];
        if constexpr (Work::LISTED)
#pragma unroll
            for (int i = 0; i < OWNED; ++i) {
                const int query = 4 * i + mine.query;
                bars[i] = {about.legal_len[query], about.bar_indices[query], about.bar_scores[query]};
            }
        for (int i = (number + group) % 2; i < num_tiles; i += 2) {
            const u32 stage = (number + i) % STAGES;
            float products[128], sums[OWNED][2];
            wait_for(&s.keys_here[stage], (number + i) / STAGES % 2);
            const Tile tile = work.tile(of, longest, i);
            float scale[2] = {1.0f, 1.0f};
            if (of.key_scale)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    scale[r] = __ldg(of.key_scale + min(tile.first + (mine.row + 8 * r) * tile.step, num_keys - 1));
            wait_for_turn(group);
            begin_products(products, s.keys[stage], s.columns[at]);
            give_turn_to(1 - group);
            wait_for_products(products);
            if (lane == 0) arrive(&s.keys_used[stage]);
            sum_up(products, weights, sums);
            if (of.key_scale)
#pragma unroll
                for (int o = 0; o < OWNED; ++o) sums[o][0] *= scale[0], sums[o][1] *= scale[1];
            if constexpr (Work::LISTED)
                keep(work, about, query_tile, tile, mine, bars, sums);
            else
                write(work, of, query_tile, i, mine, sums);
        }
        number += num_tiles;
        __syncwarp();
        if (lane == 0) arrive(&s.item_used[at]);
    }
}

template <class Work> __device__ __forceinline__ void run(u8* memory, const Operands& of, const Work& work, int num_keys) {
    Shared& s = *reinterpret_cast<Shared*>(memory + (-place_of(memory) & 1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) make_barrier(&s.keys_here[i], 1), make_barrier(&s.keys_used[i], GROUP / 32);
        for (int i = 0; i < 2; ++i) make_barrier(&s.item_here[i], 1), make_barrier(&s.item_used[i], 2 * GROUP / 32);
        barriers_are_made();
    }
    __syncthreads();
    wait_for_earlier();
    const int group = threadIdx.x / GROUP;
    if (group == 2) {
        leave_registers<FETCHING_REGISTERS>();
        if (threadIdx.x % GROUP < 32) fetch(s, of, work);
    } else {
        take_registers<SCORING_REGISTERS>();
        score(s, of, work, group, num_keys);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) write_scores(
    const __grid_constant__ TensorMap columns,
    const __grid_constant__ TensorMap every_step_th,
    const float* __restrict__ weights,    // [num_queries, HEADS]
    const float* __restrict__ key_scale,  // [num_keys], or null
    const int* __restrict__ longest,      // [query tiles]: keys that any of a tile's queries may see
    float* __restrict__ out,              // [num_queries, at least as many as are scored], rows out_stride apart
    long long out_stride,
    long long num_queries,
    long long num_keys,
    long long first_key,
    long long end_key,
    long long step  // 1, or first_key is 0
) {
    extern __shared__ u8 memory[];
    const Operands of{&columns, nullptr, &every_step_th, weights, key_scale, longest, static_cast<int>(num_queries)};
    const Written work{out, out_stride, static_cast<int>(first_key), static_cast<int>(end_key), static_cast<int>(step)};
    run(memory, of, work, static_cast<int>(num_keys));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) list_contenders(
    const __grid_constant__ TensorMap columns,
    const __grid_constant__ TensorMap keys,
    const __grid_constant__ TensorMap every_step_th,
    const float* __restrict__ weights,
    const float* __restrict__ key_scale,
    const int* __restrict__ longest,
    const int* __restrict__ legal_len,     // [num_queries]
    const float* __restrict__ bar_scores,  // likewise
    const int* __restrict__ bar_indices,   // likewise
    u64* __restrict__ lists,               // [num_queries, capacity]: a score's bits above an index
    int* __restrict__ counts,              // [num_queries], of what has come to a list, read and written
    long long num_queries,
    long long num_keys,
    long long step,
    long long capacity
) {
    extern __shared__ u8 memory[];
    const Operands of{&columns, &keys, &every_step_th, weights, key_scale, longest, static_cast<int>(num_queries)};
    const Listed work{legal_len, bar_indices, bar_scores, lists, counts, static_cast<int>(step),
                      static_cast<int>(capacity)};
    run(memory, of, work, static_cast<int>(num_keys));
}

// Attention of a step's rows to every row of their contexts and tails: a context is read once for up to ROWS of the step's rows.
//
// A source is a run of contiguous KV rows: a context's, to which all rows of the step that continue it attend, or the part of a
// tail that its row sees. A block takes the query heads of one KV head and of up to ROWS rows of the step at a time: 16 FOLDS of
// them for each warp. This is split-K: sources are cut into splits by their length alone, so what a query sums, and in which
// order, depends neither on the other rows of the step nor on its place among them.
//
// Defined by the caller: HEAD_DIM, GROUP (query heads of a KV head), NUM_KV_HEADS, ELEMENT (bf16 or f16),
// TILE (KV rows), STAGES, THREADS, FOLDS, LEAST_SPLIT (rows), MAX_SPLITS, MAX_TAIL_SPLITS, CAPPED, SINKS.

#include "../cuda/warps.cuh"
#include "logits.cuh"
#include "products.cuh"

constexpr int NUM_Q_HEADS = GROUP * NUM_KV_HEADS;
constexpr int QUERIES = 16 * FOLDS * WARPS, ROWS = QUERIES / GROUP;
constexpr int CHUNK = 32;  // KV rows that a warp attends to at a time
constexpr int ROW_BYTES = 2 * HEAD_DIM * 2;  // K, then V
constexpr int PITCH = ROW_BYTES + 16;        // an odd number of 16 bytes: the same 16 bytes of 8 rows are in 8 different banks
constexpr int TILE_BYTES = TILE * PITCH;
constexpr int UNIT = 64;  // the length of a split is a multiple of so many rows
constexpr int PART = HEAD_DIM + 4;  // of a query: its unnormalised output, the maximum of its logits, the sum of its weights
constexpr int MAX_BATCH_SIZE = THREADS / 2;  // a thread for each source
static_assert(GROUP <= QUERIES, "a query for each head of a group");
static_assert(HEAD_DIM % 16 == 0 && TILE % CHUNK == 0 && UNIT % TILE == 0, "whole products, and whole tiles in a split");
static_assert(TILE % WARPS == 0 && TILE <= 32 * WARPS, "a lane asks for one row of a tile at most");

struct Splits {
    int num, len;

    __device__ Splits(int num_rows, bool of_tail) {
        const int most = of_tail ? MAX_TAIL_SPLITS : MAX_SPLITS, least = (num_rows + most - 1) / most;
        len = max(LEAST_SPLIT, (least + UNIT - 1) / UNIT * UNIT);
        num = (num_rows + len - 1) / len;
    }
};

struct Source {
    long long rows;  // address of the first KV head's first row
    int head_rows;   // rows from one KV head to the next
    int num_rows;
    int num_turns;  // passes over the source: ROWS rows of the step take part in each
    int first_item, num_items;  // an item is a split, for one KV head, in one turn
};

// Online softmax attention of a warp's queries. Of the 16 queries of each fold, a lane has lane / 4 and lane / 4 + 8.
struct Attention {
    int num_folds;  // up to the last that has queries
    unsigned q[FOLDS][HEAD_DIM / 16][4];
    float out[FOLDS][HEAD_DIM / 8][4];   // dimensions 8 n + 2 (lane % 4) and the next
    float max[FOLDS][2], sum[FOLDS][2];  // the sum is over the lane's own KV rows

    // heads: addresses of the lane's two queries of a fold; null: none
    __device__ void begin(int f, const char* const (&heads)[2]) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            for (int i = 0; i < 4; i++) {
                const unsigned* from = (const unsigned*)heads[i % 2] + k * 8 + i / 2 * 4 + lane % 4;
                q[f][k][i] = heads[i % 2] ? *from : 0;
            }
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
            for (int i = 0; i < 4; i++) out[f][n][i] = 0.f;
        for (int i = 0; i < 2; i++) max[f][i] = MINUS_INFINITY, sum[f][i] = 0.f;
    }

    // Add CHUNK rows, of which `count` exist, to the first NUM folds, which share what is loaded.
    template <int NUM> __device__ __forceinline__ void add(unsigned rows, int count, float scale, float cap) {
        const int lane = threadIdx.x % 32;
        float p[NUM][CHUNK / 8][4];
#pragma unroll
        for (int f = 0; f < NUM; f++)
            for (int n = 0; n < CHUNK / 8; n++)
                for (int i = 0; i < 4; i++) p[f][n][i] = 0.f;
        const unsigned keys = rows + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n += 2) {
                unsigned b[4];
                load_matrices(b, keys + n * 8 * PITCH + k * 32);
#pragma unroll
                for (int f = 0; f < NUM; f++) {
                    multiply_add(p[f][n], q[f][k], {b[0], b[1]});
                    multiply_add(p[f][n + 1], q[f][k], {b[2], b[3]});
                }
            }
        unsigned weights[NUM][CHUNK / 16][4];
#pragma unroll
        for (int f = 0; f < NUM; f++) compute_weights(f, p[f], weights[f], count, scale, cap);
        const unsigned values = rows + ROW_BYTES / 2 + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n += 2) {
                unsigned b[4];
                load_matrices_transposed(b, values + k * 16 * PITCH + n * 16);
#pragma unroll
                for (int f = 0; f < NUM; f++) {
                    multiply_add(out[f][n], weights[f][k], {b[0], b[1]});
                    multiply_add(out[f][n + 1], weights[f][k], {b[2], b[3]});
                }
            }
    }

    // Online softmax: turn products into weights, and rescale the sums so far.
    __device__ __forceinline__ void compute_weights(int f, float (&p)[CHUNK / 8][4], unsigned (&weights)[CHUNK / 16][4],
                                                    int count, float scale, float cap) {
        const int lane = threadIdx.x % 32;
        float top[2] = {max[f][0], max[f][1]}, kept[2];
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++)
            for (int i = 0; i < 4; i++) p[n][i] = as_logit(p[n][i] * scale, cap);
        if (count < CHUNK)
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++)
                for (int i = 0; i < 4; i++)
                    if (n * 8 + lane % 4 * 2 + i % 2 >= count) p[n][i] = MINUS_INFINITY;
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++)
            for (int i = 0; i < 4; i++) top[i / 2] = fmaxf(top[i / 2], p[n][i]);
        for (int step = 1; step < 4; step *= 2)
            for (int i = 0; i < 2; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(ALL_LANES, top[i], step));
        for (int i = 0; i < 2; i++) {
            kept[i] = exp2_approx(max[f][i] - top[i]);
            max[f][i] = top[i];
            sum[f][i] *= kept[i];
        }
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++)
            for (int i = 0; i < 4; i++) {
                p[n][i] = exp2_approx(p[n][i] - top[i / 2]);
                sum[f][i / 2] += p[n][i];
            }
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++)
            for (int i = 0; i < 4; i++) weights[k][i] = pack(p[2 * k + i / 2][i % 2 * 2], p[2 * k + i / 2][i % 2 * 2 + 1]);
        if (__any_sync(ALL_LANES, kept[0] < 1.f || kept[1] < 1.f)) {
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                for (int i = 0; i < 4; i++) out[f][n][i] *= kept[i / 2];
        }
    }

    // parts: for the lane's two queries of a fold; null: none
    __device__ void store(int f, float* const (&parts)[2]) {
        const int lane = threadIdx.x % 32;
        for (int step = 1; step < 4; step *= 2)
            for (int i = 0; i < 2; i++) sum[f][i] += __shfl_xor_sync(ALL_LANES, sum[f][i], step);
        for (int i = 0; i < 2; i++) {
            if (!parts[i]) continue;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                *(float2*)(parts[i] + n * 8 + lane % 4 * 2) = make_float2(out[f][n][2 * i], out[f][n][2 * i + 1]);
            if (lane % 4 == 0) *(float2*)(parts[i] + HEAD_DIM) = make_float2(max[f][i], sum[f][i]);
        }
    }
};

// The address of a query's parts: MAX_SPLITS for its context, then MAX_TAIL_SPLITS for its tail.
__device__ float* parts_of(float* parts, int b, int head, bool of_tail) {
    const long long query = (long long)b * NUM_Q_HEADS + head;
    return parts + (query * (MAX_SPLITS + MAX_TAIL_SPLITS) + (of_tail ? MAX_SPLITS : 0)) * PART;
}

extern "C" __global__ void __launch_bounds__(THREADS) attend_every_row(
    const char* q,               // [batch_size, NUM_Q_HEADS, HEAD_DIM]
    const long long* addresses,  // [num_contexts], each of [NUM_KV_HEADS, rows per head, 2, HEAD_DIM]
    const int* rows_per_head,    // [num_contexts]
    const char* tails,           // [num_tails, NUM_KV_HEADS, tail_capacity, 2, HEAD_DIM]
    const int* context_ids,      // [batch_size]; -1: none, only the tail
    const int* tail_ids, const int* tail_lens,  // [batch_size]; a length of 0: the step's row is idle
    float* parts,  // [batch_size, NUM_Q_HEADS, MAX_SPLITS + MAX_TAIL_SPLITS, PART]; one is written for each split
    int batch_size, int tail_capacity, float scale, float cap) {
    extern __shared__ __align__(16) char shared[];  // [STAGES] tiles
    __shared__ u64 loaded[STAGES], consumed[STAGES];
    __shared__ u32 scratch[WARPS];
    __shared__ Source sources[THREADS];  // [2 * batch_size]: contexts, each at the first row that continues it; then tails
    __shared__ int contexts[MAX_BATCH_SIZE], ranks[MAX_BATCH_SIZE];  // a row's context, and its rank among the rows on it
    __shared__ int at, rows_of[QUERIES];  // the item's source, and the rows of the step that read it

    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread < STAGES) init_barrier(&loaded[thread], WARPS * ARRIVALS_PER_LOAD), init_barrier(&consumed[thread], WARPS);
    if (thread < batch_size) contexts[thread] = tail_lens[thread] > 0 ? context_ids[thread] : -1;
    fence_barrier_init();
    __syncthreads();
    Source source = {};
    if (thread < batch_size) {
        const int context = contexts[thread];
        int before = 0, all = 0;
        for (int b = 0; b < batch_size; b++) {
            const bool same = context >= 0 && contexts[b] == context;
            before += same && b < thread, all += same;
        }
        ranks[thread] = before;
        if (context >= 0 && before == 0) {
            source.rows = addresses[context];
            source.num_rows = source.head_rows = rows_per_head[context];
            source.num_turns = (all + ROWS - 1) / ROWS;
        }
    } else if (thread < 2 * batch_size) {
        const int b = thread - batch_size;
        source.rows = (long long)tails + (long long)tail_ids[b] * NUM_KV_HEADS * tail_capacity * ROW_BYTES;
        source.head_rows = tail_capacity;
        source.num_rows = min(tail_lens[b], tail_capacity);
        source.num_turns = 1;
    }
    source.num_items = NUM_KV_HEADS * Splits(source.num_rows, thread >= batch_size).num * source.num_turns;
    u32 num_items;
    source.first_item = sum_before(source.num_items, scratch, num_items);
    if (thread < 2 * batch_size) sources[thread] = source;
    wait_then_let_next_start();

    int num_used = 0, num_started = 0;  // tiles
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        __syncthreads();  // all threads have finished the previous item
        if (source.first_item <= item && item < source.first_item + source.num_items) at = thread;
        __syncthreads();
        const Source& from = sources[at];
        const bool of_tail = at >= batch_size;
        const Splits splits(from.num_rows, of_tail);
        const int turn = (item - from.first_item) % from.num_turns;
        const int split = (item - from.first_item) / from.num_turns % splits.num;
        const int kv_head = (item - from.first_item) / from.num_turns / splits.num;
        for (int i = thread; i < QUERIES; i += THREADS) rows_of[i] = -1;
        __syncthreads();
        if (of_tail && thread == 0)
            rows_of[0] = at - batch_size;
        else if (!of_tail && thread < batch_size && contexts[thread] == contexts[at] && ranks[thread] / ROWS == turn)
            rows_of[ranks[thread] % ROWS] = thread;

        const int first = split * splits.len, len = min(splits.len, from.num_rows - first);
        const char* const begin = (const char*)from.rows + ((long long)kv_head * from.head_rows + first) * ROW_BYTES;
        // load a tile of the item, a part of it by each warp; past the end the last row repeats
        auto start_load = [&](int number) {
            const int stage = num_started % STAGES, own = warp * (TILE / WARPS);
            if (num_started >= STAGES) wait_for(&consumed[stage], num_started / STAGES % 2 ^ 1);
            load_by_warp(
                TILE / WARPS, ROW_BYTES, shared_address(&loaded[stage]),
                [&](u32 i) { return shared_address(shared) + stage * TILE_BYTES + (own + i) * PITCH; },
                [&](u32 i) { return begin + (long long)min(number * TILE + own + (int)i, len - 1) * ROW_BYTES; });
            num_started++;
        };
        const int num_tiles = (len + TILE - 1) / TILE;
        for (int number = 0; number < min(STAGES - 1, num_tiles); number++) start_load(number);
        __syncthreads();
        Attention attention;
        attention.num_folds = 0;
        // the row of the step and the head of a lane's query; a warp's queries are neighbours
        auto row_of = [&](int f, int i, int& head) {
            const int query = (warp * FOLDS + f) * 16 + lane / 4 + i * 8;
            head = kv_head * GROUP + query % GROUP;
            return query < ROWS * GROUP ? rows_of[query / GROUP] : -1;
        };
#pragma unroll
        for (int f = 0; f < FOLDS; f++) {
            const char* heads[2];
            for (int i = 0; i < 2; i++) {
                int head;
                const int b = row_of(f, i, head);
                heads[i] = b < 0 ? nullptr : q + ((long long)b * NUM_Q_HEADS + head) * HEAD_DIM * 2;
            }
            if (__any_sync(ALL_LANES, heads[0] || heads[1])) attention.num_folds = f + 1;
            attention.begin(f, heads);
        }
#pragma unroll 1
        for (int number = 0; number < num_tiles; number++) {
            const int stage = num_used % STAGES;
            if (number + STAGES - 1 < num_tiles) start_load(number + STAGES - 1);
            wait_for(&loaded[stage], num_used / STAGES % 2);
#pragma unroll 1
            for (int chunk = 0; chunk < min(TILE, len - number * TILE); chunk += CHUNK) {
                const unsigned rows = shared_address(shared) + stage * TILE_BYTES + chunk * PITCH;
                const int count = len - number * TILE - chunk;
                if (attention.num_folds == FOLDS)
                    attention.add<FOLDS>(rows, count, scale, cap);
                else if (attention.num_folds > 0)  // one of two
                    attention.add<1>(rows, count, scale, cap);
            }
            __syncwarp();
            if (lane == 0) arrive(&consumed[stage]);
            num_used++;
        }
#pragma unroll
        for (int f = 0; f < FOLDS; f++) {
            float* to[2];
            for (int i = 0; i < 2; i++) {
                int head;
                const int b = row_of(f, i, head);
                to[i] = b < 0 ? nullptr : parts_of(parts, b, head, of_tail) + split * PART;
            }
            if (f < attention.num_folds) attention.store(f, to);
        }
    }
}

// Merge each query's parts by their log-sum-exps, a block for each query. A thread sums four dimensions of every LANES-th part.
extern "C" __global__ void __launch_bounds__(THREADS) join_parts(
    float* parts,  // as above
    const int* rows_per_head, const int* context_ids, const int* tail_lens,
    const float* sinks,  // [NUM_Q_HEADS], for SINKS: a head's sink logit, which has no row
    char* out,           // [batch_size, NUM_Q_HEADS, HEAD_DIM]
    int tail_capacity) {
    constexpr int QUADS = HEAD_DIM / 4, LANES = THREADS / QUADS, MOST = MAX_SPLITS + MAX_TAIL_SPLITS;
    __shared__ float weights[MOST], of_warps[2][WARPS];
    __shared__ float4 sums[LANES][QUADS];
    const int b = blockIdx.x / NUM_Q_HEADS, head = blockIdx.x % NUM_Q_HEADS, thread = threadIdx.x;
    const int tail_len = min(tail_lens[b], tail_capacity), context = tail_len > 0 ? context_ids[b] : -1;
    const int of_context = context < 0 ? 0 : Splits(rows_per_head[context], false).num;
    const int num = of_context + Splits(tail_len, true).num;
    const float* first = parts_of(parts, b, head, false);
    auto place = [&](int i) { return i < of_context ? i : MAX_SPLITS + i - of_context; };
    wait_then_let_next_start();
    // load what a thread will sum before the weights are known
    constexpr int EACH = (MOST + LANES - 1) / LANES, AHEAD = EACH < 12 ? EACH : 12;
    const int lane = thread / QUADS, quad = thread % QUADS;
    float4 x[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (lane < LANES && lane + k * LANES < num)
            x[k] = issue_load((const float4*)(first + place(lane + k * LANES) * PART) + quad);
    const float sink = SINKS ? sinks[head] * LOG2E : MINUS_INFINITY;
    float top = sink;
    for (int i = thread; i < num; i += THREADS) top = fmaxf(top, first[place(i) * PART + HEAD_DIM]);
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    if (thread % 32 == 0) of_warps[0][thread / 32] = top;
    __syncthreads();
    for (int warp = 0; warp < WARPS; warp++) top = fmaxf(top, of_warps[0][warp]);
    float sum = 0.f;
    for (int i = thread; i < num; i += THREADS) {
        const float2 end = *(const float2*)(first + place(i) * PART + HEAD_DIM);
        weights[i] = exp2_approx(end.x - top);
        sum += weights[i] * end.y;
    }
    sum = sum_over_warp(sum);
    if (thread % 32 == 0) of_warps[1][thread / 32] = sum;
    __syncthreads();
    if (lane < LANES) {
        float4 added = make_float4(0.f, 0.f, 0.f, 0.f);
        auto add = [&](float4 y, float weight) {
            added.x += weight * y.x, added.y += weight * y.y, added.z += weight * y.z, added.w += weight * y.w;
        };
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (lane + k * LANES < num) add(x[k], weights[lane + k * LANES]);
#pragma unroll 4
        for (int i = lane + AHEAD * LANES; i < num; i += LANES)
            add(*((const float4*)(first + place(i) * PART) + quad), weights[i]);
        sums[lane][quad] = added;
    }
    __syncthreads();
    if (thread >= QUADS) return;
    sum = SINKS ? exp2_approx(sink - top) : 0.f;
    for (int warp = 0; warp < WARPS; warp++) sum += of_warps[1][warp];
    const float norm = num > 0 ? 1.f / sum : 0.f;
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int l = 0; l < LANES; l++) {
        const float4 z = sums[l][thread];
        y.x += z.x, y.y += z.y, y.z += z.z, y.w += z.w;
    }
    *(uint2*)(out + ((long long)blockIdx.x * HEAD_DIM + thread * 4) * 2) =
        make_uint2(pack(y.x * norm, y.y * norm), pack(y.z * norm, y.w * norm));
}

// Part 5: the kernel, and the merge of the parts of a result.

#include "device_rows.cuh"  // first, because only one of the two below is included: see `source_text`
#if ELEMENT_BYTES == 4
#include "device_fp32.cuh"
#else
#include "device_mma.cuh"
#endif
#if CODED
#include "device_coded.cuh"  // uses `pack_four` of either
#endif
#include "device_rest.cuh"  // uses `load_four` of either

constexpr unsigned ABSENT = 0xffffffff;  // a NaN that no arithmetic produces
constexpr int QUADS = HEADS * HEAD_DIM / 4;
// Parts of a unit. The rest by moments is one of them, made here; the rest by codes comes in parts from an earlier kernel.
constexpr int PARTS = NUM_SPLITS + REST_PARTS;
// Shared memory: tiles, then the warps' parts of two items. A unit's parts are collected later in the same memory.
constexpr int TILES_BYTES = WARPS * RING_BYTES, WARP_PARTS_BYTES = 2 * WARPS * HEADS * PART * 4;
constexpr int COLLECTED_BYTES = PARTS * HEADS * PART * 4;
constexpr int UNITS_AT = COLLECTED_BYTES > TILES_BYTES + WARP_PARTS_BYTES ? COLLECTED_BYTES : TILES_BYTES + WARP_PARTS_BYTES;

// Merge four dimensions of NUM parts of one head by their log-sum-exps; the output is unnormalised.
template <int NUM>
__device__ float4 merge(const float* parts, int quad, float& max, float& sum) {
    const float* part = parts + quad / (HEAD_DIM / 4) * PART;
    const int d = quad % (HEAD_DIM / 4) * 4;
    float4 merged = make_float4(0.f, 0.f, 0.f, 0.f);
    max = MINUS_INFINITY, sum = 0.f;
#pragma unroll 4
    for (int i = 0; i < NUM; i++) max = fmaxf(max, part[i * HEADS * PART + ENDS_AT]);
#pragma unroll 4
    for (int i = 0; i < NUM; i++) {
        const float2 ends = *(const float2*)(part + i * HEADS * PART + ENDS_AT);
        const float4 x = *(const float4*)(part + i * HEADS * PART + d);
        const float weight = ends.x == MINUS_INFINITY ? 0.f : exp2_approx(ends.x - max);  // a part without rows; all may be
        sum += weight * ends.y;
        merged.x += weight * x.x, merged.y += weight * x.y, merged.z += weight * x.z, merged.w += weight * x.w;
    }
    return merged;
}

__device__ bool absent(float4 x) {
    return __float_as_uint(x.x) == ABSENT || __float_as_uint(x.y) == ABSENT || __float_as_uint(x.z) == ABSENT ||
           __float_as_uint(x.w) == ABSENT;
}

// Merge the warps' parts of an item, and post the result. Neighbouring items start at different halves of the threads.
__device__ void post_item(float* posted, const float* warp_parts, int item) {
    float* part = posted + (long long)(item + item / NUM_SPLITS * REST_PARTS) * HEADS * PART;
    for (int quad = (threadIdx.x + item % 2 * (THREADS / 2)) % THREADS; quad < QUADS; quad += THREADS) {
        float max, sum;
        const float4 x = merge<WARPS>(warp_parts, quad, max, sum);
        const int head = quad / (HEAD_DIM / 4), d = quad % (HEAD_DIM / 4) * 4;
        store_relaxed(part + head * PART + d, x);
        if (d == 0) store_relaxed(part + head * PART + ENDS_AT, make_float4(max, sum, 0.f, 0.f));
    }
}

// Post the unit's last part, an estimate of the rest, by the half of the threads that does not merge the unit's first item.
__device__ void post_rest(float* posted, const float* products, const char* q, const Unit& unit, int u) {
    float* part = posted + (long long)(u * PARTS + NUM_SPLITS) * HEADS * PART;
    const int first = (threadIdx.x / 32 + (u * NUM_SPLITS + 1) % 2 * (WARPS / 2)) % WARPS;
    for (int head = first; head < HEADS; head += WARPS)
        estimate_rest(part + head * PART, products + head * 2 * HEAD_DIM,
                      q + ((long long)u * HEADS + head) * HEAD_DIM * ELEMENT_BYTES, unit);
}

// Wait for a unit's posted parts, copy them to shared memory, and reset them to ABSENT for the next launch. Arrived data differ
// from ABSENT, so writer and reader need neither a fence nor a counter.
__device__ void collect(float* parts, float* posted) {
    constexpr int NUM = PARTS * HEADS * PART / 4, BATCH = 9;
    const float none = __uint_as_float(ABSENT);
#pragma unroll 1
    for (int first = threadIdx.x; first < NUM; first += THREADS * BATCH) {
        float4 x[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) x[k] = make_float4(none, none, none, none);
        bool all;
        do {
            all = true;
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                if (first + k * THREADS < NUM && absent(x[k])) x[k] = load_relaxed(posted + (first + k * THREADS) * 4);
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                if (first + k * THREADS < NUM && absent(x[k])) all = false;
        } while (!all);
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (first + k * THREADS < NUM) *(float4*)(parts + (first + k * THREADS) * 4) = x[k];
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (first + k * THREADS < NUM) store_relaxed(posted + (first + k * THREADS) * 4, make_float4(none, none, none, none));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_step(
    const char* q,                   // [batch_size, ROW_UNITS, HEADS, HEAD_DIM]
    const long long* far_addresses,  // [num_contexts], each of [NUM_KV_HEADS, rows per head] of CONTEXT_ROW_BYTES
    const int* far_rows_per_head,    // [num_contexts]
    const long long* spill_addresses, const int* spill_rows_per_head, const long long* resident_addresses,
    const int* resident_rows_per_head,
    const char* tails,       // [num_tails, NUM_KV_HEADS, tail_capacity, 2, HEAD_DIM]
    const int* kv_indices,   // [batch_size, ROW_UNITS / SHARES, max_top_k]
    const int* valid_len,    // [batch_size, ROW_UNITS / SHARES]
    const int* context_ids,  // [batch_size]; -1: none, only the tail
    const int* tail_ids, const int* tail_lens,  // [batch_size]; a length of 0: the step's row is idle
    const int* own_lens,      // [batch_size]: the first so many of the request's own rows are left out
    const int* tail_starts,   // [batch_size]: so many of these are stored elsewhere; the tail begins with the next row
    const char* moments,     // [num_contexts, NUM_KV_HEADS, 2 + HEAD_DIM, 2, HEAD_DIM], for ESTIMATE_REST
    const int* middle_lens,  // [num_contexts]: rows that may be selected, for ESTIMATE_REST
    const long long* positions,  // [batch_size], for LOCAL
    const float* sinks,          // [ROW_UNITS, HEADS], for SINKS: a head's sink logit, which has no row
    float* posted,           // [batch_size * ROW_UNITS, PARTS, HEADS, PART], ABSENT between launches
    char* out,               // like q
    float* lse,              // [batch_size, ROW_UNITS, HEADS]: log2 of the sum of exponentials
    int num_items, int max_top_k, int tail_capacity, int num_contexts, int window, int chunk, float scale, float cap) {
    extern __shared__ __align__(16) char shared[];
    float* warp_parts = (float*)(shared + TILES_BYTES);  // [2][WARPS][HEADS][PART]: items alternate between the two
    Unit* units = (Unit*)(shared + UNITS_AT);            // of the block's items
    float* products = (float*)(units + MAX_UNITS);       // [HEADS][2][HEAD_DIM], for ESTIMATE_REST
    // each warp arrives once for each item, and waits only when it needs what the other warps have stored for it
    u64* const all_stored = (u64*)(products + HEADS * 2 * HEAD_DIM * ESTIMATE_REST);
    if (threadIdx.x == 0) init_barrier(all_stored, WARPS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_item = (unsigned)(blockIdx.x * num_items) / gridDim.x;
    const int end_item = (unsigned)((blockIdx.x + 1) * num_items) / gridDim.x;
    const int first_unit = first_item / NUM_SPLITS;
    for (int u = first_unit + warp; u * NUM_SPLITS < end_item; u += WARPS) {
        const int b = u / ROW_UNITS, kv_head = u % ROW_UNITS / (ROW_UNITS / NUM_KV_HEADS);
        const int context = context_ids[b], tail_id = tail_ids[b], own_len = LOCAL ? 0 : own_lens[b];
        const int tail_start = tail_starts[b], tail_len = min(tail_lens[b], tail_start + tail_capacity) - own_len;
        // each lane looks up a different context, so that these loads need not wait for the row's context id
        const int looked_up = num_contexts <= 32 ? min(lane, num_contexts - 1) : max(context, 0);
        const int far_rows = far_rows_per_head[looked_up], spill_rows = spill_rows_per_head[looked_up];
        const int resident_rows = resident_rows_per_head[looked_up];
        const int middle_rows = ESTIMATE_REST ? middle_lens[looked_up] : 0;
        const long long far = far_addresses[looked_up], spill = spill_addresses[looked_up];
        const long long resident = resident_addresses[looked_up];
        if (lane == (num_contexts <= 32 ? max(context, 0) : 0)) {
            Unit& unit = units[u - first_unit];
            int skipped = 0, skipped_in_tail = 0;  // rows outside the window or chunk
            if (LOCAL) {  // resident rows are the context's last, the tail's follow, and the row itself is the last one
                const int position = positions[b], begin = position + 1 - tail_len;
                const int first_seen = chunk > 0 ? position - position % chunk : position + 1 - window;
                skipped = min(max(first_seen - begin + resident_rows, 0), resident_rows);
                skipped_in_tail = max(first_seen - begin, 0);
            }
            const long long head_bytes = (long long)kv_head * CONTEXT_ROW_BYTES;
            unit.far = far + far_rows * head_bytes;
            unit.spill = spill + spill_rows * head_bytes;
            unit.resident = resident + resident_rows * head_bytes + (long long)skipped * CONTEXT_ROW_BYTES;
            unit.tail = (long long)tails + ((long long)tail_id * NUM_KV_HEADS + kv_head) * tail_capacity * ROW_BYTES;
            unit.tail += (long long)(own_len + skipped_in_tail - tail_start) * ROW_BYTES;
            unit.ids = kv_indices + (long long)(u / SHARES) * max_top_k;
            unit.rest_end = (long long)moments + (max(context, 0) * NUM_KV_HEADS + kv_head + 1) * MOMENTS_BYTES;
            unit.middle_len = context < 0 ? 0 : middle_rows;
            unit.resident_len = context < 0 ? 0 : resident_rows - skipped;
            unit.tail_len = tail_len - skipped_in_tail;
            unit.set_far_len(context < 0 ? 0 : max_top_k);  // right in most steps; corrected below
        }
        if (ESTIMATE_REST && context >= 0) {
            __syncwarp();
            for (int i = lane * 128; i < 2 * ROW_BYTES; i += 32 * 128) prefetch_l2(units[u - first_unit].means() + i);
        }
    }
    __syncthreads();
    // the ids of the expected first tile are loaded together with far_len, which decides whether it is the first
    const int split = first_item % NUM_SPLITS, expected = units[0].position(units[0].warps_tile(split));
    __syncthreads();
    // If the rest is by codes, the kernel before this one posts it. That kernel lets this one start once all earlier kernels have
    // ended and all its own blocks have begun. So all input is there, except for rows that are being copied beside it, and
    // `collect` waits for the parts.
    if (ESTIMATE_REST || REST_PARTS == 0 || COPIES_BESIDE) wait_for_earlier_kernels();
    int id = (unsigned)expected < max_top_k ? kv_indices[(long long)(first_unit / SHARES) * max_top_k + expected] : 0;
    if (threadIdx.x < MAX_UNITS && (first_unit + threadIdx.x) * NUM_SPLITS < end_item) {
        const int context = context_ids[(first_unit + threadIdx.x) / ROW_UNITS];
        const int far_len = valid_len[(first_unit + threadIdx.x) / SHARES];
        units[threadIdx.x].set_far_len(context < 0 ? 0 : min(far_len, max_top_k));
    }
    __syncthreads();

    const unsigned ring = (unsigned)__cvta_generic_to_shared(shared) + warp * RING_BYTES;
    Tiles tiles(units, end_item - first_item, split);
    if (tiles.exist() && (tiles.num_items < end_item - first_item || tiles.position() != expected))
        id = tiles.unit->id_at(tiles.position());
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) copy_next(ring + s * TILE_BYTES, tiles, id);
    // Warps do not wait for each other between items: an item is merged after the next one has been computed. A unit's products
    // are read when its first item is merged, and the next unit's must not be written before all warps have read them.
    static_assert(!ESTIMATE_REST || NUM_SPLITS >= 3, "products would be written while they are read");
    auto parts_of = [&](int item) { return warp_parts + (item - first_item) % 2 * (WARPS * HEADS * PART); };
    auto finish = [&](int item) {
        wait_for(all_stored, (item - first_item) % 2);
        post_item(posted, parts_of(item), item);
        if (ESTIMATE_REST && item % NUM_SPLITS == 0)
            post_rest(posted, products, q, units[item / NUM_SPLITS - first_unit], item / NUM_SPLITS);
    };
    Attention attention;
    unsigned slot = ring;
    for (int item = first_item; item < end_item; item++) {
        const int u = item / NUM_SPLITS, split = item % NUM_SPLITS;
        const Unit& unit = units[u - first_unit];
        if (item == first_item || split == 0) attention.load_q(q + (long long)u * HEADS * HEAD_DIM * ELEMENT_BYTES);
        attention.clear();
#pragma unroll 1
        for (int tile = unit.warps_tile(split), end = unit.first_tile(split + 1); tile < end; tile += WARPS) {
            wait_for_copies<STAGES - 1>();
            __syncwarp();  // the other lanes' copies have arrived too
#if CODED
            decode_rows(slot, min(unit.num_coded(tile), TILE));
#endif
            if (ESTIMATE_REST && tile < 0)
                attention.multiply(slot, products + HEAD_DIM + tile * TILE);
            else
                attention.add(slot, unit.total - tile * TILE, scale, cap);
            __syncwarp();  // every lane has read the tile that the next copy replaces
            copy_next(slot, tiles, id);
            slot = slot + TILE_BYTES == ring + RING_BYTES ? ring : slot + TILE_BYTES;
        }
        if (item > first_item) finish(item - 1);
        attention.store(parts_of(item) + warp * HEADS * PART);
        __syncwarp();
        if (lane == 0) arrive(all_stored);
    }
    finish(end_item - 1);
    let_next_kernel_start();  // not earlier: its blocks would take room from this kernel's
    if (COLLECTED_BYTES > TILES_BYTES) __syncthreads();  // the warps' parts of the last item have been read

    // The block with a unit's last item waits for the unit's parts. They come from blocks that begin before it and wait for no
    // later block, so there is no deadlock.
    for (int u = first_unit; (u + 1) * NUM_SPLITS <= end_item; u++) {
        float* unit_posted = posted + (long long)u * PARTS * HEADS * PART;
        float* parts = (float*)shared;
        collect(parts, unit_posted);
        __syncthreads();
        for (int quad = threadIdx.x; quad < QUADS; quad += THREADS) {
            float max, sum;
            float4 x = merge<PARTS>(parts, quad, max, sum);
            const int head = u * HEADS + quad / (HEAD_DIM / 4);
            if (SINKS) {
                const float sink = sinks[u % ROW_UNITS * HEADS + quad / (HEAD_DIM / 4)] * LOG2E;
                const float top = fmaxf(max, sink), kept = exp2_approx(max - top);
                x.x *= kept, x.y *= kept, x.z *= kept, x.w *= kept;
                sum = sum * kept + exp2_approx(sink - top), max = top;
            }
            if (quad % (HEAD_DIM / 4) == 0) lse[head] = sum > 0.f ? max + log2f(sum) : MINUS_INFINITY;
            const float norm = sum > 0.f ? 1.f / sum : 0.f;
            *(Four*)(out + ((long long)u * HEADS * HEAD_DIM + quad * 4) * ELEMENT_BYTES) =
                pack_four(make_float4(x.x * norm, x.y * norm, x.z * norm, x.w * norm));
        }
        __syncthreads();
    }
}

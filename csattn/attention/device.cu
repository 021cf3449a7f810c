// Decode attention of one step over rows that lie in several places.
//
// A unit is one row of the batch and one index head with its HEADS query heads. Its KV rows come in this order: the selected
// far rows, the resident rows, the tail. They are cut into splits, one block each; where the cuts lie depends on the unit's
// own lengths and on the plan, so a unit's bits depend neither on the batch nor on where a row lies. Each warp takes every
// WARPS-th tile of the split and copies tiles ahead of use into a ring of its own. The warps' results merge in shared memory,
// the splits' in the block that arrives last, both in a fixed order.
//
// Defined by the caller: HEAD_DIM, HEADS, ELEMENT (bf16, f16 or f32), ELEMENT_BYTES, WARPS, STAGES,
// BLOCKS_PER_SM, MIN_SPLIT_ROWS, WARP_ATTENTION (the file to include for the element).

constexpr int TILE = 16;  // KV rows
constexpr int THREADS = 32 * WARPS;
constexpr int ROW_BYTES = 2 * HEAD_DIM * ELEMENT_BYTES;  // K, then V
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int PITCH = ROW_BYTES + 16;  // an odd number of chunks: the same chunk of 8 rows lies in 8 different banks
constexpr int TILE_BYTES = TILE * PITCH;
constexpr int RING_BYTES = STAGES * TILE_BYTES;
constexpr int MAX_AT = HEAD_DIM, SUM_AT = HEAD_DIM + 1;  // in a part: unnormalised output, then maximum and sum of weights
constexpr int PART = HEAD_DIM + 4;                       // floats; keeps parts on 16 bytes
constexpr unsigned ALL = 0xffffffff;
static_assert(HEAD_DIM % 16 == 0 && HEADS >= 1 && HEADS <= 8, "tiles are 16 wide and pad a unit's heads to 8");
static_assert(HEADS * PART * 4 <= RING_BYTES, "a warp leaves its part where its ring was");

#define MINUS_INFINITY __int_as_float(0xff800000)  // NVRTC has no math.h

__device__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Relative weight of a part; a part without rows has maximum -inf, and so may the whole.
__device__ float part_weight(float part_max, float max) {
    return part_max == MINUS_INFINITY ? 0.f : exp2_of(part_max - max);
}

struct Unit {
    const char *far, *spill, *resident, *tail;
    const int* ids;  // of the far rows
    int far_len, resident_len;

    __device__ int id_at(int position, int end) const {
        return position < min(far_len, end) ? __ldg(ids + position) : 0;
    }

    __device__ const char* row(int position, int id) const {
        const char* base = id >= 0 ? far : spill;
        long long row = id >= 0 ? id : -2 - id;
        if (position >= far_len) {
            bool in_tail = position >= far_len + resident_len;
            base = in_tail ? tail : resident;
            row = position - far_len - (in_tail ? resident_len : 0);
        }
        return base + row * ROW_BYTES;
    }
};

// Start copying the tile that begins at `first`, one commit group; lane r has the id of row r. Rows past `end` become zeros.
__device__ void copy_tile(unsigned tile, const Unit& unit, int first, int end, int id) {
    const int lane = threadIdx.x % 32;
    const long long row = first < end ? (long long)unit.row(first + lane % TILE, id) : 0;
    if (first < end) {
#pragma unroll
        for (int i = 0; i < TILE * CHUNKS / 32; i++) {
            const int r = (i * 32 + lane) / CHUNKS, c = (i * 32 + lane) % CHUNKS;
            const long long from = __shfl_sync(ALL, row, r) + c * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tile + r * PITCH + c * 16), "l"(from),
                         "r"(first + r < end ? 16 : 0)
                         : "memory");
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

#include WARP_ATTENTION  // struct Attention and store_out

// Softmax attention over rows begin .. end of the unit; each warp leaves its part at the start of its ring.
__device__ void attend_split(char* shared, const Unit& unit, const char* q_heads, int begin, int end, float scale) {
    constexpr int STRIDE = WARPS * TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned ring = (unsigned)__cvta_generic_to_shared(shared) + warp * RING_BYTES;
    int first = begin + warp * TILE;
    int ids[STAGES + 1];  // the ids of a tile are on their way before the tile's copy starts
#pragma unroll
    for (int s = 0; s <= STAGES; s++) ids[s] = unit.id_at(first + s * STRIDE + lane % TILE, end);
#pragma unroll
    for (int s = 0; s < STAGES; s++) copy_tile(ring + s * TILE_BYTES, unit, first + s * STRIDE, end, ids[s]);
    int next_id = ids[STAGES];
    Attention attention(q_heads);
    for (int stage = 0; first < end; first += STRIDE, stage = (stage + 1) % STAGES) {
        const unsigned tile = ring + stage * TILE_BYTES;
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp();  // the other lanes' copies have arrived too
        attention.add(q_heads, tile, end - first, scale);
        __syncwarp();  // every lane has read the tile that the next copy replaces
        const int ahead = first + STAGES * STRIDE;
        copy_tile(tile, unit, ahead, end, next_id);
        next_id = unit.id_at(ahead + STRIDE + lane % TILE, end);
    }
    attention.store((float*)(shared + warp * RING_BYTES));
}

// Merge the warps' parts of one head, four dimensions of it: the output, unnormalised.
__device__ float4 merge_warps(const char* shared, int head, int d, float& max, float& sum) {
    max = MINUS_INFINITY, sum = 0.f;
    float4 merged = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int w = 0; w < WARPS; w++) max = fmaxf(max, ((const float*)(shared + w * RING_BYTES))[head * PART + MAX_AT]);
    for (int w = 0; w < WARPS; w++) {
        const float* part = (const float*)(shared + w * RING_BYTES) + head * PART;
        const float weight = part_weight(part[MAX_AT], max);
        const float4 x = *(const float4*)(part + d);
        sum += weight * part[SUM_AT];
        merged.x += weight * x.x, merged.y += weight * x.y, merged.z += weight * x.z, merged.w += weight * x.w;
    }
    return merged;
}

// The splits' weights in the whole, divided by the sum of all: [HEADS][num_splits].
__device__ void weigh_splits(float* weights, const float* parts, int num_splits) {
    const int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < HEADS; head += WARPS) {
        float max = MINUS_INFINITY, sum = 0.f;
        for (int s = lane; s < num_splits; s += 32) max = fmaxf(max, __ldcg(parts + (s * HEADS + head) * PART + MAX_AT));
        for (int step = 1; step < 32; step *= 2) max = fmaxf(max, __shfl_xor_sync(ALL, max, step));
        for (int s = lane; s < num_splits; s += 32) {
            const float2 part = __ldcg((const float2*)(parts + (s * HEADS + head) * PART + MAX_AT));
            const float weight = part_weight(part.x, max);
            weights[head * num_splits + s] = weight;
            sum += weight * part.y;
        }
        for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(ALL, sum, step);
        for (int s = lane; s < num_splits; s += 32) weights[head * num_splits + s] /= sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attend_step(
    const char* q,                   // [batch_size, num_index_heads, HEADS, HEAD_DIM]
    const long long* far_addresses,  // [num_contexts], each of [num_kv_heads, rows per head, 2, HEAD_DIM]
    const int* far_rows_per_head, const long long* spill_addresses, const int* spill_rows_per_head,
    const long long* resident_addresses, const int* resident_rows_per_head,
    const char* tails,        // [num_tails, num_kv_heads, tail_capacity, 2, HEAD_DIM]
    const int* kv_indices,    // [batch_size, num_index_heads, max_top_k]
    const int* valid_len,     // [batch_size, num_index_heads]
    const int* context_ids,   // [batch_size]
    const int* tail_ids, const int* tail_lens,
    float* partials,          // [batch_size * num_index_heads, max_splits, HEADS, PART]
    unsigned* arrived,        // [batch_size * num_index_heads], zero between launches
    char* out,                // like q
    long long num_index_heads, long long num_kv_heads, long long max_top_k, long long max_resident_len,
    long long tail_capacity, long long max_splits, float scale) {
    extern __shared__ __align__(16) char shared[];
    const int unit_id = blockIdx.x, split = blockIdx.y;  // splits that few units have come last in the grid
    const int b = unit_id / (int)num_index_heads;
    const int kv_head = unit_id % (int)num_index_heads / (int)(num_index_heads / num_kv_heads);
    const int context = context_ids[b];
    const bool idle = context < 0;
    const int tail_len = idle ? 0 : min(tail_lens[b], (int)tail_capacity);
    Unit unit;
    unit.far_len = idle ? 0 : min(valid_len[unit_id], (int)max_top_k);
    unit.ids = kv_indices + (long long)unit_id * max_top_k;
    unit.tail = tails + ((long long)(idle ? 0 : tail_ids[b]) * num_kv_heads + kv_head) * tail_capacity * ROW_BYTES;
    // of the resident rows only the plan's bound goes in, so that ids are loaded while the context is looked up
    const int most_rows = unit.far_len + tail_len + (int)max_resident_len, slice = TILE * WARPS;
    const int even_rows = (most_rows + (int)max_splits - 1) / (int)max_splits;
    const int split_rows = max(MIN_SPLIT_ROWS, (even_rows + slice - 1) / slice * slice);
    const int begin = split * split_rows;
    unit.resident_len = idle ? 0 : min(resident_rows_per_head[context], (int)max_resident_len);
    if (!idle) {
        const long long head_bytes = (long long)kv_head * ROW_BYTES;
        unit.far = (const char*)(far_addresses[context] + far_rows_per_head[context] * head_bytes);
        unit.spill = (const char*)(spill_addresses[context] + spill_rows_per_head[context] * head_bytes);
        unit.resident = (const char*)(resident_addresses[context] + resident_rows_per_head[context] * head_bytes);
    }
    const int total = unit.far_len + unit.resident_len + tail_len;
    const int num_splits = max(1, (total + split_rows - 1) / split_rows);
    if (split >= num_splits) return;

    const long long head_at = (long long)unit_id * HEADS;
    attend_split(shared, unit, q + head_at * HEAD_DIM * ELEMENT_BYTES, begin, min(begin + split_rows, total), scale);
    __syncthreads();
    float* parts = partials + (long long)unit_id * max_splits * HEADS * PART;
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM / 4; i += THREADS) {
        const int head = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        float max, sum;
        float4 x = merge_warps(shared, head, d, max, sum);
        if (num_splits == 1) {
            const float norm = sum > 0.f ? 1.f / sum : 0.f;
            store_out(out + ((head_at + head) * HEAD_DIM + d) * ELEMENT_BYTES,
                      make_float4(x.x * norm, x.y * norm, x.z * norm, x.w * norm));
        } else {
            float* part = parts + (split * HEADS + head) * PART;
            *(float4*)(part + d) = x;
            if (d == 0) *(float2*)(part + MAX_AT) = make_float2(max, sum);
        }
    }
    if (num_splits == 1) return;

    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        __threadfence();  // this block's part is seen before its arrival is
        last = atomicAdd(arrived + unit_id, 1) == num_splits - 1;
        if (last) arrived[unit_id] = 0;  // for the next launch
        __threadfence();  // and all parts are, after the last arrival
    }
    if (!__syncthreads_or(last)) return;
    float* weights = (float*)shared;
    weigh_splits(weights, parts, num_splits);
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM / 4; i += THREADS) {
        const int head = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        float4 merged = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
        for (int s = 0; s < num_splits; s++) {
            const float weight = weights[head * num_splits + s];
            const float4 x = __ldcg((const float4*)(parts + (s * HEADS + head) * PART + d));
            merged.x += weight * x.x, merged.y += weight * x.y, merged.z += weight * x.z, merged.w += weight * x.w;
        }
        store_out(out + ((head_at + head) * HEAD_DIM + d) * ELEMENT_BYTES, merged);
    }
}

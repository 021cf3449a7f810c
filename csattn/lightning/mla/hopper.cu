// Attention of 64 heads of a query over selected rows: 512 channels, which are also the values, and ROPE_DIM others.
//
// Warp specialization: one warpgroup gathers parts of 32 rows into a ring of stages in shared memory; two attend. These
// compute the logits of alternate parts, but both sum all parts, each in half of the channels: the softmax weights of a
// part and their base pass through shared memory. While one turns logits into weights, the tensor cores have the
// other's products, and its own sums of the part before. Rows are stored once, for both products.
//
// Compiled for THREADS (384), ROPE_DIM (0 or 64), HALF (bf16 or f16), HAS_SINK.

#include "products.cuh"

constexpr int HEADS = 64, LATENT_DIM = 512, STAGES = 4;
constexpr int PART = 32;  // rows of a stage
constexpr int LINE = 64;  // channels of 128 bytes, which are contiguous in shared memory
constexpr int LINES = (LATENT_DIM + ROPE_DIM) / LINE, LATENT_LINES = LATENT_DIM / LINE;
constexpr int BLOCK_BYTES = HEADS * LINE * 2;  // of one line of all heads
constexpr int PART_BYTES = PART * LINE * 2;    // of a part's rows, of one line
constexpr int GROUP = 128, ATTENDING = 2 * GROUP;
constexpr float LN_2 = 0.6931471805599453f, LOG2_E = 1.4426950408889634f;
#define NOTHING __int_as_float(0xff800000)  // -inf: the logit of a missing row
// By how much a logit may exceed the online softmax's base (log2) before sums are rescaled: no precision is lost by it.
constexpr float LEEWAY = 8;
static_assert(THREADS == ATTENDING + GROUP && 2 * PART == LINE, "a line has the weights of two parts");

struct alignas(1024) Shared {
    char q[LINES][BLOCK_BYTES];
    char rows[STAGES][LINES][PART_BYTES];
    char weights[BLOCK_BYTES];  // softmax weights of two parts: [HEADS, 2 * PART]
    float of_two[2][HEADS];     // the bases of the weights, of two parts; at the end the totals of two groups
    u64 filled[STAGES], free[STAGES], weights_ready[2];
    int end;  // one past the selection's last place that holds a row
};

struct Selection {
    const int* indices;  // [top_k]
    int num_rows, end;

    // The row at a place, or -1.
    __device__ __forceinline__ int operator[](int place) const {
        const int row = place < end ? __ldg(indices + place) : -1;
        return static_cast<u32>(row) < static_cast<u32>(num_rows) ? row : -1;
    }
};

// One past the last place that holds a row: selections are padded at their end.
__device__ int find_end(const int* indices, int top_k, int num_rows, int* end) {
    int last = 0;
    for (int place = threadIdx.x; place < top_k; place += THREADS)
        if (static_cast<u32>(indices[place]) < static_cast<u32>(num_rows)) last = place + 1;
    last = __reduce_max_sync(0xffffffffu, last);
    if (threadIdx.x % 32 == 0) atomicMax(end, last);
    __syncthreads();
    return *end;
}

// Loads the query's vectors; heads that do not exist are 0.
__device__ void load_query(Shared& s, const char* q_nope, const char* q_pe, int num_heads) {
    for (int i = threadIdx.x; i < LINES * HEADS * 8; i += THREADS) {
        const int unit = i % 8, line = i / 8 % LINES, head = i / (8 * LINES), there = head < num_heads ? 16 : 0;
        const char* from = line < LATENT_LINES ? q_nope + head * (LATENT_DIM * 2) + line * 128
                                               : q_pe + head * (ROPE_DIM * 2) + (line - LATENT_LINES) * 128;
        start_copy(shared_address(s.q[line]) + offset_of(head, unit), there ? from + unit * 16 : q_nope, there);
    }
    end_copy_group();
    wait_for_copies<0>();
}

// Copies rows into the ring (cp.async): eight threads share a row, and each copies 16 bytes of all of its lines.
__device__ void gather(Shared& s, const Selection& selection, const char* ckv, const char* kpe, long long ckv_bytes,
                       long long kpe_bytes) {
    constexpr int TOGETHER = GROUP / 8, EACH = PART / TOGETHER;
    const int first = threadIdx.x % GROUP / 8, unit = threadIdx.x % 8;
    const int parts = (selection.end + PART - 1) / PART;
    for (int part = 0; part < parts; ++part) {
        const int stage = part % STAGES;
        int row[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) row[i] = selection[part * PART + i * TOGETHER + first];
        wait_for(&s.free[stage], part / STAGES % 2 ^ 1);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int count = row[i] < 0 ? 0 : 16;
            const char* latent = ckv + max(row[i], 0) * ckv_bytes + unit * 16;
            const char* rope = kpe + max(row[i], 0) * kpe_bytes + unit * 16;
            const u32 to = shared_address(s.rows[stage]) + offset_of(i * TOGETHER + first, unit);
#pragma unroll
            for (int line = 0; line < LINES; ++line)
                start_copy(to + line * PART_BYTES,
                           line < LATENT_LINES ? latent + line * 128 : rope + (line - LATENT_LINES) * 128, count);
        }
        arrive_when_copied(&s.filled[stage]);
    }
    end_copy_group();
    wait_for_copies<0>();
}

// One thread's part of a group's logits, sums and statistics: two heads, `head` and `head` + 8.
struct Attending {
    Shared& s;
    const int group, head, column;  // the thread's first column: 2 (lane % 4)
    // total: of own columns in the group's parts, in 2 ** base; sums: of rows of all parts, in 2 ** of_sums
    float base[2] = {NOTHING, NOTHING}, total[2] = {0, 0}, of_sums[2] = {NOTHING, NOTHING};
    float logits[16], sums[128];

    __device__ __forceinline__ Attending(Shared& shared)
        : s(shared), group(threadIdx.x / GROUP), head(threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4),
          column(threadIdx.x % 4 * 2) {
#pragma unroll
        for (int i = 0; i < 128; ++i) sums[i] = 0;
    }

    __device__ __forceinline__ void start_logits(int part) {
        const int stage = part % STAGES;
        wait_for(&s.filled[stage], part / STAGES % 2);
        fence_async_proxy();
        const u64 q = operand_descriptor(shared_address(s.q)), rows = operand_descriptor(shared_address(s.rows[stage]));
        begin_products();
#pragma unroll
        for (int step = 0; step < LINES * 4; ++step) {
            const int line = step / 4, in_line = step % 4 * 32;
            const int of_q = line * BLOCK_BYTES + in_line, of_rows = line * PART_BYTES + in_line;
            multiply_rows(logits, q + of_q / 16, rows + of_rows / 16, step > 0);
        }
        end_products();
    }

    // Which of the thread's 8 columns hold rows: bits 2 j + e.
    __device__ __forceinline__ u32 find_rows(const Selection& selection, int part) const {
        u32 there = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) there |= (selection[part * PART + i / 2 * 8 + column + i % 2] >= 0) << i;
        return there;
    }

    // Turns logits into weights in units of 2 ** base, for both groups. The base stays if no logit is LEEWAY above it.
    __device__ __forceinline__ void compute_weights(int part, u32 there, float scale) {
        float most[2] = {NOTHING, NOTHING};
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const int i = k / 2 % 2;
            logits[k] = there >> (k / 4 * 2 + k % 2) & 1 ? logits[k] * scale : NOTHING;
            most[i] = max(most[i], logits[k]);
        }
        if (part > 1) wait_for(&s.free[(part - 2) % STAGES], (part - 2) / STAGES % 2);  // until its weights are read
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            most[i] = max(most[i], __shfl_xor_sync(0xffffffffu, most[i], 1));
            most[i] = max(most[i], __shfl_xor_sync(0xffffffffu, most[i], 2));
            if (most[i] <= base[i] + LEEWAY) most[i] = base[i];
            if (column == 0) s.of_two[part % 2][head + 8 * i] = most[i];
            const float finite = most[i] == NOTHING ? 0 : most[i];
            total[i] *= exp2_approx(base[i] - finite);
            base[i] = most[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float first = exp2_approx(logits[4 * j + 2 * i] - finite);
                const float second = exp2_approx(logits[4 * j + 2 * i + 1] - finite);
                total[i] += first + second;
                const u32 place = offset_of(head + 8 * i, part % 2 * 4 + j) + column * 2;
                *reinterpret_cast<u32*>(s.weights + place) = pack(first, second);
            }
        }
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&s.weights_ready[part % 2]);
    }

    // Waits for a part's weights, and rescales sums to their base. Products may be in flight for logits, not sums.
    template <bool WITH_LOGITS> __device__ __forceinline__ void wait_for_weights(int part) {
        wait_for(&s.weights_ready[part % 2], part / 2 % 2);
        bool changed = false;
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float of_part = s.of_two[part % 2][head + 8 * i], finite = of_part == NOTHING ? 0 : of_part;
            total[i] *= exp2_approx(base[i] - finite), shrink[i] = exp2_approx(of_sums[i] - finite);
            changed |= of_sums[i] != of_part;
            base[i] = of_sums[i] = of_part;
        }
        if (__any_sync(0xffffffffu, changed)) {
            if (WITH_LOGITS) wait_for_products<0>();
#pragma unroll
            for (int k = 0; k < 128; ++k) sums[k] *= shrink[k / 2 % 2];
        }
    }

    // Starts adding a part's rows times their weights to the sums, in the group's half of the channels.
    __device__ __forceinline__ void start_sums(int part) {
        const char* values = s.rows[part % STAGES][group * LATENT_LINES / 2];
        const u64 weights = operand_descriptor(shared_address(s.weights) + part % 2 * (PART * 2));
        const u64 rows = operand_descriptor(shared_address(values), PART_BYTES);
        begin_products();
#pragma unroll
        for (int step = 0; step < PART / 16; ++step)
            multiply_columns(sums, weights + step * 32 / 16, rows + step * 2048 / 16);
        end_products();
    }

    __device__ __forceinline__ void release(int part) {
        if (threadIdx.x % 32 == 0) arrive(&s.free[part % STAGES]);
    }

    // Adds a part once its weights are published; no other products are in flight.
    __device__ __forceinline__ void add_part(int part) {
        wait_for_weights<false>(part);
        start_sums(part);
        wait_for_products<0>(sums);
        release(part);
    }

    // Attends to the group's own parts, in turn with adding the other group's.
    __device__ __forceinline__ void attend(const Selection& selection, float scale) {
        const int parts = (selection.end + PART - 1) / PART;
        int part = group;
        if (part == 0 && parts > 0) {
            start_logits(0);
            wait_for_products<0>(logits);
            compute_weights(0, find_rows(selection, 0), scale);
            add_part(0);
            part = 2;
        }
        for (; part < parts; part += 2) {
            start_logits(part);
            const u32 there = find_rows(selection, part);
            wait_for_weights<true>(part - 1);
            start_sums(part - 1);
            wait_for_products<1>(logits);
            compute_weights(part, there, scale);
            wait_for_products<0>(sums);
            release(part - 1);
            add_part(part);
        }
        if (0 < part && part <= parts) add_part(part - 1);
    }

    __device__ __forceinline__ void write(const float* sink, int num_heads, u32* out, float* lse) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1);
            total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
        }
        sync_named_barrier<1, ATTENDING>();
        if (column == 0) s.of_two[group][head] = total[0], s.of_two[group][head + 8] = total[1];
        sync_named_barrier<2, ATTENDING>();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = head + 8 * i;
            if (row >= num_heads) continue;
            const float sum = s.of_two[0][row] + s.of_two[1][row], norm = sum == 0 ? 1 : sum;  // NaN stays
            const float log2_sum = base[i] == -NOTHING ? base[i] : base[i] + log2f(norm);
            float factor = 1 / norm;
            if (HAS_SINK) factor /= 1 + exp2_approx(sink[row] * LOG2_E - (sum == 0 ? 0 : log2_sum));
            if (group == 0 && column == 0) lse[row] = log2_sum * LN_2;
            u32* to = out + (row * LATENT_DIM + group * (LATENT_DIM / 2) + column) / 2;
#pragma unroll
            for (int j = 0; j < 32; ++j)
                to[j * 4] = pack(sums[4 * j + 2 * i] * factor, sums[4 * j + 2 * i + 1] * factor);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_prefill(
    const char* __restrict__ q_nope,   // [num_queries, num_heads, LATENT_DIM]
    const char* __restrict__ q_pe,     // [num_queries, num_heads, ROPE_DIM]
    const char* __restrict__ ckv,      // [num_rows, LATENT_DIM], rows ckv_bytes apart
    const char* __restrict__ kpe,      // [num_rows, ROPE_DIM], rows kpe_bytes apart
    const int* __restrict__ indices,   // [num_queries, top_k]
    const float* __restrict__ sink,    // [num_heads]
    char* __restrict__ out,            // [num_queries, num_heads, LATENT_DIM], written
    float* __restrict__ lse,           // [num_queries, num_heads], written
    long long ckv_bytes, long long kpe_bytes, long long num_rows, long long num_heads, long long top_k,
    double scale                       // softmax_scale * log2(e)
) {
    extern __shared__ Shared shared[];
    Shared& s = *shared;
    const int blocks = (num_heads + HEADS - 1) / HEADS, first_head = blockIdx.x % blocks * HEADS;
    const long long query = blockIdx.x / blocks, pair = query * num_heads + first_head;
    const int heads = min(static_cast<int>(num_heads) - first_head, HEADS);
    indices += query * top_k;
    if (threadIdx.x == 0) {
        s.end = 0;
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(&s.filled[stage], GROUP);
            init_barrier(&s.free[stage], ATTENDING / 32);
        }
        for (int i = 0; i < 2; ++i) init_barrier(&s.weights_ready[i], GROUP / 32);
    }
    __syncthreads();
    load_query(s, q_nope + pair * (LATENT_DIM * 2), q_pe + pair * (ROPE_DIM * 2), heads);
    fence_async_proxy();
    const int end = find_end(indices, top_k, num_rows, &s.end);
    const Selection selection{indices, static_cast<int>(num_rows), end};
    if (threadIdx.x / GROUP == 2) {
        decrease_registers<56>();
        gather(s, selection, ckv, kpe, ckv_bytes, kpe_bytes);
    } else {
        increase_registers<224>();
        Attending attending(s);
        attending.attend(selection, scale);
        attending.write(sink + first_head, heads, reinterpret_cast<u32*>(out) + pair * (LATENT_DIM / 2), lse + pair);
    }
}

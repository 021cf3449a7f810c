// Full attention (split-K) to rows in few bits: KIVI, TurboQuant and q4_0. Codes are decoded in the registers from which tensor
// cores multiply. A tile is 32 rows of a KV head; its codes, scales and zero points are contiguous, in the order of the lanes.
//
// Compiled for HEAD_DIM, GROUP (query heads of a KV head, at most 8), NUM_KV_HEADS, THREADS, STAGES (tiles in a warp's ring
// buffer), NUM_SPLITS, BLOCKS_OF_MULTIPROCESSOR, and for a format: LEVELS (codes are indexes into a table of levels, 4 bits for
// the first half of the dimensions and 3 for the second; otherwise they are numbers of BITS bits), BLOCK (dimensions of a row
// that share a scale), BY_CHANNEL (a dimension's keys in a tile share a scale and a zero point, and values have zero points
// too), MIDDLE (the code of zero).

#include "../../csattn/cuda/warps.cuh"

#define MINUS_INFINITY __int_as_float(0xff800000)  // NVRTC has no math.h

constexpr int STEPS = HEAD_DIM / 16;       // of 16 dimensions
constexpr int BLOCKS = HEAD_DIM / BLOCK;
constexpr int STEPS_OF_BLOCK = BLOCK / 16;
constexpr int WORDS = LEVELS ? 7 : HEAD_DIM * BITS / 64;  // of codes that a lane holds for 16 rows
constexpr int CODE_BYTES = 2 * WORDS * 32 * 4;            // of a tile's keys, or of its values
constexpr int KEY_SCALE_BYTES = BY_CHANNEL ? 2 * HEAD_DIM : 64 * BLOCKS, VALUE_SCALE_BYTES = 64 * BLOCKS;
constexpr int KEY_SCALES = CODE_BYTES, KEY_ZEROS = KEY_SCALES + KEY_SCALE_BYTES;
constexpr int VALUES = KEY_ZEROS + (BY_CHANNEL ? KEY_SCALE_BYTES : 0);
constexpr int VALUE_SCALES = VALUES + CODE_BYTES, VALUE_ZEROS = VALUE_SCALES + VALUE_SCALE_BYTES;
constexpr int TILE_BYTES = VALUE_ZEROS + (BY_CHANNEL ? VALUE_SCALE_BYTES : 0);
constexpr int PART = HEAD_DIM + 2;  // of a query head: its unnormalised output, the maximum of its logits, the sum of its weights
// Pairs of bfloat16 numbers. A code put into the last bits of 128 adds its value.
constexpr u32 ONE = 0x3f803f80u, HUNDRED_TWENTY_EIGHT = 0x43004300u;
constexpr u32 MINUS_128 = 0xc300c300u, MINUS_MIDDLE = MINUS_128 + MIDDLE * 0x10001u;
static_assert(GROUP <= 8 && HEAD_DIM % BLOCK == 0 && BLOCK % 16 == 0, "a column for each head, a scale for whole products");
static_assert(!LEVELS || (HEAD_DIM == 128 && BLOCK == 64), "words of levels are for halves of 64");

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// A lane's codes of 16 x HEAD_DIM numbers, in pairs: four for each step of 16, in the order of mma's operand a.
struct Codes {
    u32 words[WORDS];

    __device__ __forceinline__ Codes(const char* from) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < WORDS / 4; ++i) {
            const uint4 four = reinterpret_cast<const uint4*>(from)[i * 32 + lane];
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
#pragma unroll
        for (int i = WORDS / 4 * 4; i < WORDS; ++i) words[i] = reinterpret_cast<const u32*>(from)[i * 32 + lane];
    }

    // A pair of 128 + code.
    __device__ __forceinline__ u32 above_128(int pair) const {
        constexpr int PAIRS = 16 / BITS;  // of a word
        return and_or(words[pair / PAIRS] >> pair % PAIRS * BITS, 0x10001u * ((1 << BITS) - 1), HUNDRED_TWENTY_EIGHT);
    }

    // A pair of levels. The table has eight entries of two bytes, low bytes apart from high ones.
    __device__ __forceinline__ u32 levels_of(int pair, const uint4 (&table)[2]) const {
        const int half = pair / 16, four = pair % 16 / 2;
        const u32 *of = words + 4 * half, x = four < 6 ? of[four / 2]
            : of[0] >> 3 & 0x11111111u | of[1] >> 2 & 0x22222222u | of[2] >> 1 & 0x44444444u;
        const u32 entries = (four % 2 ? x >> 16 : x) & 0x7777u;
        const u32 low = __byte_perm(table[half].x, table[half].y, entries);
        const u32 high = __byte_perm(table[half].z, table[half].w, entries);
        const u32 both = __byte_perm(low, high, pair % 2 ? 0x7362 : 0x5140);
        return half ? both : both ^ (of[3] << (15 - pair)) & 0x80008000u;  // codes of four bits: a sign and a magnitude
    }

    __device__ __forceinline__ u32 numbers(int pair, const uint4 (&table)[2]) const {
        if constexpr (LEVELS != 0) return levels_of(pair, table);
        else return fma_bf16(above_128(pair), ONE, MINUS_MIDDLE);
    }

    __device__ __forceinline__ void numbers(u32 (&a)[4], int step, const uint4 (&table)[2]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = numbers(4 * step + i, table);
    }
};

// x: the numbers of row lane / 4 in columns 2 (lane % 4) and the next. Returns those of the transposed matrix.
__device__ __forceinline__ u32 transposed(u32 x) {
    const int lane = threadIdx.x % 32, from = lane % 4 * 8 + lane / 8;
    const u32 first = __shfl_sync(ALL_LANES, x, from), second = __shfl_sync(ALL_LANES, x, from + 4);
    return __byte_perm(first, second, lane / 4 % 2 ? 0x7632 : 0x5410);
}

// The running sums of a warp (online softmax). A lane accumulates query heads 2 (lane % 4) and the next.
struct Attention {
    u32 q[STEPS][2];
    float out[STEPS][4];  // dimension 16 n + lane / 4 of both heads, then the dimension 8 further
    float zero[4];        // weighted zero points of values, for block lane / 4
    float max[2], sum[2];  // of base-2 logits; sum is over the lane's own rows

    // heads: [GROUP, HEAD_DIM]
    __device__ __forceinline__ void begin(const u32* heads) {
        const int lane = threadIdx.x % 32, head = lane / 4;
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            for (int i = 0; i < 2; ++i) q[k][i] = head < GROUP ? heads[head * HEAD_DIM / 2 + 8 * k + 4 * i + lane % 4] : 0;
#pragma unroll
        for (int n = 0; n < STEPS; ++n)
            for (int i = 0; i < 4; ++i) out[n][i] = 0;
        for (int i = 0; i < 4; ++i) zero[i] = 0;
        for (int i = 0; i < 2; ++i) max[i] = MINUS_INFINITY, sum[i] = 0;
    }

    // products: of row 16 half + lane / 4 with both heads, then of the row 8 further
    __device__ __forceinline__ void multiply_keys(const char* tile, float (&products)[2][4], const uint4 (&table)[2]) const {
        const int lane = threadIdx.x % 32;
        if constexpr (BY_CHANNEL != 0) {
            const uint2* scales = reinterpret_cast<const uint2*>(tile + KEY_SCALES) + lane % 4 * STEPS;
            const uint2* zeros = reinterpret_cast<const uint2*>(tile + KEY_ZEROS) + lane % 4 * STEPS;
            u32 scaled[STEPS][2];
            float of_all[4] = {};  // what does not depend on codes: zero points, and -128 times the scales
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                const uint2 scale = scales[k], zero_point = zeros[k];
                scaled[k][0] = fma_bf16(q[k][0], scale.x, 0), scaled[k][1] = fma_bf16(q[k][1], scale.y, 0);
                multiply_values(of_all, {zero_point.x, zero_point.x, zero_point.y, zero_point.y}, q[k][0], q[k][1]);
                multiply_values(of_all, {MINUS_128, MINUS_128, MINUS_128, MINUS_128}, scaled[k][0], scaled[k][1]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Codes codes(tile + half * CODE_BYTES / 2);
                for (int i = 0; i < 4; ++i) products[half][i] = of_all[i];
#pragma unroll
                for (int k = 0; k < STEPS; ++k) {
                    u32 a[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[i] = codes.above_128(4 * k + i);
                    multiply_values(products[half], a, scaled[k][0], scaled[k][1]);
                }
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Codes codes(tile + half * CODE_BYTES / 2);
                for (int i = 0; i < 4; ++i) products[half][i] = 0;
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) {
                    float of_block[4] = {};
#pragma unroll
                    for (int k = b * STEPS_OF_BLOCK; k < (b + 1) * STEPS_OF_BLOCK; ++k) {
                        u32 a[4];
                        codes.numbers(a, k, table);
                        multiply_values(of_block, a, q[k][0], q[k][1]);
                    }
                    const u32 scale = reinterpret_cast<const u32*>(tile + KEY_SCALES)[(lane / 4 * BLOCKS + b) * 2 + half];
                    for (int i = 0; i < 4; ++i) products[half][i] += of_block[i] * (i < 2 ? low_of(scale) : high_of(scale));
                }
            }
        }
    }

    __device__ __forceinline__ void add(const char* tile, float scale, const uint4 (&table)[2]) {
        const int lane = threadIdx.x % 32;
        float p[2][4];
        multiply_keys(tile, p, table);
        float kept[2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            float top = max[head];
            for (int i = head; i < 4; i += 2) top = fmaxf(top, fmaxf(p[0][i], p[1][i]) * scale);
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
            kept[head] = exp2_approx(max[head] - top);
            max[head] = top, sum[head] *= kept[head];
        }
        u32 weights[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) {
                p[half][i] = exp2_approx(p[half][i] * scale - max[i % 2]);
                sum[i % 2] += p[half][i];
            }
            weights[2 * half] = transposed(pack_bf16(p[half][0], p[half][1]));
            weights[2 * half + 1] = transposed(pack_bf16(p[half][2], p[half][3]));
        }
        if (__any_sync(ALL_LANES, kept[0] < 1.f || kept[1] < 1.f)) {
#pragma unroll
            for (int n = 0; n < STEPS; ++n)
                for (int i = 0; i < 4; ++i) out[n][i] *= kept[i % 2];
            for (int i = 0; i < 4; ++i) zero[i] *= kept[i % 2];
        }
        if constexpr (BY_CHANNEL != 0) {
            uint4 points = {};
            if (lane / 4 < BLOCKS) points = reinterpret_cast<const uint4*>(tile + VALUE_ZEROS)[lane % 4 * BLOCKS + lane / 4];
            multiply_values(zero, {points.x, 0, points.y, 0}, weights[0], weights[1]);
            multiply_values(zero, {points.z, 0, points.w, 0}, weights[2], weights[3]);
        }
        const uint4* scales = reinterpret_cast<const uint4*>(tile + VALUE_SCALES) + lane % 4 * BLOCKS;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Codes codes(tile + VALUES + half * CODE_BYTES / 2);
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const uint4 of_rows = scales[b];
                const u32 first = fma_bf16(weights[2 * half], half ? of_rows.z : of_rows.x, 0);
                const u32 second = fma_bf16(weights[2 * half + 1], half ? of_rows.w : of_rows.y, 0);
#pragma unroll
                for (int n = b * STEPS_OF_BLOCK; n < (b + 1) * STEPS_OF_BLOCK; ++n) {
                    u32 a[4];
                    codes.numbers(a, n, table);
                    multiply_values(out[n], a, first, second);
                }
            }
        }
    }

    // part: [GROUP, PART]; zeros: [GROUP, BLOCKS]
    __device__ __forceinline__ void store(float* part, float* zeros) {
        const int lane = threadIdx.x % 32;
        for (int step = 4; step < 32; step *= 2)
            for (int i = 0; i < 2; ++i) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], step);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = lane % 4 * 2 + i;
            if (head >= GROUP) continue;
            float* const to = part + head * PART;
#pragma unroll
            for (int n = 0; n < STEPS; ++n)
                to[16 * n + lane / 4] = out[n][i], to[16 * n + lane / 4 + 8] = out[n][i + 2];
            if (lane < 4) to[HEAD_DIM] = max[i], to[HEAD_DIM + 1] = sum[i];
            if (lane / 4 < BLOCKS) zeros[head * BLOCKS + lane / 4] = zero[i];
        }
    }
};

// Each warp takes every (NUM_SPLITS * WARPS)-th tile; a block merges the sums of its warps.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_MULTIPROCESSOR) attend_low_bit_rows(
    const u32* q,         // [batch_size, NUM_KV_HEADS, GROUP, HEAD_DIM], bfloat16
    const char* rows,     // [batch_size, NUM_KV_HEADS, num_tiles] tiles
    const uint4* levels,  // [2], for LEVELS
    float* parts,         // [batch_size, NUM_KV_HEADS, NUM_SPLITS, GROUP, PART], written
    int num_tiles, float scale) {
    extern __shared__ __align__(16) char shared[];  // [WARPS, STAGES] tiles; then each warp's sums
    __shared__ u64 loaded[WARPS][STAGES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int split = blockIdx.x, kv_head = blockIdx.y, slot = blockIdx.z * NUM_KV_HEADS + kv_head;
    if (lane < STAGES) init_barrier(&loaded[warp][lane], ARRIVALS_PER_LOAD);
    fence_barrier_init();
    __syncwarp();
    constexpr int APART = NUM_SPLITS * WARPS;
    const int first = split * WARPS + warp, count = first < num_tiles ? (num_tiles - first + APART - 1) / APART : 0;
    const char* const begin = rows + (static_cast<long long>(slot) * num_tiles + first) * TILE_BYTES;
    char* const ring = shared + warp * STAGES * TILE_BYTES;
    auto load_tile = [&](int i) {
        const int stage = i % STAGES;
        load_by_warp(
            1, TILE_BYTES, shared_address(&loaded[warp][stage]),
            [&](u32) { return shared_address(ring + stage * TILE_BYTES); },
            [&](u32) { return begin + static_cast<long long>(i) * APART * TILE_BYTES; });
    };
    for (int i = 0; i < min(STAGES, count); ++i) load_tile(i);
    uint4 table[2] = {};
    if (LEVELS) table[0] = levels[0], table[1] = levels[1];
    wait_then_let_next_start();
    Attention attention;
    attention.begin(q + slot * GROUP * HEAD_DIM / 2);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const int stage = i % STAGES;
        wait_for(&loaded[warp][stage], i / STAGES % 2);
        attention.add(ring + stage * TILE_BYTES, scale, table);
        __syncwarp();
        if (i + STAGES < count) load_tile(i + STAGES);
    }
    __syncthreads();  // no warp reads a tile any more: their memory is reused
    float* const of_warps = reinterpret_cast<float*>(shared);  // [WARPS, GROUP, PART]
    float* const zeros = of_warps + WARPS * GROUP * PART;      // [WARPS, GROUP, BLOCKS]
    attention.store(of_warps + warp * GROUP * PART, zeros + warp * GROUP * BLOCKS);
    __syncthreads();
    float* const part = parts + (static_cast<long long>(slot) * NUM_SPLITS + split) * GROUP * PART;
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        const int head = i / HEAD_DIM, d = i % HEAD_DIM;
        float top = MINUS_INFINITY, sum = 0, value = 0;
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, of_warps[(w * GROUP + head) * PART + HEAD_DIM]);
        for (int w = 0; w < WARPS; ++w) {
            const float* of = of_warps + (w * GROUP + head) * PART;
            const float weight = top > MINUS_INFINITY ? exp2_approx(of[HEAD_DIM] - top) : 0;
            sum += weight * of[HEAD_DIM + 1];
            value += weight * (of[d] + zeros[(w * GROUP + head) * BLOCKS + d / BLOCK]);
        }
        part[head * PART + d] = value;
        if (d == 0) part[head * PART + HEAD_DIM] = top, part[head * PART + HEAD_DIM + 1] = sum;
    }
}

// Merge the splits. A block for each query, a thread for each dimension.
extern "C" __global__ void __launch_bounds__(THREADS) join_low_bit_parts(
    const float* parts,  // as attend_low_bit_rows writes them
    u16* out             // [batch_size, NUM_KV_HEADS, GROUP, HEAD_DIM], bfloat16
) {
    const int head = blockIdx.x, slot = blockIdx.y, d = threadIdx.x;
    const float* first = parts + (static_cast<long long>(slot) * NUM_SPLITS * GROUP + head) * PART;
    __shared__ float weights[NUM_SPLITS], sums[NUM_SPLITS];
    wait_then_let_next_start();
    float values[NUM_SPLITS < 40 ? NUM_SPLITS : 40];
    constexpr int AHEAD = sizeof(values) / 4;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) values[i] = first[i * GROUP * PART + d];
    for (int i = d; i < NUM_SPLITS; i += THREADS) {
        weights[i] = first[i * GROUP * PART + HEAD_DIM];
        sums[i] = first[i * GROUP * PART + HEAD_DIM + 1];
    }
    __syncthreads();
    float top = MINUS_INFINITY, sum = 0, value = 0;
    for (int i = 0; i < NUM_SPLITS; ++i) top = fmaxf(top, weights[i]);
#pragma unroll
    for (int i = 0; i < NUM_SPLITS; ++i) {
        const float weight = exp2_approx(weights[i] - top);
        sum += weight * sums[i];
        value += weight * (i < AHEAD ? values[i] : first[i * GROUP * PART + d]);
    }
    out[(static_cast<long long>(slot) * GROUP + head) * HEAD_DIM + d] = static_cast<u16>(pack_bf16(value / sum, 0));
}

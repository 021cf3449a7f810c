// Products of rows with weights of 8 or 4 bits, bound by the bandwidth at which the weights are read. `QuantizedWeight`
// defines the layout of the codes, which are decoded to bfloat16 in registers, on their way to the tensor cores. A group's
// scale multiplies its sum, not its weights; but FP4's scales are powers of two and multiply the weights, which have to be
// multiplied by a power of two anyway.
//
// A thread block multiplies tiles of 32 outputs, one after another. It reads 128 bytes of each output at a time, a unit: in
// pieces of 64 bytes, loads would run at half the rate. MULTIPLIERS warps take units in turn and wait for nothing but their
// own asynchronous copies (cp.async), which run on from one tile to the next and begin while the previous kernel is ending
// (programmatic dependent launch): no kernel of a step writes weights. The other warps, the finishers, add up the
// multipliers' sums in the order of the units, so that a sum depends on nothing but its row and its weights, and run the
// epilogue.
//
// A Work says what the tiles are:
//     int num_tiles() const;
//     Weights weights_of(int tile) const;             // the matrix of a tile
//     int number_of(int tile) const;                  // the index of the tile in its matrix
//     const u16* inputs_of(int tile, int row) const;  // bfloat16 inputs of one of ROWS rows; null: there is no such row
//     int row_len;                                    // length of those inputs, a multiple of 8; padded with 0
//
// Compiled for THREADS, FORMAT, GROUP (inputs of a scale; 0: all), ROWS, MULTIPLIERS, STAGES of the copy pipeline, and the
// SQUARES_BLOCK of `workers.model.ops`.
#pragma once

#include "../../../csattn/cuda/warps.cuh"

enum Format { FP8, INT4, FP4 };

constexpr int RUN = 128, PARTS = FORMAT == FP8 ? 2 : 4, PART = RUN / PARTS;  // inputs of a run, codes of a word, inputs of a part
constexpr int UNIT_BYTES = 128, RUNS = FORMAT == FP8 ? 1 : 2;  // of an output in a unit; half a unit is half a run, or one run
constexpr int TILE = 32, SUMS = 2 * 4;                                        // outputs of a tile (two mma); sums of a lane
constexpr int SCALES = GROUP > 0 && GROUP < RUN ? RUN / GROUP : 1;             // of a run
constexpr int PARTS_OF_GROUP = PARTS / SCALES;
constexpr bool ONE_SUM = GROUP == 0 || FORMAT == FP4;  // one sum covers all groups
constexpr int FINISHERS = 2, SUM_BUFFERS = 2;  // warps that finish sums; buffers of sums, which tiles take in turn
static_assert(TILE == SQUARES_BLOCK, "a tile's outputs are a part of the squares");
static_assert(ROWS <= 8 && WARPS == MULTIPLIERS + FINISHERS, "rows are the narrow side of a product");
#if FORMAT == 2
typedef u8 Scale;  // a biased exponent of two
#else
typedef u32 Scale;  // a float; for INT4 its lowest four bits are the zero point
#endif

// Decode two codes of neighbouring inputs of part P, from two words, to bfloat16: 128 + code for INT4, the weight for FP4.
template <int P> __device__ __forceinline__ u32 decode(u32 words, Scale scale) {
    constexpr u32 NO_ZERO = 0x80008000u, SIGNS = 0x80008000u;
    if (FORMAT == INT4) return and_or(words >> 4 * P, 0x000f000fu, 0x43004300u);
    // sign, exponent and mantissa move to bfloat16's; multiplying by a power of two corrects for the exponent's bias
    const u32 sign = (FORMAT == FP8 ? words << 8 * (1 - P) : words << 4 * (3 - P)) & SIGNS;
    if (FORMAT == FP8) return fma_bf16(and_or(P ? words >> 4 : words << 4, 0x07f007f0u, sign), 0x7b807b80u, NO_ZERO);
    constexpr int UP = 6 - 4 * P;
    const u32 power = (scale + 126) * 0x00800080u;  // the group's scale times that correction: an exponent in both halves
    return fma_bf16(and_or(UP > 0 ? words << max(UP, 0) : words >> max(-UP, 0), 0x01c001c0u, sign), power, NO_ZERO);
}

__device__ __forceinline__ float number_of(Scale scale) {
    if (FORMAT == FP4) return 1;  // the weights include it
    return __uint_as_float(FORMAT == INT4 ? scale & ~15u : scale);
}
// INT4's zero point, plus the 128 that decode adds.
__device__ __forceinline__ float zero_of(Scale scale) { return static_cast<float>(128 + (scale & 15)); }

struct Weights {
    const u8* codes;
    const Scale* scales;  // [groups, scales_len]
    u32 row_bytes;        // all rows together have fewer than 2 ** 32 bytes
    int scales_len, num_out, num_in;
    bool gated;  // 2 * num_out rows: gates, then ups; a tile has both of 16 outputs

    __device__ __forceinline__ int num_tiles() const { return (num_out + first_of(1) - 1) / first_of(1); }
    __device__ __forceinline__ int num_units() const { return (num_in + RUNS * RUN - 1) / (RUNS * RUN); }
    // The first output of a tile, and the outputs skipped between its rows 15 and 16.
    __device__ __forceinline__ int first_of(int tile) const { return tile * (gated ? TILE / 2 : TILE); }
    __device__ __forceinline__ int jump() const { return gated ? num_out - TILE / 2 : 0; }
    // The row of weights that is row r of a tile; past the end, the last row repeats.
    __device__ __forceinline__ int row_of(int tile, int r) const {
        if (!gated) return min(tile * TILE + r, num_out - 1);
        return min(tile * (TILE / 2) + r % 16, num_out - 1) + r / 16 * num_out;
    }
    // The scale of group s of a run; past the inputs' end, that of the last group.
    __device__ __forceinline__ const Scale* scale_of(int run, int s, int row) const {
        const int at = run * RUN + s * (RUN / SCALES);
        return scales + (GROUP ? min(at, num_in - 1) / max(GROUP, 1) : 0) * scales_len + row;
    }
};

__device__ __forceinline__ Weights weights_of(const u8* codes, const Scale* scales, long long row_bytes, long long scales_len,
                                              long long num_out, long long num_in, bool gated) {
    return {codes, scales, static_cast<u32>(row_bytes), static_cast<int>(scales_len), static_cast<int>(num_out), static_cast<int>(num_in), gated};
}

// A warp's position among the units: a block's units are dealt round-robin to its multipliers, across tiles.
struct UnitCursor {
    int tile, unit;

    __device__ __forceinline__ void begin(int num_units) {
        tile = blockIdx.x, unit = threadIdx.x / 32;
        settle(num_units);
    }
    __device__ __forceinline__ void next(int num_units) {
        unit += MULTIPLIERS;
        settle(num_units);
    }
    __device__ __forceinline__ void settle(int num_units) {
        for (; unit >= num_units; unit -= num_units) tile += gridDim.x;
    }
};

// A stage of a warp's pipeline: the data of one unit, in shared memory.
struct Stage {
    uint4 codes[TILE][8];            // 16 bytes of an output each, swizzled (index ^ 4 in odd outputs) against bank conflicts
    uint4 x[2][PARTS][ROWS][4];      // eight neighbouring inputs each, by halves of the unit
    u32 scales[RUNS][SCALES][TILE];  // words that contain the scales

    // The lane's codes of a half, for output 8 * j + lane / 4 of the tile.
    __device__ __forceinline__ uint4 codes_of(int half, int j) const {
        const int r = threadIdx.x % 32 / 4;
        return codes[8 * j + r][(half * 4 + threadIdx.x % 4) ^ r % 2 * 4];
    }
};

// The first input of a part of a half of a unit.
__device__ __forceinline__ int first_input(int unit, int half, int part) {
    return FORMAT == FP8 ? unit * RUN + part * PART + half * 32 : (2 * unit + half) * RUN + part * PART;
}

struct Filled {
    int unit;
    const u16* inputs;
};

// A warp's ring buffer of stages. The copies of a unit are one cp.async group; groups follow the order of units.
template <class Work> struct Ring {
    const Work& work;
    Stage* stages;
    Weights weights;    // of the tile being loaded
    const u16* inputs;  // of the row whose pieces this lane copies; null: there is none
    UnitCursor ahead;          // the next unit to load
    int number, to, from, num_tiles, num_units;

    __device__ __forceinline__ Ring(Stage* all, const Work& work_, int num_tiles_, int num_units_)
        : work(work_), stages(all + threadIdx.x / 32 * STAGES), inputs(nullptr), number(0), to(0), from(0), num_tiles(num_tiles_), num_units(num_units_) {
        ahead.begin(num_units);
        find_tile();
    }
    __device__ __forceinline__ void find_tile() {
        if (ahead.tile >= num_tiles) return;
        weights = work.weights_of(ahead.tile), number = work.number_of(ahead.tile);
        inputs = work.inputs_of(ahead.tile, threadIdx.x % 32 / 4 % ROWS);
    }
    // Start the copies of the next unit's codes and scales. Returns the unit, and the lane's inputs, to copy next.
    __device__ __forceinline__ Filled fill_weights() {
        Stage& stage = stages[to];
        to = to + 1 < STAGES ? to + 1 : 0;
        if (ahead.tile >= num_tiles) return {0, nullptr};
        const UnitCursor here = ahead;
        const Filled filled = {here.unit, inputs};
        const int lane = threadIdx.x % 32, first = weights.first_of(number) + lane / 8;
        const u32 in_row = here.unit * UNIT_BYTES + lane % 8 * 16;
        const int left = in_row < weights.row_bytes ? weights.num_out - first : 0;  // the last unit may be half a unit
        u32 at = first * weights.row_bytes + in_row;
        const u32 place = shared_address(&stage.codes[lane / 8][lane % 8 ^ lane / 8 % 2 * 4]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j == 4) at += weights.jump() * weights.row_bytes;
            start_copy(place + j * (4 * 8 * 16), weights.codes + at, (weights.gated ? j % 4 : j) * 4 < left ? 16 : 0);
            at += 4 * weights.row_bytes;
        }
        for (int i = 0; GROUP && i < RUNS; ++i)
            for (int s = 0; s < SCALES; ++s)
                start_copy_of_word(&stage.scales[i][s][lane],
                                   word_with(weights.scale_of(here.unit * RUNS + i, s, weights.row_of(number, lane))));
        ahead.next(num_units);
        if (ahead.tile != here.tile) find_tile();
        return filled;
    }
    // Start the copies of the unit's inputs, and close its copy group. A missing row is not copied: its sums are never read.
    __device__ __forceinline__ void fill_inputs(Stage& stage, const Filled& of) const {
        constexpr int PIECES = 2 * PARTS * ROWS * 4;
#pragma unroll
        for (int i = threadIdx.x % 32; i < (PIECES + 31) / 32 * 32; i += 32) {
            const int part = i / (4 * ROWS) % PARTS, half = i / (4 * ROWS * PARTS);
            const int k = first_input(of.unit, half, part) + i % 4 * 8;
            if (of.inputs && i < PIECES) start_copy(shared_address(&stage.x[0][0][0][0] + i), of.inputs + k, k < work.row_len ? 16 : 0);
        }
        end_copy_group();
    }
    // Start the copies of the first units, for all stages but one. Inputs exist only once the earlier kernels have ended.
    __device__ __forceinline__ void begin() {
        Filled first[STAGES - 1];
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) first[s] = fill_weights();
        wait_for_earlier_kernels();
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) fill_inputs(stages[s], first[s]);
    }
    // Wait for the next unit and return its stage. The stage that was read before is filled with a later unit.
    __device__ __forceinline__ const Stage& next() {
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        Stage& filled = stages[to];
        fill_inputs(filled, fill_weights());
        const Stage& here = stages[from];
        from = from + 1 < STAGES ? from + 1 : 0;
        return here;
    }
    // The aligned word that contains a scale.
    __device__ __forceinline__ static const void* word_with(const Scale* scale) {
        return reinterpret_cast<const void*>(reinterpret_cast<u64>(scale) & ~3ull);
    }
};

typedef float Sums[2][4];  // the accumulators of two mma, of 16 outputs each

__device__ __forceinline__ void clear(Sums& sums) {
    for (int i = 0; i < SUMS; ++i) sums[i / 4][i % 4] = 0;
}

// Products with a group's codes; for INT4 also sums of the group's inputs, which add_to subtracts times the zero points.
struct Products {
    Sums of_codes;
    float of_ones[4];

    __device__ __forceinline__ void begin() {
        clear(of_codes);
        for (int i = 0; i < 4; ++i) of_ones[i] = 0;
    }
    __device__ __forceinline__ void add_inputs(u32 x0, u32 x1) {
        constexpr u32 ONES[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
        if (FORMAT == INT4) multiply_values(of_ones, ONES, x0, x1);
    }
    // sums += scale * products, for the lane's outputs
    __device__ __forceinline__ void add_to(Sums& sums, const Scale (&scales)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float factor = number_of(scales[j]), zero = FORMAT == INT4 ? zero_of(scales[j]) : 0;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float product = of_codes[j / 2][j % 2 * 2 + e];
                float& sum = sums[j / 2][j % 2 * 2 + e];
                sum = fmaf(factor, FORMAT == INT4 ? fmaf(-zero, of_ones[e], product) : product, sum);
            }
        }
    }
};

// A half of a loaded unit.
struct Half {
    const Stage& stage;
    const Weights& weights;
    int number, unit, half;  // indices of the tile in its matrix, of the unit in its tile, and of the half

    // Read the scales of the lane's outputs, for group s of the run.
    __device__ __forceinline__ void take_scales(int s, Scale (&scales)[4]) const {
        const int i = half % RUNS, run = unit * RUNS + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int r = 8 * j + threadIdx.x % 32 / 4;
            u32 word = stage.scales[i][s][r];
            if (FORMAT == FP4) word = word >> 8 * (reinterpret_cast<u64>(weights.scale_of(run, s, weights.row_of(number, r))) & 3) & 0xff;
            scales[j] = static_cast<Scale>(word);
        }
    }
};

// Multiply part P of a half's codes, and the parts after it, by the rows. scales: those of part P - 1's group.
template <int P>
__device__ __forceinline__ void multiply_parts(const uint4 (&codes)[4], const Half& at, Scale (&scales)[4], Products& products, Sums& sums) {
    const int lane = threadIdx.x % 32;
    if (GROUP && P % PARTS_OF_GROUP == 0) at.take_scales(P / PARTS_OF_GROUP, scales);
    const uint4 x = at.stage.x[at.half][P][lane / 4 % ROWS][lane % 4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const u32 x0 = word_of(x, 2 * k), x1 = word_of(x, 2 * k + 1);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            u32 numbers[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) numbers[i] = decode<P>(word_of(codes[2 * m + i % 2], 2 * k + i / 2), scales[2 * m + i % 2]);
            multiply_values(products.of_codes[m], numbers, x0, x1);
        }
        products.add_inputs(x0, x1);
    }
    if (!ONE_SUM && (P + 1) % PARTS_OF_GROUP == 0) {
        products.add_to(sums, scales);
        products.begin();
    }
    if constexpr (P + 1 < PARTS) multiply_parts<P + 1>(codes, at, scales, products, sums);
}

// Multiply the warp's units of a tile by the rows.
template <class Work>
__device__ __forceinline__ void multiply_units(Ring<Work>& ring, UnitCursor& at, Sums& sums) {
    const int tile = at.tile, number = ring.work.number_of(tile);
    const Weights weights = ring.work.weights_of(tile);
    Scale scales[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; GROUP == 0 && j < 4; ++j) scales[j] = *weights.scale_of(0, 0, weights.row_of(number, 8 * j + threadIdx.x % 32 / 4));
    Products products;
    products.begin();
    clear(sums);
    for (; at.tile == tile; at.next(ring.num_units)) {
        const Stage& stage = ring.next();
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            uint4 codes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) codes[j] = stage.codes_of(half, j);
            multiply_parts<0>(codes, Half{stage, weights, number, at.unit, half}, scales, products, sums);
        }
    }
    if (ONE_SUM) products.add_to(sums, scales);
}

// Hands sums from the multipliers to the finishers, double buffered, with two mbarriers for each buffer.
struct Exchange {
    float* sums;        // [SUM_BUFFERS][MULTIPLIERS][SUMS][32]
    u64 *full, *empty;  // mbarriers, [SUM_BUFFERS] each: all multipliers have written; all finishers have read
    int buffer;
    u32 parity;

    __device__ __forceinline__ void next() {
        if (++buffer < SUM_BUFFERS) return;
        buffer = 0, parity ^= 1;
    }
    __device__ __forceinline__ float* of(int warp) const { return sums + (buffer * MULTIPLIERS + warp) * (SUMS * 32) + threadIdx.x % 32; }

    __device__ __forceinline__ void put(const Sums& own_sums) const {
        wait_for(empty + buffer, parity ^ 1);
        float* to = of(threadIdx.x / 32);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) to[i * 32] = own_sums[i / 4][i % 4];
        arrive_warp(full + buffer);
    }
    // Sum four outputs, 8 apart, of the lane's first (e = 0) or second row over the multipliers, starting with warp `first`,
    // which had the tile's first unit.
    __device__ __forceinline__ void take(int e, int first, float (&all)[4]) const {
        wait_for(full + buffer, parity);
#pragma unroll
        for (int j = 0; j < 4; ++j) all[j] = 0;
#pragma unroll
        for (int w = 0; w < MULTIPLIERS; ++w)
#pragma unroll
            for (int j = 0; j < 4; ++j) all[j] += of((first + w) % MULTIPLIERS)[(2 * j + e) * 32];
        arrive_warp(empty + buffer);
    }
    __device__ __forceinline__ static void arrive_warp(u64* barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(barrier);
    }
};

// Bytes of dynamic shared memory that for_tiles uses.
constexpr int TILES_BYTES = MULTIPLIERS * (STAGES * static_cast<int>(sizeof(Stage)) + SUM_BUFFERS * SUMS * 32 * 4);

// Multiply the block's tiles, one after another. The finishers call finish(tile, row, sums, begun, read) with the sums of
// four outputs, 8 apart, of one row: neighbouring lanes have different rows, lanes 4 apart the same row. begun is what
// begin(row) returned once the earlier kernels had ended, read what before(tile, row) returned while weights were loading.
template <class Work, class Begin, class Before, class Finish>
__device__ __forceinline__ void for_tiles(uint4* memory, const Work& work, int num_units, Begin begin, Before before, Finish finish) {
    __shared__ u64 barriers[2][SUM_BUFFERS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_tiles = work.num_tiles();
    if (threadIdx.x < 2 * SUM_BUFFERS) init_barrier(barriers[0] + threadIdx.x, threadIdx.x < SUM_BUFFERS ? MULTIPLIERS : FINISHERS);
    fence_barrier_init();
    __syncthreads();
    Stage* stages = reinterpret_cast<Stage*>(memory);
    Exchange exchange{reinterpret_cast<float*>(stages + MULTIPLIERS * STAGES), barriers[0], barriers[1], 0, 0};
    if (warp < MULTIPLIERS) {
        Ring<Work> ring(stages, work, num_tiles, num_units);
        UnitCursor at = ring.ahead;
        ring.begin();
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, exchange.next()) {
            Sums sums;
            if (at.tile == tile)
                multiply_units(ring, at, sums);
            else
                clear(sums);
            exchange.put(sums);
        }
    } else {
        const int e = warp - MULTIPLIERS, row = lane % 4 * 2 + e;
        wait_for_earlier_kernels();
        const auto begun = begin(row);
        int first = 0;  // the warp that has the tile's first unit
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, first += num_units, exchange.next()) {
            const auto read = before(tile, row);
            if (tile + static_cast<int>(gridDim.x) >= num_tiles) let_next_kernel_start();
            float sums[4];
            exchange.take(e, first, sums);
            finish(tile, row, sums, begun, read);
        }
    }
}

__device__ __forceinline__ float bf16_as_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
__device__ __forceinline__ u16 as_bf16(float x) { return static_cast<u16>(pack_bf16(x, x)); }

enum Activation { NONE, SILU, GELU_TANH, QUICK_GELU, RELU, RELU2, CLAMPED, LIMITED };  // the last two apply to gate and up

__device__ __forceinline__ float activated(float x, int activation) {
    if (activation == NONE) return x;
    if (activation == RELU) return relu(x);
    if (activation == RELU2) return relu(x) * relu(x);
    const float inner = activation == SILU ? x : activation == QUICK_GELU ? 1.702f * x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1 + expf(-inner));
}

__device__ __forceinline__ float gated_by(float gate, float up, int activation) {
    if (activation < CLAMPED) return activated(gate, activation) * up;
    const bool clamped = activation == CLAMPED;
    const float limit = clamped ? 7 : 10;
    gate = gate > limit ? limit : gate;  // NaN stays NaN
    up = up > limit ? limit : up < -limit ? -limit : up;
    return activated(gate, clamped ? QUICK_GELU : SILU) * (clamped ? up + 1 : up);
}

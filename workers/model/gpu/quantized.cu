// Products of a step's rows with weights of 8 or 4 bits, bound by the reading of the weights. `QuantizedWeight` says how
// codes lie: they become bfloat16 numbers in registers, on their way to the tensor cores. A group's scale multiplies its
// sum, not its weights.
//
// A block has tiles of 32 outputs, one after the other. Of each output it reads 64 bytes at a time, a unit; its warps take
// units in turns, and what they have is summed in the order of the warps: a sum depends on nothing but its row and its
// weights. A warp's copies go on behind its back, from one tile to the next, and the first begin while the kernel before
// ends: weights are what no kernel of a step writes.
//
// Compiled for FORMAT, GROUP (inputs of a scale; 0: all), OCTETS of rows, and STAGES of copies.

#include "../../../csattn/cuda/warps.cuh"

enum Format { FP8, INT4, FP4 };

constexpr int RUN = 128, PARTS = FORMAT == FP8 ? 2 : 4, PART = RUN / PARTS;  // inputs of a run, codes of a word, inputs of a part
constexpr int UNIT_BYTES = 64, UNITS_OF_RUN = FORMAT == FP8 ? 2 : 1;
constexpr int TILE = 32;                                   // outputs: two products of 16
constexpr int ROWS = 8 * OCTETS;                           // of the step
constexpr int SCALES = GROUP > 0 && GROUP < RUN ? RUN / GROUP : 1;  // of a unit
constexpr int PARTS_OF_GROUP = PARTS / SCALES;
constexpr int SUMS = 2 * OCTETS * 4;                       // of a lane, in a tile
#if FORMAT == 2
typedef u8 Scale;  // an exponent of two
#else
typedef u32 Scale;  // a float, whose lowest four bits are the zero point in 4 bits
#endif

// Two codes of neighbouring inputs, of one part, from two words: as bfloat16.
template <int P> __device__ __forceinline__ u32 decode(u32 words, u32 less) {
    constexpr u32 ONE = 0x3f803f80u, NO_ZERO = 0x80008000u, SIGNS = 0x80008000u;
    if (FORMAT == INT4) return fma_bf16(and_or(words >> 4 * P, 0x000f000fu, 0x43004300u), ONE, less);  // 128 + code
    // sign, exponent and mantissa come to where bfloat16 has them; the power of two is what that exponent is short of
    const u32 sign = (FORMAT == FP8 ? words << 8 * (1 - P) : words << 4 * (3 - P)) & SIGNS;
    if (FORMAT == FP8) return fma_bf16(and_or(P ? words >> 4 : words << 4, 0x07f007f0u, sign), 0x7b807b80u, NO_ZERO);
    constexpr int UP = 6 - 4 * P;
    return fma_bf16(and_or(UP > 0 ? words << max(UP, 0) : words >> max(-UP, 0), 0x01c001c0u, sign), 0x7e807e80u, NO_ZERO);
}

__device__ __forceinline__ float number_of(Scale scale) {
    if (FORMAT == FP4) return __uint_as_float(static_cast<u32>(scale) << 23);
    return __uint_as_float(FORMAT == INT4 ? scale & ~15u : scale);
}
// What takes the zero point off 128 + code.
__device__ __forceinline__ u32 zero_point(Scale scale) { return FORMAT == INT4 ? 0xc300c300u | (scale & 15) * 0x00010001u : 0; }

struct Weights {
    const u8* codes;
    const Scale* scales;   // [groups, scales_len]
    long long row_bytes, scales_len;
    int num_out, num_in;
    bool gated;  // 2 * num_out rows: gates, then ups; a tile has both of 16 outputs

    __device__ __forceinline__ int num_units() const { return (num_in + RUN - 1) / RUN * UNITS_OF_RUN; }
    // The row of weights that is number r of a tile; of those past the end the last. Eight gates, then their ups.
    __device__ __forceinline__ int row_of(int tile, int r) const {
        if (!gated) return min(tile * TILE + r, num_out - 1);
        return min(tile * (TILE / 2) + r / 16 * 8 + r % 8, num_out - 1) + (r / 8 % 2) * num_out;
    }
    // Of a unit's groups; past the inputs' end the last one's.
    __device__ __forceinline__ Scale scale_of(int unit, int s, int row) const {
        const int at = unit / UNITS_OF_RUN * RUN + s * (RUN / SCALES);
        return scales[(GROUP ? min(at, num_in - 1) / max(GROUP, 1) : 0) * scales_len + row];
    }
};

// A warp's way through units: of each tile those that are its own, then of the block's next tile.
struct Way {
    int tile, unit;

    __device__ __forceinline__ bool goes_on(int num_tiles) const { return tile < num_tiles; }
    __device__ __forceinline__ void next(int num_units) {
        if ((unit += WARPS) < num_units) return;
        tile += gridDim.x, unit = threadIdx.x / 32;
    }
};

// A warp's copies. A lane reads what it has copied itself, so that nobody has to meet.
struct Ring {
    uint4* mine;  // [STAGES][4] of the lane, 32 apart
    Way ahead;
    int to, from, num_tiles, num_units;

    __device__ __forceinline__ Ring(uint4* memory, const Weights& weights, int num_tiles_)
        : mine(memory + threadIdx.x / 32 * (STAGES * 4 * 32) + threadIdx.x % 32), to(0), from(0), num_tiles(num_tiles_),
          num_units(weights.num_units()) {
        const int warp = threadIdx.x / 32;
        ahead = {warp < num_units ? static_cast<int>(blockIdx.x) : num_tiles, warp};
    }
    // Begin the next unit's copies; a group of copies also where there are none.
    __device__ __forceinline__ void fill(const Weights& weights) {
        if (ahead.goes_on(num_tiles)) {
            const u8* unit = weights.codes + ahead.unit * UNIT_BYTES + threadIdx.x % 4 * 16;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                start_copy(mine + (to * 4 + j) * 32, unit + weights.row_of(ahead.tile, 8 * j + threadIdx.x % 32 / 4) * weights.row_bytes);
            ahead.next(num_units);
        }
        end_copy_group();
        to = to + 1 < STAGES ? to + 1 : 0;
    }
    __device__ __forceinline__ void take(uint4 (&codes)[4]) {
        wait_for_copies<STAGES - 1>();
#pragma unroll
        for (int j = 0; j < 4; ++j) codes[j] = mine[(from * 4 + j) * 32];
        from = from + 1 < STAGES ? from + 1 : 0;
    }
};

// The rows of the step.
struct Inputs {
    const u16* x;  // of the block's first row: bfloat16
    int num_rows, num_in;

    // Eight neighbouring inputs; what is not there is 0.
    __device__ __forceinline__ uint4 eight(int row, int k) const {
        if (row >= num_rows || k >= num_in) return make_uint4(0, 0, 0, 0);
        const u16* from = x + static_cast<long long>(row) * num_in + k;
        if (num_in % 8 == 0) return *reinterpret_cast<const uint4*>(from);
        auto two = [&](int i) { return (k + i < num_in ? from[i] : 0u) | (k + i + 1 < num_in ? from[i + 1] : 0u) << 16; };
        return make_uint4(two(0), two(2), two(4), two(6));
    }
};

__device__ __forceinline__ u32 word_of(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }

typedef float Sums[2][OCTETS][4];  // of 16 outputs each, as a product has them

__device__ __forceinline__ void clear(Sums& sums) {
    for (int m = 0; m < 2; ++m)
        for (int o = 0; o < OCTETS; ++o)
            for (int i = 0; i < 4; ++i) sums[m][o][i] = 0;
}

// Of the lane's four outputs, 8 apart, what another lane holds each.
template <class Use> __device__ __forceinline__ void for_outputs(Scale held, Use use) {
#pragma unroll
    for (int j = 0; j < 4; ++j) use(j, static_cast<Scale>(__shfl_sync(ALL_LANES, static_cast<u32>(held), 8 * j + threadIdx.x % 32 / 4)));
}

// sums += scale * products
__device__ __forceinline__ void add_scaled(Sums& sums, const Sums& products, Scale held) {
    for_outputs(held, [&](int j, Scale scale) {
        const float factor = number_of(scale);
#pragma unroll
        for (int o = 0; o < OCTETS; ++o)
#pragma unroll
            for (int e = 0; e < 2; ++e) sums[j / 2][o][j % 2 * 2 + e] = fmaf(factor, products[j / 2][o][j % 2 * 2 + e], sums[j / 2][o][j % 2 * 2 + e]);
    });
}

// One part of a unit's codes times the rows.
template <int P>
__device__ __forceinline__ void multiply_part(const uint4 (&codes)[4], const u32 (&less)[4], const Inputs& inputs, int unit, Sums& products) {
    const int lane = threadIdx.x % 32, k = unit / UNITS_OF_RUN * RUN + P * PART + unit % UNITS_OF_RUN * 32 + lane % 4 * 8;
    uint4 x[OCTETS];
#pragma unroll
    for (int o = 0; o < OCTETS; ++o) x[o] = inputs.eight(8 * o + lane / 4, k);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            u32 numbers[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) numbers[i] = decode<P>(word_of(codes[2 * m + i % 2], 2 * half + i / 2), less[2 * m + i % 2]);
#pragma unroll
            for (int o = 0; o < OCTETS; ++o) multiply_values(products[m][o], numbers, word_of(x[o], 2 * half), word_of(x[o], 2 * half + 1));
        }
}

template <int P>
__device__ __forceinline__ void multiply_parts(const uint4 (&codes)[4], const Scale (&held)[SCALES], const Inputs& inputs, int unit,
                                               Sums& products, Sums& sums) {
    constexpr int S = P / PARTS_OF_GROUP;
    u32 less[4] = {0, 0, 0, 0};
    if (FORMAT == INT4) for_outputs(held[S], [&](int j, Scale scale) { less[j] = zero_point(scale); });
    multiply_part<P>(codes, less, inputs, unit, GROUP ? products : sums);
    if (GROUP && (P + 1) % PARTS_OF_GROUP == 0) {
        add_scaled(sums, products, held[S]);
        clear(products);
    }
    if constexpr (P + 1 < PARTS) multiply_parts<P + 1>(codes, held, inputs, unit, products, sums);
}

// What the warp has of a tile: its units times the rows. coming: the scales of its next unit, of the lane's output.
__device__ __forceinline__ void multiply_units(Ring& ring, Way& at, const Weights& weights, const Inputs& inputs, Scale (&coming)[SCALES],
                                               Sums& sums) {
    const int tile = at.tile;
    Sums products;
    clear(products);
    clear(sums);
    Scale held[SCALES];
    while (at.tile == tile) {
        ring.fill(weights);
        const int unit = at.unit;
        at.next(ring.num_units);
        for (int s = 0; s < SCALES; ++s) held[s] = coming[s];
        if (at.goes_on(ring.num_tiles))
            for (int s = 0; s < SCALES; ++s) coming[s] = weights.scale_of(at.unit, s, weights.row_of(at.tile, threadIdx.x % 32));
        uint4 codes[4];
        ring.take(codes);
        multiply_parts<0>(codes, held, inputs, unit, products, sums);
    }
    if (GROUP) return;
    for (int m = 0; m < 2; ++m)
        for (int o = 0; o < OCTETS; ++o)
            for (int i = 0; i < 4; ++i) products[m][o][i] = sums[m][o][i];
    clear(sums);
    add_scaled(sums, products, held[0]);
}

// The block's tiles, one after the other. finish(tile, octet, row, sums) for the sums of four outputs, 8 apart, of one row, by
// neighbouring lanes: those of the same row are 4 lanes apart. What `before` returns for them is read while weights come.
template <class Before, class Finish>
__device__ __forceinline__ void for_tiles(const Weights& weights, Inputs inputs, int num_tiles, Before before, Finish finish) {
    extern __shared__ uint4 memory[];  // [WARPS][STAGES][4][32] of copies; then [2][WARPS][SUMS][32] sums, in turns of two tiles
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* all_sums = reinterpret_cast<float*>(memory + WARPS * STAGES * 4 * 32);
    Ring ring(memory, weights, num_tiles);
    Way at = ring.ahead;
    Scale coming[SCALES];
    if (at.goes_on(num_tiles))
        for (int s = 0; s < SCALES; ++s) coming[s] = weights.scale_of(at.unit, s, weights.row_of(at.tile, lane));
    for (int s = 0; s < STAGES - 1; ++s) ring.fill(weights);
    wait_for_earlier_kernels();
    // of the threads that finish a tile
    const int octet = warp / 2, row = 8 * octet + lane % 4 * 2 + warp % 2;
    const bool finishes = octet < OCTETS;
    int turn = 0;
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, turn ^= 1) {
        auto read = before(tile, row, finishes);
        Sums sums;
        if (at.tile == tile)
            multiply_units(ring, at, weights, inputs, coming, sums);
        else
            clear(sums);
        float* of_turn = all_sums + turn * (WARPS * SUMS * 32);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) of_turn[(warp * SUMS + i) * 32 + lane] = (&sums[0][0][0])[i];
        if (tile + static_cast<int>(gridDim.x) >= num_tiles) let_next_kernel_start();
        __syncthreads();
        if (!finishes) continue;
        float of_outputs[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int w = 0; w < WARPS; ++w) of_outputs[j] += of_turn[(w * SUMS + (j / 2 * OCTETS + octet) * 4 + j % 2 * 2 + warp % 2) * 32 + lane];
        finish(tile, row, of_outputs, read);
    }
}

__device__ __forceinline__ float bf16_as_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
__device__ __forceinline__ u16 as_bf16(float x) { return static_cast<u16>(pack_bf16(x, x)); }

enum Activation { NONE, SILU, GELU_TANH, QUICK_GELU, RELU, RELU2 };

__device__ __forceinline__ float activated(float x, int activation) {
    if (activation == NONE) return x;
    if (activation == RELU) return relu(x);
    if (activation == RELU2) return relu(x) * relu(x);
    const float inner = activation == SILU ? x : activation == QUICK_GELU ? 1.702f * x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1 + expf(-inner));
}

static_assert(2 * OCTETS <= WARPS, "two warps finish an octet's sums");

// Outputs of rows, which may be divided by their root mean squares, of which `squares` has parts.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) multiply(
    const u16* x,          // [num_rows, num_in] bfloat16
    const float* squares,  // [num_squares, num_rows], or null
    const u8* codes, const Scale* scales, long long row_bytes, long long scales_len,  // `Weights`
    const u16* bias,  // [num_out (* 2 where gated)] bfloat16, or null
    void* out,        // [num_rows, num_out] bfloat16 or float
    long long out_is_float, long long num_rows, long long num_out, long long num_in, long long num_squares, double eps,
    long long gated,  // out = activated gate * up
    long long activation
) {
    __shared__ float factors[ROWS];
    const int first = blockIdx.y * ROWS, rows_here = min(ROWS, static_cast<int>(num_rows) - first), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Weights weights{codes, scales, row_bytes, scales_len, static_cast<int>(num_out), static_cast<int>(num_in), gated != 0};
    const int of_tile = gated ? TILE / 2 : TILE, num_tiles = (weights.num_out + of_tile - 1) / of_tile;
    bool first_tile = true;
    auto before = [&](int tile, int row, bool finishes) {
        if (first_tile && squares)  // others read them when all threads have met
            for (int r = warp; r < rows_here; r += WARPS) {
                float sum = 0;
                for (int s = lane; s < num_squares; s += 32) sum += squares[s * num_rows + first + r];
                sum = sum_over_warp(sum);
                if (lane == 0) factors[r] = 1 / sqrtf(sum / static_cast<float>(num_in) + static_cast<float>(eps));
            }
        first_tile = false;
        float4 biases = make_float4(0, 0, 0, 0);
        if (bias && finishes) {
            const int r = lane / 4;
            biases = make_float4(bf16_as_float(bias[weights.row_of(tile, r)]), bf16_as_float(bias[weights.row_of(tile, r + 8)]),
                                 bf16_as_float(bias[weights.row_of(tile, r + 16)]), bf16_as_float(bias[weights.row_of(tile, r + 24)]));
        }
        return biases;
    };
    for_tiles(weights, Inputs{x + static_cast<long long>(first) * num_in, rows_here, weights.num_in}, num_tiles, before,
              [&](int tile, int row, float (&sums)[4], const float4& biases) {
                  if (row >= rows_here) return;
                  const float factor = squares ? factors[row] : 1;
                  const float with_bias[4] = {sums[0] * factor + biases.x, sums[1] * factor + biases.y, sums[2] * factor + biases.z,
                                              sums[3] * factor + biases.w};
                  auto store = [&](int n, float value) {
                      const long long at = (first + row) * num_out + n;
                      if (n >= num_out) return;
                      if (out_is_float)
                          static_cast<float*>(out)[at] = value;
                      else
                          static_cast<u16*>(out)[at] = as_bf16(value);
                  };
                  const int r = lane / 4;
#pragma unroll
                  for (int j = 0; j < 4; ++j) {
                      if (gated && j % 2) continue;
                      const float value = activated(with_bias[j], static_cast<int>(activation));
                      if (gated)
                          store(tile * (TILE / 2) + j / 2 * 8 + r, value * with_bias[(j + 1) % 4]);
                      else
                          store(tile * TILE + 8 * j + r, value);
                  }
              });
}

// The residual stream plus outputs times a multiplier, and what those who read it next want: see `workers.model.ops.Stream`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) multiply_and_add(
    const u16* x,  // [num_rows, num_in] bfloat16
    const u8* codes, const Scale* scales, long long row_bytes, long long scales_len,  // `Weights`
    const u16* bias,          // [num_out] bfloat16, or null
    u16* hidden,              // [num_rows, num_out] bfloat16: added to
    const float* norm,        // [num_out], of the norm that reads it next, or null
    u16* scaled,              // [num_rows, num_out] <- hidden * norm
    const float* norm_ahead,  // likewise of the layer after it, or null: not wanted
    u16* scaled_ahead,
    float* squares,  // [tiles, num_rows] <- sums of hidden² over the outputs of a tile
    long long num_rows, long long num_out, long long num_in, double multiplier
) {
    const int first = blockIdx.y * ROWS, rows_here = min(ROWS, static_cast<int>(num_rows) - first), r = threadIdx.x % 32 / 4;
    const Weights weights{codes, scales, row_bytes, scales_len, static_cast<int>(num_out), static_cast<int>(num_in), false};
    const int num_tiles = (weights.num_out + TILE - 1) / TILE;
    struct Read {
        float hidden[4], bias[4], norm[4], ahead[4];
    };
    auto before = [&](int tile, int row, bool finishes) {
        Read read;
        if (!finishes || row >= rows_here) return read;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int n = weights.row_of(tile, 8 * j + r);
            read.hidden[j] = bf16_as_float(hidden[(first + row) * num_out + n]);
            read.bias[j] = bias ? bf16_as_float(bias[n]) : 0;
            read.norm[j] = norm ? norm[n] : 1;
            read.ahead[j] = norm_ahead ? norm_ahead[n] : 1;
        }
        return read;
    };
    for_tiles(weights, Inputs{x + static_cast<long long>(first) * num_in, rows_here, weights.num_in}, num_tiles, before,
              [&](int tile, int row, float (&sums)[4], const Read& read) {
                  float square = 0;
#pragma unroll
                  for (int j = 0; j < 4; ++j) {
                      const int n = tile * TILE + 8 * j + r;
                      if (row >= rows_here || n >= num_out) continue;
                      const u16 bits = as_bf16(fmaf(static_cast<float>(multiplier), sums[j] + read.bias[j], read.hidden[j]));
                      const float value = bf16_as_float(bits);
                      const long long at = (first + row) * num_out + n;
                      hidden[at] = bits;
                      scaled[at] = as_bf16(value * read.norm[j]);
                      if (norm_ahead) scaled_ahead[at] = as_bf16(value * read.ahead[j]);
                      square += value * value;
                  }
                  for (int step = 4; step < 32; step <<= 1) square += __shfl_xor_sync(ALL_LANES, square, step);
                  if (r == 0 && row < rows_here) squares[tile * num_rows + first + row] = square;
              });
}

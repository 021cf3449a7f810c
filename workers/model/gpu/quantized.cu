// Products of a step's rows with a matrix of 8 or 4 bits: see `quantized.cuh`.

#include "quantized.cuh"

// The Work of all rows of a step and all tiles of one matrix.
struct WholeStep {
    const Weights& weights;
    const u16* x;
    int row_len, num_rows;

    __device__ __forceinline__ int num_tiles() const { return weights.num_tiles(); }
    __device__ __forceinline__ const Weights& weights_of(int tile) const { return weights; }
    __device__ __forceinline__ int number_of(int tile) const { return tile; }
    __device__ __forceinline__ const u16* inputs_of(int tile, int row) const { return row < num_rows ? x + row * row_len : nullptr; }
};

// out = activation(x @ weights.T + bias), or activation(gate) * up if gated. If squares is given, each row's product is
// divided by its root mean square first.
extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply(
    const u16* x,          // [num_rows, row_len] bfloat16, 0 from num_in on
    long long row_len,     // a multiple of 8
    const float* squares,  // [num_squares, num_rows]: partial sums of the rows' squares, or null
    const u8* codes, const Scale* scales, long long row_bytes, long long scales_len,  // `Weights`
    const u16* bias,  // [num_out (* 2 if gated)] bfloat16, or null
    void* out,        // [num_rows, num_out] bfloat16 or float
    long long out_is_float, long long num_rows, long long num_out, long long num_in, long long num_squares, double eps,
    long long gated,  // out = activation(gate) * up
    long long activation
) {
    extern __shared__ uint4 memory[];
    const int lane = threadIdx.x % 32;
    const Weights weights = weights_of(codes, scales, row_bytes, scales_len, num_out, num_in, gated != 0);
    auto factor_of = [&](int row) {  // the warp computes the factors of its four rows, those of neighbouring lanes
        float factor = 1;
        for (int k = 0; squares && k < 4; ++k) {
            const int r = row + (k - lane % 4) * 2;
            float sum = 0;
            for (int s = lane; r < num_rows && s < num_squares; s += 32) sum += squares[s * num_rows + r];
            sum = sum_over_warp(sum);
            if (k == lane % 4) factor = 1 / sqrtf(sum / static_cast<float>(num_in) + static_cast<float>(eps));
        }
        return factor;
    };
    auto biases_of = [&](int tile, int row) {
        if (!bias) return make_float4(0, 0, 0, 0);
        const int r = lane / 4;
        return make_float4(bf16_as_float(bias[weights.row_of(tile, r)]), bf16_as_float(bias[weights.row_of(tile, r + 8)]),
                           bf16_as_float(bias[weights.row_of(tile, r + 16)]), bf16_as_float(bias[weights.row_of(tile, r + 24)]));
    };
    for_tiles(memory, WholeStep{weights, x, static_cast<int>(row_len), static_cast<int>(num_rows)}, weights.num_units(), factor_of, biases_of,
              [&](int tile, int row, float (&sums)[4], float factor, const float4& biases) {
                  if (row >= num_rows) return;
                  const float with_bias[4] = {sums[0] * factor + biases.x, sums[1] * factor + biases.y, sums[2] * factor + biases.z,
                                              sums[3] * factor + biases.w};
                  auto store = [&](int n, float value) {
                      const long long at = row * num_out + n;
                      if (n >= num_out) return;
                      if (out_is_float)
                          static_cast<float*>(out)[at] = value;
                      else
                          static_cast<u16*>(out)[at] = as_bf16(value);
                  };
                  const int r = lane / 4;
#pragma unroll
                  for (int j = 0; j < 4; ++j) {
                      if (gated && j >= 2) continue;
                      const int kind = static_cast<int>(activation);
                      if (gated)
                          store(tile * (TILE / 2) + 8 * j + r, gated_by(with_bias[j], with_bias[(j + 2) % 4], kind));
                      else
                          store(tile * TILE + 8 * j + r, activated(with_bias[j], kind));
                  }
              });
}

// Add multiplier * (x @ weights.T + bias) to the residual stream, and prepare the stream for its next readers: see
// `workers.model.ops.Stream`.
extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_and_add(
    const u16* x,       // [num_rows, row_len] bfloat16, 0 from num_in on
    long long row_len,  // a multiple of 8
    const u8* codes, const Scale* scales, long long row_bytes, long long scales_len,  // `Weights`
    const u16* bias,          // [num_out] bfloat16, or null
    u16* hidden,              // [num_rows, num_out] bfloat16: added to
    const float* norm,        // [num_out]: weight of the norm that reads it next, or null
    u16* scaled,              // [num_rows, num_out] <- hidden * norm
    const float* norm_ahead,  // [num_out]: of the layer after, or null: scaled_ahead is not written
    u16* scaled_ahead,        // [num_rows, num_out] <- hidden * norm_ahead
    float* squares,  // [tiles, num_rows] <- sums of hidden² over the outputs of a tile
    long long num_rows, long long num_out, long long num_in, double multiplier
) {
    extern __shared__ uint4 memory[];
    const int r = threadIdx.x % 32 / 4;
    const Weights weights = weights_of(codes, scales, row_bytes, scales_len, num_out, num_in, false);
    struct Read {
        float hidden[4], bias[4], norm[4], ahead[4];
    };
    auto before = [&](int tile, int row) {
        Read read = {};
        if (row >= num_rows) return read;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int n = weights.row_of(tile, 8 * j + r);
            read.hidden[j] = bf16_as_float(hidden[row * num_out + n]);
            read.bias[j] = bias ? bf16_as_float(bias[n]) : 0;
            read.norm[j] = norm ? norm[n] : 1;
            read.ahead[j] = norm_ahead ? norm_ahead[n] : 1;
        }
        return read;
    };
    for_tiles(memory, WholeStep{weights, x, static_cast<int>(row_len), static_cast<int>(num_rows)}, weights.num_units(), [](int row) { return 0; }, before,
              [&](int tile, int row, float (&sums)[4], int begun, const Read& read) {
                  float square = 0;
#pragma unroll
                  for (int j = 0; j < 4; ++j) {
                      const int n = tile * TILE + 8 * j + r;
                      if (row >= num_rows || n >= num_out) continue;
                      const u16 bits = as_bf16(fmaf(static_cast<float>(multiplier), sums[j] + read.bias[j], read.hidden[j]));
                      const float value = bf16_as_float(bits);
                      const long long at = row * num_out + n;
                      hidden[at] = bits;
                      scaled[at] = as_bf16(value * read.norm[j]);
                      if (norm_ahead) scaled_ahead[at] = as_bf16(value * read.ahead[j]);
                      square += value * value;
                  }
                  for (int step = 4; step < 32; step <<= 1) square += __shfl_xor_sync(ALL_LANES, square, step);
                  if (r == 0 && row < num_rows) squares[tile * num_rows + row] = square;
              });
}

// Products of a step's rows with the experts chosen for them, in 8 or 4 bits: see `quantized.cuh`.
//
// Pairs of a row and an expert are sorted by expert. Up to ROWS pairs of one expert form a bundle, which is multiplied by all
// tiles of that expert's matrix: its weights are read once for up to ROWS rows.
//
// Compiled also for MAX_PAIRS, and MAX_STEP_ROWS, the most rows of a step.

#include "quantized.cuh"

constexpr u16 STARTS = 0x8000;  // flag of a pair with which a bundle begins

static_assert(MAX_PAIRS < STARTS, "a pair's number leaves one bit");

// The step's pairs, sorted into bundles, in shared memory.
struct Bundles {
    u16 experts[MAX_PAIRS];      // of each pair, in the order of rows
    u16 pairs[MAX_PAIRS];        // pairs sorted by expert, with the flag STARTS
    u16 starts[MAX_PAIRS + 1];   // where bundles begin in `pairs`; then the end of the last one
    int num;                      // of bundles

    __device__ __forceinline__ int size_of(int bundle) const { return starts[bundle + 1] - starts[bundle]; }
    __device__ __forceinline__ int pair_of(int bundle, int i) const { return pairs[starts[bundle] + i] & ~STARTS; }
    __device__ __forceinline__ int expert_of(int bundle) const { return experts[pair_of(bundle, 0)]; }

    // Sort the pairs by expert, stably. Called by the whole block.
    __device__ __forceinline__ void find(const int* chosen, int num_pairs) {
        for (int p = threadIdx.x; p < num_pairs; p += THREADS) experts[p] = static_cast<u16>(chosen[p]);
        __syncthreads();
        for (int p = threadIdx.x; p < num_pairs; p += THREADS) {
            const u16 own = experts[p];
            int place = 0, rank = 0;
            for (int other = 0; other < num_pairs; ++other) {
                const bool is_before = experts[other] == own && other < p;
                rank += is_before;
                place += is_before || experts[other] < own;
            }
            pairs[place] = static_cast<u16>(p) | (rank % ROWS == 0 ? STARTS : 0);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            int count = 0;
            for (int first = 0; first < num_pairs; first += 32) {
                const int at = first + threadIdx.x;
                const bool is_start = at < num_pairs && pairs[at] & STARTS;
                const u32 all = __ballot_sync(ALL_LANES, is_start);
                if (is_start) starts[count + lanes_before(all, threadIdx.x)] = static_cast<u16>(at);
                count += __popc(all);
            }
            if (threadIdx.x == 0) starts[count] = static_cast<u16>(num_pairs), num = count;
        }
        __syncthreads();
    }
};

// The Work of all bundles: each has the tiles of its expert's matrix.
struct ExpertTiles {
    const Bundles& bundles;
    const Weights& first;  // of expert 0
    const u16* x;
    int row_len, pairs_of_input, tiles_of_bundle;

    __device__ __forceinline__ int num_tiles() const { return bundles.num * tiles_of_bundle; }
    __device__ __forceinline__ int bundle_of(int tile) const { return tile / tiles_of_bundle; }
    __device__ __forceinline__ int number_of(int tile) const { return tile % tiles_of_bundle; }
    __device__ __forceinline__ Weights weights_of(int tile) const {
        Weights weights = first;
        const int rows = bundles.expert_of(bundle_of(tile)) * (first.gated ? 2 : 1) * first.num_out;
        weights.codes += static_cast<u64>(rows) * first.row_bytes;
        weights.scales += rows;
        return weights;
    }
    // The pair that is a row of the tile's bundle; -1: there is none.
    __device__ __forceinline__ int pair_of(int tile, int row) const {
        const int bundle = bundle_of(tile);
        return row < bundles.size_of(bundle) ? bundles.pair_of(bundle, row) : -1;
    }
    __device__ __forceinline__ const u16* inputs_of(int tile, int row) const {
        const int pair = pair_of(tile, row);
        return pair < 0 ? nullptr : x + static_cast<long long>(pair / pairs_of_input) * row_len;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_experts(
    const u16* x,              // [num_pairs / pairs_of_input, row_len] bfloat16, 0 from num_in on
    long long row_len,         // a multiple of 8
    long long pairs_of_input,  // pairs that share an input: all of a row's, or 1
    const float* squares,      // [num_squares, num_rows] as in `multiply`, or null; chosen_early requires null
    const u8* codes, const Scale* scales, long long row_bytes, long long scales_len,  // `Weights` of all experts, concatenated
    const u16* bias,           // [num_experts, num_out (* 2 if gated)] bfloat16, or null
    const int* chosen,         // [num_pairs]: each pair's expert
    long long chosen_early,    // the previous kernel has waited for the writer of chosen: load weights while it is ending
    const float* in_shares,    // [num_pairs]: factors of inputs, or null
    const float* out_shares,   // [num_pairs]: factors of outputs, or null
    u16* out,                  // [num_pairs, num_out] bfloat16
    long long num_pairs, long long num_out, long long num_in, long long num_squares, double eps,
    long long gated,           // out = activation(gate) * up; else activation(x @ weights.T + bias)
    long long activation
) {
    extern __shared__ uint4 memory[];
    __shared__ float factors[MAX_STEP_ROWS];  // inverse root mean squares of rows
    Bundles& bundles = *reinterpret_cast<Bundles*>(reinterpret_cast<u8*>(memory) + TILES_BYTES);
    const int lane = threadIdx.x % 32, num_rows = static_cast<int>(num_pairs / pairs_of_input);
    const Weights first = weights_of(codes, scales, row_bytes, scales_len, num_out, num_in, gated != 0);
    if (!chosen_early) wait_for_earlier_kernels();
    for (int row = threadIdx.x / 32; squares && row < num_rows; row += WARPS) {
        float sum = 0;
        for (int s = lane; s < num_squares; s += 32) sum += squares[s * num_rows + row];
        sum = sum_over_warp(sum);
        if (lane == 0) factors[row] = 1 / sqrtf(sum / static_cast<float>(num_in) + static_cast<float>(eps));
    }
    bundles.find(chosen, static_cast<int>(num_pairs));
    const ExpertTiles tiles{bundles, first, x, static_cast<int>(row_len), static_cast<int>(pairs_of_input), first.num_tiles()};
    struct Read {
        int pair;
        float in_factor, out_factor, bias[4];
    };
    auto before = [&](int tile, int row) {
        Read read = {tiles.pair_of(tile, row), 1, 1};
        if (read.pair < 0) return read;
        if (squares) read.in_factor = factors[read.pair / pairs_of_input];
        if (in_shares) read.in_factor *= in_shares[read.pair];
        if (out_shares) read.out_factor = out_shares[read.pair];
        const u16* biases = bias + static_cast<long long>(bundles.experts[read.pair]) * (gated ? 2 : 1) * num_out;
        for (int j = 0; bias && j < 4; ++j) read.bias[j] = bf16_as_float(biases[first.row_of(tiles.number_of(tile), 8 * j + lane / 4)]);
        return read;
    };
    for_tiles(memory, tiles, first.num_units(), [](int row) { return 0; }, before, [&](int tile, int row, float (&sums)[4], int begun, const Read& read) {
        if (read.pair < 0) return;
        float values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = sums[j] * read.in_factor + read.bias[j];
        const int n = first.first_of(tiles.number_of(tile)) + lane / 4;
        u16* to = out + read.pair * num_out + n;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (n + 8 * j >= num_out || (gated && j >= 2)) continue;
            const int kind = static_cast<int>(activation);
            const float value = gated ? gated_by(values[j], values[(j + 2) % 4], kind) : activated(values[j], kind);
            to[8 * j] = as_bf16(value * read.out_factor);
        }
    });
}

// Gathers listed rows from any memory that the device can address, such as pinned host memory, into device slots.
//
// Compiled for THREADS, ROW_BYTES (a multiple of 16), MAX_LISTS, IN_FLIGHT (loads that a thread issues before its first
// store).

#include "../csattn/cuda/warps.cuh"

constexpr unsigned kPieces = ROW_BYTES / 16;  // 16-byte pieces of a row; consecutive lanes copy consecutive pieces
constexpr unsigned kTile = 32 * IN_FLIGHT;  // pieces that a warp has in flight

// Exclusive prefix sum of the lists' lengths: first[i] is the number of rows in lists before i. Called by one warp.
__device__ void sum_up_counts(const int* counts, unsigned num_lists, unsigned* first) {
    const unsigned lane = threadIdx.x % 32;
    unsigned before = 0;
    for (unsigned base = 0; base < num_lists; base += 32) {
        const unsigned list = base + lane;
        const unsigned sum = sum_up_to_lane(list < num_lists ? counts[list] : 0);
        if (list < num_lists) first[list + 1] = before + sum;
        before += __shfl_sync(ALL_LANES, sum, 31);
    }
    if (lane == 0) first[0] = 0;
}

// For each list and i < counts[list], copies row from_rows[list][i] at from[list] to row to_rows[list][i] at to[list].
extern "C" __global__ void __launch_bounds__(THREADS) gather_rows(
    const int* __restrict__ counts,                 // [num_lists]
    const unsigned long long* __restrict__ from,    // [num_lists] address of row 0
    const unsigned long long* __restrict__ to,      // [num_lists] address of row 0
    const int* __restrict__ from_rows,              // [num_lists, capacity]
    const int* __restrict__ to_rows,                // [num_lists, capacity]
    long long num_lists, long long capacity) {
    __shared__ unsigned first[MAX_LISTS + 1];
    wait_then_let_next_start();
    if (threadIdx.x < 32) sum_up_counts(counts, num_lists, first);
    __syncthreads();

    const u64 num_pieces = (u64)first[num_lists] * kPieces;
    const unsigned warp = blockIdx.x * WARPS + threadIdx.x / 32;
    unsigned list = 0;  // only increases, because a thread takes its pieces in ascending order
    for (u64 tile = warp * kTile; tile < num_pieces; tile += gridDim.x * WARPS * kTile) {
        unsigned long long source[IN_FLIGHT], target[IN_FLIGHT];
        uint4 piece[IN_FLIGHT];
#pragma unroll
        for (unsigned i = 0; i < IN_FLIGHT; ++i) {
            const u64 at = tile + i * 32 + threadIdx.x % 32;
            target[i] = 0;
            if (at >= num_pieces) continue;
            const unsigned row = at / kPieces, offset = at % kPieces * 16;
            while (row >= first[list + 1]) ++list;
            const long long entry = list * capacity + (row - first[list]);
            source[i] = from[list] + (unsigned long long)from_rows[entry] * ROW_BYTES + offset;
            target[i] = to[list] + (unsigned long long)to_rows[entry] * ROW_BYTES + offset;
        }
#pragma unroll
        for (unsigned i = 0; i < IN_FLIGHT; ++i)
            if (target[i]) piece[i] = read_once(source[i]);
#pragma unroll
        for (unsigned i = 0; i < IN_FLIGHT; ++i)
            if (target[i]) write_once(target[i], piece[i]);
    }
}

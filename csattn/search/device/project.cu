// First launch over a sketch: the queries' coordinates in each segment, in octaves, and the unit that they need. Bit for bit as in
// csattn.sketch.reference: sums run in index order, and where the compiler would fuse multiply and add, intrinsics prevent it.
//
// Compiled for MEANS: 2 if a block has shared memory for the products with both mean keys at once, 1 for one after the other.

#include "codes.cuh"

constexpr double LARGEST_MULTIPLIER = 127, SCORE_ROOM = 32700;
constexpr double ROOM = SCORE_ROOM - (7.5 * 8 * FINE + 1.5 * 16 * COARSE) / 2;
constexpr int PAIRS = COORDS / 2;

// The most that a coordinate can add to a score, in octaves.
__device__ __forceinline__ double most_of(float coordinate, int j) {
    return fabs(static_cast<double>(coordinate)) * (j < 8 * FINE ? 7.5 : 1.5);
}

constexpr int ROW_PRODUCTS = HEAD_DIM + 1, ROW_MOST = COORDS + 1;  // padded: neighbouring rows begin in different banks

// LARGEST_EXPONENT + the exponent of the least power of two that is at least a segment's unit: see `reference.required_unit`.
// most: [COORDS].
__device__ __forceinline__ u8 unit_exponent(const float* coordinates, const double* most, double difference) {
    double total = 0;
    float largest = 0;
#pragma unroll 16
    for (int j = 0; j < COORDS; ++j) {
        total += most[j];
        largest = fmaxf(largest, fabsf(coordinates[j]));
    }
    total += fabs(difference);
    const double of_total = total / ROOM, of_largest = static_cast<double>(largest) / LARGEST_MULTIPLIER;
    const double required = of_largest > of_total ? of_largest : of_total;
    if (!(total < 0x1p1000 && required <= static_cast<double>(1 << LARGEST_EXPONENT))) return NO_UNIT;
    const u64 bits = static_cast<u64>(__double_as_longlong(required));
    const int exponent = static_cast<int>(bits >> 52) - 1023 + ((bits & 0xfffffffffffffull) != 0);
    return static_cast<u8>(max(exponent, -LARGEST_EXPONENT) + LARGEST_EXPONENT);
}

// What a block computes from its slot's queries. With the most heads and dimensions it is too large for static shared memory.
struct Projection {
    double products[MEANS * GROUP_SIZE][ROW_PRODUCTS];  // with the mean keys of this segment and of the first, or one of them
    double most[GROUP_SIZE][ROW_MOST];
    float scaled[GROUP_SIZE][HEAD_DIM];  // in octaves
    float projected[GROUP_SIZE][COORDS];
    float mean[GROUP_SIZE][2];  // sums of those products
};

extern "C" __global__ void __launch_bounds__(THREADS) project_queries(
    const QUERY* q,          // [batch_size, num_heads * GROUP_SIZE, HEAD_DIM]
    const Sketch* sketches,  // [num_contexts], of this layer
    const int* context_ids,  // [batch_size], -1: idle
    double octaves,          // softmax_scale * log2(e)
    float* coordinates, float* means, u8* unit_exponents, long long max_segments,  // `Queries`, written
    u32* octave_counts      // [slots, GROUP_SIZE, NUM_OCTAVES], cleared; or null
) {
    // HEAD_DIM rows of COORDS halves, if there is room for them (STAGED), then two mean keys, then `Projection`
    extern __shared__ uint4 memory[];
    const int segment = blockIdx.x, head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_then_let_next_start();
    const Sketch sketch = sketches[context_id];
    const int num_segments = static_cast<int>(sketch.num_segments);
    unit_exponents += slot * GROUP_SIZE * max_segments + segment;
    if (segment >= num_segments) {
        wait_then_let_next_start(sketch.low_bits());
#pragma unroll 1
        for (int g = threadIdx.x; g < GROUP_SIZE; g += THREADS) unit_exponents[g * max_segments] = 0;
        return;
    }
    const long long of_head = head * sketch.num_segments, here = of_head + segment;
    constexpr int TRANSFORM_UNITS = STAGED ? HEAD_DIM * COORDS / 8 : 0;  // of 16 bytes
    Projection& made = *reinterpret_cast<Projection*>(memory + TRANSFORM_UNITS + HEAD_DIM / 2);
    const u16* of_segment_columns = sketch.query_transform + here * (HEAD_DIM * COORDS);
    const uint4* transform = reinterpret_cast<const uint4*>(of_segment_columns);
    const uint4* mean_key = reinterpret_cast<const uint4*>(sketch.key_mean + here * HEAD_DIM);
#pragma unroll 1
    for (int i = threadIdx.x; i < TRANSFORM_UNITS; i += THREADS) start_copy(memory + i, transform + i);
    const uint4* first_mean_key = reinterpret_cast<const uint4*>(sketch.key_mean + of_head * HEAD_DIM);
#pragma unroll 1
    for (int i = threadIdx.x; i < HEAD_DIM / 2; i += THREADS)
        start_copy(memory + TRANSFORM_UNITS + i, i < HEAD_DIM / 4 ? mean_key + i : first_mean_key + i - HEAD_DIM / 4);
    end_copy_group();
    wait_for_copies<0>();
    __syncthreads();
    wait_then_let_next_start(sketch.low_bits());
    const u16* columns = STAGED ? reinterpret_cast<const u16*>(memory) : of_segment_columns;
    const float* mean_keys = reinterpret_cast<const float*>(memory + TRANSFORM_UNITS);
    auto multiply_means = [&](int first) {
#pragma unroll 1
        for (int i = threadIdx.x; i < GROUP_SIZE * HEAD_DIM; i += THREADS) {
            const int g = i / HEAD_DIM, d = i % HEAD_DIM;
            const double wide = as_float(q[static_cast<size_t>(slot) * GROUP_SIZE * HEAD_DIM + i]);
            if (first == 0) made.scaled[g][d] = static_cast<float>(octaves * wide);
#pragma unroll
            for (int k = 0; k < MEANS; ++k) made.products[MEANS * g + k][d] = wide * mean_keys[(first + k) * HEAD_DIM + d];  // exact
        }
        __syncthreads();
    };
    auto add_products = [&](int first) {
#pragma unroll 1
        for (int i = THREADS - 1 - threadIdx.x; i < MEANS * GROUP_SIZE; i += THREADS) {  // first by threads without coordinates
            double sum = 0;
#pragma unroll 16
            for (int d = 0; d < HEAD_DIM; ++d) sum += made.products[i][d];
            made.mean[i / MEANS][first + i % MEANS] = static_cast<float>(octaves * sum);
        }
    };
    multiply_means(0);

    const long long of_segment = (slot * max_segments + segment) * GROUP_SIZE;
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP_SIZE * PAIRS; i += THREADS) {
        const int g = i / PAIRS, j = i % PAIRS * 2;
        float2 both = make_float2(0, 0);
#pragma unroll 16
        for (int d = 0; d < HEAD_DIM; ++d) {
            const u32 halves = *reinterpret_cast<const u32*>(columns + d * COORDS + j);
            both.x = __fadd_rn(both.x, __fmul_rn(made.scaled[g][d], half_as_float(static_cast<u16>(halves))));
            both.y = __fadd_rn(both.y, __fmul_rn(made.scaled[g][d], half_as_float(static_cast<u16>(halves >> 16))));
        }
        made.projected[g][j] = both.x, made.projected[g][j + 1] = both.y;
        made.most[g][j] = most_of(both.x, j), made.most[g][j + 1] = most_of(both.y, j + 1);
        *reinterpret_cast<float2*>(coordinates + (of_segment + g) * COORDS + j) = both;
    }
    add_products(0);
    if (MEANS == 1) {
        __syncthreads();
        multiply_means(1);
        add_products(1);
    }
    if (octave_counts && segment == 0)
#pragma unroll 1
        for (int i = threadIdx.x; i < GROUP_SIZE * NUM_OCTAVES; i += THREADS) octave_counts[slot * GROUP_SIZE * NUM_OCTAVES + i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int g = threadIdx.x; g < GROUP_SIZE; g += THREADS) {
        means[of_segment + g] = made.mean[g][0];
        const double difference = static_cast<double>(made.mean[g][0]) - static_cast<double>(made.mean[g][1]);
        unit_exponents[g * max_segments] = unit_exponent(made.projected[g], made.most[g], difference);
    }
}

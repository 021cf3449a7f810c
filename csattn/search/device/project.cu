// First launches over a sketch: the queries' coordinates in each segment, and what becomes of them in integers. To the bit as
// csattn.sketch.reference: float64 sums in index order, where products are exact.

constexpr int PAIRS = COORDS / 2 + 1;  // of a query: two coordinates; in the end, the mean keys of the segment and of the first
constexpr double LARGEST_MULTIPLIER = 127, SCORE_ROOM = 32700;
constexpr double ROOM = SCORE_ROOM - (15.0 * 8 * FINE + 3.0 * 16 * COARSE) / 2;

// What one segment asks of the unit: it is the greatest of all. reference.integer_query says why.
__device__ __forceinline__ double least_unit(const float* coordinates, double shift) {
    double total = 0, largest = 0;
#pragma unroll 8
    for (int j = 0; j < COORDS; ++j) {
        const double size = fabs(static_cast<double>(coordinates[j]));
        total += size * (j < 8 * FINE ? 15.0 : 3.0);
        largest = size > largest || size != size ? size : largest;
    }
    const double of_total = (total + fabs(shift)) / ROOM, of_largest = largest / LARGEST_MULTIPLIER;
    return of_largest > of_total ? of_largest : of_total;
}

extern "C" __global__ void __launch_bounds__(THREADS) project_queries(
    const QUERY* q,          // [batch_size, num_heads * GROUP_SIZE, HEAD_DIM]
    const Sketch* sketches,  // [num_contexts], of this layer
    const int* context_ids,  // [batch_size], -1: idle
    float* coordinates,      // [slots, max_segments, GROUP_SIZE, COORDS], written
    float* means,            // [slots, max_segments, GROUP_SIZE], written: products with the mean keys
    double* asked,           // likewise: what a segment asks of the unit
    long long max_segments,
    Choice* choices          // [slots], cleared; or null
) {
    extern __shared__ uint4 memory[];  // HEAD_DIM rows of COORDS halves, then two mean keys
    __shared__ double query[GROUP_SIZE][HEAD_DIM];
    __shared__ float projected[GROUP_SIZE][2 * PAIRS];
    const int segment = blockIdx.x, head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_for_earlier();
    const Sketch sketch = sketches[context_id];
    const int num_segments = static_cast<int>(sketch.num_segments);
    if (segment >= num_segments) return wait_for_earlier();
    const long long of_head = head * sketch.num_segments, here = of_head + segment;
    constexpr int TRANSFORM_UNITS = HEAD_DIM * COORDS / 8;  // of 16 bytes
    const uint4* transform = reinterpret_cast<const uint4*>(sketch.query_transform + here * (HEAD_DIM * COORDS));
    const uint4* mean_key = reinterpret_cast<const uint4*>(sketch.key_mean + here * HEAD_DIM);
    for (int i = threadIdx.x; i < TRANSFORM_UNITS; i += THREADS) start_copy(memory + i, transform + i);
    const uint4* first_mean_key = reinterpret_cast<const uint4*>(sketch.key_mean + of_head * HEAD_DIM);
    for (int i = threadIdx.x; i < HEAD_DIM / 2; i += THREADS)
        start_copy(memory + TRANSFORM_UNITS + i, i < HEAD_DIM / 4 ? mean_key + i : first_mean_key + i - HEAD_DIM / 4);
    end_group();
    wait_for_earlier(sketch.low_bits());
    for (int i = threadIdx.x; i < GROUP_SIZE * HEAD_DIM; i += THREADS)
        query[i / HEAD_DIM][i % HEAD_DIM] = as_float(q[static_cast<size_t>(slot) * GROUP_SIZE * HEAD_DIM + i]);
    wait_for_copies<0>();
    __syncthreads();

    const u16* columns = reinterpret_cast<const u16*>(memory);
    const float* mean_keys = reinterpret_cast<const float*>(memory + TRANSFORM_UNITS);
    const long long of_segment = (slot * max_segments + segment) * GROUP_SIZE;
    for (int i = threadIdx.x; i < GROUP_SIZE * PAIRS; i += THREADS) {
        const int g = i / PAIRS, j = i % PAIRS * 2;
        double first = 0, second = 0;
#pragma unroll 8
        for (int d = 0; d < HEAD_DIM; ++d) {
            const u32 both = *reinterpret_cast<const u32*>(columns + d * COORDS + min(j, COORDS - 2));
            const float x = j < COORDS ? half_as_float(static_cast<u16>(both)) : mean_keys[d];
            const float y = j < COORDS ? half_as_float(static_cast<u16>(both >> 16)) : mean_keys[HEAD_DIM + d];
            first = fma(query[g][d], static_cast<double>(x), first);
            second = fma(query[g][d], static_cast<double>(y), second);
        }
        const float2 both = make_float2(static_cast<float>(first), static_cast<float>(second));
        projected[g][j] = both.x, projected[g][j + 1] = both.y;
        if (j < COORDS) *reinterpret_cast<float2*>(coordinates + (of_segment + g) * COORDS + j) = both;
    }
    if (choices) clear_counts(choices[slot], segment, num_segments);
    __syncthreads();
    for (int g = threadIdx.x; g < GROUP_SIZE; g += THREADS) {
        const float mean = projected[g][COORDS], first_mean = projected[g][COORDS + 1];
        means[of_segment + g] = mean;
        asked[of_segment + g] = least_unit(projected[g], static_cast<double>(mean) - static_cast<double>(first_mean));
    }
}

// What is no number asks for nothing.
__device__ __forceinline__ double greater(double greatest, double asked) { return asked > greatest ? asked : greatest; }

// Second launch: the unit is the greatest that is asked for; integers are to the nearest, a half to even.
extern "C" __global__ void __launch_bounds__(THREADS) make_integers(
    const Sketch* sketches, const int* context_ids, double softmax_scale,
    const float* coordinates, const float* means, const double* asked, long long max_segments,  // as project_queries has them
    u32* multipliers, int* offsets, float* slopes  // `Queries`, written
) {
    const int segment = blockIdx.x, head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_for_earlier();
    const int num_segments = static_cast<int>(sketches[context_id].num_segments);
    wait_for_earlier(num_segments);
    if (segment >= num_segments) return;
    const int lane = threadIdx.x % 32;
    const long long of_slot = slot * max_segments * GROUP_SIZE, of_segment = of_slot + segment * GROUP_SIZE;
    for (int g = threadIdx.x / 32; g < GROUP_SIZE; g += WARPS) {
        double unit = 0;
#pragma unroll 4
        for (int other = lane; other < num_segments; other += 32) unit = greater(unit, asked[of_slot + other * GROUP_SIZE + g]);
        for (int step = 1; step < 32; step <<= 1) unit = greater(unit, __shfl_xor_sync(ALL_LANES, unit, step));
        if (!(unit < 1.0 / 0.0)) unit = 0;
        int excess = 0;  // a code u stands for 2 u - largest
        for (int i = lane; i < COORDS / 4; i += 32) {
            const float4 four = *reinterpret_cast<const float4*>(coordinates + (of_segment + g) * COORDS + 4 * i);
            const float each[4] = {four.x, four.y, four.z, four.w};
            u32 bytes = 0;
            for (int k = 0; k < 4; ++k) {
                const int whole = unit > 0 ? static_cast<int>(rint(static_cast<double>(each[k]) / unit)) : 0;
                bytes |= (whole & 0xff) << 8 * k;
                excess += whole * (i < 2 * FINE ? 15 : 3);
            }
            multipliers[(of_segment + g) * (COORDS / 4) + i] = bytes;
        }
        excess = static_cast<int>(__reduce_add_sync(ALL_LANES, static_cast<u32>(excess)));
        if (lane > 0) continue;
        const double shift = static_cast<double>(means[of_segment + g]) - static_cast<double>(means[of_slot + g]);
        offsets[of_segment + g] = SCORE_BITS + (unit > 0 ? static_cast<int>(rint(shift / unit)) - excess : 0);
        if (segment == 0) slopes[slot * GROUP_SIZE + g] = static_cast<float>(softmax_scale * unit * LOG2_E);
    }
}

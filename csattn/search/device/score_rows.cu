// Second launch of a search over rows: sum up the rows that the matches chose. What becomes of the sums is said by its two
// kernels: score_group.cu, score_single.cu.

struct Row {
    u32 offset;  // of the chosen row within a tile of the head
    u32 weight;  // W
};

struct QueryRow {
    Row rows[SUBSPACES];
    u32 total_weight;
    float slope;  // a key's logit, base 2, grows by it with each unit of score
};

// W from the weights, as csattn.search.weights.integer_weights makes them.
__device__ void make_weights(const Match* matches, double softmax_scale, QueryRow* rows) {
    __shared__ double weights[GROUP_SIZE * SUBSPACES];
    if (threadIdx.x < GROUP_SIZE) rows[threadIdx.x].total_weight = 0;
    for (int i = threadIdx.x; i < GROUP_SIZE * SUBSPACES; i += THREADS) weights[i] = matches[i].weight;
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP_SIZE * SUBSPACES; i += THREADS) {
        const int g = i / SUBSPACES, b = i % SUBSPACES;
        double total = 0;
        for (int k = 0; k < SUBSPACES; ++k) total += weights[g * SUBSPACES + k];
        const double unit = total * LARGEST_CODE / (32767 - 1 - LARGEST_CODE * SUBSPACES / 2.0);
        const bool usable = unit > 0 && unit < 1.0 / 0.0;
        const u32 weight = usable ? static_cast<u32>(rint(weights[i] / unit)) : 0;
        rows[g].rows[b] = {(b * CENTROIDS + matches[i].centroid) * TILE_BYTES, weight};
        atomicAdd(&rows[g].total_weight, weight);
        if (b == 0) rows[g].slope = usable ? static_cast<float>(softmax_scale * unit * LOG2_E) : 0.0f;
    }
    __syncthreads();
}

// Add `weight` times the codes of 16 bytes to the sums; `first_key` says which keys each sum holds.
__device__ __forceinline__ void add_codes(u32 (&sums)[SUMS], uint4 codes, u32 weight) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if (SCORE_BITS == 4) {
            sums[4 * w + 0] += (words[w] & 0x000f000fu) * weight;
            sums[4 * w + 1] += ((words[w] >> 8) & 0x000f000fu) * weight;
            sums[4 * w + 2] += ((words[w] >> 4) & 0x000f000fu) * weight;
            sums[4 * w + 3] += ((words[w] >> 12) & 0x000f000fu) * weight;
        } else {
            const u32 biased = words[w] ^ 0x80808080u;
            sums[2 * w + 0] += (biased & 0x00ff00ffu) * weight;
            sums[2 * w + 1] += ((biased >> 8) & 0x00ff00ffu) * weight;
        }
    }
}

// A warp's way through its tiles, STEP_ROWS rows of one tile at a time. Copies run STAGES - 1 steps ahead, into a ring in
// which every lane reads only what it has copied itself.
constexpr int STEP_ROWS = SUBSPACES % 4 == 0 ? 4 : 1;
constexpr int TILE_STEPS = SUBSPACES / STEP_ROWS;
constexpr int STAGES = 3;

struct Stream {
    const u8* tiles;  // of the head, at the lane's column
    const QueryRow* rows;
    uint4* ring;  // [STAGES][STEP_ROWS][32], at the lane's column
    int num_work;  // tiles times query rows

    // Which query row and which of the head's tiles a piece of the block's work is about.
    __device__ __forceinline__ static int row_of(int work) { return work % GROUP_SIZE; }
    __device__ __forceinline__ static int tile_of(int work) { return work / GROUP_SIZE * gridDim.x + blockIdx.x; }

    // Step s of the warp: which work, and which rows of it.
    __device__ __forceinline__ int work_of(int s) const { return threadIdx.x / 32 + s / TILE_STEPS * WARPS; }

    __device__ __forceinline__ void start(int s) const {
        constexpr size_t TILE = static_cast<size_t>(SUBSPACES) * CENTROIDS * TILE_BYTES;
        const int work = work_of(s);
        if (work < num_work) {
            const u8* tile = tiles + tile_of(work) * TILE;
            const Row* chosen = rows[row_of(work)].rows + s % TILE_STEPS * STEP_ROWS;
#pragma unroll
            for (int b = 0; b < STEP_ROWS; ++b)
                start_copy(ring + (s % STAGES * STEP_ROWS + b) * 32, tile + chosen[b].offset);
        }
        end_group();
    }

    __device__ __forceinline__ void add(int s, u32 (&sums)[SUMS]) const {
        const Row* chosen = rows[row_of(work_of(s))].rows + s % TILE_STEPS * STEP_ROWS;
#pragma unroll
        for (int b = 0; b < STEP_ROWS; ++b)
            add_codes(sums, ring[(s % STAGES * STEP_ROWS + b) * 32], chosen[b].weight);
    }
};

// Sum up the block's share of a head's tiles, and hand each one, by its whole warp, to finish(g, tile, sums).
template <typename Finish>
__device__ __forceinline__ void for_each_tile(const void* scores, int num_tiles, const QueryRow* rows, uint4* ring, Finish finish) {
    constexpr size_t HEAD_TILE = static_cast<size_t>(SUBSPACES) * CENTROIDS * TILE_BYTES;
    const int lane = threadIdx.x % 32;
    const int my_tiles = (num_tiles - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x) + 1;
    const Stream stream{static_cast<const u8*>(scores) + blockIdx.y * num_tiles * HEAD_TILE + lane * 16, rows,
                        ring + threadIdx.x / 32 * (STAGES * STEP_ROWS * 32) + lane, my_tiles * GROUP_SIZE};
    for (int s = 0; s < STAGES - 1; ++s) stream.start(s);
    u32 sums[SUMS];
    for (int s = 0; stream.work_of(s) < stream.num_work; ++s) {
        const int work = stream.work_of(s), g = Stream::row_of(work);
        if (s % TILE_STEPS == 0) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] = 0u - rows[g].total_weight * 0x00010001u;
        }
        stream.start(s + STAGES - 1);
        wait_for_copies<STAGES - 1>();
        stream.add(s, sums);
        if (s % TILE_STEPS == TILE_STEPS - 1) finish(g, Stream::tile_of(work), sums);
    }
    wait_for_copies<0>();
}

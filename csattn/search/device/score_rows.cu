// Second launch of a search over rows: sum up the rows that the matches chose. What becomes of the sums is said by its two
// kernels: score_group.cu, score_single.cu.

struct Row {
    u32 offset;  // of the chosen row within a tile of the head
    u32 weight;  // W
};

// Query rows that share an index head go through whole tiles, one after the other: a lane has a column. A single one takes
// several rows at once, so that there is work for all warps, and the lanes share out the keys whose sums they have parts of.
constexpr int ROWS_AT_ONCE = GROUP_SIZE > 1 ? 1 : SUMS / 4;
constexpr int QUERY_ROWS = (SUBSPACES + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;

struct QueryRow {
    Row rows[QUERY_ROWS];  // those beyond SUBSPACES weigh nothing
    u32 total_weight;  // what each key's sum has too much: codes are stored without sign
    float slope;  // a key's logit, base 2, grows by it with each unit of score
};

// A query row's matches and what becomes of them, in two steps: rows can be read as soon as it is known where they lie.
struct Matches {
    double weights[GROUP_SIZE * SUBSPACES];

    __device__ __forceinline__ void read(const Match* matches, QueryRow* rows) {
        if (threadIdx.x < GROUP_SIZE) rows[threadIdx.x].total_weight = 0;
        if (threadIdx.x < QUERY_ROWS - SUBSPACES) rows[0].rows[SUBSPACES + threadIdx.x] = {0, 0};
        for (int i = threadIdx.x; i < GROUP_SIZE * SUBSPACES; i += THREADS) {
            const Match match = matches[i];
            weights[i] = match.weight;
            rows[i / SUBSPACES].rows[i % SUBSPACES].offset = (i % SUBSPACES * CENTROIDS + match.centroid) * TILE_BYTES;
        }
        __syncthreads();
    }

    // W from the weights, as csattn.search.weights.integer_weights makes them.
    __device__ __forceinline__ void weigh(double softmax_scale, QueryRow* rows) const {
        for (int i = threadIdx.x; i < GROUP_SIZE * SUBSPACES; i += THREADS) {
            const int g = i / SUBSPACES, b = i % SUBSPACES;
            double total = 0;
            for (int k = 0; k < SUBSPACES; ++k) total += weights[g * SUBSPACES + k];
            const double unit = total * LARGEST_CODE / (32767 - 1 - LARGEST_CODE * SUBSPACES / 2.0);
            const bool usable = unit > 0 && unit < 1.0 / 0.0;
            const u32 weight = usable ? static_cast<u32>(rint(weights[i] / unit)) : 0;
            rows[g].rows[b].weight = weight;
            atomicAdd(&rows[g].total_weight, weight);
            if (b == 0) rows[g].slope = usable ? static_cast<float>(softmax_scale * unit * LOG2_E) : 0.0f;
        }
        __syncthreads();
    }
};

constexpr int WORD_SUMS = SUMS / 4;

// Bytes 1 and 3 of a word, each as a number of 16 bits.
__device__ __forceinline__ u32 odd_bytes(u32 word) { return __byte_perm(word, 0, 0x4341); }

// Add `weight` times the codes of 16 bytes to mixed sums. A word is multiplied as it is, and again with every part of it
// taken away that another product has by itself: `separate` takes away the rest, modulo 2 ** 32.
__device__ __forceinline__ void add_codes(u32 (&mixed)[SUMS], uint4 codes, u32 weight) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if (SCORE_BITS == 4) {
            const u32 high_halves = words[w] >> 4 & 0x0f0f0f0fu;
            mixed[4 * w + 0] += words[w] * weight;
            mixed[4 * w + 1] += odd_bytes(words[w]) * weight;
            mixed[4 * w + 2] += high_halves * weight;
            mixed[4 * w + 3] += odd_bytes(high_halves) * weight;
        } else {
            const u32 biased = words[w] ^ 0x80808080u;
            mixed[2 * w + 0] += biased * weight;
            mixed[2 * w + 1] += odd_bytes(biased) * weight;
        }
    }
}

// From the mixed sums of some words to sums; `first_key` says which keys each of them holds.
template <int WORDS> __device__ __forceinline__ void separate(u32* sums) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        u32* of_word = sums + w * WORD_SUMS;
        if (SCORE_BITS == 4) {
            of_word[2] -= of_word[3] << 8;
            of_word[0] -= (of_word[1] << 8) + (of_word[2] << 4);
            of_word[1] -= of_word[3] << 4;
        } else {
            of_word[0] -= of_word[1] << 8;
        }
    }
}

// A warp's way through its pieces of tiles. The lanes of a warp read ROWS_AT_ONCE rows of a piece at a time, as many columns
// of each as there are left; in the end every lane has sums of its own rows. Copies run STAGES - 1 steps ahead, into a ring
// in which every lane reads only what it has copied itself.
constexpr int COLUMNS_AT_ONCE = 32 / ROWS_AT_ONCE;
constexpr int PIECES = TILE_COLUMNS / COLUMNS_AT_ONCE;  // of a tile
constexpr int COPIES = QUERY_ROWS / ROWS_AT_ONCE;       // of a lane for a piece
constexpr int STEP_COPIES = COPIES % 2 == 0 ? 2 : 1;
constexpr int STEPS = COPIES / STEP_COPIES;
constexpr int STAGES = 5;

struct Stream {
    const u8* tiles;  // of the head, at the lane's column of a tile's first piece
    const QueryRow* rows;
    uint4* ring;   // [STAGES][STEP_COPIES][32], at the lane's column
    int num_work;  // pieces of the block's tiles, times query rows

    // Which query row and which of the head's tiles a piece of the block's work is about.
    __device__ __forceinline__ static int row_of(int work) { return work % GROUP_SIZE; }
    __device__ __forceinline__ static int piece_of(int work) { return work / GROUP_SIZE % PIECES; }
    __device__ __forceinline__ static int tile_of(int work) { return work / GROUP_SIZE / PIECES * gridDim.x + blockIdx.x; }

    // The lane's row of a copy.
    __device__ __forceinline__ const Row& row(int work, int copy) const {
        return rows[row_of(work)].rows[copy * ROWS_AT_ONCE + threadIdx.x % 32 / COLUMNS_AT_ONCE];
    }

    __device__ __forceinline__ void start(int work, int step, int stage) const {
        constexpr size_t TILE = static_cast<size_t>(SUBSPACES) * CENTROIDS * TILE_BYTES;
        if (work < num_work) {
            const u8* piece = tiles + tile_of(work) * TILE + piece_of(work) * COLUMNS_AT_ONCE * 16;
#pragma unroll
            for (int c = 0; c < STEP_COPIES; ++c)
                start_copy(ring + (stage * STEP_COPIES + c) * 32, piece + row(work, step * STEP_COPIES + c).offset);
        }
        end_group();
    }

    __device__ __forceinline__ void add(int work, int step, int stage, u32 (&sums)[SUMS]) const {
#pragma unroll
        for (int c = 0; c < STEP_COPIES; ++c)
            add_codes(sums, ring[(stage * STEP_COPIES + c) * 32], row(work, step * STEP_COPIES + c).weight);
    }
};

// Add up the block's share of a head's tiles, and hand each piece, by its whole warp, to finish(g, tile, column, mixed sums).
// Rows need not be weighed before `weigh` returns.
template <typename Weigh, typename Finish>
__device__ __forceinline__ void for_each_piece(const void* scores, int num_tiles, const QueryRow* rows, uint4* ring, Weigh weigh,
                                               Finish finish) {
    constexpr size_t HEAD_TILE = static_cast<size_t>(SUBSPACES) * CENTROIDS * TILE_BYTES;
    const int lane = threadIdx.x % 32, column = lane % COLUMNS_AT_ONCE;
    const int my_tiles = (num_tiles - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x) + 1;
    const Stream stream{static_cast<const u8*>(scores) + blockIdx.y * num_tiles * HEAD_TILE + column * 16, rows,
                        ring + threadIdx.x / 32 * (STAGES * STEP_COPIES * 32) + lane, my_tiles * PIECES * GROUP_SIZE};
    const int first = threadIdx.x / 32;
    for (int s = 0; s < STAGES - 1; ++s) stream.start(first + s / STEPS * WARPS, s % STEPS, s);
    weigh();
    int stage = 0;
    u32 sums[SUMS];
    for (int work = first; work < stream.num_work; work += WARPS) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0;
#pragma unroll 4
        for (int step = 0; step < STEPS; ++step) {
            const int ahead = step + STAGES - 1;
            stream.start(work + ahead / STEPS * WARPS, ahead % STEPS, stage == 0 ? STAGES - 1 : stage - 1);
            wait_for_copies<STAGES - 1>();
            stream.add(work, step, stage, sums);
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
        finish(Stream::row_of(work), Stream::tile_of(work), Stream::piece_of(work) * COLUMNS_AT_ONCE + column, sums);
    }
    wait_for_copies<0>();
}

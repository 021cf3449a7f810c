// Second launch over lists: the scores that the chosen lists have of each key, summed by key.
//
// A list is a bit for each key of the context, and the scores of those whose bit is set, in the order of keys. A warp has a
// chunk of CHUNK_KEYS keys for one query; a lane has one key of each word of 32, and sums its scores in a register, in the
// order of the subspaces.

#include "list_index.cuh"

constexpr int CHUNK_WORDS = CHUNK_KEYS / 32;
static_assert(CHUNK_WORDS == 32, "a lane loads one");

struct Word {
    u32 listed;  // a bit for each key
    u32 first;   // where the scores of these keys begin in the chunk's
};

// A chunk of a list in shared memory.
struct ListChunk {
    u16 scores[CHUNK_KEYS + SCORE_UNIT];  // from the beginning of the unit that has the first
    Word words[CHUNK_WORDS];
};

// What a warp loads of a list's chunk before it starts to copy the scores.
struct NextChunk {
    u32 listed = 0;  // the lane's word
    int start = 0;   // where the scores begin in their list
    size_t list = 0;
    float weight = 0;

    __device__ __forceinline__ NextChunk() = default;
    __device__ __forceinline__ NextChunk(const ListIndex& index, const Match& match, int head, int b, int chunk, int num_chunks)
        : list(static_cast<size_t>(head * SUBSPACES + b) * CENTROIDS + match.centroid), weight(static_cast<float>(match.weight)) {
        const size_t place = list * num_chunks + chunk;
        listed = __ldg(index.listed + place * CHUNK_WORDS + threadIdx.x % 32);
        start = __ldg(index.starts + place);
    }

    // Start copying the scores. All lanes must have read what was in `to`.
    __device__ __forceinline__ void start_copying(const ListIndex& index, ListChunk& to) const {
        const u32 lane = threadIdx.x % 32, up_to = sum_up_to_lane(__popc(listed)), before = start % SCORE_UNIT;
        to.words[lane] = {listed, before + up_to - __popc(listed)};
        const u32 units = (before + __shfl_sync(ALL_LANES, up_to, 31) + SCORE_UNIT - 1) / SCORE_UNIT;
        const uint4* from = reinterpret_cast<const uint4*>(index.scores + list * index.list_len) + start / SCORE_UNIT;
        for (u32 i = lane; i < units; i += 32) start_copy(reinterpret_cast<uint4*>(to.scores) + i, from + i);
    }
};

// Add a chunk's weighted scores to the lane's sums.
__device__ __forceinline__ void add_chunk(const ListChunk& chunk, float weight, float (&sums)[CHUNK_WORDS]) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < CHUNK_WORDS; ++i) {
        const Word word = chunk.words[i];
        const u16 half = chunk.scores[word.first + lanes_before(word.listed, lane)];  // of the next listed key, if the lane's is not listed
        // two roundings, as the definition has them: product, then sum; adding 0.0 turns a product of -0.0 into 0.0
        const float product = __fadd_rn(__fmul_rn(weight, half_as_float(half)), 0.0f);
        if (word.listed >> lane & 1) sums[i] = __fadd_rn(sums[i], product);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) score_lists(
    const ListIndex* indexes,  // [num_contexts], of this layer
    const int* context_lens, const int* top_ks, const int* context_ids, const int* row_top_ks, long long sink_len,
    long long window_len,
    const Match* matches,  // as match_centroids writes them
    double softmax_scale,
    float* scores,  // [batch_size, num_index_heads, GROUP_SIZE, max_keys], written
    long long max_keys,
    TileStatistics* statistics  // [batch_size, num_index_heads, GROUP_SIZE, max_keys / TILE_KEYS], written
) {
    alignas(16) __shared__ ListChunk chunks[WARPS][2];  // double buffer: one is copied while the other is added up
    ListChunk(&own)[2] = chunks[threadIdx.x / 32];
    const int head = blockIdx.y, slot = blockIdx.z * gridDim.y + head, context_id = context_ids[blockIdx.z];
    if (context_id < 0) return wait_then_let_next_start();
    const ListIndex index = indexes[context_id];
    const Context context = context_of(context_lens, top_ks, context_ids, row_top_ks, sink_len, window_len);
    const int num_chunks = (context.num_keys + CHUNK_KEYS - 1) / CHUNK_KEYS;
    const float slope = static_cast<float>(softmax_scale * LOG2_E);
    wait_then_let_next_start(static_cast<u32>(index.list_len) + num_chunks);
    for (int work = blockIdx.x * WARPS + threadIdx.x / 32; work < num_chunks * GROUP_SIZE; work += gridDim.x * WARPS) {
        const int chunk = work % num_chunks;
        const size_t row = static_cast<size_t>(slot) * GROUP_SIZE + work / num_chunks;
        float sums[CHUNK_WORDS];
#pragma unroll
        for (int i = 0; i < CHUNK_WORDS; ++i) sums[i] = NOT_LISTED;
        auto next = [&](int b) { return NextChunk(index, matches[row * SUBSPACES + b], head, b, chunk, num_chunks); };
        NextChunk here = next(0), coming = SUBSPACES > 1 ? next(1) : NextChunk();
        here.start_copying(index, own[0]);
        end_copy_group();
#pragma unroll 1
        for (int b = 0; b < SUBSPACES; ++b) {
            const NextChunk later = b + 2 < SUBSPACES ? next(b + 2) : NextChunk();
            if (b + 1 < SUBSPACES) coming.start_copying(index, own[(b + 1) % 2]);
            end_copy_group();
            wait_for_copies<1>();
            __syncwarp();
            add_chunk(own[b % 2], here.weight, sums);
            __syncwarp();  // before the next copy overwrites what was read
            here = coming, coming = later;
        }
        const int key = chunk * CHUNK_KEYS + threadIdx.x % 32;
        float* to = scores + row * max_keys + key;
#pragma unroll
        for (int i = 0; i < CHUNK_WORDS; ++i) to[32 * i] = sums[i];
        const TileStatistics tile = tile_statistics(sums, key, slope, context);
        if (threadIdx.x % 32 == 0) statistics[row * (max_keys / TILE_KEYS) + chunk] = tile;
    }
}

// Samples the token after each row of a step, one thread block for each, by radix select instead of sorting. The
// definition is in workers/serving/draw_reference.py. Weights are integers, 2^40 for the most likely token, so that sums
// do not depend on their order. Compiled for THREADS and MAX_TOP.

#include "../../../csattn/cuda/warps.cuh"

constexpr int UNROLL = 8, TILE = UNROLL * THREADS;
constexpr int DIGIT = 11, NUM_BINS = 1 << DIGIT, PLACE_BITS = 31, ID_BITS = 24, KEY_BITS = PLACE_BITS + ID_BITS;
constexpr u64 ALL = ~0ull;
#define INF __int_as_float(0x7f800000)  // NVRTC has no math.h
constexpr float WHOLE = 1099511627776.f, FARTHEST = 28.f;  // 2^40, and above its logarithm: so far below the maximum, weights are 0
constexpr u32 FAR = 1u << PLACE_BITS - 1;  // the first place of logits further below the maximum than Order::near

struct Draw {
    double top_p, at;
    float temperature, min_p;
    float penalty;  // divides logits above 0 of tokens that are repeated, multiplies others
    int row, top_k;  // 0: all
    int num_top;     // -1: how likely the token was is not asked for
    int num_added, added_ids, added;  // how many logits are added to, and offsets in words of their ids, each once, and of the summands
    int repeated, allowed;            // offsets in words of a bit for each token; -1: no token is repeated, and all are allowed
    int unused;
};
struct Score {
    float greatest, total;  // the largest logit, and the sum of e ** (logit - greatest)
    float logit;            // the drawn token's
    int num_top;
    float top_logits[MAX_TOP];
    int top_ids[MAX_TOP];
};

struct Shared {
    u64 bins[NUM_BINS], of_warps[WARPS];
    u64 found, left;
    bool is_whole;
    u32 num_top;
    int drawn, top_ids[MAX_TOP];
    float logit, top_logits[MAX_TOP];
};
__device__ __forceinline__ Shared& shared() {
    __shared__ Shared memory;
    return memory;
}

template <class T, class Join> __device__ __forceinline__ T over_block(T value, Join join) {
    T* scratch = reinterpret_cast<T*>(shared().of_warps);
    for (int step = 16; step > 0; step >>= 1) value = join(value, __shfl_xor_sync(ALL_LANES, value, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
    for (int warp = 1; warp < WARPS; ++warp) value = join(value, scratch[warp]);
    return value;
}
template <class T> __device__ __forceinline__ T sum_over_block(T value) {
    return over_block(value, [](T a, T b) { return a + b; });
}
__device__ __forceinline__ float greatest_of_block(float value) {
    return over_block(value, [](float a, float b) { return fmaxf(a, b); });
}

// Exclusive prefix sum over the block's threads; total: the sum over all of them.
__device__ __forceinline__ u64 weight_before(u64 value, u64& total) {
    u64* of_warps = shared().of_warps;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 up_to = value;
    for (int step = 1; step < 32; step <<= 1) {
        const u64 other = __shfl_up_sync(ALL_LANES, up_to, step);
        if (lane >= step) up_to += other;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = up_to;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (int i = 0; i < WARPS; ++i) {
        if (i < warp) before += of_warps[i];
        total += of_warps[i];
    }
    return before + up_to - value;
}

// Calls use(token id, logit) for a tile of logits, with UNROLL loads at a time. Logits past the end are -inf.
template <class Use> __device__ __forceinline__ void for_tile(const float* logits, int len, int start, Use use) {
    float x[UNROLL];
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
        const int i = start + j * THREADS + threadIdx.x;
        x[j] = i < len ? logits[i] : -INF;
    }
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) use(start + j * THREADS + static_cast<int>(threadIdx.x), x[j]);
}
template <class Use> __device__ __forceinline__ void for_each(const float* logits, int len, Use use) {
    for (int start = 0; start < len; start += TILE) for_tile(logits, len, start, use);
}

// The order of tokens, by ascending keys: the most likely first, of equal ones the lowest id.
struct Order {
    float greatest, near, scale;  // distances from greatest up to near give places linearly, larger ones by their bits

    __device__ u64 key(int id, float logit) const {
        const float off = greatest - logit;
        const u32 place = off <= near ? static_cast<u32>(off * scale) : FAR + (__float_as_uint(off) >> 1);
        return static_cast<u64>(place) << ID_BITS | static_cast<u32>(id);
    }
};
__device__ __forceinline__ Order order_of(const float* logits, int len, float near) {
    float high = -INF, less = -INF;
    for_each(logits, len, [&](int, float x) {
        high = fmaxf(high, x);
        if (x != -INF) less = fmaxf(less, -x);
    });
    high = greatest_of_block(high);
    near = fminf(near, high + greatest_of_block(less));
    return {high, near, near > 0 ? fminf((FAR - 128) / near, 3e38f) : 0.f};
}

// Radix select, by histograms of digits from the highest on: a key such that the amounts of tokens with keys up to it reach
// `wanted`, and without the last of these do not; ALL if no key is enough. amount(logit, key): 0 for tokens that do not count.
template <class T, class Amount>
__device__ u64 last_of(const float* logits, int len, const Order& order, u64 wanted, Amount amount) {
    Shared& s = shared();
    T* bins = reinterpret_cast<T*>(s.bins);
    u64 begun = 0;
    for (int shift = KEY_BITS - DIGIT; shift >= 0; shift -= DIGIT) {
        __syncthreads();
        for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
        if (threadIdx.x == 0) s.found = ALL;
        __syncthreads();
        for_each(logits, len, [&](int id, float x) {
            if (x == -INF) return;
            const u64 key = order.key(id, x);
            if (key >> shift + DIGIT != begun >> shift + DIGIT) return;
            if (const T n = amount(x, key)) atomicAdd(&bins[key >> shift & NUM_BINS - 1], n);
        });
        __syncthreads();
        constexpr int EACH = NUM_BINS / THREADS;
        u64 of_thread = 0, total;
        for (int i = 0; i < EACH; ++i) of_thread += bins[threadIdx.x * EACH + i];
        u64 before = weight_before(of_thread, total);
        for (int i = 0; i < EACH; ++i) {
            const u64 inside = bins[threadIdx.x * EACH + i];
            if (before < wanted && wanted <= before + inside) {
                s.found = threadIdx.x * EACH + i;
                s.left = wanted - before;
                s.is_whole = s.left == inside;
            }
            before += inside;
        }
        __syncthreads();
        if (s.found == ALL) return ALL;
        begun |= s.found << shift;
        if (s.is_whole) return begun | (1ull << shift) - 1;
        wanted = s.left;
    }
    return begun;
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(
    float* all_logits,     // [num_rows, vocab_size], changed as draws ask; -inf: may not be drawn
    long long stride,      // of its rows
    long long vocab_size,  // at most 2^ID_BITS
    const Draw* draws,     // [blocks]
    u32* words,            // arrays that draws have offsets of, changed
    long long* next_ids,   // [num_rows], -1 where there is nothing to draw from; written: the drawn token, or -1
    Score* scores          // [blocks], written for draws that ask
) {
    const Draw draw = draws[blockIdx.x];
    const int len = static_cast<int>(vocab_size);
    float* logits = all_logits + draw.row * stride;
    if (next_ids[draw.row] < 0) return;
    Shared& s = shared();
    Score* score = draw.num_top < 0 ? nullptr : scores + blockIdx.x;
    const int* added_ids = reinterpret_cast<const int*>(words) + draw.added_ids;
    float* added = reinterpret_cast<float*>(words) + draw.added;
    const bool is_changed = draw.num_added || draw.repeated >= 0 || draw.allowed >= 0;
    Order order = order_of(logits, len, is_changed || score ? FARTHEST : FARTHEST * draw.temperature);
    if (score) {
        float total = 0;
        for_each(logits, len, [&](int, float x) { total += expf(x - order.greatest); });
        total = sum_over_block(total);
        if (threadIdx.x == 0) s.num_top = 0;
        if (draw.num_top) {
            const u64 last = last_of<u32>(logits, len, order, draw.num_top, [](float, u64) { return 1u; });
            for_each(logits, len, [&](int id, float x) {
                if (x == -INF || order.key(id, x) > last) return;
                const u32 i = atomicAdd(&s.num_top, 1);
                s.top_logits[i] = x, s.top_ids[i] = id;
            });
        }
        __syncthreads();
        if (threadIdx.x < s.num_top) {
            const float x = s.top_logits[threadIdx.x];
            const int id = s.top_ids[threadIdx.x];
            int rank = 0;
            for (u32 i = 0; i < s.num_top; ++i) rank += s.top_logits[i] > x || (s.top_logits[i] == x && s.top_ids[i] < id);
            score->top_logits[rank] = x, score->top_ids[rank] = id;
        }
        if (threadIdx.x == 0) score->greatest = order.greatest, score->total = total, score->num_top = s.num_top;
    }
    const auto has = [&](int mask, int id) { return words[mask + id / 32] >> id % 32 & 1; };
    const auto with_penalty = [&](float x) { return x > 0 ? x / draw.penalty : x * draw.penalty; };
    if (draw.repeated >= 0) {
        for (int id = threadIdx.x; id < len; id += THREADS)
            if (has(draw.repeated, id)) logits[id] = with_penalty(logits[id]);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < draw.num_added; i += THREADS) {
        if (added_ids[i] >= len) continue;
        const float x = logits[added_ids[i]];
        logits[added_ids[i]] = x + added[i];
        added[i] = x;  // keep the original logit
    }
    if (draw.allowed >= 0) {
        __syncthreads();
        for (int id = threadIdx.x; id < len; id += THREADS)
            if (!has(draw.allowed, id)) logits[id] = -INF;
    }
    if (is_changed || score) {
        __syncthreads();
        order = order_of(logits, len, FARTHEST * draw.temperature);
    }
    if (order.greatest == -INF) {
        if (threadIdx.x == 0) next_ids[draw.row] = -1;
        return;
    }

    u64 last = ALL, least = 1;  // the last key, and the least weight, that may be drawn
    const auto weight = [&](float x, u64 key) -> u64 {
        const float share = expf((x - order.greatest) / draw.temperature);
        const u64 whole = share < draw.min_p || key > last ? 0 : static_cast<u64>(share * WHOLE);
        return whole < least ? 0 : whole;
    };
    const auto total_weight = [&] {
        u64 total = 0;
        for_each(logits, len, [&](int id, float x) { total += weight(x, order.key(id, x)); });
        return sum_over_block(total);
    };
    if (draw.top_k > 1 && draw.top_k < len)
        last = last_of<u32>(logits, len, order, draw.top_k, [](float, u64) { return 1u; });
    if (draw.top_p < 1 && draw.top_k != 1) {
        const double total = static_cast<double>(total_weight());
        least = max(1ull, static_cast<u64>((1 - draw.top_p) * total / len));  // tokens below it sum to less than is left out
        last = min(last, last_of<u64>(logits, len, order, max(1ull, static_cast<u64>(ceil(draw.top_p * total))), weight));
    }

    // inverse transform sampling: the first id up to which the weights sum to more than `at` of their total
    if (threadIdx.x == 0) s.drawn = len;
    __syncthreads();
    if (draw.top_k == 1) {
        for_each(logits, len, [&](int id, float x) {
            if (x == order.greatest) atomicMin(&s.drawn, id);
        });
    } else {
        for (int start = 0; start < len; start += TILE) {
            u64 of_tile = 0;
            for_tile(logits, len, start, [&](int id, float x) { of_tile += weight(x, order.key(id, x)); });
            of_tile = sum_over_block(of_tile);
            if (threadIdx.x == 0) s.bins[start / TILE] = of_tile;
        }
        __syncthreads();
        u64 total = 0;
        for (int start = 0; start < len; start += TILE) total += s.bins[start / TILE];
        if (total == 0) {  // of NaN
            if (threadIdx.x == 0) next_ids[draw.row] = -1;
            return;
        }
        u64 wanted = min(total - 1, static_cast<u64>(draw.at * static_cast<double>(total)));
        int start = 0;
        bool is_found = false;
        while (wanted >= s.bins[start / TILE]) wanted -= s.bins[start / TILE], start += TILE;
        for_tile(logits, len, start, [&](int id, float x) {
            const u64 own = weight(x, order.key(id, x));
            u64 of_row;
            const u64 before = weight_before(own, of_row);
            if (!is_found && before <= wanted && wanted - before < own) s.drawn = id;
            is_found |= wanted < of_row;
            if (!is_found) wanted -= of_row;
        });
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        next_ids[draw.row] = s.drawn;
        s.logit = logits[s.drawn];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < draw.num_added; i += THREADS)
        if (added_ids[i] == s.drawn) s.logit = added[i];
    __syncthreads();
    if (score && threadIdx.x == 0) {  // the original logit, up to rounding if there was a penalty
        const float x = s.logit;
        score->logit = draw.repeated < 0 || !has(draw.repeated, s.drawn) ? x : x > 0 ? x * draw.penalty : x / draw.penalty;
    }
}

// What each key is worth to the group, as bits that order keys: the sum of its shares in the query rows' softmaxes, times
// 2 ** HEADROOM (csattn.search.worth has the same scale); for a single query row, its score. 0: may not be chosen.

constexpr float HEADROOM = 94;
constexpr float LEAST_EXPONENT = HEADROOM - 216;  // of reference.LEAST_SHARE
constexpr u32 NUM_BINS = 2048;
constexpr int UNIT_KEYS = 4;

// Worths from `low` to `last`, counted in NUM_BINS bins of 2 ** shift; the last bin also has what does not fit below it.
struct Range {
    u32 low, last, shift;

    __device__ __forceinline__ bool holds(u32 worth) const { return worth >= low && worth <= last; }

    __device__ __forceinline__ void count(u32 worth, u32* bins) const {
        if (holds(worth)) atomicAdd(&bins[min((worth - low) >> shift, NUM_BINS - 1)], 1u);
    }

    __device__ __forceinline__ void count(uint4 worth, u32* bins) const {
        count(worth.x, bins);
        count(worth.y, bins);
        count(worth.z, bins);
        count(worth.w, bins);
    }
};

// The worths of all keys sum up to the group's size, so the top_k-th is at most group_size / top_k: 32 octaves below that
// are looked at first, in bins of 1/64 octave. single: of a single query row.
__device__ __forceinline__ Range first_range(int top_k, Range single) {
    if (GROUP_SIZE == 1) return single;
    const u32 largest = __float_as_uint(exp2f(HEADROOM) * (1.01f * GROUP_SIZE) / top_k);
    return {((largest >> 17) - (NUM_BINS - 2)) << 17, 0xffffffffu, 17};
}

// The worths of a block's keys, four to a unit, in shared memory or, when they are too many, in global memory.
struct Worths {
    uint4* units;

    // Units are shuffled so that lanes which write every fourth or sixteenth of them meet different banks.
    __device__ __forceinline__ uint4& operator[](int unit) const { return units[unit ^ (unit >> 4 & 3)]; }
};

// worth, with 0 for keys that may not be chosen; key: the first of the four, in the context.
__device__ __forceinline__ uint4 eligible_only(uint4 worth, int key, const Context& context) {
    if (key >= context.sink_end && key + 3 < context.window_start) return worth;
    auto eligible = [&](int k) { return k >= context.sink_end && k < context.window_start; };
    return make_uint4(eligible(key) ? worth.x : 0, eligible(key + 1) ? worth.y : 0, eligible(key + 2) ? worth.z : 0,
                      eligible(key + 3) ? worth.w : 0);
}
